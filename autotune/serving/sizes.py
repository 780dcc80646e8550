"""Sizes of a target, its draft heads and the device, for arithmetic before anything is launched.

They come from files and data sheets. What serving reaches of a device's rates is for measurements to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TargetSizes:
    """A target model as its checkpoint is loaded."""

    num_parameters: float
    """All of them."""
    num_active_parameters: float
    """Those that one token goes through; below `num_parameters` for a mixture of experts."""
    weight_bytes: float
    """Of the checkpoint as it is, on the device."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_bytes_per_token: float
    """With a 16-bit cache."""
    is_quantized: bool = False
    """Whether the checkpoint is quantised already."""
    num_experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    num_experts_per_token: int = 0
    expert_bytes: float = 0.0
    """The part of `weight_bytes` that is experts."""


@dataclass(frozen=True)
class DrafterSizes:
    """A draft head, which stays 16-bit whatever the target's weights are."""

    num_parameters: float
    weight_bytes: float
    num_layers: int
    kv_bytes_per_token: float
    draft_vocab_size: int


@dataclass(frozen=True)
class DeviceSizes:
    """The device that serves. Rates are the data sheet's peaks, None where nobody states them."""

    name: str
    memory_bytes: float | None
    """Of the whole device; None where the KV cache has a size of its own (`kv_bytes`)."""
    max_num_seqs: int
    """What the engine takes by default on it."""
    max_num_batched_tokens: int
    """What the engine takes by default on it."""
    kv_bytes: float | None = None
    """Size of the KV cache where it does not depend on what else is in memory, as on CPU."""
    bandwidth_bytes_per_s: float | None = None
    compute_flops_per_s: float | None = None
    """Dense, 16-bit."""
    has_fp8_arithmetic: bool = False
    has_graphs: bool = True
    """Whether steps are padded to captured sizes (CUDA graphs)."""


@dataclass(frozen=True)
class ServingSizes:
    """All that the arithmetic needs."""

    target: TargetSizes
    drafters: Mapping[str, DrafterSizes]
    """By the name the server is told (`ServingConfig.drafter`)."""
    device: DeviceSizes
    gpu_memory_utilization: float = 0.92
    """Share of the memory that the engine takes, vLLM's default; a fixed option overrides it."""
