"""Runs one server and outlives whoever asked for it just long enough to clean up.

The tuner starts this process, which starts the server in a process group of its own. Standard
input is a life line: when it closes (the tuner closed it, crashed, or was killed with SIGKILL) the
server, its workers, and everything they started are ended, and then this process ends.

Usage: ``python -m autotune.serving.supervisor LOG GRACE_S COMMAND...``; writes one JSON line when
the server has started and one when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2


def main(argv: list[str]) -> int:
    """Supervise until the server ends or standard input closes."""
    log_path, grace_s, *command = argv
    _become_subreaper()
    # Ctrl-C and a polite kill are for the tuner; the life line tells this process when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with Path(log_path).open("ab") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_reset_child,  # noqa: PLW1509  # no threads here; prctl has no other way
            )
    except OSError as err:
        _say({"started": False, "error": f"{command[0]}: {err.strerror}"})
        return 1
    _say({"started": True, "pid": server.pid})
    while server.poll() is None and not _life_line_is_cut():
        pass
    _end_everything(server, float(grace_s))
    _say({"ended": True, "exit_code": server.returncode, "num_left": len(_left(server))})
    return 0


def _life_line_is_cut() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and os.read(sys.stdin.fileno(), 1024) == b""


def _end_everything(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the server to end, then force whatever is left of it and of what it started."""
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _left(server):
        time.sleep(POLL_S / 2)
    for _ in range(50):
        left = _left(server)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S / 2)
    server.wait()


def _left(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """List what is still alive of everything started here; empty only when that is certain.

    A process is missed by one look when its parent ends during that look, so only two empty looks
    in a row, with time for orphans to be handed to this process, count.
    """
    found = _descendants(server)
    if found:
        return found
    time.sleep(POLL_S / 4)
    return _descendants(server)


def _descendants(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Look once for living descendants.

    As a subreaper this process inherits orphans, so one that left the server's process group is
    found all the same. Dead ones among them are reaped here, or they would stay as zombies.
    """
    server.poll()
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.pid != server.pid and process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return alive


def _become_subreaper() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _reset_child() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If even this process is killed, the server at least gets the signal it cannot ignore.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the process group must do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
