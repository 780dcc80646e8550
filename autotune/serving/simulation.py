"""One simulated measurement: requests arrive, are batched and decoded, and end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np

from autotune.measure.records import RequestRecord, ServerCounters
from autotune.serving.flights import Arrivals, Flight
from autotune.serving.scheduler_limits import SchedulerLimits
from autotune.serving.step_cost import FloatArray
from autotune.serving.step_sampler import IntArray, StepSampler
from autotune.serving.token_budget import max_decoding_requests, tokens_per_step
from autotune.serving.token_log import TokenLog
from autotune.traffic.schedule import Schedule, ScheduledRequest

MAX_STEPS_AT_ONCE = 512


class Simulation:
    """One list of requests going through one server, from the first send to the last answer.

    Steps between two events (a request arrives, ends, times out, or is preempted) are computed as one block.
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
        self.out_of_memory_s: float | None = None
        """When the sampler's buffers no longer fitted; the server is dead from then on."""
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
        self._num_preemptions = 0
        num_places = min(limits.max_num_seqs, max(1, len(requests)))
        self._log = TokenLog(num_places)
        self._kept_tokens = 0
        """Of the cache, by those who run: what they hold, and a place for every draft."""
        # By place in the batch: tokens of the prompt, tokens received, tokens to come in all, steps
        # decoded, and who sits there.
        self._prompts = np.zeros(num_places, dtype=np.int64)
        self._received = np.zeros(num_places, dtype=np.int64)
        self._wanted = np.zeros(num_places, dtype=np.int64)
        self._steps_done = np.zeros(num_places, dtype=np.int64)
        self._request_ids = np.zeros(num_places, dtype=np.int64)

    @property
    def duration_s(self) -> float:
        if self.out_of_memory_s is not None:
            return self.out_of_memory_s
        return max((record.finished_s for record in self.records), default=0.0)

    def go(self) -> None:
        """Run until every request that was sent has ended, or the server has died."""
        while self.out_of_memory_s is None:
            self._receive()
            # As in vLLM, the step that preempts somebody admits nobody.
            if not self._preempt():
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
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generated,
            has_speculation=self._config.is_speculative,
        )

    def _receive(self) -> None:
        while (flight := self._arrivals.take(self._now_s)) is not None:
            longest = flight.num_prompt_tokens + flight.num_tokens
            if longest + self._config.num_speculative_tokens > self._limits.kv_tokens:
                error = "HTTP 400: the request does not fit into the KV cache"
                self._end(flight, flight.sent_s, error, "http_4xx")
            else:
                self._waiting.append(flight)

    def _admit(self) -> None:
        """Move requests from the queue into the batch, in order, as far as their prompts have room.

        What their answers will need is not kept for them, as in vLLM.
        """
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            if self._kept_tokens + self._kv_tokens(self._waiting[0]) > self._limits.kv_tokens:
                return
            flight = self._waiting.popleft()
            self._running.append(flight)
            self._seat(flight)

    def _seat(self, flight: Flight) -> None:
        place = self._log.take_place()
        self._kept_tokens += self._kv_tokens(flight)
        self._prompts[place] = flight.num_prompt_tokens
        flight.place, flight.first_step = place, self._log.num_steps
        self._received[place] = flight.received
        self._wanted[place] = flight.num_tokens
        self._steps_done[place] = flight.num_steps
        self._request_ids[place] = flight.request.request_id

    def _unseat(self, flight: Flight) -> None:
        """Take a request off the batch, with all that it received there."""
        times_s, totals = self._log.chunks(flight.place, flight.first_step)
        before = flight.received
        flight.take(times_s, [before + total for total in totals])
        flight.num_steps = int(self._steps_done[flight.place])
        self._kept_tokens -= self._kv_tokens(flight)
        self._log.leave(flight.place)

    def _kv_tokens(self, flight: Flight) -> int:
        """Room in the cache for a request that has no place at present."""
        return flight.num_prompt_tokens + flight.received + self._config.num_speculative_tokens

    def _preempt(self) -> bool:
        """Put the latest requests back into the queue until the next step has room; say whether any were.

        All that they held is computed anew, their answers' tokens like a prompt.
        """
        is_any = False
        while self._room_after_a_step() < 0 and len(self._running) > 1:
            flight = self._running.pop()
            self._unseat(flight)
            flight.prefill_left = flight.num_prompt_tokens + flight.received
            self._waiting.appendleft(flight)
            self._num_preemptions += 1
            is_any = True
        return is_any

    def _room_after_a_step(self) -> int:
        """Tokens of the cache that are free once everybody who runs has got one more."""
        return self._limits.kv_tokens - self._kept_tokens - len(self._running)

    def _advance(self) -> None:
        """Compute the steps up to the next event, or a single one that also prefills."""
        budget = self._limits.max_num_batched_tokens
        decoding = [flight for flight in self._running if not flight.prefill_left]
        # The silent cap: what the token budget has no room for just waits.
        decoding = decoding[: max_decoding_requests(self._config, budget)]
        most = self._limits.max_sampled_requests
        if most is not None and len(decoding) > most:
            self.out_of_memory_s = self._now_s
            return
        chunks = self._prefill_chunks(budget - len(decoding) * self._tokens_per_step)
        places = np.array([flight.place for flight in decoding], dtype=np.int64)
        self._decode(places, chunks)
        self._prefill(chunks)

    def _prefill(self, chunks: Sequence[tuple[Flight, int]]) -> None:
        """Take chunks off the prompts; a prompt's last one brings the answer's next token."""
        finished = []
        for flight, tokens in chunks:
            flight.prefill_left -= tokens
            if not flight.received:
                self._num_prompt_tokens += tokens
            if not flight.prefill_left:
                finished.append(flight.place)
        if finished:
            self._log.add_to_last(finished)
            self._received[finished] += 1
            self._add_generated(len(finished))

    def _prefill_chunks(self, budget: int) -> list[tuple[Flight, int]]:
        """Share what decoding leaves of the budget among the prompts, in order."""
        chunks = []
        for flight in self._running:
            tokens = min(flight.prefill_left, budget)
            if tokens > 0:
                chunks.append((flight, tokens))
                budget -= tokens
        return chunks

    def _decode(self, places: IntArray, chunks: Sequence[tuple[Flight, int]]) -> None:
        """Decode until something happens; a single step where there are prompts to compute too."""
        is_drafting = self._sampler.is_drafting(len(places) + len(chunks))
        left = self._wanted[places] - self._received[places]
        num_steps = 1
        if not chunks:
            mean = self._sampler.mean_tokens(is_drafting=is_drafting)
            num_steps = min(MAX_STEPS_AT_ONCE, math.ceil(int(left.min()) / mean))
        accepted = self._sampler.accepted(
            num_steps, self._request_ids[places], self._steps_done[places], is_drafting=is_drafting
        )
        gained = (accepted + 1).cumsum(axis=0)
        gained_by_all = gained.sum(axis=1)
        context = float((self._prompts[places] + self._received[places]).sum())
        before = context + np.concatenate([[0], gained_by_all[:-1]])
        prefill_tokens = sum(tokens for _, tokens in chunks)
        steps_s = self._sampler.steps_s(
            len(places), before, prefill_tokens, is_drafting=is_drafting
        )
        ends_s = self._now_s + steps_s.cumsum()
        count = self._steps_to_event(gained, left, gained_by_all, ends_s) if not chunks else 1
        self._deliver(places, np.minimum(gained[:count], left), ends_s[:count])
        self._now_s = float(ends_s[count - 1])
        if is_drafting:
            self._count(accepted[:count])

    def _deliver(self, places: IntArray, totals: IntArray, ends_s: FloatArray) -> None:
        """Hand out what a block of steps brought, up to the end of each answer."""
        self._log.add(ends_s, places, np.diff(totals, axis=0, prepend=0))
        self._received[places] += totals[-1]
        self._steps_done[places] += len(ends_s)
        self._add_generated(int(totals[-1].sum()))

    def _add_generated(self, num_tokens: int) -> None:
        self._num_generated += num_tokens
        self._kept_tokens += num_tokens

    def _steps_to_event(
        self, gained: IntArray, left: IntArray, gained_by_all: IntArray, ends_s: FloatArray
    ) -> int:
        """Cut a block after the first step in which a request ends, arrives, times out or has no room."""
        # Both queues are in the order of sending, so the first one running is the oldest.
        event_s = min(self._arrivals.next_s, self._running[0].sent_s + self._timeout_s)
        is_event = (gained >= left).any(axis=1) | (ends_s >= event_s)
        is_event |= gained_by_all > self._room_after_a_step()
        return int(is_event.argmax()) + 1 if is_event.any() else len(ends_s)

    def _count(self, accepted: IntArray) -> None:
        """Update the speculation counters; position i counts drafts with more than i accepted."""
        k = self._config.num_speculative_tokens
        self._num_drafts += accepted.size
        exactly = np.bincount(accepted.ravel(), minlength=k + 1)
        self._per_position += exactly[::-1].cumsum()[::-1][1:]

    def _retire(self) -> None:
        """End the requests that are done, or that their client gave up."""
        is_done = self._received >= self._wanted
        staying = []
        for flight, is_full in zip(
            self._running, is_done[[flight.place for flight in self._running]], strict=True
        ):
            if is_full or self._now_s > flight.sent_s + self._timeout_s:
                self._unseat(flight)
                self._end_on_time(flight)
            else:
                staying.append(flight)
        self._running = staying
        while self._waiting and self._now_s > self._waiting[0].sent_s + self._timeout_s:
            self._end_on_time(self._waiting.popleft())

    def _end_on_time(self, flight: Flight) -> None:
        """End a request as done, unless its client had given it up before."""
        deadline_s = flight.sent_s + self._timeout_s
        if self._now_s > deadline_s:
            self._end(flight, deadline_s, f"timeout after {self._timeout_s} s", "timeout")
        else:
            self._end(flight, self._now_s)

    def _end(
        self,
        flight: Flight,
        at_s: float,
        error: str | None = None,
        error_kind: str | None = None,
    ) -> None:
        followers = self._arrivals.ended(flight, at_s, is_failed=error is not None)
        _stream(flight, self._limits.stream_interval)
        self.records.append(flight.record(at_s, error, error_kind))
        for later in followers:
            self.records.append(later.record(at_s, "the turn before it failed", "previous_turn"))


def _stream(flight: Flight, interval: int) -> None:
    """Merge chunks as a server with ``--stream-interval`` does.

    The first token is sent at once, then whatever there is when at least `interval` tokens have come since;
    the answer's end is always sent.
    """
    if interval == 1 or not flight.tokens:
        return
    kept, place, last = [0], 0, len(flight.tokens) - 1
    while place < last:
        next_place = bisect_left(flight.tokens, flight.tokens[place] + interval, place + 1)
        if next_place > last and not flight.is_done:
            break
        place = min(next_place, last)
        kept.append(place)
    flight.times_s = [flight.times_s[i] for i in kept]
    flight.tokens = [flight.tokens[i] for i in kept]
