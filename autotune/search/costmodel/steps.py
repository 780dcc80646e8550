"""How long one step takes: known structure, and a dozen physical unknowns that measurements settle.

    target  = ||bytes / bandwidth, FLOPs / compute|| + overhead + rows x row overhead
    drafter = passes x (||its bytes / bandwidth, FLOPs / compute|| x cost + overhead + rows x row overhead)

with bytes = weights + the experts touched + KV cache of all requests, and FLOPs = 2 x active parameters x
rows. Known without measuring: sizes, that CUDA graphs pad rows to captured sizes (multiples of K + 1;
vLLM `compilation.py`), that n rows touch 1 - (1 - k/E)^n of the experts when each picks its own, and that
a parallel drafter runs 2K rows a request. ||.|| is the 4-norm, near the maximum but round at the knee, where
loads overlap incompletely. The unknowns have log-normal priors around data-sheet values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.search.costmodel.table import Table
from autotune.search.surrogate import FloatArray
from autotune.serving.sizes import ServingSizes


@dataclass(frozen=True)
class Unknown:
    """One positive figure that is fitted, by the prior of its logarithm."""

    name: str
    median: float
    spread: float
    """Standard deviation of the logarithm."""


BANDWIDTH_RATIO, COMPUTE_RATIO = 0.75, 0.50
"""What serving reaches of the data sheet's peaks: decode kernels stream 70 to 90 %, 16-bit matrix products of
serving size reach 40 to 65 % (the spread of published roofline studies; judgement within it)."""
LAYER_OVERHEAD_S = 15e-6
"""Of each layer in a step that runs without a graph: a dozen kernels at about a microsecond, and Python."""


def unknowns(sizes: ServingSizes) -> tuple[Unknown, ...]:
    """Return what is to be fitted, with priors; wide where the device's rates are not known."""
    device, layers = sizes.device, sizes.target.num_layers
    peak_bandwidth, peak_compute = device.bandwidth_bytes_per_s, device.compute_flops_per_s
    is_known = peak_bandwidth is not None and peak_compute is not None
    return (
        Unknown("bandwidth", BANDWIDTH_RATIO * peak_bandwidth, 0.2)
        if peak_bandwidth is not None
        else Unknown("bandwidth", 30e9, 2.0),
        Unknown("compute", COMPUTE_RATIO * peak_compute, 0.35)
        if peak_compute is not None
        else Unknown("compute", 0.5e12, 2.0),
        Unknown("overhead_s", 1.2e-3, 0.8),
        Unknown("row_overhead_s", 5e-6, 1.2) if is_known else Unknown("row_overhead_s", 2e-4, 2.0),
        Unknown("draft_overhead_s", 0.5e-3, 0.8) if is_known
        else Unknown("draft_overhead_s", 2e-3, 1.2),
        Unknown("draft_cost", 1.0, 0.3),
        Unknown("draft_row_overhead_ratio", 0.4, 0.8),
        Unknown("fp8_gain", 1.6, 0.2) if device.has_fp8_arithmetic
        else Unknown("fp8_gain", 1.0, 0.05),
        Unknown("fp8_overhead_ratio", 1.0, 0.1),
        Unknown("fp8_kv_cost", 1.1, 0.15),
        Unknown("eager_s", LAYER_OVERHEAD_S * layers, 0.6),
        Unknown("prefill_cost", 1.0, 0.25),
        Unknown("request_s", 3e-3, 1.0),
    )  # fmt: skip


OFF_PENALTY_RATIO = 0.05
"""What a step without drafts costs more where speculation is switched by batch (vLLM #49548: 6.6 % at two
requests)."""
_GRAPH_STEP_ROWS = 8
"""Captured sizes are 1, 2, 4 and then multiples of 8 (vLLM's default list)."""


class StepTimes:
    """Step times of a table's configs under given values of the unknowns.

    Arrays in and out broadcast to (m, n): m sets of values, n configs.
    """

    def __init__(self, sizes: ServingSizes, table: Table, theta: FloatArray) -> None:
        """Set the unknowns.

        Args:
            sizes: of target and device.
            table: n configs.
            theta: logarithms of the unknowns in the order of `unknowns`, shape (m, unknowns).
        """
        values = np.exp(theta)[:, :, None]
        names = [u.name for u in unknowns(sizes)]
        self._of = {name: values[:, i] for i, name in enumerate(names)}
        self._table = table
        self._target = sizes.target
        self._has_graphs = sizes.device.has_graphs
        fp8 = table.has_fp8_weights
        self._compute = self._of["compute"] * np.where(fp8, self._of["fp8_gain"], 1.0)
        self._overhead = self._of["overhead_s"] * np.where(
            fp8, self._of["fp8_overhead_ratio"], 1.0
        )
        self._kv_cost = np.where(table.has_fp8_kv, self._of["fp8_kv_cost"], 1.0)
        share = min(sizes.target.num_experts_per_token / max(sizes.target.num_experts, 1), 1.0)
        self._log_untouched = np.log1p(-share) if 0 < share < 1 else None

    @property
    def request_s(self) -> FloatArray:
        """Fixed time of a request outside of steps, part of its TTFT."""
        return self._of["request_s"]

    def step_s(
        self, batch: FloatArray, context: FloatArray, prefill_tokens: FloatArray | float = 0.0
    ) -> FloatArray:
        """Return the seconds of a step.

        Args:
            batch: requests that decode in it, mean; need not be whole.
            context: KV tokens of each of them.
            prefill_tokens: prompt tokens computed beside them.
        """
        drafting = self._drafting_s(batch, context, prefill_tokens)
        switched = np.isfinite(self._table.off_above)
        if not switched.any():
            return drafting
        plain = self._target_s(batch, context, batch, prefill_tokens) * (1 + OFF_PENALTY_RATIO)
        share = self.off_share(batch)
        return drafting * (1 - share) + plain * share

    def off_share(self, batch: FloatArray) -> FloatArray:
        """Return the share of steps whose batch is above the switch; the batch varies around its mean."""
        off = np.where(np.isfinite(self._table.off_above), self._table.off_above, 1e9)
        width = 0.25 + 0.15 * np.sqrt(batch)
        share: FloatArray = 1 / (1 + np.exp(np.clip((off + 0.5 - batch) / width, -40, 40)))
        return share

    def _drafting_s(
        self, batch: FloatArray, context: FloatArray, prefill_tokens: FloatArray | float
    ) -> FloatArray:
        table = self._table
        rows = batch * table.rows_per_request
        target = self._target_s(batch, context, rows, prefill_tokens)
        if not table.is_speculative.any():
            return target
        return target + self._draft_s(batch, context, prefill_tokens)

    def _target_s(
        self,
        batch: FloatArray,
        context: FloatArray,
        rows: FloatArray,
        prefill_tokens: FloatArray | float,
    ) -> FloatArray:
        table, of = self._table, self._of
        padded = self._padded(rows)
        work = padded + prefill_tokens * of["prefill_cost"]
        weights = table.weight_bytes + table.expert_bytes * self._touched(rows + prefill_tokens)
        kv = batch * context * table.kv_bytes_per_token * self._kv_cost
        busy = _norm(
            (weights + kv) / of["bandwidth"],
            2 * self._target.num_active_parameters * work / self._compute,
        )
        time_s = busy + self._overhead + padded * of["row_overhead_s"]
        whole_s: FloatArray = time_s + self._eager_share(rows + prefill_tokens) * of["eager_s"]
        return whole_s

    def _draft_s(
        self, batch: FloatArray, context: FloatArray, prefill_tokens: FloatArray | float
    ) -> FloatArray:
        table, of = self._table, self._of
        rows = batch * table.draft_rows
        # 2 bytes and 2 FLOPs per parameter: the head's FLOPs per row are its bytes.
        # The prompt goes through the head once, whatever the number of passes.
        work = rows + prefill_tokens * of["prefill_cost"] / np.maximum(table.draft_passes, 1.0)
        read = table.draft_bytes + batch * context * table.draft_kv_bytes_per_token
        busy = _norm(read / of["bandwidth"], table.draft_bytes * work / of["compute"])
        fixed = (
            of["draft_overhead_s"] + rows * of["row_overhead_s"] * of["draft_row_overhead_ratio"]
        )
        passes_s: FloatArray = table.draft_passes * (busy * of["draft_cost"] + fixed)
        return passes_s

    def _touched(self, rows: FloatArray) -> FloatArray | float:
        """Share of the experts that some row picks, when each row picks its own."""
        if self._log_untouched is None:
            return 1.0
        touched: FloatArray = -np.expm1(rows * self._log_untouched)
        return touched

    def _padded(self, rows: FloatArray) -> FloatArray:
        """Rows of the captured graph that a step runs as: the smallest size that is not below."""
        if not self._has_graphs:
            return rows
        unit = self._table.rows_per_request
        padded = padded_rows(rows, unit)
        return np.where(padded <= self._table.graph_ceiling_rows, padded, rows)

    def _eager_share(self, rows: FloatArray) -> FloatArray:
        is_eager = (rows > self._table.graph_ceiling_rows) & self._has_graphs
        return np.asarray(is_eager, dtype=np.float64)


def padded_rows(rows: FloatArray, unit: FloatArray) -> FloatArray:
    """Return the smallest captured size that `rows` fit into, sizes rounded up to multiples of `unit`.

    Between two captured sizes the mean batch stands for a mixture of whole ones, so the padding is that
    of a whole batch, carried over as a ratio.
    """
    whole = np.maximum(np.round(rows / unit), 1.0) * unit
    above = _listed_above(whole)
    below = np.maximum(above - _GRAPH_STEP_ROWS, above / 2)
    small = np.ceil(below / unit) * unit
    large = np.ceil(above / unit) * unit
    size = np.where(small >= whole, small, large)
    padded: FloatArray = rows * size / whole
    return padded


def _listed_above(rows: FloatArray) -> FloatArray:
    small = np.exp2(np.ceil(np.log2(np.maximum(rows, 1.0))))
    large = np.ceil(rows / _GRAPH_STEP_ROWS) * _GRAPH_STEP_ROWS
    return np.where(rows <= _GRAPH_STEP_ROWS, small, large)


def _norm(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the 4-norm of two times."""
    a2, b2 = a * a, b * b
    norm: FloatArray = np.sqrt(np.sqrt(a2 * a2 + b2 * b2))
    return norm
