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
from autotune.traffic.tokens import CHARS_PER_TOKEN

_FREE_USER = -1
"""In the place of a conversation's number: a user is free and takes the next conversation."""


@dataclass(eq=False)
class Conversation:
    """Turns that follow each other; a lone request is a conversation of one turn."""

    number: int
    """Place in the schedule."""
    turns: deque[ScheduledRequest]
    """Those that were not sent yet."""
    history_tokens: int = 0
    """Length of what was said so far: the last prompt and its answer."""


@dataclass(eq=False)
class Flight:
    """One request on its way through the server."""

    conversation: Conversation
    request: ScheduledRequest
    scheduled_s: float | None
    """When it was to be sent, in open loop; None in closed loop."""
    sent_s: float
    num_prompt_tokens: int
    num_tokens: int
    """How many it will generate."""
    prefill_left: int
    num_steps: int = 0
    place: int = 0
    """In the batch, while it runs."""
    first_step: int = 0
    """Of the server, since it has that place."""
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of_next_turn(
        cls, conversation: Conversation, sent_s: float, seed: int, *, is_open_loop: bool
    ) -> Self:
        """Take a conversation's next turn and start it on its way; a live one brings the history.

        Args:
            conversation: has at least one turn left.
            sent_s: when it is sent, which in a simulation is when it is due.
            seed: decides with the request how long its answer is.
            is_open_loop: whether its latency counts from a scheduled time.
        """
        request = conversation.turns.popleft()
        num_prompt = -(-request.prompt.num_chars // CHARS_PER_TOKEN) or 1
        if request.is_live:
            num_prompt += conversation.history_tokens
        return cls(
            conversation=conversation,
            request=request,
            scheduled_s=sent_s if is_open_loop else None,
            sent_s=sent_s,
            num_prompt_tokens=num_prompt,
            num_tokens=_answer_tokens(request, seed),
            prefill_left=num_prompt,
        )

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

    def record(
        self, at_s: float, error: str | None, error_kind: str | None = None
    ) -> RequestRecord:
        """Describe the request as its client saw it end at `at_s`."""
        num_chunks = sum(time_s <= at_s for time_s in self.times_s)
        tokens = tuple(self.tokens[:num_chunks])
        is_full = self.num_tokens == self.request.max_tokens
        return RequestRecord(
            request_id=self.request.request_id,
            class_name=self.request.class_name,
            prompt_id=self.request.prompt.prompt_id,
            scheduled_s=self.scheduled_s,
            sent_s=self.sent_s,
            chunk_times_s=tuple(self.times_s[:num_chunks]),
            chunk_tokens=tokens,
            finished_s=at_s,
            num_prompt_tokens=self.num_prompt_tokens if error is None else 0,
            num_completion_tokens=tokens[-1] if tokens else 0,
            finish_reason=None if error else ("length" if is_full else "stop"),
            error=error,
            error_kind=error_kind,
            conversation_id=self.request.conversation_id,
            turn=self.request.turn,
            think_s=self.request.think_s,
        )


class Arrivals:
    """Hands out requests when they are due: the same ones, in the same order, as the real client.

    Open loop: conversations begin at their own times. Closed loop: each user takes the next one when
    the one before has ended, and thinks before every request. In both a later turn is due its
    `think_s` after the answer to the turn before it. What is due at one moment goes by the
    schedule's order.
    """

    def __init__(
        self, schedule: Schedule, requests: Sequence[ScheduledRequest], seed: int
    ) -> None:
        """Line the requests up; `seed` decides how long their answers are."""
        # Warm-up requests have no arrival times, so they go in closed loop whatever the load is.
        self._is_open_loop = any(request.arrival_s is not None for request in requests)
        self._max_duration_s = schedule.max_duration_s
        self._seed = seed
        self._conversations = _conversations(requests)
        self._events: list[tuple[float, int]]
        if self._is_open_loop:
            self._events = [(c.turns[0].arrival_s or 0.0, c.number) for c in self._conversations]
        else:
            self._events = [(0.0, _FREE_USER)] * (schedule.concurrency or len(requests))
        heapq.heapify(self._events)
        self._waiting = iter(self._conversations)  # for a free user; open loop has none

    @property
    def next_s(self) -> float:
        """When the next request is sent, as known when `take` has nothing more; infinite for none."""
        next_s = self._events[0][0] if self._events else math.inf
        return next_s if next_s <= self._max_duration_s else math.inf

    def take(self, now_s: float) -> Flight | None:
        """Start a request that is due by `now_s` on its way; None when no more are."""
        while self.next_s <= now_s:
            time_s, number = heapq.heappop(self._events)
            if number != _FREE_USER:
                return self._next_turn(self._conversations[number], time_s)
            conversation = next(self._waiting, None)
            if conversation is not None:
                self._await(conversation, time_s)
        return None

    def ended(self, flight: Flight, at_s: float, *, is_failed: bool) -> Sequence[Flight]:
        """Let the next turn follow, or the user take the next conversation.

        Returns:
            The later turns that are never sent, because this one failed.
        """
        conversation = flight.conversation
        if conversation.turns and not is_failed:
            conversation.history_tokens = flight.num_prompt_tokens + flight.received
            self._await(conversation, at_s)
            return ()
        if not self._is_open_loop:
            heapq.heappush(self._events, (at_s, _FREE_USER))
        return [self._next_turn(conversation, at_s) for _ in range(len(conversation.turns))]

    def _next_turn(self, conversation: Conversation, at_s: float) -> Flight:
        return Flight.of_next_turn(conversation, at_s, self._seed, is_open_loop=self._is_open_loop)

    def _await(self, conversation: Conversation, from_s: float) -> None:
        due_s = from_s + conversation.turns[0].think_s
        heapq.heappush(self._events, (due_s, conversation.number))


def _conversations(requests: Sequence[ScheduledRequest]) -> list[Conversation]:
    """Group the turns of each conversation, in the order in which the conversations begin."""
    groups: dict[tuple[bool, int], list[ScheduledRequest]] = {}
    for request in requests:
        is_alone = request.conversation_id is None
        key = request.request_id if request.conversation_id is None else request.conversation_id
        groups.setdefault((is_alone, key), []).append(request)
    return [
        Conversation(number, deque(sorted(turns, key=lambda request: request.turn)))
        for number, turns in enumerate(groups.values())
    ]


def _answer_tokens(request: ScheduledRequest, seed: int) -> int:
    """Say how long a request's answer is, whichever config gives it."""
    if request.ignore_eos:
        return request.max_tokens
    rng = random.Random(f"{seed} {request.prompt.prompt_id} {request.sampling_seed}")
    drawn = round(request.max_tokens * rng.lognormvariate(-0.2, 0.5))
    return min(request.max_tokens, max(1, drawn))
