"""How requests arrive: rate, burstiness, the clock's resolution, and whether the rate itself moves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_OUT_OF_ORDER = 4096
"""Logs are often written when a request ends; this many may stand before an earlier one."""

COARSE_TIED_RATIO = 0.05
"""From this share of equal times on, the clock is taken to be coarse. Below it ties are chance, and the
smallest gap says nothing of the clock: where requests come exactly once a second, it is that second."""

_MAX_BINS = 128
_FIRST_BIN_S = 1e-3
_MIN_MEAN_COUNT = 10
_MIN_BINS = 8
_MIN_TICKS_PER_COUNT = 20
_SIGNIFICANT_DISPERSION = 3.0


@dataclass(frozen=True)
class Arrivals:
    """What the times of a log say, all in the log's own seconds."""

    num_times: int
    num_out_of_order: int
    """Times that stood too late in the file to be put in order; left out of the gaps."""
    start_s: float
    span_s: float
    """From the first to the last."""
    rate_rps: float
    gap_cv: float
    """Coefficient of variation of the gaps between arrivals, as recorded."""
    true_gap_cv: float
    """The same, freed of the clock's resolution; see `ArrivalRecorder`."""
    resolution_s: float
    """Smallest gap between different times."""
    tied_ratio: float
    """Share of the gaps that are 0."""
    rate_swing: float | None
    """Standard deviation of the rate over time, as a share of the rate, beyond what single gaps explain;
    None where there are too few arrivals to tell."""
    counts: tuple[int, ...]
    """Arrivals in stretches of time of equal length, from `start_s` on."""
    count_s: float
    """Length of one stretch."""

    @property
    def is_clock_coarse(self) -> bool:
        """Whether `resolution_s` is the tick of a clock that puts many arrivals onto one time."""
        return self.tied_ratio >= COARSE_TIED_RATIO

    @property
    def num_gaps(self) -> int:
        return self.num_times - self.num_out_of_order - 1

    @property
    def gamma_shape(self) -> float:
        """Shape of a gamma distribution of the gaps: 1 / CV^2; infinite where all are equal."""
        return math.inf if self.true_gap_cv == 0 else 1 / self.true_gap_cv**2


class ArrivalRecorder:
    """Takes the times of a log in one pass and constant memory.

    A clock with coarse ticks puts arrivals that were apart onto one time, which makes any log look
    bursty: of a Poisson process at 5 requests/s, whole seconds leave gaps with a CV of 2. So
    each group of k arrivals at one time is taken as k arrivals spread at random over its tick, and the
    expected square of every gap follows from the spacings of uniform order statistics (David and
    Nagaraja 2003, section 2.2): with a = 1/(k+1) and b = 2/((k+1)(k+2)), a spacing inside a tick g
    has the square g²b, and the gap from one group to the next, whose ticks begin d apart, has

        (d - g)² + 2 (d - g) g (a + a') + g² (b + b' + 2 a a').

    The tick is known only at the end, so the sums are kept by powers of it.
    """

    def __init__(self) -> None:
        self._waiting: list[float] = []
        self._num_times = 0
        self._num_late = 0
        self._first_s = 0.0
        self._group_s = 0.0
        self._group_size = 0
        self._previous: tuple[float, float, float] | None = None  # start, a, b of the group before
        self._first_a = 0.0
        self._num_ties = 0
        self._resolution_s = math.inf
        self._num_between = 0
        self._sums = dict.fromkeys(("dd", "d", "da", "a", "b", "inner_b"), 0.0)
        self._bins = _Bins()

    def add(self, time_s: float) -> None:
        """Take the next time in file order."""
        self._num_times += 1
        if len(self._waiting) < MAX_OUT_OF_ORDER:
            heapq.heappush(self._waiting, time_s)
        else:
            self._take(heapq.heappushpop(self._waiting, time_s))

    def result(self) -> Arrivals | None:
        """Return what the times say; None if there are fewer than two, or all are one. Ends the pass."""
        while self._waiting:
            self._take(heapq.heappop(self._waiting))
        self._end_group()
        span_s = self._group_s - self._first_s
        num_gaps = self._num_times - self._num_late - 1
        if num_gaps < 1 or span_s <= 0:
            return None
        mean_s = span_s / num_gaps
        counts, count_s = self._bins.counts()
        gap_cv = _cv(self._sums["dd"] / num_gaps, mean_s)
        tied_ratio = self._num_ties / num_gaps
        is_coarse = tied_ratio >= COARSE_TIED_RATIO
        true_cv = self._true_cv(num_gaps, span_s) if is_coarse else gap_cv
        tick_s = self._resolution_s if is_coarse else 0.0
        return Arrivals(
            num_times=self._num_times,
            num_out_of_order=self._num_late,
            start_s=self._first_s,
            span_s=span_s,
            rate_rps=1 / mean_s,
            gap_cv=gap_cv,
            true_gap_cv=true_cv,
            resolution_s=self._resolution_s,
            tied_ratio=tied_ratio,
            rate_swing=_swing(_merged(counts[:-1], count_s, tick_s), true_cv),
            counts=tuple(counts),
            count_s=count_s,
        )

    def _take(self, time_s: float) -> None:
        """Take the next time in order of time; one from before the last is too late."""
        if self._group_size == 0:
            self._first_s = self._group_s = time_s
        elif time_s < self._group_s:
            self._num_late += 1
            return
        elif time_s > self._group_s:
            self._end_group()
            self._group_s, self._group_size = time_s, 0
        else:
            self._num_ties += 1
        self._group_size += 1
        self._bins.add(time_s - self._first_s)

    def _end_group(self) -> None:
        size = self._group_size
        if size == 0:
            return
        a, b = 1 / (size + 1), 2 / ((size + 1) * (size + 2))
        self._sums["inner_b"] += (size - 1) * b
        if self._previous is None:
            self._first_a = a
        else:
            start_s, a0, b0 = self._previous
            d = self._group_s - start_s
            self._resolution_s = min(self._resolution_s, d)
            self._num_between += 1
            self._sums["dd"] += d * d
            self._sums["d"] += d
            self._sums["da"] += d * (a0 + a)
            self._sums["a"] += a0 + a
            self._sums["b"] += b0 + b + 2 * a0 * a
        self._previous = (self._group_s, a, b)

    def _true_cv(self, num_gaps: int, span_s: float) -> float:
        g, sums = self._resolution_s, self._sums
        last_a = self._previous[1] if self._previous is not None else 0.0
        squares = (
            sums["dd"] - 2 * g * sums["d"] + g * g * self._num_between
            + 2 * g * sums["da"] - 2 * g * g * sums["a"]
            + g * g * (sums["b"] + sums["inner_b"])
        )  # fmt: skip
        mean_s = (span_s + g * (1 - self._first_a - last_a)) / num_gaps
        return _cv(squares / num_gaps, mean_s)


class _Bins:
    """Counts over equal stretches of time, which double whenever they would become too many."""

    def __init__(self) -> None:
        self._counts = [0] * _MAX_BINS
        self._width_s = _FIRST_BIN_S
        self._last = 0

    def add(self, since_start_s: float) -> None:
        while since_start_s >= _MAX_BINS * self._width_s:
            pairs = zip(self._counts[::2], self._counts[1::2], strict=True)
            self._counts = [x + y for x, y in pairs] + [0] * (_MAX_BINS // 2)
            self._width_s *= 2
        self._last = int(since_start_s / self._width_s)
        self._counts[self._last] += 1

    def counts(self) -> tuple[list[int], float]:
        return self._counts[: self._last + 1], self._width_s


def _merged(counts: Sequence[int], count_s: float, tick_s: float) -> Sequence[int]:
    """Merge counts of neighbours until each has arrivals enough, and ticks of a coarse clock enough.

    A stretch of few ticks has one more or less than the next, which is no change of the rate.
    """
    while counts and (
        sum(counts) < _MIN_MEAN_COUNT * len(counts) or count_s < _MIN_TICKS_PER_COUNT * tick_s
    ):
        counts = [x + y for x, y in zip(counts[::2], counts[1::2], strict=False)]
        count_s *= 2
    return counts


def _swing(counts: Sequence[int], cv: float) -> float | None:
    """How much the rate moves over time.

    Counts of a renewal process in long stretches have a variance of CV^2 times their mean (Cox 1962,
    "Renewal Theory", section 3.3); what goes beyond it comes from a rate that changes.
    """
    if len(counts) < _MIN_BINS:
        return None
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    expected = cv**2 * mean
    if variance < _SIGNIFICANT_DISPERSION * expected:
        return 0.0
    return math.sqrt(variance - expected) / mean


def _cv(mean_square: float, mean: float) -> float:
    return math.sqrt(max(0.0, mean_square - mean**2)) / mean
