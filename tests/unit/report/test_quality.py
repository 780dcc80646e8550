"""The quality gate's findings in a few words, and what a solved task costs."""

from __future__ import annotations

import pytest

from autotune.measure.quality.divergence import DistributionFigures
from autotune.measure.quality.forcing import ForcedFigures
from autotune.measure.quality.matching import MatchFigures
from autotune.measure.quality.verdict import (
    LoopFigures,
    QualityFigures,
    QualityLevel,
    QualityVerdict,
    TaskFigures,
)
from autotune.measure.stats import Interval
from autotune.report.quality import answers_text, solved_task_costs
from autotune.report.table import dollars
from autotune.traffic.profile import Cost

MATCH = MatchFigures(12, 11, 0.65, 0.99, 48.0)
FORCED = ForcedFigures(96, 95, 96, 0, 0.125, 0.25, 2.0, 0.995, ())
TASK = TaskFigures("gsm.jsonl", 200, 120, 100, 25, 5, 0.001, {})


def verdict(
    distributions: DistributionFigures | None = None, tasks: tuple[TaskFigures, ...] = ()
) -> QualityVerdict:
    figures = QualityFigures(
        is_lossy=distributions is not None,
        num_prompts=12,
        num_unscored=0,
        concurrency=4,
        floor=MATCH,
        match_serial=MATCH,
        match_concurrent=MATCH,
        num_cut_short=0,
        forced=FORCED,
        forced_baseline=FORCED,
        distributions=distributions,
        loops=LoopFigures(12, 0, 0, 0),
        tasks=tasks,
    )
    return QualityVerdict(QualityLevel.PASSED, (), figures)


def test_a_verdict_tells_what_it_rests_on() -> None:
    text = answers_text(verdict())

    assert text == (
        "passed; 11 of 12 equal to those without speculation; "
        "96 of 96 tokens are the model's best or a near-tie, the worst 0.12 nat below it"
    )


def test_a_quantised_config_is_set_beside_the_unquantised_model() -> None:
    text = answers_text(verdict(DistributionFigures(200, 0.0123, 0.2, 190, 0.01)))

    assert "KL to the unquantised model 0.0123 nat" in text
    assert "same best token at 95.0% of 200 positions" in text


def test_without_figures_the_level_stands_alone() -> None:
    unknown = QualityVerdict(QualityLevel.NOT_CHECKED, ("the server died",))

    assert answers_text(unknown) == "not checked"
    assert solved_task_costs(unknown, Interval(2, 1, 4, 8, 2), Cost(gpu_hourly_usd=1)) == {}


def test_a_solved_task_costs_its_requests() -> None:
    # 100 of 200 solved; 2 requests/s at 7.20 $ an hour: 0.001 $ each, so 0.002 $ a solved one.
    judged = verdict(tasks=(TASK,))

    (cost,) = solved_task_costs(judged, Interval(2, 1, 4, 8, 2), Cost(gpu_hourly_usd=7.2)).values()

    assert cost.estimate == pytest.approx(0.002)
    assert dollars(cost) == "$0.002 [0.001, 0.004]"
    assert "gsm.jsonl: 100 of 200 solved, 120 without speculation" in answers_text(judged)
