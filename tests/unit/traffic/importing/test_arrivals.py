"""Known arrival processes give their rate and shape back."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence

import pytest

from autotune.traffic.importing.arrivals import MAX_OUT_OF_ORDER, ArrivalRecorder, Arrivals

COUNT = 20_000


def recorded(times_s: Iterable[float]) -> Arrivals:
    recorder = ArrivalRecorder()
    for time_s in times_s:
        recorder.add(time_s)
    found = recorder.result()
    assert found is not None
    return found


def gamma_times(rps: float, shape: float, count: int = COUNT, seed: int = 1) -> list[float]:
    """Arrivals whose gaps are gamma distributed with this shape, as vLLM's burstiness means it."""
    rng = random.Random(seed)
    times, now = [], 1_000_000.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(shape, 1 / (shape * rps))
    return times


@pytest.mark.parametrize("shape", [0.3, 0.6, 1.0, 4.0])
def test_gamma_gaps_give_their_rate_and_shape_back(shape: float) -> None:
    found = recorded(gamma_times(5.0, shape))
    # The mean of n gaps has the relative standard error CV / sqrt(n); the shape, about 2 / sqrt(n)
    # and more for heavier tails.
    assert found.rate_rps == pytest.approx(5.0, rel=4 / math.sqrt(shape * COUNT))
    assert found.gamma_shape == pytest.approx(shape, rel=0.08)
    assert found.rate_swing == 0.0
    assert not found.is_clock_coarse


def test_the_figures_are_those_of_the_gaps() -> None:
    times = [0.0, 1.0, 3.0, 3.5, 10.0]
    gaps = [1.0, 2.0, 0.5, 6.5]
    found = recorded(times)
    assert (found.num_times, found.num_gaps, found.span_s, found.start_s) == (5, 4, 10.0, 0.0)
    assert found.rate_rps == pytest.approx(4 / 10)
    assert found.gap_cv == pytest.approx(statistics.pstdev(gaps) / statistics.mean(gaps))
    assert found.true_gap_cv == found.gap_cv
    assert found.resolution_s == 0.5


def test_constant_gaps_have_no_variation() -> None:
    found = recorded(float(second) for second in range(1000))
    assert found.gap_cv == found.true_gap_cv == pytest.approx(0.0, abs=1e-9)
    assert found.gamma_shape > 1e6
    assert found.resolution_s == 1.0
    assert not found.is_clock_coarse


# --- coarse clocks ---


@pytest.mark.parametrize(("tick_s", "rps"), [(1.0, 5.0), (3.0, 3.4), (0.1, 5.0)])
def test_a_coarse_clock_makes_no_process_bursty(tick_s: float, rps: float) -> None:
    times = gamma_times(rps, 1.0)
    coarse = recorded(math.floor(time / tick_s) * tick_s for time in times)
    assert coarse.is_clock_coarse
    assert coarse.resolution_s == pytest.approx(tick_s)
    assert coarse.true_gap_cv == pytest.approx(1.0, abs=0.04)
    assert coarse.rate_rps == pytest.approx(recorded(times).rate_rps, rel=1e-3)


def test_without_the_correction_whole_seconds_would_look_bursty() -> None:
    coarse = recorded(math.floor(time) for time in gamma_times(5.0, 1.0))
    # Of 5 gaps a second 0.9933 = 1 - e^-5 are not 0; their length D is geometric with that parameter,
    # E[D^2] = (2 - p) / p^2 = 1.0203. So E[gap^2] / E[gap]^2 = 0.9933 * 1.0203 / 5 / 0.2^2 = 5.07.
    assert coarse.gap_cv == pytest.approx(math.sqrt(5.07 - 1), rel=0.02)


def test_real_bursts_stay_bursts_on_a_coarse_clock() -> None:
    rng = random.Random(3)
    times = []
    for burst in range(500):
        start = burst * 60 + rng.uniform(0, 20)
        times += sorted(start + rng.uniform(0, 2) for _ in range(20))
    coarse = recorded(math.floor(time) for time in times)
    assert coarse.true_gap_cv == pytest.approx(recorded(times).gap_cv, rel=0.05)
    assert coarse.true_gap_cv > 3


# --- order ---


def test_times_that_are_a_little_out_of_order_are_put_in_order() -> None:
    times = gamma_times(5.0, 1.0, 5000)
    # Written when requests end, up to 60 s after they came.
    rng = random.Random(2)
    by_end = [t for _, t in sorted((t + rng.uniform(0, 60), t) for t in times)]
    assert by_end != times
    assert recorded(by_end) == recorded(times)


def test_times_that_are_far_out_of_order_are_counted() -> None:
    times = [float(n) for n in range(10_000)]
    found = recorded([*times[100:], *times[:100]])
    assert found.num_out_of_order == 100
    assert found.num_gaps == 9_899
    found = recorded([*times[1 : MAX_OUT_OF_ORDER + 1], times[0]])
    assert found.num_out_of_order == 0


# --- a rate that moves ---


def wave(depth: float, seed: int = 5) -> list[float]:
    """A Poisson process whose rate goes up and down by `depth` in a sine, by thinning."""
    rng = random.Random(seed)
    now, times = 0.0, []
    while now < 20_000:
        now += rng.expovariate(2.0 * (1 + depth))
        if rng.random() < (1 + depth * math.sin(now / 1000)) / (1 + depth):
            times.append(now)
    return times


def test_a_rate_that_moves_is_seen() -> None:
    # The standard deviation of a sine of this amplitude is 1 / sqrt(2) of it.
    found = recorded(wave(0.8)).rate_swing
    assert found == pytest.approx(0.8 / math.sqrt(2), rel=0.1)
    assert recorded(wave(0.0)).rate_swing == 0.0
    assert recorded(gamma_times(1.0, 1.0, 40)).rate_swing is None  # too few to tell


def test_the_ticks_of_a_coarse_clock_are_no_moving_rate() -> None:
    # 90 arrivals every 3 s: stretches of 2 or 4 s hold one tick or two.
    assert (
        recorded(3.0 * (n // 90) for n in range(5000)).rate_swing is None
    )  # 56 ticks are too few
    assert recorded(3.0 * (n // 90) for n in range(50_000)).rate_swing == 0.0


# --- counts over time ---


@pytest.mark.parametrize("span_s", [0.01, 30.0, 86_400.0, 1e9])
def test_counts_hold_every_arrival(span_s: float) -> None:
    times = [span_s * n / 999 for n in range(1000)]
    found = recorded(times)
    assert sum(found.counts) == 1000
    assert len(found.counts) <= 128
    assert found.count_s * len(found.counts) >= span_s
    in_first = sum(time < found.count_s for time in times)
    assert found.counts[0] == in_first


@pytest.mark.parametrize("times_s", [[], [5.0], [5.0, 5.0, 5.0]])
def test_times_that_say_nothing(times_s: Sequence[float]) -> None:
    recorder = ArrivalRecorder()
    for time_s in times_s:
        recorder.add(time_s)
    assert recorder.result() is None
