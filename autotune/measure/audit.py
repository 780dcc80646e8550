"""Did the load generator keep up? A measurement by a client that could not is no measurement.

Each figure of the client's self-audit is held against what it does to TTFT and TPOT. Above its limit
the measurement is invalid; above half of it, it is doubtful. Where the limits come from:

* **Sends** late by more than 5 ms and 5 % of TTFT. (guidellm warns at 1 % of TTFT, aiperf calls a run
  degraded at 500 ms.)
* **CPU** above 70 % of a core. An event loop is a queue: near full use the waiting in it, which is read
  as the server's, grows without bound (arXiv 2605.24217).
* **Lag** of the event loop above 5 ms, and above the lesser of 5 % of TTFT and 1 % of the time from an
  answer's first chunk to its last. Lag makes chunks seem late: it adds to TTFT in full, but moves TPOT,
  (last - first) / tokens, by no more than lag / span, and by less on average, since both ends move.
  An idle loop already wakes `TIMER_GRANULARITY_MS` late, which is no lag and is taken off first. With
  vLLM beside it on an otherwise idle machine of two cores the p99 was 1.1 ms, at most 2.2 ms (72
  measurements, `tests/data/demo_grid.jsonl.gz`); with other work on both cores 7 to 95 ms.
* Gaps between chunks (ICL) take the lag in full. Above 10 % of the median gap that is said; TTFT and TPOT
  are still good.
* Several chunks in one read had to wait for the client, or were held back and sent together by a proxy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autotune.measure.metrics import ttft_ms
from autotune.measure.records import Measurement, RequestRecord

MAX_LATENESS_MS = 5.0
MAX_LATENESS_OF_TTFT_RATIO = 0.05
MAX_CPU_RATIO = 0.70
MAX_LAG_MS = 5.0
MAX_LAG_OF_TTFT_RATIO = 0.05
MAX_LAG_OF_SPAN_RATIO = 0.01
DOUBTFUL_RATIO = 0.5
"""Share of a limit above which a measurement is doubtful."""
TIMER_GRANULARITY_MS = 1.1
"""p99 by which an idle event loop wakes up late: epoll's timeouts are whole ms, rounded up."""
GAP_LAG_RATIO = 0.10
MAX_CHUNKS_PER_READ = 1.25


class AuditLevel(StrEnum):
    """Whether a measurement can be believed."""

    OK = "ok"
    WARN = "warn"
    INVALID = "invalid"


@dataclass(frozen=True)
class AuditVerdict:
    """What the audit of one measurement says."""

    level: AuditLevel
    reasons: tuple[str, ...]
    """One sentence for each figure that is not in order."""


@dataclass(frozen=True)
class _Check:
    """One figure of the audit and its limit."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def level(self) -> AuditLevel:
        if self.value > self.limit:
            return AuditLevel.INVALID
        is_doubtful = self.value > DOUBTFUL_RATIO * self.limit
        return AuditLevel.WARN if is_doubtful else AuditLevel.OK

    def __str__(self) -> str:
        word = "above its limit of" if self.value > self.limit else "more than half its limit of"
        return f"{self.name} {self.value:.2f}{self.unit} is {word} {self.limit:.2f}{self.unit}"


def audit_verdict(measurement: Measurement) -> AuditVerdict:
    """Judge whether the client kept up; a simulated measurement has nothing to judge and is ok."""
    audit = measurement.audit
    answered = [record for record in measurement.records if record.is_ok]
    ttfts_ms = [value for record in answered if (value := ttft_ms(record)) is not None]
    ttft_p50_ms = statistics.median(ttfts_ms) if ttfts_ms else 0.0
    lag_ms = max(0.0, audit.loop_lag_p99_ms - TIMER_GRANULARITY_MS)
    checks = (
        _Check(
            "the client's send lateness p99 of",
            audit.send_lateness_p99_ms,
            max(MAX_LATENESS_MS, MAX_LATENESS_OF_TTFT_RATIO * ttft_p50_ms),
            " ms",
        ),
        _Check("the client's CPU use of", audit.cpu_ratio, MAX_CPU_RATIO, " cores"),
        _Check(
            "the client's loop lag p99 of", lag_ms, _lag_limit_ms(answered, ttft_p50_ms), " ms"
        ),
    )
    levels = [check.level for check in checks]
    reasons = [str(c) for c, level in zip(checks, levels, strict=True) if level != AuditLevel.OK]
    notes = [*_gap_notes(answered, lag_ms), *_read_notes(audit.chunks_per_read)]
    if AuditLevel.INVALID in levels:
        level = AuditLevel.INVALID
    else:
        level = AuditLevel.WARN if reasons or notes else AuditLevel.OK
    return AuditVerdict(level, (*reasons, *notes))


def _lag_limit_ms(answered: list[RequestRecord], ttft_p50_ms: float) -> float:
    spans_ms = [
        (record.chunk_times_s[-1] - record.chunk_times_s[0]) * 1e3
        for record in answered
        if len(record.chunk_times_s) > 1
    ]
    of_ttft_ms = MAX_LAG_OF_TTFT_RATIO * ttft_p50_ms
    if not spans_ms:
        return max(MAX_LAG_MS, of_ttft_ms)
    return max(MAX_LAG_MS, min(of_ttft_ms, MAX_LAG_OF_SPAN_RATIO * statistics.median(spans_ms)))


def _gap_notes(answered: list[RequestRecord], lag_ms: float) -> Iterator[str]:
    gaps_ms = [
        (later - earlier) * 1e3
        for record in answered
        for earlier, later in pairwise(record.chunk_times_s)
    ]
    if not gaps_ms:
        return
    gap_ms = statistics.median(gaps_ms)
    if lag_ms > GAP_LAG_RATIO * gap_ms:
        yield (
            f"gaps between chunks (ICL, {gap_ms:.2f} ms) hold up to {lag_ms:.2f} ms of the client's "
            "own lag"
        )


def _read_notes(chunks_per_read: float) -> Iterator[str]:
    if chunks_per_read > MAX_CHUNKS_PER_READ:
        yield (
            f"{chunks_per_read:.2f} chunks came in one read: the client, or a proxy, held chunks back"
        )
