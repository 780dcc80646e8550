"""How long text is in tokens, before any server runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import invalid
from autotune.traffic.schedule import Schedule, ScheduledRequest

TEMPLATE_TOKENS_PER_MESSAGE = 16
TEMPLATE_TOKENS = 64
"""Generous allowance for what a chat template adds: role marks, a default system prompt."""

CHARS_PER_TOKEN = 4
"""English prose in the byte-level vocabularies of current models; only for estimates."""


class TokenCounter(Protocol):
    """Counts tokens, and cuts text to a number of them."""

    is_exact: bool
    """Whether it is the model's own tokenizer."""

    def count(self, text: str) -> int: ...

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the beginning of `text`, at most `num_tokens` long."""
        ...


class EstimatedTokens:
    """A token for every four characters, where the model's tokenizer is not at hand."""

    is_exact = False

    def count(self, text: str) -> int:
        return -(-len(text) // CHARS_PER_TOKEN)

    def cut(self, text: str, num_tokens: int) -> str:
        return text[: num_tokens * CHARS_PER_TOKEN]


class TokenizerTokens:
    """Tokens of a model's own `tokenizer.json`."""

    is_exact = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        return len(self._encode(text).ids)

    def cut(self, text: str, num_tokens: int) -> str:
        offsets = self._encode(text).offsets
        if len(offsets) <= num_tokens:
            return text
        return text[: offsets[num_tokens - 1][1]] if num_tokens > 0 else ""

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)


def token_counter(model_folder: Path | None) -> TokenCounter:
    """Return the best counter there is: the model's tokenizer, failing that an estimate.

    The tokenizer needs the model's `tokenizer.json` and the `tokenizers` package.

    Raises:
        InputError: there is a `tokenizer.json` that cannot be read.
    """
    path = model_folder / "tokenizer.json" if model_folder is not None else None
    if path is None or not path.is_file():
        return EstimatedTokens()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return EstimatedTokens()
    try:
        return TokenizerTokens(Tokenizer.from_file(str(path)))
    except Exception as err:  # the package raises nothing narrower
        raise invalid(f"is no tokenizer that can be read ({err})", where=path) from err


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


def longest_request(schedule: Schedule, counter: TokenCounter) -> LongestRequest:
    """Find the longest request of a schedule, warm-up included.

    With the model's own tokenizer the prompts are counted exactly, but for the chat template.
    Otherwise a byte counts as a token, which is an upper bound for the byte-level vocabularies of
    current models. A live conversation holds the answers before it, each as long as it may be.
    """
    said_before: dict[int, int] = {}
    sizes = []
    for request in [*schedule.warmup, *schedule.requests]:
        size = _num_tokens(request, counter) + request.max_tokens
        if request.conversation_id is not None:
            if request.is_live:
                size += said_before.get(request.conversation_id, 0)
            said_before[request.conversation_id] = size
        sizes.append((size, request))
    num_tokens, request = max(sizes, key=lambda pair: pair[0])
    template = TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE * (
        len(request.prompt.messages) + 2 * request.turn
    )
    return LongestRequest(
        class_name=request.class_name,
        start=request.prompt.text[:40],
        min_tokens=num_tokens,
        max_tokens=num_tokens + template,
        is_exact=counter.is_exact,
    )


def _num_tokens(request: ScheduledRequest, counter: TokenCounter) -> int:
    texts = [content for _, content in request.prompt.messages]
    if not counter.is_exact:
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return sum(counter.count(text) for text in texts)
