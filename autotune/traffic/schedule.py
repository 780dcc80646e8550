"""The schedule: which request is sent when. One profile and seed give one schedule, always.

Every config of a study is measured with the same schedule, so that configs are compared on the
same requests (a paired design), and a result can be repeated from the profile and the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from autotune.traffic.prompts import Prompt


class PromptRealism(StrEnum):
    """How near the prompts are to what users send; acceptance depends on it."""

    USER = "user"
    """The user's own prompts."""
    PROXY = "proxy"
    """Real text, but not the user's: a built-in set, or text fitted to the lengths of a trace."""
    RANDOM = "random"
    """Random tokens: acceptance, and so every figure under speculation, means nothing."""


@dataclass(frozen=True)
class ScheduledRequest:
    """One request: its content, and in open loop its arrival time."""

    request_id: int
    class_name: str
    prompt: Prompt
    max_tokens: int
    temperature: float
    top_p: float
    ignore_eos: bool
    sampling_seed: int
    arrival_s: float | None
    """Seconds after the start; None in closed loop, where the server's pace decides, and for later
    turns of a conversation, which follow the answer to the turn before."""
    conversation_id: int | None = None
    """Requests with one id are turns of one conversation, sent one after the other; None: alone."""
    turn: int = 0
    think_s: float = 0.0
    """Seconds to wait before sending: after the previous turn's answer, or in closed loop after the
    answer to whatever the same user sent before."""
    is_live: bool = False
    """The prompt holds only this turn's own messages; the turns before it, with the answers of the
    server under test, are put before them when it is sent."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request's body."""

    def body(self, endpoint: str) -> dict[str, Any]:
        """Return the OpenAI-style request body, without the model's name."""
        content: dict[str, Any] = (
            {"messages": self.prompt.as_chat()}
            if endpoint == "chat"
            else {"prompt": self.prompt.text}
        )
        return {
            **content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.sampling_seed,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }

    def order(self) -> list[Any]:
        """Say what must come before the request, and how long before; nothing for most."""
        if self.conversation_id is None and not self.think_s:
            return []
        return [self.conversation_id, self.turn, self.think_s, self.is_live]


@dataclass(frozen=True)
class Schedule:
    """All requests of one measurement, and the warm-up requests sent and thrown away before it."""

    endpoint: str
    concurrency: int | None
    """Users, each with at most one request in flight, in closed loop; None in open loop."""
    requests: tuple[ScheduledRequest, ...]
    warmup: tuple[ScheduledRequest, ...]
    max_duration_s: float
    request_timeout_s: float
    prompt_realism: PromptRealism = PromptRealism.USER
    allows_late_client: bool = False
    """Whether a measurement counts although the load generator was late (`measure.late_client`)."""
    keeps_outputs: bool = False
    """Whether records may hold the answers' texts (the profile's `privacy.store_outputs`)."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it came about: rows skipped, samples taken."""

    @cached_property
    def digest(self) -> str:
        """A hash of everything that is sent and when."""
        rows = [
            [r.request_id, r.class_name, r.arrival_s, r.body(self.endpoint), *r.order()]
            for r in (*self.warmup, *self.requests)
        ]
        head = [self.endpoint, self.concurrency, self.max_duration_s, self.request_timeout_s]
        text = json.dumps([head, rows], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def head(self, num_requests: int) -> Schedule:
        """Return the schedule cut after its first requests, whole conversations only.

        Args:
            num_requests: how many to keep at least, at least 1; the last conversation is completed.
        """
        begun = {r.conversation_id for r in self.requests[:num_requests]} - {None}
        kept = tuple(
            r
            for i, r in enumerate(self.requests)
            if i < num_requests or r.conversation_id in begun
        )
        return self if len(kept) == len(self.requests) else replace(self, requests=kept)

    @property
    def num_requests_of_class(self) -> dict[str, int]:
        return dict(Counter(request.class_name for request in self.requests))

    @property
    def max_output_tokens(self) -> int:
        return max(request.max_tokens for request in self.requests)
