"""How far a quantised model's next-token distributions are from the original's.

Both models read the same text, the original's own answers, and the distributions are compared at
every position. That sees a shift of probabilities long before answers or perplexity show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.measure.quality.endpoint import ScoredToken

SMALLEST_PROBABILITY = 1e-9
"""What is taken for the probability of a rest that came out as 0 by rounding."""


@dataclass(frozen=True)
class DistributionFigures:
    """Distance of one model from another over the positions of a text."""

    num_positions: int
    mean_kl_nats: float
    """Mean of the lower bounds of KL(original || quantised)."""
    p99_kl_nats: float
    num_agreeing: int
    """Positions where both have the same best token (of exact ties: one in common)."""
    mean_rest_ratio: float
    """The original's probability that lies outside of the tokens known of both: what the bound
    sees as one lump."""

    @property
    def agreement_ratio(self) -> float:
        return self.num_agreeing / self.num_positions if self.num_positions else float("nan")


def compare_distributions(
    original: Iterable[Sequence[ScoredToken]], quantised: Iterable[Sequence[ScoredToken]]
) -> DistributionFigures:
    """Compare two models' scores of the same sequences, position by position.

    Raises:
        ValueError: the scores are not of the same tokens.
    """
    pairs = [
        (a, b)
        for left, right in zip(original, quantised, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    if any(a.token_id != b.token_id for a, b in pairs):
        raise ValueError("both models must have scored the same tokens")
    found = [kl_lower_bound(a, b) for a, b in pairs]
    bounds, rests = np.array([kl for kl, _ in found]), [rest for _, rest in found]
    return DistributionFigures(
        num_positions=len(pairs),
        mean_kl_nats=float(bounds.mean()) if pairs else 0.0,
        p99_kl_nats=float(np.percentile(bounds, 99)) if pairs else 0.0,
        num_agreeing=sum(bool(_best(a) & _best(b)) for a, b in pairs),
        mean_rest_ratio=float(np.mean(rests)) if pairs else 0.0,
    )


def kl_lower_bound(original: ScoredToken, quantised: ScoredToken) -> tuple[float, float]:
    """Bound KL(original || quantised) from below, by the tokens that both name and one rest.

    Putting outcomes together never raises a Kullback-Leibler divergence (the log sum inequality,
    Cover and Thomas 2006, theorem 2.7.1), so all tokens not known of both sides may be one lump.

    Returns:
        The bound in nats, and the original's probability in the lump.
    """
    p, q = _probabilities(original), _probabilities(quantised)
    known = p.keys() & q.keys()
    rest_p = max(0.0, 1 - sum(p[token] for token in known))
    rest_q = max(SMALLEST_PROBABILITY, 1 - sum(q[token] for token in known))
    kl = sum(_term(p[token], q[token]) for token in known) + _term(rest_p, rest_q)
    return max(0.0, kl), rest_p


def _probabilities(token: ScoredToken) -> dict[int, float]:
    """Return what is known of a position: its best tokens and the given one."""
    logprobs = {**dict(token.top), token.token_id: token.logprob}
    return {token_id: math.exp(logprob) for token_id, logprob in logprobs.items()}


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, SMALLEST_PROBABILITY)) if p > 0 else 0.0


def _best(token: ScoredToken) -> set[int]:
    return {token_id for token_id, logprob in token.top if logprob == token.top[0][1]}
