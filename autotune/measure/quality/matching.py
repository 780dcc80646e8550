"""How far two servers' greedy answers agree, token by token.

Equal text is no criterion by itself: a batch of another size rounds otherwise, and where two tokens
are nearly tied the answers part for good. So this is read beside the same figure of the baseline
against itself (the A/A floor), and teacher forcing decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from autotune.measure.quality.endpoint import Answer
from autotune.measure.quality.shares import Share


@dataclass(frozen=True)
class MatchFigures:
    """Pairs of answers to the same prompts."""

    num_pairs: int
    num_exact: int
    """Pairs with the same tokens from first to last."""
    exact_low_ratio: float
    exact_high_ratio: float
    """95 % Wilson interval of the share of exact pairs."""
    median_matched_prefix_tokens: float
    """Tokens before the first divergence; the whole length where there is none."""

    @property
    def exact(self) -> Share:
        return Share(self.num_exact, self.num_pairs)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences differ, None where they are equal.

    A sequence that ends where the other goes on differs there.
    """
    pairs = zip_longest(a, b)  # fills with None, which is no token
    return next((i for i, (x, y) in enumerate(pairs) if x != y), None)


def match(left: Sequence[Answer], right: Sequence[Answer]) -> MatchFigures:
    """Compare answers in pairs; both sides are answers to the same prompts in the same order."""
    cuts = [first_divergence(a.token_ids, b.token_ids) for a, b in zip(left, right, strict=True)]
    num_exact = cuts.count(None)
    low, high = Share(num_exact, len(cuts)).interval
    lengths = [len(a.token_ids) if cut is None else cut for a, cut in zip(left, cuts, strict=True)]
    return MatchFigures(len(cuts), num_exact, low, high, float(median(lengths)) if cuts else 0.0)
