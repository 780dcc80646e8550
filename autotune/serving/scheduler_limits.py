"""What fits a simulated server: its scheduler's limits, its memory, and why it would not launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.serving.capabilities import FP8_ARITHMETIC_CAPABILITY
from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchContext
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.serving.step_cost import kv_ratio, max_capture_size, weight_ratio
from autotune.serving.token_budget import max_decoding_requests, tokens_per_step
from autotune.serving.worlds import World

DEFAULT_MEMORY_UTILIZATION = 0.9
SMALLEST_KV_TOKENS = 2048
"""KV cache below which a launch fails when nobody says how long the requests are."""
GRAPH_BYTES = 0.4e9
"""What capturing graphs takes, beside `GRAPH_BYTES_PER_TOKEN` of the largest one."""
GRAPH_BYTES_PER_TOKEN = 0.6e6
LOGIT_BYTES = 4


@dataclass(frozen=True)
class SchedulerLimits:
    """What the server's scheduler may put into one step, and into the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    max_sampled_requests: int | None = None
    """Decoding requests in one step above which the sampler runs out of memory; None: never."""
    stream_interval: int = 1
    """Tokens between two chunks that the client gets; the first token comes at once."""


def scheduler_limits(world: World, config: ServingConfig) -> SchedulerLimits:
    """Return the limits under `config`: its own, or the hardware's defaults."""
    hardware, target, head = world.hardware, world.target, world.head
    budget = config.max_num_batched_tokens or hardware.max_num_batched_tokens
    free = hardware.memory_bytes * utilization(config) - budget * target.activation_bytes_per_token
    free -= target.weight_bytes * weight_ratio(config)
    if capture_size := max_capture_size(hardware, config):
        free -= GRAPH_BYTES + capture_size * GRAPH_BYTES_PER_TOKEN
    per_token = target.kv_bytes_per_token * kv_ratio(config)
    if config.is_speculative:
        free -= head.weight_bytes
        per_token *= 1 + head.num_layers / target.num_layers
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs or hardware.max_num_seqs,
        max_num_batched_tokens=budget,
        kv_tokens=max(0, int(free // per_token)),
        max_sampled_requests=_max_sampled_requests(world, config),
        stream_interval=_stream_interval(config),
    )


def utilization(config: ServingConfig) -> float:
    """Return the share of the memory that the server takes."""
    value = dict(config.flags).get("gpu-memory-utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_MEMORY_UTILIZATION


def _stream_interval(config: ServingConfig) -> int:
    value = dict(config.flags).get("stream-interval")
    return value if isinstance(value, int) and value >= 1 else 1


def _max_sampled_requests(world: World, config: ServingConfig) -> int | None:
    """Requests whose logits, B x (K + 1) x vocabulary, fit beside what the server has taken.

    vLLM's warm-up runs the sampler with one draft token per request, so larger buffers are not counted in.
    """
    if not world.target.vocab_size or not config.is_speculative:
        return None
    spare_bytes = world.hardware.memory_bytes * (1 - utilization(config))
    rows = config.num_speculative_tokens + 1
    return int(spare_bytes // (rows * world.target.vocab_size * LOGIT_BYTES))


def launch_failure(
    world: World, config: ServingConfig, context: LaunchContext
) -> TrialFailure | None:
    """Say why this config cannot be launched in this world, if it cannot."""
    limits = scheduler_limits(world, config)
    for is_wrong, detail in _rules(world, config, limits):
        if is_wrong:
            return TrialFailure(FailureKind.INVALID_CONFIG, detail)
    longest = context.needs.longest_request_tokens or SMALLEST_KV_TOKENS
    needed = longest + config.num_speculative_tokens
    if limits.kv_tokens < needed:
        return TrialFailure(
            FailureKind.INSUFFICIENT_MEMORY,
            f"KV cache for {needed} tokens is needed, but only {limits.kv_tokens} fit",
        )
    return None


def _rules(
    world: World, config: ServingConfig, limits: SchedulerLimits
) -> Iterable[tuple[bool, str]]:
    name = world.hardware.name
    asks_fp8 = config.weights == "fp8"
    budget = limits.max_num_batched_tokens
    tokens = tokens_per_step(config.num_speculative_tokens, is_parallel=config.parallel_drafting)
    return (
        (config.tree_width > 1 and not world.has_trees, "the simulated engine drafts chains only"),
        (
            config.tree_width > 1 and config.parallel_drafting,
            "a parallel drafter drafts a chain in one pass and ignores trees",
        ),
        (
            config.parallel_drafting and not world.head.is_parallel,
            "mask_hidden not found in weights but model is configured for parallel drafting",
        ),
        (asks_fp8 and world.target.is_quantized, f"{world.target.name} is already quantised"),
        (asks_fp8 and not world.hardware.has_fp8, f"FP8 weights cannot be made on {name}"),
        (
            config.kv_cache_dtype == "fp8"
            and (world.hardware.compute_capability or FP8_ARITHMETIC_CAPABILITY)
            < FP8_ARITHMETIC_CAPABILITY,
            f"an FP8 KV cache cannot be had on {name}",
        ),
        (
            max_decoding_requests(config, budget) < 1,
            f"max_num_batched_tokens = {budget} does not give one request enough slots: "
            f"it takes {tokens} a step",
        ),
    )
