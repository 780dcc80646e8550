"""The search benchmark's own arithmetic: limits, regret, when a method is right, and that runs go on."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autotune.serving.config import ServingConfig
from benchmarks.search.blackbox import grid_configs, nested_loop_configs, plain_knobs, run_optuna
from benchmarks.search.report import plot, proportion_interval, quantile_90, table
from benchmarks.search.runner import (
    Task,
    do_task,
    judge,
    make_truth,
    read_run,
    run_path,
    truth_path,
)
from benchmarks.search.scenarios import Scenario, Traffic, make_setup, scenarios
from benchmarks.search.timeline import Run, median
from benchmarks.search.truth import (
    LIMIT_ROOM,
    Landscape,
    Point,
    limits_for,
    read_points,
    with_chance,
    write_points,
)

SMALL = Scenario(0, "h100-8b", Traffic(2, 100, 16, 8), 1.0)
"""Few short requests: the searches of it take a second."""
A, B, C, D = (ServingConfig("m", max_num_seqs=n) for n in (8, 16, 32, 64))


def landscape() -> Landscape:
    """Limits 100 and 10 ms. A is the best that keeps both; B is 2 % over, C is 4 % over, D cannot serve."""
    with_none = {
        A.digest: Point(100.0, 90.0, 9.0),
        B.digest: Point(110.0, 102.0, 9.0),
        C.digest: Point(120.0, 90.0, 10.4),
        D.digest: None,
    }
    setup = make_setup(SMALL, {}, 0, "random", Path())
    return Landscape(
        "h100-8b", setup.schedule, {"ttft_p95_ms": 100.0, "tpot_p95_ms": 10.0}, with_none, {}
    )


def test_luck_multiplies_the_tails_by_k() -> None:
    point = Point(100.0, 50.0, 10.0)
    assert with_chance(point, 4, {4: (1.0, 1.1)}) == Point(100.0, 50.0, 11.0)
    assert with_chance(point, 3, {4: (1.0, 1.1)}) is point
    assert with_chance(None, 4, {4: (1.0, 1.1)}) is None


def run(*steps: tuple[float, float], method: str = "m", scenario: str = "s") -> Run:
    return Run(scenario, method, 0, list(steps), has_recommendation=True)


def test_limits_leave_the_share_that_is_asked_for() -> None:
    """Both figures rise together from 1 to 100, so a quantile q of both leaves q of the points."""
    points = [Point(1.0, float(i), float(i)) for i in range(1, 101)]
    for share in (0.6, 0.3, 0.1):
        limits = limits_for([*points, None], share)
        kept = sum(LIMIT_ROOM * i <= limits["ttft_p95_ms"] for i in range(1, 101))
        assert kept == pytest.approx(100 * share, abs=1.01)


def test_opposed_figures_need_looser_limits() -> None:
    """TTFT rises as TPOT falls: quantiles q of both overlap in 2q - 1, so 0.3 needs q = 0.65."""
    points = [Point(1.0, float(i), float(101 - i)) for i in range(1, 101)]
    assert limits_for(points, 0.3)["ttft_p95_ms"] == pytest.approx(65 * LIMIT_ROOM, abs=1.6)


def test_regret_is_measured_against_the_best_that_keeps_the_limits() -> None:
    truth = landscape()
    assert truth.best_tps == 100.0
    assert truth.regret(A, 100.0) == 0.0
    assert truth.regret(A, 125.0) == pytest.approx(0.2)
    assert truth.regret(B, 100.0) == 0.0, (
        "2 % over a limit is within the slack, and more is no loss"
    )
    assert math.isinf(truth.regret(C, 100.0))
    assert math.isinf(truth.regret(D, 100.0))
    assert math.isinf(truth.regret(None, 100.0))


def test_being_right_counts_from_when_it_stays_so() -> None:
    inf = math.inf
    assert run((0.2, 0.01), (0.5, 0.1), (0.9, 0.02), (1.0, 0.0)).stays_from_h() == 0.9
    assert math.isinf(run((0.2, 0.01), (2.9, 0.03)).stays_from_h())
    assert run((0.2, 0.01), (3.1, 0.5)).stays_from_h() == 0.2, (
        "what comes after the end is too late"
    )
    assert math.isinf(run((3.1, 0.0)).stays_from_h())
    wavering = run((0.2, 0.3), (1.0, 0.01))
    assert [wavering.regret_at(h) for h in (0.1, 0.5, 1.0)] == [inf, 0.3, 0.01]
    assert not wavering.is_within(0.5)
    assert wavering.is_within(3.0)


def test_saying_nothing_is_not_an_infeasible_recommendation() -> None:
    assert run((1.0, math.inf)).is_infeasible
    assert not Run("s", "m", 0, [(1.0, math.inf)]).is_infeasible


def test_only_recommendations_in_time_are_judged() -> None:
    from benchmarks.search.blackbox import History

    history = History([(3600.0, C), (3 * 3600 + 1.0, None)], num_launches=2)
    judged = judge(history, landscape(), Task(SMALL, "random", 0))
    assert judged.is_infeasible
    assert judged.steps[0] == (1.0, math.inf)


def test_medians_may_be_never() -> None:
    assert median([1.0, 3.0]) == 2.0
    assert median([3.0, 1.0, math.inf]) == 3.0
    assert math.isinf(median([1.0, math.inf]))
    assert quantile_90([float(i) for i in range(1, 11)]) == 9.0


def test_wilson_interval_of_a_textbook_example() -> None:
    """8 of 10: 0.49 to 0.94 (Wilson's score interval, z = 1.96)."""
    assert proportion_interval(8, 10) == pytest.approx((0.490, 0.943), abs=1e-3)


def test_scenarios_do_not_depend_on_how_many_are_asked_for() -> None:
    many = scenarios(24)
    assert many[:5] == scenarios(5)
    assert len({s.world for s in many}) >= 20
    assert "cpu-demo" not in {s.world for s in many}
    assert {s.feasible_share for s in many} == {0.6, 0.3, 0.1}
    assert {s.traffic.concurrency for s in many} >= {1, 256}
    assert any(s.traffic.rate_rps for s in many)


def test_plain_methods_propose_what_they_say(tmp_path: Path) -> None:
    setup = make_setup(SMALL, {}, 0, "random", tmp_path)
    assert plain_knobs(setup)["num_speculative_tokens"] == list(range(11)), (
        "trained to 8, and 2 more"
    )
    grid = list(grid_configs(setup, 0))
    assert len(grid) == len(set(grid)) == 4 * 2 * 2 * 3 * 3
    assert grid != list(grid_configs(setup, 1))
    first = list(islice(nested_loop_configs(setup, 0), 6))
    assert {c.num_speculative_tokens for c in first} == {8}
    assert len({c.max_num_batched_tokens for c in first}) > 1, "the token budget is the inner loop"


def test_a_run_is_kept_and_repeatable(tmp_path: Path) -> None:
    write_points(truth_path(tmp_path, SMALL), {A.digest: Point(1.0, 1e6, 1e6)})
    make_truth(tmp_path, SMALL)
    assert read_points(truth_path(tmp_path, SMALL)) == {A.digest: Point(1.0, 1e6, 1e6)}, "kept"

    setup = make_setup(SMALL, {}, 0, "random", tmp_path)
    first = run_optuna(setup, 600.0, tmp_path, "random", 0)
    again = run_optuna(make_setup(SMALL, {}, 0, "random", tmp_path), 600.0, tmp_path, "random", 0)
    assert first.recommendations == again.recommendations
    assert first.num_launches > 2
    assert first.ended_s >= 600.0


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    task = Task(SMALL, "random", 0)
    path = run_path(tmp_path, task)
    path.write_text(
        '{"scenario": "s", "method": "random", "seed": 0, "steps": [[1.0, null]]}',
        encoding="utf-8",
    )
    do_task(tmp_path, task)  # has no truth to judge by: running it would fail
    assert read_run(path).steps == [(1.0, math.inf)]


def test_tables_and_plot_say_never(tmp_path: Path) -> None:
    runs = [run((0.5, 0.0), method="good"), run((0.5, 0.5), method="bad")]
    text = table(runs, ["good", "bad", "absent"])
    assert "| good | 1 | 0.50 [0.50, 0.50] | 1.00 / 1.00 / 1.00 / 1.00 " in text
    assert "| bad | 1 | never [never, never] |" in text
    assert "absent" not in text
    drawn = ElementTree.fromstring(plot(runs, ["good", "bad"]))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 2
