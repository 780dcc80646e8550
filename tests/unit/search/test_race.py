"""The race of the finalists: whom it launches, when it ends, and how often it is right."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats
from study_helpers import at_tps, config, measurement

from autotune.measure.quality.verdict import QualityLevel, QualityVerdict
from autotune.measure.records import Measurement
from autotune.search.decision import BASELINE_ROLE, Finalist, Goal
from autotune.search.race import RaceStep, race_step

PRIOR_SQUARES = 2 * 0.015**2
"""Of the spread before any repeat: 1.5 % with two degrees of freedom."""
PLENTY = 1000


def goal(margin_ratio: float = 0.02, **limits: float) -> Goal:
    return Goal("output_throughput_tps", True, {"default": limits} if limits else {}, margin_ratio)


def finalist(k: int, *measurements: Measurement, **changes: Any) -> Finalist:
    of = config(k)
    fields: dict[str, Any] = {"roles": (), **changes}
    return Finalist(config=of, measurements=measurements, label=of.label(), **fields)


def at(tps: float, launched_s: float = 0.0, **changes: Any) -> Measurement:
    return dataclasses.replace(at_tps(tps, **changes), started_at_s=launched_s)


def next_k(step: RaceStep, finalists: Sequence[Finalist]) -> int | None:
    by_digest = {f.config.digest: f.config.num_speculative_tokens for f in finalists}
    return by_digest[step.next_digest] if step.next_digest is not None else None


def leader_k(step: RaceStep, finalists: Sequence[Finalist]) -> int | None:
    by_digest = {f.config.digest: f.config.num_speculative_tokens for f in finalists}
    return by_digest[step.leader] if step.leader is not None else None


def raced(
    truth_tps: Mapping[int, float], of_goal: Goal, spread: float, seed: int, max_launches: int
) -> tuple[RaceStep, list[int], list[Finalist]]:
    """Run a whole race; returns its last step, the K launched in order, and the finalists."""
    rng = np.random.default_rng(seed)
    done: dict[int, list[Measurement]] = {k: [] for k in truth_tps}
    order: list[int] = []
    while True:
        finalists = [finalist(k, *done[k]) for k in truth_tps]
        step = race_step(finalists, of_goal, max_launches)
        k = next_k(step, finalists)
        if k is None:
            return step, order, finalists
        tps = truth_tps[k] * math.exp(spread * rng.standard_normal())
        done[k].append(at(tps, float(len(order))))
        order.append(k)


# --- the first rounds ---


def test_every_other_round_goes_backwards() -> None:
    _, order, _ = raced({0: 100, 2: 150, 4: 200}, goal(), 0.0, 0, PLENTY)
    assert order[:6] == [0, 2, 4, 4, 2, 0]


def test_a_failed_launch_counts_and_puts_a_config_out() -> None:
    """K=2 failed in the first round, so the second one goes K=4, K=0 without it."""
    finalists = [finalist(0, at(100)), finalist(2, num_failed=1), finalist(4, at(200))]
    step = race_step(finalists, goal(), PLENTY)
    assert (next_k(step, finalists), step.num_launches) == (4, 3)
    finalists[2] = finalist(4, at(200), at(200))
    assert next_k(race_step(finalists, goal(), PLENTY), finalists) == 0


def test_a_failed_point_of_comparison_is_tried_once_more() -> None:
    done = finalist(4, at(200), at(200))
    once = [finalist(0, roles=(BASELINE_ROLE,), num_failed=1), done]
    assert next_k(race_step(once, goal(), PLENTY), once) == 0
    twice = [finalist(0, roles=(BASELINE_ROLE,), num_failed=2), done]
    step = race_step(twice, goal(), PLENTY)
    assert (next_k(step, twice), step.is_decided) == (None, True)


def test_what_fails_the_quality_gate_is_not_launched_again() -> None:
    failed = QualityVerdict(QualityLevel.FAILED, ("wrong answers",), None)
    bad = finalist(4, at(300), quality=failed)
    finalists = [bad, finalist(2, at(200), at(200))]
    step = race_step(finalists, goal(), PLENTY)
    assert (next_k(step, finalists), leader_k(step, finalists)) == (None, 2)


# --- how it ends ---


def test_a_single_finalist_wins_after_its_first_launches() -> None:
    step, order, finalists = raced({2: 100}, goal(), 0.0, 0, PLENTY)
    assert order == [2, 2]
    assert (step.is_decided, step.probability, leader_k(step, finalists)) == (True, 1.0, 2)


def test_no_finalist_keeps_the_limits() -> None:
    """TTFT of 200 ms against a limit of 100 ms."""
    slow = [at(100, ttft_s=0.2)] * 2
    step = race_step([finalist(0, *slow), finalist(2, *slow)], goal(ttft_p95_ms=100.0), PLENTY)
    assert (step.next_digest, step.leader, step.is_decided) == (None, None, True)
    assert step.reason == "no finalist keeps every limit"


def test_the_nearest_to_its_limits_is_launched_while_there_is_hope() -> None:
    """1 % and 3 % above the limit: with 4 % between launches neither is beyond doubt."""
    near = finalist(0, *[at(100, ttft_s=0.0101)] * 2)
    far = finalist(2, *[at(200, ttft_s=0.0103)] * 2)
    finalists = [far, near]
    step = race_step(finalists, goal(ttft_p95_ms=10.0), PLENTY)
    assert (next_k(step, finalists), step.leader) == (0, None)


def test_the_budget_ends_it() -> None:
    """Launches of 5 % do not tell 2 % apart within five."""
    noisy = [finalist(2, at(100), at(110)), finalist(4, at(102), at(112), at(105))]
    step = race_step(noisy, goal(0.01), max_launches=5)
    assert (step.next_digest, step.is_decided, step.reason) == (None, False, "budget")


def test_an_infeasible_finalist_does_not_lead() -> None:
    """TTFT of 20 ms and of 10 ms against a limit of 15 ms."""
    fast = finalist(4, *[at(200, ttft_s=0.02)] * 2)
    good = finalist(2, *[at(100, ttft_s=0.01)] * 2)
    step = race_step([fast, good], goal(ttft_p95_ms=15.0), PLENTY)
    assert (step.leader, step.next_digest, step.probability) == (good.config.digest, None, 1.0)


def test_a_leader_whose_limit_is_in_doubt_is_launched_more() -> None:
    """1 % below the limit; the bound is 4 % / sqrt(2) times Student's 1.64 (3 degrees), 4.6 % above."""
    lead = finalist(4, *[at(200, ttft_s=0.0099)] * 2)
    other = finalist(2, *[at(100, ttft_s=0.005)] * 2)
    step = race_step([lead, other], goal(ttft_p95_ms=10.0), PLENTY)
    assert (step.next_digest, step.is_decided) == (lead.config.digest, False)
    assert step.probability > 0.95


def test_a_class_without_requests_breaks_no_limit() -> None:
    limits = {"other": {"ttft_p95_ms": 10.0}}
    of_goal = Goal("output_throughput_tps", True, limits, 0.02)
    step = race_step([finalist(2, at(100), at(100))], of_goal, PLENTY)
    assert (step.leader, step.is_decided) == (config(2).digest, True)


@pytest.mark.parametrize(("simple_k", "is_asked"), [(2, True), (6, False)])
def test_a_simpler_one_that_may_yet_be_as_good_is_ruled_out_first(
    simple_k: int, is_asked: bool
) -> None:
    """5 % behind; spread of 1.5 % / sqrt(2) (4 degrees, nothing but the prior's squares), so the error is
    1.06 % and Student's 2.78 times it 2.9 %: ruled out. 2.5 % behind is not."""
    for behind, is_in_doubt in ((0.05, False), (0.025, True)):
        lead = finalist(4, *[at(100)] * 2)
        simple = finalist(simple_k, *[at(100 * math.exp(-behind))] * 2)
        step = race_step([lead, simple], goal(0.02), PLENTY)
        assert step.probability > 0.95
        assert step.is_decided == (not (is_in_doubt and is_asked))


def test_a_minimised_objective_is_led_by_the_lowest() -> None:
    """E2EL of 1 s and of 2 s."""
    of_goal = Goal("e2el_mean_ms", False, {}, 0.02)
    fast = finalist(2, *[measurement([1.0] * 10)] * 2)
    slow = finalist(4, *[measurement([2.0] * 10)] * 2)
    step = race_step([slow, fast], of_goal, PLENTY)
    assert (step.leader, step.is_decided) == (fast.config.digest, True)


# --- what is known ---


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.03])
def test_the_probability_for_two_is_student_s(gap: float) -> None:
    """The difference of two means under a common unknown spread is Student's t about the gap."""
    logs = np.array([[0.0, 0.02], [-gap - 0.01, -gap + 0.03]])  # means 0.01 and 0.01 - gap
    squares = PRIOR_SQUARES + 2 * 0.01**2 + 2 * 0.02**2
    error = math.sqrt(squares / 4) * math.sqrt(1 / 2 + 1 / 2)
    wanted = stats.t.cdf((math.log(1.02) + gap) / error, 4)
    finalists = [
        finalist(k, *(at(100 * math.exp(v)) for v in row))
        for k, row in zip((2, 4), logs, strict=True)
    ]
    step = race_step(finalists, goal(0.02), PLENTY)
    # Four standard errors of 4000 draws.
    assert step.probability == pytest.approx(wanted, abs=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize("values", [[0.0, 0.0], [100.0, 0.0]])
def test_a_config_that_counted_nothing_neither_wins_nor_spoils_the_rest(
    values: list[float],
) -> None:
    """Goodput is zero where every request breaks its limit of 50 ms."""
    of_goal = Goal("goodput_tps", True, {}, 0.02)
    limits: Goal = dataclasses.replace(of_goal, limits={"default": {"e2el_p50_ms": 1e6}})
    nothing = [measurement([1.0] * 10, num_failed=0 if v else 10) for v in values]
    good = finalist(2, *[at(100)] * 2)
    step = race_step([finalist(4, *nothing), good], limits, PLENTY)
    assert (step.leader, step.is_decided) == (good.config.digest, True)


# --- where launches go ---


def test_launches_go_where_they_decide_most() -> None:
    """Chen et al. (2000): shares of the challengers as 1 / gap^2, of the leader the root of their squares.

    No launch is left over for one that has more than its share, so counts are within two of the formula.
    """
    logs = {2: 0.0, 4: -0.03, 6: -0.06}
    inverse = {k: 1 / logs[k] ** 2 for k in (4, 6)}
    inverse[2] = math.sqrt(inverse[4] ** 2 + inverse[6] ** 2)
    # Spread enough to stay undecided: each config's launches lie 8 % above and below its mean.
    done: dict[int, list[Measurement]] = {k: [] for k in logs}
    for number in range(6):
        for k in logs:
            sign = 1 if number % 2 else -1
            done[k].append(at(100 * math.exp(logs[k] + 0.08 * sign), float(number)))
    for number in range(6, 60, 2):
        finalists = [finalist(k, *done[k]) for k in logs]
        step = race_step(finalists, goal(0.001), PLENTY)
        k = next_k(step, finalists)
        assert k is not None
        for sign in (1, -1):  # in pairs, so that means stay what they are
            done[k].append(at(100 * math.exp(logs[k] + 0.08 * sign), float(number)))
    total = sum(len(of) for of in done.values())
    whole = sum(inverse.values())
    for k in (2, 4):
        assert len(done[k]) == pytest.approx(total * inverse[k] / whole, abs=4)
    assert len(done[6]) == pytest.approx(max(6, total * inverse[6] / whole), abs=4)


def test_none_is_launched_twice_in_a_row_while_another_one_is_wanted() -> None:
    """Two that are equal: both are always wanted."""
    rng = np.random.default_rng(1)
    done: dict[int, list[Measurement]] = {k: [] for k in (2, 4)}
    order: list[int] = []
    for number in range(20):
        finalists = [finalist(k, *of) for k, of in done.items()]
        k = next_k(race_step(finalists, goal(0.0001), PLENTY), finalists)
        assert k is not None
        done[k].append(at(100 * math.exp(0.02 * rng.standard_normal()), float(number)))
        order.append(k)
    # The second round begins with the last of the first one.
    assert sum(a == b for a, b in zip(order[4:], order[5:], strict=False)) <= 1
    assert max(Counter(order).values()) <= 11


def test_a_race_goes_on_where_it_was() -> None:
    noisy = [finalist(2, at(100), at(110)), finalist(4, at(102), at(112))]
    assert race_step(noisy, goal(), PLENTY) == race_step(noisy, goal(), PLENTY)


def test_races_are_seldom_ended_on_a_wrong_leader() -> None:
    """25 races of six finalists: 5 % wrong are 1.25, and twice the standard error of 1.1 more."""
    truth = {k: 100 * (1 - gap) for k, gap in zip(
        (3, 0, 4, 2, 6, 8), (0, 0.02, 0.02, 0.06, 0.08, 0.10), strict=True
    )}  # fmt: skip
    wrong = launches = 0
    for seed in range(25):
        step, order, finalists = raced(truth, goal(0.01), 0.018, seed, 30)
        wrong += step.is_decided and leader_k(step, finalists) != 3
        launches += len(order)
    assert wrong <= 3
    assert 12 <= launches / 25 <= 30
