"""How many independent requests know as much as these, where requests of one prompt are alike."""

from __future__ import annotations

import numpy as np

from autotune.measure.distributions import t_quantile
from autotune.measure.metrics import FloatArray, IntArray


def effective_size(clusters: IntArray, correlation: float, confidence: float) -> float:
    """Return n over the design effect 1 + (m - 1) rho (Kish 1965); n where clusters are single.

    m is the mean size of a cluster as a request sees it. Few clusters lower the result by the squared
    quotient of Student's quantiles, as Korn and Graubard (1998) do for survey proportions.

    Args:
        clusters: the cluster of each request, shape (n,), n >= 1, integers from 0.
        correlation: of two requests of one cluster, 0 to 1.
        confidence: of the interval that it is for.
    """
    n = len(clusters)
    sizes = np.bincount(clusters)
    num_clusters = int((sizes > 0).sum())
    if num_clusters == n:
        return float(n)
    if num_clusters < 2:
        return 1.0
    level = (1 + confidence) / 2
    loss = (t_quantile(level, n - 1) / t_quantile(level, num_clusters - 1)) ** 2
    seen = float((sizes**2).sum()) / n
    return n / (1 + (seen - 1) * correlation) * loss


def within_correlation(scores: FloatArray, clusters: IntArray) -> float:
    """Return the correlation of two scores of one cluster, by the analysis of variance (Donner 1986).

    Args:
        scores: shape (n,).
        clusters: the cluster of each score, shape (n,), integers from 0.

    Returns:
        0 to 1; 1 where nothing varies or every cluster is single, to be safe.
    """
    n = len(scores)
    all_sizes = np.bincount(clusters)
    is_there = all_sizes > 0
    sizes = all_sizes[is_there].astype(np.float64)
    num_clusters = len(sizes)
    if not 1 < num_clusters < n:
        return 1.0
    means = np.bincount(clusters, weights=scores)[is_there] / sizes
    centre = float(scores.mean())
    between = float((sizes * (means - centre) ** 2).sum())
    within = max(0.0, float(((scores - centre) ** 2).sum()) - between)
    if between + within == 0:
        return 1.0
    mean_square_between = between / (num_clusters - 1)
    mean_square_within = within / (n - num_clusters)
    size = (n - float((sizes**2).sum()) / n) / (num_clusters - 1)
    rho = (mean_square_between - mean_square_within) / (
        mean_square_between + (size - 1) * mean_square_within
    )
    return float(np.clip(rho, 0.0, 1.0))


def ranks(values: FloatArray) -> FloatArray:
    """Return each value's rank, ties at their mean: what correlates whatever the distribution."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank: FloatArray = (last - (counts - 1) / 2)[positions]
    return mean_rank
