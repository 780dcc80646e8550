"""The schedule: which request is sent when. One profile and seed give one schedule, always.

Every config of a study is measured with the same schedule, so that configs are compared on the
same requests (a paired design), and a result can be repeated from the profile and the seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from autotune.errors import invalid
from autotune.traffic.profile import ConcurrencyLoad, RateLoad, TrafficClass, TrafficProfile
from autotune.traffic.prompts import Prompt, load_prompts

MIN_WARMUP_REQUESTS = 2


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
    """Seconds after the start; None in closed loop, where the server's pace decides."""

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
        }


@dataclass(frozen=True)
class Schedule:
    """All requests of one measurement, and the warm-up requests sent and thrown away before it."""

    endpoint: str
    concurrency: int | None
    """Requests in flight at once, in closed loop; None in open loop."""
    requests: tuple[ScheduledRequest, ...]
    warmup: tuple[ScheduledRequest, ...]
    max_duration_s: float
    request_timeout_s: float

    @property
    def digest(self) -> str:
        """A hash of everything that is sent and when."""
        rows = [
            [r.request_id, r.class_name, r.arrival_s, r.body(self.endpoint)]
            for r in (*self.warmup, *self.requests)
        ]
        head = [self.endpoint, self.concurrency, self.max_duration_s, self.request_timeout_s]
        text = json.dumps([head, rows], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    @property
    def max_output_tokens(self) -> int:
        return max(request.max_tokens for request in self.requests)


def build_schedule(profile: TrafficProfile, seed: int | None = None) -> Schedule:
    """Draw the schedule of `profile`.

    Args:
        profile: a checked profile.
        seed: overrides the profile's own seed.

    Raises:
        InputError: a prompt file cannot be used, or has too few prompts.
    """
    rng = random.Random(profile.seed if seed is None else seed)
    # Classes that share a source share its pool, or one's warm-up would be the other's measurement.
    by_source = {c.prompts: _Pool.of(c, profile, rng) for c in reversed(profile.classes)}
    pools = {c.name: by_source[c.prompts] for c in profile.classes}
    num_warmup = _num_warmup(profile)
    warmup = _draw(profile, pools, num_warmup, rng, for_warmup=True)
    requests = _draw(profile, pools, profile.measure.min_requests, rng, for_warmup=False)
    concurrency = profile.load.concurrency if isinstance(profile.load, ConcurrencyLoad) else None
    return Schedule(
        endpoint=profile.endpoint,
        concurrency=concurrency,
        requests=_with_arrivals(requests, profile, rng),
        warmup=tuple(warmup),
        max_duration_s=profile.measure.max_duration_s,
        request_timeout_s=profile.measure.request_timeout_s,
    )


@dataclass
class _Pool:
    """A class's shuffled prompts: a part kept for the warm-up, the rest for measuring.

    The parts are disjoint, because a prompt seen in the warm-up would be answered from the prefix
    cache in the measurement.
    """

    warmup: list[Prompt]
    measured: list[Prompt]

    @classmethod
    def of(cls, traffic_class: TrafficClass, profile: TrafficProfile, rng: random.Random) -> _Pool:
        prompts = load_prompts(traffic_class.prompts, profile.folder)
        if len(prompts) < 2:
            raise invalid(
                "a class must have at least 2 distinct prompts, one of them for the warm-up",
                where=traffic_class.prompts.file or traffic_class.prompts.builtin,
                got=len(prompts),
                next_step="Add prompts; 100 or more a class make acceptance what your users see.",
            )
        rng.shuffle(prompts)
        num_warmup = max(1, len(prompts) // 5)
        return cls(prompts[:num_warmup], prompts[num_warmup:])


def _num_warmup(profile: TrafficProfile) -> int:
    if profile.measure.warmup_requests is not None:
        return profile.measure.warmup_requests
    return max(MIN_WARMUP_REQUESTS, 2 * (profile.offered_concurrency or 1))


def _draw(
    profile: TrafficProfile,
    pools: dict[str, _Pool],
    count: int,
    rng: random.Random,
    *,
    for_warmup: bool,
) -> list[ScheduledRequest]:
    classes = _class_sequence(profile.classes, count, rng)
    next_index = dict.fromkeys(pools, 0)
    drawn = []
    for number, traffic_class in enumerate(classes):
        pool = pools[traffic_class.name]
        prompts = pool.warmup if for_warmup else pool.measured
        prompt = prompts[next_index[traffic_class.name] % len(prompts)]
        next_index[traffic_class.name] += 1
        drawn.append(
            ScheduledRequest(
                request_id=number,
                class_name=traffic_class.name,
                prompt=prompt,
                max_tokens=traffic_class.output.max_tokens,
                temperature=traffic_class.sampling.temperature,
                top_p=traffic_class.sampling.top_p,
                ignore_eos=traffic_class.output.ignore_eos,
                sampling_seed=rng.getrandbits(31),
                arrival_s=None,
            )
        )
    return drawn


def _class_sequence(
    classes: tuple[TrafficClass, ...], count: int, rng: random.Random
) -> list[TrafficClass]:
    """Spread `count` requests over the classes by weight, with counts as even as they can be.

    Largest remainders instead of independent draws: a short measurement then holds the profile's
    mixture and not a lucky one.
    """
    total = sum(c.weight for c in classes)
    shares = [count * c.weight / total for c in classes]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(classes)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    sequence = [c for c, n in zip(classes, counts, strict=True) for _ in range(n)]
    rng.shuffle(sequence)
    return sequence


def _with_arrivals(
    requests: list[ScheduledRequest], profile: TrafficProfile, rng: random.Random
) -> tuple[ScheduledRequest, ...]:
    if not isinstance(profile.load, RateLoad):
        return tuple(requests)
    arrivals = _arrivals_s(profile.load, len(requests), rng)
    return tuple(
        ScheduledRequest(**{**vars(request), "arrival_s": arrival})
        for request, arrival in zip(requests, arrivals, strict=True)
    )


def _arrivals_s(load: RateLoad, count: int, rng: random.Random) -> list[float]:
    """Arrival times, the first at 0, rescaled so that the mean rate is exact for every seed.

    Without the rescaling two seeds of a short Poisson run differ by some per cent in rate, which
    would be read as a difference between configs (vLLM's own benchmark does the same).
    """
    if load.arrival == "constant":
        gaps = [1.0] * (count - 1)
    else:
        gaps = [rng.expovariate(1.0) for _ in range(count - 1)]
    scale = (count - 1) / load.rps / sum(gaps) if gaps else 0.0
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * scale)
    return arrivals
