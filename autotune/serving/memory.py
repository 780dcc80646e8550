"""What fits into the device's memory: which configs need not be launched to know that they cannot be.

vLLM takes `gpu-memory-utilization` of the device, loads target and drafter, runs one step of
`max_num_batched_tokens` to see the working memory's peak, and gives what is left to the KV cache. The same
sum is made here from sizes. Every launch reports the KV cache it ended up with, which corrects later ones.

Constants are vLLM's own where a source stands beside them. The others are judgements: they are what the
correction by launches is for.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache

from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind
from autotune.serving.sizes import DeviceSizes, ServingSizes
from autotune.serving.token_budget import captured_sizes, graph_ceiling, needed_model_len
from autotune.serving.vllm_options import Needs

BLOCK_TOKENS = 16
"""vLLM's block of the KV cache on CUDA."""
CPU_BLOCK_TOKENS = 128
"""The same on CPU."""
BYTES_16_BIT = 2
LOGITS_BYTES = 4
"""Logits are sampled in 32 bits."""
ACTIVATION_WIDTHS = 20.0
"""Working memory of a step, in 16-bit hidden states a token. Judgement: a Llama layer holds about 14 of them
at once (residual, norm, Q, K, V, twice the MLP's inner width of 3.5, its product), the draft head reads 3
more, and the allocator rounds up."""
LOGITS_COPIES = 2.0
"""Copies of the logits of `max_num_seqs` rows that vLLM's own profiling run makes. Judgement."""
CONTEXT_BYTES = 0.5e9
"""CUDA context, cuBLAS and NCCL workspaces. Judgement: vLLM's start-up logs show 0.1 to 0.6 GB of it."""
GRAPH_BYTES_PER_LAYER = 0.25e6
"""Of one captured size. Judgement: capturing the 51 default sizes of an 8B model takes about 0.5 GB."""
MIN_KV_TOKENS = 2048
"""What the KV cache must hold where nobody says how long the requests are. Judgement."""
PRIOR_BAND_RATIO = 0.02
"""Share of the device by which the first estimate may be off. Judgement; it shrinks with every launch."""
ACTIVATION_DOUBT = 0.5
"""Share by which working memory may be larger than thought, for what is beyond the engine's own limits and
beyond any launch so far. Judgement."""

NO_KV = "memory: weights and working memory leave none for a KV cache"
SHORT_KV = "memory: the KV cache would not hold the longest request"
SAMPLER = (
    "memory: sampling all drafts of a full batch is outside of vLLM's profiling and may not fit"
)
AS_LARGE = "memory: needs at least as much as a launch that ran out of it"

_MEMORY_KINDS = frozenset({FailureKind.INSUFFICIENT_MEMORY, FailureKind.OUT_OF_MEMORY_UNDER_LOAD})


@dataclass(frozen=True)
class MemoryEstimate:
    """Where the memory of one device goes; with tensor parallelism, of one device of the group."""

    weight_bytes: float
    drafter_bytes: float
    activation_bytes: float
    """Peak of the profiling run, its logits and the context included."""
    graph_bytes: float
    sampler_bytes: float
    """Logits of all rows that a full batch verifies, B x (K + 1) x vocabulary x 4: vLLM's warm-up samples
    one draft a request, so they come out of what `gpu-memory-utilization` leaves (PR #37521, not merged)."""
    kv_bytes: float
    """Of the whole KV cache; 0 where nothing is left for it."""
    kv_tokens: float
    """The same in tokens, in whole blocks."""
    kv_bytes_per_token: float
    """Of target and drafter."""


@dataclass(frozen=True)
class _Sum:
    """The uncorrected sum of one config; `free_bytes` may be negative."""

    estimate: MemoryEstimate
    free_bytes: float
    """For the KV cache."""
    headroom_bytes: float
    """What `gpu-memory-utilization` leaves."""
    needed_bytes: float
    """Of the KV cache, for one longest request."""
    block_bytes: float

    @property
    def parts(self) -> tuple[float, ...]:
        """Every part that takes memory, as needs: a config with none of them smaller needs no less."""
        e = self.estimate
        taken = (e.weight_bytes, e.drafter_bytes, e.activation_bytes, e.graph_bytes)
        return (*taken, self.needed_bytes, e.sampler_bytes, self.headroom_bytes)


class MemoryModel:
    """Forecasts memory, corrected by what launches reported. Not thread-safe."""

    def __init__(self, sizes: ServingSizes, needs: Needs) -> None:
        """Take the sizes, and what the traffic needs whichever config serves it."""
        self._sizes = sizes
        self._needs = needs
        self._sums: dict[ServingConfig, _Sum] = {}
        self._residuals: list[float] = []
        # The prior band is that of a launch with the engine's own limits.
        self._largest_activation_bytes = self._activation_bytes(
            sizes.device.max_num_batched_tokens, sizes.device.max_num_seqs
        )
        self._launched: set[ServingConfig] = set()
        self._failed: list[tuple[float, ...]] = []
        self._failed_slack_bytes = 0.0

    @property
    def device(self) -> DeviceSizes:
        return self._sizes.device

    def estimate(self, config: ServingConfig) -> MemoryEstimate:
        """Forecast the memory of a launch of `config`.

        Where neither the device's memory nor the KV cache's size is known, the KV cache is infinite.
        """
        found = self._sum(config)
        free = max(0.0, found.free_bytes - self._offset_bytes)
        tokens = _whole_blocks(free, found)
        return MemoryEstimate(**{**vars(found.estimate), "kv_bytes": free, "kv_tokens": tokens})

    def learn(self, config: ServingConfig, kv_tokens: int) -> None:
        """Correct later estimates by the KV cache that a launch reported, in tokens.

        The correction is the median of what the sum left over or lacked in all launches, in bytes: what is
        forgotten in it (workspaces, fragmentation) is about the same for all configs.
        """
        found = self._sum(config)
        reported = kv_tokens * found.estimate.kv_bytes_per_token
        self._launched.add(config)
        if found.free_bytes < float("inf"):
            self._residuals.append(found.free_bytes - reported)
        self._largest_activation_bytes = max(
            self._largest_activation_bytes, found.estimate.activation_bytes
        )

    def learn_failure(self, config: ServingConfig, kind: FailureKind) -> None:
        """Rule out what needs at least as much as a launch that ran out of memory; other kinds tell nothing.

        One that was thought to fit also widens the band of the others, up to twice the prior one: beyond that
        it is the sum that is wrong for this config, not the band.
        """
        if kind not in _MEMORY_KINDS:
            return
        found = self._sum(config)
        self._launched.discard(config)
        self._failed.append(found.parts)
        if kind is FailureKind.INSUFFICIENT_MEMORY:
            slack = found.free_bytes - self._offset_bytes - found.needed_bytes
            self._failed_slack_bytes = max(
                self._failed_slack_bytes, min(slack, 2 * self._prior_band_bytes)
            )

    def why_not(self, config: ServingConfig, *, is_cautious: bool = True) -> str | None:
        """Say why `config` cannot be launched, or is not safe under load; None when it may be.

        Args:
            config: what would be launched.
            is_cautious: refuse what might not fit; False refuses only what cannot.

        Returns:
            One of a few reasons without figures, so that they can be counted.
        """
        if config in self._launched:
            return None
        found = self._sum(config)
        if any(_is_at_least(found.parts, failed) for failed in self._failed):
            return AS_LARGE
        band = self._band_bytes(found.estimate.activation_bytes)
        free = found.free_bytes - self._offset_bytes + (-band if is_cautious else band)
        if free <= 0:
            return NO_KV
        if free < found.needed_bytes:
            return SHORT_KV
        if found.estimate.sampler_bytes > found.headroom_bytes:
            return SAMPLER
        return None

    @property
    def _offset_bytes(self) -> float:
        return statistics.median(self._residuals) if self._residuals else 0.0

    @property
    def _prior_band_bytes(self) -> float:
        return PRIOR_BAND_RATIO * (self._sizes.device.memory_bytes or 0.0)

    def _band_bytes(self, activation_bytes: float) -> float:
        """How far off an estimate may be: by launches so far, and more for working memory beyond theirs."""
        if self._sizes.device.kv_bytes is not None:
            return 0.0
        shared = self._prior_band_bytes / (1 + len(self._residuals))
        if len(self._residuals) > 1:
            offset = self._offset_bytes
            # The median absolute deviation is 1 / 1.4826 of a normal distribution's standard deviation.
            spread = 1.4826 * statistics.median(abs(r - offset) for r in self._residuals)
            shared = max(shared, spread)
        beyond = max(0.0, activation_bytes - self._largest_activation_bytes)
        return max(shared, self._failed_slack_bytes) + ACTIVATION_DOUBT * beyond

    def _sum(self, config: ServingConfig) -> _Sum:
        found = self._sums.get(config)
        if found is None:
            found = self._sums[config] = self._added_up(config)
        return found

    def _added_up(self, config: ServingConfig) -> _Sum:
        target, device = self._sizes.target, self._sizes.device
        flags = dict(config.flags)
        shards = tensor_parallel_size(config)
        per_token = self._kv_bytes_per_token(config) / shards
        block = (BLOCK_TOKENS if device.kv_bytes is None else CPU_BLOCK_TOKENS) * per_token
        needed = -(-self._longest_tokens(config) * per_token // block) * block
        seqs = config.max_num_seqs or device.max_num_seqs
        weights = self._weight_bytes(config) / shards
        drafter = self._drafter_bytes(config) / shards
        tokens = config.max_num_batched_tokens or device.max_num_batched_tokens
        activation = self._activation_bytes(tokens, seqs)
        graphs = self._graph_bytes(config)
        rows = min(seqs, self._needs.concurrency or seqs) * (config.num_speculative_tokens + 1)
        sampler = rows * target.vocab_size * LOGITS_BYTES * float(config.is_speculative)
        free = headroom = float("inf")
        fixed = flags.get("kv-cache-memory-bytes")
        if device.kv_bytes is not None:
            free = device.kv_bytes
        elif device.memory_bytes is not None:
            share = gpu_memory_utilization(config, self._sizes)
            taken = weights + drafter + activation + graphs
            free = device.memory_bytes * share - taken
            headroom = device.memory_bytes * (1.0 - share)
        if isinstance(fixed, int | float):
            free = float(fixed)
        estimate = MemoryEstimate(
            weight_bytes=weights,
            drafter_bytes=drafter,
            activation_bytes=activation,
            graph_bytes=graphs,
            sampler_bytes=sampler,
            kv_bytes=max(0.0, free),
            kv_tokens=0.0,
            kv_bytes_per_token=per_token,
        )
        return _Sum(estimate, free, headroom, needed, block)

    def _activation_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> float:
        target = self._sizes.target
        hidden = max_num_batched_tokens * target.hidden_size * BYTES_16_BIT * ACTIVATION_WIDTHS
        logits = max_num_seqs * target.vocab_size * LOGITS_BYTES * LOGITS_COPIES
        return CONTEXT_BYTES + hidden + logits

    def _weight_bytes(self, config: ServingConfig) -> float:
        """Weights as loaded. FP8 halves the linear layers; embeddings and the output layer stay 16-bit."""
        target = self._sizes.target
        if config.weights != "fp8" or target.is_quantized:
            return target.weight_bytes
        embeddings = 2 * target.vocab_size * target.hidden_size * BYTES_16_BIT
        return target.weight_bytes - max(0.0, target.weight_bytes - embeddings) / 2

    def _drafter_bytes(self, config: ServingConfig) -> float:
        drafter = self._sizes.drafters.get(config.drafter or "")
        return drafter.weight_bytes if drafter is not None else 0.0

    def _kv_bytes_per_token(self, config: ServingConfig) -> float:
        """Of target and drafter; the drafter's cache has the target's precision unless told otherwise."""
        drafter = self._sizes.drafters.get(config.drafter or "")
        total = self._sizes.target.kv_bytes_per_token
        total += drafter.kv_bytes_per_token if drafter is not None else 0.0
        return total / 2 if config.kv_cache_dtype == "fp8" else total

    def _graph_bytes(self, config: ServingConfig) -> float:
        if not self._sizes.device.has_graphs:
            return 0.0
        ceiling = graph_ceiling(config, self._needs.concurrency)
        return (
            _num_captured(ceiling, config.num_speculative_tokens)
            * self._sizes.target.num_layers
            * GRAPH_BYTES_PER_LAYER
        )

    def _longest_tokens(self, config: ServingConfig) -> int:
        """Return the length that vLLM wants to fit at least once, K lookahead slots included."""
        needs, own = self._needs, dict(config.flags).get("max-model-len")
        if isinstance(own, int) and not isinstance(own, bool):
            return own
        if needs.longest_request_tokens is None:
            return MIN_KV_TOKENS + config.num_speculative_tokens
        length = needed_model_len(needs.longest_request_tokens, needs.max_num_speculative_tokens)
        return min(length, needs.model_max_len) if needs.model_max_len is not None else length


def gpu_memory_utilization(config: ServingConfig, sizes: ServingSizes) -> float:
    """Return the share of the device's memory that the engine takes under `config`."""
    own = dict(config.flags).get("gpu-memory-utilization")
    is_number = isinstance(own, int | float) and not isinstance(own, bool)
    return float(own) if is_number and own is not None else sizes.gpu_memory_utilization


def tensor_parallel_size(config: ServingConfig) -> int:
    """Return over how many devices `config` splits the model: memory and rates are multiplied by it."""
    own = dict(config.flags).get("tensor-parallel-size")
    return own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else 1


def _is_at_least(parts: tuple[float, ...], failed: tuple[float, ...]) -> bool:
    """Whether a config has no part smaller than a failed one's, and no more headroom."""
    *needs, headroom = parts
    *failed_needs, failed_headroom = failed
    is_more = all(a >= b for a, b in zip(needs, failed_needs, strict=True))
    return is_more and headroom <= failed_headroom


def _whole_blocks(free_bytes: float, found: _Sum) -> float:
    if free_bytes == float("inf") or found.block_bytes == 0.0:
        return float("inf")
    num_blocks = free_bytes // found.block_bytes
    return num_blocks * (found.block_bytes / found.estimate.kv_bytes_per_token)


@cache
def _num_captured(ceiling: int, num_speculative_tokens: int) -> int:
    return len(captured_sizes(ceiling, num_speculative_tokens))
