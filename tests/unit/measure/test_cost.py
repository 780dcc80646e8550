"""Costs, by arithmetic that a reader can redo."""

from __future__ import annotations

import pytest

from autotune.measure.cost import cost_interval_usd, cost_per_solved_task_usd
from autotune.measure.stats import Interval


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, num_requests=40, num_launches=2)


def test_a_million_tokens_cost_the_hours_they_take() -> None:
    # 1,000 tokens/s are 3.6 million an hour: 3.60 $/h are 1 $ per million. Two GPUs cost twice that.
    found = cost_interval_usd(interval(1000, 500, 2000), gpu_hourly_usd=3.6)
    twice = cost_interval_usd(interval(1000, 500, 2000), gpu_hourly_usd=3.6, gpus=2)

    assert found == interval(pytest.approx(1), pytest.approx(0.5), pytest.approx(2))
    assert twice is not None
    assert twice.estimate == pytest.approx(2)


def test_a_solved_task_costs_its_share_of_the_unsolved_ones() -> None:
    # 2 requests/s are 7,200 an hour; at 7.20 $/h one costs 0.001 $, and half of them are solved.
    found = cost_per_solved_task_usd(interval(2, 1, 4), solved_ratio=0.5, gpu_hourly_usd=7.2)

    assert found == interval(pytest.approx(0.002), pytest.approx(0.001), pytest.approx(0.004))


@pytest.mark.parametrize("nothing", [interval(0, 0, 10), interval(10, 0, 20)])
def test_without_a_throughput_there_is_no_cost(nothing: Interval) -> None:
    assert cost_interval_usd(nothing, gpu_hourly_usd=1) is None


def test_without_a_solved_task_there_is_no_cost_of_one() -> None:
    assert cost_per_solved_task_usd(interval(2, 1, 4), solved_ratio=0, gpu_hourly_usd=1) is None
