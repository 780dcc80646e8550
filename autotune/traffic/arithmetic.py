"""What a profile's numbers imply before anything runs: how many of each class, is a limit knowable?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_PERCENTILE_KEY = re.compile(r"_p(\d+)_")


def counts_by_weight(weights: Sequence[float], count: int) -> list[int]:
    """Spread `count` requests over classes, with numbers as even as they can be.

    Largest remainders instead of independent draws: a short measurement then holds the profile's
    mixture and not a lucky one.
    """
    total = sum(weights)
    shares = [count * weight / total for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def min_requests_for(percentile: float, confidence: float = CONFIDENCE) -> int:
    """Return how many requests a statement about a percentile needs at least.

    The largest of n independent values lies above the percentile q with probability 1 - q^n; from
    fewer values than the returned n not even the largest is an upper bound at that confidence
    (order statistics; David and Nagaraja 2003, section 7.1): 59 for p95, 299 for p99.

    Args:
        percentile: 0 to 100, both excluded.
        confidence: 0 to 1, both excluded.
    """
    return math.ceil(math.log(1 - confidence) / math.log(percentile / 100) - 1e-9)


@dataclass(frozen=True)
class Pace:
    """How fast the requests of one class arrive, in open loop."""

    share: float
    """Of the class, 0 to 1."""
    rps: float
    """Of all classes."""
    num_requests: int
    """Of all classes in one measurement."""


def thin_limits(
    slo: Mapping[str, float], class_name: str, num_requests: int, pace: Pace | None
) -> list[str]:
    """Name the limits of one class that a measurement is too short to judge.

    Args:
        slo: limits such as ``{"ttft_p95_ms": 500.0}``.
        class_name: for the message.
        num_requests: requests of this class in one measurement.
        pace: of the class; None where the server's pace decides, or a trace's.
    """
    found = []
    for key in slo:
        percentile = _PERCENTILE_KEY.search(key)
        if percentile is None:
            continue
        needed = min_requests_for(float(percentile[1]))
        if num_requests >= needed:
            continue
        message = (
            f"{key}: a p{percentile[1]} limit needs at least {needed} requests of class "
            f"{class_name!r}"
        )
        if pace is None:
            message += f", one measurement has {num_requests}"
        else:
            message += (
                f"; at {pace.share:.2g} x {pace.rps:g} rps that takes "
                f"{needed / (pace.share * pace.rps):.0f} s, "
                f"the window is {pace.num_requests / pace.rps:.0f} s"
            )
        found.append(message)
    return found
