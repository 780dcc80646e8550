"""What is read out of model folders: heads of every kind, and why others are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError, PrerequisiteError
from autotune.serving.models import (
    DrafterInfo,
    ModelInfo,
    check_pair,
    find_model,
    inspect_drafter,
    inspect_model,
)

Write = Callable[..., Path]

TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

# A P-EAGLE head as vLLM loads it, scaled down: hidden size 64, three auxiliary layers.
HEAD_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "target_hidden_size": 64,
    "vocab_size": 500,
    "draft_vocab_size": 100,
    "ptd_token_id": 3,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
}
HEAD_SHAPES = {
    "fc.weight": [64, 192],
    "norm.weight": [64],
    "lm_head.weight": [100, 64],
    "mask_hidden": [1, 192],
    "layers.0.self_attn.q_proj.weight": [64, 128],
}


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        inspect_drafter(str(folder))
    return str(caught.value)


# --- heads ---


def test_a_p_eagle_head(write_model: Write) -> None:
    folder = write_model("head", HEAD_CONFIG, HEAD_SHAPES)
    found = inspect_drafter(str(folder))
    assert found == DrafterInfo(
        name=str(folder),
        folder=folder.resolve(),
        kind="p-eagle",
        trained_depth=None,
        num_layers=2,
        draft_vocab_size=100,
        target_hidden_size=64,
        vocab_size=500,
    )
    assert found.is_parallel
    assert found.describe() == ("P-EAGLE, 2 layers, draft vocabulary 100, trained depth unknown")


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_each_name_of_the_mask_token_is_known(write_model: Write, key: str) -> None:
    # Token 0 is a token as well.
    config = {**without(HEAD_CONFIG, "ptd_token_id"), key: 0}
    assert inspect_drafter(str(write_model("head", config, HEAD_SHAPES))).is_parallel


def test_a_plain_eagle3_head(write_model: Write) -> None:
    config = without(HEAD_CONFIG, "ptd_token_id")
    found = inspect_drafter(str(write_model("head", config, without(HEAD_SHAPES, "mask_hidden"))))
    assert found.kind == "eagle3"
    assert not found.is_parallel
    assert "EAGLE-3 (one pass per token)" in found.describe()


def test_a_head_that_states_its_depth(write_model: Write) -> None:
    config = {**HEAD_CONFIG, "num_parallel_draft_tokens": 8}
    found = inspect_drafter(str(write_model("head", config, HEAD_SHAPES)))
    assert found.trained_depth == 8
    assert found.describe().endswith("trained depth 8")


def test_the_width_of_fc_tells_the_targets_hidden_size(write_model: Write) -> None:
    # fc takes the hidden states of all auxiliary layers: 2 x 96 = 192. The config says nothing.
    config = {
        **without(HEAD_CONFIG, "target_hidden_size"),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]},
    }
    assert inspect_drafter(str(write_model("head", config, HEAD_SHAPES))).target_hidden_size == 96


def test_without_layer_ids_three_auxiliary_layers_are_meant(write_model: Write) -> None:
    config = without(HEAD_CONFIG, "target_hidden_size", "eagle_config")
    assert inspect_drafter(str(write_model("head", config, HEAD_SHAPES))).target_hidden_size == 64


def test_the_draft_vocabulary_is_the_targets_unless_told(write_model: Write) -> None:
    config = without(HEAD_CONFIG, "draft_vocab_size")
    found = inspect_drafter(str(write_model("h", config, without(HEAD_SHAPES, "lm_head.weight"))))
    assert found.draft_vocab_size == 500


def test_tensors_may_be_spread_over_files(write_model: Write) -> None:
    folder = write_model("head", HEAD_CONFIG, {"mask_hidden": [1, 192]})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    other = write_model("other", HEAD_CONFIG, {"fc.weight": [64, 288]})
    (other / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    found = inspect_drafter(str(folder))
    assert found.is_parallel
    assert found.target_hidden_size == 96  # 288 / 3


SPECULATORS_CONFIG: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": 3,
    "draft_vocab_size": 100,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 500,
        "num_hidden_layers": 4,
    },
    "speculators_config": {
        "algorithm": "peagle",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "verifier": {"name_or_path": "owner/target"},
    },
}


def test_a_head_of_the_speculators_library(write_model: Write) -> None:
    folder = write_model("head", SPECULATORS_CONFIG, {"mask_hidden": [1, 192]})
    assert inspect_drafter(str(folder)) == DrafterInfo(
        name=str(folder),
        folder=folder.resolve(),
        kind="p-eagle",
        trained_depth=8,
        num_layers=4,
        draft_vocab_size=100,
        target_hidden_size=64,
        vocab_size=500,
    )


def test_an_eagle3_head_of_the_speculators_library(write_model: Write) -> None:
    config = {**SPECULATORS_CONFIG, "speculators_model_type": "eagle3"}
    assert not inspect_drafter(str(write_model("head", config))).is_parallel


def test_the_head_that_ships_is_a_p_eagle_head() -> None:
    from autotune.demo.target import head_dir

    found = inspect_drafter(str(head_dir()))
    assert found.kind == "p-eagle"
    assert found.trained_depth is not None
    assert (found.target_hidden_size, found.vocab_size) == (576, 49_152)  # SmolLM2-135M


# --- heads that are refused ---


def test_another_architecture_is_refused(write_model: Write) -> None:
    config = {**HEAD_CONFIG, "architectures": ["LlamaForCausalLM"]}
    folder = write_model("head", config, HEAD_SHAPES)
    assert refusal(folder) == (
        f"{folder / 'config.json'}: architectures: the drafter must be an EAGLE-3 or P-EAGLE head, "
        "but got 'LlamaForCausalLM'."
    )


def test_no_architecture_is_refused(write_model: Write) -> None:
    folder = write_model("head", without(HEAD_CONFIG, "architectures"), HEAD_SHAPES)
    assert "must be an EAGLE-3 or P-EAGLE head, but got ''" in refusal(folder)


def test_a_mask_token_without_mask_hidden_is_refused(write_model: Write) -> None:
    folder = write_model("head", HEAD_CONFIG, without(HEAD_SHAPES, "mask_hidden"))
    message = refusal(folder)
    assert message.startswith(f"{folder}: ")
    assert "must have the tensor mask_hidden" in message
    assert "vLLM refuses parallel drafting" in message


def test_mask_hidden_without_a_mask_token_is_refused(write_model: Write) -> None:
    folder = write_model("head", without(HEAD_CONFIG, "ptd_token_id"), HEAD_SHAPES)
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert "mask_token_id, pard_token or ptd_token_id" in message


def test_an_lm_head_of_another_size_is_refused(write_model: Write) -> None:
    folder = write_model("head", HEAD_CONFIG, {**HEAD_SHAPES, "lm_head.weight": [101, 64]})
    assert "draft_vocab_size = 100 rows, but got [101, 64]" in refusal(folder)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", [64]])
def test_sizes_must_be_whole_numbers_above_zero(
    write_model: Write, key: str, value: object
) -> None:
    config = {**without(HEAD_CONFIG, "target_hidden_size"), key: value}
    folder = write_model("head", config, HEAD_SHAPES)
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: {key}: must be ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_vocab_size", "many"),
        ("draft_vocab_size", [100]),
        ("target_hidden_size", "big"),
        ("num_parallel_draft_tokens", "eight"),
        ("eagle_config", "none"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": 3}),
        ("architectures", {"first": "LlamaForCausalLMEagle3"}),
        ("speculators_config", "none"),
    ],
)
def test_values_of_another_type_are_refused(write_model: Write, key: str, value: object) -> None:
    folder = write_model("head", {**HEAD_CONFIG, key: value}, HEAD_SHAPES)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\x00\x00",  # less than the length itself
        struct.pack("<Q", 2**40) + b"{}",  # a length beyond any file
        struct.pack("<Q", 100) + b'{"fc.weight": {"shape": [64',  # cut in the header
        struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 20) + b'{"fc.weight": "no"}\n',
        struct.pack("<Q", 17) + b'{"fc.weight": {}}',
    ],
)
def test_a_broken_safetensors_file_is_refused(write_model: Write, content: bytes) -> None:
    folder = write_model("head", HEAD_CONFIG)
    (folder / "model.safetensors").write_bytes(content)
    message = refusal(folder)
    assert message.startswith(f"{folder.resolve() / 'model.safetensors'}: ")
    assert "is not a readable safetensors file" in message


@pytest.mark.parametrize("shape", [[], [64]])
def test_an_fc_of_another_rank_is_refused(write_model: Write, shape: list[int]) -> None:
    folder = write_model("head", HEAD_CONFIG, {**HEAD_SHAPES, "fc.weight": shape})
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", "\ufeff{}x"])
def test_a_config_that_is_no_object_is_refused(write_model: Write, text: str) -> None:
    folder = write_model("head", HEAD_CONFIG, HEAD_SHAPES)
    (folder / "config.json").write_text(text, encoding="utf-8")
    message = refusal(folder)
    assert message.startswith(f"{folder.resolve() / 'config.json'}: ")
    assert "the model's config" in message


# --- targets ---


def test_a_target(write_model: Write) -> None:
    folder = write_model("target", TARGET_CONFIG)
    assert inspect_model(str(folder)) == ModelInfo(
        name=str(folder),
        folder=folder.resolve(),
        hidden_size=64,
        vocab_size=500,
        head_dim=16,  # 64 / 4
        max_position_embeddings=2048,
        dtype="bfloat16",
        quantization=None,
    )


def test_a_target_that_states_its_head_size_and_quantization(write_model: Write) -> None:
    config = {
        **TARGET_CONFIG,
        "head_dim": 128,
        "dtype": "float16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found = inspect_model(str(write_model("target", config)))
    assert (found.head_dim, found.dtype, found.quantization) == (128, "float16", "mxfp4")


def test_the_text_part_of_a_multimodal_target_is_read(write_model: Write) -> None:
    config = {"architectures": ["X"], "text_config": TARGET_CONFIG}
    assert inspect_model(str(write_model("target", config))).hidden_size == 64


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
def test_a_target_without_a_size_is_refused(write_model: Write, key: str) -> None:
    folder = write_model("target", without(TARGET_CONFIG, key))
    with pytest.raises(InputError, match=f"{key}: the key is required"):
        inspect_model(str(folder))


# --- pairs ---


def pair(write_model: Write, **head: int) -> tuple[ModelInfo, DrafterInfo]:
    target = inspect_model(str(write_model("target", TARGET_CONFIG)))
    shapes = {**HEAD_SHAPES, "fc.weight": [64, 3 * head.get("target_hidden_size", 64)]}
    drafter = inspect_drafter(str(write_model("head", {**HEAD_CONFIG, **head}, shapes)))
    return target, drafter


def test_a_head_of_this_target_is_taken(write_model: Write) -> None:
    check_pair(*pair(write_model))


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ({"target_hidden_size": 96}, "hidden size 96, but .* has 64"),
        ({"vocab_size": 1500}, "vocabulary 1,500, but .* has 500"),
    ],
)
def test_a_head_of_another_target_is_refused(
    write_model: Write, head: dict[str, int], told: str
) -> None:
    with pytest.raises(InputError, match=f"{told}. Give a head that was trained for this target."):
        check_pair(*pair(write_model, **head))


# --- finding models ---


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty Hugging Face cache."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def cached(hub: Path, name: str, revision: str, age_s: float = 0) -> Path:
    folder = hub / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG), encoding="utf-8")
    then = (folder / "config.json").stat().st_mtime - age_s
    os.utime(folder, (then, then))
    return folder


def test_a_hub_id_is_found_in_the_cache_at_its_newest(hub: Path) -> None:
    cached(hub, "owner/target", "old", age_s=100)
    newest = cached(hub, "owner/target", "new")
    cached(hub, "owner/target", "older", age_s=200)
    assert find_model("owner/target", "model", "--model") == newest
    assert inspect_model("owner/target").name == "owner/target"


def test_the_cache_may_be_elsewhere(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached(tmp_path / "elsewhere", "owner/target", "r")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert find_model("owner/target", "model", "--model") == folder


def test_a_hub_id_that_was_not_downloaded_gets_the_command(hub: Path) -> None:
    with pytest.raises(
        PrerequisiteError, match=r"traffic\.yaml: drafter: .*hf download owner/head$"
    ):
        find_model("owner/head", "drafter", "traffic.yaml")


@pytest.mark.parametrize(
    "name", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c", "../owner/x", "owner/", "a\0b"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused(hub: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        find_model(name, "drafter", "--drafter")
    assert str(caught.value) == (
        "--drafter: drafter: the drafter must be an existing folder or a hub id such as owner/name, "
        f"but got {name!r}. Check the path."
    )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model's folder must hold a config.json"):
        find_model(str(tmp_path), "model", "--model")


def test_the_depth_of_published_heads_is_known(hub: Path) -> None:
    # Their cards state it, their configs do not.
    folder = cached(hub, "amazon/GPT-OSS-20B-P-EAGLE", "r")
    (folder / "config.json").write_text(json.dumps(HEAD_CONFIG), encoding="utf-8")
    assert inspect_drafter("amazon/GPT-OSS-20B-P-EAGLE").trained_depth == 10
