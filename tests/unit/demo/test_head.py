"""The head that ships has the layout vLLM loads; read without torch, as any install can."""

from __future__ import annotations

import array
import json
import struct
from pathlib import Path
from typing import Any

import pytest

import autotune.demo

HEAD_DIR = Path(autotune.demo.__file__).parent / "head"

# SmolLM2-135M-Instruct: hidden size 576, MLP 1,536, 9 heads and 3 KV heads of 64 channels.
# Queries are 9 * 64 = 576 wide, keys and values 3 * 64 = 192, three auxiliary states 3 * 576 =
# 1,728. Layer 0 reads the token embedding beside the hidden state: 2 * 576 = 1,152.
COMMON_TO_LAYERS = {
    "self_attn.o_proj.weight": [576, 576],
    "mlp.gate_proj.weight": [1536, 576],
    "mlp.up_proj.weight": [1536, 576],
    "mlp.down_proj.weight": [576, 1536],
    "input_layernorm.weight": [576],
    "post_attention_layernorm.weight": [576],
    "hidden_norm.weight": [576],
}
EXPECTED_SHAPES = {
    "fc.weight": [576, 1728],
    "norm.weight": [576],
    "lm_head.weight": [4096, 576],
    "mask_hidden": [1, 1728],
    "d2t": [4096],
    "layers.0.self_attn.q_proj.weight": [576, 1152],
    "layers.0.self_attn.k_proj.weight": [192, 1152],
    "layers.0.self_attn.v_proj.weight": [192, 1152],
    "layers.1.self_attn.q_proj.weight": [576, 576],
    "layers.1.self_attn.k_proj.weight": [192, 576],
    "layers.1.self_attn.v_proj.weight": [192, 576],
    "layers.2.self_attn.q_proj.weight": [576, 576],
    "layers.2.self_attn.k_proj.weight": [192, 576],
    "layers.2.self_attn.v_proj.weight": [192, 576],
    **{f"layers.{i}.{name}": shape for i in range(3) for name, shape in COMMON_TO_LAYERS.items()},
}


@pytest.fixture(scope="module")
def weights() -> bytes:
    return (HEAD_DIR / "model.safetensors").read_bytes()


def header_size(weights: bytes) -> int:
    (size,) = struct.unpack("<Q", weights[:8])
    return int(size)


def read_header(weights: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(weights[8 : 8 + header_size(weights)])
    header.pop("__metadata__", None)
    return header


def test_tensors_have_the_names_and_shapes_that_vllm_wants(weights: bytes) -> None:
    shapes = {name: entry["shape"] for name, entry in read_header(weights).items()}
    assert shapes == EXPECTED_SHAPES


def test_weights_are_bf16_and_the_vocabulary_map_is_whole_numbers(weights: bytes) -> None:
    types = {name: entry["dtype"] for name, entry in read_header(weights).items()}
    assert types.pop("d2t") == "I64"
    assert set(types.values()) == {"BF16"}


def test_the_file_is_complete(weights: bytes) -> None:
    end = max(entry["data_offsets"][1] for entry in read_header(weights).values())
    assert len(weights) == 8 + header_size(weights) + end


def test_every_draft_id_names_another_token_of_the_target(weights: bytes) -> None:
    begin, end = read_header(weights)["d2t"]["data_offsets"]
    data_start = 8 + header_size(weights)
    offsets = array.array("q", weights[data_start + begin : data_start + end])
    target_ids = [draft_id + offset for draft_id, offset in enumerate(offsets)]
    assert len(set(target_ids)) == 4096
    assert min(target_ids) >= 0
    assert max(target_ids) < 49152


def test_config_says_what_the_weights_are() -> None:
    config = json.loads((HEAD_DIR / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "draft_vocab_size": 4096,
        "vocab_size": 49152,
        "ptd_token_id": 4,
        "num_parallel_draft_tokens": 8,
        "hidden_size": 576,
        "target_hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
