"""A simulated world as its data sheets and checkpoints state it: what a search may know beforehand."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.serving.scheduler_limits import DEFAULT_MEMORY_UTILIZATION
from autotune.serving.sizes import DeviceSizes, DrafterSizes, ServingSizes, TargetSizes
from autotune.serving.worlds import World

BYTES_PER_PARAMETER = 2
"""Of 16-bit weights."""


def world_sizes(world: World, drafters: Iterable[str]) -> ServingSizes:
    """Return the sizes of a world.

    Args:
        world: what is simulated.
        drafters: names under which its one head is served.
    """
    hardware, target, head = world.hardware, world.target, world.head
    num_parameters = target.num_parameters or target.weight_bytes / BYTES_PER_PARAMETER
    drafter = DrafterSizes(
        num_parameters=head.weight_bytes / BYTES_PER_PARAMETER,
        weight_bytes=head.weight_bytes,
        num_layers=head.num_layers,
        kv_bytes_per_token=target.kv_bytes_per_token * head.num_layers / target.num_layers,
        draft_vocab_size=head.draft_vocab_size,
    )
    return ServingSizes(
        target=TargetSizes(
            num_parameters=num_parameters,
            # A multiplication and an addition each.
            num_active_parameters=target.flops_per_token / 2,
            weight_bytes=target.weight_bytes,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            kv_bytes_per_token=target.kv_bytes_per_token,
            is_quantized=target.is_quantized,
            num_experts=target.num_experts,
            num_experts_per_token=target.num_experts_per_token,
            expert_bytes=target.expert_bytes,
        ),
        drafters=dict.fromkeys(drafters, drafter),
        device=DeviceSizes(
            name=hardware.name,
            memory_bytes=hardware.memory_bytes,
            max_num_seqs=hardware.max_num_seqs,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            bandwidth_bytes_per_s=hardware.peak_bandwidth_bytes_per_s,
            compute_flops_per_s=hardware.peak_flops_per_s,
            has_fp8_arithmetic=hardware.has_fp8_arithmetic,
            has_graphs=hardware.has_graphs,
        ),
        gpu_memory_utilization=DEFAULT_MEMORY_UTILIZATION,
    )
