"""When a search goes on: every rule by a history in which it alone decides."""

from __future__ import annotations

import pytest

from autotune.search.decision import Goal
from autotune.search.proposer import MAX_WITHOUT_GAIN
from autotune.search.worth import PHYSICS_FREE, Tried, is_worth_more

GOAL = Goal("output_throughput_tps", is_maximized=True, limits={}, margin_ratio=0.02)
LOWER = Goal("e2el_mean_ms", is_maximized=False, limits={}, margin_ratio=0.02)
ANCHOR = Tried(100.0, None)
FREE = Tried(90.0, PHYSICS_FREE)
MODEL = Tried(90.0, "cost model")


def test_it_goes_on_until_a_config_keeps_every_limit() -> None:
    infeasible = [Tried(None, None), *[Tried(None, PHYSICS_FREE)] * 30]
    assert is_worth_more(infeasible, 0.0, GOAL)


def test_it_goes_on_while_a_model_expects_a_quarter_of_the_margin() -> None:
    looked = [ANCHOR, FREE, FREE]
    assert is_worth_more(looked, 0.0051, GOAL)
    assert not is_worth_more(looked, 0.0049, GOAL)


@pytest.mark.parametrize(("num_free", "goes_on"), [(0, True), (1, True), (2, False)])
def test_a_model_alone_is_not_believed_that_nothing_is_left(num_free: int, goes_on: bool) -> None:
    history = [ANCHOR, MODEL, MODEL, *[FREE] * num_free]
    assert is_worth_more(history, 0.0, GOAL) is goes_on


def test_an_improvement_starts_the_count_anew() -> None:
    # 101 beats 100 by 1 %, which is more than a quarter of 2 %; 100.4 does not.
    assert is_worth_more([ANCHOR, FREE, FREE, Tried(101.0, "cost model")], 0.0, GOAL)
    assert not is_worth_more([ANCHOR, FREE, FREE, Tried(100.4, "cost model")], 0.0, GOAL)


def test_for_a_latency_lower_is_better() -> None:
    slow = Tried(110.0, PHYSICS_FREE)
    assert is_worth_more([ANCHOR, slow, slow, Tried(99.0, "cost model")], 0.0, LOWER)
    assert not is_worth_more([ANCHOR, slow, slow, Tried(101.0, "cost model")], 0.0, LOWER)


def test_a_long_row_without_gain_ends_it_whatever_is_hoped_for() -> None:
    row = [ANCHOR, *[MODEL] * (MAX_WITHOUT_GAIN - 1)]
    assert is_worth_more(row, 1.0, GOAL)
    assert not is_worth_more([*row, MODEL], 1.0, GOAL)


def test_failed_trials_count_as_looking() -> None:
    assert not is_worth_more(
        [ANCHOR, Tried(None, PHYSICS_FREE), Tried(None, PHYSICS_FREE)], 0.0, GOAL
    )
