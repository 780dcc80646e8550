"""Definitions of every figure Autotune shows, computed from raw records.

Sources of the definitions: TTFT, E2EL and acceptance as vLLM defines them. TPOT leaves out the
tokens of the first chunk, as aiperf does: (t_last - t_first) / (n_last - n_first). With one token
in the first chunk that is vLLM's own formula; under speculation the first chunk may hold more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.measure.records import Measurement, RequestRecord

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = ("ttft", "tpot", "e2el")
THROUGHPUTS = ("output_throughput_tps", "request_throughput_rps", "goodput_tps", "goodput_rps")
_LATENCY_NAME = re.compile(r"(ttft|tpot|e2el)_(mean|p50|p90|p95|p99)_ms")

FloatArray = npt.NDArray[np.float64]
Limits = Mapping[str, Mapping[str, float]]
"""Limits by class name, then by metric name, such as ``{"chat": {"ttft_p95_ms": 500.0}}``."""


def start_s(record: RequestRecord) -> float:
    """Return when the user's wait began: the scheduled time in open loop, else the send.

    Counting from the schedule charges a late send to the latency instead of hiding it
    (no coordinated omission).
    """
    return record.sent_s if record.scheduled_s is None else record.scheduled_s


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to the first chunk with tokens, in ms; None when there was none."""
    return (record.chunk_times_s[0] - start_s(record)) * 1e3 if record.chunk_times_s else None


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first chunk, in ms; None when nothing came after it."""
    if not record.chunk_times_s:
        return None
    num_tokens = record.chunk_tokens[-1] - record.chunk_tokens[0]
    span_s = record.chunk_times_s[-1] - record.chunk_times_s[0]
    return span_s / num_tokens * 1e3 if num_tokens > 0 else None


def e2el_ms(record: RequestRecord) -> float | None:
    """Time to the last chunk with tokens, in ms; None when there was none."""
    return (record.chunk_times_s[-1] - start_s(record)) * 1e3 if record.chunk_times_s else None


_OF_RECORD = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2el_ms}


@dataclass(frozen=True)
class Window:
    """The part of a measurement in which the load was what the profile asks for, in seconds."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def steady_window(measurement: Measurement) -> Window:
    """Cut off the ramp-up and the drain.

    Closed loop: from the moment all slots were first filled until the first one stays empty, which
    is the first completion after the last send. Open loop: from the first to the last arrival.
    Where that leaves nothing (fewer requests than slots), the whole measurement counts.
    """
    records = measurement.records
    whole = Window(0.0, max((r.finished_s for r in records), default=0.0))
    if not records:
        return whole
    if measurement.concurrency is None:
        arrivals = [start_s(r) for r in records]
        return _or_whole(Window(min(arrivals), max(arrivals)), whole)
    sends = sorted(r.sent_s for r in records)
    filled = sends[min(measurement.concurrency, len(sends)) - 1]
    # A completion at the very moment of the last send made room for it.
    after = [r.finished_s for r in records if r.finished_s > sends[-1]]
    first_empty = min(after, default=whole.end_s)
    return _or_whole(Window(filled, first_empty), whole)


def _or_whole(window: Window, whole: Window) -> Window:
    """Fall back to the whole span where the steady part is under a quarter of it."""
    return window if window.duration_s > 0.25 * whole.duration_s else whole


def tokens_in(record: RequestRecord, window: Window) -> int:
    """Count the output tokens whose chunk arrived inside the window."""
    before = inside = 0
    for time_s, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=True):
        if time_s <= window.start_s:
            before = tokens
        if time_s <= window.end_s:
            inside = tokens
    return max(inside - before, 0)


def meets_limits(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether one request kept each of its class's limits; a failed request keeps none."""
    if not record.is_ok:
        return False
    for name, limit in limits.items():
        value = _OF_RECORD[name.split("_")[0]](record)
        if value is not None and value > limit:
            return False
    return True


@dataclass(frozen=True)
class Samples:
    """Per-request arrays of one measurement, aligned by index, for fast resampling."""

    prompt_ids: tuple[str, ...]
    request_ids: tuple[int, ...]
    is_ok: npt.NDArray[np.bool_]
    is_good: npt.NDArray[np.bool_]
    tokens: FloatArray
    busy_s: FloatArray
    ttft_ms: FloatArray
    tpot_ms: FloatArray
    e2el_ms: FloatArray
    """Shape (n,), NaN where a request has no such value."""

    def __len__(self) -> int:
        return len(self.prompt_ids)


def samples_of(measurement: Measurement, limits: Limits | None = None) -> Samples:
    """Turn a measurement's records, ordered by request id, into arrays."""
    records = sorted(measurement.records, key=lambda r: r.request_id)
    limits = limits or {}
    columns: dict[str, FloatArray] = {
        f"{name}_ms": np.array([_nan(of(r)) for r in records], dtype=np.float64)
        for name, of in _OF_RECORD.items()
    }
    return Samples(
        prompt_ids=tuple(r.prompt_id for r in records),
        request_ids=tuple(r.request_id for r in records),
        is_ok=np.array([r.is_ok for r in records], dtype=bool),
        is_good=np.array(
            [meets_limits(r, limits.get(r.class_name, {})) for r in records], dtype=bool
        ),
        tokens=np.array([r.num_completion_tokens for r in records], dtype=np.float64),
        busy_s=np.array([r.finished_s - r.sent_s for r in records], dtype=np.float64),
        **columns,
    )


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def estimate(name: str, samples: Samples, index: npt.NDArray[np.intp] | None = None) -> float:
    """Compute one metric from per-request samples, up to a constant factor for throughputs.

    A throughput is given per busy slot-second: sum of tokens over sum of the time requests were in
    flight. In closed loop, multiplied by the concurrency, that is the throughput of the server; as
    a ratio of sums over requests it can be resampled, which a window count cannot. Ratios between
    configs need no factor.

    Args:
        name: a metric of the glossary.
        samples: the requests.
        index: which requests to use, shape (m,), repeats allowed; all when omitted.
    """
    pick = slice(None) if index is None else index
    latency = _LATENCY_NAME.fullmatch(name)
    if latency:
        values: FloatArray = getattr(samples, f"{latency[1]}_ms")[pick]
        return _statistic(values[np.isfinite(values)], latency[2])
    weight = samples.is_good[pick] if name.startswith("goodput") else samples.is_ok[pick]
    amount = samples.tokens[pick] if name.endswith("_tps") else np.ones(len(weight))
    busy_s = float(samples.busy_s[pick].sum())
    return float((amount * weight).sum()) / busy_s if busy_s > 0 else float("nan")


def _statistic(values: FloatArray, statistic: str) -> float:
    if len(values) == 0:
        return float("nan")
    if statistic == "mean":
        return float(values.mean())
    return float(np.percentile(values, float(statistic[1:])))


def observed(name: str, measurement: Measurement, limits: Limits | None = None) -> float:
    """Compute one metric of a whole measurement as it is shown, throughputs over the steady window."""
    if name not in THROUGHPUTS:
        return estimate(name, samples_of(measurement))
    window = steady_window(measurement)
    if window.duration_s <= 0:
        return float("nan")
    counted = [
        r
        for r in measurement.records
        if r.is_ok
        and (
            not name.startswith("goodput") or meets_limits(r, (limits or {}).get(r.class_name, {}))
        )
    ]
    if name.endswith("_tps"):
        return sum(tokens_in(r, window) for r in counted) / window.duration_s
    finished = [r for r in counted if window.start_s < r.finished_s <= window.end_s]
    return len(finished) / window.duration_s


def summarize(measurement: Measurement, limits: Limits | None = None) -> dict[str, float | None]:
    """Compute every metric of the glossary; None where nothing defines it."""
    names = [*THROUGHPUTS, *(f"{m}_{s}_ms" for m in LATENCIES for s in STATISTICS)]
    samples = samples_of(measurement, limits)
    values: dict[str, float | None] = {}
    for name in names:
        value = (
            observed(name, measurement, limits) if name in THROUGHPUTS else estimate(name, samples)
        )
        values[name] = value if np.isfinite(value) else None
    values["acceptance_length"] = measurement.counters.acceptance_length
    values["acceptance_rate"] = measurement.counters.acceptance_rate
    return values


def violations(measurement: Measurement, limits: Limits) -> dict[str, float]:
    """Return each limit's relative violation, (observed - limit) / limit; above 0 means violated.

    Requests that failed count as the worst latency, so dropping the slow ones cannot help. The
    keys are ``<class>.<limit>``.
    """
    found: dict[str, float] = {}
    for class_name, class_limits in limits.items():
        of_class = [r for r in measurement.records if r.class_name == class_name]
        for name, limit in class_limits.items():
            value = _with_failures_last(of_class, name)
            found[f"{class_name}.{name}"] = (value - limit) / limit
    return found


def worst_violation(
    measurements: Sequence[Measurement], limits: Limits
) -> tuple[str, float] | None:
    """Return the limit with the largest violation, averaged over measurements, and that violation.

    Returns:
        None where there are no limits.
    """
    by_limit: dict[str, list[float]] = {}
    for measurement in measurements:
        for name, value in violations(measurement, limits).items():
            by_limit.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in by_limit.items()}
    return max(means.items(), key=lambda item: item[1], default=None)


WORST_LATENCY_MS = 1e9
"""Stands for "never answered" in percentiles, because Optuna refuses infinite constraint values."""


def _with_failures_last(records: Iterable[RequestRecord], name: str) -> float:
    metric, statistic, _ = name.split("_")
    values = [
        WORST_LATENCY_MS if not r.is_ok else value
        for r in records
        if (value := _OF_RECORD[metric](r)) is not None or not r.is_ok
    ]
    return _statistic(np.array(values, dtype=np.float64), statistic) if values else 0.0


def pooled_acceptance(measurements: Sequence[Measurement]) -> tuple[float, ...]:
    """Pool the prefix survivals of several measurements of one drafter, weighted by drafts."""
    longest = max((len(m.counters.num_accepted_tokens_per_pos) for m in measurements), default=0)
    pooled = []
    for position in range(longest):
        deep = [
            m.counters
            for m in measurements
            if len(m.counters.num_accepted_tokens_per_pos) > position
        ]
        drafts = sum(c.num_drafts for c in deep)
        accepted = sum(c.num_accepted_tokens_per_pos[position] for c in deep)
        pooled.append(accepted / drafts if drafts else 0.0)
    return tuple(pooled)
