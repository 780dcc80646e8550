"""Whatever stands in a profile, it is read or refused; whatever is read gives one schedule."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.strict import validate
from autotune.traffic.drawing import build_schedule
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile

GOOD: dict[str, Any] = {
    "version": 1,
    "name": "fuzz",
    "drafter": ["a/b"],
    "load": {"kind": "users", "users": 3,
             "think_time": {"dist": "lognormal", "median_s": 1, "sigma": 0.5}},
    "measure": {"min_requests": 9, "warmup": 3, "max_duration_s": 60, "request_timeout_s": 9},
    "classes": [
        {
            "name": "chat",
            "weight": 2,
            "prompts": {"file": "p.jsonl", "columns": {"prompt": "q"}, "holdout": 0.5},
            "turns": {"max": 3, "replay": "live"},
            "shared_prefix": {"tokens": 9, "groups": 2},
            "output": {"max_tokens": {"from": "data", "default": 9}},
            "sampling": {"temperature": 0.5, "top_k": 5},
            "extra_body": {"stop": ["x"]},
            "slo": {"ttft_p95_ms": 500},
        },
        {
            "name": "code",
            "prompts": {"builtin": "demo/code"},
            "lengths": {"input": {"dist": "lognormal", "p50": 3, "p95": 5, "max": 9}},
        },
    ],
    "objective": {"maximize": "goodput_tps"},
    "cost": {"gpu_hourly_usd": 3.5},
    "quality": {"gate": "off", "tasks": [{"file": "t.jsonl"}]},
    "serve": {"command": ["vllm"], "env": {"A": "1"}},
}  # fmt: skip
LOADS = (
    {"kind": "concurrency", "concurrency": 3},
    {"kind": "rate", "rps": 3, "arrival": "gamma", "burstiness": 0.5},
    {"kind": "stages", "stages": [{"rps": 3, "duration_s": 5}]},
    {"kind": "trace", "file": "t.csv", "window": {"duration_s": 5}},
)


def keys_of(data: Any) -> set[str]:
    if isinstance(data, dict):
        return set(data) | set().union(*map(keys_of, data.values()), set())
    return set().union(*map(keys_of, data), set()) if isinstance(data, list | tuple) else set()


def places(data: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Find every value of a profile."""
    found = [place] if place else []
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            found += places(value, (*place, key))
    return found


KEYS = sorted(keys_of([GOOD, *LOADS]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.binary(max_size=4),
    st.sampled_from([10**400, 5e-324, 1.7e308, -0.0, "data", "auto", "live", "rate", "\ud800"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=8,
)


def read(data: Any) -> TrafficProfile | None:
    """Read a profile, or return None where it is refused; anything but an InputError is raised."""
    try:
        return validate(TrafficProfile, data, "traffic.yaml")
    except InputError:
        return None


def use(profile: TrafficProfile) -> None:
    """Ask a profile that was read for everything it knows before its files are read."""
    profile.thin_limits()
    profile.thin_limits({"chat": 3})
    assert profile.objective_name
    assert profile.num_requests is None or 1 <= profile.num_requests <= 100_000
    stored = json.loads(json.dumps(profile.model_dump(mode="json")))
    assert TrafficProfile.model_validate(stored).model_dump(mode="json") == stored


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=8))
def test_any_mapping_is_read_or_refused(data: dict[str, Any]) -> None:
    profile = read({"version": 1, "name": "x", **data})
    if profile is not None:
        use(profile)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_good_profile_with_anything_in_one_place_is_read_or_refused(data: st.DataObject) -> None:
    profile = copy.deepcopy({**GOOD, "load": data.draw(st.sampled_from((GOOD["load"], *LOADS)))})
    *path, last = data.draw(st.sampled_from(places(profile)))
    parent = profile
    for part in path:
        parent = parent[part]
    parent[last] = data.draw(values)
    found = read(profile)
    if found is not None:
        use(found)


# --- any valid profile gives a schedule ---

arrival = st.one_of(
    st.sampled_from([{"arrival": "poisson"}, {"arrival": "constant"}]),
    st.floats(0.01, 100).map(lambda shape: {"arrival": "gamma", "burstiness": shape}),
)
think_time = st.one_of(
    st.floats(0, 9).map(lambda s: {"dist": "constant", "s": s}),
    st.floats(0.01, 9).map(lambda s: {"dist": "exponential", "mean_s": s}),
    st.floats(0.01, 2).map(lambda s: {"dist": "lognormal", "median_s": 2, "sigma": s}),
)
load = st.one_of(
    st.integers(1, 9).map(lambda n: {"kind": "concurrency", "concurrency": n}),
    st.builds(lambda rps, kind: {"kind": "rate", "rps": rps, **kind}, st.floats(0.1, 99), arrival),
    st.builds(
        lambda users, think: {"kind": "users", "users": users, "think_time": think},
        st.integers(1, 9),
        think_time,
    ),
    st.lists(
        st.builds(
            lambda rps, s, kind: {"rps": rps, "duration_s": s, **kind},
            st.floats(0.5, 9),
            st.floats(1, 5),
            arrival,
        ),
        min_size=1,
        max_size=4,
    ).map(lambda stages: {"kind": "stages", "stages": stages}),
)
length = st.one_of(
    st.integers(1, 80).map(lambda n: {"dist": "fixed", "tokens": n}),
    st.integers(1, 40).map(lambda n: {"dist": "lognormal", "p50": n, "p95": 2 * n, "max": 90}),
)
part_of_class = st.fixed_dictionaries(
    {
        "weight": st.floats(0.01, 100),
        "prompts": st.fixed_dictionaries(
            {
                "builtin": st.sampled_from(["demo/chat", "demo/code", "demo/maths"]),
                "holdout": st.sampled_from([0, 0.4]),
            },
        ),
    },
    optional={
        "lengths": st.fixed_dictionaries({"input": length}, optional={"output": length}),
        "shared_prefix": st.fixed_dictionaries(
            {"tokens": st.integers(1, 60)}, optional={"groups": st.integers(1, 4)}
        ),
        "output": st.integers(1, 999).map(lambda n: {"max_tokens": n}),
        "sampling": st.floats(0, 2).map(lambda t: {"temperature": t}),
    },
)
profiles = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "name": st.just("fuzz"),
        "seed": st.integers(0, 2**32 - 1),
        "endpoint": st.sampled_from(["chat", "completions"]),
        "load": load,
        "measure": st.fixed_dictionaries(
            {"min_requests": st.integers(1, 40), "max_duration_s": st.just(3600)},
            optional={"warmup": st.integers(0, 9)},
        ),
        "classes": st.lists(part_of_class, min_size=1, max_size=3).map(
            lambda parts: [{"name": f"c{n}", **part} for n, part in enumerate(parts)]
        ),
    }
)


@settings(max_examples=60, deadline=None)
@given(profiles)
def test_a_valid_profile_gives_one_schedule(data: dict[str, Any]) -> None:
    profile = read(data)
    assume(profile is not None)
    assert profile is not None
    schedule = build_schedule(profile)
    assert schedule == build_schedule(profile)
    assert schedule.digest == build_schedule(profile).digest
    assert schedule.digest != build_schedule(profile, (profile.seed + 1) % 2**32).digest

    # Every class has its share, whatever the load: no count is off by a whole request.
    count = len(schedule.requests)
    assert count == profile.num_requests
    found = Counter(request.class_name for request in schedule.requests)
    weights = sum(c.weight for c in profile.classes)
    for c in profile.classes:
        assert abs(found[c.name] - count * c.weight / weights) < 1 + 1e-9

    # Nothing is shared that must not be.
    held = build_schedule(profile, part=Part.HOLDOUT)
    warm = {request.prompt.prompt_id for request in schedule.warmup}
    assert not warm & {r.prompt.prompt_id for r in (*schedule.requests, *held.requests)}
    for request in (*schedule.requests, *schedule.warmup):
        json.dumps(request.body(schedule.endpoint))
