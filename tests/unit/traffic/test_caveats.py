"""What is said about a profile before anybody trusts a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.traffic.caveats import caveats
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import TrafficProfile

ProfileOf = Callable[..., TrafficProfile]
RATE = {"kind": "rate", "rps": 5}


@pytest.fixture(autouse=True)
def _prompts(write_rows: Callable[..., Path]) -> None:
    write_rows({"prompt": f"p{n}"} for n in range(200))


def told(profile: TrafficProfile) -> list[str]:
    return caveats(profile, build_schedule(profile))


def test_a_sound_profile_has_none(profile_of: ProfileOf) -> None:
    extra = {"slo": {"ttft_p95_ms": 500}}
    assert told(profile_of(RATE, extra)) == []


def test_proxy_prompts_are_remarked_on(profile_of: ProfileOf) -> None:
    (line,) = told(profile_of(RATE, {"prompts": {"builtin": "demo/chat"}}, measure={
        "min_requests": 30}))  # fmt: skip
    assert line.startswith("proxy prompts: the prompts are not your users'")


def test_random_prompts_are_remarked_on(profile_of: ProfileOf) -> None:
    (line,) = told(profile_of(RATE, {"prompts": {"random": {"tokens": 9, "force": True}}}))
    assert line.startswith("random prompts: figures under speculation say nothing")


def test_running_past_the_end_is_remarked_on(profile_of: ProfileOf) -> None:
    (line,) = told(profile_of(RATE, {"output": {"ignore_eos": True}}))
    assert line.startswith("classes[0].output.ignore_eos: ")


def test_thin_limits_count_what_is_really_sent(
    profile_of: ProfileOf, write_rows: Callable[..., Path]
) -> None:
    # 40 conversations of two turns are 80 requests: enough for a p95.
    write_rows({"turns": [f"p{n}", "more"]} for n in range(200))
    measure = {"min_requests": 40}
    slo = {"slo": {"tpot_p95_ms": 20}}
    assert told(profile_of(RATE, {**slo, "turns": {}}, measure=measure)) == []
    need = "classes[0].slo.tpot_p95_ms: a p95 limit needs at least 59 requests of class 'default'"
    # 59 / 5 = 11.8 s, 40 / 5 = 8 s.
    assert told(profile_of(RATE, slo, measure=measure)) == [
        f"{need}; at 1 x 5 rps that takes 12 s, the window is 8 s"
    ]
    # A rate of conversations says nothing about when their later turns come.
    measure = {"min_requests": 29}
    assert told(profile_of(RATE, {**slo, "turns": {}}, measure=measure)) == [
        f"{need}, one measurement has 58"
    ]


def test_latency_limits_in_closed_loop_are_remarked_on(profile_of: ProfileOf) -> None:
    slo = {"ttft_p50_ms": 1, "e2el_mean_ms": 1, "tpot_p50_ms": 1}
    lines = told(profile_of(None, {"slo": slo}))
    assert [line.split(":")[0] for line in lines] == [
        "classes[0].slo.ttft_p50_ms",
        "classes[0].slo.e2el_mean_ms",
    ]
    assert "in closed loop a slow server is sent less" in lines[0]


@pytest.mark.parametrize(
    ("num_prompts", "num_requests", "is_told"),
    [
        (50, 64, True),  # 40 are measured
        (50, 40, False),  # each comes once
        (125, 300, False),  # 100 are measured: enough
        (123, 300, True),  # 99
    ],
)
def test_prompts_that_come_again_are_remarked_on(
    profile_of: ProfileOf,
    write_rows: Callable[..., Path],
    num_prompts: int,
    num_requests: int,
    is_told: bool,
) -> None:
    write_rows({"prompt": f"p{n}"} for n in range(num_prompts))
    lines = told(profile_of(RATE, measure={"min_requests": num_requests}))
    assert bool(lines) is is_told
    if num_requests == 64:
        assert lines == [
            "class 'default' has 40 different prompts for 64 requests: those that come again are "
            "answered from the prefix cache; use 100 or more"
        ]
