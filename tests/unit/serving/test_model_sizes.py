"""Sizes read out of model folders and devices, against published figures and sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.demo.target import head_dir
from autotune.errors import InputError
from autotune.serving.device_sizes import cpu_sizes, gpu_sizes, peaks_of
from autotune.serving.gpu import Gpu
from autotune.serving.model_sizes import drafter_sizes, target_sizes
from autotune.serving.models import inspect_drafter

Write = Callable[..., Path]

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 500,
}
SHAPES = {"model.embed_tokens.weight": [500, 64], "model.layers.0.mlp.up_proj.weight": [128, 64]}


def test_a_dense_target(write_model: Write) -> None:
    sizes = target_sizes(write_model("target", CONFIG, SHAPES))

    assert sizes is not None
    assert sizes.num_parameters == sizes.num_active_parameters == 500 * 64 + 128 * 64
    assert sizes.weight_bytes == 2 * (500 * 64 + 128 * 64)
    # 3 layers x 2 KV heads x (64 / 4) x K and V x 2 bytes.
    assert sizes.kv_bytes_per_token == 3 * 2 * 16 * 2 * 2
    assert (sizes.num_experts, sizes.expert_bytes, sizes.is_quantized) == (0, 0.0, False)


@pytest.mark.parametrize(
    ("count", "per_token"),
    [
        ("num_local_experts", "experts_per_token"),
        ("num_experts", "num_experts_per_tok"),
        ("n_routed_experts", "num_experts_per_tok"),
    ],
)
def test_a_mixture_of_experts(write_model: Write, count: str, per_token: str) -> None:
    shapes = {
        **SHAPES,
        "model.layers.0.mlp.experts.0.up_proj.weight": [100, 64],
        "model.layers.0.mlp.experts.1.up_proj.weight": [100, 64],
        "model.layers.0.mlp.shared_expert.up_proj.weight": [10, 64],
    }
    sizes = target_sizes(write_model("target", {**CONFIG, count: 8, per_token: 2}, shapes))

    assert sizes is not None
    shared = 500 * 64 + 128 * 64 + 10 * 64
    assert sizes.num_parameters == shared + 12_800
    assert sizes.num_active_parameters == shared + 12_800 * 2 / 8
    assert (sizes.num_experts, sizes.num_experts_per_token) == (8, 2)
    assert sizes.expert_bytes == 2 * 12_800


def test_latent_attention_and_missing_weights_are_not_known(write_model: Write) -> None:
    assert target_sizes(write_model("mla", {**CONFIG, "kv_lora_rank": 512}, SHAPES)) is None
    assert target_sizes(write_model("bare", CONFIG)) is None


def test_a_broken_file_is_refused(write_model: Write) -> None:
    folder = write_model("target", CONFIG)
    (folder / "model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(InputError, match="not a readable safetensors file"):
        target_sizes(folder)
    with pytest.raises(InputError, match="num_hidden_layers"):
        target_sizes(write_model("odd", {**CONFIG, "num_hidden_layers": "x"}, SHAPES))


def test_the_demos_head() -> None:
    """29 MB of bf16; 3 layers x 3 KV heads x 64 x K and V x 2 bytes."""
    sizes = drafter_sizes(inspect_drafter(str(head_dir())))

    assert sizes is not None
    assert sizes.weight_bytes == pytest.approx(29.1e6, rel=0.01)
    assert sizes.kv_bytes_per_token == 3 * 3 * 64 * 2 * 2
    assert (sizes.num_layers, sizes.draft_vocab_size) == (3, 4096)


@pytest.mark.parametrize(
    ("name", "terabytes_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H100 PCIe", 2.0),
        ("NVIDIA H100 NVL", 3.9),
        ("NVIDIA H200", 4.8),
        ("NVIDIA B200", 8.0),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA A100 80GB PCIe", 1.935),
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA L40S", 0.864),
        ("NVIDIA L4", 0.3),
        ("NVIDIA A10G", 0.6),
    ],
)
def test_data_sheets(name: str, terabytes_per_s: float) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.bandwidth_bytes_per_s == pytest.approx(terabytes_per_s * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA L40", "Tesla T4", ""])
def test_an_unknown_gpu_has_no_rates(name: str) -> None:
    assert peaks_of(name) is None


@pytest.mark.parametrize(
    ("name", "gib", "seqs", "tokens"),
    [
        ("NVIDIA L40S", 45, 256, 2048),
        ("NVIDIA A100-SXM4-80GB", 80, 256, 2048),
        ("NVIDIA H100 80GB HBM3", 80, 1024, 8192),
        ("NVIDIA B200", 179, 1024, 16384),
    ],
)
def test_vllms_defaults_by_gpu(name: str, gib: int, seqs: int, tokens: int) -> None:
    sizes = gpu_sizes(Gpu("uuid", name, (9, 0), gib * 2**30, 0, "1"))

    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (seqs, tokens)
    assert sizes.memory_bytes == gib * 2**30


def test_fp8_arithmetic_begins_at_8_9() -> None:
    for capability, has_fp8 in (((8, 6), False), ((8, 9), True), ((10, 0), True)):
        gpu = Gpu("uuid", "GPU", capability, 2**35, 0, "1")
        assert gpu_sizes(gpu).has_fp8_arithmetic is has_fp8


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2", 2**31), ("", None), ("0", None), ("x", None)]
)
def test_a_cpus_cache_is_what_the_environment_says(text: str, num_bytes: float | None) -> None:
    sizes = cpu_sizes("CPU", {"VLLM_CPU_KVCACHE_SPACE": text})

    assert (sizes.kv_bytes, sizes.memory_bytes, sizes.has_graphs) == (num_bytes, None, False)
