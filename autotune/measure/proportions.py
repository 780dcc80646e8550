"""Intervals of shares of requests, where requests of one prompt are not independent."""

from __future__ import annotations

import math

import numpy as np

from autotune.measure.distributions import normal_quantile
from autotune.measure.effective_size import effective_size, within_correlation
from autotune.measure.metrics import FloatArray, IntArray

NUM_PRIOR_CLUSTERS = 3
"""Weight of the assumption that requests of one prompt are all alike, in clusters."""


def log_odds(ratio: float) -> float:
    """Return log(p / (1 - p)); infinite at 0 and 1."""
    if ratio <= 0:
        return -math.inf
    return math.inf if ratio >= 1 else math.log(ratio / (1 - ratio))


def from_log_odds(value: float) -> float:
    """Return the ratio of these log-odds, 0 to 1."""
    return math.exp(value) / (1 + math.exp(value)) if value < 0 else 1 / (1 + math.exp(-value))


def wilson(ratio: float, size: float, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Wilson 1927; Brown, Cai and DasGupta 2001)."""
    z = normal_quantile((1 + confidence) / 2)
    middle = (ratio + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(ratio * (1 - ratio) / size + (z / (2 * size)) ** 2)
    # At 0 and 1 one bound is the share itself, but for rounding.
    low = 0.0 if ratio == 0 else max(0.0, middle - half)
    return low, 1.0 if ratio == 1 else min(1.0, middle + half)


def share_bounds(
    is_counted: FloatArray, clusters: IntArray, weights: FloatArray, confidence: float
) -> tuple[float, float, float]:
    """Return a weighted share of requests and Wilson's interval of it, at its effective size.

    How alike requests of one prompt are shows only in prompts that miss (or, where most miss, in
    those that do not). With few of them the correlation is drawn towards 1: in every launch a prompt
    meets the same place in the schedule, so it does mostly miss again. Unequal weights count as
    fewer requests of equal weight (Kish 1965).

    Args:
        is_counted: 1 for each request that counts, else 0, shape (n,).
        clusters: the cluster of each request, shape (n,), integers from 0.
        weights: of each request, shape (n,), 0 or more, not all 0.
        confidence: such as 0.95.
    """
    is_weighed = weights > 0
    counted, owners, weight = is_counted[is_weighed], clusters[is_weighed], weights[is_weighed]
    ratio = float((counted * weight).sum() / weight.sum())
    is_rare = counted == (0.0 if counted.mean() >= 0.5 else 1.0)
    num_telling = len(np.unique(owners[is_rare]))
    correlation = within_correlation(counted, owners) if num_telling else 1.0
    correlation = (num_telling * correlation + NUM_PRIOR_CLUSTERS) / (
        num_telling + NUM_PRIOR_CLUSTERS
    )
    size = effective_size(owners, correlation, confidence)
    size *= float(weight.sum() ** 2 / (weight**2).sum()) / len(weight)
    return ratio, *wilson(ratio, size, confidence)
