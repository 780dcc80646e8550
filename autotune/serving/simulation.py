"""One simulated measurement: requests arrive, are batched and decoded, and end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.measure.records import RequestRecord, ServerCounters
from autotune.serving.flights import Arrivals, Flight
from autotune.serving.scheduler_limits import SchedulerLimits
from autotune.serving.step_cost import FloatArray
from autotune.serving.step_sampler import StepSampler
from autotune.serving.token_budget import max_decoding_requests, tokens_per_step
from autotune.traffic.schedule import Schedule, ScheduledRequest

MAX_STEPS_AT_ONCE = 512


class Simulation:
    """One list of requests going through one server, from the first send to the last answer.

    Steps between two events (a request arrives, ends, or times out) are computed as one block.
    """

    def __init__(
        self,
        sampler: StepSampler,
        limits: SchedulerLimits,
        schedule: Schedule,
        requests: Sequence[ScheduledRequest],
        seed: int,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._sampler = sampler
        self._config = sampler.config
        self._limits = limits
        self._tokens_per_step = tokens_per_step(
            sampler.config.num_speculative_tokens, is_parallel=sampler.config.parallel_drafting
        )
        self._timeout_s = schedule.request_timeout_s
        self._arrivals = Arrivals(schedule, requests, seed)
        self._waiting: deque[Flight] = deque()
        self._running: list[Flight] = []
        self._now_s = 0.0
        self._num_drafts = 0
        self._per_position = np.zeros(self._config.num_speculative_tokens, dtype=np.int64)
        self._num_prompt_tokens = 0
        self._num_generated = 0

    @property
    def duration_s(self) -> float:
        return max((record.finished_s for record in self.records), default=0.0)

    def go(self) -> None:
        """Run until every request that was sent has ended."""
        while True:
            self._receive()
            self._admit()
            if self._running:
                self._advance()
                self._retire()
            elif math.isfinite(self._arrivals.next_s):
                self._now_s = self._arrivals.next_s
            else:
                return

    def counters(self) -> ServerCounters:
        """Return what the server counted during the run.

        As in vLLM, accepted drafts past a request's end count as accepted.
        """
        return ServerCounters(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_drafts * self._config.num_speculative_tokens,
            num_accepted_tokens=int(self._per_position.sum()),
            num_accepted_tokens_per_pos=tuple(int(n) for n in self._per_position),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generated,
            has_speculation=self._config.is_speculative,
        )

    def _receive(self) -> None:
        while (flight := self._arrivals.take(self._now_s)) is not None:
            if self._kv_tokens(flight) > self._limits.kv_tokens:
                error = "HTTP 400: the request does not fit into the KV cache"
                self._end(flight, flight.sent_s, error, "http_4xx")
            else:
                self._waiting.append(flight)

    def _admit(self) -> None:
        """Move requests from the queue into the batch, in order.

        Room for a whole answer is kept from the start, where vLLM would preempt later on.
        """
        kept = sum(map(self._kv_tokens, self._running))
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            kept += self._kv_tokens(self._waiting[0])
            if kept > self._limits.kv_tokens:
                return
            self._running.append(self._waiting.popleft())

    def _kv_tokens(self, flight: Flight) -> int:
        return flight.num_prompt_tokens + flight.num_tokens + self._config.num_speculative_tokens

    def _advance(self) -> None:
        """Compute the steps up to the next event, or a single one that also prefills."""
        budget = self._limits.max_num_batched_tokens
        decoding = [flight for flight in self._running if not flight.prefill_left]
        # The silent cap: what the token budget has no room for just waits.
        decoding = decoding[: max_decoding_requests(self._config, budget)]
        chunks = self._prefill_chunks(budget - len(decoding) * self._tokens_per_step)
        num_steps = 1 if chunks else self._steps_to_plan(decoding)
        ends_s = self._decode(decoding, num_steps, sum(tokens for _, tokens in chunks))
        self._now_s = ends_s[-1]
        self._prefill(chunks)

    def _prefill(self, chunks: Sequence[tuple[Flight, int]]) -> None:
        """Take chunks off the prompts; a prompt's last one brings the answer's first token."""
        for flight, tokens in chunks:
            flight.prefill_left -= tokens
            self._num_prompt_tokens += tokens
            if not flight.prefill_left:
                flight.take([self._now_s], [1])
                self._num_generated += 1

    def _prefill_chunks(self, budget: int) -> list[tuple[Flight, int]]:
        """Share what decoding leaves of the budget among the prompts, in order."""
        chunks = []
        for flight in self._running:
            tokens = min(flight.prefill_left, budget)
            if tokens > 0:
                chunks.append((flight, tokens))
                budget -= tokens
        return chunks

    def _steps_to_plan(self, decoding: Sequence[Flight]) -> int:
        left = min(flight.num_tokens - flight.received for flight in decoding)
        return min(MAX_STEPS_AT_ONCE, math.ceil(left / self._sampler.mean_tokens))

    def _decode(
        self, decoding: Sequence[Flight], num_steps: int, prefill_tokens: int
    ) -> list[float]:
        """Decode for up to `num_steps` steps and return when each of them ended."""
        accepted = self._sampler.accepted(num_steps, decoding)
        gained = (accepted + 1).cumsum(axis=0)
        before = np.vstack([np.zeros_like(gained[:1]), gained[:-1]]).sum(axis=1)
        context = sum(flight.num_prompt_tokens + flight.received for flight in decoding)
        steps_s = self._sampler.steps_s(len(decoding), context + before * 1.0, prefill_tokens)
        ends_s = self._now_s + steps_s.cumsum()
        count = self._steps_to_event(decoding, gained, ends_s)
        times_s: list[float] = ends_s[:count].tolist()
        self._deliver(decoding, gained[:count], times_s)
        self._count(accepted[:count])
        return times_s

    def _deliver(
        self, decoding: Sequence[Flight], gained: npt.NDArray[np.intp], times_s: list[float]
    ) -> None:
        """Hand out what a block of steps brought, up to the end of each answer."""
        for column, flight in enumerate(decoding):
            tokens = np.minimum(flight.received + gained[:, column], flight.num_tokens).tolist()
            self._num_generated += tokens[-1] - flight.received
            flight.take(times_s, tokens)
            flight.num_steps += len(times_s)

    def _steps_to_event(
        self, decoding: Sequence[Flight], gained: npt.NDArray[np.intp], ends_s: FloatArray
    ) -> int:
        """Cut a block of steps after the first in which a request ends, arrives or times out."""
        left = np.array([flight.num_tokens - flight.received for flight in decoding])
        # Both queues are in the order of sending, so the first one running is the oldest.
        event_s = min(self._arrivals.next_s, self._running[0].sent_s + self._timeout_s)
        is_event = (gained >= left).any(axis=1) | (ends_s >= event_s)
        return int(is_event.argmax()) + 1 if is_event.any() else len(ends_s)

    def _count(self, accepted: npt.NDArray[np.intp]) -> None:
        """Update the speculation counters; position i counts drafts with more than i accepted."""
        k = self._config.num_speculative_tokens
        if k:
            self._num_drafts += accepted.size
            exactly = np.bincount(accepted.ravel(), minlength=k + 1)
            self._per_position += exactly[::-1].cumsum()[::-1][1:]

    def _retire(self) -> None:
        """End the requests that are done, or that their client gave up."""
        self._running = [flight for flight in self._running if not self._has_ended(flight)]
        while self._waiting and self._has_ended(self._waiting[0]):
            self._waiting.popleft()

    def _has_ended(self, flight: Flight) -> bool:
        deadline_s = flight.sent_s + self._timeout_s
        if self._now_s > deadline_s:
            self._end(flight, deadline_s, f"timeout after {self._timeout_s} s", "timeout")
        elif flight.is_done:
            self._end(flight, self._now_s)
        else:
            return False
        return True

    def _end(
        self,
        flight: Flight,
        at_s: float,
        error: str | None = None,
        error_kind: str | None = None,
    ) -> None:
        self.records.append(flight.record(at_s, error, error_kind))
        for later in self._arrivals.ended(flight, at_s, is_failed=error is not None):
            self.records.append(later.record(at_s, "the turn before it failed", "previous_turn"))
