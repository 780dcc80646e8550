"""From a profile and a seed to the one schedule that every config is measured with."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from autotune.traffic.arrivals import rate_arrivals_s, stage_arrivals_s, think_time_s
from autotune.traffic.content import Content
from autotune.traffic.lengths import LengthSequence
from autotune.traffic.loads import ConcurrencyLoad, RateLoad, StagesLoad, TraceLoad, UsersLoad
from autotune.traffic.mixture import class_sequence
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.replaying import Replay
from autotune.traffic.requests import make_request
from autotune.traffic.schedule import Schedule, ScheduledRequest
from autotune.traffic.tokens import EstimatedTokens, TokenCounter
from autotune.traffic.trace import load_trace

MIN_WARMUP_REQUESTS = 2


def build_schedule(
    profile: TrafficProfile,
    seed: int | None = None,
    *,
    counter: TokenCounter | None = None,
    part: Part = Part.SEARCH,
) -> Schedule:
    """Draw the schedule of `profile`.

    Args:
        profile: a checked profile.
        seed: overrides the profile's own seed.
        counter: measures tokens where lengths are asked for; an estimate when omitted.
        part: for the search, or on the prompts held out from it.

    Raises:
        InputError: a file cannot be used, or has too few prompts.
    """
    seed = profile.seed if seed is None else seed
    rng = random.Random(seed)
    load = profile.load
    trace = load_trace(load, profile.folder, seed) if isinstance(load, TraceLoad) else None
    content = Content(profile, seed, rng, counter or EstimatedTokens(), part, trace)
    if trace is not None:
        replay = Replay(profile, content, trace, seed, rng)
        warmup, requests = replay.warmup(_num_warmup(profile)), replay.requests()
    else:
        drawing = _Drawing(profile, content, seed, rng)
        warmup = drawing.requests(_num_warmup(profile), for_warmup=True)
        requests = drawing.timed(drawing.requests(profile.num_requests or 0))
    sent = requests
    if not profile.is_closed_loop:
        sent = _without_late_turns(requests, profile.measure.max_duration_s)
    notes = [*content.notes(), *(trace.notes if trace is not None else ())]
    if len(sent) < len(requests):
        notes.append(
            f"{len(requests) - len(sent)} later turns are left out: after their recorded waits "
            "they would come later than measure.max_duration_s"
        )
    return Schedule(
        endpoint=profile.endpoint,
        concurrency=profile.num_users,
        requests=tuple(sent),
        warmup=tuple(warmup),
        max_duration_s=profile.measure.max_duration_s,
        request_timeout_s=profile.measure.request_timeout_s,
        prompt_realism=content.realism,
        allows_late_client=profile.measure.late_client == "warn",
        keeps_outputs=profile.privacy.store_outputs,
        notes=tuple(notes),
    )


def _num_warmup(profile: TrafficProfile) -> int:
    warmup = profile.measure.warmup
    if warmup != "auto":
        return warmup
    return max(MIN_WARMUP_REQUESTS, 2 * (profile.offered_concurrency or 1))


class _Drawing:
    """Requests that no trace gives, in the making."""

    def __init__(
        self, profile: TrafficProfile, content: Content, seed: int, rng: random.Random
    ) -> None:
        self._profile = profile
        self._content = content
        self._seed = seed
        self._rng = rng

    def requests(self, count: int, *, for_warmup: bool = False) -> list[ScheduledRequest]:
        """Draw `count` conversations, spread over the classes by weight.

        Of a conversation the warm-up has the first turn alone.
        """
        classes = class_sequence(self._profile.classes, count, self._rng)
        lengths = {
            c.name: LengthSequence(
                c,
                self._profile.folder,
                random.Random(f"{self._seed} lengths {c.name} {for_warmup}"),
            )
            for c in self._profile.classes
        }
        next_index = dict.fromkeys((c.name for c in self._profile.classes), 0)
        drawn: list[ScheduledRequest] = []
        for number, c in enumerate(classes):
            index = next_index[c.name]
            next_index[c.name] += 1
            turns = self._content.conversation(c, index, for_warmup=for_warmup).turns
            input_tokens, output_tokens = lengths[c.name].next()
            for place, turn in enumerate(turns[:1] if for_warmup else turns):
                prompt = turn.prompt
                if input_tokens is not None:
                    # Warm-up and measurement must not begin alike.
                    key = f"warm-up {number}" if for_warmup else f"{number}"
                    prompt = self._content.fitted(c, prompt, input_tokens, key)
                if not turn.is_live:
                    prompt = self._content.prefixed(c, prompt, index)
                max_tokens = output_tokens or c.output.limit(turn.max_tokens)
                request = make_request(
                    c, replace(turn, prompt=prompt), len(drawn), max_tokens, self._rng
                )
                if len(turns) > 1 and not for_warmup:
                    request = replace(
                        request,
                        conversation_id=number,
                        turn=place,
                        think_s=turn.gap_s if place else 0.0,
                    )
                drawn.append(request)
        return drawn

    def timed(self, requests: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Say when each request is sent, as the load wants it."""
        load = self._profile.load
        if isinstance(load, ConcurrencyLoad):  # at full load nobody waits
            return [replace(r, think_s=0.0) for r in requests]
        if isinstance(load, UsersLoad):
            rng = random.Random(f"{self._seed} think")
            return [replace(r, think_s=think_time_s(load.think_time, rng)) for r in requests]
        num_arrivals = sum(r.turn == 0 for r in requests)
        assert isinstance(load, RateLoad | StagesLoad)  # a trace has its own times
        arrivals = iter(
            rate_arrivals_s(load, num_arrivals, self._rng)
            if isinstance(load, RateLoad)
            else stage_arrivals_s(load, self._rng)
        )
        return [replace(r, arrival_s=next(arrivals)) if r.turn == 0 else r for r in requests]


def _without_late_turns(
    requests: Iterable[ScheduledRequest], max_duration_s: float
) -> list[ScheduledRequest]:
    """Leave out turns that would come too late even if every answer took no time."""
    earliest_s: dict[int, float] = {}
    kept: list[ScheduledRequest] = []
    for request in requests:
        number = request.conversation_id
        if number is not None:
            before_s = earliest_s.get(number, request.arrival_s or 0.0)
            earliest_s[number] = before_s + request.think_s
            if earliest_s[number] > max_duration_s:
                continue
        kept.append(replace(request, request_id=len(kept)))
    return kept
