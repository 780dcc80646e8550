"""Shares and their uncertainty: one share, two shares, and two shares of the same questions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.measure.proportions import wilson

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Share:
    """`count` of `total`, with its Wilson score interval (95 %)."""

    count: int
    total: int

    @property
    def ratio(self) -> float:
        return self.count / self.total if self.total else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.ratio, self.total, CONFIDENCE) if self.total else (0.0, 1.0)


def difference_interval(a: Share, b: Share) -> tuple[float, float]:
    """Interval of a's share minus b's, unpaired (Newcombe 1998, method 10: from Wilson's bounds)."""
    (a_low, a_high), (b_low, b_high) = a.interval, b.interval
    difference = a.ratio - b.ratio
    low = difference - math.hypot(a.ratio - a_low, b_high - b.ratio)
    high = difference + math.hypot(a_high - a.ratio, b.ratio - b_low)
    return low, high


def mcnemar_exact(num_only_a: int, num_only_b: int) -> float:
    """Two-sided p-value of McNemar's test for paired yes/no outcomes, by the binomial itself.

    Only the questions on which the two disagree say anything. If neither is better, each of these
    falls to either side with probability 1/2; the p-value is the chance of a split at least as
    uneven as the one seen.

    Args:
        num_only_a: questions that only a solved.
        num_only_b: questions that only b solved.
    """
    total = num_only_a + num_only_b
    fewer = min(num_only_a, num_only_b)
    tail = sum(math.comb(total, i) for i in range(fewer + 1))
    return min(1.0, (2 * tail) / (1 << total))
