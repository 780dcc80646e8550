"""What the folders of a target and a drafter say about themselves, read without torch."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InputError, PrerequisiteError, invalid

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# vLLM reads these keys in this order (llm_base_proposer.py, 0.33); the first one found wins.
_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")

# Trained depths that only the model card states, not the config. Source: the cards of these
# heads on Hugging Face, read 2026-11.
_TRAINED_DEPTH_BY_NAME = {
    "amazon/gpt-oss-120b-p-eagle": 8,
    "amazon/gpt-oss-120b-p-eagle-long-context": 8,
    "amazon/gpt-oss-20b-p-eagle": 10,
    "amazon/gpt-oss-20b-p-eagle-long-context": 10,
    "amazon/qwen3-coder-30b-a3b-instruct-p-eagle": 18,
    "amazon/qwen3-coder-30b-a3b-instruct-p-eagle-long-context": 18,
}


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a target model that decide what can be searched."""

    name: str
    folder: Path
    hidden_size: int
    vocab_size: int
    head_dim: int
    max_position_embeddings: int
    dtype: str
    quantization: str | None
    """Method of a checkpoint that is already quantised, such as ``fp8`` or ``mxfp4``."""


@dataclass(frozen=True)
class DrafterInfo:
    """The facts about a draft head."""

    name: str
    folder: Path
    kind: Literal["p-eagle", "eagle3"]
    trained_depth: int | None
    """How many tokens it learned to draft in one pass; None where nobody states it."""
    num_layers: int
    draft_vocab_size: int
    target_hidden_size: int
    vocab_size: int

    @property
    def is_parallel(self) -> bool:
        """Whether it drafts all tokens in one pass."""
        return self.kind == "p-eagle"

    @property
    def serve_as(self) -> str:
        """What the server is told: the local folder, or the name where there is none."""
        return str(self.folder) if self.folder.is_absolute() else self.name

    def describe(self) -> str:
        depth = (
            f"trained depth {self.trained_depth}"
            if self.trained_depth
            else "trained depth unknown"
        )
        name = "P-EAGLE" if self.is_parallel else "EAGLE-3 (one pass per token)"
        return f"{name}, {self.num_layers} layers, draft vocabulary {self.draft_vocab_size:,}, {depth}"


def find_model(name: str, role: str, where: str) -> Path:
    """Return the local folder of a model: a path, or a hub id that is in the local cache.

    Args:
        name: what the user wrote.
        role: ``model`` or ``drafter``, for messages.
        where: the file or option it was written in, for messages.

    Raises:
        InputError: it looks like a path, and no such folder exists.
        PrerequisiteError: it is a hub id that has not been downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise invalid(f"the {role}'s folder must hold a config.json", where=where, got=name)
        return folder.resolve()
    if not _HUB_ID.fullmatch(name):
        raise invalid(
            f"the {role} must be an existing folder or a hub id such as owner/name",
            where=where,
            key_path=role,
            got=name,
            next_step="Check the path.",
        )
    cached = _in_hub_cache(name)
    if cached is None:
        raise PrerequisiteError(
            f"{where}: {role}: {name!r} is neither a folder nor in the local Hugging Face cache. "
            f"If it is a path, check it; else download it first: hf download {name}"
        )
    return cached


def _in_hub_cache(name: str) -> Path | None:
    """Find the newest downloaded snapshot of a hub id, by the cache's documented layout."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    root = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = root / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [path.parent for path in snapshots.glob("*/config.json")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def inspect_model(name: str, where: str = "--model") -> ModelInfo:
    """Read a target model's config.

    Raises:
        InputError: the folder or its config cannot be used.
    """
    folder = find_model(name, "model", where)
    config = _read_config(folder)
    text = config.get("text_config", config)
    hidden = _int(text, "hidden_size", folder)
    heads = _int(text, "num_attention_heads", folder)
    quantization = config.get("quantization_config") or {}
    return ModelInfo(
        name=name,
        folder=folder,
        hidden_size=hidden,
        vocab_size=_int(text, "vocab_size", folder),
        head_dim=int(text.get("head_dim") or hidden // heads),
        max_position_embeddings=_int(text, "max_position_embeddings", folder),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "unknown"),
        quantization=quantization.get("quant_method"),
    )


def inspect_drafter(name: str, where: str = "--drafter") -> DrafterInfo:
    """Read a draft head's config and tensor shapes.

    Raises:
        InputError: the folder cannot be used, or is no EAGLE-3 style head.
    """
    folder = find_model(name, "drafter", where)
    config = _read_config(folder)
    if config.get("speculators_config"):
        return _inspect_speculators(name, folder, config)
    shapes = _tensor_shapes(folder)
    kind = _kind_of(config, shapes, folder)
    num_aux = _num_aux_layers(config)
    hidden = _int(config, "hidden_size", folder)
    vocab = _int(config, "vocab_size", folder)
    draft_vocab = int(config.get("draft_vocab_size") or vocab)
    target_hidden = int(config.get("target_hidden_size") or hidden)
    if "fc.weight" in shapes:
        target_hidden = shapes["fc.weight"][1] // num_aux
    if "lm_head.weight" in shapes and shapes["lm_head.weight"][0] != draft_vocab:
        raise invalid(
            f"lm_head.weight must have draft_vocab_size = {draft_vocab} rows",
            where=folder,
            got=shapes["lm_head.weight"][0],
        )
    depth = config.get("num_parallel_draft_tokens") or _TRAINED_DEPTH_BY_NAME.get(name.lower())
    return DrafterInfo(
        name=name,
        folder=folder,
        kind=kind,
        trained_depth=int(depth) if depth else None,
        num_layers=_int(config, "num_hidden_layers", folder),
        draft_vocab_size=draft_vocab,
        target_hidden_size=target_hidden,
        vocab_size=vocab,
    )


def check_pair(target: ModelInfo, drafter: DrafterInfo) -> None:
    """Refuse a head that was trained for another target, before any launch.

    Raises:
        InputError: hidden size or vocabulary differ.
    """
    pairs = (
        ("hidden size", drafter.target_hidden_size, target.hidden_size),
        ("vocabulary", drafter.vocab_size, target.vocab_size),
    )
    for what, of_drafter, of_target in pairs:
        if of_drafter != of_target:
            raise InputError(
                f"--drafter: {drafter.name} was made for a target with {what} {of_drafter:,}, but "
                f"{target.name} has {of_target:,}. Give a head that was trained for this target."
            )


def _inspect_speculators(name: str, folder: Path, config: dict[str, Any]) -> DrafterInfo:
    """Read a head in the `speculators` library's format."""
    spec = config["speculators_config"]
    layer = config.get("transformer_layer_config") or {}
    proposal = (spec.get("proposal_methods") or [{}])[0]
    kind: Literal["p-eagle", "eagle3"] = (
        "p-eagle" if config.get("speculators_model_type") == "peagle" else "eagle3"
    )
    depth = proposal.get("speculative_tokens")
    hidden = _int(layer, "hidden_size", folder)
    vocab = _int(layer, "vocab_size", folder)
    return DrafterInfo(
        name=name,
        folder=folder,
        kind=kind,
        trained_depth=int(depth) if depth else None,
        num_layers=int(layer.get("num_hidden_layers") or 1),
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
        target_hidden_size=int(config.get("target_hidden_size") or hidden),
        vocab_size=vocab,
    )


def _kind_of(
    config: Mapping[str, Any], shapes: Mapping[str, list[int]], folder: Path
) -> Literal["p-eagle", "eagle3"]:
    architecture = str((config.get("architectures") or [""])[0])
    if not re.search(r"eagle", architecture, re.IGNORECASE):
        raise invalid(
            "the drafter must be an EAGLE-3 or P-EAGLE head",
            where=folder / "config.json",
            key_path="architectures",
            got=architecture,
        )
    has_mask_hidden = "mask_hidden" in shapes
    has_mask_token = any(config.get(key) is not None for key in _MASK_TOKEN_KEYS)
    if has_mask_hidden and not has_mask_token:
        raise invalid(
            f"a P-EAGLE head must name its mask token by one of {', '.join(_MASK_TOKEN_KEYS)}",
            where=folder / "config.json",
        )
    if has_mask_token and shapes and not has_mask_hidden:
        raise invalid(
            "a head with a mask token must have the tensor mask_hidden, but its weights have none",
            where=folder,
            next_step="Without it vLLM refuses parallel drafting.",
        )
    return "p-eagle" if has_mask_token else "eagle3"


def _num_aux_layers(config: Mapping[str, Any]) -> int:
    eagle = config.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if ids else int(config.get("num_aux_hidden_states") or 3)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise invalid(f"must be at most {MAX_CONFIG_BYTES:,} bytes", where=path)
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise invalid(f"the model's config cannot be read ({err})", where=path) from err
    if not isinstance(config, dict):
        raise invalid("the model's config must be a JSON object", where=path, got=config)
    return config


def _int(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise invalid("must be a whole number above 0", where=folder / "config.json",
                      key_path=key, got=value or "nothing")  # fmt: skip
    return value


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Read names and shapes out of the headers of all safetensors files in the folder.

    A safetensors file opens with the length of a JSON header as a little-endian 64-bit integer.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"header of {length:,} bytes")
                header = json.loads(file.read(length))
            shapes.update({k: v["shape"] for k, v in header.items() if k != "__metadata__"})
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as err:
            raise invalid(f"is not a readable safetensors file ({err})", where=path) from err
    return shapes
