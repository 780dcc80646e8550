"""What fits a simulated server: its scheduler's limits, its KV cache, and why it would not launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchContext
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.serving.step_cost import kv_ratio, weight_ratio
from autotune.serving.token_budget import max_decoding_requests, tokens_per_step
from autotune.serving.worlds import World

DEFAULT_MEMORY_UTILIZATION = 0.9
SMALLEST_KV_TOKENS = 2048
"""KV cache below which a launch fails when nobody says how long the requests are."""


@dataclass(frozen=True)
class SchedulerLimits:
    """What the server's scheduler may put into one step, and into the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int


def scheduler_limits(world: World, config: ServingConfig) -> SchedulerLimits:
    """Return the limits under `config`: its own, or the hardware's defaults."""
    hardware, target, head = world.hardware, world.target, world.head
    budget = config.max_num_batched_tokens or hardware.max_num_batched_tokens
    free = (
        hardware.memory_bytes * _utilization(config) - budget * target.activation_bytes_per_token
    )
    free -= target.weight_bytes * weight_ratio(config)
    per_token = target.kv_bytes_per_token * kv_ratio(config)
    if config.is_speculative:
        free -= head.weight_bytes
        per_token *= 1 + head.num_layers / target.num_layers
    seqs = config.max_num_seqs or hardware.max_num_seqs
    return SchedulerLimits(seqs, budget, max(0, int(free // per_token)))


def _utilization(config: ServingConfig) -> float:
    value = dict(config.flags).get("gpu-memory-utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_MEMORY_UTILIZATION


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
        (config.tree_width > 1, "the simulated engine drafts chains only"),
        (asks_fp8 and world.target.is_quantized, f"{world.target.name} is already quantised"),
        (asks_fp8 and not world.hardware.has_fp8, f"FP8 weights cannot be made on {name}"),
        (
            max_decoding_requests(config, budget) < 1,
            f"max_num_batched_tokens = {budget} does not give one request enough slots: "
            f"it takes {tokens} a step",
        ),
    )
