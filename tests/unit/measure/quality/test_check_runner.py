"""Checks applied in their own process: right, wrong, hanging, dying."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.measure.quality.check_runner import CheckOutcome, CheckRunner
from autotune.measure.quality.check_worker import last_number
from autotune.measure.quality.checks import CheckRow
from autotune.traffic.quality import QualityTask

SOLVED, UNSOLVED = CheckOutcome(True), CheckOutcome(False)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def row(kind: str, **check: Any) -> CheckRow:
    task = QualityTask.model_validate({"file": "x", "check": {"kind": kind, **check}})
    assert task.check is not None
    return CheckRow((("user", "the prompt"),), task.check, "checks.jsonl:3")


@pytest.fixture
def runner(tmp_path: Path, no_process_left: None) -> Iterator[CheckRunner]:
    with CheckRunner(tmp_path, timeout_s=5) as runner:
        yield runner


def test_checks_of_every_kind(runner: CheckRunner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "print('noise on standard output')\n"
        "def is_right(prompt, answer):\n"
        "    print(answer)\n"
        "    return prompt == 'the prompt' and answer == 'right'\n"
    )
    cases = [
        (row("exact", expected="New York"), " New \n York\t", SOLVED),
        (row("exact", expected="New York"), "new york", UNSOLVED),
        (row("number", expected=1234.5), "so it is $1,234.50.", SOLVED),
        (row("number", expected=42), "42 or rather 43", UNSOLVED),
        (row("number", expected=42), "no number", UNSOLVED),
        (row("regex", pattern=r"\bParis\b"), "It is Paris, of course.", SOLVED),
        (row("regex", pattern=r"^Paris$"), "It is Paris", UNSOLVED),
        (row("json_schema", json_schema=SCHEMA), '{"city": "Paris"}', SOLVED),
        (row("json_schema", json_schema=SCHEMA), 'Here:\n```json\n{"city": "X"}\n```\n', SOLVED),
        (row("json_schema", json_schema=SCHEMA), '{"city": 5}', UNSOLVED),
        (row("json_schema", json_schema=SCHEMA), "Paris", UNSOLVED),
        (row("json_schema", json_schema={}), "NaN", UNSOLVED),  # NaN is not JSON
        (row("python", function="mine:is_right"), "right", SOLVED),
        (row("python", function="mine:is_right"), "wrong", UNSOLVED),
    ]
    runner.prepare(row for row, _, _ in cases)
    for number, (case, answer, expected) in enumerate(cases):
        assert runner.run(case, answer) == expected, number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 1,234", "1234"),
        ("The answer is 3.50 euros.", "3.5"),
        ("from 10-5 rolls", "5"),  # a dash between numbers is no sign
        ("it is -5.", "-5"),
        ("it is \N{MINUS SIGN}5.", "-5"),
        ("\\boxed{1,234,567.89}", "1234567.89"),
        ("half: .5", "0.5"),
        ("1,2,3", "3"),  # a list, no thousands
        ("1234,567", "567"),
        ("version v1.2.3", None),
        ("none", None),
        ("9" * 1000, None),  # no number anybody expects
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    found = last_number(text)
    assert (found is None) == (expected is None)
    assert found is None or float(found) == float(expected or "")


def test_a_pattern_that_backtracks_without_end_is_cut_off(tmp_path: Path) -> None:
    hopeless = row("regex", pattern="(a+)+$")
    with CheckRunner(tmp_path, timeout_s=1.0) as runner:
        began = time.monotonic()
        assert runner.run(hopeless, "a" * 40 + "b") == CheckOutcome(False, "timeout")
        assert time.monotonic() - began < 3
        # The process is a new one, and works.
        assert runner.run(row("exact", expected="x"), "x") == SOLVED


def test_faults_of_the_users_code_are_told_apart(runner: CheckRunner, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "def raises(prompt, answer): raise KeyError(answer)\n"
        "def answers_otherwise(prompt, answer): return 'yes'\n"
        "def dies(prompt, answer): os._exit(3)\n"
        "def leaves(prompt, answer): raise SystemExit\n"
    )
    expected = {
        "raises": "KeyError",  # never its message: it quotes the answer
        "answers_otherwise": "TypeError",
        "dies": "died",
        "leaves": "died",
        "raises ": "KeyError",  # after the process died twice
    }
    for name, reason in expected.items():
        found = runner.run(row("python", function=f"faulty:{name.strip()}"), "secret")
        assert found == CheckOutcome(False, reason), name


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({"kind": "regex", "pattern": "("}, "the pattern is not valid"),
        ({"kind": "json_schema", "json_schema": {"type": "no such"}}, "the schema is not valid"),
        ({"kind": "python", "function": "no_such_module:f"}, "cannot be imported (ModuleNotFound"),
        ({"kind": "python", "function": "mine:g"}, "cannot be imported (AttributeError"),
        ({"kind": "python", "function": "mine:value"}, "is no function"),
        ({"kind": "python", "function": "broken:f"}, "cannot be imported (SyntaxError"),
        ({"kind": "python", "function": "leaving:f"}, "must not end its process"),
    ],
)
def test_unusable_checks_are_found_before_anything_is_launched(
    runner: CheckRunner, tmp_path: Path, check: dict[str, Any], said: str
) -> None:
    (tmp_path / "mine.py").write_text("value = 5\ndef f(prompt, answer): return True\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match=r"checks\.jsonl:3: check: ") as caught:
        runner.prepare([row(**check)])
    assert said in str(caught.value)


def test_a_schema_cannot_reach_the_network(runner: CheckRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        schema = {"$ref": f"http://127.0.0.1:{port}/schema.json"}
        outcome = runner.run(row("json_schema", json_schema=schema), "{}")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody came
    assert not outcome.is_solved
    assert outcome.reason is not None
    assert "Referencing" in outcome.reason


def test_processes_that_a_check_started_end_with_it(
    tmp_path: Path, is_running: Callable[[int], bool], wait_until: Callable[..., bool]
) -> None:
    (tmp_path / "starter.py").write_text(
        "import pathlib, subprocess, sys\n"
        "def f(prompt, answer):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    pathlib.Path(answer).write_text(str(child.pid))\n"
        "    return True\n"
    )
    note = tmp_path / "pid"
    with CheckRunner(tmp_path) as runner:
        assert runner.run(row("python", function="starter:f"), str(note)) == SOLVED
        pid = int(note.read_text())
        assert is_running(pid)
    assert wait_until(lambda: not is_running(pid))
