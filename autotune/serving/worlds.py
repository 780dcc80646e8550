"""Worlds of the simulated engine: a GPU or CPU, a target and a draft head, each as a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WORLD = "h100-8b"
COLLAPSE_RATIO = 0.3
"""Share of prefixes that survive each position past the trained depth."""


@dataclass(frozen=True)
class Hardware:
    """A GPU or CPU. Rates are what serving reaches, below the data sheet's peaks."""

    name: str
    bandwidth_bytes_per_s: float
    compute_flops_per_s: float
    """With 16-bit weights."""
    memory_bytes: float
    max_num_batched_tokens: int = 8192
    """What vLLM takes by default on it."""
    max_num_seqs: int = 256
    fp8_compute_gain: float = 1.7
    """How many times faster the arithmetic is with FP8 weights."""
    has_fp8: bool = True


@dataclass(frozen=True)
class Target:
    """A model to serve."""

    name: str
    weight_bytes: float
    active_bytes: float
    """Weights that one token needs; below `weight_bytes` for a mixture of experts."""
    flops_per_token: float
    kv_bytes_per_token: float
    """With a 16-bit cache."""
    num_layers: int
    overhead_s: float
    """Fixed part of a step: kernel launches, scheduling, sampling."""
    overhead_per_row_s: float = 0.0
    """Part that grows with the decoded rows: logits, sampling, accepting."""
    activation_bytes_per_token: float = 300e3
    """Working memory per token of `max_num_batched_tokens`."""
    is_quantized: bool = False
    """Whether the checkpoint is quantised already, so that FP8 cannot be asked for."""


@dataclass(frozen=True)
class Head:
    """A draft head."""

    weight_bytes: float
    num_layers: int
    overhead_s: float
    """Fixed part of one drafting pass."""
    survival: tuple[float, ...]
    """P(the first i + 1 drafts are all accepted), up to the trained depth; must not rise."""
    overhead_per_row_s: float = 0.0
    """Part that grows with the drafted rows: logits, picking the drafts."""
    draft_vocab_size: int = 32_000


@dataclass(frozen=True)
class World:
    """What is simulated: this target with this head on this hardware."""

    hardware: Hardware
    target: Target
    head: Head
    launch_s: float = 90.0


def _chain(first: float, keep: float, decline: float, depth: int) -> tuple[float, ...]:
    """Prefix survivals of a chain: position i survives with `keep` x `decline`^(i - 1)."""
    survival = [first]
    for position in range(1, depth):
        survival.append(survival[-1] * keep * decline ** (position - 1))
    return tuple(survival)


_TARGET_8B = Target(
    name="8B dense",
    weight_bytes=16.4e9,
    active_bytes=16.4e9,
    flops_per_token=16.4e9,
    kv_bytes_per_token=147_456,  # 36 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes
    num_layers=36,
    overhead_s=0.9e-3,
    overhead_per_row_s=5e-6,
)
_HEAD_8B = Head(2.2e9, 4, 0.5e-3, _chain(0.74, 0.72, 0.985, 8))

# Shaped like published figures where there are some, not fitted to any one machine.
WORLDS: dict[str, World] = {
    "h100-8b": World(
        Hardware("H100 SXM", 2.8e12, 560e12, 80e9), _TARGET_8B, _HEAD_8B
    ),
    "l40s-8b": World(
        Hardware("L40S", 0.72e12, 150e12, 48e9, max_num_batched_tokens=2048), _TARGET_8B, _HEAD_8B
    ),
    # About 370 tok/s alone without speculation, best K about 7 alone and 3 at 8 (vLLM PR #32887).
    "b200-gpt-oss-120b": World(
        Hardware("B200", 6.4e12, 1200e12, 180e9, max_num_batched_tokens=16384),
        Target(
            name="gpt-oss-120b",
            weight_bytes=63e9,
            active_bytes=2.9e9,
            flops_per_token=10.2e9,
            kv_bytes_per_token=73_728,  # 36 layers x 8 KV heads x 64 x 2 x 2 bytes
            num_layers=36,
            overhead_s=2.2e-3,
            overhead_per_row_s=5e-6,
            is_quantized=True,
        ),
        Head(3.4e9, 4, 0.4e-3, _chain(0.75, 0.74, 0.98, 8)),
        launch_s=180.0,
    ),
    # Fitted to real runs of the demo on 2 CPU cores (K 0 to 8, concurrency 1, 4 and 16), which it
    # meets within 16 %: alone speculation wins by a third to a half, at 16 every K loses.
    "cpu-demo": World(
        Hardware(
            "2-core CPU", 9.5e9, 212e9, 8e9,
            max_num_batched_tokens=2048, max_num_seqs=32, has_fp8=False,
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
        ),
        Head(
            29e6, 3, 3.8e-3, (0.60, 0.25, 0.085, 0.042, 0.022, 0.012, 0.008, 0.005),
            overhead_per_row_s=0.35e-3, draft_vocab_size=4096,
        ),
        launch_s=36.0,
    ),
}  # fmt: skip


def survival(world: World, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return the prefix survivals of the first K drafts; past the trained depth they collapse."""
    trained = world.head.survival
    beyond = range(1, num_speculative_tokens - len(trained) + 1)
    return (*trained, *(trained[-1] * COLLAPSE_RATIO**i for i in beyond))[:num_speculative_tokens]
