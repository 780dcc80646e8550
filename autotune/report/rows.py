"""One row per config of a study, with every figure's interval and sample size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.measure.cost import cost_interval_usd
from autotune.measure.launch_spread import LaunchSpread, estimate_launch_spread
from autotune.measure.metrics import estimate, samples_of, worst_violation
from autotune.measure.quality.verdict import QualityVerdict
from autotune.measure.records import Measurement
from autotune.measure.stats import Interval, metric_interval, ratio_interval
from autotune.search.decision import Decision, Goal
from autotune.serving.config import ServingConfig
from autotune.serving.failures import TrialFailure
from autotune.store.records import LaunchRecord, LaunchState, Phase
from autotune.traffic.profile import Cost

THROUGHPUT = "output_throughput_tps"


@dataclass(frozen=True)
class ConfigRow:
    """What a study knows about one config."""

    trial_number: int | None
    label: str
    digest: str
    roles: tuple[str, ...]
    """Of ``no speculation``, ``default`` and ``winner``."""
    num_launches: int
    num_failed: int
    objective: Interval | None
    """None when nothing could be measured."""
    ratio_to_baseline: Interval | None
    acceptance_length: float | None
    ttft_p95_ms: float | None
    tpot_mean_ms: float | None
    worst_limit: str | None
    worst_violation: float | None
    usd_per_million_output_tokens: Interval | None
    """None where the profile names no price."""
    request_throughput_rps: Interval | None
    """None where nothing was measured, or the profile names no price."""
    quality: QualityVerdict | None
    """The quality gate's verdict; None where the config was not judged."""
    is_confirmed: bool
    """Whether the figures come from repeated fresh launches, not from the search alone."""
    failure: str | None
    log_path: str | None

    @property
    def is_feasible(self) -> bool | None:
        if self.objective is None:
            return None
        is_good = self.quality is None or self.quality.is_feasible
        return is_good and (self.worst_violation is None or self.worst_violation <= 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Pricing:
    """A price, and how far the launches of one config lie apart in throughput."""

    cost: Cost
    spread: LaunchSpread | None

    @classmethod
    def of(cls, cost: Cost, counted: Sequence[Sequence[LaunchRecord]], goal: Goal) -> _Pricing:
        groups = [_whole(group) for group in counted]
        return cls(cost, estimate_launch_spread(THROUGHPUT, groups, goal.limits))

    def usd(self, measurements: Sequence[Measurement], goal: Goal) -> Interval | None:
        throughput = metric_interval(
            THROUGHPUT, measurements, goal.limits, launch_spread=self.spread
        )
        if throughput is None:
            return None
        return cost_interval_usd(throughput, self.cost.gpu_hourly_usd, self.cost.gpus)


def config_rows(
    launches: Sequence[LaunchRecord],
    goal: Goal,
    baseline_digest: str,
    default_digest: str,
    decision: Decision | None,
    standing_knobs: Collection[str] = (),
    named_knobs: Collection[str] = (),
    verdicts: Mapping[str, QualityVerdict] | None = None,
    cost: Cost | None = None,
) -> list[ConfigRow]:
    """Summarise a study by config, best objective first and failures last.

    Where a config was confirmed, only its confirmation launches count: the search's own value is
    kept out because it was what made the config look good.
    """
    by_digest: dict[str, list[LaunchRecord]] = {}
    finished = {LaunchState.MEASURED, LaunchState.FAILED}
    for launch in launches:
        if launch.state in finished and launch.phase is not Phase.QUALITY:
            by_digest.setdefault(launch.config.digest, []).append(launch)
    counted = {digest: _counted(group) for digest, group in by_digest.items()}
    spread = estimate_launch_spread(
        goal.objective,
        [_whole(group) for group in counted.values()],
        goal.limits,
    )
    pricing = _Pricing.of(cost, list(counted.values()), goal) if cost is not None else None
    winner = decision.winner if decision is not None else None
    named = (("no speculation", baseline_digest), ("default", default_digest), ("winner", winner))
    rows = [
        _row(
            group,
            counted[digest],
            goal,
            spread,
            []
            if digest == baseline_digest
            else _reference(by_digest, counted, baseline_digest, digest),
            tuple(role for role, known in named if known == digest),
            lambda config: config.label(standing_knobs, named_knobs),
            (verdicts or {}).get(digest),
            pricing,
        )
        for digest, group in by_digest.items()
    ]
    return sorted(rows, key=lambda row: _order(row, goal))


def _counted(group: Sequence[LaunchRecord]) -> list[LaunchRecord]:
    measured = [x for x in group if x.state is LaunchState.MEASURED]
    confirmed = [x for x in measured if x.phase is Phase.CONFIRM]
    return confirmed or measured


def _reference(
    by_digest: Mapping[str, list[LaunchRecord]],
    counted: Mapping[str, list[LaunchRecord]],
    baseline: str,
    digest: str,
) -> list[Measurement]:
    """Baseline launches of the same phase as the config's, so that like is compared with like."""
    phases = {launch.phase for launch in counted[digest]}
    return _whole([launch for launch in by_digest.get(baseline, []) if launch.phase in phases])


def _row(
    group: Sequence[LaunchRecord],
    counted: Sequence[LaunchRecord],
    goal: Goal,
    spread: LaunchSpread | None,
    reference: Sequence[Measurement],
    roles: tuple[str, ...],
    label: Callable[[ServingConfig], str],
    quality: QualityVerdict | None,
    pricing: _Pricing | None,
) -> ConfigRow:
    config: ServingConfig = group[0].config
    measurements = _whole(counted)
    given_up = [m.stopped_early for launch in counted for m in launch.measurements]
    failures = [x.failure for x in group if x.failure is not None]
    worst = worst_violation(measurements, goal.limits)
    ratio = (
        ratio_interval(goal.objective, measurements, reference, goal.limits, launch_spread=spread)
        if measurements and reference
        else None
    )
    return ConfigRow(
        trial_number=next((x.trial_number for x in group if x.trial_number is not None), None),
        label=label(config),
        digest=config.digest,
        roles=roles,
        num_launches=len(counted),
        num_failed=len(failures),
        objective=metric_interval(goal.objective, measurements, goal.limits, launch_spread=spread)
        if measurements
        else None,
        ratio_to_baseline=ratio,
        acceptance_length=_mean([m.counters.acceptance_length for m in measurements]),
        ttft_p95_ms=_mean([estimate("ttft_p95_ms", samples_of(m)) for m in measurements]),
        tpot_mean_ms=_mean([estimate("tpot_mean_ms", samples_of(m)) for m in measurements]),
        worst_limit=worst[0] if worst else None,
        worst_violation=worst[1] if worst else None,
        usd_per_million_output_tokens=(
            pricing.usd(measurements, goal) if pricing is not None and measurements else None
        ),
        request_throughput_rps=(
            metric_interval("request_throughput_rps", measurements, goal.limits)
            if pricing is not None and measurements
            else None
        ),
        quality=quality,
        is_confirmed=any(x.phase is Phase.CONFIRM for x in counted),
        failure=_failure(failures, given_up) if not measurements else None,
        log_path=group[-1].log_path,
    )


def _whole(launches: Sequence[LaunchRecord]) -> list[Measurement]:
    """Return the measurements that were not cut off: the figures of a part are not those of the whole."""
    return [m for launch in launches for m in launch.measurements if m.stopped_early is None]


def _failure(failures: Sequence[TrialFailure], given_up: Sequence[str | None]) -> str | None:
    """Say why a config has no figures."""
    if failures:
        return str(failures[-1])
    reason = next((reason for reason in given_up if reason is not None), None)
    return f"given up: {reason}" if reason is not None else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and value == value]
    return sum(known) / len(known) if known else None


def _order(row: ConfigRow, goal: Goal) -> tuple[bool, bool, float]:
    if row.objective is None:
        return True, True, 0.0
    sign = -1.0 if goal.is_maximized else 1.0
    return False, not row.is_feasible, sign * row.objective.estimate
