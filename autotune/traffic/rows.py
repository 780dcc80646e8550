"""One row of what people have (a log line, a trace entry, a data set's item), whatever its format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Message = tuple[str, str]
"""(role, content)."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one record of a file says about one request or one conversation; unknown parts are None.

    A row holds `messages` (one request, with all its history), or `turns` (a script: what the user
    says turn by turn), or neither (a trace that knows lengths only).
    """

    number: int
    """Line or record number in its file, from 1, for messages about it."""
    time_s: float | None = None
    """When the request was sent, in seconds on the file's own clock."""
    duration_s: float | None = None
    """How long its answer took to the last token."""
    conversation: str | None = None
    turn: int = 0
    class_name: str | None = None
    """What the file itself calls this kind of request: a category, a model, an endpoint."""
    messages: tuple[Message, ...] | None = None
    """The request as it was sent; the last message is the user's (or a tool's)."""
    turns: tuple[str, ...] = ()
    answers: tuple[str | None, ...] = ()
    """Recorded answer to each turn, None where there is none; as long as `turns`, or empty."""
    think_s: tuple[float | None, ...] = ()
    """Recorded wait before each turn, None where there is none; as long as `turns`, or empty."""
    system: str | None = None
    """System prompt of the script."""
    is_completion: bool = False
    """The request went to the completions endpoint: text that no chat template wraps."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    prefix_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks; requests with equal leading ids share that much of the prompt."""
    prefix_block_tokens: int = 512
    max_tokens: int | None = None
    """The limit that the request asked for."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """temperature, top_p and the like, as far as the request gave them."""

    @property
    def has_text(self) -> bool:
        return self.messages is not None or bool(self.turns)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that could not be read, and why; counted and shown, never silently dropped."""

    number: int
    reason: str


def plain_class_name(name: str) -> str:
    """Return what a file calls a kind of request, as a class of a profile may be called.

    Every other run of signs than letters, digits, dots, dashes and underlines becomes a dash.
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")[:60] or "class"
