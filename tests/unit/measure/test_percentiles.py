"""Intervals of percentiles: exact binomial arithmetic, and what dependence does to them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.measure.percentiles import percentile_bounds
from autotune.traffic.arithmetic import min_requests_for

CONFIDENCE = 0.95


def single(n: int) -> np.ndarray:
    """Every value its own cluster."""
    return np.arange(n)


def test_the_median_of_six_lies_between_the_extremes() -> None:
    # P(all six on one side of the median) = 2 / 2^6 = 3.1 %, so the extremes enclose it with 96.9 %:
    # with 95 % a little less far out, but beyond the second and fifth (2 x 7 / 64 = 21.9 % outside).
    found = percentile_bounds(np.arange(1.0, 7.0), single(6), 50, CONFIDENCE)
    assert found.estimate == 3.5
    assert 1.0 < found.low < 2.0
    assert 5.0 < found.high < 6.0
    assert found.low - 1 == pytest.approx(6 - found.high)


def test_whole_ranks_are_those_of_the_binomial_distribution() -> None:
    """Where a rank has exactly the doubt asked for, that very value bounds."""
    # The 3rd of 20 lies below the median unless 2 or fewer of 20 do: 211 / 2^20 on each side.
    outside = 2 * sum(math.comb(20, i) for i in range(3)) / 2**20
    found = percentile_bounds(np.arange(1.0, 21.0), single(20), 50, 1 - outside)
    assert (found.low, found.high) == pytest.approx((3, 18), abs=1e-6)


@pytest.mark.parametrize(("percentile", "num_requests"), [(95, 59), (99, 299), (90, 29)])
def test_a_percentile_has_an_upper_bound_from_the_documented_number_on(
    percentile: float, num_requests: int
) -> None:
    assert min_requests_for(percentile) == num_requests
    for n in (num_requests - 1, num_requests):
        found = percentile_bounds(np.arange(float(n)), single(n), percentile, CONFIDENCE)
        assert math.isinf(found.high) is (n < num_requests)
        assert 0 < found.low < found.estimate
    # Just enough: the largest value, with nearly all of the doubt, and so the lowest lower bound.
    assert found.high == pytest.approx(num_requests - 1, abs=0.05)


def test_a_low_percentile_may_have_no_lower_bound() -> None:
    found = percentile_bounds(np.arange(1.0, 6.0), single(5), 10, CONFIDENCE)
    assert found.low == 0.0
    assert 1 < found.high < 5


def test_far_too_few_values_bound_nothing() -> None:
    found = percentile_bounds(np.array([3.0, 4.0]), single(2), 50, CONFIDENCE)
    assert (found.low, found.high) == (0.0, math.inf)


def test_the_largest_of_all_has_no_upper_bound() -> None:
    found = percentile_bounds(np.array([5.0, 9.0, 7.0]), single(3), None, CONFIDENCE)
    assert (found.estimate, found.low, found.high) == (9.0, 9.0, math.inf)


def test_equal_values_leave_no_width() -> None:
    found = percentile_bounds(np.full(100, 7.0), single(100), 95, CONFIDENCE)
    assert (found.low, found.estimate, found.high) == (7, 7, 7)


def test_copies_of_a_prompt_bring_no_knowledge() -> None:
    """Eight equal values a prompt: what is known of the median is what one of each tells, or less."""
    rng = np.random.default_rng(1)
    values = rng.lognormal(0, 1, 50)
    alone = percentile_bounds(values, single(50), 50, CONFIDENCE)
    copied = percentile_bounds(np.repeat(values, 8), np.repeat(single(50), 8), 50, CONFIDENCE)
    ignored = percentile_bounds(np.repeat(values, 8), single(400), 50, CONFIDENCE)
    assert copied.low <= alone.low * 1.05
    assert copied.high >= alone.high * 0.95
    assert ignored.high - ignored.low < 0.6 * (alone.high - alone.low)


def test_repeats_that_have_nothing_in_common_count_in_full() -> None:
    rng = np.random.default_rng(2)
    values = rng.lognormal(0, 1, 400)
    clustered = percentile_bounds(values, np.repeat(single(200), 2), 50, CONFIDENCE)
    independent = percentile_bounds(values, single(400), 50, CONFIDENCE)
    width = (clustered.high - clustered.low) / (independent.high - independent.low)
    assert width == pytest.approx(1, abs=0.15)
