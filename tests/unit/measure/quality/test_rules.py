"""Every line that the gate draws, with figures on either side of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotune.measure.quality.divergence import DistributionFigures
from autotune.measure.quality.forcing import ForcedFigures, WorstPosition
from autotune.measure.quality.matching import MatchFigures
from autotune.measure.quality.rules import judge
from autotune.measure.quality.shares import mcnemar_exact
from autotune.measure.quality.verdict import (
    LoopFigures,
    QualityFigures,
    QualityLevel,
    QualityVerdict,
    TaskFigures,
)
from autotune.traffic.quality import QualityThresholds

PASSED, WARNED, FAILED = QualityLevel.PASSED, QualityLevel.WARNED, QualityLevel.FAILED


def matched(num_exact: int, num_pairs: int = 64) -> MatchFigures:
    return MatchFigures(num_pairs, num_exact, 0.0, 1.0, 100.0)


def forced(num_off: int = 0, num_far: int = 0, num_positions: int = 10_000) -> ForcedFigures:
    """So many tokens neither the best one nor a near-tie, so many of them further than 2 nat."""
    worst = (WorstPosition(3, 17, 5.25 if num_far else 0.75),) if num_off else ()
    return ForcedFigures(
        num_positions=num_positions,
        num_best=num_positions - num_off,
        num_near=num_positions - num_off,
        num_far=num_far,
        largest_gap_nats=worst[0].gap_nats if worst else 0.0,
        max_gap_nats=0.25,
        max_single_gap_nats=2.0,
        min_ratio=0.995,
        worst=worst,
    )


GOOD = QualityFigures(
    is_lossy=False,
    num_prompts=64,
    num_unscored=0,
    concurrency=8,
    floor=matched(40),
    match_serial=matched(38),
    match_concurrent=matched(37),
    num_cut_short=0,
    forced=forced(),
    forced_baseline=forced(),
    distributions=None,
    loops=LoopFigures(64, 0, 0, 0),
)


def judged(**changes: object) -> QualityVerdict:
    return judge(replace(GOOD, **changes), QualityThresholds())  # type: ignore[arg-type]  # fields


def test_few_equal_answers_alone_are_no_fault() -> None:
    # llama.cpp #25618 saw 12 % at width 9, and vLLM's own tests accept 66 %: the tokens decide.
    assert judged(match_serial=matched(5), match_concurrent=matched(5)).level is PASSED


@pytest.mark.parametrize(
    ("num_off", "num_far", "level"), [(50, 0, PASSED), (51, 0, FAILED), (1, 1, FAILED)]
)
def test_emitted_tokens(num_off: int, num_far: int, level: QualityLevel) -> None:
    # 50 of 10,000 is exactly the 0.5 % that may be off.
    verdict = judged(forced=forced(num_off, num_far))
    assert verdict.level is level


def test_a_failure_says_where_and_by_how_much() -> None:
    (reason,) = judged(forced=forced(1, 1)).reasons
    assert reason == (
        "emitted tokens are not those that the baseline would choose: 99.99% of 10,000 are the best "
        "token or within 0.25 nat of it (at least 99.50%); further than 2 nat: 1 (none may be); "
        "the worst by 5.2 nat, at token 17 of the answer to prompt 3"
    )


def test_equal_answers_are_told_beside_the_floor_when_the_tokens_fail_too() -> None:
    # 10 of 64 against 40 of 64: a difference of 47 points with an interval far from 0.
    verdict = judged(forced=forced(1, 1), match_serial=matched(10))
    assert "in 10 of 64 cases one at a time and in 37 of 64 at concurrency 8" in verdict.reasons[1]
    assert "the baseline equals itself in 40 of 64" in verdict.reasons[1]


def test_a_baseline_that_breaks_the_rule_itself_becomes_the_measure() -> None:
    floor = forced(100, 2)
    same = judged(forced=forced(110, 3), forced_baseline=floor)
    assert same.level is WARNED
    assert "the baseline breaks the rule with its own answers" in same.reasons[0]
    # 1 % against 2 % of 10,000 positions; and 2 far ones against 40.
    assert judged(forced=forced(200, 2), forced_baseline=floor).level is FAILED
    assert judged(forced=forced(110, 40), forced_baseline=floor).level is FAILED
    # No worse token by token, but far fewer equal answers than the floor's.
    fewer = judged(forced=forced(110, 3), forced_baseline=floor, match_serial=matched(10))
    assert fewer.level is FAILED


def test_answers_that_end_early() -> None:
    verdict = judged(num_cut_short=2)
    assert verdict.level is FAILED
    assert verdict.reasons[0].startswith("2 of 128 answers end early")


@pytest.mark.parametrize(
    ("baseline", "candidate", "new", "level"),
    [
        (0, 0, 0, PASSED),
        (0, 3, 3, WARNED),  # 3 of 64 are 4.7 %
        (0, 4, 4, FAILED),  # 4 of 64 are 6.3 %
        (5, 5, 0, PASSED),  # the same ones
        (5, 5, 5, PASSED),  # as many other ones: the model loops, not the config
        (5, 9, 5, FAILED),  # 5 new ones, one gone
    ],
)
def test_loops(baseline: int, candidate: int, new: int, level: QualityLevel) -> None:
    assert judged(loops=LoopFigures(64, baseline, candidate, new)).level is level


@pytest.mark.parametrize(
    ("kl", "num_agreeing", "level"),
    [
        (0.01, 980, PASSED),
        (0.011, 990, WARNED),
        (0.005, 979, WARNED),
        (0.05, 950, WARNED),
        (0.051, 990, FAILED),
        (0.005, 949, FAILED),
    ],
)
def test_distributions(kl: float, num_agreeing: int, level: QualityLevel) -> None:
    figures = DistributionFigures(1000, kl, 0.5, num_agreeing, 0.01)
    assert judged(is_lossy=True, distributions=figures).level is level


def test_of_a_quantised_model_only_its_own_choice_is_asked() -> None:
    figures = DistributionFigures(1000, 0.001, 0.01, 999, 0.01)
    verdict = judged(
        is_lossy=True, distributions=figures, forced=forced(1, 1), match_serial=matched(0)
    )
    assert verdict.level is FAILED
    assert len(verdict.reasons) == 1  # answers that differ are no news
    assert "its own model would choose" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("lost", "won", "level"),
    [
        (6, 0, FAILED),  # p = 0.031
        (5, 0, WARNED),  # p = 0.063
        (3, 0, PASSED),  # p = 0.25
        (0, 6, PASSED),  # better
        (20, 18, PASSED),
    ],
)
def test_tasks(lost: int, won: int, level: QualityLevel) -> None:
    task = TaskFigures("gsm8k.jsonl", 200, 80, 80 - lost + won, lost, won,
                       mcnemar_exact(lost, won), {})  # fmt: skip
    assert judged(tasks=(task,)).level is level


def test_every_finding_is_told_and_the_worst_one_counts() -> None:
    verdict = judged(loops=LoopFigures(64, 0, 1, 1), num_cut_short=1, forced=forced(60))
    assert verdict.level is FAILED
    assert len(verdict.reasons) == 3
    assert not verdict.is_feasible


def test_thresholds_are_the_users() -> None:
    def level(limits: Sequence[tuple[str, float]], figures: QualityFigures) -> QualityLevel:
        return judge(figures, QualityThresholds.model_validate(dict(limits))).level

    looping = replace(GOOD, loops=LoopFigures(64, 0, 4, 4))
    assert level([("max_new_loops_ratio", 0.1)], looping) is WARNED
    assert level([("max_new_loops_ratio", 0.01)], looping) is FAILED
