"""From figures to a verdict: every line that the gate draws, and the sentence that explains it."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.measure.quality.divergence import DistributionFigures
from autotune.measure.quality.forcing import ForcedFigures
from autotune.measure.quality.matching import MatchFigures
from autotune.measure.quality.shares import Share, difference_interval
from autotune.measure.quality.verdict import (
    LoopFigures,
    QualityFigures,
    QualityLevel,
    QualityVerdict,
    TaskFigures,
)
from autotune.traffic.quality import QualityThresholds

WARNING_P_VALUE = 0.2
"""Of McNemar's test, below which lost tasks are worth a look."""

Finding = tuple[QualityLevel, str]


def judge(figures: QualityFigures, thresholds: QualityThresholds) -> QualityVerdict:
    """Apply every rule; the worst finding is the level."""
    findings = [
        *_of_tokens(figures),
        *_of_ends(figures),
        *_of_loops(figures.loops, thresholds),
        *(_of_distributions(figures.distributions, thresholds) if figures.distributions else ()),
        *(finding for task in figures.tasks for finding in _of_task(task, thresholds)),
    ]
    levels = {level for level, _ in findings}
    worst = next(
        (level for level in (QualityLevel.FAILED, QualityLevel.WARNED) if level in levels),
        QualityLevel.PASSED,
    )
    return QualityVerdict(worst, tuple(reason for _, reason in findings), figures)


def _of_tokens(figures: QualityFigures) -> Iterator[Finding]:
    """Judge emitted tokens, by the fixed rule or, where the baseline breaks it, beside the baseline.

    The fixed rule supposes that reading a prompt and writing an answer round alike. Where they do
    not, the baseline's own answers show it, and only what is worse than they are counts.
    """
    ours, floor = figures.forced, figures.forced_baseline
    if ours.is_good:
        return
    is_worse = floor.is_good or _is_worse(ours, floor) or _matches_less(figures)
    if not is_worse:
        yield (
            QualityLevel.WARNED,
            "teacher forcing: the baseline breaks the rule with its own answers "
            f"({_forced_text(floor)}); the config is not worse ({_forced_text(ours)})",
        )
        return
    judged_by = "its own model" if figures.is_lossy else "the baseline"
    yield (
        QualityLevel.FAILED,
        f"emitted tokens are not those that {judged_by} would choose: {_forced_text(ours)}",
    )
    if not figures.is_lossy and _matches_less(figures):
        yield (QualityLevel.FAILED, _match_text(figures))


def _is_worse(ours: ForcedFigures, floor: ForcedFigures) -> bool:
    """Whether our share of near tokens is below the floor's, or that of far ones above, for sure."""
    near = difference_interval(ours.near, floor.near)
    far = difference_interval(
        Share(ours.num_far, ours.num_positions), Share(floor.num_far, floor.num_positions)
    )
    return near[1] < 0 or far[0] > 0


def _matches_less(figures: QualityFigures) -> bool:
    """Whether the answers match the baseline's less often than those match each other, for sure."""
    if figures.is_lossy:
        return False
    return any(
        difference_interval(matched.exact, figures.floor.exact)[1] < 0
        for matched in (figures.match_serial, figures.match_concurrent)
    )


def _of_ends(figures: QualityFigures) -> Iterator[Finding]:
    if figures.num_cut_short:
        yield (
            QualityLevel.FAILED,
            f"{figures.num_cut_short} of {2 * figures.num_prompts} answers end early, without a stop "
            "token and below their limit, where the baseline's do not",
        )


def _of_loops(loops: LoopFigures, thresholds: QualityThresholds) -> Iterator[Finding]:
    # A model that loops easily does so now here, now there: prompts that only the baseline loops on
    # are set against those that only the config loops on.
    if loops.num_new <= loops.num_gone:
        return
    is_bad = loops.num_new > thresholds.max_new_loops_ratio * loops.num_prompts
    yield (
        QualityLevel.FAILED if is_bad else QualityLevel.WARNED,
        f"{loops.num_new} of {loops.num_prompts} prompts are answered with a loop by the config alone "
        f"(allowed: {thresholds.max_new_loops_ratio:.0%})",
    )


def _of_distributions(
    figures: DistributionFigures, thresholds: QualityThresholds
) -> Iterator[Finding]:
    kl, agreement = figures.mean_kl_nats, figures.agreement_ratio
    if kl > thresholds.good_mean_kl_nats:
        is_bad = kl > thresholds.max_mean_kl_nats
        limit = thresholds.max_mean_kl_nats if is_bad else thresholds.good_mean_kl_nats
        yield (
            QualityLevel.FAILED if is_bad else QualityLevel.WARNED,
            f"quantisation shifts the model's probabilities: mean KL is at least {kl:.4f} nat "
            f"({_line(is_bad)} {limit:g})",
        )
    if agreement < thresholds.good_agreement_ratio:
        is_bad = agreement < thresholds.min_agreement_ratio
        limit = thresholds.min_agreement_ratio if is_bad else thresholds.good_agreement_ratio
        yield (
            QualityLevel.FAILED if is_bad else QualityLevel.WARNED,
            f"quantisation changes the most probable token at {1 - agreement:.1%} of "
            f"{figures.num_positions:,} positions ({_line(is_bad)} {1 - limit:.1%})",
        )


def _line(is_bad: bool) -> str:
    return "allowed: up to" if is_bad else "good: up to"


def _of_task(task: TaskFigures, thresholds: QualityThresholds) -> Iterator[Finding]:
    if task.num_only_baseline <= task.num_only_candidate:
        return
    if task.p_value < thresholds.max_p_value:
        level = QualityLevel.FAILED
    elif task.p_value < WARNING_P_VALUE:
        level = QualityLevel.WARNED
    else:
        return
    yield (
        level,
        f"{task.file}: {task.num_solved_candidate} of {task.num_rows} tasks are solved, "
        f"{task.num_solved_baseline} by the baseline ({task.num_only_baseline} lost, "
        f"{task.num_only_candidate} won, p = {task.p_value:.3f})",
    )


def _forced_text(figures: ForcedFigures) -> str:
    text = (
        f"{figures.near.ratio:.2%} of {figures.num_positions:,} are the best token or within "
        f"{figures.max_gap_nats:g} nat of it (at least {figures.min_ratio:.2%}); "
        f"further than {figures.max_single_gap_nats:g} nat: {figures.num_far} (none may be)"
    )
    if not figures.worst:
        return text
    worst = figures.worst[0]
    return (
        f"{text}; the worst by {worst.gap_nats:.1f} nat, at token {worst.position} of the answer to "
        f"prompt {worst.prompt}"
    )


def _match_text(figures: QualityFigures) -> str:
    def share(matched: MatchFigures) -> str:
        return f"{matched.num_exact} of {matched.num_pairs}"

    return (
        f"answers equal the baseline's in {share(figures.match_serial)} cases one at a time and in "
        f"{share(figures.match_concurrent)} at concurrency {figures.concurrency}; the baseline equals "
        f"itself in {share(figures.floor)}"
    )
