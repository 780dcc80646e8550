"""What was observed: one record per request, counters of the server, and both as a measurement.

Raw data first: every figure that is shown is computed from these records by `autotune.measure.metrics`,
so a study can be re-analysed without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds after the measurement began."""

    request_id: int
    class_name: str
    prompt_id: str
    scheduled_s: float | None
    """When it was to be sent, in open loop; None in closed loop."""
    sent_s: float
    chunk_times_s: tuple[float, ...]
    """Arrival of each chunk that brought tokens."""
    chunk_tokens: tuple[int, ...]
    """Completion tokens received up to and including each chunk, by the server's own count."""
    finished_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str | None
    error: str | None = None
    """Why the request failed; None when it was answered in full."""
    error_kind: str | None = None
    """Sort of failure, for counting; one of `autotune.measure.client_worker.ERROR_KINDS`."""
    conversation_id: int | None = None
    """Conversation the request is a turn of; None: it stands alone."""
    turn: int = 0
    think_s: float = 0.0
    """Wait between the user's previous answer and this request, as the schedule asked for."""
    is_looping: bool = False
    """Whether the answer ended in a loop, see `autotune.measure.loops`."""
    output_text: str | None = None
    """The answer; kept only where the profile's `privacy` allows it."""

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.num_completion_tokens > 0


@dataclass(frozen=True)
class ServerCounters:
    """The server's own counters at one moment, or (after `minus`) over a span of time."""

    num_drafts: float = 0
    num_draft_tokens: float = 0
    num_accepted_tokens: float = 0
    num_accepted_tokens_per_pos: tuple[float, ...] = ()
    num_preemptions: float = 0
    num_prompt_tokens: float = 0
    num_generation_tokens: float = 0
    num_prefix_cache_queries: float = 0
    num_prefix_cache_hits: float = 0
    has_speculation: bool = False
    """Whether the server exports speculation counters at all."""

    def minus(self, earlier: ServerCounters) -> ServerCounters:
        """Return what was counted since `earlier`."""
        now, before = self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos
        before = before + (0,) * (len(now) - len(before))
        return ServerCounters(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(a - b for a, b in zip(now, before, strict=True)),
            num_preemptions=self.num_preemptions - earlier.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens - earlier.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens - earlier.num_generation_tokens,
            num_prefix_cache_queries=self.num_prefix_cache_queries
            - earlier.num_prefix_cache_queries,
            num_prefix_cache_hits=self.num_prefix_cache_hits - earlier.num_prefix_cache_hits,
            has_speculation=self.has_speculation,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, 1 + accepted / drafts, bonus token included; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_position_acceptance_rates(self) -> tuple[float, ...]:
        """P(the first i + 1 drafts are all accepted), for i = 0 to K - 1."""
        if not self.num_drafts:
            return ()
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)


@dataclass(frozen=True)
class ClientAudit:
    """Whether the load generator itself kept up; a measurement by a late client is not one."""

    send_lateness_p99_ms: float = 0.0
    """How late requests were sent against the schedule, open loop; 0 in closed loop."""
    cpu_ratio: float = 0.0
    """CPU seconds of the client per second, 1.0 = one core."""
    loop_lag_p99_ms: float = 0.0
    """How late the client's own event loop woke up from 5 ms sleeps."""
    num_chunks: int = 0
    """Chunks with tokens that were received."""
    chunks_per_read: float = 0.0
    """Mean number of events handed out by one read; well above 1 means reading lags behind."""


@dataclass(frozen=True)
class Measurement:
    """One schedule sent to one launched server."""

    schedule_digest: str
    concurrency: int | None
    """Requests in flight, closed loop; None in open loop."""
    started_at_s: float
    """Unix time of the start (virtual time where the engine is simulated)."""
    duration_s: float
    records: tuple[RequestRecord, ...]
    counters: ServerCounters
    """Counted over the measurement alone, warm-up excluded."""
    audit: ClientAudit = field(default_factory=ClientAudit)
    is_simulated: bool = False
    stopped_early: str | None = None
    """Why a hopeless run was cut off; its records are then those of the requests that ended in time.
    None for a whole measurement."""

    @property
    def num_errors(self) -> int:
        return sum(not record.is_ok for record in self.records)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that `measurement_from_dict` turns back into an equal measurement."""
        return asdict(self)


def measurement_from_dict(data: Mapping[str, Any]) -> Measurement:
    """Rebuild a measurement from `Measurement.as_dict`, also after a trip through JSON."""
    return Measurement(
        **{
            **data,
            "records": tuple(record_from_dict(row) for row in data["records"]),
            "counters": counters_from_dict(data["counters"]),
            "audit": ClientAudit(**data["audit"]),
        }
    )


def record_from_dict(row: Mapping[str, Any]) -> RequestRecord:
    """Rebuild a record whose tuples became lists in JSON."""
    return RequestRecord(
        **{
            **row,
            "chunk_times_s": tuple(row["chunk_times_s"]),
            "chunk_tokens": tuple(row["chunk_tokens"]),
        }
    )


def counters_from_dict(row: Mapping[str, Any]) -> ServerCounters:
    """Rebuild counters whose tuple became a list in JSON."""
    per_pos = tuple(row["num_accepted_tokens_per_pos"])
    return ServerCounters(**{**row, "num_accepted_tokens_per_pos": per_pos})
