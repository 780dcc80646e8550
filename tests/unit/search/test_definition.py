"""What makes two runs the same study, and how a difference is told."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from study_helpers import make_profile, make_setup, make_space, simulated

from autotune.search.definition import differences
from autotune.search.setup import SearchSetup


def stored(setup: SearchSetup) -> dict[str, Any]:
    """A definition as it comes back from the database."""
    found: dict[str, Any] = json.loads(json.dumps(setup.definition))
    return found


# --- what counts ---


def test_the_same_input_is_the_same_study(tmp_path: Path) -> None:
    assert differences(stored(make_setup(tmp_path)), stored(make_setup(tmp_path))) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"load": {"kind": "concurrency", "concurrency": 4}},
            "traffic.load.concurrency: 1 -> 4",
        ),
        (
            {"measure": {"min_requests": 9, "warmup": 1}},
            "traffic.measure.min_requests: 8 -> 9",
        ),
        (
            {"objective": {"maximize": "goodput_tps"}},
            "traffic.objective.maximize: nothing -> 'goodput_tps'",
        ),
        ({"endpoint": "completions"}, "traffic.endpoint: 'chat' -> 'completions'"),
        ({"seed": 5}, "seed: 0 -> 5"),
    ],
)
def test_a_changed_profile_is_told_by_its_key(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    before = stored(make_setup(tmp_path))

    after = stored(make_setup(tmp_path, profile=make_profile(tmp_path, **changes)))

    assert differences(before, after) == [line]


def test_a_changed_class_is_told_by_its_place(tmp_path: Path) -> None:
    prompts = {"file": "prompts.jsonl"}
    one = make_profile(tmp_path, classes=[{"prompts": prompts, "slo": {"ttft_p95_ms": 500}}])
    other = make_profile(tmp_path, classes=[{"prompts": prompts, "slo": {"ttft_p95_ms": 400}}])

    found = differences(
        stored(make_setup(tmp_path, profile=one)), stored(make_setup(tmp_path, profile=other))
    )

    assert found == ["traffic.classes[0].slo.ttft_p95_ms: 500.0 -> 400.0"]


def test_a_changed_space_is_told(tmp_path: Path) -> None:
    before = stored(make_setup(tmp_path))

    after = stored(make_setup(tmp_path, space=make_space(fixed={"max-num-seqs": 8})))

    assert differences(before, after) == ["space.fixed.max-num-seqs: nothing -> 8"]


def test_another_drafter_is_another_study(tmp_path: Path) -> None:
    before = stored(make_setup(tmp_path))

    assert differences(before, stored(make_setup(tmp_path, drafters=["other"]))) == [
        "drafters[0]: 'head' -> 'other'"
    ]
    assert differences(before, stored(make_setup(tmp_path, drafters=["head", "other"]))) == [
        "drafters: ['head'] -> ['head', 'other']"
    ]


def test_another_engine_or_hardware_is_another_study(tmp_path: Path) -> None:
    before = stored(make_setup(tmp_path))
    after = copy.deepcopy(before)
    after["engine"]["version"] = "0.34.0"
    after["engine"]["hardware"] = "H200"

    assert differences(before, after) == [
        "engine.hardware: 'simulated Round GPU' -> 'H200'",
        "engine.version: '1' -> '0.34.0'",
    ]


def test_a_changed_prompt_file_is_told_although_its_name_is_the_same(tmp_path: Path) -> None:
    profile = make_profile(tmp_path)
    before = stored(make_setup(tmp_path, profile=profile))
    path = tmp_path / "prompts.jsonl"
    path.write_text(path.read_text().replace("Question 3", "Question Three"))

    after = stored(make_setup(tmp_path, profile=profile))

    assert differences(before, after) == ["the content of the prompt files has changed"]


# --- what does not count ---


def test_how_long_and_how_to_search_do_not_make_another_study(tmp_path: Path) -> None:
    before = stored(make_setup(tmp_path))

    after = make_setup(
        tmp_path, sampler="random", max_trials=3, budget_s=60, num_finalists=1, num_repeats=5
    )

    assert differences(before, stored(after)) == []


def test_names_and_the_way_to_start_the_server_do_not_make_another_study(tmp_path: Path) -> None:
    before = stored(make_setup(tmp_path))

    renamed = make_profile(
        tmp_path,
        name="another",
        model="unused",
        serve={"env": {"HF_TOKEN": "hf_secret"}, "launch_timeout_s": 5000},
    )
    after = stored(make_setup(tmp_path, profile=renamed, space=make_space()))

    assert differences(before, after) == []


def test_no_variable_of_the_server_is_kept(tmp_path: Path) -> None:
    profile = make_profile(tmp_path, serve={"env": {"HF_TOKEN": "hf_secret"}})
    setup = make_setup(tmp_path, profile=profile)

    kept = json.dumps([setup.definition, setup.environment])

    assert "hf_secret" not in kept
    assert "HF_TOKEN" not in kept


def test_the_seed_that_counts_is_the_one_that_is_used(tmp_path: Path) -> None:
    profile = make_profile(tmp_path, seed=3)

    assert make_setup(tmp_path, profile=profile).definition["seed"] == 3
    assert make_setup(tmp_path, profile=profile, seed=4).definition["seed"] == 4


# --- telling differences ---


@pytest.mark.parametrize(
    ("a", "b", "lines"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {}, ["a: 1 -> nothing"]),
        ({}, {"a": {"b": 1}}, ["a: nothing -> {'b': 1}"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c: 2 -> 3"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 -> 3"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: [1, 2] -> [1]"]),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, ["a: 1 -> 2", "b: 1 -> 2"]),
        ({"a": "x" * 100}, {"a": 1}, [f"a: '{'x' * 58}… -> 1"]),
        # The schedule's hash says nothing that the other line does not say better.
        ({"schedule": "a", "seed": 1}, {"schedule": "b", "seed": 2}, ["seed: 1 -> 2"]),
        ({"schedule": "a"}, {"schedule": "b"}, ["the content of the prompt files has changed"]),
    ],
)
def test_differences(a: dict[str, Any], b: dict[str, Any], lines: list[str]) -> None:
    assert differences(a, b) == lines


def test_a_definition_is_equal_to_itself_after_json(tmp_path: Path) -> None:
    """Or every resume would be refused."""
    profile = make_profile(tmp_path, drafter=["a", "b"], objective={"minimize": "tpot_p95_ms"})
    setup = make_setup(
        tmp_path,
        profile=profile,
        engine=simulated(),
        space=make_space({"num_speculative_tokens": [0, 1], "flag": ["x", True, 1.5]}),
    )

    assert differences(stored(setup), json.loads(json.dumps(stored(setup)))) == []
    assert stored(setup)["space"]["parameters"]["flag"]["choices"] == ["x", True, 1.5]
