"""A class's conversations, divided among the purposes that must not share any of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from autotune.errors import InputError, invalid
from autotune.traffic.classes import PromptSource, TrafficClass, Turns
from autotune.traffic.fitting import random_words
from autotune.traffic.prompts import Conversation, Turn, load_conversations, prompt_of
from autotune.traffic.schedule import PromptRealism
from autotune.traffic.tokens import TokenCounter

MAX_RANDOM_PROMPTS = 1000
MAX_RANDOM_TOKENS = 1_000_000


class Part(StrEnum):
    """What a schedule is for."""

    SEARCH = "search"
    HOLDOUT = "holdout"
    """Prompts that the search never saw: a gain that holds on them was not found by luck."""


@dataclass(frozen=True)
class Pool:
    """Shuffled conversations: for the warm-up, for the search, held out.

    The parts are disjoint. A prompt seen in the warm-up would be answered from the prefix cache in
    the measurement; one seen in the search would flatter what the search chose.
    """

    source: PromptSource
    warmup: tuple[Conversation, ...]
    search: tuple[Conversation, ...]
    holdout: tuple[Conversation, ...]
    realism: PromptRealism
    notes: tuple[str, ...] = ()

    def of(self, part: Part) -> tuple[Conversation, ...]:
        """Return what is measured; where nothing is held out, both parts are the same."""
        return self.holdout if part is Part.HOLDOUT and self.holdout else self.search

    @classmethod
    def load(
        cls,
        source: PromptSource,
        turns: Turns | None,
        folder: Path,
        rng: random.Random,
        counter: TokenCounter,
    ) -> Self:
        """Read a source and shuffle it.

        Raises:
            InputError: it cannot be read, or has too few distinct prompts.
        """
        if source.random is not None:
            conversations = _random_conversations(source.random.tokens, rng, counter)
            return cls._divided(conversations, source, PromptRealism.RANDOM, ())
        read = load_conversations(source, folder, turns)
        conversations = list(read.conversations)
        rng.shuffle(conversations)
        realism = PromptRealism.PROXY if source.builtin else PromptRealism.USER
        return cls._divided(conversations, source, realism, read.notes)

    @classmethod
    def _divided(
        cls,
        conversations: Sequence[Conversation],
        source: PromptSource,
        realism: PromptRealism,
        notes: tuple[str, ...],
    ) -> Self:
        needed = 3 if source.holdout else 2
        if len(conversations) < needed:
            held = ", one of them held out" if source.holdout else ""
            raise invalid(
                f"a class must have at least {needed} distinct prompts, "
                f"one of them for the warm-up{held}",
                where=_name_of(source),
                got=len(conversations),
                next_step="Add prompts; 100 or more a class make acceptance what your users see.",
            )
        num_warmup = max(1, len(conversations) // 5)
        measured = tuple(conversations[num_warmup:])
        num_held = 0
        if source.holdout:
            num_held = min(len(measured) - 1, max(1, round(source.holdout * len(measured))))
        return cls(
            source=source,
            warmup=tuple(conversations[:num_warmup]),
            search=measured[: len(measured) - num_held],
            holdout=measured[len(measured) - num_held :] if num_held else (),
            realism=realism,
            notes=notes,
        )


def load_pools(
    classes: Sequence[TrafficClass], folder: Path, rng: random.Random, counter: TokenCounter
) -> dict[str, Pool]:
    """Load the pool of every class that has prompts, by the class's name.

    Classes that share a source share its pool. Where sources overlap, a conversation that is in
    the warm-up of one is measured in none, and one that is held out in one is searched in none.

    Raises:
        InputError: a source cannot be used.
    """
    by_source: dict[str, Pool] = {}
    for c in reversed(classes):
        if c.prompts is not None and _source_key(c) not in by_source:
            pool = Pool.load(c.prompts, c.turns, folder, rng, counter)
            by_source[_source_key(c)] = pool
    disjoint = _without_overlaps(by_source)
    return {c.name: disjoint[_source_key(c)] for c in classes if c.prompts is not None}


def _source_key(c: TrafficClass) -> str:
    return c.model_dump_json(include={"prompts", "turns"})


def _without_overlaps(pools: Mapping[str, Pool]) -> dict[str, Pool]:
    warm = {c.content_id for pool in pools.values() for c in pool.warmup}
    held = {c.content_id for pool in pools.values() for c in pool.holdout}
    return {
        key: replace(
            pool,
            search=_without(pool.search, warm | held, pool),
            holdout=_without(pool.holdout, warm, pool) if pool.holdout else (),
        )
        for key, pool in pools.items()
    }


def _without(
    conversations: Iterable[Conversation], taken: set[str], pool: Pool
) -> tuple[Conversation, ...]:
    left = tuple(c for c in conversations if c.content_id not in taken)
    if not left:
        raise _nothing_left(pool)
    return left


def _nothing_left(pool: Pool) -> InputError:
    return invalid(
        "a class must have prompts of its own, but all that could be measured are in the warm-up "
        "or held out for another class",
        where=_name_of(pool.source),
        next_step="Add prompts, or give both classes the same `prompts`.",
    )


def _random_conversations(
    num_tokens: int, rng: random.Random, counter: TokenCounter
) -> list[Conversation]:
    count = max(10, min(MAX_RANDOM_PROMPTS, MAX_RANDOM_TOKENS // num_tokens))
    texts = dict.fromkeys(random_words(num_tokens, counter, rng) for _ in range(count))
    return [Conversation((Turn(prompt_of([("user", text)])),)) for text in texts]


def _name_of(source: PromptSource) -> str:
    return str(source.file or source.builtin or "random prompts")
