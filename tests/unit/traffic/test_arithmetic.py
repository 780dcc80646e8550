"""How many of each class, how many a percentile needs, and what a thin limit is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.traffic.arithmetic import Pace, counts_by_weight, min_requests_for, thin_limits


@pytest.mark.parametrize(
    ("percentile", "expected"),
    [
        # The smallest n with 1 - q^n >= 0.95.
        (50, 5),  # 1 - 0.5^4 = 0.9375, 1 - 0.5^5 = 0.969
        (90, 29),  # 1 - 0.9^28 = 0.9477, 1 - 0.9^29 = 0.9529
        (95, 59),  # 1 - 0.95^58 = 0.9490, 1 - 0.95^59 = 0.9515
        (99, 299),  # 1 - 0.99^298 = 0.94997, 1 - 0.99^299 = 0.9505
    ],
)
def test_requests_that_a_percentile_needs(percentile: float, expected: int) -> None:
    assert min_requests_for(percentile) == expected
    assert 1 - (percentile / 100) ** expected >= 0.95 > 1 - (percentile / 100) ** (expected - 1)


def test_an_exact_power_needs_no_more_than_it_says() -> None:
    assert min_requests_for(50, 1 - 0.5**4) == 4


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.integers(0, 1000))
def test_counts_add_up_and_none_is_off_by_a_whole_one(weights: list[float], count: int) -> None:
    counts = counts_by_weight(weights, count)
    assert sum(counts) == count
    for weight, found in zip(weights, counts, strict=True):
        assert abs(found - count * weight / sum(weights)) < 1 + 1e-6


def test_a_thin_limit_says_how_long_it_would_take() -> None:
    # 59 requests at 0.3 x 6 = 1.8 a second: 32.8 s. 120 requests of all classes at 6 rps: 20 s.
    (line,) = thin_limits({"ttft_p95_ms": 800}, "code", 36, Pace(0.3, 6.0, 120))
    assert line == (
        "ttft_p95_ms: a p95 limit needs at least 59 requests of class 'code'; "
        "at 0.3 x 6 rps that takes 33 s, the window is 20 s"
    )


def test_without_a_pace_it_says_how_many_there_are() -> None:
    (line,) = thin_limits({"icl_p99_ms": 80}, "chat", 64, None)
    assert line == (
        "icl_p99_ms: a p99 limit needs at least 299 requests of class 'chat', "
        "one measurement has 64"
    )


@pytest.mark.parametrize(
    ("slo", "count", "is_thin"),
    [
        ({"ttft_p95_ms": 1.0}, 58, True),
        ({"ttft_p95_ms": 1.0}, 59, False),
        ({"tpot_p50_ms": 1.0}, 4, True),
        ({"tpot_p50_ms": 1.0}, 5, False),
        ({"tpot_mean_ms": 1.0}, 1, False),  # a mean is no percentile
        ({}, 1, False),
    ],
)
def test_when_a_limit_is_thin(slo: dict[str, float], count: int, is_thin: bool) -> None:
    assert bool(thin_limits(slo, "c", count, None)) is is_thin


def test_each_thin_limit_is_told() -> None:
    lines = thin_limits(
        {"ttft_p95_ms": 1.0, "tpot_p99_ms": 1.0, "e2el_p50_ms": 1.0}, "c", 20, None
    )
    assert [line.split(":")[0] for line in lines] == ["ttft_p95_ms", "tpot_p99_ms"]
