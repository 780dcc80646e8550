"""The loads of a search: short screens, and the calibration ladder inside the first launches.

A launch costs minutes and a measurement seconds, so the anchors are also measured at lower concurrencies:
that tells the cost model how a step's time grows with the batch, which one load alone cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.traffic.loads import StagesLoad, TraceLoad
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import Schedule

SCREEN_RATIO = 0.4
"""Requests of a screen, as a share of a full measurement's. Launching costs more than measuring, so much
shorter screens save little; finalists are measured in full."""
MIN_SCREEN_REQUESTS = 24
MIN_TAIL_REQUESTS = 60
"""Of every class with a p95 or p99 limit: with fewer than 59 the largest value alone decides a p95."""
MIN_REQUESTS_PER_SLOT = 3
"""Filling and draining the slots is most of a shorter measurement."""
MIN_RUNG_REQUESTS = 6
MIN_LADDER_CONCURRENCY = 4
"""Below it there is nothing between one user and the load itself."""
OPEN_LOOP_RUNGS = (1, 4, 16)


def screen_schedule(profile: TrafficProfile, schedule: Schedule) -> Schedule:
    """Return the schedule that candidates are screened with: the first requests of the full one.

    Stages and traces change over time, so a part of them would be another load: they stay whole.
    """
    if isinstance(profile.load, StagesLoad | TraceLoad):
        return schedule
    count = len(schedule.requests)
    wanted = max(
        math.ceil(SCREEN_RATIO * count),
        MIN_SCREEN_REQUESTS,
        MIN_REQUESTS_PER_SLOT * (schedule.concurrency or 1),
    )
    tailed = {
        c.name for c in profile.classes if any("p95" in name or "p99" in name for name in c.slo)
    }
    seen = dict.fromkeys(tailed, 0)
    for i, request in enumerate(schedule.requests):
        if request.class_name in seen:
            seen[request.class_name] += 1
        if i + 1 >= wanted and all(n >= MIN_TAIL_REQUESTS for n in seen.values()):
            return schedule.head(i + 1)
    return schedule


def ladder_schedules(schedule: Schedule, concurrency: int | None) -> tuple[Schedule, ...]:
    """Return short closed-loop schedules below the study's own load.

    Args:
        schedule: the study's; first turns of its requests are sent, without waits.
        concurrency: most requests in flight under the study's load; None where it has no bound.
    """
    if schedule.concurrency is not None:
        top = schedule.concurrency
        rungs: Sequence[int] = (1, round(math.sqrt(top))) if top >= MIN_LADDER_CONCURRENCY else ()
    else:
        rungs = tuple(c for c in OPEN_LOOP_RUNGS if concurrency is None or c <= concurrency)
    first_turns = [r for r in schedule.requests if r.turn == 0]
    return tuple(
        replace(
            schedule,
            concurrency=rung,
            requests=tuple(
                replace(r, arrival_s=None, conversation_id=None, think_s=0.0)
                for r in first_turns[: max(MIN_RUNG_REQUESTS, 2 * rung)]
            ),
            warmup=(),
        )
        for rung in dict.fromkeys(rungs)
    )
