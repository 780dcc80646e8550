"""In which order the classes of a profile take turns."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autotune.traffic.arithmetic import counts_by_weight
from autotune.traffic.classes import TrafficClass


def class_sequence(
    classes: Sequence[TrafficClass], count: int, rng: random.Random
) -> list[TrafficClass]:
    """Spread `count` requests over the classes by weight, in random order."""
    counts = counts_by_weight([c.weight for c in classes], count)
    sequence = [c for c, n in zip(classes, counts, strict=True) for _ in range(n)]
    rng.shuffle(sequence)
    return sequence
