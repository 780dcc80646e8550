"""How long requests are in tokens, before any server runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.traffic.schedule import Schedule, ScheduledRequest

TEMPLATE_TOKENS_PER_MESSAGE = 16
TEMPLATE_TOKENS = 64
"""Generous allowance for what a chat template adds: role marks, a default system prompt."""


@dataclass(frozen=True)
class LongestRequest:
    """The request that needs the most room: prompt and output together."""

    class_name: str
    start: str
    """The first words of its prompt."""
    min_tokens: int
    """It needs at least this many; known only when `is_exact`."""
    max_tokens: int
    """It needs at most this many, chat template included."""
    is_exact: bool
    """Whether the model's own tokenizer counted."""


def longest_request(schedule: Schedule, model_folder: Path) -> LongestRequest:
    """Find the longest request of a schedule, warm-up included.

    With the model's `tokenizer.json` and the `tokenizers` package the prompts are counted exactly,
    but for the chat template. Otherwise a byte counts as a token, which is an upper bound for the
    byte-level vocabularies of current models.
    """
    tokenizer = _tokenizer(model_folder)
    requests = [*schedule.warmup, *schedule.requests]
    sized = [
        (_num_tokens(request, tokenizer) + request.max_tokens, request) for request in requests
    ]
    num_tokens, request = max(sized, key=lambda pair: pair[0])
    template = TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE * len(request.prompt.messages)
    return LongestRequest(
        class_name=request.class_name,
        start=request.prompt.text[:40],
        min_tokens=num_tokens,
        max_tokens=num_tokens + template,
        is_exact=tokenizer is not None,
    )


def _num_tokens(request: ScheduledRequest, tokenizer: Any) -> int:
    texts = [content for _, content in request.prompt.messages]
    if tokenizer is None:
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def _tokenizer(model_folder: Path) -> Any:
    path = model_folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    return Tokenizer.from_file(str(path))
