"""The schedule: drawn once, the same for every config, with the mixture and rate as asked."""

from __future__ import annotations

import gzip
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
from autotune.traffic.drawing import build_schedule
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile, load_profile
from autotune.traffic.schedule import Schedule, ScheduledRequest
from autotune.traffic.tokens import TokenCounter

ROOT = Path(__file__).parents[3]
ProfileOf = Callable[..., TrafficProfile]
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
        {"measure": {"warmup": 9}},
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


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_the_demo_has_the_schedule_that_was_recorded(concurrency: int) -> None:
    """The recording answers for these digests alone; another schedule would have to be recorded."""
    with gzip.open(ROOT / "tests/data/demo_grid.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][1:]
    recorded = {
        row["measurement"]["schedule_digest"] for row in rows if row["concurrency"] == concurrency
    }
    profile = load_profile(ROOT / "profiles/demo.yaml").with_concurrency(concurrency)
    assert {build_schedule(profile).digest} == recorded


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
    measure = {"min_requests": 200, "warmup": 40}
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
        ({"kind": "concurrency", "concurrency": 4}, {"warmup": 0}, 0),
        ({"kind": "concurrency", "concurrency": 4}, {"warmup": 3}, 3),
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
        traffic_profile(
            load=load, measure={"min_requests": count, "max_duration_s": 3600}, seed=seed
        )
    )
    times = arrivals(schedule)
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rps)  # count - 1 gaps of 1 / rps on average


def test_poisson_gaps_vary_as_much_as_they_last() -> None:
    # An exponential distribution has a standard deviation equal to its mean (0.2 s here). With
    # 4999 gaps the ratio is 1 within about 1.4% per standard error.
    load = {"kind": "rate", "rps": 5.0}
    measure = {"min_requests": 5000, "max_duration_s": 1000}
    times = arrivals(build_schedule(traffic_profile(load=load, measure=measure)))
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


def test_stages_arrive_when_they_should() -> None:
    load = {
        "kind": "stages",
        "stages": [{"rps": 4, "duration_s": 10}, {"rps": 20, "duration_s": 5}],
    }
    times = arrivals(build_schedule(traffic_profile(load=load, measure={"min_requests": 7})))
    assert sum(time < 10 for time in times) == 40  # whatever min_requests says
    assert sum(10 < time < 15 for time in times) == 100
    assert len(times) == 140


def test_people_think_before_every_request() -> None:
    think = {"dist": "lognormal", "median_s": 8, "sigma": 0.6}
    load = {"kind": "users", "users": 50, "think_time": think}
    measure = {"min_requests": 3000, "max_duration_s": 3600}
    schedule = build_schedule(traffic_profile(load=load, measure=measure))
    waits = [request.think_s for request in schedule.requests]
    assert schedule.concurrency == 50
    assert {request.arrival_s for request in schedule.requests} == {None}
    assert len(set(waits)) == 3000
    assert statistics.median(waits) == pytest.approx(8, rel=0.05)
    assert {request.think_s for request in schedule.warmup} == {0.0}


def test_the_digest_covers_think_times() -> None:
    digests = set()
    for seconds in (1, 2):
        load = {"kind": "users", "users": 4, "think_time": {"dist": "constant", "s": seconds}}
        digests.add(build_schedule(traffic_profile(load=load)).digest)
    assert len(digests) == 2


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


def test_bodies_carry_all_sampling_and_further_fields() -> None:
    only = {
        "prompts": {"builtin": "demo/chat"},
        "sampling": {"top_k": 20, "min_p": 0.05, "presence_penalty": 0.5},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["END"]},
    }
    body = build_schedule(traffic_profile(classes=[only])).requests[0].body("chat")
    assert {key: body[key] for key in body.keys() - {"messages", "seed"}} == {
        "max_tokens": 256,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": ["END"],
    }


def test_stopping_at_the_end_is_left_to_the_server_unless_asked() -> None:
    assert "ignore_eos" not in build_schedule(traffic_profile()).requests[0].body("chat")


# --- conversations ---

SCRIPTS = [{"turns": [f"{n} one", f"{n} two", f"{n} three"]} for n in range(20)]


def conversations(schedule: Schedule) -> dict[int | None, list[ScheduledRequest]]:
    found: dict[int | None, list[ScheduledRequest]] = {}
    for request in schedule.requests:
        found.setdefault(request.conversation_id, []).append(request)
    return found


@pytest.mark.parametrize(
    "load",
    [
        {"kind": "concurrency", "concurrency": 3},
        {"kind": "rate", "rps": 2.0},
        {"kind": "users", "users": 3, "think_time": {"dist": "exponential", "mean_s": 2}},
        {"kind": "stages", "stages": [{"rps": 5, "duration_s": 2}]},
    ],
    ids=lambda load: load["kind"],
)
def test_conversations_are_sent_turn_by_turn(
    profile_of: ProfileOf, write_rows: Callable[..., Path], load: dict[str, Any]
) -> None:
    write_rows(SCRIPTS)
    measure = {"min_requests": 10, "warmup": 4}
    profile = profile_of(load, {"turns": {"max": 2}}, measure=measure)
    schedule = build_schedule(profile)

    assert len(schedule.requests) == 20  # 10 conversations of two turns
    assert [request.request_id for request in schedule.requests] == list(range(20))
    by_id = conversations(schedule)
    assert len(by_id) == 10
    assert None not in by_id
    for first, second in by_id.values():
        assert (first.turn, first.is_live) == (0, False)
        assert (second.turn, second.is_live) == (1, True)
        assert first.prompt.text.split()[0] == second.prompt.text.split()[0]  # of one script
        assert second.arrival_s is None
        assert (first.arrival_s is None) == profile.is_closed_loop
        assert (first.think_s > 0, second.think_s > 0) == (load["kind"] == "users",) * 2
    assert len(schedule.warmup) == 4  # of each conversation the first turn alone
    assert {request.turn for request in schedule.warmup} == {0}
    assert {request.conversation_id for request in schedule.warmup} == {None}


def logged_conversations(gap_s: float) -> list[dict[str, Any]]:
    rows = []
    for number in range(10):
        said = [{"role": "user", "content": f"{number} one"}]
        log = {"conversation_id": f"{number}", "model": "m"}
        rows.append({**log, "timestamp": 100.0 * number, "messages": said})
        said = [
            *said,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "two"},
        ]
        rows.append({**log, "timestamp": 100.0 * number + gap_s, "messages": said})
    return rows


def test_recorded_waits_go_with_a_rate_and_not_with_full_load(
    profile_of: ProfileOf, write_rows: Callable[..., Path]
) -> None:
    write_rows(logged_conversations(gap_s=6.5))
    for load, expected in (
        ({"kind": "rate", "rps": 2.0}, 6.5),
        ({"kind": "concurrency", "concurrency": 2}, 0.0),
    ):
        schedule = build_schedule(
            profile_of(load, {"turns": {"replay": "recorded"}}, measure={"min_requests": 5})
        )
        assert [(r.turn, r.think_s) for r in schedule.requests] == [(0, 0.0), (1, expected)] * 5
        assert [len(r.prompt.messages) for r in schedule.requests] == [1, 3] * 5


def test_turns_that_could_never_be_sent_are_left_out_and_told(
    profile_of: ProfileOf, write_rows: Callable[..., Path]
) -> None:
    # Conversations begin at 0, 1, 2, 3 and 4 s; after 57.5 s more only the first two are in time.
    write_rows(logged_conversations(gap_s=57.5))
    load = {"kind": "rate", "rps": 1.0, "arrival": "constant"}
    measure = {"min_requests": 5, "max_duration_s": 59}
    schedule = build_schedule(profile_of(load, {"turns": {}}, measure=measure))
    assert [request.turn for request in schedule.requests] == [0, 1, 0, 1, 0, 0, 0]
    assert [request.request_id for request in schedule.requests] == list(range(7))
    assert schedule.notes == (
        "3 later turns are left out: after their recorded waits they would come later than "
        "measure.max_duration_s",
    )


def test_limits_of_answers_may_come_from_the_rows(
    profile_of: ProfileOf, write_rows: Callable[..., Path]
) -> None:
    rows = [{"prompt": f"p{n}", "max_tokens": 100 + n} for n in range(10)]
    write_rows([*rows, {"prompt": "free"}])
    output = {"max_tokens": {"from": "data", "default": 33}}
    schedule = build_schedule(profile_of(extra={"output": output}))
    for request in schedule.requests:
        text = request.prompt.text
        assert request.max_tokens == (33 if text == "free" else 100 + int(text[1:]))
    fixed = build_schedule(profile_of(extra={"output": {"max_tokens": 44}}))
    assert {request.max_tokens for request in fixed.requests} == {44}


# --- held out ---


def test_the_search_never_sees_what_is_held_out(
    profile_of: ProfileOf, write_rows: Callable[..., Path]
) -> None:
    write_rows({"prompt": f"p{n}"} for n in range(100))
    profile = profile_of(
        extra={"prompts": {"file": "prompts.jsonl", "holdout": 0.5}},
        measure={"min_requests": 300, "warmup": 50},
    )
    search, held = (build_schedule(profile, part=part) for part in (Part.SEARCH, Part.HOLDOUT))
    ids = [
        {request.prompt.prompt_id for request in requests}
        for requests in (search.requests, held.requests, search.warmup)
    ]
    assert [len(each) for each in ids] == [40, 40, 20]
    assert len(set.union(*ids)) == 100
    assert search.warmup == held.warmup
    assert search.digest != held.digest
    assert build_schedule(profile, part=Part.HOLDOUT) == held


def test_without_a_holdout_both_parts_are_one() -> None:
    profile = traffic_profile((2, 1))
    assert build_schedule(profile, part=Part.HOLDOUT) == build_schedule(profile)


def test_fitted_prompts_of_the_search_hold_no_text_that_is_held_out(
    profile_of: ProfileOf, write_rows: Callable[..., Path], words: TokenCounter
) -> None:
    write_rows({"prompt": f"unique{n} text of this prompt"} for n in range(60))
    lengths = {"input": {"dist": "fixed", "tokens": 200}}
    profile = profile_of(
        extra={"prompts": {"file": "prompts.jsonl", "holdout": 0.5}, "lengths": lengths}
    )
    search, held = (
        build_schedule(profile, counter=words, part=part) for part in (Part.SEARCH, Part.HOLDOUT)
    )
    asked_later = {request.prompt.text.split()[-5] for request in held.requests}
    seen = {word for request in search.requests for word in request.prompt.text.split()}
    assert not asked_later & seen


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda p: p.name)
def test_profiles_that_ship_have_a_schedule(path: Path) -> None:
    shipped = load_profile(path)
    count = shipped.num_requests or shipped.measure.min_requests
    assert len(build_schedule(shipped).requests) >= count


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
