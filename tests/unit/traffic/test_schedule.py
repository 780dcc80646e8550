"""The schedule: drawn once, the same for every config, with the mixture and rate as asked."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.traffic.profile import TrafficProfile, load_profile
from autotune.traffic.schedule import Schedule, build_schedule

ROOT = Path(__file__).parents[3]
SETS = ("demo/maths", "demo/chat", "demo/code", "demo/summarise")


def traffic_profile(
    weights: tuple[float, ...] = (1.0,), load: dict[str, Any] | None = None, **rest: Any
) -> TrafficProfile:
    """Make a profile of built-in prompts, one class for each weight: c0, c1, ..."""
    classes = [
        {"name": f"c{i}", "weight": weight, "prompts": {"builtin": SETS[i % len(SETS)]}}
        for i, weight in enumerate(weights)
    ]
    data = {
        "version": 1,
        "name": "test",
        "load": load or {"kind": "concurrency", "concurrency": 4},
        "classes": classes,
        **rest,
    }
    return TrafficProfile.model_validate(data)


def arrivals(schedule: Schedule) -> list[float]:
    times = [request.arrival_s for request in schedule.requests]
    assert all(time_s is not None for time_s in times)
    return [time_s for time_s in times if time_s is not None]


# --- repeatable ---


def test_one_seed_gives_one_schedule() -> None:
    rate = {"kind": "rate", "rps": 3.0}
    for load in (None, rate):
        one, same = (build_schedule(traffic_profile((2, 1), load, seed=5)) for _ in range(2))
        assert one == same
        assert one.digest == same.digest


def test_another_seed_gives_another_schedule() -> None:
    digests = {build_schedule(traffic_profile((2, 1), seed=seed)).digest for seed in range(20)}
    assert len(digests) == 20


def test_the_seed_of_the_call_goes_before_the_profiles() -> None:
    given_here = build_schedule(traffic_profile(seed=5), seed=6)
    assert given_here == build_schedule(traffic_profile(seed=6))


@pytest.mark.parametrize(
    "change",
    [
        {"load": {"kind": "concurrency", "concurrency": 5}},
        {"endpoint": "completions"},
        {"measure": {"min_requests": 65}},
        {"measure": {"max_duration_s": 181}},
        {"measure": {"request_timeout_s": 121}},
        {"measure": {"warmup_requests": 9}},
        {"weights": (1.0, 1.0)},
    ],
)
def test_the_digest_covers_all_that_is_sent_and_when(change: dict[str, Any]) -> None:
    assert (
        build_schedule(traffic_profile(**change)).digest
        != build_schedule(traffic_profile()).digest
    )


def test_the_digest_covers_sampling_and_length() -> None:
    plain = traffic_profile()
    digests = set()
    for extra in ({}, {"sampling": {"temperature": 0.5}}, {"output": {"max_tokens": 9}}):
        only = {"name": "c0", "prompts": {"builtin": SETS[0]}, **extra}
        digests.add(build_schedule(traffic_profile(classes=[only])).digest)
    assert len(digests) == 3
    assert build_schedule(plain).digest in digests


# --- warm-up ---


def test_warm_up_and_measurement_share_no_prompt() -> None:
    schedule = build_schedule(traffic_profile((1, 1, 1, 1), measure={"min_requests": 500}))
    warm = {request.prompt.prompt_id for request in schedule.warmup}
    measured = {request.prompt.prompt_id for request in schedule.requests}
    assert warm
    assert measured
    assert not warm & measured


def test_classes_of_one_prompt_set_share_no_prompt_with_the_warm_up_either() -> None:
    # Two kinds of request over the same prompts, such as short and long answers.
    classes = [
        {"name": name, "prompts": {"builtin": "demo/chat"}, "output": {"max_tokens": length}}
        for name, length in (("short", 16), ("long", 256))
    ]
    measure = {"min_requests": 200, "warmup_requests": 40}
    schedule = build_schedule(traffic_profile(classes=classes, measure=measure))
    warm = {request.prompt.prompt_id for request in schedule.warmup}
    assert not warm & {request.prompt.prompt_id for request in schedule.requests}


@pytest.mark.parametrize(
    ("load", "measure", "count"),
    [
        ({"kind": "concurrency", "concurrency": 4}, {}, 8),  # twice the users
        ({"kind": "concurrency", "concurrency": 1}, {}, 2),  # at least two
        ({"kind": "rate", "rps": 1.0, "max_concurrency": 6}, {}, 12),
        ({"kind": "rate", "rps": 1.0}, {}, 2),
        ({"kind": "concurrency", "concurrency": 4}, {"warmup_requests": 0}, 0),
        ({"kind": "concurrency", "concurrency": 4}, {"warmup_requests": 3}, 3),
    ],
)
def test_length_of_the_warm_up(load: dict[str, Any], measure: dict[str, Any], count: int) -> None:
    schedule = build_schedule(traffic_profile(load=load, measure=measure))
    assert len(schedule.warmup) == count
    assert all(request.arrival_s is None for request in schedule.warmup)


# --- the mixture ---


@pytest.mark.parametrize(
    ("weights", "count", "expected"),
    [
        # 7 x (0.5, 0.3, 0.2) = 3.5, 2.1, 1.4: whole parts 3, 2, 1; the one left goes to 0.5.
        ((0.5, 0.3, 0.2), 7, [4, 2, 1]),
        # 11 x (0.65, 0.25, 0.10) = 7.15, 2.75, 1.1: the one left goes to 2.75.
        ((6.5, 2.5, 1.0), 11, [7, 3, 1]),
        # 5 x (0.9, 0.05, 0.05) = 4.5, 0.25, 0.25: the one left goes to 4.5.
        ((18.0, 1.0, 1.0), 5, [5, 0, 0]),
        ((0.4, 0.3, 0.2, 0.1), 10, [4, 3, 2, 1]),
        ((1.0,), 5, [5]),
    ],
)
def test_classes_get_their_share_by_largest_remainder(
    weights: tuple[float, ...], count: int, expected: list[int]
) -> None:
    schedule = build_schedule(traffic_profile(weights, measure={"min_requests": count}))
    found = Counter(request.class_name for request in schedule.requests)
    assert [found[f"c{i}"] for i in range(len(weights))] == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4).map(tuple),
    st.integers(1, 60),
)
def test_no_share_is_off_by_a_whole_request(weights: tuple[float, ...], count: int) -> None:
    schedule = build_schedule(traffic_profile(weights, measure={"min_requests": count}))
    found = Counter(request.class_name for request in schedule.requests)
    assert len(schedule.requests) == count
    for i, weight in enumerate(weights):
        assert abs(found[f"c{i}"] - count * weight / sum(weights)) < 1


def test_classes_are_mixed_not_in_blocks() -> None:
    schedule = build_schedule(traffic_profile((1, 1), measure={"min_requests": 64}))
    names = [request.class_name for request in schedule.requests]
    num_changes = sum(a != b for a, b in zip(names, names[1:], strict=False))
    assert num_changes > 16  # two blocks would have 1, a random order about 32


def test_no_prompt_comes_again_before_all_have_come() -> None:
    # 40 prompts, a fifth of them for the warm-up: 32 are measured.
    schedule = build_schedule(traffic_profile(measure={"min_requests": 80}))
    ids = [request.prompt.prompt_id for request in schedule.requests]
    assert len(set(ids[:32])) == 32
    assert ids[32:64] == ids[:32]


# --- arrivals ---


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 120), st.floats(0.05, 500.0))
def test_the_mean_rate_is_exact_for_every_seed(seed: int, count: int, rps: float) -> None:
    load = {"kind": "rate", "rps": rps}
    schedule = build_schedule(
        traffic_profile(load=load, measure={"min_requests": count}, seed=seed)
    )
    times = arrivals(schedule)
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rps)  # count - 1 gaps of 1 / rps on average


def test_poisson_gaps_vary_as_much_as_they_last() -> None:
    # An exponential distribution has a standard deviation equal to its mean (0.2 s here). With
    # 4999 gaps the ratio is 1 within about 1.4% per standard error.
    load = {"kind": "rate", "rps": 5.0}
    times = arrivals(build_schedule(traffic_profile(load=load, measure={"min_requests": 5000})))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.07)


def test_constant_arrivals_are_evenly_spaced() -> None:
    load = {"kind": "rate", "rps": 4.0, "arrival": "constant"}
    schedule = build_schedule(traffic_profile(load=load, measure={"min_requests": 5}))
    assert arrivals(schedule) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert schedule.concurrency is None


def test_a_single_arrival_is_at_once() -> None:
    load = {"kind": "rate", "rps": 0.1}
    assert arrivals(build_schedule(traffic_profile(load=load, measure={"min_requests": 1}))) == [
        0.0
    ]


def test_closed_loop_has_no_arrival_times() -> None:
    schedule = build_schedule(traffic_profile())
    assert schedule.concurrency == 4
    assert {request.arrival_s for request in schedule.requests} == {None}


# --- requests ---


def test_requests_carry_their_class_settings() -> None:
    only = {
        "name": "only",
        "prompts": {"builtin": "demo/chat"},
        "output": {"max_tokens": 9, "ignore_eos": True},
        "sampling": {"temperature": 0.7, "top_p": 0.9},
    }
    measure = {"min_requests": 3, "max_duration_s": 50, "request_timeout_s": 40}
    schedule = build_schedule(traffic_profile(classes=[only], measure=measure))

    assert [request.request_id for request in schedule.requests] == [0, 1, 2]
    assert schedule.max_output_tokens == 9
    assert (schedule.max_duration_s, schedule.request_timeout_s) == (50, 40)
    request = schedule.requests[1]
    assert request.body("chat") == {
        "messages": request.prompt.as_chat(),
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": request.sampling_seed,
        "ignore_eos": True,
    }
    assert request.body("completions")["prompt"] == request.prompt.text
    assert "messages" not in request.body("completions")
    assert len({r.sampling_seed for r in schedule.requests}) == 3


def test_stopping_at_the_end_is_left_to_the_server_unless_asked() -> None:
    assert "ignore_eos" not in build_schedule(traffic_profile()).requests[0].body("chat")


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda p: p.name)
def test_profiles_that_ship_have_a_schedule(path: Path) -> None:
    shipped = load_profile(path)
    assert len(build_schedule(shipped).requests) == shipped.measure.min_requests


def test_a_single_prompt_is_too_few(write_profile: Callable[..., Path]) -> None:
    text = (
        "version: 1\nname: t\nload: {kind: concurrency, concurrency: 1}\n"
        "classes:\n  - prompts: {file: prompts.jsonl}\n"
    )
    path = write_profile(text, prompts=["same", "same"])
    with pytest.raises(InputError) as caught:
        build_schedule(load_profile(path))
    assert str(caught.value) == (
        "prompts.jsonl: a class must have at least 2 distinct prompts, "
        "one of them for the warm-up, but got 1. "
        "Add prompts; 100 or more a class make acceptance what your users see."
    )


def test_prompts_may_hold_any_text(write_profile: Callable[..., Path]) -> None:
    text = (
        "version: 1\nname: t\nload: {kind: concurrency, concurrency: 1}\n"
        "classes:\n  - prompts: {file: prompts.jsonl}\n"
    )
    schedule = build_schedule(load_profile(write_profile(text, prompts=["日本語 🙂", "ω\u2028"])))
    assert len(schedule.digest) == 16
    json.dumps(schedule.requests[0].body("chat"))
