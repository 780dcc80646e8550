"""Which knobs move where: a table of engines, hardware, models and heads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autotune.serving.capabilities import EngineInfo, capabilities
from autotune.serving.models import DrafterInfo, ModelInfo


def engine(version: str = "0.33.0", **facts: Any) -> EngineInfo:
    """An H100, unless said otherwise."""
    return EngineInfo(
        **{
            "engine": "vllm",
            "version": version,
            "device": "cuda",
            "hardware": "1 x H100",
            "compute_capability": (9, 0),
            **facts,
        }
    )


def cpu(*flags: str, version: str = "0.32.0") -> EngineInfo:
    return EngineInfo("vllm", version, "cpu", "a CPU", cpu_flags=frozenset(flags))


def target(head_dim: int = 128, quantization: str | None = None) -> ModelInfo:
    return ModelInfo("t", Path("t"), 4096, 32_000, head_dim, 8192, "bfloat16", quantization)


def head(depth: int | None = 8, kind: Any = "p-eagle") -> DrafterInfo:
    return DrafterInfo("d", Path("d"), kind, depth, 4, 32_000, 4096, 32_000)


EAGLE3 = head(None, "eagle3")


# --- trees ---


@pytest.mark.parametrize(
    ("info", "heads", "reason"),
    [
        # 0.20.2 is the last vLLM with trees, 0.21.0 the first without.
        (engine("0.20.2"), [EAGLE3], None),
        (engine("0.21.0"), [EAGLE3], "vLLM 0.21.0 drafts chains only; .* removed in 0.21.0"),
        (engine("0.33.0"), [EAGLE3], "removed in 0.21.0"),
        (engine("1.0.0"), [EAGLE3], "removed in 0.21.0"),
        (engine("0.9.2"), [EAGLE3], None),
        (engine("0.20.2+cu130"), [EAGLE3], None),
        (engine("0.20.2rc1.dev3"), [EAGLE3], None),
        (engine("unknown"), [EAGLE3], "does not say its version"),
        (cpu("avx512f", version="0.20.2"), [EAGLE3], "CUDA only"),
        # A parallel drafter ignores trees, also where they exist.
        (engine("0.20.2"), [head()], "ignores trees"),
        (engine("0.20.2"), [EAGLE3, head()], "ignores trees"),
        # An engine that says it itself is believed.
        (engine("0.33.0", has_trees=True), [head()], None),
        (
            engine("0.20.2", has_trees=False, engine="mine"),
            [EAGLE3],
            "the mine engine drafts chains",
        ),
    ],
)
def test_trees(info: EngineInfo, heads: list[DrafterInfo], reason: str | None) -> None:
    _check("tree_width", 1, info, target(), heads, reason)


# --- FP8 weights ---


@pytest.mark.parametrize(
    ("info", "model", "reason"),
    [
        (engine(), target(), None),
        (engine(compute_capability=(7, 5)), target(), None),
        (engine(compute_capability=(7, 0)), target(), "compute capability 7.5, this GPU has 7.0"),
        (engine(), target(quantization="mxfp4"), r"already quantised \(mxfp4\)"),
        (cpu("avx512f"), target(), "CPU backend cannot make FP8 weights"),
        (engine(device="simulated", compute_capability=None), None, None),
    ],
)
def test_weights(info: EngineInfo, model: ModelInfo | None, reason: str | None) -> None:
    _check("weights", "as_is", info, model, [head()], reason)


# --- FP8 KV cache ---


@pytest.mark.parametrize(
    ("info", "model", "reason"),
    [
        (engine(), target(), None),
        (engine(compute_capability=(8, 9)), target(), None),
        (engine(compute_capability=(8, 6)), target(), "compute capability 8.9, this GPU has 8.6"),
        (engine(compute_capability=(10, 0)), target(), None),
        (engine(), target(quantization="fp8"), None),  # the cache is not the checkpoint
        (cpu("avx2", "avx512f"), target(64), None),
        (cpu("amx_tile"), target(64), None),
        (cpu("avx2"), target(64), "needs AVX-512 or AMX"),
        (cpu("avx512f"), target(80), "head size divisible by 32, not 80"),
        (cpu("avx512f"), None, None),
    ],
)
def test_kv_cache(info: EngineInfo, model: ModelInfo | None, reason: str | None) -> None:
    _check("kv_cache_dtype", "auto", info, model, [head()], reason)


def _check(
    knob: str,
    value: str | int,
    info: EngineInfo,
    model: ModelInfo | None,
    heads: list[DrafterInfo],
    reason: str | None,
) -> None:
    found = capabilities(info, model, heads)
    assert found.is_live(knob) is (reason is None)
    if reason is not None:
        assert (found.fixed[knob].knob, found.fixed[knob].value) == (knob, value)
        assert re.search(reason, found.fixed[knob].reason), found.fixed[knob].reason


# --- how far K goes ---


@pytest.mark.parametrize(
    ("heads", "options", "cap"),
    [
        ([head(8)], {}, 10),  # two past the trained depth
        ([head(8), head(10)], {}, 12),  # the deeper one
        ([head(8), head(None)], {}, 10),
        ([head(None)], {}, 32),  # nobody states a depth
        ([head(8)], {"beyond_trained_depth": True}, 32),
        ([head(8)], {"max_num_speculative_tokens": 4}, 4),
        ([head(18)], {"max_num_speculative_tokens": 32}, 20),
        ([head(8)], {"beyond_trained_depth": True, "max_num_speculative_tokens": 16}, 16),
        ([], {}, 0),
        ([], {"max_num_speculative_tokens": 16}, 0),
    ],
)
def test_the_cap_on_draft_tokens(
    heads: list[DrafterInfo], options: dict[str, Any], cap: int
) -> None:
    assert capabilities(engine(), target(), heads, **options).max_num_speculative_tokens == cap


def test_without_a_head_there_is_no_speculation_to_search() -> None:
    found = capabilities(engine(), target(), [])
    assert found.fixed["num_speculative_tokens"].value == 0
    assert found.fixed["num_speculative_tokens"].reason == "no drafter is given"
    assert capabilities(engine(), target(), [head()]).is_live("num_speculative_tokens")


def test_other_knobs_always_live() -> None:
    assert capabilities(cpu(), target(), []).is_live("max_num_seqs")


def test_heads_may_come_from_an_iterator() -> None:
    assert capabilities(engine(), target(), iter([head(8)])).max_num_speculative_tokens == 10


# --- the engine's own facts ---


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("0.33.0", (0, 33, 0)),
        ("0.20.2+cu130", (0, 20, 2)),
        ("0.34.0rc1", (0, 34, 0)),
        ("0.33", (0, 33)),
        ("unknown", ()),
    ],
)
def test_versions_compare_as_numbers(version: str, parts: tuple[int, ...]) -> None:
    assert engine(version).version_tuple == parts


def test_an_engine_as_plain_data() -> None:
    info = engine(packages={"torch": "2.14.0"})
    assert info.as_dict() == {
        "engine": "vllm",
        "version": "0.33.0",
        "device": "cuda",
        "hardware": "1 x H100",
        "compute_capability": [9, 0],
        "packages": {"torch": "2.14.0"},
        "is_simulated": False,
    }
    assert cpu().as_dict()["compute_capability"] is None


# --- K by batch size ---


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineInfo("vllm", "0.32.0", "cpu", "CPU"), None),
        (EngineInfo("vllm", "0.25.0", "cuda", "GPU"), None),
        (EngineInfo("vllm", "0.24.1", "cuda", "GPU"), "needs vLLM 0.25"),
        (EngineInfo("vllm", "", "cuda", "GPU"), "needs vLLM 0.25"),
        (EngineInfo("simulated", "1", "simulated", "GPU", is_simulated=True), None),
        (EngineInfo("replay", "0.32.0", "cpu", "CPU"), "not recorded"),
    ],
)
def test_speculation_can_be_switched_off_by_batch(engine: EngineInfo, reason: str | None) -> None:
    found = capabilities(engine, None, [head()]).why_not_off_by_batch

    assert found is None if reason is None else reason in str(found)


def test_it_needs_a_drafter_and_one_data_parallel_rank() -> None:
    engine = EngineInfo("vllm", "0.32.0", "cpu", "CPU")

    assert capabilities(engine, None, []).why_not_off_by_batch == "no drafter is given"
    several = capabilities(engine, None, [head()], data_parallel_size=2)
    assert "data-parallel" in str(several.why_not_off_by_batch)
