"""How far an interval reaches below and above an estimate, on the logarithmic (or log-odds) scale.

One module for what a single set of prompts can say; the spread between launches joins in
`autotune.measure.stats`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from autotune.measure.distributions import t_quantile
from autotune.measure.metrics import (
    ATTAINMENT,
    THROUGHPUT_OF_GOODPUT,
    FloatArray,
    Latency,
    quotient_parts,
    values_of,
)
from autotune.measure.percentiles import percentile_bounds
from autotune.measure.proportions import log_odds, share_bounds
from autotune.measure.resampling import Design, Draws, draws_of

UNBOUNDED = math.log(1e9)
"""An interval that reaches a factor of 1e9 away says nothing about that side. The number stands for
infinity, which neither JSON nor Optuna takes."""
_NO_SPREAD = 1e-12
"""Less is rounding."""


@dataclass(frozen=True)
class HalfWidths:
    """Distances from the estimate to both ends, `UNBOUNDED` at most."""

    below: float
    above: float

    @classmethod
    def unknown(cls) -> Self:
        return cls(UNBOUNDED, UNBOUNDED)

    @classmethod
    def bounded(cls, below: float, above: float) -> Self:
        return cls(min(below, UNBOUNDED), min(above, UNBOUNDED))

    def scaled(self, factor: float) -> HalfWidths:
        """Return the widths times a factor of 1 or less; a side without a bound stays so."""
        return HalfWidths(
            *(side * factor if side < UNBOUNDED else side for side in (self.below, self.above))
        )

    def combined(self, other: HalfWidths, correlation: float = 0.0) -> HalfWidths:
        """Return the widths for the sum of two estimates.

        The square root of the sum of squares, side by side: the method of variance estimates
        recovery (MOVER; Zou and Donner 2008). It keeps the sides' difference and each part's own
        degrees of freedom, and with few of them errs on the wide side.

        Args:
            other: of the other estimate.
            correlation: between both, 0 where they are independent.
        """

        def joined(one: float, two: float) -> float:
            return math.sqrt(one * one + two * two + 2 * correlation * one * two)

        return HalfWidths.bounded(joined(self.below, other.below), joined(self.above, other.above))

    def wider(self, other: HalfWidths) -> HalfWidths:
        """Return the wider of both, side by side."""
        return HalfWidths(max(self.below, other.below), max(self.above, other.above))


def of_variance(variance: float, degrees_of_freedom: float, confidence: float) -> HalfWidths:
    """Student's half-widths of an estimate with this variance."""
    if degrees_of_freedom <= 0 or not math.isfinite(variance):
        return HalfWidths.unknown()
    half = t_quantile((1 + confidence) / 2, degrees_of_freedom) * math.sqrt(variance)
    return HalfWidths.bounded(half, half)


def of_draws(draws: Draws, contrast: FloatArray, confidence: float) -> HalfWidths:
    """Half-widths of a mean, a throughput or a ratio, from draws of the prompts.

    The standard error is the bootstrap's, on the logarithmic scale, the quantile Student's with the
    clusters' degrees of freedom. A percentile bootstrap is too narrow with few prompts
    (docs/statistics.md has how much).
    """
    free = draws.design.num_degrees_of_freedom
    return of_variance(draws.variance_of(contrast), free, confidence)


def of_percentile(latency: Latency, design: Design, confidence: float) -> HalfWidths:
    """Half-widths of a percentile from order statistics, see `percentile_bounds`.

    The requests of several launches are taken together. A percentile of 0 has no logarithm, so
    nothing is known about it.
    """
    parts, clusters = [], []
    for samples, owners in zip(design.arms, design.owners, strict=True):
        values, requests = values_of(latency, samples)
        parts.append(values)
        clusters.append(owners[requests])
    found = percentile_bounds(
        np.concatenate(parts), np.concatenate(clusters), latency.percentile, confidence
    )
    if found.estimate <= 0:
        return HalfWidths.unknown()
    below = math.log(found.estimate / found.low) if found.low > 0 else UNBOUNDED
    return HalfWidths.bounded(below, math.log(found.high / found.estimate))


def of_goodput(
    name: str,
    design: Design,
    contrast: FloatArray,
    weights: FloatArray,
    draws: Draws,
    confidence: float,
) -> HalfWidths:
    """Half-widths of a goodput: of the throughput of all answers, and of the good ones' share of it.

    Draws see no spread in a share of nearly 1 that happens to have no miss, and too little in one
    with a few; Wilson's interval does. That both move together shows in the draws.
    """
    of_all = THROUGHPUT_OF_GOODPUT[name]
    all_draws = draws_of(of_all, design, weights)
    amounts = np.concatenate([quotient_parts(of_all, arm)[0] for arm in design.arms])
    is_good = np.concatenate([arm.is_good for arm in design.arms])
    share, low, high = share_bounds(
        is_good.astype(np.float64), np.concatenate(design.owners), amounts, confidence
    )
    of_share = HalfWidths.bounded(
        math.log(share / low) if low > 0 else UNBOUNDED, math.log(high / share)
    )
    is_usable = all_draws.is_usable & draws.is_usable
    throughputs = all_draws.values[is_usable] @ contrast
    shares = draws.values[is_usable] @ contrast - throughputs
    correlation = max(0.0, _correlation(throughputs, shares))
    return of_draws(all_draws, contrast, confidence).combined(of_share, correlation)


def _correlation(one: FloatArray, two: FloatArray) -> float:
    """Correlation of two rows; 0 where one of them does not vary."""
    if len(one) < 2 or min(float(np.ptp(one)), float(np.ptp(two))) < _NO_SPREAD:
        return 0.0
    return float(np.corrcoef(one, two)[0, 1])


def of_attainment(design: Design, confidence: float) -> tuple[float, HalfWidths]:
    """Return the log-odds of an attainment and Wilson's half-widths around them.

    The requests of several launches are taken together. Half a request is added on both sides, so that
    none and all have log-odds too.
    """
    good = np.concatenate([quotient_parts(ATTAINMENT, arm)[0] for arm in design.arms])
    owners = np.concatenate(design.owners)
    _, low, high = share_bounds(good, owners, np.ones(len(good)), confidence)
    centre = log_odds((good.sum() + 0.5) / (len(good) + 1))
    return centre, HalfWidths.bounded(
        max(0.0, centre - log_odds(low)), max(0.0, log_odds(high) - centre)
    )
