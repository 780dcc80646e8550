"""Shares of requests: Wilson's published example, and what dependence does to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.measure.effective_size import effective_size, ranks, within_correlation
from autotune.measure.proportions import from_log_odds, log_odds, share_bounds, wilson

CONFIDENCE = 0.95


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, table I, method 3 (score, without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_published_one(
    successes: int, n: int, low: float, high: float
) -> None:
    assert wilson(successes / n, n, CONFIDENCE) == pytest.approx((low, high), abs=5e-5)


def test_none_and_all_mirror_each_other() -> None:
    low, high = wilson(1.0, 20, CONFIDENCE)
    assert (low, high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert high == 1.0


def test_single_requests_give_wilsons_interval() -> None:
    counted = np.array([1.0] * 90 + [0.0] * 10)
    ratio, low, high = share_bounds(counted, np.arange(100), np.ones(100), CONFIDENCE)
    assert ratio == 0.9
    assert (low, high) == wilson(0.9, 100, CONFIDENCE)


def test_weights_shift_the_share_and_cost_knowledge() -> None:
    # Two of four requests count, with weights 3 and 1 of 1, 1, 1, 3: (3 + 1) / 6. They are as good as
    # 6^2 / 12 = 3 requests of equal weight. A weight of 0 leaves a request out.
    counted = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    weights = np.array([1.0, 1.0, 1.0, 3.0, 0.0])
    ratio, low, high = share_bounds(counted, np.arange(5), weights, CONFIDENCE)
    assert ratio == pytest.approx(4 / 6)
    assert (low, high) == pytest.approx(wilson(4 / 6, 3.0, CONFIDENCE))


def test_prompts_that_always_miss_count_once_whatever_their_repeats() -> None:
    counted = np.repeat([1.0] * 18 + [0.0] * 2, 5)
    owners = np.repeat(np.arange(20), 5)
    _, low, high = share_bounds(counted, owners, np.ones(100), CONFIDENCE)
    once = wilson(0.9, 20, CONFIDENCE)
    assert high - low > 0.95 * (once[1] - once[0])


def test_without_a_miss_repeats_are_not_believed() -> None:
    _, low, high = share_bounds(
        np.ones(100), np.repeat(np.arange(20), 5), np.ones(100), CONFIDENCE
    )
    assert high == 1.0
    assert low <= wilson(1.0, 20, CONFIDENCE)[0]


def test_effective_size_by_hand() -> None:
    # 10 clusters of 4: 40 / (1 + 3 x 0.5) = 16, times (t(0.975, 39) / t(0.975, 9))^2 =
    # (2.0227 / 2.2622)^2 = 0.7995.
    owners = np.repeat(np.arange(10), 4)
    assert effective_size(owners, 0.5, CONFIDENCE) == pytest.approx(16 * 0.7995, rel=1e-3)
    assert effective_size(np.arange(7), 0.5, CONFIDENCE) == 7
    assert effective_size(np.zeros(7, dtype=int), 0.0, CONFIDENCE) == 1


def test_correlation_by_hand() -> None:
    # Clusters (1, 3) and (5, 7), mean 4: between 2 x (2 - 4)^2 + 2 x (6 - 4)^2 = 16 with 1 degree,
    # within 4 x 1 = 4 with 2. (16 - 2) / (16 + 2) = 0.778.
    owners = np.array([0, 0, 1, 1])
    assert within_correlation(np.array([1.0, 3, 5, 7]), owners) == pytest.approx(14 / 18)
    assert within_correlation(np.array([1.0, 7, 1, 7]), owners) == 0  # less alike than strangers
    assert within_correlation(np.array([2.0, 2, 2, 2]), owners) == 1


def test_ties_share_their_rank() -> None:
    assert ranks(np.array([30.0, 10, 20, 20])) == pytest.approx([4, 1, 2.5, 2.5])


def test_log_odds_and_back() -> None:
    assert log_odds(0.8) == pytest.approx(math.log(4))
    assert from_log_odds(math.log(4)) == pytest.approx(0.8)
    assert from_log_odds(-math.log(4)) == pytest.approx(0.2)
    assert (log_odds(0.0), log_odds(1.0)) == (-math.inf, math.inf)
    assert (from_log_odds(-math.inf), from_log_odds(math.inf)) == (0, 1)
