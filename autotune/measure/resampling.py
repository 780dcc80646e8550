"""Drawing prompts with replacement, for all launches of all configs at once.

Requests of one prompt are not independent, so prompts are drawn, never requests. A draw is a row of
counts, how often each prompt came up, and a metric under a draw is arithmetic on weighted sums: a
thousand draws are a few matrix products. In open loop, blocks of neighbouring requests are drawn too.

Every launch of every config was sent the same prompts, so one draw holds for all of them: what a
prompt contributes to both sides of a comparison cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.measure.metrics import (
    ATTAINMENT,
    BoolArray,
    FloatArray,
    IntArray,
    Latency,
    Samples,
    latency_of,
    quotient_parts,
    values_of,
)

NUM_RESAMPLES = 1000
MAX_EXACT_VALUES = 1024
NUM_BLOCKS = 6
"""Blocks of neighbouring requests in open loop. With 10 they are too short to forget each other near the
server's capacity, with fewer than 5 their spread is hardly known (docs/statistics.md)."""
NUM_BINS = 1024
"""Percentiles of more values than the limit above are drawn on a grid of this many of their own
quantiles, which moves a rank by at most 0.05 %."""


@dataclass(frozen=True)
class Design:
    """How the requests of several measurements hang together.

    Clusters are drawn within their class, because a schedule holds each class's share exactly
    (stratified cluster bootstrap, Davison and Hinkley 1997, sections 3.2 and 3.8).
    """

    arms: tuple[Samples, ...]
    owners: tuple[IntArray, ...]
    """For each arm the cluster of each request, shape (n,)."""
    strata: tuple[IntArray, ...]
    """The clusters of each class; together all of them, each with two clusters at least."""
    num_clusters: int

    @property
    def num_degrees_of_freedom(self) -> int:
        """Clusters that are free to vary; 0 where a spread cannot be known."""
        return self.num_clusters - len(self.strata)

    def sums(self, arm: int, column: FloatArray) -> FloatArray:
        """Sum a column over the requests of one arm by cluster, shape (clusters,)."""
        sums = np.bincount(self.owners[arm], weights=column, minlength=self.num_clusters)
        return sums.astype(np.float64)

    def weights(self, seed: int, num_resamples: int) -> FloatArray:
        """Draw how often each cluster counts, shape (draws, clusters)."""
        rng = np.random.default_rng(seed)
        drawn = np.zeros((num_resamples, self.num_clusters))
        for stratum in self.strata:
            picks = rng.integers(len(stratum), size=(num_resamples, len(stratum)))
            cells = picks + np.arange(num_resamples)[:, None] * len(stratum)
            counts = np.bincount(cells.ravel(), minlength=num_resamples * len(stratum))
            drawn[:, stratum] = counts.reshape(num_resamples, len(stratum))
        return drawn


def designs_of(arms: Sequence[Samples]) -> tuple[Design, ...]:
    """Return every way in which requests of these measurements depend on each other.

    They share prompts. In open loop they also share the queue: a burst or a long request slows down
    all that arrive in the next seconds, so blocks of neighbours are drawn as well (block bootstrap,
    Carlstein 1986). In closed loop the number in flight is fixed and neighbours hardly matter.
    """
    found = [_design(arms, [arm.clusters for arm in arms], [arm.classes for arm in arms])]
    if all(arm.is_open_loop for arm in arms):
        blocks = [
            tuple(f"{i * NUM_BLOCKS // len(arm):06d}" for i in range(len(arm))) for arm in arms
        ]
        found.append(_design(arms, blocks, [("",) * len(arm) for arm in arms]))
    return tuple(found)


def _design(
    arms: Sequence[Samples], names: Sequence[Sequence[str]], classes: Sequence[Sequence[str]]
) -> Design:
    """Number the clusters of all arms.

    With a single cluster nothing could vary; then each request is one, which makes the interval one
    for that prompt alone.
    """
    if len({name for of_arm in names for name in of_arm}) < 2:
        names = [tuple(str(r.request_id) for r in arm.records) for arm in arms]
    class_of: dict[str, str] = {}
    for clusters, of_arm in zip(names, classes, strict=True):
        for cluster, class_name in zip(clusters, of_arm, strict=True):
            class_of.setdefault(cluster, class_name)
    number = {cluster: i for i, cluster in enumerate(sorted(class_of))}
    return Design(
        arms=tuple(arms),
        owners=tuple(np.array([number[c] for c in of_arm], dtype=np.intp) for of_arm in names),
        strata=_strata([class_of[cluster] for cluster in number]),
        num_clusters=len(number),
    )


def _strata(classes: Sequence[str]) -> tuple[IntArray, ...]:
    """Group clusters by class; classes of a single cluster join another one."""
    by_class: dict[str, list[int]] = {}
    for cluster, class_name in enumerate(classes):
        by_class.setdefault(class_name, []).append(cluster)
    groups = sorted(by_class.values(), key=len)
    while len(groups) > 1 and len(groups[0]) < 2:
        groups = sorted([groups[0] + groups[1], *groups[2:]], key=len)
    return tuple(np.array(sorted(group), dtype=np.intp) for group in groups)


@dataclass(frozen=True)
class Draws:
    """A metric under many draws of the clusters."""

    values: FloatArray
    """Shape (draws, arms), on the metric's scale (`to_scale`); NaN where a draw leaves none."""
    design: Design

    @cached_property
    def is_usable(self) -> BoolArray:
        """Draws in which every arm has a value, shape (draws,)."""
        return np.asarray(np.isfinite(self.values).all(axis=1))

    @cached_property
    def _correction(self) -> float:
        """Resampling C clusters understates a variance by (C - 1) / C."""
        free = self.design.num_degrees_of_freedom
        return self.design.num_clusters / free if free else float("nan")

    def variance_of(self, contrast: FloatArray) -> float:
        """Variance of a weighted sum over arms that comes from which prompts were drawn."""
        usable = self.values[self.is_usable]
        if len(usable) < 2:
            return float("nan")
        return float(np.var(usable @ contrast, ddof=1)) * self._correction

    def launch_noise(self, is_arm: BoolArray) -> float:
        """Variance of one launch's figure that its own requests explain, prompts left out.

        Over the launches of one config, `is_arm` of shape (arms,); NaN where they are fewer than two.

        What the draws do to all launches of a config alike is the prompts' doing; what is left is how
        differently the same prompts turn out from launch to launch.
        """
        usable = self.values[self.is_usable][:, is_arm]
        if len(usable) < 2 or usable.shape[1] < 2:
            return float("nan")
        return (
            float(np.var(usable - usable.mean(axis=0), axis=1, ddof=1).mean()) * self._correction
        )


def draws_of(name: str, design: Design, weights: FloatArray) -> Draws:
    """Compute a metric of every arm under every draw."""
    latency = latency_of(name)
    columns = []
    for arm, samples in enumerate(design.arms):
        if latency is not None and latency.statistic != "mean":
            values = _percentiles(latency, samples, design.owners[arm], weights)
            columns.append(to_scale(name, values))
        else:
            top, bottom = quotient_parts(name, samples)
            top_sums = weights @ design.sums(arm, top)
            bottom_sums = weights @ design.sums(arm, bottom)
            columns.append(quotient_to_scale(name, top_sums, bottom_sums))
    return Draws(np.column_stack(columns), design)


def to_scale(name: str, values: FloatArray) -> FloatArray:
    """Put values on the scale that intervals are built on: their logarithm.

    Effects on times and rates are factors, so on this scale they add up and spread evenly.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def quotient_to_scale(name: str, top: FloatArray, bottom: FloatArray) -> FloatArray:
    """Put quotients on the scale that intervals are built on.

    An attainment, bounded by 0 and 1, goes by its log-odds, half a request added on both sides so that
    none and all have one too (Haldane 1956); anything else by its logarithm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == ATTAINMENT:
            return np.log((top + 0.5) / (bottom - top + 0.5))
        return np.log(top / bottom)


def _percentiles(
    latency: Latency, samples: Samples, owners: IntArray, weights: FloatArray
) -> FloatArray:
    """Percentile of the requests' values under each draw, interpolated as NumPy does by default."""
    values, requests = values_of(latency, samples)
    if len(values) == 0:
        return np.full(len(weights), np.nan)
    order = np.argsort(values)
    values, clusters = values[order], owners[requests[order]]
    ratio = 1.0 if latency.percentile is None else latency.percentile / 100
    if len(values) <= MAX_EXACT_VALUES:
        cumulated = np.cumsum(weights[:, clusters], axis=1)
    else:
        bins = np.arange(len(values)) * NUM_BINS // len(values)
        cells = np.bincount(clusters * NUM_BINS + bins, minlength=weights.shape[1] * NUM_BINS)
        cumulated = np.cumsum(weights @ cells.reshape(-1, NUM_BINS), axis=1)
        firsts = np.searchsorted(bins, np.arange(NUM_BINS), side="left")
        lasts = np.searchsorted(bins, np.arange(NUM_BINS), side="right") - 1
        values = values[(firsts + lasts) // 2]
    total = cumulated[:, -1]
    rank = ratio * (total - 1)
    low = (cumulated > np.floor(rank)[:, None]).argmax(axis=1)
    high = (cumulated > np.ceil(rank)[:, None]).argmax(axis=1)
    part = rank - np.floor(rank)
    found = values[low] * (1 - part) + values[high] * part
    return np.where(total > 0, found, np.nan)
