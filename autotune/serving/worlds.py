"""Worlds of the simulated engine by name, and how often their heads' drafts are accepted."""

from __future__ import annotations

import math

from autotune.serving.config import ServingConfig
from autotune.serving.worlds_catalogue import EAGLE3_HEADS, HARDWARE, HEADS, TARGETS
from autotune.serving.worlds_parts import Hardware, Head, Target, World

__all__ = [
    "DEFAULT_WORLD",
    "WORLDS",
    "Hardware",
    "Head",
    "Target",
    "World",
    "acceptance",
    "survival",
]

DEFAULT_WORLD = "h100-8b"
COLLAPSE_RATIO = 0.3
"""Share of prefixes that survive each position past the trained depth."""
DEPTH_BIAS_SCALE = 3.0
"""Draft tokens over which the length bias of a larger K sets in."""
TREE_MISS_EXPONENT = 0.75
"""P(the root level misses) falls as width^-0.75: later candidates are right far less often."""

# A target that leaves room for fewer tokens than this beside weights and head has no world there.
_LEAST_KV_TOKENS = 8_192
_RESERVED_BYTES = 4e9
"""Working memory and graphs, for that rule alone."""


def _fits(hardware: Hardware, target: Target, head: Head) -> bool:
    left = hardware.memory_bytes * 0.9 - target.weight_bytes - head.weight_bytes - _RESERVED_BYTES
    return left >= _LEAST_KV_TOKENS * target.kv_bytes_per_token


def _launch_s(target: Target) -> float:
    """Loading, compiling and capturing: 40 s and 2.2 s a GB, up to about 200 s."""
    return min(200.0, 40.0 + 2.2 * target.weight_bytes / 1e9)


def _matrix() -> dict[str, World]:
    return {
        f"{gpu}-{model}": World(hardware, target, HEADS[model], _launch_s(target))
        for gpu, hardware in HARDWARE.items()
        for model, target in TARGETS.items()
        if _fits(hardware, target, HEADS[model])
    }


def _with_trees(gpu: str, model: str, head: str) -> World:
    target = TARGETS[model]
    return World(HARDWARE[gpu], target, EAGLE3_HEADS[head], _launch_s(target), has_trees=True)


# Fitted to real runs of the demo on 2 CPU cores (K 0 to 8, concurrency 1, 4 and 16), which it
# meets within 16 %: alone speculation wins by a third to a half, at 16 every K loses.
_CPU_DEMO = World(
    Hardware(
        "2-core CPU", 9.5e9, 212e9, 8e9,
        max_num_batched_tokens=2048, max_num_seqs=32, has_fp8=False, has_fp8_arithmetic=False,
    ),
    Target(
        name="SmolLM2-135M",
        weight_bytes=269e6,
        active_bytes=269e6,
        flops_per_token=269e6,
        kv_bytes_per_token=23_040,  # 30 layers x 3 KV heads x 64 x 2 x 2 bytes
        num_layers=30,
        overhead_s=1.2e-3,
        overhead_per_row_s=1.1e-3,
        hidden_size=576,
        vocab_size=49_152,
    ),
    Head(
        29e6, 3, 3.8e-3, (0.60, 0.25, 0.085, 0.042, 0.022, 0.012, 0.008, 0.005),
        overhead_per_row_s=0.35e-3, draft_vocab_size=4096,
    ),
    launch_s=36.0,
)  # fmt: skip

_MATRIX = _matrix()

WORLDS: dict[str, World] = {
    "h100-8b": _MATRIX["h100-qwen3-8b"],
    "l40s-8b": _MATRIX["l40s-qwen3-8b"],
    **_MATRIX,
    # Engines with autoregressive heads, which draw trees.
    "h100-8b-trees": _with_trees("h100", "qwen3-8b", "8b"),
    "l40s-8b-trees": _with_trees("l40s", "qwen3-8b", "8b"),
    "b200-gpt-oss-20b-trees": _with_trees("b200", "gpt-oss-20b", "gpt-oss-20b"),
    "cpu-demo": _CPU_DEMO,
}


def survival(world: World, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return the prefix survivals of a chain of K drafts, with the checkpoint's own precision.

    P(the first i + 1 drafts are all accepted), for i = 0 to K - 1. Past the trained depth they collapse; a
    larger K lowers all of them a little (`Head.depth_bias`).
    """
    head, k = world.head, num_speculative_tokens
    beyond = range(1, k - len(head.survival) + 1)
    chain = (*head.survival, *(head.survival[-1] * COLLAPSE_RATIO**i for i in beyond))[:k]
    bias = 1 - head.depth_bias * (1 - math.exp(-(k - 1) / DEPTH_BIAS_SCALE))
    return tuple(value * bias for value in chain)


def acceptance(world: World, config: ServingConfig) -> tuple[float, ...]:
    """Return P(more than i drafts are accepted) under `config`: precision and trees counted in.

    One value a level: K for a chain, K / width for a tree, whose root level tries `width` candidates.
    """
    depth = config.num_speculative_tokens // config.tree_width
    levels = survival(world, depth)
    if config.tree_width > 1:
        root = 1 - (1 - levels[0]) * config.tree_width**-TREE_MISS_EXPONENT
        levels = tuple(level * root / levels[0] for level in levels)
    factor = 1.0
    if config.weights == "fp8":
        factor *= world.head.fp8_weights_acceptance
    if config.kv_cache_dtype == "fp8":
        factor *= world.head.fp8_kv_acceptance
    return tuple(min(1.0, level * factor ** (i + 1)) for i, level in enumerate(levels))
