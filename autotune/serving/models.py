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

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from autotune.errors import InputError, PrerequisiteError, invalid
from autotune.paths import user_path
from autotune.strict import validate

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

DEFAULT_AUX_LAYERS = 3
"""Auxiliary layers that vLLM takes a head to read when its config does not say."""

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
    folder = user_path(name, where)
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


class _Sizes(BaseModel):
    """What is read of a target's config.json, and nothing more."""

    model_config = ConfigDict(strict=True)

    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    head_dim: PositiveInt | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _Quantization(BaseModel):
    quant_method: str | None = None


class _EagleConfig(BaseModel):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _Head(BaseModel):
    """What is read of a draft head's config.json in vLLM's own layout."""

    model_config = ConfigDict(strict=True)

    architectures: list[str] = Field(default_factory=list)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt
    draft_vocab_size: PositiveInt | None = None
    target_hidden_size: PositiveInt | None = None
    num_parallel_draft_tokens: PositiveInt | None = None
    num_aux_hidden_states: PositiveInt | None = None
    eagle_config: _EagleConfig | None = None
    # vLLM reads these in this order (llm_base_proposer.py, 0.33); the first one found wins.
    mask_token_id: int | None = None
    pard_token: int | None = None
    ptd_token_id: int | None = None

    @property
    def has_mask_token(self) -> bool:
        return any(t is not None for t in (self.mask_token_id, self.pard_token, self.ptd_token_id))

    @property
    def num_aux_layers(self) -> int:
        ids = self.eagle_config.eagle_aux_hidden_state_layer_ids if self.eagle_config else None
        return len(ids) if ids else self.num_aux_hidden_states or DEFAULT_AUX_LAYERS


class _Proposal(BaseModel):
    speculative_tokens: PositiveInt | None = None


class _Speculators(BaseModel):
    proposal_methods: list[_Proposal] = Field(default_factory=list)


class _Layer(BaseModel):
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt = 1


class _SpeculatorsHead(BaseModel):
    """What is read of a draft head's config.json in the `speculators` library's format."""

    model_config = ConfigDict(strict=True)

    speculators_model_type: str | None = None
    speculators_config: _Speculators
    transformer_layer_config: _Layer
    draft_vocab_size: PositiveInt | None = None
    target_hidden_size: PositiveInt | None = None


def inspect_model(name: str, where: str = "--model") -> ModelInfo:
    """Read a target model's config.

    Raises:
        InputError: the folder or its config cannot be used.
    """
    folder = find_model(name, "model", where)
    config, path = read_config(folder), folder / "config.json"
    sizes = validate(_Sizes, config.get("text_config", config), path)
    quantization = validate(_Quantization, config.get("quantization_config") or {}, path)
    return ModelInfo(
        name=name,
        folder=folder,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        head_dim=sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads,
        max_position_embeddings=sizes.max_position_embeddings,
        dtype=sizes.dtype or sizes.torch_dtype or "unknown",
        quantization=quantization.quant_method,
    )


def inspect_drafter(name: str, where: str = "--drafter") -> DrafterInfo:
    """Read a draft head's config and tensor shapes.

    Raises:
        InputError: the folder cannot be used, or is no EAGLE-3 style head.
    """
    folder = find_model(name, "drafter", where)
    config = read_config(folder)
    if config.get("speculators_config"):
        return _speculators_head(name, folder, config)
    head = validate(_Head, config, folder / "config.json")
    shapes = _tensor_shapes(folder)
    kind = _kind_of(head, shapes, folder)
    draft_vocab = head.draft_vocab_size or head.vocab_size
    _check_rows(shapes, draft_vocab, folder)
    depth = head.num_parallel_draft_tokens or _TRAINED_DEPTH_BY_NAME.get(name.lower())
    return DrafterInfo(
        name=name,
        folder=folder,
        kind=kind,
        trained_depth=depth,
        num_layers=head.num_hidden_layers,
        draft_vocab_size=draft_vocab,
        target_hidden_size=_target_hidden_size(head, shapes, folder),
        vocab_size=head.vocab_size,
    )


def _target_hidden_size(head: _Head, shapes: Mapping[str, list[int]], folder: Path) -> int:
    """Return the width of the hidden states the head reads; its weights know better than its config.

    Raises:
        InputError: the weights make no sense.
    """
    fc = shapes.get("fc.weight")
    if fc is None:
        return head.target_hidden_size or head.hidden_size
    if len(fc) != 2:
        raise invalid("fc.weight must have two dimensions", where=folder, got=fc)
    return fc[1] // head.num_aux_layers


def _check_rows(shapes: Mapping[str, list[int]], draft_vocab: int, folder: Path) -> None:
    """Refuse an output layer that does not fit the draft vocabulary.

    Raises:
        InputError: it does not.
    """
    shape = shapes.get("lm_head.weight")
    if shape is not None and shape[:1] != [draft_vocab]:
        raise invalid(
            f"lm_head.weight must have draft_vocab_size = {draft_vocab} rows",
            where=folder,
            got=shape,
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


def _speculators_head(name: str, folder: Path, config: dict[str, Any]) -> DrafterInfo:
    """Read a head in the `speculators` library's format."""
    head = validate(_SpeculatorsHead, config, folder / "config.json")
    layer, methods = head.transformer_layer_config, head.speculators_config.proposal_methods
    return DrafterInfo(
        name=name,
        folder=folder,
        kind="p-eagle" if head.speculators_model_type == "peagle" else "eagle3",
        trained_depth=methods[0].speculative_tokens if methods else None,
        num_layers=layer.num_hidden_layers,
        draft_vocab_size=head.draft_vocab_size or layer.vocab_size,
        target_hidden_size=head.target_hidden_size or layer.hidden_size,
        vocab_size=layer.vocab_size,
    )


def _kind_of(
    head: _Head, shapes: Mapping[str, list[int]], folder: Path
) -> Literal["p-eagle", "eagle3"]:
    architecture = head.architectures[0] if head.architectures else ""
    if not re.search(r"eagle", architecture, re.IGNORECASE):
        raise invalid(
            "the drafter must be an EAGLE-3 or P-EAGLE head",
            where=folder / "config.json",
            key_path="architectures",
            got=architecture,
        )
    has_mask_hidden = "mask_hidden" in shapes
    if has_mask_hidden and not head.has_mask_token:
        raise invalid(
            "a P-EAGLE head must name its mask token by mask_token_id, pard_token or ptd_token_id",
            where=folder / "config.json",
        )
    if head.has_mask_token and shapes and not has_mask_hidden:
        raise invalid(
            "a head with a mask token must have the tensor mask_hidden, but its weights have none",
            where=folder,
            next_step="Without it vLLM refuses parallel drafting.",
        )
    return "p-eagle" if head.has_mask_token else "eagle3"


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        InputError: it is missing, too large, or no JSON object.
    """
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


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of one tensor."""

    dtype: str
    """As the format writes it: ``BF16``, ``F8_E4M3``, ``U8``, ..."""
    shape: tuple[int, ...]
    num_bytes: int


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the headers of all safetensors files in a folder, by the tensors' names.

    A safetensors file opens with the length of a JSON header as a little-endian 64-bit integer.

    Raises:
        InputError: a file is broken.
    """
    found: dict[str, TensorHeader] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"header of {length:,} bytes")
                header = json.loads(file.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    first, last = tensor["data_offsets"]
                    shape = tuple(tensor["shape"])
                    found[name] = TensorHeader(tensor["dtype"], shape, last - first)
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as err:
            raise invalid(f"is not a readable safetensors file ({err})", where=path) from err
    return found


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(header.shape) for name, header in tensor_headers(folder).items()}
