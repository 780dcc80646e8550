"""How a class's settings and what is said become one request."""

from __future__ import annotations

import random

from autotune.traffic.classes import TrafficClass
from autotune.traffic.fields import MAX_TOKENS
from autotune.traffic.prompts import Turn
from autotune.traffic.schedule import ScheduledRequest


def make_request(
    c: TrafficClass, turn: Turn, request_id: int, max_tokens: int, rng: random.Random
) -> ScheduledRequest:
    """Make a request that stands alone and has no time yet.

    Args:
        c: its class.
        turn: what is said, complete with prefix and context.
        request_id: unique in its schedule.
        max_tokens: most tokens of the answer; cut to what any model can do.
        rng: decides the sampling seed.
    """
    return ScheduledRequest(
        request_id=request_id,
        class_name=c.name,
        prompt=turn.prompt,
        max_tokens=min(max_tokens, MAX_TOKENS),
        temperature=c.sampling.temperature,
        top_p=c.sampling.top_p,
        ignore_eos=c.output.ignore_eos,
        sampling_seed=rng.getrandbits(31),
        arrival_s=None,
        is_live=turn.is_live,
        extra_body={**c.sampling.extra_body(), **c.extra_body},
    )
