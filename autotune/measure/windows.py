"""Which part of a measurement counts, and how much of each request lies in it.

A measurement begins with slots that fill and ends with slots that stay empty; figures of both are of
another load than the one asked for. So throughputs come from a window that leaves both out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.measure.records import Measurement, RequestRecord

MIN_STEADY_RATIO = 0.25
"""Where the steady part is a smaller share of the measurement, the whole measurement counts."""
MIN_TURNED_RATIO = {True: 0.75, False: 0.5}
"""Share of the steady part that must be left to wait for the first completions as well, by closed
loop or not. A closed loop loses little without the wait (its slots are full, only in step with each
other), and has about five requests a slot when it can afford it; an open loop starts with an empty
server, which is a bias, so it pays more."""


@dataclass(frozen=True)
class Window:
    """The part of a measurement in which the load was what the profile asks for, in seconds."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Return how many seconds of a span lie inside."""
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))


def start_s(record: RequestRecord) -> float:
    """Return when the user's wait began: the scheduled time in open loop, else the send.

    Counting from the schedule charges a late send to the latency instead of hiding it
    (no coordinated omission).
    """
    return record.sent_s if record.scheduled_s is None else record.scheduled_s


def cycle_start_s(record: RequestRecord) -> float:
    """Return when a user of a closed loop turned to this request: its send, less the time to think.

    A user's cycle is thinking and waiting for the answer; the slot is taken for all of it.
    """
    return max(0.0, record.sent_s - record.think_s)


def steady_window(measurement: Measurement) -> Window:
    """Cut off the ramp-up and the drain.

    Closed loop: from the moment all slots are first taken until one stays empty for good. Open loop:
    from the first to the last arrival. In both the start moves on to the end of the requests that
    made up the ramp (in closed loop all but the last of those that first took the slots, in open loop
    those that arrived before the first completion) where enough is left then (`MIN_TURNED_RATIO`). Where the
    steady part is too short for anything (fewer requests than slots), the whole measurement counts.
    """
    records = measurement.records
    whole = Window(0.0, max((r.finished_s for r in records), default=0.0))
    if not records:
        return whole
    concurrency = measurement.concurrency
    if concurrency is None:
        arrivals = [start_s(r) for r in records]
        steady = Window(min(arrivals), max(arrivals))
        ramp_end_s = min(r.finished_s for r in records)
        ramp = [r for r in records if start_s(r) < ramp_end_s]
    else:
        steady = _full(records, concurrency)
        ramp = sorted(records, key=cycle_start_s)[: concurrency - 1]
    if steady.duration_s <= MIN_STEADY_RATIO * whole.duration_s:
        return whole
    turned_s = max((r.finished_s for r in ramp), default=steady.start_s)
    turned = Window(max(turned_s, steady.start_s), steady.end_s)
    is_long = turned.duration_s >= MIN_TURNED_RATIO[concurrency is not None] * steady.duration_s
    return turned if is_long else steady


def _full(records: Sequence[RequestRecord], concurrency: int) -> Window:
    """Return from when all slots were first taken to when the last time that they were ended."""
    # A completion at the very moment of a send made room for it, so completions come first.
    events = sorted(
        [(r.finished_s, -1) for r in records] + [(cycle_start_s(r), 1) for r in records]
    )
    taken, filled_s, emptied_s = 0, 0.0, 0.0
    is_filled = False
    for time_s, change in events:
        if change < 0 and taken >= concurrency:
            emptied_s = time_s
        taken += change
        if taken >= concurrency and not is_filled:
            filled_s, is_filled = time_s, True
    return Window(filled_s, emptied_s)


def tokens_in(record: RequestRecord, window: Window) -> int:
    """Count the output tokens whose chunk arrived inside the window, its start excluded."""
    before = _tokens_until(record, window.start_s)
    return max(_tokens_until(record, window.end_s) - before, 0)


def _tokens_until(record: RequestRecord, time_s: float) -> int:
    count = bisect_right(record.chunk_times_s, time_s)
    return record.chunk_tokens[count - 1] if count else 0


def share_in(record: RequestRecord, window: Window, *, is_closed_loop: bool) -> float:
    """Return the share of a request's time that lies inside the window, 0 to 1.

    In closed loop the time is the slot's cycle, in open loop from the arrival to the end. Summed over
    requests this counts requests without the jumps of counting completions: a window that just
    misses the end of a batch of answers does not lose all of them.
    """
    began_s = cycle_start_s(record) if is_closed_loop else start_s(record)
    took_s = record.finished_s - began_s
    if took_s <= 0:
        return float(window.start_s < record.finished_s <= window.end_s)
    return window.overlap_s(began_s, record.finished_s) / took_s
