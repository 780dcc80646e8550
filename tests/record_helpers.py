"""Records and measurements by hand, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.measure.records import Measurement, RequestRecord, ServerCounters


def record(
    request_id: int,
    sent_s: float,
    chunks: Sequence[tuple[float, int]],
    finished_s: float,
    *,
    scheduled_s: float | None = None,
    class_name: str = "chat",
    prompt_id: str | None = None,
    error: str | None = None,
    error_kind: str | None = None,
    conversation_id: int | None = None,
    turn: int = 0,
    think_s: float = 0.0,
) -> RequestRecord:
    """Make a record; `chunks` are (arrival, tokens so far)."""
    return RequestRecord(
        request_id=request_id,
        class_name=class_name,
        prompt_id=f"p{request_id}" if prompt_id is None else prompt_id,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        chunk_times_s=tuple(time_s for time_s, _ in chunks),
        chunk_tokens=tuple(tokens for _, tokens in chunks),
        finished_s=finished_s,
        num_prompt_tokens=10,
        num_completion_tokens=chunks[-1][1] if chunks else 0,
        finish_reason="stop",
        error=error,
        error_kind=error_kind,
        conversation_id=conversation_id,
        turn=turn,
        think_s=think_s,
    )


def measurement(
    *records: RequestRecord, concurrency: int | None = 2, counters: ServerCounters | None = None
) -> Measurement:
    """Put records into a measurement; `concurrency` None is open loop."""
    return Measurement(
        schedule_digest="0123456789abcdef",
        concurrency=concurrency,
        started_at_s=1_700_000_000.0,
        duration_s=max((r.finished_s for r in records), default=0.0),
        records=records,
        counters=counters or ServerCounters(),
    )
