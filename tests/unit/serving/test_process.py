"""The supervised server process: whatever it starts and however it ends, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from autotune.errors import AutotuneError
from autotune.serving import process as process_module
from autotune.serving.process import ServerProcess, free_port

ROOT = Path(__file__).parents[3]
GRACE_S = 0.5

pytestmark = pytest.mark.usefixtures("no_process_left")

WaitUntil = Callable[..., bool]
IsRunning = Callable[[int], bool]

# Ignores the polite signal, leaves the process group, and says so once it has.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"stubborn {os.getpid()}", flush=True)
time.sleep(120)
"""

# Starts the one above twice: as an orphan, whose parent ends at once, and as a child. Each of them
# in a session of its own.
MIDDLE = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
"""
FORKING = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-c", {MIDDLE!r}, {STUBBORN!r}])
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", GRACE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts a Python program as the server; all are stopped at the end."""
    started: list[ServerProcess] = []

    def run(program: str, **env: str) -> ServerProcess:
        server = ServerProcess([sys.executable, "-c", program], tmp_path / "server.log", env)
        started.append(server)
        return server

    yield run
    for server in started:
        server.stop()


def said(server: ServerProcess, wait_until: WaitUntil, pattern: str, count: int = 1) -> list[str]:
    """Wait until the server's log holds the pattern `count` times; return what it captured."""
    assert wait_until(lambda: len(re.findall(pattern, server.log_tail())) >= count, 20)
    return re.findall(pattern, server.log_tail())


# --- stopping ---


def test_stop_ends_the_server_and_what_left_its_group(
    start: Callable[..., ServerProcess], wait_until: WaitUntil, is_running: IsRunning
) -> None:
    server = start(FORKING + "time.sleep(120)")
    pids = [int(pid) for pid in said(server, wait_until, r"stubborn (\d+)", 2)]
    assert server.is_alive
    assert all(is_running(pid) for pid in (server.pid, *pids))

    assert server.stop() == 0

    assert not any(is_running(pid) for pid in (server.pid, *pids))


def test_stop_gives_the_server_time_to_end_by_itself(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    program = """
import signal, sys, time
def end(*_):
    time.sleep(0.2)
    print("goodbye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(120)
"""
    server = start(program)
    said(server, wait_until, "ready")
    began = time.monotonic()
    assert server.stop() == 0
    assert "goodbye" in server.log_tail()
    assert time.monotonic() - began < 5


def test_a_server_that_ignores_the_polite_signal_is_killed(
    start: Callable[..., ServerProcess], wait_until: WaitUntil, is_running: IsRunning
) -> None:
    server = start(STUBBORN)
    said(server, wait_until, "stubborn")
    began = time.monotonic()
    assert server.stop() == 0
    assert not is_running(server.pid)
    assert time.monotonic() - began >= GRACE_S


def test_stop_may_be_called_twice(start: Callable[..., ServerProcess]) -> None:
    server = start("import time; time.sleep(120)")
    assert (server.stop(), server.stop()) == (0, 0)


# --- ending without being asked ---


def test_a_server_that_ended_is_not_alive(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    server = start("print('last words')")
    assert wait_until(lambda: not server.is_alive)
    assert server.log_tail() == "last words\n"
    assert server.stop() == 0
    assert not server.is_alive


def test_a_stopped_server_is_not_alive(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    server = start("import time; time.sleep(120)")
    assert server.is_alive
    server.stop()
    assert wait_until(lambda: not server.is_alive, 1)


def test_what_a_server_leaves_behind_when_it_ends_is_ended_too(
    start: Callable[..., ServerProcess], wait_until: WaitUntil, is_running: IsRunning
) -> None:
    server = start(FORKING + "time.sleep(1)")
    pids = [int(pid) for pid in said(server, wait_until, r"stubborn (\d+)", 2)]
    assert wait_until(lambda: not server.is_alive)
    assert not any(is_running(pid) for pid in pids)


_TUNER = """
import sys, time
from pathlib import Path
from autotune.serving import process
process.GRACE_S = 0.5
server = process.ServerProcess([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {})
print(server.pid, flush=True)
time.sleep(120)
"""


def test_nothing_outlives_a_tuner_that_was_killed(
    tmp_path: Path, wait_until: WaitUntil, is_running: IsRunning
) -> None:
    log = tmp_path / "server.log"
    tuner = subprocess.Popen(
        [sys.executable, "-c", _TUNER, FORKING + "time.sleep(120)", str(log)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    with tuner:
        assert tuner.stdout is not None
        pids.append(int(tuner.stdout.readline()))
        pids.append(psutil.Process(pids[0]).ppid())
        assert wait_until(lambda: log.read_text().count("stubborn") == 2, 20)
        pids += [int(pid) for pid in re.findall(r"stubborn (\d+)", log.read_text())]
        assert all(is_running(pid) for pid in pids)

        tuner.kill()

        try:
            assert wait_until(lambda: not any(is_running(pid) for pid in pids), 15)
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)


def test_the_server_dies_with_a_supervisor_that_was_killed(
    start: Callable[..., ServerProcess], wait_until: WaitUntil, is_running: IsRunning
) -> None:
    server = start(STUBBORN)
    said(server, wait_until, "stubborn")
    os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL)
    assert wait_until(lambda: not is_running(server.pid))
    assert wait_until(lambda: not server.is_alive)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_supervisor_heeds_its_life_line_alone(
    start: Callable[..., ServerProcess],
    wait_until: WaitUntil,
    is_running: IsRunning,
    number: signal.Signals,
) -> None:
    server = start("import time; print('ready', flush=True); time.sleep(120)")
    said(server, wait_until, "ready")
    supervisor_pid = psutil.Process(server.pid).ppid()
    os.kill(supervisor_pid, number)
    time.sleep(0.3)
    assert server.is_alive
    assert is_running(supervisor_pid)


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_server(
    start: Callable[..., ServerProcess],
) -> None:
    # The terminal sends it to the foreground group, which is of the terminal's session.
    server = start("import time; time.sleep(120)")
    assert os.getsid(server.pid) != os.getsid(0)
    assert os.getsid(psutil.Process(server.pid).ppid()) != os.getsid(0)
    assert os.getpgid(server.pid) == server.pid


# --- starting ---


def test_a_command_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="no-such-command: No such file or directory"):
        ServerProcess(["no-such-command", "--port", "1"], tmp_path / "server.log", {})


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("text", encoding="utf-8")
    with pytest.raises(AutotuneError, match=r"plain\.txt: Permission denied"):
        ServerProcess([str(plain)], tmp_path / "server.log", {})


def test_the_server_gets_its_variables_and_no_input(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    program = """
import os, sys
print("color", os.environ["COLOR"], "path" if "PATH" in os.environ else "no path", flush=True)
print("input", repr(sys.stdin.read()), file=sys.stderr, flush=True)
"""
    server = start(program, COLOR="green")
    said(server, wait_until, "input ''")
    assert server.log_tail() == "color green path\ninput ''\n"


def test_only_the_end_of_a_long_log_is_read(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    server = start("print('x' * 1000 + 'end')")
    assert wait_until(lambda: not server.is_alive)
    assert server.log_tail(max_bytes=6) == "xxend\n"
    assert len(server.log_tail()) == 1004


def test_a_log_that_is_gone_reads_as_empty(
    start: Callable[..., ServerProcess],
) -> None:
    server = start("import time; time.sleep(120)")
    server.log_path.unlink()
    assert server.log_tail() == ""


def test_a_log_of_bytes_that_are_no_text_is_read(
    start: Callable[..., ServerProcess], wait_until: WaitUntil
) -> None:
    server = start(r"import sys; sys.stdout.buffer.write(b'caf\xe9\n')")
    assert wait_until(lambda: not server.is_alive)
    assert server.log_tail() == "caf\ufffd\n"


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
