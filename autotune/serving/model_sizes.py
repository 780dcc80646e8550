"""Sizes of a target and its draft heads from config.json and tensor headers, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from autotune.serving.models import DrafterInfo, TensorHeader, read_config, tensor_headers
from autotune.serving.sizes import DrafterSizes, TargetSizes
from autotune.strict import validate

KV_BYTES = 2
"""Of one number in a 16-bit cache."""


class _Attention(BaseModel):
    """What decides the size of a KV cache."""

    model_config = ConfigDict(strict=True)

    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    kv_lora_rank: int | None = None
    """Set by multi-head latent attention, whose cache is of another kind."""

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of all layers; with grouped queries, of the heads that are kept."""
        heads = self.num_key_value_heads or self.num_attention_heads
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        return float(self.num_hidden_layers * heads * head_dim * 2 * KV_BYTES)


class _Experts(BaseModel):
    """Experts of a layer, under the names that model families give them."""

    model_config = ConfigDict(strict=True)

    num_local_experts: NonNegativeInt | None = None
    num_experts: NonNegativeInt | None = None
    n_routed_experts: NonNegativeInt | None = None
    num_experts_per_tok: NonNegativeInt | None = None
    experts_per_token: NonNegativeInt | None = None

    @property
    def count(self) -> int:
        return self.num_local_experts or self.num_experts or self.n_routed_experts or 0

    @property
    def per_token(self) -> int:
        return self.num_experts_per_tok or self.experts_per_token or 0


class _HeadLayer(BaseModel):
    transformer_layer_config: dict[str, Any] = Field(default_factory=dict)


def target_sizes(folder: Path) -> TargetSizes | None:
    """Read a target's sizes; None where its weights are not there, or its attention is of another kind.

    Raises:
        InputError: the config or a tensor file cannot be read.
    """
    config, path = read_config(folder), folder / "config.json"
    inner = config.get("text_config", config)
    if inner.get("kv_lora_rank") is not None:
        return None
    headers = tensor_headers(folder)
    if not headers:
        return None
    attention = validate(_Attention, inner, path)
    experts = validate(_Experts, inner, path)
    parameters = {name: _num_parameters(name, header) for name, header in headers.items()}
    in_experts = {name for name in headers if ".experts." in name}
    num_in_experts = sum(parameters[name] for name in in_experts)
    num_parameters = sum(parameters.values())
    idle_ratio = 1 - experts.per_token / experts.count if experts.count else 0.0
    return TargetSizes(
        num_parameters=float(num_parameters),
        num_active_parameters=num_parameters - num_in_experts * idle_ratio,
        weight_bytes=_loaded_bytes(headers),
        num_layers=attention.num_hidden_layers,
        hidden_size=attention.hidden_size,
        vocab_size=attention.vocab_size,
        kv_bytes_per_token=attention.kv_bytes_per_token,
        is_quantized=bool(config.get("quantization_config")),
        num_experts=experts.count,
        num_experts_per_token=experts.per_token,
        expert_bytes=_loaded_bytes({name: headers[name] for name in in_experts}),
    )


def drafter_sizes(drafter: DrafterInfo) -> DrafterSizes | None:
    """Read a draft head's sizes; None where its weights are not there.

    What the head shares with the target (embeddings, often the output layer) is not in its files.

    Raises:
        InputError: the config or a tensor file cannot be read.
    """
    headers = tensor_headers(drafter.folder)
    if not headers:
        return None
    config, path = read_config(drafter.folder), drafter.folder / "config.json"
    layer = validate(_HeadLayer, config, path).transformer_layer_config or config
    attention = validate(_Attention, {**layer, "num_hidden_layers": drafter.num_layers}, path)
    return DrafterSizes(
        num_parameters=float(sum(_num_parameters(n, h) for n, h in headers.items())),
        weight_bytes=_loaded_bytes(headers),
        num_layers=drafter.num_layers,
        kv_bytes_per_token=attention.kv_bytes_per_token,
        draft_vocab_size=drafter.draft_vocab_size,
    )


def _num_parameters(name: str, header: TensorHeader) -> int:
    """Count weights: packed 4-bit formats hold two in a byte (MXFP4) or eight in a word (AWQ, GPTQ)."""
    count = math.prod(header.shape)
    if header.dtype == "U8" and "scale" not in name:
        return 2 * count
    if header.dtype == "I32" and name.endswith("qweight"):
        return 8 * count
    return count


def _loaded_bytes(headers: Mapping[str, TensorHeader]) -> float:
    """Add up tensors as the device holds them: vLLM's `dtype: auto` loads 32-bit weights as 16-bit ones."""
    return float(sum(h.num_bytes / (2 if h.dtype == "F32" else 1) for h in headers.values()))
