"""The named parts of the simulated worlds, with where their numbers come from.

Sizes are those of the published checkpoints; rates that serving reaches, overheads and heads marked
"invented" are plausible, not measured. `docs/engines.md` says which figures anything was fitted to.
"""

from __future__ import annotations

from autotune.serving.worlds_parts import Hardware, Head, Target, chain


def _gpu(
    name: str,
    reached: tuple[float, float],
    peak: tuple[float, float],
    memory_bytes: float,
    capability: tuple[int, int],
    max_num_batched_tokens: int,
) -> Hardware:
    """A data-centre GPU: rates as (bytes per second, FLOPs per second)."""
    has_fp8 = capability >= (8, 9)
    return Hardware(
        name,
        *reached,
        memory_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=1024 if memory_bytes >= 70e9 else 256,
        fp8_compute_gain=1.7 if has_fp8 else 1.0,
        has_fp8_arithmetic=has_fp8,
        peak_bandwidth_bytes_per_s=peak[0],
        peak_flops_per_s=peak[1],
        compute_capability=capability,
        smoothness=4.0,
        has_graphs=True,
        max_capture_size=1024 if capability >= (10, 0) else 512,
        eager_s_per_layer=20e-6,
        fp8_weights_s_per_layer=2e-6,
        fp8_kv_slowdown=1.15,
    )


# Peaks are NVIDIA's data sheets: dense, 16-bit. Default token budgets are vLLM's, by memory.
HARDWARE = {
    "a100": _gpu("A100 80GB SXM", (1.7e12, 220e12), (2.039e12, 312e12), 80e9, (8, 0), 2048),
    "h100": _gpu("H100 SXM", (2.8e12, 560e12), (3.35e12, 989e12), 80e9, (9, 0), 8192),
    "h200": _gpu("H200 SXM", (4.0e12, 560e12), (4.8e12, 989e12), 141e9, (9, 0), 8192),
    "b200": _gpu("B200", (6.4e12, 1200e12), (8.0e12, 2250e12), 180e9, (10, 0), 16384),
    "l40s": _gpu("L40S", (0.72e12, 150e12), (0.864e12, 362e12), 48e9, (8, 9), 2048),
}

TARGETS = {
    "qwen3-8b": Target(
        name="Qwen3-8B", weight_bytes=16.4e9, active_bytes=16.4e9, flops_per_token=16.4e9,
        kv_bytes_per_token=147_456,  # 36 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes
        num_layers=36, overhead_s=0.9e-3, overhead_per_row_s=5e-6,
        hidden_size=4096, vocab_size=151_936,
    ),
    "qwen3-14b": Target(
        name="Qwen3-14B", weight_bytes=29.5e9, active_bytes=29.5e9, flops_per_token=29.5e9,
        kv_bytes_per_token=163_840,  # 40 x 8 x 128 x 2 x 2
        num_layers=40, overhead_s=1.0e-3, overhead_per_row_s=5e-6,
        hidden_size=5120, vocab_size=151_936,
    ),
    "qwen3-32b": Target(
        name="Qwen3-32B", weight_bytes=65.5e9, active_bytes=65.5e9, flops_per_token=65.5e9,
        kv_bytes_per_token=262_144,  # 64 x 8 x 128 x 2 x 2
        num_layers=64, overhead_s=1.5e-3, overhead_per_row_s=6e-6,
        hidden_size=5120, vocab_size=151_936,
    ),
    "gpt-oss-20b": Target(
        name="gpt-oss-20b", weight_bytes=13.7e9, active_bytes=3.7e9, flops_per_token=7.2e9,
        kv_bytes_per_token=49_152,  # 24 x 8 x 64 x 2 x 2
        num_layers=24, overhead_s=1.5e-3, overhead_per_row_s=15e-6, is_quantized=True,
        hidden_size=2880, vocab_size=201_088, num_parameters=20.9e9,
        num_experts=32, num_experts_per_token=4, routing_overlap=0.6,
    ),
    # About 370 tok/s alone without speculation, best K about 7 alone and 3 at 8 (vLLM PR #32887).
    "gpt-oss-120b": Target(
        name="gpt-oss-120b", weight_bytes=64e9, active_bytes=5.0e9, flops_per_token=10.2e9,
        kv_bytes_per_token=73_728,  # 36 x 8 x 64 x 2 x 2
        num_layers=36, overhead_s=1.9e-3, overhead_per_row_s=15e-6, is_quantized=True,
        hidden_size=2880, vocab_size=201_088, num_parameters=116.8e9,
        num_experts=128, num_experts_per_token=4, routing_overlap=0.6,
    ),
    "qwen3-coder-30b": Target(
        name="Qwen3-Coder-30B-A3B", weight_bytes=61.1e9, active_bytes=6.6e9, flops_per_token=6.6e9,
        kv_bytes_per_token=98_304,  # 48 x 4 x 128 x 2 x 2
        num_layers=48, overhead_s=1.9e-3, overhead_per_row_s=5e-6,
        hidden_size=2048, vocab_size=151_936, num_experts=128, num_experts_per_token=8,
        routing_overlap=0.6,
    ),
    # Layers, width and cache are invented; sliding-window layers keep the cache small.
    "gemma-4-31b": Target(
        name="Gemma-4-31B", weight_bytes=62e9, active_bytes=62e9, flops_per_token=62e9,
        kv_bytes_per_token=200_000,
        num_layers=60, overhead_s=1.5e-3, overhead_per_row_s=8e-6,
        hidden_size=5376, vocab_size=262_144,
    ),
}  # fmt: skip


def _p_eagle(
    weight_bytes: float,
    survival: tuple[float, ...],
    *,
    overhead_s: float = 0.4e-3,
    fp8_acceptance: float = 0.99,
    states_depth: bool = True,
) -> Head:
    return Head(
        weight_bytes, 4, overhead_s, survival, overhead_per_row_s=0.5e-6, depth_bias=0.03,
        fp8_weights_acceptance=fp8_acceptance, fp8_kv_acceptance=0.995, states_depth=states_depth,
    )  # fmt: skip


def _eagle3(weight_bytes: float, survival: tuple[float, ...]) -> Head:
    return Head(
        weight_bytes, 1, 0.2e-3, survival, overhead_per_row_s=1e-6, is_parallel=False,
        states_depth=False, depth_bias=0.03, fp8_weights_acceptance=0.99, fp8_kv_acceptance=0.995,
    )  # fmt: skip


HEADS = {
    # Invented for the three dense Qwen3 sizes and for Gemma, whose trained depth nobody states.
    "qwen3-8b": _p_eagle(2.2e9, chain(0.74, 0.72, 0.985, 8)),
    "qwen3-14b": _p_eagle(2.6e9, chain(0.74, 0.73, 0.985, 8)),
    "qwen3-32b": _p_eagle(2.8e9, chain(0.75, 0.73, 0.985, 8)),
    "gemma-4-31b": _p_eagle(3.2e9, chain(0.72, 0.70, 0.985, 8), states_depth=False),
    # Depths and acceptance lengths from the cards and vLLM's post of 2026-03-13.
    "gpt-oss-20b": _p_eagle(3.6e9, chain(0.825, 0.825, 0.935, 10)),
    "gpt-oss-120b": _p_eagle(
        3.4e9, (0.67, 0.44, 0.28, 0.175, 0.117, 0.095, 0.085, 0.055), overhead_s=0.7e-3
    ),
    "qwen3-coder-30b": _p_eagle(
        1.2e9,
        (0.937, 0.875, 0.807, 0.745, 0.62, 0.52, 0.43, 0.36, 0.30, 0.25,
         0.20, 0.17, 0.14, 0.11, 0.09, 0.07, 0.055, 0.045),
        fp8_acceptance=1.005,  # trained on hidden states of the FP8 target
    ),
}  # fmt: skip

EAGLE3_HEADS = {
    "8b": _eagle3(0.85e9, chain(0.72, 0.72, 0.95, 12)),  # invented
    "gpt-oss-20b": _eagle3(1.8e9, chain(0.75, 0.72, 0.90, 12)),  # acceptance as in vLLM's post
}
