"""Requests on their way through a simulated server: when they are sent, what they have received."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from autotune.measure.records import RequestRecord
from autotune.traffic.schedule import Schedule, ScheduledRequest

CHARS_PER_TOKEN = 4


@dataclass(eq=False)
class Flight:
    """One request on its way through the server."""

    request: ScheduledRequest
    sent_s: float
    num_prompt_tokens: int
    num_tokens: int
    """How many it will generate."""
    prefill_left: int
    num_steps: int = 0
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: ScheduledRequest, sent_s: float, seed: int) -> Self:
        """Start a request on its way; `seed` decides with it how long its answer is."""
        num_prompt = -(-request.prompt.num_chars // CHARS_PER_TOKEN) or 1
        return cls(request, sent_s, num_prompt, _answer_tokens(request, seed), num_prompt)

    @property
    def received(self) -> int:
        return self.tokens[-1] if self.tokens else 0

    @property
    def is_done(self) -> bool:
        return self.received >= self.num_tokens

    def take(self, times_s: list[float], tokens: list[int]) -> None:
        """Receive chunks: when each came, and how many tokens there were by then."""
        self.times_s += times_s
        self.tokens += tokens

    def record(self, at_s: float, error: str | None) -> RequestRecord:
        """Describe the request as its client saw it end at `at_s`."""
        num_chunks = sum(time_s <= at_s for time_s in self.times_s)
        tokens = tuple(self.tokens[:num_chunks])
        is_full = self.num_tokens == self.request.max_tokens
        return RequestRecord(
            request_id=self.request.request_id,
            class_name=self.request.class_name,
            prompt_id=self.request.prompt.prompt_id,
            scheduled_s=self.request.arrival_s,
            sent_s=self.sent_s,
            chunk_times_s=tuple(self.times_s[:num_chunks]),
            chunk_tokens=tokens,
            finished_s=at_s,
            num_prompt_tokens=self.num_prompt_tokens if error is None else 0,
            num_completion_tokens=tokens[-1] if tokens else 0,
            finish_reason=None if error else ("length" if is_full else "stop"),
            error=error,
        )


class Arrivals:
    """Hands out requests when they are due: at their times, or as closed-loop users get free."""

    def __init__(self, schedule: Schedule, requests: Sequence[ScheduledRequest]) -> None:
        self._pending = deque(requests)
        # Warm-up requests have no arrival times, so they go in closed loop whatever the load is.
        self._is_open_loop = bool(requests) and requests[0].arrival_s is not None
        num_users = 0 if self._is_open_loop else schedule.concurrency or len(requests)
        self._free_at_s = [0.0] * num_users
        self._max_duration_s = schedule.max_duration_s

    @property
    def next_s(self) -> float:
        """When the next request is sent, as far as is known; infinite when none is."""
        if not self._pending:
            return math.inf
        if self._is_open_loop:
            next_s = self._pending[0].arrival_s or 0.0
        else:
            next_s = self._free_at_s[0] if self._free_at_s else math.inf
        return next_s if next_s <= self._max_duration_s else math.inf

    def take(self, now_s: float) -> tuple[ScheduledRequest, float] | None:
        """Return a request that is due and when it was sent."""
        sent_s = self.next_s
        if sent_s > now_s:
            return None
        if not self._is_open_loop:
            heapq.heappop(self._free_at_s)
        return self._pending.popleft(), sent_s

    def answered(self, at_s: float) -> None:
        """Let the user whose request ended send the next one."""
        if not self._is_open_loop:
            heapq.heappush(self._free_at_s, at_s)


def _answer_tokens(request: ScheduledRequest, seed: int) -> int:
    """Say how long a request's answer is, whichever config gives it."""
    if request.ignore_eos:
        return request.max_tokens
    rng = random.Random(f"{seed} {request.prompt.prompt_id} {request.sampling_seed}")
    drawn = round(request.max_tokens * rng.lognormvariate(-0.2, 0.5))
    return min(request.max_tokens, max(1, drawn))
