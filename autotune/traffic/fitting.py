"""Real text of a wanted length, for logs that hold lengths but no text.

Random tokens would do for the length, but what a drafter gets accepted depends on what is said, so
the text is taken from a class's own prompts: other prompts as context before the one that is asked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache

from autotune.traffic.tokens import TokenCounter

MAX_RECOUNTED_TOKENS = 4096
"""A whole has not quite as many tokens as its parts. Up to this length it is counted again and made
right; above, the difference is far below a per cent, and counting takes long."""

_MAX_TRIES = 4
"""A second try is nearly always right."""


def behind_context(
    question: str, num_tokens: int, counter: TokenCounter, context: Callable[[int], str]
) -> str:
    """Return `question` behind a context, or its beginning, `num_tokens` long in all.

    Args:
        question: what the model is to answer.
        num_tokens: wanted length.
        counter: measures tokens.
        context: makes a text of so many tokens.
    """
    alone = counter.cut(question, num_tokens)
    room = num_tokens - counter.count(question)
    tries = [(abs(room), False, alone)]
    while room > 0 and len(tries) <= _MAX_TRIES:
        text = f"{context(room)}\n\n{question}"
        if num_tokens > MAX_RECOUNTED_TOKENS:
            return text
        excess = counter.count(text) - num_tokens
        if excess == 0:
            return text
        tries.append((abs(excess), excess > 0, text))
        room -= excess
    return min(tries)[2]  # what comes nearest, rather too short than too long


class TextFitter:
    """Makes texts of given lengths out of a set of documents."""

    def __init__(self, documents: Sequence[str], counter: TokenCounter, seed: str) -> None:
        """Take the documents.

        Args:
            documents: at least one, not empty.
            counter: measures tokens.
            seed: decides which documents follow each other.
        """
        self._documents = list(documents)
        random.Random(seed).shuffle(self._documents)
        self._counter = counter
        self._lengths = [max(1, counter.count(document)) for document in self._documents]
        self._seed = seed

    def around(self, question: str, num_tokens: int, key: str) -> str:
        """Return `question` with context before it, or its beginning, `num_tokens` long.

        Args:
            question: what the model is to answer.
            num_tokens: wanted length.
            key: see `passage`.
        """
        return behind_context(
            question, num_tokens, self._counter, lambda room: self.passage(room, key)
        )

    def passage(self, num_tokens: int, key: str) -> str:
        """Return running text of this length.

        Args:
            num_tokens: wanted length.
            key: equal keys begin alike at every length; different ones differ from the first word
                on, or a server with a prefix cache would answer one from another.
        """
        first = random.Random(f"{self._seed} {key}").randrange(len(self._documents))
        places = itertools.count(first)
        text = f"({key})"
        while (missing := num_tokens - self._counter.count(text)) > 0:
            parts = [text]
            while missing > 0:
                number = next(places) % len(self._documents)
                is_last = self._lengths[number] > missing
                document = self._documents[number]
                parts.append(self._counter.cut(document, missing) if is_last else document)
                missing -= self._lengths[number]
            text = "\n\n".join(parts)
            if num_tokens > MAX_RECOUNTED_TOKENS:
                return text
        return self._counter.cut(text, num_tokens)


def random_words(num_tokens: int, counter: TokenCounter, rng: random.Random) -> str:
    """Return meaningless words of this length."""
    return counter.cut(" ".join(rng.choices(_made_up_words(), k=num_tokens)), num_tokens)


@cache
def _made_up_words() -> list[str]:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(5000)]
