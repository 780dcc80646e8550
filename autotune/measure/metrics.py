"""Definitions of every figure Autotune shows, computed from raw records.

Sources of the definitions: TTFT, E2EL and acceptance as vLLM defines them. TPOT leaves out the
tokens of the first chunk, as aiperf does: (t_last - t_first) / (n_last - n_first). With one token
in the first chunk that is vLLM's own formula; under speculation the first chunk may hold more.
ICL is the gap between two chunks, whatever they hold: what a reader feels as stutter. Other tools
call it ITL; under speculation it is not a time per token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autotune.measure.records import Measurement, RequestRecord
from autotune.measure.windows import (
    cycle_start_s,
    share_in,
    start_s,
    steady_window,
    tokens_in,
)

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
ICL_STATISTICS = ("p50", "p95", "p99", "max")
"""No mean: it would be read as a time per token, which it is not."""
LATENCIES = ("ttft", "tpot", "e2el")
THROUGHPUTS = ("output_throughput_tps", "request_throughput_rps", "goodput_tps", "goodput_rps")
THROUGHPUT_OF_GOODPUT = {
    "goodput_tps": "output_throughput_tps",
    "goodput_rps": "request_throughput_rps",
}
ATTAINMENT = "slo_attainment_ratio"
_LATENCY_NAME = re.compile(r"(ttft|tpot|e2el|icl)_(mean|p50|p90|p95|p99|max)_ms")

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]
Limits = Mapping[str, Mapping[str, float]]
"""Limits by class name, then by metric name, such as ``{"chat": {"ttft_p95_ms": 500.0}}``."""


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


def icl_ms(record: RequestRecord) -> FloatArray:
    """Gaps between the chunks of one answer, in ms, shape (chunks - 1,)."""
    return np.diff(np.array(record.chunk_times_s, dtype=np.float64)) * 1e3


_OF_RECORD = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2el_ms}


@dataclass(frozen=True)
class Latency:
    """A latency metric's name, taken apart."""

    metric: str
    """One of ttft, tpot, e2el, icl."""
    statistic: str
    """mean, max, or a percentile such as p95."""

    @property
    def percentile(self) -> float | None:
        """As a percentage; None for mean and max."""
        return float(self.statistic[1:]) if self.statistic[1:].isdigit() else None


def latency_of(name: str) -> Latency | None:
    """Take a metric's name apart, such as ``ttft_p95_ms``; None where it names no latency."""
    found = _LATENCY_NAME.fullmatch(name)
    return Latency(found[1], found[2]) if found else None


def meets_limits(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether one request kept each of its class's limits; a failed request keeps none.

    A request has one TTFT, TPOT and E2EL, so the limit's statistic plays no part there. It has many
    gaps between chunks: an ICL limit is on that statistic of its own gaps.
    """
    if not record.is_ok:
        return False
    for name, limit in limits.items():
        metric, statistic, _ = name.split("_")
        if metric == "icl":
            gaps = icl_ms(record)
            value = _statistic(gaps, statistic) if len(gaps) else None
        else:
            value = _OF_RECORD[metric](record)
        if value is not None and value > limit:
            return False
    return True


@dataclass(frozen=True)
class Samples:
    """Per-request arrays of one measurement, aligned by index, for fast resampling.

    All arrays have shape (n,) and go by request id. NaN stands where a request has no such value.
    """

    records: tuple[RequestRecord, ...]
    clusters: tuple[str, ...]
    """What makes requests depend on each other: the prompt, in a conversation that of its first turn."""
    classes: tuple[str, ...]
    is_ok: BoolArray
    is_good: BoolArray
    """Whether the request kept every limit of its class."""
    window_tokens: FloatArray
    """Tokens that came inside the steady window."""
    window_share: FloatArray
    """Share of the request's time that lies inside it, see `autotune.measure.windows.share_in`."""
    window_slot_s: FloatArray
    """The request's part of the window; over all requests they sum to the window's length."""
    ttft_ms: FloatArray
    tpot_ms: FloatArray
    e2el_ms: FloatArray

    def __len__(self) -> int:
        return len(self.records)

    @property
    def is_open_loop(self) -> bool:
        return any(record.scheduled_s is not None for record in self.records)

    @cached_property
    def icl(self) -> tuple[FloatArray, IntArray]:
        """All gaps between chunks in ms, and the index of the request that each belongs to."""
        gaps = [icl_ms(record) for record in self.records]
        owners = np.repeat(np.arange(len(gaps)), [len(g) for g in gaps])
        return np.concatenate([*gaps, np.empty(0)]), owners


def samples_of(measurement: Measurement, limits: Limits | None = None) -> Samples:
    """Turn a measurement's records, ordered by request id, into arrays."""
    records = tuple(sorted(measurement.records, key=lambda r: r.request_id))
    limits = limits or {}
    window = steady_window(measurement)
    is_closed_loop = measurement.concurrency is not None
    latencies: dict[str, FloatArray] = {
        f"{name}_ms": np.array([_nan(of(r)) for r in records], dtype=np.float64)
        for name, of in _OF_RECORD.items()
    }
    shares = np.array(
        [share_in(r, window, is_closed_loop=is_closed_loop) for r in records], dtype=np.float64
    )
    # In closed loop the window's time is shared among the slots' requests; in open loop arrivals are
    # given, and each one inside brings the same share of it.
    slots_s = np.array(
        [window.start_s <= start_s(r) <= window.end_s for r in records], dtype=np.float64
    )
    if is_closed_loop:
        slots_s = np.array(
            [window.overlap_s(cycle_start_s(r), r.finished_s) for r in records], dtype=np.float64
        )
    total_s = float(slots_s.sum())
    return Samples(
        records=records,
        clusters=_clusters(records),
        classes=tuple(r.class_name for r in records),
        is_ok=np.array([r.is_ok for r in records], dtype=bool),
        is_good=np.array(
            [meets_limits(r, limits.get(r.class_name, {})) for r in records], dtype=bool
        ),
        window_tokens=np.array([tokens_in(r, window) for r in records], dtype=np.float64),
        window_share=shares,
        window_slot_s=slots_s * (window.duration_s / total_s if total_s > 0 else 0.0),
        **latencies,
    )


def _clusters(records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """Name each request's cluster.

    A conversation goes by the prompt of its first turn, so that two runs of one script count as one.
    """
    first: dict[int, RequestRecord] = {}
    for record in records:
        if record.conversation_id is not None:
            known = first.setdefault(record.conversation_id, record)
            if record.turn < known.turn:
                first[record.conversation_id] = record
    return tuple(
        r.prompt_id if r.conversation_id is None else first[r.conversation_id].prompt_id
        for r in records
    )


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def quotient_parts(name: str, samples: Samples) -> tuple[FloatArray, FloatArray]:
    """Return two columns, shape (n,), so that the metric is the sum of the first over the second's.

    Every throughput, mean and ratio is such a quotient, which is what makes them easy to resample:
    drawing requests is weighting both columns.
    """
    latency = latency_of(name)
    if latency is not None:
        values: FloatArray = getattr(samples, f"{latency.metric}_ms")
        is_known = np.isfinite(values)
        return np.where(is_known, values, 0.0), is_known.astype(np.float64)
    if name == ATTAINMENT:
        return samples.is_good.astype(np.float64), np.ones(len(samples))
    is_counted = samples.is_good if name.startswith("goodput") else samples.is_ok
    amount = samples.window_tokens if name.endswith("_tps") else samples.window_share
    return amount * is_counted, samples.window_slot_s


def values_of(latency: Latency, samples: Samples) -> tuple[FloatArray, IntArray]:
    """Return the values that a percentile is taken of, and the index of the request of each."""
    if latency.metric == "icl":
        return samples.icl
    values: FloatArray = getattr(samples, f"{latency.metric}_ms")
    (known,) = np.nonzero(np.isfinite(values))
    return values[known], known


def estimate(name: str, samples: Samples) -> float:
    """Compute one metric; NaN where nothing defines it.

    Throughputs are those of the steady window. Latencies are of the requests that have one; in
    limits, failed requests count as well (`violations`).

    Args:
        name: a metric of the glossary.
        samples: the requests.
    """
    latency = latency_of(name)
    if latency is not None and (latency.statistic != "mean" or latency.metric == "icl"):
        return _statistic(values_of(latency, samples)[0], latency.statistic)
    top, bottom = (float(column.sum()) for column in quotient_parts(name, samples))
    return top / bottom if bottom > 0 else float("nan")


def _statistic(values: FloatArray, statistic: str) -> float:
    if len(values) == 0:
        return float("nan")
    if statistic == "mean":
        return float(values.mean())
    return float(np.percentile(values, 100.0 if statistic == "max" else float(statistic[1:])))


def observed(name: str, measurement: Measurement, limits: Limits | None = None) -> float:
    """Compute one metric of a whole measurement as it is shown; NaN where nothing defines it."""
    return estimate(name, samples_of(measurement, limits))


def summarize(measurement: Measurement, limits: Limits | None = None) -> dict[str, float | None]:
    """Compute every metric of the glossary; None where nothing defines it."""
    names = [
        *THROUGHPUTS,
        ATTAINMENT,
        *(f"{m}_{s}_ms" for m in LATENCIES for s in STATISTICS),
        *(f"icl_{s}_ms" for s in ICL_STATISTICS),
    ]
    samples = samples_of(measurement, limits)
    values: dict[str, float | None] = {}
    for name in names:
        value = estimate(name, samples)
        values[name] = value if np.isfinite(value) else None
    values["error_ratio"] = measurement.num_errors / len(samples) if len(samples) else None
    values["acceptance_length"] = measurement.counters.acceptance_length
    values["acceptance_rate"] = measurement.counters.acceptance_rate
    return values


UNKNOWN_ERROR = "unknown"


def error_counts(measurement: Measurement) -> dict[str, int]:
    """Count the failed requests by `RequestRecord.error_kind`, most frequent first.

    An answer without tokens is ``empty``; a failure of no known kind is ``unknown``.
    """
    kinds = Counter(
        record.error_kind or (UNKNOWN_ERROR if record.error is not None else "empty")
        for record in measurement.records
        if not record.is_ok
    )
    return dict(kinds.most_common())


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


def _with_failures_last(records: Sequence[RequestRecord], name: str) -> float:
    metric, statistic, _ = name.split("_")
    answered = [r for r in records if r.is_ok]
    num_failed = sum(not r.is_ok for r in records)
    if metric == "icl":
        gaps = [icl_ms(r) for r in answered]
        values = np.concatenate([*gaps, np.empty(0)])
        # A failed request stands for as many gaps as an answered one has.
        num_worst = num_failed * max(1, round(len(values) / max(1, len(gaps))))
    else:
        known = [value for r in answered if (value := _OF_RECORD[metric](r)) is not None]
        values, num_worst = np.array(known, dtype=np.float64), num_failed
    values = np.concatenate([values, np.full(num_worst, WORST_LATENCY_MS)])
    return _statistic(values, statistic) if len(values) else 0.0
