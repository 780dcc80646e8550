"""Screens are the beginning of the full schedule, ladders lie below the load."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.search.calibration import (
    MIN_RUNG_REQUESTS,
    MIN_TAIL_REQUESTS,
    ladder_schedules,
    screen_schedule,
)
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import TrafficProfile

CLASS = {"name": "chat", "prompts": {"builtin": "demo/chat"}, "output": {"max_tokens": 8}}


def profile(num_requests: int, load: dict[str, Any], **slo: float) -> TrafficProfile:
    return TrafficProfile.model_validate(
        {
            "version": 1,
            "name": "t",
            "load": load,
            "measure": {"min_requests": num_requests},
            "classes": [{**CLASS, "slo": slo}],
        }
    )


def screened(p: TrafficProfile) -> int:
    full = build_schedule(p)
    screen = screen_schedule(p, full)
    assert screen.requests == full.requests[: len(screen.requests)]
    assert screen.warmup == full.warmup
    return len(screen.requests)


@pytest.mark.parametrize(
    ("num_requests", "concurrency", "expected"),
    [
        (200, 4, 80),  # 0.4 x 200
        (30, 1, 24),  # never fewer than 24
        (12, 1, 12),  # unless there are not so many
        (200, 40, 120),  # three for every slot
    ],
)
def test_a_screen_is_two_fifths_of_a_measurement(
    num_requests: int, concurrency: int, expected: int
) -> None:
    load = {"kind": "concurrency", "concurrency": concurrency}
    assert screened(profile(num_requests, load)) == expected


def test_a_limit_on_a_tail_needs_requests_enough_for_it() -> None:
    load = {"kind": "concurrency", "concurrency": 1}
    assert screened(profile(100, load, ttft_p95_ms=500.0)) == MIN_TAIL_REQUESTS
    assert screened(profile(100, load, ttft_mean_ms=500.0)) == 40


def test_stages_are_not_cut() -> None:
    stages = {
        "kind": "stages",
        "stages": [{"rps": 2.0, "duration_s": 20.0}, {"rps": 8.0, "duration_s": 20.0}],
    }
    p = profile(10, stages)
    full = build_schedule(p)
    assert screen_schedule(p, full) is full


def test_a_closed_loop_ladder_has_one_user_and_the_root_of_the_load() -> None:
    full = build_schedule(profile(200, {"kind": "concurrency", "concurrency": 64}))
    ladder = ladder_schedules(full, 64)
    assert [rung.concurrency for rung in ladder] == [1, 8]
    assert [len(rung.requests) for rung in ladder] == [MIN_RUNG_REQUESTS, 16]
    assert all(not rung.warmup for rung in ladder)
    assert ladder[0].digest != ladder[1].digest != full.digest


def test_a_small_load_has_no_ladder() -> None:
    full = build_schedule(profile(20, {"kind": "concurrency", "concurrency": 3}))
    assert ladder_schedules(full, 3) == ()


def test_an_open_loop_ladder_is_closed_and_stays_below_the_most_in_flight() -> None:
    load = {"kind": "rate", "rps": 5.0, "arrival": "poisson", "max_concurrency": 8}
    full = build_schedule(profile(100, load))
    ladder = ladder_schedules(full, 8)
    assert [rung.concurrency for rung in ladder] == [1, 4]
    assert all(r.arrival_s is None for rung in ladder for r in rung.requests)
