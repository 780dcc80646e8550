"""Intervals of metrics and of ratios between configs.

Two sources of doubt meet in them. Which prompts were sent: a bootstrap over prompts for means,
throughputs and ratios, order statistics for percentiles, Wilson's interval for attainments. And which
launches were caught: Student's t, with the spread between launches pooled over configs. Either is
worked out on its own and both are combined by `HalfWidths.combined`. docs/statistics.md has the
formulas, their sources, and how often the intervals hold the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measure.half_widths import (
    UNBOUNDED,
    HalfWidths,
    of_attainment,
    of_draws,
    of_goodput,
    of_percentile,
)
from autotune.measure.launch_spread import (
    LaunchSpread,
    estimate_launch_spread,
    launch_widths,
    with_launches,
)
from autotune.measure.metrics import (
    ATTAINMENT,
    THROUGHPUT_OF_GOODPUT,
    FloatArray,
    Limits,
    Samples,
    estimate,
    latency_of,
    samples_of,
)
from autotune.measure.proportions import from_log_odds
from autotune.measure.records import Measurement
from autotune.measure.resampling import NUM_RESAMPLES, Design, Draws, designs_of, draws_of

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it, in the metric's own unit."""

    estimate: float
    low: float
    high: float
    """A factor of 1e9 or more above the estimate stands for "no upper bound"."""
    num_requests: int
    num_launches: int
    confidence: float = CONFIDENCE
    includes_launch_spread: bool = False
    """Whether it covers how launches differ; if not, it speaks of the launches at hand alone."""

    @property
    def has_upper_bound(self) -> bool:
        return self.high < self.estimate * math.exp(UNBOUNDED) * (1 - 1e-9) or self.estimate == 0


def metric_interval(
    name: str,
    measurements: Sequence[Measurement],
    limits: Limits | None = None,
    seed: int = 0,
    launch_spread: LaunchSpread | None = None,
) -> Interval | None:
    """Interval of one metric of one config, over all its measurements.

    The point is the mean of what the measurements show.

    Args:
        name: a metric of the glossary.
        measurements: one for each launch, all of one schedule.
        limits: each class's limits.
        seed: for the draws of prompts.
        launch_spread: pooled over configs (`estimate_launch_spread`). Without it the spread of these
            launches alone is used, which two or three of them know badly: the interval is wide then.
            With one launch and no spread the interval covers what that launch can know.

    Returns:
        None where nothing defines the metric, such as a latency of requests that all failed.

    Raises:
        ValueError: the spread is of another metric.
    """
    arms = [samples_of(m, limits) for m in measurements]
    shown = _mean(name, arms)
    if shown is None:
        return None
    spread = _checked(launch_spread, name) or estimate_launch_spread(
        name, [measurements], limits, seed
    )
    if name == ATTAINMENT:
        low, high = _attainment_bounds(arms, spread)
        return _around(shown, min(low, shown), max(high, shown), arms, spread)
    if shown == 0:
        return _around(0.0, 0.0, _most(name, arms), arms, spread)
    whole = _half_widths(name, arms, np.full(len(arms), 1 / len(arms)), spread, seed)
    return _around(
        shown, shown * math.exp(-whole.below), shown * math.exp(whole.above), arms, spread
    )


def ratio_interval(
    name: str,
    treated: Sequence[Measurement],
    reference: Sequence[Measurement],
    limits: Limits | None = None,
    seed: int = 0,
    launch_spread: LaunchSpread | None = None,
) -> Interval | None:
    """Interval of treated / reference for one metric, paired by prompt.

    Both sides were measured with one schedule, so each draw takes the same prompts for both: what
    a prompt contributes to both sides cancels.

    Args:
        name: a metric of the glossary.
        treated: one measurement for each launch.
        reference: likewise.
        limits: each class's limits.
        seed: for the draws of prompts.
        launch_spread: pooled over configs; without it that of these two sides is used.

    Returns:
        None where there is no ratio, such as to a reference whose goodput is 0.

    Raises:
        ValueError: the spread is of another metric.
    """
    top, bottom = [[samples_of(m, limits) for m in side] for side in (treated, reference)]
    over, under = _mean(name, top), _mean(name, bottom)
    if over is None or not under:
        return None
    arms = [*top, *bottom]
    spread = _checked(launch_spread, name) or estimate_launch_spread(
        name, [treated, reference], limits, seed
    )
    if over == 0:
        return _around(0.0, 0.0, _most(name, top) / under, arms, spread)
    contrast = np.array([1 / len(top)] * len(top) + [-1 / len(bottom)] * len(bottom))
    whole = _half_widths(name, arms, contrast, spread, seed)
    ratio = over / under
    return _around(
        ratio, ratio * math.exp(-whole.below), ratio * math.exp(whole.above), arms, spread
    )


def _checked(spread: LaunchSpread | None, name: str) -> LaunchSpread | None:
    if spread is not None and spread.metric != name:
        raise ValueError(f"the spread between launches is of {spread.metric}, not of {name}")
    return spread


def _mean(name: str, arms: Sequence[Samples]) -> float | None:
    values = [estimate(name, arm) for arm in arms]
    mean = float(np.mean(values)) if values else float("nan")
    return mean if math.isfinite(mean) else None


def _around(
    point: float, low: float, high: float, arms: Sequence[Samples], spread: LaunchSpread | None
) -> Interval:
    return Interval(
        point, low, high, sum(map(len, arms)), len(arms), includes_launch_spread=spread is not None
    )


def _half_widths(
    name: str,
    arms: Sequence[Samples],
    contrast: FloatArray,
    spread: LaunchSpread | None,
    seed: int,
) -> HalfWidths:
    """Half-widths on the logarithmic scale, the widest of all designs."""
    found = HalfWidths(0.0, 0.0)
    for design in designs_of(arms):
        weights = design.weights(seed, NUM_RESAMPLES)
        draws = draws_of(name, design, weights)
        requests = _request_widths(name, design, contrast, weights, draws)
        found = found.wider(with_launches(requests, spread, draws, contrast, CONFIDENCE))
    return found


def _request_widths(
    name: str, design: Design, contrast: FloatArray, weights: FloatArray, draws: Draws
) -> HalfWidths:
    """Half-widths for which requests were sent."""
    if (contrast < 0).any():
        # Order statistics and Wilson's interval know no pairs; the draws do.
        return of_draws(draws, contrast, CONFIDENCE)
    if name in THROUGHPUT_OF_GOODPUT:
        return of_goodput(name, design, contrast, weights, draws, CONFIDENCE)
    latency = latency_of(name)
    if latency is not None and latency.statistic != "mean":
        return of_percentile(latency, design, CONFIDENCE)
    return of_draws(draws, contrast, CONFIDENCE)


def _attainment_bounds(
    arms: Sequence[Samples], spread: LaunchSpread | None
) -> tuple[float, float]:
    """Bounds of an attainment, the widest of all designs.

    The misses of a few prompts do not tell their noise from their prompts, so none of it is taken
    out as it is elsewhere: the spread between launches counts it once more.
    """
    between = launch_widths(spread, np.full(len(arms), 1 / len(arms)), CONFIDENCE)
    lows, highs = [], []
    for design in designs_of(arms):
        centre, requests = of_attainment(design, CONFIDENCE)
        whole = requests.combined(between)
        lows.append(from_log_odds(centre - whole.below))
        highs.append(from_log_odds(centre + whole.above))
    return min(lows), max(highs)


def _most(name: str, arms: Sequence[Samples]) -> float:
    """Upper bound of a goodput of which nothing was seen: the share that may keep the limits, of all."""
    if name not in THROUGHPUT_OF_GOODPUT:
        return 0.0
    everything = _mean(THROUGHPUT_OF_GOODPUT[name], arms) or 0.0
    return everything * _attainment_bounds(arms, None)[1]
