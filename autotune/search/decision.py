"""From repeated measurements of the finalists to a recommendation, with its evidence.

Only launches of the confirmation count here. The search picks its best trial because it came out
best, so its value is too good on average (the winner's curse); fresh launches have no such bias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from autotune.measure.audit import AuditLevel, audit_verdict
from autotune.measure.distributions import t_quantile
from autotune.measure.launch_spread import LaunchSpread, estimate_launch_spread
from autotune.measure.metrics import (
    Limits,
    error_counts,
    observed,
    violations,
    worst_violation,
)
from autotune.measure.quality.verdict import QualityLevel, QualityVerdict
from autotune.measure.records import Measurement
from autotune.measure.saturation import saturation
from autotune.measure.stats import CONFIDENCE, Interval, metric_interval, ratio_interval
from autotune.serving.config import ServingConfig

BASELINE_ROLE = "no speculation"
DEFAULT_ROLE = "default"
MIN_LAUNCHES = 2
NEAR_LIMIT_RATIO = 0.05
LIMIT_CONFIDENCE = 0.90
"""Of the upper bound that must lie below a limit, for it to be kept beyond doubt."""
PRIOR_TAIL_SPREAD = 0.04
"""Spread between launches of a limit's figure, mostly a p95 that few requests decide, before any repeat."""
PRIOR_FREEDOM = 2
"""Degrees of freedom that a belief about spread weighs: a handful of repeats soon outweighs it."""


@dataclass(frozen=True)
class Goal:
    """What makes a config better, and which differences matter."""

    objective: str
    is_maximized: bool
    limits: Limits
    margin_ratio: float


@dataclass(frozen=True)
class Finalist:
    """One config with its repeated measurements."""

    config: ServingConfig
    roles: tuple[str, ...]
    """Such as ``no speculation`` and ``default``."""
    measurements: tuple[Measurement, ...]
    label: str
    num_failed: int = 0
    """Confirmation launches that failed for good; a config that fails once in a while cannot win."""
    quality: QualityVerdict | None = None
    """The quality gate's verdict; None where the config was not judged."""


@dataclass(frozen=True)
class FinalistResult:
    """What the repeats say about one finalist."""

    config: dict[str, Any]
    digest: str
    label: str
    roles: tuple[str, ...]
    num_launches: int
    objective: Interval | None
    ratio_to_best: Interval | None
    """Of the objective, to the best finalist; 1 for the best itself. None: there is no ratio."""
    ratio_to_baseline: Interval | None
    is_feasible: bool
    worst_limit: str | None
    """The limit that is violated most, or is nearest to being violated."""
    worst_violation: float | None
    """Relative: above 0 violated, -0.1 is 10 % below the limit."""
    is_tied_with_best: bool
    acceptance_length: float | None
    quality: QualityVerdict | None = None


class RaceState(Protocol):
    """What a decision wants to know of the race that it ends, see `autotune.search.race.RaceStep`."""

    @property
    def probability(self) -> float: ...

    @property
    def is_decided(self) -> bool: ...

    @property
    def num_launches(self) -> int: ...


@dataclass(frozen=True)
class Evidence:
    """What a decision rests on."""

    num_launches: int
    """Of the race, failed ones included."""
    num_requests: int
    leader_probability: float | None
    """That the leader of the race is within the margin of the best; None where there was no race."""
    is_decided: bool
    """Whether the race came to its own end, not to that of the budget."""
    is_heldout: bool
    """Whether the prompts were kept from the search."""


@dataclass(frozen=True)
class Decision:
    """The recommendation of a study, complete with its evidence; stored and exported as it is."""

    winner: str
    """Digest of the recommended config."""
    winner_label: str
    reason: str
    objective: str
    is_maximized: bool
    margin_ratio: float
    confidence: float
    finalists: tuple[FinalistResult, ...]
    gain_over_baseline: Interval | None
    gain_over_default: Interval | None
    warnings: tuple[str, ...] = ()
    is_simulated: bool = False
    schedule_digest: str = ""
    tied: tuple[str, ...] = ()
    """Digests of all that may be as good as the winner, itself included, simplest first."""
    runner_up: str | None = None
    """Digest of the next best that keeps every limit; None without one."""
    borderline: tuple[str, ...] = ()
    """The winner's limits that are kept by the estimate, but not by its 90 % upper bound."""
    evidence: Evidence | None = None
    """None in decisions of versions that did not keep it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, digest: str) -> FinalistResult:
        return next(result for result in self.finalists if result.digest == digest)


def decide(
    finalists: Sequence[Finalist],
    goal: Goal,
    trained_depth: int | None = None,
    caveats: Sequence[str] = (),
    *,
    race: RaceState | None = None,
    is_heldout: bool = False,
) -> Decision | None:
    """Choose among the finalists.

    The best feasible finalist is the one with the best mean. Every finalist that is not worse than
    it with 95 % confidence, or by less than the practical margin, is tied with it; the simplest of
    the tied ones is recommended. So speculation is recommended only where the measurements say, beyond
    their noise, that it helps.

    Args:
        finalists: each with its confirmation launches.
        goal: objective, limits and margin.
        trained_depth: of the drafter, for the warning about K beyond it.
        caveats: what limits every conclusion of the study; they become warnings.
        race: how the race stands.
        is_heldout: whether the finalists were measured on prompts that the search never saw.

    Returns:
        The decision; None when no finalist is feasible or was launched at least twice.
    """
    usable = [f for f in finalists if len(f.measurements) >= MIN_LAUNCHES]
    feasible = [f for f in usable if _is_feasible(f, goal)]
    if not feasible:
        return None
    spread = estimate_launch_spread(goal.objective, [f.measurements for f in usable], goal.limits)
    best = _best(feasible, goal)
    baseline = next((f for f in usable if BASELINE_ROLE in f.roles), None)
    results = tuple(_result(f, best, baseline, goal, spread) for f in usable)
    tied = [
        f for f, r in zip(usable, results, strict=True) if r.is_feasible and r.is_tied_with_best
    ]
    # A config that may break a limit does not win by being simpler than one that keeps it beyond doubt.
    clear = [f for f in tied if not _borderline(f, goal)]
    ordered = sorted(clear or tied, key=lambda f: f.config.simplicity)
    winner = ordered[0]
    others = [f for f in feasible if f is not winner]
    default = next((f for f in usable if DEFAULT_ROLE in f.roles), None)
    return Decision(
        winner=winner.config.digest,
        winner_label=winner.label,
        reason=_reason(winner, best, tied, goal),
        objective=goal.objective,
        is_maximized=goal.is_maximized,
        margin_ratio=goal.margin_ratio,
        confidence=CONFIDENCE,
        finalists=results,
        gain_over_baseline=_gain(winner, baseline, goal, spread),
        gain_over_default=_gain(winner, default, goal, spread),
        warnings=(
            *_warnings(winner, goal, trained_depth),
            *_evidence_warnings(winner, race),
            *caveats,
        ),
        is_simulated=any(m.is_simulated for f in usable for m in f.measurements),
        schedule_digest=winner.measurements[0].schedule_digest,
        tied=tuple(f.config.digest for f in sorted(tied, key=lambda f: f.config.simplicity)),
        runner_up=_best(others, goal).config.digest if others else None,
        borderline=_borderline(winner, goal),
        evidence=Evidence(
            num_launches=sum(len(f.measurements) + f.num_failed for f in finalists),
            num_requests=sum(len(m.records) for f in usable for m in f.measurements),
            leader_probability=race.probability if race is not None else None,
            is_decided=race is not None and race.is_decided,
            is_heldout=is_heldout,
        ),
    )


def _borderline(finalist: Finalist, goal: Goal) -> tuple[str, ...]:
    """Return the limits whose 90 % upper bound is violated although the mean over launches is not.

    The bound is Student's over the launches' own figures, on the log of observed / limit, their spread with
    the prior of the race: two launches that happen to agree do not prove that there is none.
    """
    rows = [violations(m, goal.limits) for m in finalist.measurements]
    found = []
    for name in rows[0]:
        ratios = np.array([1 + row[name] for row in rows])
        if (ratios <= 0).any():
            continue  # no request was of this class
        logs = np.log(ratios)
        free = len(logs) - 1 + PRIOR_FREEDOM
        squares = float(((logs - logs.mean()) ** 2).sum()) + PRIOR_FREEDOM * PRIOR_TAIL_SPREAD**2
        half = t_quantile(LIMIT_CONFIDENCE, free) * math.sqrt(squares / free / len(logs))
        if logs.mean() <= 0 < logs.mean() + half:
            found.append(name)
    return tuple(found)


def _evidence_warnings(winner: Finalist, race: RaceState | None) -> list[str]:
    warnings = []
    if race is not None and not race.is_decided:
        warnings.append(
            f"the race ended with the budget: with {race.probability:.0%} probability its leader is within "
            "the margin of the best; 95 % were wanted"
        )
    piling = [
        s for m in winner.measurements if (s := saturation(m)) is not None and s.is_saturated
    ]
    if piling:
        warnings.append(
            f"saturated: requests piled up in {len(piling)} of {len(winner.measurements)} measurements "
            f"({piling[0].slope_rps:.2f} of {piling[0].arrival_rps:.2f} requests/s went unanswered); "
            "every latency is one of how long the measurement was"
        )
    errors: Counter[str] = Counter()
    for m in winner.measurements:
        errors.update(error_counts(m))
    if errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items()))
        total = sum(len(m.records) for m in winner.measurements)
        warnings.append(f"requests failed: {kinds}, of {total}")
    return warnings


def _is_feasible(finalist: Finalist, goal: Goal) -> bool:
    worst = worst_violation(finalist.measurements, goal.limits)
    is_good = finalist.quality is None or finalist.quality.is_feasible
    return is_good and finalist.num_failed == 0 and (worst is None or worst[1] <= 0)


def _best(finalists: Sequence[Finalist], goal: Goal) -> Finalist:
    """The finalist with the best objective over its launches, failing that the first."""

    def value(finalist: Finalist) -> float:
        values = [observed(goal.objective, m, goal.limits) for m in finalist.measurements]
        mean = float(np.mean(values))
        worst = float("-inf") if goal.is_maximized else float("inf")
        return mean if math.isfinite(mean) else worst

    return max(finalists, key=value) if goal.is_maximized else min(finalists, key=value)


def _result(
    finalist: Finalist,
    best: Finalist,
    baseline: Finalist | None,
    goal: Goal,
    spread: LaunchSpread | None,
) -> FinalistResult:
    to_best = ratio_interval(
        goal.objective,
        finalist.measurements,
        best.measurements,
        goal.limits,
        launch_spread=spread,
    )
    worst = worst_violation(finalist.measurements, goal.limits)
    lengths = [m.counters.acceptance_length for m in finalist.measurements]
    known = [length for length in lengths if length is not None]
    return FinalistResult(
        config=finalist.config.as_dict(),
        digest=finalist.config.digest,
        label=finalist.label,
        roles=finalist.roles,
        num_launches=len(finalist.measurements),
        objective=metric_interval(
            goal.objective, finalist.measurements, goal.limits, launch_spread=spread
        ),
        ratio_to_best=to_best,
        ratio_to_baseline=_gain(finalist, baseline, goal, spread),
        is_feasible=_is_feasible(finalist, goal),
        worst_limit=worst[0] if worst is not None else None,
        worst_violation=worst[1] if worst is not None else None,
        is_tied_with_best=finalist is best or _is_tied(to_best, goal),
        acceptance_length=float(np.mean(known)) if known else None,
        quality=finalist.quality,
    )


def _is_tied(ratio_to_best: Interval | None, goal: Goal) -> bool:
    if ratio_to_best is None:
        return False  # one of the two never did what is counted
    if goal.is_maximized:
        is_worse, by = ratio_to_best.high < 1, 1 - ratio_to_best.estimate
    else:
        is_worse, by = ratio_to_best.low > 1, ratio_to_best.estimate - 1
    return not is_worse or by < goal.margin_ratio


def _gain(
    finalist: Finalist, reference: Finalist | None, goal: Goal, spread: LaunchSpread | None
) -> Interval | None:
    if reference is None or reference is finalist:
        return None
    return ratio_interval(
        goal.objective,
        finalist.measurements,
        reference.measurements,
        goal.limits,
        launch_spread=spread,
    )


def _reason(winner: Finalist, best: Finalist, tied: Sequence[Finalist], goal: Goal) -> str:
    direction = "highest" if goal.is_maximized else "lowest"
    if winner is best and len(tied) == 1:
        return f"{direction} {goal.objective} among the finalists, beyond noise and margin"
    if winner is best:
        others = ", ".join(f.label for f in tied if f is not winner)
        return f"{direction} {goal.objective}, and simpler than what is tied with it: {others}"
    return (
        f"tied with {best.label}, which has the {direction} {goal.objective} but not "
        "beyond noise and margin; the simpler config is preferred"
    )


def _warnings(winner: Finalist, goal: Goal, trained_depth: int | None) -> list[str]:
    config, warnings = winner.config, []
    if any(m.is_simulated for m in winner.measurements):
        warnings.append("simulated: no real server was measured")
    if trained_depth and config.num_speculative_tokens > trained_depth:
        warnings.append(
            f"K = {config.num_speculative_tokens} is beyond the drafter's trained depth of {trained_depth}"
        )
    if goal.objective.endswith("_mean_ms") and winner.measurements[0].concurrency is None:
        # Coverage by load: docs/statistics.md.
        warnings.append(
            "open loop: above about 70 % of the server's capacity intervals of mean latencies are "
            "too narrow; measure longer before a small difference is believed"
        )
    warnings += _client_warnings(winner)
    warnings += _quality_warnings(winner)
    worst = worst_violation(winner.measurements, goal.limits)
    borderline = _borderline(winner, goal)
    if borderline:
        warnings.append(
            f"borderline: the 90 % upper bound of {', '.join(borderline)} is above the limit"
        )
    elif worst is not None and -NEAR_LIMIT_RATIO < worst[1] <= 0:
        warnings.append(f"{worst[0]} is only {-worst[1]:.1%} below its limit")
    warnings += [f"{finding}" for finding in _speculation_findings(winner)]
    return warnings


def _speculation_findings(winner: Finalist) -> list[str]:
    """Say what is wrong with the winner's speculation counters."""
    if not winner.config.is_speculative:
        return []
    drafted = [m.counters for m in winner.measurements if m.counters.num_accepted_tokens_per_pos]
    rates = [counters.per_position_acceptance_rates for counters in drafted]
    if any(r and r[0] <= 0 for r in rates):
        return ["nothing that was drafted was accepted; check the head"]
    if any(later > earlier for r in rates for earlier, later in pairwise(r)):
        return [
            "acceptance rises with the position, which no chain of drafts can do; check the counters"
        ]
    return []


def _client_warnings(winner: Finalist) -> list[str]:
    """Say where the load generator was late, or near it."""
    verdicts = [audit_verdict(m) for m in winner.measurements]
    count = len(verdicts)
    for level, word in ((AuditLevel.INVALID, "was late"), (AuditLevel.WARN, "was nearly late")):
        found = [v for v in verdicts if v.level is level]
        if found:
            return [
                f"client-limited: the load generator {word} in {len(found)} of {count} "
                f"measurements: {found[0].reasons[0]}"
            ]
    return []


def _quality_warnings(winner: Finalist) -> list[str]:
    config, verdict = winner.config, winner.quality
    if verdict is None:
        is_lossy = config.weights != "as_is" or config.kv_cache_dtype != "auto"
        if is_lossy:
            return ["FP8 changes what the model says, and its answers were not checked"]
        return []
    if verdict.level is QualityLevel.PASSED:
        return []
    word = "were not checked" if verdict.level is QualityLevel.NOT_CHECKED else "deserve a look"
    return [f"the answers {word}: {reason}" for reason in verdict.reasons]
