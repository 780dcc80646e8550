"""What engines on a virtual clock share: passing time, playing measurements, adding up counters."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import fields

from autotune.measure.client import MeasurementStopped, OnRecord, ShouldStop
from autotune.measure.records import RequestRecord, ServerCounters
from autotune.serving.clock import Clock
from autotune.serving.flights import Arrivals, Flight
from autotune.traffic.schedule import Schedule

STOP_CHECK_S = 1.0
"""Virtual seconds between two questions whether to stop."""


def pass_time(
    clock: Clock, seconds: float, should_stop: ShouldStop | None = None, what: str = "measurement"
) -> None:
    """Let virtual time pass, asking about once a virtual second whether to stop.

    Raises:
        MeasurementStopped: `should_stop` said so.
    """
    left_s = seconds
    while True:
        if should_stop is not None and should_stop():
            raise MeasurementStopped(f"the {what} was stopped")
        if left_s <= 0:
            return
        step_s = left_s if should_stop is None else min(left_s, STOP_CHECK_S)
        clock.sleep(step_s)
        left_s -= step_s


def play(
    records: Iterable[RequestRecord],
    duration_s: float,
    clock: Clock,
    on_record: OnRecord | None = None,
    should_stop: ShouldStop | None = None,
) -> None:
    """Let a measurement happen on a virtual clock: each record is handed out as its request ends.

    Raises:
        MeasurementStopped: `should_stop` said so.
    """
    played_s = 0.0
    for record in sorted(records, key=lambda record: record.finished_s):
        pass_time(clock, record.finished_s - played_s, should_stop)
        played_s = record.finished_s
        if on_record is not None:
            on_record(record)
    pass_time(clock, duration_s - played_s, should_stop)


def answered(
    schedule: Schedule, *, ttft_s: float, tpot_s: float, seed: int = 0
) -> list[RequestRecord]:
    """Send a schedule to a server that answers all requests equally fast, and return the records.

    Closed loop, open loop, think times and conversations go as with the real client; no request fails.

    Args:
        schedule: what is sent; its warm-up is left out.
        ttft_s: seconds from a request to its first token.
        tpot_s: seconds between two tokens.
        seed: decides how long the answers are where they may end before `max_tokens`.
    """
    arrivals = Arrivals(schedule, schedule.requests, seed)
    records: list[RequestRecord] = []
    flying: list[tuple[float, int, Flight]] = []
    while True:
        end_s = flying[0][0] if flying else math.inf
        now_s = min(end_s, arrivals.next_s)
        if math.isinf(now_s):
            return records
        if end_s == now_s:
            _, _, flight = heapq.heappop(flying)
            arrivals.ended(flight, end_s, is_failed=False)
            records.append(flight.record(end_s, None))
        while (flight_or_none := arrivals.take(now_s)) is not None:
            flight = flight_or_none
            totals = list(range(1, flight.num_tokens + 1))
            first_s = flight.sent_s + ttft_s
            flight.take([first_s + tpot_s * (total - 1) for total in totals], totals)
            heapq.heappush(flying, (flight.times_s[-1], flight.request.request_id, flight))


def added(a: ServerCounters, b: ServerCounters) -> ServerCounters:
    """Add up what was counted in two spans of one server's life."""
    sums = {
        field.name: getattr(a, field.name) + getattr(b, field.name)
        for field in fields(ServerCounters)
        if field.name not in {"num_accepted_tokens_per_pos", "has_speculation"}
    }
    longer, shorter = sorted(
        (a.num_accepted_tokens_per_pos, b.num_accepted_tokens_per_pos), key=len, reverse=True
    )
    shorter = shorter + (0,) * (len(longer) - len(shorter))
    return ServerCounters(
        **sums,
        num_accepted_tokens_per_pos=tuple(x + y for x, y in zip(longer, shorter, strict=True)),
        has_speculation=a.has_speculation or b.has_speculation,
    )
