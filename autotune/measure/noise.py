"""A/A analysis: how far repeated launches of one config differ, and what that lets a budget see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from autotune.measure.distributions import chi_square_quantile, t_quantile
from autotune.measure.launch_spread import estimate_launch_spread
from autotune.measure.metrics import FloatArray, Limits, observed
from autotune.measure.records import Measurement
from autotune.measure.stats import CONFIDENCE, Interval, ratio_interval
from autotune.measure.structure import STRUCTURED_THROUGHPUT, structured_throughputs_tps

POWER = 0.8
"""Chance to see a gain that is there; the customary value (Cohen 1988)."""
SHOWN_LAUNCHES = (2, 3, 5, 8)


@dataclass(frozen=True)
class Spread:
    """A coefficient of variation with its 95 % interval."""

    cv_ratio: float
    low: float
    high: float
    num_degrees_of_freedom: int


@dataclass(frozen=True)
class NoiseReport:
    """What repeated launches of one config say about one metric."""

    metric: str
    mean: float
    """In the metric's own unit."""
    num_launches: int
    num_measurements: int
    num_requests: int
    """Of all measurements together."""
    between_launches: Spread
    """Of each launch's mean figure."""
    within_launches: Spread | None
    """Of repeated measurements of one launch; None where each launch was measured once."""
    detectable_gain_ratio: dict[int, float]
    """By launches a side: the smallest gain that so many launches would show, 0.05 is 5 %."""
    null_ratios: tuple[Interval, ...]
    """Each launch against every other one; the truth is 1. From four launches on, the spread between
    launches is taken from those that are not compared, so about 95 % should cover 1. With fewer there is
    none, and what does not cover 1 shows that launches differ by more than their requests explain. Empty
    for the structured throughput."""

    @property
    def num_null_covered(self) -> int:
        return sum(interval.low <= 1 <= interval.high for interval in self.null_ratios)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def noise_report(
    metric: str, launches: Sequence[Sequence[Measurement]], limits: Limits | None = None
) -> NoiseReport | None:
    """Analyse A/A launches.

    Args:
        metric: a metric of the glossary, or ``structured_throughput_tps``.
        launches: for each launch its measurements, at least one; at least two launches; all of one
            config and one schedule.
        limits: each class's limits, for goodputs.

    Returns:
        None where a measurement does not have the metric, or has none of it.
    """
    figures = _figures(metric, launches, limits)
    everything = np.concatenate(figures)
    if not (np.isfinite(everything).all() and (everything > 0).all()):
        return None
    # Logarithms, so that spreads are relative and the same for a metric and its inverse.
    logs = [np.log(of_launch) for of_launch in figures]
    means = np.array([launch.mean() for launch in logs])
    between = spread_of(float(((means - means.mean()) ** 2).sum()), len(means) - 1)
    free = sum(len(launch) - 1 for launch in logs)
    squares = float(sum(((launch - launch.mean()) ** 2).sum() for launch in logs))
    return NoiseReport(
        metric=metric,
        mean=float(everything.mean()),
        num_launches=len(launches),
        num_measurements=len(everything),
        num_requests=sum(len(m.records) for launch in launches for m in launch),
        between_launches=between,
        within_launches=spread_of(squares, free) if free else None,
        detectable_gain_ratio={
            n: detectable_gain_ratio(between.cv_ratio, n) for n in SHOWN_LAUNCHES
        },
        null_ratios=()
        if metric == STRUCTURED_THROUGHPUT
        else _null_ratios(metric, launches, limits),
    )


def _figures(
    metric: str, launches: Sequence[Sequence[Measurement]], limits: Limits | None
) -> list[FloatArray]:
    """Return each launch's figures, one of each measurement."""
    if metric == STRUCTURED_THROUGHPUT:
        pool = [m for launch in launches for m in launch]
        return [structured_throughputs_tps(launch, pool) for launch in launches]
    return [np.array([observed(metric, m, limits) for m in launch]) for launch in launches]


def spread_of(sum_of_squares: float, num_degrees_of_freedom: int) -> Spread:
    """Turn squared deviations of logarithms into a coefficient of variation.

    The interval is that of a normal variance: sum / chi-square quantiles (Snedecor and Cochran 1989,
    section 5.10). For spreads under 30 % the standard deviation of the logarithm is the CV within
    2 % of its value.
    """
    tail = (1 - CONFIDENCE) / 2
    upper = chi_square_quantile(1 - tail, num_degrees_of_freedom)
    lower = chi_square_quantile(tail, num_degrees_of_freedom)
    return Spread(
        cv_ratio=math.sqrt(sum_of_squares / num_degrees_of_freedom),
        low=math.sqrt(sum_of_squares / upper),
        high=math.sqrt(sum_of_squares / lower),
        num_degrees_of_freedom=num_degrees_of_freedom,
    )


def detectable_gain_ratio(cv_ratio: float, num_launches: int) -> float:
    """Return the smallest gain that shows with 80 % probability at two-sided 95 % confidence.

    exp((t(0.975, d) + t(0.8, d)) * CV * sqrt(2 / n)) - 1 with d = 2 (n - 1): two sides of n launches
    each, neither paired (Snedecor and Cochran 1989, section 6.14; Student's t in place of the normal
    2.8 for small n).

    With normal quantiles that is n = 2 (2.8 CV / gain)^2. What prompts do to two different configs
    comes on top: repeating one config cannot show it.

    Args:
        cv_ratio: spread between launches.
        num_launches: of each side, at least 2.
    """
    free = 2 * (num_launches - 1)
    needed = t_quantile((1 + CONFIDENCE) / 2, free) + t_quantile(POWER, free)
    return math.expm1(needed * cv_ratio * math.sqrt(2 / num_launches))


def _null_ratios(
    metric: str, launches: Sequence[Sequence[Measurement]], limits: Limits | None
) -> tuple[Interval, ...]:
    """Compare each launch's first measurement with that of every other launch.

    A spread that the compared launches are part of would make the check pass whatever they do.
    """
    firsts = [launch[0] for launch in launches]
    found = []
    for one, other in combinations(range(len(firsts)), 2):
        rest = [m for i, m in enumerate(firsts) if i not in (one, other)]
        spread = estimate_launch_spread(metric, [rest], limits)
        found.append(
            ratio_interval(metric, [firsts[one]], [firsts[other]], limits, launch_spread=spread)
        )
    return tuple(interval for interval in found if interval is not None)
