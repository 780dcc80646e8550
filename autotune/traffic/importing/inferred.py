"""What was inferred from a log, always with the number of rows that it was inferred from."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SAMPLE_SIZE = 100_000
"""Values kept for quantiles. The standard error of a p99 from them is 0.03 percentage points of rank."""

MAX_DISTINCT_VALUES = 1000


@dataclass(frozen=True)
class Inferred(Generic[T]):
    """A value and what it rests on."""

    value: T
    num_rows: int


@dataclass(frozen=True)
class Quantiles:
    """Quantiles by nearest rank: each is a value that occurred."""

    p50: int
    p90: int
    p95: int
    p99: int
    max: int
    num_sampled: int
    """Values that the quantiles are of; the maximum is of all."""


@dataclass(frozen=True)
class MostCommon:
    """The value that occurs most often."""

    value: float
    share: float
    """Of the rows that have a value."""


class Reservoir:
    """A uniform sample of a stream of any length (Vitter's algorithm R), the same for the same stream."""

    def __init__(self, seed: int, size: int = SAMPLE_SIZE) -> None:
        self._rng = random.Random(seed)
        self._size = size
        self._sample = array("q")
        self.num_seen = 0
        self.max = 0

    def add(self, value: int) -> None:
        """Take the next value, a whole number of at most 63 bits."""
        self.num_seen += 1
        self.max = max(self.max, value)
        if len(self._sample) < self._size:
            self._sample.append(value)
            return
        place = int(self._rng.random() * self.num_seen)
        if place < self._size:
            self._sample[place] = value

    def quantiles(self) -> Inferred[Quantiles] | None:
        """Return the quantiles, None if nothing was added."""
        if not self.num_seen:
            return None
        ordered = sorted(self._sample)
        p50, p90, p95, p99 = (_nearest_rank(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
        return Inferred(Quantiles(p50, p90, p95, p99, self.max, len(ordered)), self.num_seen)


class ValueCounter:
    """Counts how often each value occurs, of the first `MAX_DISTINCT_VALUES` different ones."""

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._num_seen = 0

    def add(self, value: float) -> None:
        self._num_seen += 1
        if value in self._counts or len(self._counts) < MAX_DISTINCT_VALUES:
            self._counts[value] = self._counts.get(value, 0) + 1

    def most_common(self) -> Inferred[MostCommon] | None:
        """Return the most common value, the first of several; None if nothing was added."""
        if not self._counts:
            return None
        value = max(self._counts, key=lambda known: self._counts[known])
        return Inferred(MostCommon(value, self._counts[value] / self._num_seen), self._num_seen)


def _nearest_rank(ordered: Sequence[int], quantile: float) -> int:
    """The smallest value that at least this share of all values does not exceed."""
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]
