"""Tasks: loaded and tried beforehand, asked of a server, compared question by question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web

from autotune.errors import InputError
from autotune.measure.client import MeasurementStopped
from autotune.measure.quality.check_runner import CheckOutcome
from autotune.measure.quality.tasks import LoadedTask, compare_tasks, load_tasks, solve
from autotune.traffic.quality import QualitySettings
from tests.quality_fakes import FakeEndpoint, chat_answer


def tasks(folder: Path, *checks: object) -> tuple[LoadedTask, ...]:
    rows = [{"prompt": f"question {i}", "check": check} for i, check in enumerate(checks)]
    (folder / "checks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"file": "checks.jsonl", "max_tokens": 33}
    return load_tasks(QualitySettings.model_validate({"tasks": [task]}), folder)


async def echo(request: web.Request) -> web.Response:
    """Answer with the question."""
    text = (await request.json())["messages"][-1]["content"]
    answer = {"text": text, "token_ids": [1], "prompt_token_ids": [2], "finish_reason": "stop"}
    return web.json_response(chat_answer(answer))


def test_a_check_that_cannot_work_is_found_on_loading(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checks\.jsonl:2: check: the pattern is not valid"):
        tasks(tmp_path, {"kind": "regex", "pattern": "a"}, {"kind": "regex", "pattern": "["})


def test_questions_are_asked_and_answers_checked_in_order(tmp_path: Path) -> None:
    right, wrong = {"kind": "number", "expected": 0}, {"kind": "number", "expected": 7}
    (task,) = tasks(tmp_path, right, wrong, {"kind": "exact", "expected": "question 2"})
    with FakeEndpoint(echo) as fake:
        outcomes = solve(task, fake.endpoint, 2)
    assert [outcome.is_solved for outcome in outcomes] == [True, False, True]
    assert {body["max_tokens"] for body in fake.bodies} == {33}


def test_checking_can_be_stopped(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, {"kind": "number", "expected": 0})
    with FakeEndpoint(echo) as fake, pytest.raises(MeasurementStopped):
        solve(task, fake.endpoint, 1, should_stop=lambda: bool(fake.bodies))


def test_two_servers_are_compared_in_pairs(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, *[{"kind": "exact", "expected": "x"}] * 6)
    yes, no, hung = CheckOutcome(True), CheckOutcome(False), CheckOutcome(False, "timeout")
    found = compare_tasks(task, [yes, yes, yes, no, no, hung], [yes, no, no, yes, no, hung])
    assert (found.num_rows, found.num_solved_baseline, found.num_solved_candidate) == (6, 3, 2)
    assert (found.num_only_baseline, found.num_only_candidate) == (2, 1)
    # Three that disagree, 2 to 1: the least uneven split of an odd number.
    assert found.p_value == 1.0
    assert found.unusable == {"timeout": 2}
    assert found.file == "checks.jsonl"
