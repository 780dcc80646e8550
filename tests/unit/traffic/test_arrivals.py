"""Arrivals of every kind of load, against what the load says of them."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.traffic.arrivals import rate_arrivals_s, stage_arrivals_s, think_time_s
from autotune.traffic.loads import (
    ConstantThinkTime,
    ExponentialThinkTime,
    LognormalThinkTime,
    RateLoad,
    StagesLoad,
    ThinkTime,
)


def rate(**fields: object) -> RateLoad:
    return RateLoad.model_validate({"kind": "rate", "rps": 5.0, **fields})


def stages(*each: dict[str, object]) -> StagesLoad:
    return StagesLoad.model_validate({"kind": "stages", "stages": each})


def gaps_of(times: list[float]) -> list[float]:
    return [b - a for a, b in zip(times, times[1:], strict=False)]


# --- rate ---


@pytest.mark.parametrize("shape", [0.25, 0.6, 1.0, 4.0])
def test_the_shape_of_gamma_arrivals_comes_back_from_the_gaps(shape: float) -> None:
    # Shape = 1 / CV^2. With n gaps the standard error of an estimated variance is about
    # sqrt((kurtosis - 1) / n) of it, and a gamma's kurtosis is 3 + 6 / shape: for 0.25 that is 27,
    # so sqrt(26 / 5000) = 7 %. 20 % are nearly three of them, and less for larger shapes.
    load = rate(arrival="gamma", burstiness=shape)
    gaps = gaps_of(rate_arrivals_s(load, 5001, random.Random(3)))
    cv = statistics.stdev(gaps) / statistics.mean(gaps)
    assert 1 / cv**2 == pytest.approx(shape, rel=0.2)


def test_shapes_are_told_apart() -> None:
    found = []
    for shape in (0.25, 1.0, 4.0):
        load = rate(arrival="gamma", burstiness=shape)
        found.append(statistics.stdev(gaps_of(rate_arrivals_s(load, 5001, random.Random(3)))))
    # CV = 1 / sqrt(shape) = 2, 1, 0.5 of a mean gap of 0.2 s.
    assert found == pytest.approx([0.4, 0.2, 0.1], rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.just({"arrival": "poisson"}),
        st.just({"arrival": "constant"}),
        st.floats(0.001, 1e9).map(lambda shape: {"arrival": "gamma", "burstiness": shape}),
    ),
    st.integers(2, 200),
    st.floats(1e-3, 1e5),
    st.integers(0, 2**32 - 1),
)
def test_the_mean_rate_is_exact_whatever_the_gaps(
    kind: dict[str, object], count: int, rps: float, seed: int
) -> None:
    times = rate_arrivals_s(rate(rps=rps, **kind), count, random.Random(seed))
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rps)


# --- stages ---


def test_stages_have_their_rate_times_their_duration_inside_their_time() -> None:
    # 4 x 30 = 120 arrivals in [0, 30), 12 x 10 = 120 in [30, 40), 1 x 20 = 20 in [40, 60).
    load = stages(
        {"rps": 4, "duration_s": 30},
        {"rps": 12, "duration_s": 10, "arrival": "gamma", "burstiness": 0.3},
        {"rps": 1, "duration_s": 20, "arrival": "constant"},
    )
    assert load.arrivals_of_stages == (120, 120, 20)
    for seed in range(5):
        times = stage_arrivals_s(load, random.Random(seed))
        assert times == sorted(times)
        assert sum(0 < time < 30 for time in times) == 120
        assert sum(30 < time < 40 for time in times) == 120
        assert sum(40 < time < 60 for time in times) == 20


def test_constant_stages_are_evenly_spaced_also_across_their_border() -> None:
    load = stages(*[{"rps": 2, "duration_s": 2, "arrival": "constant"}] * 2)
    # Half a gap, then a gap of 1 / 2 s each.
    assert stage_arrivals_s(load, random.Random()) == pytest.approx(
        [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75]
    )


def test_what_rounding_takes_from_a_stage_a_later_one_gets() -> None:
    # 0.3 each: 0.3, 0.6, 0.9, 1.2, 1.5 in all; rounded 0, 1, 1, 1, 2.
    load = stages(*[{"rps": 0.3, "duration_s": 1}] * 5)
    assert load.arrivals_of_stages == (0, 1, 0, 0, 1)
    assert len(stage_arrivals_s(load, random.Random(1))) == 2


# --- think times ---


@pytest.mark.parametrize(
    ("think", "mean_s", "median_s"),
    [
        (ConstantThinkTime(dist="constant", s=3), 3, 3),
        # The median of an exponential is ln 2 of its mean.
        (ExponentialThinkTime(dist="exponential", mean_s=4), 4, 4 * math.log(2)),
        # The mean of a lognormal is exp(sigma^2 / 2) of its median.
        (LognormalThinkTime(dist="lognormal", median_s=8, sigma=0.6), 8 * math.exp(0.18), 8),
    ],
    ids=["constant", "exponential", "lognormal"],
)
def test_think_times_follow_their_distribution(
    think: ThinkTime, mean_s: float, median_s: float
) -> None:
    rng = random.Random(5)
    drawn = [think_time_s(think, rng) for _ in range(5000)]
    assert think.mean_wait_s == pytest.approx(mean_s)
    assert statistics.mean(drawn) == pytest.approx(mean_s, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(median_s, rel=0.05)
