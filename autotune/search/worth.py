"""When a search has found what there is to find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.search.decision import Goal
from autotune.search.proposer import MAX_WITHOUT_GAIN, MIN_FAILED_FREE, STOP_RATIO

PHYSICS_FREE = "physics-free"


@dataclass(frozen=True)
class Tried:
    """What became of one trial."""

    value: float | None
    """The objective; None where the trial failed, broke a limit or was stopped."""
    proposed_by: str | None
    """Name of the model; None for an anchor."""


def is_worth_more(history: Sequence[Tried], expected_gain_ratio: float, goal: Goal) -> bool:
    """Say whether one more launch may be expected to pay.

    The search ends when no model expects an improvement beyond a part of the practical margin *and* the
    physics-free proposals since the last improvement have brought nothing: a model is not believed
    that there is nothing to find before somebody else has looked. It ends in any case after a long row of
    proposals without any improvement, and never before a config that keeps every limit is known.

    Args:
        history: the trials that ended, in order.
        expected_gain_ratio: the largest expected improvement that any model sees; infinite where none
            believes of any config that it keeps every limit.
        goal: gives the margin.
    """
    best: float | None = None
    since: list[Tried] = []
    for tried in history:
        since.append(tried)
        if tried.value is not None and _is_better(tried.value, best, goal):
            best, since = tried.value, []
    if best is None or math.isinf(expected_gain_ratio):
        return True
    proposed = [tried for tried in since if tried.proposed_by is not None]
    if len(proposed) >= MAX_WITHOUT_GAIN:
        return False
    num_free = sum(tried.proposed_by == PHYSICS_FREE for tried in proposed)
    is_hopeful = expected_gain_ratio > STOP_RATIO * goal.margin_ratio
    return is_hopeful or num_free < MIN_FAILED_FREE


def _is_better(value: float, best: float | None, goal: Goal) -> bool:
    """Whether a value beats the best by more than what noise alone makes of equal configs."""
    if best is None:
        return True
    step = 1 + STOP_RATIO * goal.margin_ratio
    return value > best * step if goal.is_maximized else value * step < best
