"""Gaps of emitted tokens, and what they add up to."""

from __future__ import annotations

import pytest

from autotune.measure.quality.endpoint import ScoredToken
from autotune.measure.quality.forcing import WorstPosition, teacher_forced


def token(gap_nats: float) -> ScoredToken:
    """An emitted token that much below the best one."""
    return ScoredToken(7, -1.0 - gap_nats, ((8 if gap_nats else 7, -1.0),))


def test_gap_is_against_the_best_token_not_the_rank() -> None:
    tied = ScoredToken(7, -0.9, ((3, -0.9), (7, -0.9)))
    assert tied.gap_nats == 0
    assert ScoredToken(7, -1.5, ((3, -0.5), (7, -1.5))).gap_nats == 1.0


def test_a_gap_right_on_the_limit_is_not_pushed_over_it_by_rounding() -> None:
    # 0.25 apart in bf16, 0.2500002 after a soft maximum in fp32.
    edge = ScoredToken(7, -18.6875002, ((8, -18.4375000), (7, -18.6875002)))
    assert teacher_forced([(0, [edge])], 0.25).num_near == 1


def test_every_kind_of_position_is_counted() -> None:
    figures = teacher_forced(
        [(0, [token(0), token(0.125)]), (3, [token(0.5), token(2.5), token(0)])], 0.25
    )
    assert figures.num_positions == 5
    assert figures.num_best == 2
    assert figures.num_near == 3  # 0, 0.125, 0
    assert figures.num_far == 1  # 2.5
    assert figures.largest_gap_nats == 2.5
    assert figures.worst == (WorstPosition(3, 1, 2.5), WorstPosition(3, 0, 0.5))
    assert not figures.is_good


@pytest.mark.parametrize(
    ("num_off", "gap_nats", "is_good"),
    [
        (0, 0.0, True),
        (5, 0.2, True),  # near-ties do not count
        (5, 1.0, True),  # 995 of 1000 are near: exactly 99.5 %
        (6, 1.0, False),  # 994 of 1000
        (1, 2.0, True),  # at most 2 nat
        (1, 2.001, False),  # a single token that far off is a fault, whatever the share
    ],
)
def test_the_two_limits(num_off: int, gap_nats: float, is_good: bool) -> None:
    tokens = [token(gap_nats)] * num_off + [token(0)] * (1000 - num_off)
    assert teacher_forced([(0, tokens)], 0.25).is_good is is_good


def test_only_the_worst_positions_are_listed() -> None:
    figures = teacher_forced([(1, [token(0.3 + i / 10) for i in range(8)])], 0.25)
    assert [at.position for at in figures.worst] == [7, 6, 5, 4, 3]


def test_no_answers_are_no_fault() -> None:
    assert teacher_forced([], 0.25).is_good
