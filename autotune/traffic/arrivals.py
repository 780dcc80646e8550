"""When requests arrive: the random processes behind the loads, drawn from a seed."""

from __future__ import annotations

import itertools
import random

from autotune.traffic.loads import (
    ConstantThinkTime,
    ExponentialThinkTime,
    RateLoad,
    Stage,
    StagesLoad,
    ThinkTime,
)

_SMALLEST_GAP = 1e-12
"""A very bursty draw may round to 0; gaps that are all 0 would leave nothing to rescale."""


def rate_arrivals_s(load: RateLoad, count: int, rng: random.Random) -> list[float]:
    """Arrival times, the first at 0, rescaled so that the mean rate is exact for every seed.

    Without the rescaling two seeds of a short Poisson run differ by some per cent in rate, which
    would be read as a difference between configs (vLLM's own benchmark does the same).
    """
    gaps = _gaps(load, count - 1, rng)
    scale = (count - 1) / load.rps / sum(gaps) if gaps else 0.0
    return list(itertools.accumulate((gap * scale for gap in gaps), initial=0.0))


def stage_arrivals_s(load: StagesLoad, rng: random.Random) -> list[float]:
    """Arrival times of all stages; each stage has exactly its rate times its duration of them.

    A stage's gaps fill it: half the first one before the first arrival, half after the last.
    """
    arrivals: list[float] = []
    start_s = 0.0
    for stage, count in zip(load.stages, load.arrivals_of_stages, strict=True):
        gaps = _gaps(stage, count, rng)
        if gaps:
            scale = stage.duration_s / sum(gaps)
            times = itertools.accumulate(gaps[1:], initial=gaps[0] / 2)
            arrivals += [start_s + time * scale for time in times]
        start_s += stage.duration_s
    return arrivals


def _gaps(load: RateLoad | Stage, count: int, rng: random.Random) -> list[float]:
    """Draw gaps of mean 1."""
    if load.arrival == "constant":
        return [1.0] * count
    if load.arrival == "poisson":
        return [rng.expovariate(1.0) for _ in range(count)]
    shape = load.burstiness
    assert shape is not None  # the model's validator demands it of gamma arrivals
    return [max(rng.gammavariate(shape, 1 / shape), _SMALLEST_GAP) for _ in range(count)]


def think_time_s(think: ThinkTime, rng: random.Random) -> float:
    """Draw one wait between an answer and the next request."""
    if isinstance(think, ConstantThinkTime):
        return think.s
    if isinstance(think, ExponentialThinkTime):
        return rng.expovariate(1 / think.mean_s)
    return think.median_s * rng.lognormvariate(0.0, think.sigma)
