"""The load in the few numbers that queueing arithmetic needs: how many requests, how long, how often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.traffic.loads import RateLoad, StagesLoad, UsersLoad
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import Schedule, ScheduledRequest
from autotune.traffic.tokens import CHARS_PER_TOKEN, TokenCounter

STOPPED_RATIO = 0.8
"""Mean answer as a share of `max_tokens` where the model may stop by itself, until answers were seen."""
STOPPED_CV = 0.4
"""Coefficient of variation that stopping by itself gives to answers of one `max_tokens`."""


@dataclass(frozen=True)
class Lengths:
    """How long something is, in tokens."""

    mean_tokens: float
    p95_tokens: float
    cv: float
    """Coefficient of variation."""

    def scaled(self, ratio: float) -> Lengths:
        return replace(
            self, mean_tokens=self.mean_tokens * ratio, p95_tokens=self.p95_tokens * ratio
        )


@dataclass(frozen=True)
class ClassLoad:
    """Requests of one class."""

    name: str
    share: float
    """Of all requests, 0 to 1."""
    prompt: Lengths
    """What was said before included, in live conversations."""
    completion: Lengths


@dataclass(frozen=True)
class Workload:
    """What a study sends. Closed loop has `users`, open loop has `rate_rps`; never both."""

    classes: tuple[ClassLoad, ...]
    num_requests: int
    """Of one measurement; in closed loop the first `users` of them come all at once."""
    users: int | None = None
    think_s: float = 0.0
    """Mean wait of a user before each request, closed loop."""
    rate_rps: float | None = None
    arrival_cv2: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals, open loop; 1 is Poisson."""

    @classmethod
    def of(
        cls, profile: TrafficProfile, schedule: Schedule, counter: TokenCounter | None = None
    ) -> Workload:
        """Sum a schedule up.

        Args:
            profile: says the kind of load.
            schedule: of one measurement; without arrival times it is closed loop, whatever the profile says.
            counter: counts the prompts' tokens; four characters are one when omitted.
        """
        requests = schedule.requests
        sizes = _sizes(requests, counter)
        classes = tuple(
            _class_load(name, count / len(requests), sizes[name])
            for name, count in schedule.num_requests_of_class.items()
        )
        if schedule.concurrency is not None:
            think_s = float(np.mean([r.think_s for r in requests]))
            if isinstance(profile.load, UsersLoad):
                think_s = max(think_s, profile.load.think_time.mean_wait_s)
            return cls(classes, len(requests), users=schedule.concurrency, think_s=think_s)
        rate_rps, arrival_cv2 = _arrivals(profile, requests)
        return cls(classes, len(requests), rate_rps=rate_rps, arrival_cv2=arrival_cv2)

    def learnt(self, prompt_tokens: float | None, completion_tokens: float | None) -> Workload:
        """Return the workload with the mean lengths that measurements saw; None keeps the planned ones."""
        prompt = prompt_tokens / self.prompt_tokens if prompt_tokens else 1.0
        completion = completion_tokens / self.completion_tokens if completion_tokens else 1.0
        return replace(
            self,
            classes=tuple(
                replace(c, prompt=c.prompt.scaled(prompt), completion=c.completion.scaled(completion))
                for c in self.classes
            ),
        )  # fmt: skip

    @property
    def is_open_loop(self) -> bool:
        return self.users is None

    @property
    def prompt_tokens(self) -> float:
        """Mean over all requests."""
        return sum(c.share * c.prompt.mean_tokens for c in self.classes)

    @property
    def completion_tokens(self) -> float:
        """Mean over all requests."""
        return sum(c.share * c.completion.mean_tokens for c in self.classes)

    @property
    def completion_cv2(self) -> float:
        """Squared coefficient of variation over all requests, classes mixed."""
        mean = self.completion_tokens
        second = sum(
            c.share * c.completion.mean_tokens**2 * (1 + c.completion.cv**2) for c in self.classes
        )
        return max(second / mean**2 - 1, 0.0)


_Sizes = Mapping[str, Sequence[tuple[float, ScheduledRequest]]]


def _sizes(requests: Iterable[ScheduledRequest], counter: TokenCounter | None) -> _Sizes:
    """Return every request with its prompt's tokens, by class; a live turn holds those before it."""
    said: dict[int, float] = {}
    found: dict[str, list[tuple[float, ScheduledRequest]]] = {}
    for request in requests:
        tokens = float(_num_tokens(request, counter))
        if request.conversation_id is not None:
            if request.is_live:
                tokens += said.get(request.conversation_id, 0.0)
            said[request.conversation_id] = tokens + request.max_tokens * _answer_ratio(request)
        found.setdefault(request.class_name, []).append((tokens, request))
    return found


def _num_tokens(request: ScheduledRequest, counter: TokenCounter | None) -> int:
    if counter is not None and counter.is_exact:
        return max(sum(counter.count(text) for _, text in request.prompt.messages), 1)
    return max(-(-request.prompt.num_chars // CHARS_PER_TOKEN), 1)


def _answer_ratio(request: ScheduledRequest) -> float:
    return 1.0 if request.ignore_eos else STOPPED_RATIO


def _class_load(
    name: str, share: float, sizes: Sequence[tuple[float, ScheduledRequest]]
) -> ClassLoad:
    may_stop = any(not request.ignore_eos for _, request in sizes)
    answers = [request.max_tokens * _answer_ratio(request) for _, request in sizes]
    return ClassLoad(
        name,
        share,
        _lengths([tokens for tokens, _ in sizes]),
        _lengths(answers, STOPPED_CV if may_stop else 0.0),
    )


def _lengths(tokens: Sequence[float], extra_cv: float = 0.0) -> Lengths:
    mean = float(np.mean(tokens))
    return Lengths(
        mean, float(np.percentile(tokens, 95)), math.hypot(float(np.std(tokens)) / mean, extra_cv)
    )


def _arrivals(
    profile: TrafficProfile, requests: Sequence[ScheduledRequest]
) -> tuple[float, float]:
    """Return requests per second, and the squared coefficient of variation of their gaps."""
    load = profile.load
    times = np.sort([r.arrival_s for r in requests if r.arrival_s is not None])
    gaps = np.diff(times)
    span_s = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    per_arrival = len(requests) / max(
        len(times), 1
    )  # later turns come without a time of their own
    if isinstance(load, RateLoad):
        if load.arrival == "constant":
            cv2 = 0.0
        else:
            cv2 = 1 / load.burstiness if load.burstiness is not None else 1.0
        return load.rps * per_arrival, cv2
    if isinstance(load, StagesLoad):
        span_s = load.duration_s
    cv2 = float(np.var(gaps) / np.mean(gaps) ** 2) if len(gaps) > 1 and span_s > 0 else 1.0
    return len(requests) / max(span_s, 1e-3), cv2
