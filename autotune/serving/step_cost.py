"""What a simulated step costs, in closed form and without noise.

    target  = ((bytes read / bandwidth)^p + (FLOPs / compute)^p)^(1/p) + overhead, with a part per row
    drafter = the same for its own bytes and rows, once with parallel drafting, else once a level

for B x (K + 1) verified rows and B x 2K drafted ones (vLLM's own padding with parallel drafting), prompts of
the same step on top of both. Rows are padded to captured sizes where the device has graphs; above the largest
one a step launches its kernels one by one, and pays for it.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.serving.config import ServingConfig
from autotune.serving.worlds_parts import Hardware, Target, World

FloatArray = npt.NDArray[np.float64]

SPECULATION_OFF_SLOWDOWN = 1.05
"""Of a step that drafts nothing although the server speculates (vLLM issue 49548)."""


def step_time_s(
    world: World,
    config: ServingConfig,
    batch: int,
    context_tokens: FloatArray | float,
    prefill_tokens: int = 0,
    *,
    is_drafting: bool = True,
) -> FloatArray:
    """Return the seconds that one step takes, without noise.

    Args:
        world: what serves.
        config: how it serves.
        batch: requests that decode in the step.
        context_tokens: KV cache tokens of all of them together; an array gives one time each.
        prefill_tokens: prompt tokens that the step computes beside them.
        is_drafting: whether drafts are made and verified; without, a speculating server runs K = 0.
    """
    context: FloatArray = np.asarray(context_tokens, dtype=np.float64)
    per_request = config.num_speculative_tokens + 1 if is_drafting else 1
    total_s = _target_s(world, config, batch, per_request, context, prefill_tokens)
    total_s += batch * per_request * world.target.overhead_per_row_s
    if config.is_speculative and (is_drafting or prefill_tokens):
        # Prompts go through the head too, or its KV cache would have holes.
        total_s += _draft_s(world, config, batch if is_drafting else 0, context, prefill_tokens)
    return total_s if is_drafting else total_s * SPECULATION_OFF_SLOWDOWN


def _target_s(
    world: World,
    config: ServingConfig,
    batch: int,
    per_request: int,
    context: FloatArray,
    prefill_tokens: int,
) -> FloatArray:
    hardware, target = world.hardware, world.target
    # Full graphs, in multiples of the rows of a request, hold steps without prompts only.
    step = 1 if prefill_tokens else per_request
    rows, eager_s = _as_run(
        hardware, config, batch * per_request + prefill_tokens, step, target.num_layers
    )
    is_fp8 = config.weights == "fp8"
    gain = hardware.fp8_compute_gain if is_fp8 and hardware.has_fp8_arithmetic else 1.0
    compute_s = rows * target.flops_per_token / (hardware.compute_flops_per_s * gain)
    kv_bytes = context * target.kv_bytes_per_token * _kv_time_ratio(hardware, config)
    # Padding is computed but routed nowhere: experts are touched by real rows alone.
    drafts = batch * (per_request - 1) * (1 - target.routing_overlap)
    weights = _touched_bytes(target, batch + drafts + prefill_tokens) * weight_ratio(config)
    memory_s = (weights + kv_bytes) / hardware.bandwidth_bytes_per_s
    fp8_s = hardware.fp8_weights_s_per_layer * target.num_layers if is_fp8 else 0.0
    return _together(memory_s, compute_s, hardware) + target.overhead_s + eager_s + fp8_s


def _touched_bytes(target: Target, rows: float) -> float:
    """Weights that some row needs, where each row picks its experts on its own.

    An expert is left out by one row with probability 1 - k/E, and by all n with its n-th power.
    """
    if not target.num_experts:
        return target.weight_bytes
    missed: float = (1 - target.num_experts_per_token / target.num_experts) ** rows
    return target.weight_bytes - target.expert_bytes * missed


def _draft_s(
    world: World, config: ServingConfig, batch: int, context: FloatArray, prefill_tokens: int
) -> FloatArray:
    """Time to draft; the head stays 16-bit whatever the target's weights are, as in vLLM."""
    hardware, head = world.hardware, world.head
    k = config.num_speculative_tokens
    depth = k // config.tree_width
    num_passes, drafted = (
        (1, 2 * k * batch) if config.parallel_drafting else (depth, k // depth * batch)
    )
    kv_bytes = world.target.kv_bytes_per_token * head.num_layers / world.target.num_layers
    num_bytes = head.weight_bytes + context * kv_bytes * _kv_time_ratio(hardware, config)
    memory_s = num_bytes / hardware.bandwidth_bytes_per_s

    def pass_s(prompt_tokens: int) -> FloatArray:
        rows, eager_s = _as_run(hardware, config, drafted + prompt_tokens, 1, head.num_layers)
        # 2 FLOPs and 2 bytes per parameter: the head's FLOPs per row are its bytes.
        compute_s = rows * head.weight_bytes / hardware.compute_flops_per_s
        fixed_s = head.overhead_s + drafted * head.overhead_per_row_s + eager_s
        return _together(memory_s, compute_s, hardware) + fixed_s

    # Without a decoding request only the prompts' pass is run.
    later_passes = num_passes - 1 if batch or not prefill_tokens else 0
    return pass_s(prefill_tokens) + later_passes * pass_s(0)


def _together(memory_s: FloatArray, compute_s: float, hardware: Hardware) -> FloatArray:
    """Time of reading and computing at once: they overlap, but not fully near the balance point."""
    busy_s: FloatArray
    if np.isinf(hardware.smoothness):
        busy_s = np.maximum(memory_s, compute_s)
    else:
        p = hardware.smoothness
        busy_s = (memory_s**p + compute_s**p) ** (1 / p)
    return busy_s


def _as_run(
    hardware: Hardware, config: ServingConfig, rows: int, step: int, num_layers: int
) -> tuple[int, float]:
    """Return the rows that are computed for these, and what launching without a graph costs."""
    if not hardware.has_graphs or not rows:
        return rows, 0.0
    sizes = _captured(max_capture_size(hardware, config), step)
    place = bisect_left(sizes, rows)
    if place == len(sizes):
        return rows, hardware.eager_s_per_layer * num_layers
    return sizes[place], 0.0


def max_capture_size(hardware: Hardware, config: ServingConfig) -> int:
    """Return the largest batch, in tokens, that graphs are captured for; 0 without any."""
    flags = dict(config.flags)
    if not hardware.has_graphs or flags.get("enforce-eager") is True:
        return 0
    value = flags.get("max-cudagraph-capture-size")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return hardware.max_capture_size


@lru_cache(maxsize=1024)
def _captured(ceiling: int, step: int) -> tuple[int, ...]:
    """Sizes that are captured: vLLM's list, rounded up to multiples of `step`."""
    listed = (1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16))
    rounded = {-(-size // step) * step for size in listed if size <= ceiling}
    return tuple(sorted(size for size in rounded if size <= ceiling))


def weight_ratio(config: ServingConfig) -> float:
    """Return the bytes that the target's weights take, against those of the checkpoint."""
    return 0.5 if config.weights == "fp8" else 1.0


def kv_ratio(config: ServingConfig) -> float:
    """Return the bytes that the KV cache takes, against those of a 16-bit one."""
    return 0.5 if config.kv_cache_dtype == "fp8" else 1.0


def _kv_time_ratio(hardware: Hardware, config: ServingConfig) -> float:
    slowdown = hardware.fp8_kv_slowdown if config.kv_cache_dtype == "fp8" else 1.0
    return kv_ratio(config) * slowdown
