"""Intervals and tests of shares, against published and hand-made figures."""

from __future__ import annotations

import math

import pytest

from autotune.measure.quality.shares import (
    Share,
    difference_interval,
    mcnemar_exact,
)


def test_wilson_interval_of_a_published_example() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29,
    # score method without continuity correction.
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0000, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (count, total), (low, high) in published.items():
        assert Share(count, total).interval == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_of_everything_and_of_nothing() -> None:
    # At 100 % the bounds mirror those at 0 %; without any question nothing is known.
    assert Share(20, 20).interval == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert Share(0, 0).interval == (0.0, 1.0)
    assert math.isnan(Share(0, 0).ratio)


def test_difference_interval_of_a_published_example() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:873), table II, method 10: 56/70 - 48/80 and 9/10 - 3/10.
    published = {
        ((56, 70), (48, 80)): (0.0524, 0.3339),
        ((9, 10), (3, 10)): (0.1705, 0.8090),
        ((10, 10), (0, 10)): (0.6075, 1.0000),
    }
    for (a, b), (low, high) in published.items():
        assert difference_interval(Share(*a), Share(*b)) == pytest.approx((low, high), abs=5e-5)


def test_mcnemar_is_the_binomial() -> None:
    # 6 to 0: 2 x (1/2)^6 = 0.03125. 8 to 1: 2 x (1 + 9) / 2^9 = 0.0390625. 5 to 2: 2 x (1+7+21)/128.
    assert mcnemar_exact(6, 0) == 0.03125
    assert mcnemar_exact(1, 8) == 0.0390625
    assert mcnemar_exact(5, 2) == 0.453125
    # An even split is the least uneven there is, and its two tails overlap.
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(0, 0) == 1.0


def test_mcnemar_of_many_questions_stays_a_number() -> None:
    # 2^3000 is beyond what a float can hold. An even split of 3000, then one of 1600 to 1400:
    # z = 200 / sqrt(3000) = 3.65, p about 2.6e-4.
    assert mcnemar_exact(1500, 1500) == 1.0
    assert mcnemar_exact(1600, 1400) == pytest.approx(2.6e-4, rel=0.1)
