"""Throughput as steps per second times tokens per step: noise that is not the server's goes out.

How many drafts are accepted is the drafter's and the prompts' doing, and under sampling a matter of
luck; how long a step takes is the server's. A raw throughput mixes both. Here the steps are those of the
measurement at hand, but the tokens they bring come from all launches that share weights, drafter and
KV cache dtype: position i of a parallel drafter does not look at later positions, so launches with
other K count too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measure.half_widths import of_draws
from autotune.measure.launch_spread import LaunchSpread, pooled_spread, with_launches
from autotune.measure.metrics import FloatArray, Samples, samples_of
from autotune.measure.records import Measurement, RequestRecord
from autotune.measure.resampling import NUM_RESAMPLES, Design, Draws, designs_of
from autotune.measure.stats import CONFIDENCE, Interval
from autotune.measure.windows import Window, steady_window

STRUCTURED_THROUGHPUT = "structured_throughput_tps"


def pooled_acceptance(measurements: Sequence[Measurement], k: int) -> tuple[float, ...]:
    """Estimate the prefix survivals under K = `k` from measurements of one drafter with any K.

    The survival of position i is P(the first i + 1 drafts are all accepted). It falls a little with K:
    a longer K passes easy stretches of text in fewer steps, so a larger part of its steps begins in
    hard ones. The part levels off as K grows, so each position gets a straight line in 1 / K, fitted by
    least squares with the drafts as weights; one K alone gives its own mean. On the demo's recorded
    runs the lines are within 0.6 % of the tokens per step that each K had, plain pooling within 1.7 %.

    Args:
        measurements: of one schedule; those without drafts say nothing.
        k: the number of draft tokens.

    Returns:
        One survival per position, as many as there are up to `k` in the measurements.
    """
    drafted = [m.counters for m in measurements if m.counters.num_drafts]
    found = []
    for position in range(k):
        deep = [c for c in drafted if len(c.num_accepted_tokens_per_pos) > position]
        if not deep:
            break
        drafts = np.array([c.num_drafts for c in deep], dtype=np.float64)
        survival = np.array([c.num_accepted_tokens_per_pos[position] for c in deep]) / drafts
        inverse = np.array([1 / len(c.num_accepted_tokens_per_pos) for c in deep])
        found.append(_line_at(1 / k, inverse, survival, drafts))
    return tuple(found)


def _line_at(x: float, xs: FloatArray, ys: FloatArray, weights: FloatArray) -> float:
    mean_x, mean_y = np.average(xs, weights=weights), np.average(ys, weights=weights)
    spread = float((weights * (xs - mean_x) ** 2).sum())
    if spread < 1e-9 * weights.sum():  # one K alone
        return float(mean_y)
    slope = float((weights * (xs - mean_x) * (ys - mean_y)).sum()) / spread
    return float(np.clip(mean_y + slope * (x - mean_x), 0.0, 1.0))


@dataclass(frozen=True)
class TokensPerStep:
    """What a step of one config brings."""

    accepted: float
    """1 + the sum of the pooled survivals: the acceptance length, bonus token included."""
    delivered_ratio: float
    """Share of it that reaches the user: tokens drafted past an answer's end do not."""

    @property
    def delivered(self) -> float:
        return self.accepted * self.delivered_ratio


def tokens_per_step(
    measurements: Sequence[Measurement], pool: Sequence[Measurement]
) -> TokensPerStep:
    """Return what a step of one config brings.

    Args:
        measurements: launches of the config.
        pool: all measurements that share weights, drafter, KV cache dtype and schedule with it.
    """
    drafted = [m for m in measurements if m.counters.num_drafts]
    if not drafted:
        return TokensPerStep(1.0, 1.0)
    k = len(drafted[0].counters.num_accepted_tokens_per_pos)
    counted = sum(m.counters.num_drafts + m.counters.num_accepted_tokens for m in drafted)
    delivered = sum(_decoded(record) for m in drafted for record in m.records)
    return TokensPerStep(1 + sum(pooled_acceptance(pool, k)), delivered / counted)


def _decoded(record: RequestRecord) -> int:
    """Tokens after the first chunk, which the prefill brought."""
    return record.chunk_tokens[-1] - record.chunk_tokens[0] if record.chunk_tokens else 0


def structured_throughputs_tps(
    measurements: Sequence[Measurement], pool: Sequence[Measurement]
) -> FloatArray:
    """Estimate each launch's output throughput from its steps, shape (launches,).

    Tokens of the steady window are those of first chunks, counted as they are (they come from the
    prefill, not from drafts), and the decode steps inside times what a step brings. Without
    speculation a step brings one token, and the estimate is the raw throughput.

    Args:
        measurements: launches of one config.
        pool: see `tokens_per_step`.
    """
    per_step = tokens_per_step(measurements, pool)
    return np.array([_parts(m, samples_of(m)).total(per_step.delivered) for m in measurements])


@dataclass(frozen=True)
class _Parts:
    """One launch's requests taken apart, arrays of shape (n,)."""

    first_tokens: FloatArray
    """Tokens of the first chunk, where that came inside the window."""
    steps: FloatArray
    """Decode steps that ended inside the window."""
    slot_s: FloatArray
    decoded: FloatArray
    """Tokens after the first chunk, of the whole request."""
    all_steps: FloatArray
    """Decode steps of the whole request."""

    def total(self, per_step: float) -> float:
        slot_s = float(self.slot_s.sum())
        if slot_s <= 0:
            return float("nan")
        return float((self.first_tokens + self.steps * per_step).sum()) / slot_s


def _parts(measurement: Measurement, samples: Samples) -> _Parts:
    window = steady_window(measurement)
    records = samples.records
    drafts = measurement.counters.num_drafts
    num_chunks = sum(max(0, len(r.chunk_times_s) - 1) for r in records)
    # A chunk is a step, unless two were read as one: the server's own count sets the scale.
    scale = drafts / num_chunks if drafts and num_chunks else 1.0

    def steps_until(record: RequestRecord, time_s: float) -> float:
        chunks = bisect_right(record.chunk_times_s, time_s)
        if not drafts:  # one token a step, however many a chunk holds
            return record.chunk_tokens[chunks - 1] - record.chunk_tokens[0] if chunks else 0
        return scale * max(0, chunks - 1)

    return _Parts(
        first_tokens=np.array([_first_tokens(r, window) for r in records], dtype=np.float64),
        steps=np.array(
            [
                steps_until(r, window.end_s) - steps_until(r, window.start_s) if r.is_ok else 0
                for r in records
            ],
            dtype=np.float64,
        ),
        slot_s=samples.window_slot_s,
        decoded=np.array([_decoded(r) for r in records], dtype=np.float64),
        all_steps=np.array([steps_until(r, math.inf) for r in records], dtype=np.float64),
    )


def _first_tokens(record: RequestRecord, window: Window) -> int:
    if not record.is_ok or not window.start_s < record.chunk_times_s[0] <= window.end_s:
        return 0
    return record.chunk_tokens[0]


def structured_interval(
    measurements: Sequence[Measurement],
    pool: Sequence[Measurement],
    seed: int = 0,
    launch_spread: LaunchSpread | None = None,
) -> Interval | None:
    """Interval of the structured throughput of one config, over all its launches.

    Prompts are drawn as for a raw throughput. Each draw has its own steps per second, and tokens per
    step that differ from the pooled ones as those of the drawn prompts do from those of all.

    Args:
        measurements: one for each launch, of one schedule.
        pool: see `tokens_per_step`.
        seed: for the draws of prompts.
        launch_spread: of structured throughputs (`structured_launch_spread`); that of these
            launches alone when omitted.

    Returns:
        None where nothing was answered.
    """
    shown = structured_throughputs_tps(measurements, pool)
    if not len(shown) or not np.isfinite(shown).all() or not shown.all():
        return None
    spread = launch_spread or structured_launch_spread([measurements], pool, seed)
    draws = _draws(measurements, pool, seed)
    contrast = np.full(len(shown), 1 / len(shown))
    prompts = of_draws(draws, contrast, CONFIDENCE)
    whole = with_launches(prompts, spread, draws, contrast, CONFIDENCE)
    mean = float(shown.mean())
    return Interval(
        mean,
        mean * math.exp(-whole.below),
        mean * math.exp(whole.above),
        sum(len(m.records) for m in measurements),
        len(shown),
        includes_launch_spread=spread is not None,
    )


def structured_launch_spread(
    groups: Sequence[Sequence[Measurement]], pool: Sequence[Measurement], seed: int = 0
) -> LaunchSpread | None:
    """Pool the spread of structured throughputs between launches over configs.

    Args:
        groups: for each config its launches; all of them share what `pool` shares.
        pool: see `tokens_per_step`.
        seed: for the draws of prompts.
    """
    found = [
        (np.log(structured_throughputs_tps(group, pool)), _draws(group, pool, seed))
        for group in groups
        if len(group) > 1
    ]
    return pooled_spread(STRUCTURED_THROUGHPUT, found)


def _draws(measurements: Sequence[Measurement], pool: Sequence[Measurement], seed: int) -> Draws:
    """Draw the logarithm of each launch's structured throughput, shape (draws, launches)."""
    per_step = tokens_per_step(measurements, pool).delivered
    samples = [samples_of(m) for m in measurements]
    parts = [_parts(m, s) for m, s in zip(measurements, samples, strict=True)]
    design = designs_of(samples)[0]
    weights = design.weights(seed, NUM_RESAMPLES)
    decoded = _sum_over(design, [p.decoded for p in parts])
    steps = _sum_over(design, [p.all_steps for p in parts])
    columns = []
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (weights @ decoded) / (weights @ steps) / (decoded.sum() / steps.sum()) * per_step
        for arm, part in enumerate(parts):
            first = weights @ design.sums(arm, part.first_tokens)
            later = weights @ design.sums(arm, part.steps) * drawn
            columns.append(np.log((first + later) / (weights @ design.sums(arm, part.slot_s))))
    return Draws(np.column_stack(columns), design)


def _sum_over(design: Design, columns: Sequence[FloatArray]) -> FloatArray:
    """Sum one column of each launch by cluster over all launches, shape (clusters,)."""
    total = np.zeros(design.num_clusters)
    for arm, column in enumerate(columns):
        total += design.sums(arm, column)
    return total
