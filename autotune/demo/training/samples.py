"""Read the target's answers and choose the draft vocabulary from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.demo.training.jsonl import numbered_objects
from autotune.errors import InputError, invalid

MIN_ANSWER_TOKENS = 24
"""Shorter answers hold hardly any complete draft of eight tokens, so they are left out."""

IGNORED = -100
"""Label of a slot that must not be learned; the value that torch's cross entropy skips."""


@dataclass(frozen=True)
class Sample:
    """One prompt with the target's own greedy answer, as token ids."""

    tokens: tuple[int, ...]
    """The end of the prompt followed by the answer, no longer than the maximum length."""
    num_prompt_tokens: int
    """How many of `tokens` belong to the prompt; 0 when the answer alone fills the length."""


class DraftVocabulary:
    """The target tokens that the drafter is able to propose.

    A small output layer is much of what makes a drafter cheap: 4,096 rows instead of 49,152.
    """

    def __init__(self, target_ids: Iterable[int]) -> None:
        # vLLM stores an offset for every draft id; rising ids keep the mapping easy to read.
        self.target_ids = tuple(sorted(set(target_ids)))
        self._draft_ids = {token: i for i, token in enumerate(self.target_ids)}

    def __len__(self) -> int:
        return len(self.target_ids)

    def label(self, target_id: int) -> int:
        """Return the draft id of a target token, or `IGNORED` when it has none."""
        return self._draft_ids.get(target_id, IGNORED)

    def offsets(self) -> list[int]:
        """Return vLLM's `d2t`: for every draft id, the target id minus the draft id."""
        return [token - i for i, token in enumerate(self.target_ids)]


def choose_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int) -> DraftVocabulary:
    """Return the `size` most frequent answer tokens, filled up with the smallest unused ids."""
    counts = count_answer_tokens(samples)
    chosen = {token for token, _ in counts.most_common(size)}
    unused = (token for token in range(vocab_size) if token not in chosen)
    fill = [token for token, _ in zip(unused, range(size - len(chosen)), strict=False)]
    return DraftVocabulary([*chosen, *fill])


def coverage(samples: Sequence[Sample], vocabulary: DraftVocabulary) -> float:
    """Return the fraction of answer tokens that the vocabulary can express, 0 to 1."""
    counts = count_answer_tokens(samples)
    known = sum(n for token, n in counts.items() if vocabulary.label(token) != IGNORED)
    return known / counts.total()


def count_answer_tokens(samples: Sequence[Sample]) -> Counter[int]:
    """Count the tokens of the answers; prompts are never drafted, so they do not count."""
    return Counter(token for s in samples for token in s.tokens[s.num_prompt_tokens :])


def read_samples(paths: Sequence[Path], max_length: int, vocab_size: int) -> list[Sample]:
    """Read answer files as `answers.write_answers` makes them.

    Args:
        paths: JSONL files with `prompt_ids` and `output_ids` on each line.
        max_length: tokens kept of each line; the start of a long prompt goes first.
        vocab_size: size of the target's vocabulary, to catch answers of another model.

    Raises:
        InputError: a file or a line cannot be used, or no answer is long enough.
    """
    samples = []
    for path in paths:
        for where, row in numbered_objects(path):
            prompt_ids = _token_ids(row, "prompt_ids", where, vocab_size)
            output_ids = _token_ids(row, "output_ids", where, vocab_size)
            if len(output_ids) >= MIN_ANSWER_TOKENS:
                samples.append(cut(prompt_ids, output_ids, max_length))
    if not samples:
        raise invalid(
            f"must hold at least one answer of {MIN_ANSWER_TOKENS} tokens or more",
            where=", ".join(map(str, paths)) or "answer files",
            next_step="Collect answers with `python -m autotune.demo.training answers`.",
        )
    return samples


def cut(prompt_ids: Sequence[int], output_ids: Sequence[int], max_length: int) -> Sample:
    """Shorten to `max_length` tokens: the answer matters, then the end of the prompt."""
    room = max(0, max_length - len(output_ids))
    prompt = tuple(prompt_ids[-room:]) if room else ()
    return Sample((*prompt, *output_ids[: max_length - len(prompt)]), len(prompt))


def _token_ids(row: dict[str, Any], key: str, where: str, vocab_size: int) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise invalid("must be a list of token ids", where=where, key_path=key, got=ids)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise _foreign_token(token, where, key, vocab_size)
    return ids


def _foreign_token(token: int, where: str, key: str, vocab_size: int) -> InputError:
    return invalid(
        f"token ids must be from 0 to {vocab_size - 1}",
        where=where,
        key_path=key,
        got=token,
        next_step="The answers must come from the same target.",
    )
