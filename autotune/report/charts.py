"""Small charts made of characters, for terminals and pipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEVELS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def columns(values: Sequence[float], height: int) -> list[str]:
    """Draw one column for each value, as lines from the top down.

    Args:
        values: not negative; the largest fills the height, and what is above 0 is never invisible.
        height: lines.
    """
    largest = max(values, default=0.0) or 1.0
    eighths = [max(round(value / largest * height * 8), 1) if value > 0 else 0 for value in values]
    return [
        "".join(_LEVELS[min(max(filled - 8 * line, 0), 8)] for filled in eighths)
        for line in reversed(range(height))
    ]


def bar(share: float, width: int) -> str:
    """Draw a bar that fills a share (0 to 1) of `width` characters; above 0 it is never invisible."""
    eighths = max(round(share * width * 8), 1) if share > 0 else 0
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


@dataclass(frozen=True)
class Bin:
    """How many values lie in a range, both ends included."""

    low: int
    high: int
    count: int


def doubling_bins(values: Sequence[int]) -> list[Bin]:
    """Count values (1 or more) in ranges that double: 1, 2 to 3, 4 to 7, and so on.

    The first and last range that is returned has values.
    """
    if not values:
        return []
    powers = [max(value, 1).bit_length() - 1 for value in values]
    return [
        Bin(2**power, 2 ** (power + 1) - 1, powers.count(power))
        for power in range(min(powers), max(powers) + 1)
    ]


def rates(times_s: Sequence[float], duration_s: float, count: int) -> list[float]:
    """Return events per second in each of `count` equal parts of the time from 0 to `duration_s`."""
    numbers = [0] * count
    for time_s in times_s:
        numbers[min(int(time_s / duration_s * count), count - 1)] += 1
    return [number * count / duration_s for number in numbers]
