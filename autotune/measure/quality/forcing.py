"""Teacher forcing: is every token that a server emitted the one that the model would choose there?

Each token is judged after the tokens that really precede it, so one early difference does not make
everything after it wrong. Rounding leaves near-ties, a bug leaves tokens that the model would never
have chosen: the gap in log-probability tells the two apart, without bit-exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.measure.quality.endpoint import ScoredToken
from autotune.measure.quality.shares import Share

NUM_WORST = 5


@dataclass(frozen=True)
class WorstPosition:
    """Where an emitted token is far from the best one."""

    prompt: int
    """The prompt's number, from 0."""
    position: int
    """The token's place in the answer, from 0."""
    gap_nats: float


@dataclass(frozen=True)
class ForcedFigures:
    """What teacher forcing found in a set of answers."""

    num_positions: int
    num_best: int
    """Emitted tokens that are the best one, exact ties included."""
    num_near: int
    """Those that are the best one or at most `max_gap_nats` below it."""
    num_far: int
    """Those more than `max_single_gap_nats` below it: none may be."""
    largest_gap_nats: float
    max_gap_nats: float
    max_single_gap_nats: float
    min_ratio: float
    worst: tuple[WorstPosition, ...]
    """The worst of those that are not near, at most `NUM_WORST`."""

    @property
    def near(self) -> Share:
        return Share(self.num_near, self.num_positions)

    @property
    def is_good(self) -> bool:
        return self.num_far == 0 and self.num_near >= self.min_ratio * self.num_positions


def teacher_forced(
    answers: Sequence[tuple[int, Sequence[ScoredToken]]],
    max_gap_nats: float,
    max_single_gap_nats: float = 2.0,
    min_ratio: float = 0.995,
) -> ForcedFigures:
    """Sum up the gaps of emitted tokens.

    Args:
        answers: the prompt's number and the scored tokens of its answer, for each answer.
        max_gap_nats: up to which a token is a near-tie.
        max_single_gap_nats: above which a single token is a fault.
        min_ratio: share of tokens that must be the best or a near-tie.
    """
    found = [
        WorstPosition(prompt, position, token.gap_nats)
        for prompt, tokens in answers
        for position, token in enumerate(tokens)
    ]
    gaps = [at.gap_nats for at in found]
    not_near = sorted((at for at in found if at.gap_nats > max_gap_nats), key=_by_gap)
    return ForcedFigures(
        num_positions=len(gaps),
        num_best=sum(gap == 0 for gap in gaps),
        num_near=len(gaps) - len(not_near),
        num_far=sum(gap > max_single_gap_nats for gap in gaps),
        largest_gap_nats=max(gaps, default=0.0),
        max_gap_nats=max_gap_nats,
        max_single_gap_nats=max_single_gap_nats,
        min_ratio=min_ratio,
        worst=tuple(not_near[:NUM_WORST]),
    )


def _by_gap(at: WorstPosition) -> tuple[float, int, int]:
    return -at.gap_nats, at.prompt, at.position
