"""What engines on a virtual clock share: passing time, playing measurements, adding up counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from autotune.measure.client import MeasurementStopped, OnRecord, ShouldStop
from autotune.measure.records import RequestRecord, ServerCounters
from autotune.serving.clock import Clock

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
