"""What a simulated step costs, in closed form and without noise.

    target  = max(bytes read / bandwidth, FLOPs / compute) + overhead, with a part per row
    drafter = the same for its own bytes and rows, once with parallel drafting, K times without

for B x (K + 1) verified rows and B x 2K drafted ones (vLLM's own padding with parallel drafting).
Left out on purpose: CUDA-graph padding, preemption, and the drafter's part of a prefill.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autotune.serving.config import ServingConfig
from autotune.serving.worlds import World

FloatArray = npt.NDArray[np.float64]


def step_time_s(
    world: World,
    config: ServingConfig,
    batch: int,
    context_tokens: FloatArray | float,
    prefill_tokens: int = 0,
) -> FloatArray:
    """Return the seconds that one step takes, without noise.

    Args:
        world: what serves.
        config: how it serves.
        batch: requests that decode in the step.
        context_tokens: KV cache tokens of all of them together; an array gives one time each.
        prefill_tokens: prompt tokens that the step computes beside them.
    """
    context: FloatArray = np.asarray(context_tokens, dtype=np.float64)
    rows = batch * (config.num_speculative_tokens + 1) + prefill_tokens
    total_s = _target_s(world, config, rows, context)
    total_s += batch * (config.num_speculative_tokens + 1) * world.target.overhead_per_row_s
    if config.is_speculative:
        total_s += _draft_s(world, config, batch, context)
    return total_s


def _target_s(world: World, config: ServingConfig, rows: int, context: FloatArray) -> FloatArray:
    hardware, target = world.hardware, world.target
    # Each row picks its experts on its own, so a larger batch reads more of them.
    touched = 1 - (1 - target.active_bytes / target.weight_bytes) ** rows
    weight_bytes = target.weight_bytes * touched * weight_ratio(config)
    num_bytes = weight_bytes + context * target.kv_bytes_per_token * kv_ratio(config)
    gain = hardware.fp8_compute_gain if config.weights == "fp8" else 1.0
    compute_s = rows * target.flops_per_token / (hardware.compute_flops_per_s * gain)
    busy_s: FloatArray = np.maximum(num_bytes / hardware.bandwidth_bytes_per_s, compute_s)
    return busy_s + target.overhead_s


def _draft_s(world: World, config: ServingConfig, batch: int, context: FloatArray) -> FloatArray:
    """Time to draft; the head stays 16-bit whatever the target's weights are, as in vLLM."""
    hardware, head = world.hardware, world.head
    k = config.num_speculative_tokens
    num_passes, rows = (1, 2 * k * batch) if config.parallel_drafting else (k, batch)
    kv_bytes = world.target.kv_bytes_per_token * head.num_layers / world.target.num_layers
    num_bytes = head.weight_bytes + context * kv_bytes * kv_ratio(config)
    # 2 FLOPs and 2 bytes per parameter: the head's FLOPs per row are its bytes.
    compute_s = rows * head.weight_bytes / hardware.compute_flops_per_s
    busy_s: FloatArray = np.maximum(num_bytes / hardware.bandwidth_bytes_per_s, compute_s)
    return num_passes * (busy_s + head.overhead_s + rows * head.overhead_per_row_s)


def weight_ratio(config: ServingConfig) -> float:
    """Return the bytes that the target's weights take, against those of the checkpoint."""
    return 0.5 if config.weights == "fp8" else 1.0


def kv_ratio(config: ServingConfig) -> float:
    """Return the bytes that the KV cache takes, against those of a 16-bit one."""
    return 0.5 if config.kv_cache_dtype == "fp8" else 1.0
