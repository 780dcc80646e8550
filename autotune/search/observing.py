"""From kept launches to what the models of the search are told."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.measure.metrics import estimate, observed, samples_of, violations
from autotune.measure.records import Measurement
from autotune.measure.stats import metric_interval
from autotune.measure.windows import steady_window
from autotune.search.decision import Goal
from autotune.search.surrogate import OBJECTIVE, Observation
from autotune.store.records import LaunchRecord, LaunchState, Phase

LAUNCH_SPREAD = 0.015
"""Coefficient of variation between launches of one config, before two launches of one were seen. 2 to 4 %
on the CPU demo, 0.3 to 1.8 % reported for GPUs."""
TAIL_SPREAD = 0.06
"""The same of a p95 or p99 of some hundred requests, which few of them decide."""
_Z95 = 1.96

SEARCHED = frozenset({Phase.SEARCH, Phase.CONFIRM})


class Observer:
    """Turns launches into observations, each of them once."""

    def __init__(self, goal: Goal) -> None:
        self._goal = goal
        self._known: dict[int, tuple[Observation, ...]] = {}

    def observations(self, launches: Sequence[LaunchRecord]) -> list[Observation]:
        """Return what the finished launches of search and confirmation say, in their order.

        Args:
            launches: with their measurements.
        """
        found: list[Observation] = []
        for launch in launches:
            if launch.phase not in SEARCHED or launch.state not in _FINISHED:
                continue
            if launch.launch_id not in self._known:
                self._known[launch.launch_id] = tuple(_of_launch(launch, self._goal))
            found += self._known[launch.launch_id]
        return found


_FINISHED = frozenset({LaunchState.MEASURED, LaunchState.FAILED})


def _of_launch(launch: LaunchRecord, goal: Goal) -> list[Observation]:
    launch_s = launch.report.get("launch_s")
    kv_tokens = launch.report.get("resolved", {}).get("kv_cache_size_tokens")
    if launch.failure is not None:
        return [
            Observation(
                launch.config,
                concurrency=None,
                is_target_load=True,
                failure=launch.failure.kind,
                repeat=launch.repeat,
            )
        ]
    main = [
        _of_measurement(launch, m, goal, launch_s, kv_tokens, is_target=True)
        for m in launch.measurements
    ]
    rungs = [
        _of_measurement(launch, m, goal, launch_s, kv_tokens, is_target=False)
        for m in launch.ladder
    ]
    return main + rungs


def _of_measurement(
    launch: LaunchRecord,
    measurement: Measurement,
    goal: Goal,
    launch_s: float | None,
    kv_tokens: int | None,
    *,
    is_target: bool,
) -> Observation:
    samples = samples_of(measurement)
    window = steady_window(measurement)
    answered = [r for r in measurement.records if r.is_ok]
    in_flight_s = sum(window.overlap_s(r.sent_s, r.finished_s) for r in measurement.records)
    outputs = _outputs(measurement, goal) if is_target else {}
    return Observation(
        config=launch.config,
        concurrency=measurement.concurrency,
        is_target_load=is_target,
        outputs=outputs,
        errors={name: _error(name, measurement, goal) for name in outputs},
        counters=measurement.counters,
        duration_s=measurement.duration_s,
        mean_running=in_flight_s / window.duration_s if window.duration_s > 0 else 0.0,
        mean_prompt_tokens=_mean([r.num_prompt_tokens for r in answered]),
        mean_completion_tokens=_mean([r.num_completion_tokens for r in answered]),
        mean_tpot_s=_seconds(estimate("tpot_mean_ms", samples)),
        mean_ttft_s=_seconds(estimate("ttft_mean_ms", samples)),
        output_throughput_tps=_finite(estimate("output_throughput_tps", samples)),
        kv_tokens=kv_tokens,
        launch_s=launch_s,
        is_stopped_early=measurement.stopped_early is not None,
        repeat=launch.repeat,
    )


def _outputs(measurement: Measurement, goal: Goal) -> dict[str, float]:
    ratios = {name: 1 + v for name, v in violations(measurement, goal.limits).items()}
    figures = {OBJECTIVE: _objective(measurement, goal), **ratios}
    return {name: math.log(v) for name, v in figures.items() if 0 < v < math.inf}


def _objective(measurement: Measurement, goal: Goal) -> float:
    """Return the objective; of a run that was cut off the nearest thing that it can tell, NaN for nothing.

    What was in flight at the cut is lost, so counting tokens over time would count too few. By Little's law a
    closed loop's throughput is users times tokens over latency, of the requests that ended.
    """
    if measurement.stopped_early is None or goal.objective.endswith("_ms"):
        return observed(goal.objective, measurement, goal.limits)
    users = measurement.concurrency
    if goal.objective != "output_throughput_tps" or users is None:
        return math.nan
    answered = [r for r in measurement.records if r.is_ok]
    latency_s = sum(r.finished_s - r.sent_s for r in answered)
    tokens = sum(r.num_completion_tokens for r in answered)
    return users * tokens / latency_s if latency_s > 0 else math.nan


def _error(name: str, measurement: Measurement, goal: Goal) -> float:
    """Standard error of the log of an output: of the requests, and between launches."""
    is_objective = name == OBJECTIVE
    metric = goal.objective if is_objective else name.rpartition(".")[2]
    is_tail = any(q in metric for q in ("p90", "p95", "p99"))
    between = TAIL_SPREAD if is_tail else LAUNCH_SPREAD
    if is_tail:
        # A share p of n values above the quantile is known within sqrt(p (1 - p) / n); for a tail like
        # an exponential's one log unit holds 1 / p of it (search.md of the statistics: docs/statistics.md).
        num = max(sum(r.is_ok for r in measurement.records), 1)
        share = 1 - float(metric.split("_p")[1][:2]) / 100
        return math.hypot(between, math.sqrt(share * (1 - share) / num) / (share * 3))
    interval = metric_interval(metric, [measurement], goal.limits) if is_objective else None
    if interval is None or interval.estimate <= 0:
        return math.hypot(between, 1 / math.sqrt(max(len(measurement.records), 1)) / 2)
    half = (interval.high - interval.low) / 2 / interval.estimate
    return math.hypot(between, min(half / _Z95, 1.0))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _seconds(value_ms: float) -> float | None:
    return value_ms / 1e3 if math.isfinite(value_ms) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) and value > 0 else None
