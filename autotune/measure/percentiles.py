"""Intervals of percentiles from order statistics: no shape of the distribution is assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autotune.measure.distributions import beta_cdf
from autotune.measure.effective_size import effective_size, ranks, within_correlation
from autotune.measure.metrics import FloatArray, IntArray


@dataclass(frozen=True)
class Bounds:
    """A percentile and the values that enclose it."""

    estimate: float
    low: float
    high: float
    """Infinite where even the largest value is no upper bound at that confidence."""


def percentile_bounds(
    values: FloatArray, clusters: IntArray, percentile: float | None, confidence: float
) -> Bounds:
    """Enclose a percentile of what `values` were drawn from.

    Of n independent values the k-th smallest lies below the p-quantile with probability
    I_p(k, n + 1 - k), a beta distribution's (David and Nagaraja 2003, section 7.1); fractional k
    interpolate between neighbours (Hutson 1999), which gives the confidence asked for instead of
    the next higher one that whole k allow. Values of one cluster are not independent: n is then the
    effective number by the correlation of their ranks (`effective_size`), and ranks are scaled back to the
    values at hand, as Woodruff (1952) does for survey data. Ranks, because above a p95 are too few values
    to learn a correlation from; theirs is higher than the one that counts, so this is on the wide side.

    Half of the doubt goes to each side. Where the largest value can be an upper bound only at a
    lower confidence (p^n above that half), it gets what it needs, up to all of it: so a p95 has an
    upper bound from 59 requests on, a p99 from 299 (`min_requests_for`). With fewer all doubt goes to
    the lower bound and there is no upper one; the same the other way round for low percentiles.

    Args:
        values: shape (n,), n >= 1.
        clusters: of each value, shape (n,), integers from 0.
        percentile: 0 to 100, both excluded; None for the largest value of all, which has no upper
            bound.
        confidence: such as 0.95.
    """
    values_order = np.sort(values)
    if percentile is None:
        return Bounds(float(values_order[-1]), float(values_order[-1]), float("inf"))
    p = percentile / 100
    estimate = float(np.percentile(values, percentile))
    size = effective_size(clusters, within_correlation(ranks(values), clusters), confidence)
    below, above = _doubts(p, size, 1 - confidence)

    def value_at(rank: float) -> float:
        position = rank / (size + 1) * (len(values) + 1) - 1
        return float(np.interp(position, np.arange(len(values)), values_order))

    low = (
        value_at(_rank(lambda k: beta_cdf(p, k, size + 1 - k), 1 - below, size)) if below else 0.0
    )
    high = (
        value_at(_rank(lambda k: beta_cdf(p, k, size + 1 - k), above, size)) if above else np.inf
    )
    return Bounds(estimate, min(low, estimate), max(high, estimate))


def _doubts(p: float, size: float, doubt: float) -> tuple[float, float]:
    """Share the doubt among the lower and the upper bound; 0 where there is no such bound."""
    least_above, least_below = p**size, (1 - p) ** size
    if least_above > doubt:
        return (doubt, 0.0) if least_below <= doubt else (0.0, 0.0)
    if least_below > doubt:
        return 0.0, doubt
    above = max(doubt / 2, least_above)
    below = max(doubt - above, least_below)
    return below, doubt - below


def _rank(probability_at: Callable[[float], float], target: float, size: float) -> float:
    """Find the rank in [1, size] at which a falling probability comes down to `target`."""
    low, high = 1.0, size
    for _ in range(60):
        middle = (low + high) / 2
        if probability_at(middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
