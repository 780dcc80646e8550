"""What a simulated world is made of: hardware, a target and a draft head, each as a few numbers.

Whatever a part does not say has no effect, so worlds of round numbers can be checked by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    """How many times faster the arithmetic is with FP8 weights, where it has FP8 arithmetic."""
    has_fp8: bool = True
    """Whether FP8 weights can be made at load."""
    has_fp8_arithmetic: bool = True
    """Whether it computes in FP8 and can hold an FP8 KV cache; without, FP8 weights only save bytes."""
    peak_bandwidth_bytes_per_s: float | None = None
    """The data sheet's; None where there is none."""
    peak_flops_per_s: float | None = None
    """The data sheet's, dense and 16-bit; None where there is none."""
    compute_capability: tuple[int, int] | None = None
    smoothness: float = math.inf
    """Exponent p of (memory^p + compute^p)^(1/p); infinite is the larger of the two."""
    has_graphs: bool = False
    """Whether steps are padded to captured sizes (CUDA graphs)."""
    max_capture_size: int = 512
    """Largest captured size by default, in tokens; 1024 on SM 10.x."""
    eager_s_per_layer: float = 0.0
    """What launching one layer's kernels adds to a step without a graph."""
    fp8_weights_s_per_layer: float = 0.0
    """What quantising the activations of a layer adds to a step with FP8 weights."""
    fp8_kv_slowdown: float = 1.0
    """Factor on the time that reading one byte of an FP8 cache takes."""


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
    hidden_size: int = 0
    vocab_size: int = 0
    """0 where the sampler's buffers are left out."""
    num_parameters: float | None = None
    """None: 16-bit weights, 2 bytes each."""
    num_experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    num_experts_per_token: int = 0
    routing_overlap: float = 0.0
    """Share of a draft's experts that rows of the same request touch anyway: neighbouring tokens are
    routed alike, those of different requests are not."""

    def __post_init__(self) -> None:
        if (self.active_bytes < self.weight_bytes) != (self.num_experts > 0):
            raise ValueError("active_bytes must be below weight_bytes exactly with num_experts")

    @property
    def expert_bytes(self) -> float:
        """The part of `weight_bytes` that is experts.

        One token reads all but these, and of these `num_experts_per_token` / `num_experts`.
        """
        if not self.num_experts:
            return 0.0
        unread_ratio = 1 - self.num_experts_per_token / self.num_experts
        return (self.weight_bytes - self.active_bytes) / unread_ratio


@dataclass(frozen=True)
class Head:
    """A draft head."""

    weight_bytes: float
    num_layers: int
    overhead_s: float
    """Fixed part of one drafting pass."""
    survival: tuple[float, ...]
    """P(the first i + 1 drafts are all accepted) at K = 1's bias, up to the trained depth; must not rise."""
    overhead_per_row_s: float = 0.0
    """Part that grows with the drafted rows: logits, picking the drafts."""
    draft_vocab_size: int = 32_000
    is_parallel: bool = True
    """P-EAGLE, which drafts all in one pass; False for an autoregressive EAGLE-3 head."""
    states_depth: bool = True
    """Whether anybody says how deep it was trained."""
    depth_bias: float = 0.0
    """Share of every survival that is lost at a large K: deep drafts shorten easy stretches to few steps, so
    steps are of harder text on average (length bias)."""
    fp8_weights_acceptance: float = 1.0
    """Factor on the acceptance of every position where the target's weights are FP8."""
    fp8_kv_acceptance: float = 1.0
    """The same for an FP8 KV cache."""

    @property
    def trained_depth(self) -> int | None:
        return len(self.survival) if self.states_depth else None


@dataclass(frozen=True)
class World:
    """What is simulated: this target with this head on this hardware."""

    hardware: Hardware
    target: Target
    head: Head
    launch_s: float = 90.0
    has_trees: bool = False
    """Whether the engine drafts trees; it takes an autoregressive head."""


def chain(first: float, keep: float, decline: float, depth: int) -> tuple[float, ...]:
    """Prefix survivals of a chain: position i survives with `keep` x `decline`^(i - 1)."""
    survival = [first]
    for position in range(1, depth):
        survival.append(survival[-1] * keep * decline ** (position - 1))
    return tuple(survival)
