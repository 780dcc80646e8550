"""How far launches of one config lie apart, learnt from several configs together.

Two or three launches of one config say little about their spread. The spread has the same sources for
every config of a study (clocks, memory layout, neighbours), so it is taken to be the same factor for
all, and what each config's launches say is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measure.half_widths import HalfWidths, of_variance
from autotune.measure.metrics import (
    ATTAINMENT,
    FloatArray,
    Limits,
    Samples,
    estimate,
    quotient_parts,
    samples_of,
)
from autotune.measure.records import Measurement
from autotune.measure.resampling import (
    NUM_RESAMPLES,
    Draws,
    designs_of,
    draws_of,
    quotient_to_scale,
    to_scale,
)


@dataclass(frozen=True)
class LaunchSpread:
    """Spread of one metric between launches of one config, as a variance of its logarithm.

    An attainment's is that of its log-odds.
    """

    metric: str
    variance: float
    """Of one launch's figure around its config's mean, the noise of its requests included."""
    request_variance: float
    """The part of it that the requests of one launch explain; prompts, being the same, are in neither."""
    num_degrees_of_freedom: int
    """Launches less one, summed over configs."""
    num_launches: int

    @property
    def relative_sd(self) -> float:
        """Spread that is the launches' own, about as a share of the figure."""
        return math.sqrt(max(0.0, self.variance - self.request_variance))


def estimate_launch_spread(
    metric: str,
    groups: Sequence[Sequence[Measurement]],
    limits: Limits | None = None,
    seed: int = 0,
) -> LaunchSpread | None:
    """Pool the spread between launches over configs, weighted by degrees of freedom.

    Args:
        metric: a metric of the glossary.
        groups: for each config its launches, one measurement each, all of one schedule.
        limits: each class's limits.
        seed: for the draws of prompts.

    Returns:
        None where no config was launched twice, or none has the metric.
    """
    found = []
    for group in groups:
        arms = [samples_of(m, limits) for m in group]
        if len(arms) < 2 or is_at_bound(metric, arms):
            continue
        design = designs_of(arms)[0]
        draws = draws_of(metric, design, design.weights(seed, NUM_RESAMPLES))
        found.append((scaled_figures(metric, arms), draws))
    return pooled_spread(metric, found)


def pooled_spread(metric: str, configs: Sequence[tuple[FloatArray, Draws]]) -> LaunchSpread | None:
    """Pool what the launches of several configs say, weighted by degrees of freedom.

    Args:
        metric: name of the figure.
        configs: for each config its launches' figures on the scale of intervals, shape (launches,),
            and the draws of them.

    Returns:
        None where no config has two launches with a figure.
    """
    squares, noise, free, num_launches = 0.0, 0.0, 0, 0
    for figures, draws in configs:
        if len(figures) < 2 or not np.isfinite(figures).all():
            continue
        own = draws.launch_noise(np.ones(len(figures), dtype=bool))
        squares += float(((figures - figures.mean()) ** 2).sum())
        noise += (len(figures) - 1) * (own if math.isfinite(own) else 0.0)
        free += len(figures) - 1
        num_launches += len(figures)
    if not free:
        return None
    return LaunchSpread(metric, squares / free, noise / free, free, num_launches)


def launch_widths(
    spread: LaunchSpread | None, contrast: FloatArray, confidence: float
) -> HalfWidths:
    """Half-widths for which launches were caught; none where their spread is not known."""
    if spread is None:
        return HalfWidths(0.0, 0.0)
    variance = spread.variance * float((contrast**2).sum())
    return of_variance(variance, spread.num_degrees_of_freedom, confidence)


def with_launches(
    prompts: HalfWidths,
    spread: LaunchSpread | None,
    draws: Draws,
    contrast: FloatArray,
    confidence: float,
) -> HalfWidths:
    """Join the doubt about launches to that about prompts.

    The spread between launches holds the noise of their requests, and so do the prompts' half-widths:
    that part of theirs is taken out, or it would count twice.

    Args:
        prompts: half-widths for which prompts were sent.
        spread: between launches; None where it is not known.
        draws: of the figure, one column a launch.
        contrast: weight of each launch, negative for those of a reference, shape (launches,).
        confidence: such as 0.95.
    """
    if spread is None:
        return prompts
    noise = 0.0
    for side in (contrast > 0, contrast < 0):
        own = draws.launch_noise(side)
        known = own if math.isfinite(own) else spread.request_variance
        noise += known * float((contrast[side] ** 2).sum())
    whole = draws.variance_of(contrast)
    kept = max(0.0, 1 - noise / whole) if whole > 0 else 1.0
    return prompts.scaled(math.sqrt(kept)).combined(launch_widths(spread, contrast, confidence))


def scaled_figures(metric: str, arms: Sequence[Samples]) -> FloatArray:
    """Return each launch's figure on the scale of intervals, shape (launches,)."""
    if metric != ATTAINMENT:
        return to_scale(metric, np.array([estimate(metric, arm) for arm in arms]))
    parts = [quotient_parts(metric, arm) for arm in arms]
    return quotient_to_scale(
        metric, np.array([top.sum() for top, _ in parts]), np.array([n.sum() for _, n in parts])
    )


def is_at_bound(metric: str, arms: Sequence[Samples]) -> bool:
    """Whether all requests of all launches kept their limits, or none: no spread shows there."""
    return metric == ATTAINMENT and len({bool(good) for arm in arms for good in arm.is_good}) < 2
