"""One run of one method: what it would have recommended at any time, and what that was worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WITHIN_RATIO = 0.02
"""Regret up to which a recommendation counts as right."""
HOURS = (0.5, 1.0, 2.0, 3.0)


@dataclass
class Run:
    """A finished run, judged by the truth."""

    scenario: str
    method: str
    seed: int
    steps: list[tuple[float, float]] = field(default_factory=list)
    """(hour, true regret from then on), in order; infinite where nothing feasible is recommended. A
    method that stops by itself stands by its last word."""
    has_recommendation: bool = False
    num_launches: int = 0
    num_crashed: int = 0
    cpu_s_per_proposal: float = 0.0
    ended_h: float = 0.0

    def regret_at(self, hour: float) -> float:
        """Return the regret of what is recommended at `hour`; infinite before the first word."""
        past = [regret for at, regret in self.steps if at <= hour]
        return past[-1] if past else math.inf

    def is_within(self, hour: float) -> bool:
        return self.regret_at(hour) <= WITHIN_RATIO

    def stays_from_h(self, end_h: float = HOURS[-1]) -> float:
        """Return from which hour on the recommendation is right until `end_h`; infinite for never."""
        since = math.inf
        for at, regret in self.steps:
            if at > end_h:
                break
            if regret > WITHIN_RATIO:
                since = math.inf
            elif since == math.inf:
                since = at
        return since

    @property
    def is_infeasible(self) -> bool:
        """Whether the last recommendation cannot serve or breaks a limit; saying nothing is not."""
        return self.has_recommendation and math.isinf(self.regret_at(HOURS[-1]))


def median(values: Sequence[float]) -> float:
    """Return the middle value; infinite where it lies beside a run that never got there."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return (low + high) / 2
