"""The JSON schema for editors says what the strict models say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import InputError
from autotune.strict import validate
from autotune.traffic.formats import FORMATS
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schema import FILE_NAME, profile_schema

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))

# Every key of a profile once, beside the other kinds of loads and lengths.
EVERYTHING: dict[str, Any] = {
    "version": 1,
    "name": "all",
    "model": "a/b",
    "drafter": ["a/c", "a/d"],
    "seed": 3,
    "endpoint": "completions",
    "load": {"kind": "rate", "rps": 3, "arrival": "gamma", "burstiness": 0.5,
             "max_concurrency": 9},
    "measure": {"min_requests": 9, "warmup": "auto", "max_duration_s": 60,
                "request_timeout_s": 30},
    "classes": [
        {
            "name": "chat",
            "weight": 2,
            "prompts": {"file": "p.jsonl", "format": "jsonl", "columns": {"prompt": "q"},
                        "category": "c", "sample": 9, "holdout": 0.5},
            "turns": {"max": 3, "replay": "recorded"},
            "shared_prefix": {"tokens": 9, "groups": 2},
            "output": {"max_tokens": {"from": "data", "default": 9}, "ignore_eos": False},
            "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
                         "presence_penalty": 0.1, "frequency_penalty": 0.1,
                         "repetition_penalty": 1.1},
            "extra_body": {"stop": ["x"]},
            "slo": {"ttft_p95_ms": 500, "icl_p99_ms": 90},
        },
        {
            "name": "code",
            "prompts": {"random": {"tokens": 5, "force": True}},
            "shared_prefix": {"file": "s.txt"},
            "lengths": {"input": {"dist": "lognormal", "p50": 3, "p95": 5, "max": 9},
                        "output": {"dist": "empirical", "file": "l.csv", "format": "azure",
                                   "max": 9}},
            "output": {"max_tokens": 64},
        },
        {
            "name": "maths",
            "prompts": {"builtin": "demo/maths"},
            "lengths": {"input": {"dist": "fixed", "tokens": 3}},
        },
    ],
    "objective": {"maximize": "goodput_tokens_per_s", "practical_margin_ratio": 0.05},
    "cost": {"gpu_hourly_usd": 3.5, "gpus": 2},
    "quality": {"gate": "off", "num_prompts": 9, "max_tokens": 9, "max_logprob_gap": 0.3,
                "tasks": [{"file": "t.jsonl"}]},
    "privacy": {"store_outputs": True},
    "serve": {"command": ["vllm"], "launch_timeout_s": 9, "env": {"A": "1"}},
}  # fmt: skip
LOADS: tuple[dict[str, Any], ...] = (
    {"kind": "concurrency", "concurrency": 3},
    {"kind": "users", "users": 3, "think_time": {"dist": "constant", "s": 0}},
    {"kind": "users", "users": 3, "think_time": {"dist": "exponential", "mean_s": 1}},
    {"kind": "users", "users": 3,
     "think_time": {"dist": "lognormal", "median_s": 1, "sigma": 0.5}},
    {"kind": "stages", "max_concurrency": 4,
     "stages": [{"rps": 3, "arrival": "constant", "duration_s": 5}]},
    {"kind": "trace", "file": "t.csv", "format": "auto", "columns": {"timestamp": "t"},
     "window": {"start_s": 1, "duration_s": 5}, "time_scale": 0.5, "jitter_s": 1,
     "max_concurrency": 4},
)  # fmt: skip
WHOLE = [EVERYTHING, *({**EVERYTHING, "load": load} for load in LOADS)]


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(profile_schema())


def is_valid(data: object) -> bool:
    return bool(validator().is_valid(data))


def is_accepted(data: object) -> bool:
    try:
        validate(TrafficProfile, data, "traffic.yaml")
    except InputError:
        return False
    return True


def test_it_is_a_schema_of_its_draft() -> None:
    assert profile_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(profile_schema())


def test_the_shipped_file_is_up_to_date() -> None:
    """To renew it: autotune profile schema > profiles/traffic.schema.json."""
    stored = json.loads((ROOT / "profiles" / FILE_NAME).read_text(encoding="utf-8"))
    assert stored == profile_schema()


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_shipped_profiles_name_it_and_keep_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={FILE_NAME}"
    assert is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("data", WHOLE, ids=lambda data: str(data["load"])[:60])
def test_what_the_models_accept_it_accepts(data: dict[str, Any]) -> None:
    assert is_accepted(data)
    assert is_valid(data)


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    schema = profile_schema()
    for name, model in [("top", schema), *schema["$defs"].items()]:
        for key, shown in model["properties"].items():
            yield f"{name}.{key}", shown


def test_every_key_is_described() -> None:
    bare = [name for name, shown in properties() if not shown.get("description")]
    assert bare == []
    # A description says more than its key, and reads on after it: small letter, no full stop.
    for name, shown in properties():
        assert len(shown["description"].split()) > 1, name
        assert not shown["description"].endswith("."), name
    models = profile_schema()["$defs"]
    assert [name for name, model in models.items() if not model.get("description")] == []


def test_no_key_has_a_title_made_of_itself() -> None:
    assert [name for name, shown in properties() if "title" in shown] == []


def mappings(data: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Find every mapping of a profile whose keys are known."""
    if isinstance(data, dict):
        if place and place[-1] in {"env", "extra_body"}:
            return  # the user's own keys
        yield place
        for key, value in data.items():
            yield from mappings(value, (*place, key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from mappings(value, (*place, number))


def at(data: Any, place: tuple[str | int, ...]) -> Any:
    for part in place:
        data = data[part]
    return data


def test_an_unknown_key_is_refused_by_both_wherever_it_stands() -> None:
    num_places = 0
    for data in WHOLE:
        for place in mappings(data):
            wrong = copy.deepcopy(data)
            at(wrong, place)["zzz"] = 1
            assert not is_accepted(wrong), place
            assert not is_valid(wrong), place
            num_places += 1
    assert num_places > 100


WRONG_VALUES = {
    "load.rps": 0,
    "load.burstiness": 0,
    "load.max_concurrency": 5000,
    "load.arrival": "bursty",
    "measure.warmup": "some",
    "measure.min_requests": 0,
    "measure.max_duration_s": -1,
    "endpoint": "embeddings",
    "seed": -1,
    "name": "a b",
    "version": 2,
    "drafter": {"a": 1},
    "classes": [],
    "objective.maximize": "goodput",
    "objective.practical_margin_ratio": 1,
    "cost.gpu_hourly_usd": 0,
    "quality.gate": "on",
    "serve.env": {"A": {"B": 1}},
}
WRONG_OF_CLASS = {
    "weight": 0,
    "name": "a b",
    "prompts.format": "azur",
    "prompts.columns": [["prompt", "q"]],
    "prompts.holdout": 1,
    "turns.replay": "dead",
    "output.max_tokens": {"from": "file"},
    "sampling.temperature": 3,
    "slo": {"ttft_p42_ms": 1},
    "slo.ttft_p95_ms": 0,
}


@pytest.mark.parametrize(
    ("place", "value"),
    [*WRONG_VALUES.items(), *((f"classes.0.{key}", v) for key, v in WRONG_OF_CLASS.items())],
)
def test_a_wrong_value_is_refused_by_both(place: str, value: object) -> None:
    wrong = copy.deepcopy(EVERYTHING)
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    at(wrong, tuple(path))[last] = value
    assert not is_accepted(wrong)
    assert not is_valid(wrong)


@pytest.mark.parametrize("place", ["name", "version", "load", "classes", "load.kind", "load.rps"])
def test_a_missing_key_is_refused_by_both(place: str) -> None:
    wrong = copy.deepcopy(EVERYTHING)
    *path, last = place.split(".")
    del at(wrong, tuple(path))[last]
    assert not is_accepted(wrong)
    assert not is_valid(wrong)


def test_formats_are_completed() -> None:
    definition = profile_schema()["$defs"]["PromptSource"]["properties"]["format"]
    assert definition["enum"] == ["auto", *FORMATS]


def test_limits_are_named_by_a_pattern() -> None:
    slo = profile_schema()["$defs"]["TrafficClass"]["properties"]["slo"]
    pattern = slo["propertyNames"]["pattern"]
    assert re.fullmatch(pattern, "icl_p99_ms")
    assert not re.fullmatch(pattern, "itl_p99_ms")
