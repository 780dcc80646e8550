"""Candidates as columns: what arithmetic over twenty thousand of them needs, taken out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autotune.search.surrogate import FloatArray
from autotune.serving.config import ServingConfig
from autotune.serving.sizes import DrafterSizes, ServingSizes
from autotune.serving.token_budget import graph_capture_size, tokens_per_step

BoolArray = npt.NDArray[np.bool_]

GRAPH_CEILING_ROWS = 512
"""Largest captured size by default (vLLM: 512, and more on the newest GPUs)."""
UNKNOWN_HEAD_RATIO = 0.08
"""Weights of a draft head that nothing is known of, as a share of the target's active ones."""


class KvEstimate(Protocol):
    """The part of a memory estimate that says how many tokens the KV cache holds."""

    @property
    def kv_bytes(self) -> float: ...

    @property
    def kv_bytes_per_token(self) -> float: ...


class KvForecast(Protocol):
    """What the cost model needs of a memory model, see `autotune.serving.memory.MemoryModel`."""

    def estimate(self, config: ServingConfig) -> KvEstimate: ...


@dataclass(frozen=True)
class Table:
    """One row for each config; every array has shape (n,)."""

    k: FloatArray
    width: FloatArray
    is_speculative: BoolArray
    rows_per_request: FloatArray
    """That the target verifies in a step: K + 1."""
    budget_per_request: FloatArray
    """Tokens of the step's budget that a decoding request is charged."""
    draft_passes: FloatArray
    """Forward passes of the drafter in a step."""
    draft_rows: FloatArray
    """Of one request in one of them."""
    max_num_seqs: FloatArray
    max_num_batched_tokens: FloatArray
    off_above: FloatArray
    """Batch above which nothing is drafted; infinite without such a switch."""
    graph_ceiling_rows: FloatArray
    """Largest batch, in rows, that runs as a graph; 0 without graphs."""
    has_fp8_weights: BoolArray
    has_fp8_kv: BoolArray
    weight_bytes: FloatArray
    """Of the target, without the experts."""
    expert_bytes: FloatArray
    kv_bytes_per_token: FloatArray
    draft_bytes: FloatArray
    """Weights of the drafter that a pass reads."""
    draft_kv_bytes_per_token: FloatArray

    def __len__(self) -> int:
        return len(self.k)

    def take(self, indices: npt.NDArray[np.intp]) -> Table:
        """Return some of the rows."""
        return Table(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})

    @classmethod
    def of(
        cls, configs: Sequence[ServingConfig], sizes: ServingSizes, concurrency: int | None
    ) -> Table:
        """Take the columns out of configs.

        Args:
            configs: candidates.
            sizes: of what they serve.
            concurrency: most requests in flight of the study, None where unknown; vLLM is then told to
                capture graphs that cover the drafter, see `autotune.serving.token_budget`.
        """
        target, device = sizes.target, sizes.device
        k = np.array([c.num_speculative_tokens for c in configs], dtype=np.float64)
        width = np.array([c.tree_width for c in configs], dtype=np.float64)
        is_parallel = np.array([c.parallel_drafting for c in configs], dtype=bool)
        fp8_weights = np.array([c.weights == "fp8" for c in configs], dtype=bool)
        fp8_kv = np.array([c.kv_cache_dtype == "fp8" for c in configs], dtype=bool)
        is_speculative = k > 0
        weight_ratio = np.where(fp8_weights & (not target.is_quantized), 0.5, 1.0)
        kv_ratio = np.where(fp8_kv, 0.5, 1.0)
        heads = _heads(configs, sizes)
        draft_bytes = np.array([head.weight_bytes if head else 0.0 for head in heads])
        draft_kv = np.array([head.kv_bytes_per_token if head else 0.0 for head in heads])
        return cls(
            k=k,
            width=width,
            is_speculative=is_speculative,
            rows_per_request=k + 1,
            budget_per_request=np.array(
                [
                    tokens_per_step(c.num_speculative_tokens, is_parallel=c.parallel_drafting)
                    for c in configs
                ],
                dtype=np.float64,
            ),
            draft_passes=np.where(is_parallel, 1.0, k / width) * is_speculative,
            draft_rows=np.where(is_parallel, 2 * k, width) * is_speculative,
            max_num_seqs=_column(configs, lambda c: c.max_num_seqs or device.max_num_seqs),
            max_num_batched_tokens=_column(
                configs, lambda c: c.max_num_batched_tokens or device.max_num_batched_tokens
            ),
            off_above=_column(configs, lambda c: c.speculation_off_above or np.inf),
            graph_ceiling_rows=_column(
                configs, lambda c: _graph_ceiling(c, concurrency) if device.has_graphs else 0.0
            ),
            has_fp8_weights=fp8_weights,
            has_fp8_kv=fp8_kv,
            weight_bytes=(target.weight_bytes - target.expert_bytes) * weight_ratio,
            expert_bytes=target.expert_bytes * weight_ratio,
            kv_bytes_per_token=target.kv_bytes_per_token * kv_ratio,
            draft_bytes=draft_bytes,
            draft_kv_bytes_per_token=draft_kv * kv_ratio,
        )


def _column(
    configs: Sequence[ServingConfig], value: Callable[[ServingConfig], float]
) -> FloatArray:
    return np.array([value(config) for config in configs], dtype=np.float64)


def _graph_ceiling(config: ServingConfig, concurrency: int | None) -> float:
    flags = dict(config.flags)
    if flags.get("enforce-eager"):
        return 0.0
    given = flags.get("max-cudagraph-capture-size")
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    wanted = graph_capture_size(config, concurrency) if concurrency is not None else 0
    return float(max(GRAPH_CEILING_ROWS, wanted))


def _heads(configs: Sequence[ServingConfig], sizes: ServingSizes) -> list[DrafterSizes | None]:
    """Return each config's head; an unknown one is guessed from the target."""
    target = sizes.target
    share = target.num_active_parameters / target.num_parameters
    guess = DrafterSizes(
        num_parameters=UNKNOWN_HEAD_RATIO * target.num_active_parameters,
        weight_bytes=UNKNOWN_HEAD_RATIO * target.weight_bytes * share,
        num_layers=1,
        kv_bytes_per_token=target.kv_bytes_per_token / target.num_layers,
        draft_vocab_size=target.vocab_size,
    )
    return [
        sizes.drafters.get(c.drafter, guess) if c.drafter is not None else None for c in configs
    ]


def plain_features(
    configs: Sequence[ServingConfig], default_num_seqs: int, default_num_batched_tokens: int
) -> FloatArray:
    """Return what a model without physics may know of each config, scaled to 0..1, shape (n, d).

    K counts by its square root, since the step from 1 to 2 matters more than that from 15 to 16, and K = 0
    stands apart. Limits count by their logarithm. A searched flag counts by its place where its values
    are numbers, otherwise one column for each value. What is the same everywhere is left out.

    Args:
        configs: all candidates.
        default_num_seqs: what the engine takes where a config leaves the limit out.
        default_num_batched_tokens: likewise.
    """
    columns = [
        _column(configs, lambda c: float(np.sqrt(c.num_speculative_tokens))),
        _column(configs, lambda c: not c.is_speculative),
        _column(configs, lambda c: float(np.log2(c.tree_width))),
        _column(configs, lambda c: c.speculation_off_above is not None),
        _column(configs, lambda c: float(np.log2(c.speculation_off_above or 1))),
        _column(configs, lambda c: c.weights == "fp8"),
        _column(configs, lambda c: c.kv_cache_dtype == "fp8"),
        _column(configs, lambda c: float(np.log2(c.max_num_seqs or default_num_seqs))),
        _column(
            configs,
            lambda c: float(np.log2(c.max_num_batched_tokens or default_num_batched_tokens)),
        ),
        *_choices([c.drafter for c in configs if c.drafter], [c.drafter for c in configs]),
    ]
    flags: list[Mapping[str, object]] = [dict(c.flags) for c in configs]
    for name in sorted({name for own in flags for name in own}):
        values = [own.get(name) for own in flags]
        columns += _choices(values, values)
    found = [_scaled(column) for column in columns if np.ptp(column) > 0]
    return np.column_stack(found) if found else np.zeros((len(configs), 1))


def _choices(known: Sequence[object], values: Sequence[object]) -> list[FloatArray]:
    distinct = sorted(set(known), key=repr)
    if len(distinct) <= 1:
        return []
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in distinct):
        places = {v: i for i, v in enumerate(sorted(distinct, key=float))}  # type: ignore[arg-type]  # numbers, checked above
        return [np.array([places[v] for v in values], dtype=np.float64)]
    return [np.array([v == choice for v in values], dtype=np.float64) for choice in distinct]


def _scaled(column: FloatArray) -> FloatArray:
    scaled: FloatArray = (column - column.min()) / np.ptp(column)
    return scaled
