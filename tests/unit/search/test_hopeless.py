"""Early stop: certain rules are never wrong, probable ones as seldom as they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autotune.measure.metrics import violations
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.search.decision import Goal
from autotune.search.hopeless import ALPHA, WORTHWHILE_RATIO, HopelessRule
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

TOKENS = 101
"""The first token comes at TTFT, the other hundred after it."""


def schedule(num: int, concurrency: int | None = 1) -> Schedule:
    prompt = Prompt("p", (("user", "hello"),))
    requests = tuple(
        ScheduledRequest(i, "a", prompt, TOKENS, 0.0, 1.0, False, i, None) for i in range(num)
    )
    return Schedule("chat", concurrency, requests, (), 1e9, 1e9)


def goal(objective: str = "output_throughput_tps", **limits: float) -> Goal:
    is_maximized = not objective.endswith("_ms")
    return Goal(objective, is_maximized, {"a": limits} if limits else {}, 0.02)


def record(number: int, ttft_s: float, e2el_s: float, *, is_ok: bool = True) -> RequestRecord:
    return RequestRecord(
        number, "a", f"p{number}", None, 0.0, (ttft_s, e2el_s), (1, TOKENS), e2el_s, 10,
        TOKENS if is_ok else 0, "stop", error=None if is_ok else "HTTP 500",
    )  # fmt: skip


def measured(records: Sequence[RequestRecord]) -> Measurement:
    return Measurement("d", 1, 0.0, 1.0, tuple(records), ServerCounters())


def watched(rule: HopelessRule, records: Sequence[RequestRecord]) -> int | None:
    """After how many records the rule fired; None when it never did."""
    for count, r in enumerate(records, 1):
        rule.observe(r)
        if rule.reason is not None:
            return count
    return None


def test_a_p95_limit_is_lost_with_the_request_that_is_one_too_many() -> None:
    """Of 100 values the p95 lies between the 95th and 96th, so six above it put both there."""
    limits = goal(ttft_p95_ms=1000.0)
    slow = [record(i, 2.0, 3.0) for i in range(6)]
    assert watched(HopelessRule(limits, schedule(100), None, alpha=0.0), slow[:5]) is None
    rule = HopelessRule(limits, schedule(100), None, alpha=0.0)
    assert watched(rule, slow) == 6
    assert rule.reason == "6 requests are above a.ttft_p95_ms = 1000, 5 of 100 may be"


def test_a_mean_limit_is_lost_when_its_sum_is_used_up() -> None:
    """Ten requests of at most 1000 ms on average: the fourth one of 3000 ms makes 12 s."""
    limits = goal(ttft_mean_ms=1000.0)
    slow = [record(i, 3.0, 4.0) for i in range(10)]
    assert watched(HopelessRule(limits, schedule(10), None), slow) == 4


def test_too_many_errors_end_it() -> None:
    """2 % of 100 requests may fail."""
    failed = [record(i, 0.1, 0.2, is_ok=False) for i in range(10)]
    rule = HopelessRule(goal(), schedule(100), None)
    assert watched(rule, failed) == 3
    assert "3 requests failed" in str(rule.reason)


def test_failed_requests_are_above_every_limit() -> None:
    failed = [record(i, 0.1, 0.2, is_ok=False) for i in range(10)]
    assert watched(HopelessRule(goal(ttft_p50_ms=1.0), schedule(4), None), failed) == 1


@pytest.mark.parametrize("seed", range(40))
def test_certain_rules_agree_with_the_finished_measurement(seed: int) -> None:
    """Whatever the order and the statistic: what is cut off would have broken its limit."""
    rng = np.random.default_rng(seed)
    name = ["ttft_p50_ms", "ttft_p90_ms", "ttft_p95_ms", "ttft_p99_ms", "ttft_mean_ms"][seed % 5]
    ttfts = rng.lognormal(0.0, 0.5, 60)
    records = [record(i, float(t), float(t) + 1) for i, t in enumerate(ttfts)]
    final = violations(measured(records), {"a": {name: 1.0}})
    limit_ms = (1 + final[f"a.{name}"]) * rng.choice([0.97, 1.03])
    limits = goal(**{name: float(limit_ms)})
    fired = watched(HopelessRule(limits, schedule(60), None, alpha=0.0), records)
    is_violated = violations(measured(records), limits.limits)[f"a.{name}"] > 0
    assert fired is None or is_violated


def correlated(rng: np.random.Generator, num: int, correlation: float) -> np.ndarray[Any, Any]:
    """A first-order autoregression with unit variance."""
    values = rng.standard_normal(num)
    for i in range(1, num):
        values[i] = correlation * values[i - 1] + np.sqrt(1 - correlation**2) * values[i]
    return values


def alarm_rate(slowdown: float, num_runs: int, *, correlation: float) -> float:
    """Share of runs that are cut off, against a best config with the same prompts.

    Prompts spread latencies by 40 % (the same for both), every run by another 10 %, launches by 1.4 %.
    """
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(num_runs):
        prompts = rng.lognormal(0.0, 0.4, 60)
        sides = [
            prompts
            * np.exp(0.014 * rng.standard_normal())
            * np.exp(0.1 * correlated(rng, 60, correlation))
            for _ in range(2)
        ]
        best = measured([record(i, 0.1, 0.1 + float(t)) for i, t in enumerate(sides[0])])
        run = [record(i, 0.1, (0.1 + float(t)) * slowdown) for i, t in enumerate(sides[1])]
        alarms += watched(HopelessRule(goal(), schedule(60), best), run) is not None
    return alarms / num_runs


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_config_worth_measuring_is_seldom_cut_off(correlation: float) -> None:
    """1 % and, over 400 runs, twice its standard error of 0.5 %."""
    assert alarm_rate(1 / WORTHWHILE_RATIO, 400, correlation=correlation) <= ALPHA + 0.01


def test_a_much_slower_config_is_cut_off() -> None:
    assert alarm_rate(1.35, 100, correlation=0.0) > 0.9


def test_how_many_requests_a_hopeless_run_is_spared() -> None:
    rng = np.random.default_rng(2)
    best = measured([record(i, 0.1, 1.0) for i in range(60)])
    run = [record(i, 0.1, 2.0 * float(rng.lognormal(0.0, 0.1))) for i in range(60)]
    fired = watched(HopelessRule(goal(), schedule(60), best), run)
    assert fired is not None
    assert fired <= 15


def test_a_limit_that_is_kept_is_seldom_given_up() -> None:
    """Runs whose p95 lies just below the limit, requests in random order: at most 1 % and two errors."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(400):
        # Exactly the five of a hundred that may be above.
        above = rng.permutation(np.arange(100) < 5)
        records = [record(i, 2.0 if is_above else 0.5, 3.0) for i, is_above in enumerate(above)]
        rule = HopelessRule(goal(ttft_p95_ms=1000.0), schedule(100), None)
        alarms += watched(rule, records) is not None
    assert alarms / 400 <= ALPHA + 0.01


@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_a_limit_that_is_kept_is_seldom_given_up_where_slow_requests_cluster(
    correlation: float,
) -> None:
    """The five slowest of a hundred, in an order in which neighbours are alike."""
    rng = np.random.default_rng(4)
    alarms = 0
    for _ in range(400):
        levels = correlated(rng, 100, correlation)
        above = levels >= np.sort(levels)[-5]
        records = [record(i, 2.0 if is_above else 0.5, 3.0) for i, is_above in enumerate(above)]
        rule = HopelessRule(goal(ttft_p95_ms=1000.0), schedule(100), None)
        alarms += watched(rule, records) is not None
    assert alarms / 400 <= ALPHA + 0.01


def test_a_burst_of_arrivals_is_no_evidence() -> None:
    """Ten of 200 may be above, and all of them come at once, early."""
    records = [record(i, 2.0 if i < 10 else 0.5, 3.0) for i in range(200)]
    open_loop = schedule(200, concurrency=None)
    assert watched(HopelessRule(goal(ttft_p95_ms=1000.0), open_loop, None), records) is None


def test_a_limit_that_is_far_out_of_reach_is_given_up_before_it_is_certain() -> None:
    """Every second request is too slow where ten of 200 may be: sure after 22, likely sooner."""
    records = [record(i, 2.0 if i % 2 else 0.5, 3.0) for i in range(200)]
    limits = goal(ttft_p95_ms=1000.0)
    certain = watched(HopelessRule(limits, schedule(200), None, alpha=0.0), records)
    probable = watched(HopelessRule(limits, schedule(200), None), records)
    assert certain == 22
    assert probable is not None
    assert probable < 22


def test_the_ramp_of_a_closed_loop_is_no_evidence() -> None:
    """Sixteen users begin at once and wait for each other; that is not the load in the long run."""
    records = [record(i, 2.0 if i < 16 else 0.5, 3.0) for i in range(400)]
    limits = goal(ttft_p95_ms=1000.0)  # twenty may be above
    assert watched(HopelessRule(limits, schedule(400, concurrency=16), None), records) is None


@pytest.mark.parametrize("objective", ["goodput_tps", "e2el_p95_ms"])
def test_objectives_that_no_request_has_are_not_compared(objective: str) -> None:
    best = measured([record(i, 0.1, 1.0) for i in range(60)])
    run = [record(i, 0.1, 5.0) for i in range(60)]
    assert watched(HopelessRule(goal(objective), schedule(60), best), run) is None


def test_a_throughput_at_a_given_rate_is_not_compared() -> None:
    best = measured([record(i, 0.1, 1.0) for i in range(60)])
    run = [record(i, 0.1, 5.0) for i in range(60)]
    open_loop = schedule(60, concurrency=None)
    assert watched(HopelessRule(goal(), open_loop, best), run) is None
    assert watched(HopelessRule(goal("e2el_mean_ms"), open_loop, best), run) is not None
