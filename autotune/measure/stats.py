"""Intervals. Requests of one prompt are not independent, and neither are requests of one launch.

Both intervals here are percentile bootstraps (Efron and Tibshirani 1993, chapter 13) with the
resampling done in clusters: launches first, then prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.measure.metrics import (
    THROUGHPUTS,
    FloatArray,
    Limits,
    Samples,
    estimate,
    observed,
    samples_of,
)
from autotune.measure.records import Measurement

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it, in the metric's own unit."""

    estimate: float
    low: float
    high: float
    num_requests: int
    num_launches: int
    confidence: float = CONFIDENCE


def metric_interval(
    name: str, measurements: Sequence[Measurement], limits: Limits | None = None, seed: int = 0
) -> Interval | None:
    """Interval of one metric of one config, over all its measurements.

    The point is the mean of what the measurements show; the width comes from resampling.

    Returns:
        None where nothing defines the metric, such as a latency of requests that all failed.
    """
    arms = [samples_of(m, limits) for m in measurements]
    shown = float(np.mean([observed(name, m, limits) for m in measurements]))
    rng = np.random.default_rng(seed)
    center = _mean_over_launches(name, arms, [np.arange(len(a)) for a in arms])
    draws = np.array([_resampled(name, arms, rng) for _ in range(NUM_RESAMPLES)])
    factor = shown / center if name in THROUGHPUTS and center else 1.0
    return _interval(shown, draws * factor, arms)


def ratio_interval(
    name: str,
    treated: Sequence[Measurement],
    reference: Sequence[Measurement],
    limits: Limits | None = None,
    seed: int = 0,
) -> Interval | None:
    """Interval of treated / reference for one metric, paired by request.

    Both sides were measured with one schedule, so each resample draws the same prompts for both:
    what a prompt contributes to both sides cancels.

    Returns:
        None where there is no ratio, such as to a reference whose goodput is 0.
    """
    a, b = [samples_of(m, limits) for m in treated], [samples_of(m, limits) for m in reference]
    rng = np.random.default_rng(seed)
    point = _quotient(
        _mean_over_launches(name, a, [np.arange(len(s)) for s in a]),
        _mean_over_launches(name, b, [np.arange(len(s)) for s in b]),
    )
    draws = np.array([_resampled_ratio(name, a, b, rng) for _ in range(NUM_RESAMPLES)])
    return _interval(point, draws, [*a, *b])


def _interval(point: float, draws: FloatArray, arms: Sequence[Samples]) -> Interval | None:
    """Put the percentile bounds of the resamples around a point; None where it is not finite."""
    tail = (1 - CONFIDENCE) / 2 * 100
    finite = draws[np.isfinite(draws)]
    if not np.isfinite(point) or len(finite) == 0:
        return None
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(point, float(low), float(high), sum(map(len, arms)), len(arms))


def _mean_over_launches(
    name: str, arms: Sequence[Samples], picks: Sequence[npt.NDArray[np.intp]]
) -> float:
    return float(np.mean([estimate(name, a, p) for a, p in zip(arms, picks, strict=True)]))


def _resampled(name: str, arms: Sequence[Samples], rng: np.random.Generator) -> float:
    chosen = [arms[i] for i in rng.integers(len(arms), size=len(arms))]
    prompts = _draw_prompts(chosen, rng)
    return _mean_over_launches(name, chosen, [_rows(a, prompts) for a in chosen])


def _resampled_ratio(
    name: str, a: Sequence[Samples], b: Sequence[Samples], rng: np.random.Generator
) -> float:
    side_a = [a[i] for i in rng.integers(len(a), size=len(a))]
    side_b = [b[i] for i in rng.integers(len(b), size=len(b))]
    prompts = _draw_prompts([*side_a, *side_b], rng)
    top = _mean_over_launches(name, side_a, [_rows(s, prompts) for s in side_a])
    bottom = _mean_over_launches(name, side_b, [_rows(s, prompts) for s in side_b])
    return _quotient(top, bottom)


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else float("nan")


def _draw_prompts(arms: Sequence[Samples], rng: np.random.Generator) -> list[str]:
    known = sorted({prompt for a in arms for prompt in a.prompt_ids})
    return [known[i] for i in rng.integers(len(known), size=len(known))]


def _rows(samples: Samples, prompts: Sequence[str]) -> npt.NDArray[np.intp]:
    """Find the rows of the drawn prompts, each as often as it was drawn."""
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(samples.prompt_ids):
        rows.setdefault(prompt, []).append(row)
    return np.array([row for prompt in prompts for row in rows.get(prompt, ())], dtype=np.intp)
