"""The verdict on the client itself follows from its figures and from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.measure.audit import AuditLevel, audit_verdict
from autotune.measure.records import ClientAudit, Measurement, RequestRecord, ServerCounters


def record(ttft_ms: float, span_ms: float, num_chunks: int = 11) -> RequestRecord:
    """Make an answer with equal gaps: `num_chunks` chunks of one token over `span_ms`."""
    steps = max(num_chunks - 1, 1)
    times_s = [(ttft_ms + span_ms * index / steps) / 1e3 for index in range(num_chunks)]
    return RequestRecord(
        request_id=0,
        class_name="default",
        prompt_id="p",
        scheduled_s=None,
        sent_s=0.0,
        chunk_times_s=tuple(times_s),
        chunk_tokens=tuple(range(1, num_chunks + 1)),
        finished_s=times_s[-1],
        num_prompt_tokens=5,
        num_completion_tokens=num_chunks,
        finish_reason="length",
    )


USUAL = [record(100.0, 1000.0)] * 5
"""TTFT 100 ms, span 1,000 ms, gaps of 100 ms."""


def verdict(
    records: Sequence[RequestRecord] = tuple(USUAL), **figures: float
) -> tuple[AuditLevel, tuple[str, ...]]:
    measurement = Measurement(
        schedule_digest="d",
        concurrency=None,
        started_at_s=0.0,
        duration_s=1.0,
        records=tuple(records),
        counters=ServerCounters(),
        audit=ClientAudit(**{"chunks_per_read": 1.0, **figures}),
    )
    found = audit_verdict(measurement)
    return found.level, found.reasons


@pytest.mark.parametrize("records", [USUAL, []])
def test_a_measurement_without_a_client_is_ok(records: list[RequestRecord]) -> None:
    # Simulated and replayed measurements carry an audit of zeros.
    assert verdict(records, chunks_per_read=0.0) == (AuditLevel.OK, ())


@pytest.mark.parametrize(
    ("lateness_ms", "level"),
    [
        (2.5, AuditLevel.OK),
        (2.6, AuditLevel.WARN),
        (5.0, AuditLevel.WARN),
        (5.1, AuditLevel.INVALID),
    ],
)
def test_late_sends_with_a_short_ttft(lateness_ms: float, level: AuditLevel) -> None:
    # 5 % of 100 ms are 5 ms, no more than the 5 ms that always pass; half of it warns.
    assert verdict(send_lateness_p99_ms=lateness_ms)[0] is level


@pytest.mark.parametrize(
    ("lateness_ms", "level"),
    [(19.0, AuditLevel.OK), (39.0, AuditLevel.WARN), (41.0, AuditLevel.INVALID)],
)
def test_late_sends_with_a_long_ttft(lateness_ms: float, level: AuditLevel) -> None:
    # The median of 100, 800, 9000 ms is 800: 5 % are 40 ms, half of that 20 ms.
    records = [record(ttft_ms, 1000.0) for ttft_ms in (100.0, 9000.0, 800.0)]
    assert verdict(records, send_lateness_p99_ms=lateness_ms)[0] is level


@pytest.mark.parametrize(
    ("cpu_ratio", "level"),
    [
        (0.35, AuditLevel.OK),
        (0.36, AuditLevel.WARN),
        (0.70, AuditLevel.WARN),
        (0.71, AuditLevel.INVALID),
    ],
)
def test_cpu(cpu_ratio: float, level: AuditLevel) -> None:
    assert verdict(cpu_ratio=cpu_ratio)[0] is level


@pytest.mark.parametrize(
    ("ttft_ms", "span_ms", "limit_ms"),
    [
        (100.0, 1000.0, 5.0),  # 5 % of TTFT = 5 ms, 1 % of the span = 10 ms
        (20.0, 100.0, 5.0),  # 1 ms and 1 ms, but 5 ms always pass
        (1000.0, 2000.0, 20.0),  # 50 ms and 20 ms
        (400.0, 9000.0, 20.0),  # 20 ms and 90 ms
    ],
)
def test_lag_is_held_against_ttft_and_the_answers_span(
    ttft_ms: float, span_ms: float, limit_ms: float
) -> None:
    # Three chunks: gaps of half the span, at least 50 ms, whose 10 % are not below half the limit.
    records = [record(ttft_ms, span_ms, num_chunks=3)]
    granularity_ms = 1.1
    levels = [
        verdict(records, loop_lag_p99_ms=granularity_ms + limit_ms * share)[0]
        for share in (0.45, 0.55, 0.95, 1.05)
    ]
    assert levels == [AuditLevel.OK, AuditLevel.WARN, AuditLevel.WARN, AuditLevel.INVALID]


def test_lag_with_one_chunk_an_answer_is_held_against_ttft_alone() -> None:
    records = [record(400.0, 0.0, num_chunks=1)]
    assert verdict(records, loop_lag_p99_ms=20.0)[0] is AuditLevel.WARN
    assert verdict(records, loop_lag_p99_ms=22.0)[0] is AuditLevel.INVALID


def test_an_idle_loop_s_lateness_is_no_lag() -> None:
    # Gaps of 1 ms: any lag above 0.1 ms would be named.
    assert verdict([record(100.0, 10.0)], loop_lag_p99_ms=1.1) == (AuditLevel.OK, ())


def test_lag_that_shows_in_the_gaps_only_is_a_warning() -> None:
    # 101 chunks over 1,000 ms: gaps of 10 ms. 2.1 ms are 1 ms of lag, 10 % of a gap; 2.2 ms are more.
    records = [record(100.0, 1000.0, num_chunks=101)]
    assert verdict(records, loop_lag_p99_ms=2.09)[0] is AuditLevel.OK
    level, reasons = verdict(records, loop_lag_p99_ms=2.2)
    assert level is AuditLevel.WARN
    assert reasons == (
        "gaps between chunks (ICL, 10.00 ms) hold up to 1.10 ms of the client's own lag",
    )


def test_chunks_that_waited_to_be_read_are_a_warning() -> None:
    assert verdict(chunks_per_read=1.25)[0] is AuditLevel.OK
    level, (reason,) = verdict(chunks_per_read=1.5)
    assert level is AuditLevel.WARN
    assert reason.startswith("1.50 chunks came in one read")


def test_every_figure_out_of_order_is_a_reason() -> None:
    level, reasons = verdict(send_lateness_p99_ms=8.0, cpu_ratio=0.5, loop_lag_p99_ms=1.0)
    assert level is AuditLevel.INVALID
    assert reasons == (
        "the client's send lateness p99 of 8.00 ms is above its limit of 5.00 ms",
        "the client's CPU use of 0.50 cores is more than half its limit of 0.70 cores",
    )


def test_failed_requests_say_nothing_about_the_limits() -> None:
    failed = RequestRecord(
        request_id=1,
        class_name="default",
        prompt_id="p",
        scheduled_s=None,
        sent_s=0.0,
        chunk_times_s=(50.0,),
        chunk_tokens=(1,),
        finished_s=60.0,
        num_prompt_tokens=5,
        num_completion_tokens=1,
        finish_reason=None,
        error="timeout after 60 s",
        error_kind="timeout",
    )
    # With the failed ones' 50,000 ms, the median TTFT would let 2,500 ms pass.
    assert verdict([*USUAL, *[failed] * 20], send_lateness_p99_ms=6.0)[0] is AuditLevel.INVALID
    # With nothing answered, the least limits hold.
    assert verdict([failed], send_lateness_p99_ms=6.0)[0] is AuditLevel.INVALID
