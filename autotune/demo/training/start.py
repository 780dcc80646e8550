"""Fill a new drafter: from the target's own layers, or from a head trained before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from autotune.demo.training.drafter import Drafter, DraftLayer
from autotune.demo.training.samples import DraftVocabulary
from autotune.demo.training.spec import HeadSpec
from autotune.errors import InputError, invalid

NOISE = 0.002
"""Spread added to `fc`: enough that its zero part starts to learn, too little to matter else."""

EMBEDDING_SPREAD = 0.02
"""Spread of the new weights that read the token embedding; Llama's own initial spread."""

SAMPLES_FOR_MASK_HIDDEN = 64

NOT_TRAINED = {"d2t", "t2d", "lm_head.weight"}
"""Tensors of a head that follow from the target and the draft vocabulary."""


def copy_output_rows(
    drafter: Drafter, target: LlamaForCausalLM, vocabulary: DraftVocabulary
) -> None:
    """Give the drafter the target's output rows for its own vocabulary."""
    rows = target.lm_head.weight[torch.tensor(vocabulary.target_ids)]
    drafter.lm_head.weight.data.copy_(rows)


@torch.no_grad()
def start_from_target(
    drafter: Drafter, target: LlamaForCausalLM, features: Sequence[Tensor], first_layer: int
) -> None:
    """Start as the target's own late layers, which a short training can only improve.

    `fc` passes on the last auxiliary state, and the drafter's layers are the target's layers
    from there on; the target's last layer is repeated when there are not enough.

    Args:
        drafter: the drafter to fill.
        target: the model to copy from.
        features: auxiliary states of some samples, each of shape (tokens, A * H); non-empty.
        first_layer: the last auxiliary layer.
    """
    last = len(target.model.layers) - 1
    for i, layer in enumerate(drafter.layers):
        _copy_layer(cast(DraftLayer, layer), target.model.layers[min(first_layer + i, last)])
    size = drafter.fc.out_features
    drafter.fc.weight.normal_(0, NOISE)
    drafter.fc.weight[:, -size:] += torch.eye(size)
    drafter.norm.weight.copy_(target.model.norm.weight)
    some = features[:SAMPLES_FOR_MASK_HIDDEN]
    # A typical state: a mask slot knows nothing better than the average at first.
    drafter.mask_hidden[0] = torch.stack([states.float().mean(0) for states in some]).mean(0)


def start_from_head(drafter: Drafter, folder: Path, spec: HeadSpec) -> None:
    """Continue from a head in vLLM's layout.

    Its draft vocabulary is not taken over but chosen anew from the answers at hand. This is safe
    because `lm_head` is never trained: its rows are the target's, whichever tokens they are for.

    Raises:
        InputError: the folder holds no head, or one that differs from `spec` or the target.
    """
    _check_config(folder / "config.json", spec)
    tensors = _load_tensors(folder / "model.safetensors")
    wanted = {name: p for name, p in drafter.named_parameters() if name not in NOT_TRAINED}
    saved = {name: t for name, t in tensors.items() if name not in NOT_TRAINED}
    if "mask_hidden" in saved:
        saved["mask_hidden"] = saved["mask_hidden"].reshape(1, -1)
    _check_tensors(saved, wanted, folder / "model.safetensors")
    for name, parameter in wanted.items():
        parameter.data.copy_(saved[name])


def _copy_layer(layer: DraftLayer, source: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        _copy_input(getattr(layer.self_attn, name), getattr(source.self_attn, name))
    layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    reads_hidden_state = layer.hidden_norm if layer.is_first else layer.input_layernorm
    reads_hidden_state.weight.copy_(source.input_layernorm.weight)


def _copy_input(projection: nn.Linear, source: nn.Linear) -> None:
    """Copy a projection; what the first layer has more on the left reads the embedding."""
    num_extra = projection.in_features - source.in_features
    projection.weight[:, :num_extra].normal_(0, EMBEDDING_SPREAD)
    projection.weight[:, num_extra:].copy_(source.weight)


def _check_config(path: Path, spec: HeadSpec) -> None:
    config = _load_config(path)
    eagle_config = config.get("eagle_config") or {}
    layers = "eagle_aux_hidden_state_layer_ids"
    expected = {
        "num_hidden_layers": (config.get("num_hidden_layers"), spec.num_layers),
        "ptd_token_id": (config.get("ptd_token_id"), spec.mask_token_id),
        f"eagle_config.{layers}": (eagle_config.get(layers), list(spec.aux_layer_ids)),
    }
    for key_path, (got, wanted) in expected.items():
        if got != wanted:
            raise invalid(
                f"must be {wanted}, as in the head to train",
                where=path,
                key_path=key_path,
                got=got,
                next_step="Give the options that the first head was trained with.",
            )


def _load_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _not_a_head(path, error) from error
    return config


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _not_a_head(path, error) from error


def _check_tensors(saved: dict[str, Tensor], wanted: dict[str, nn.Parameter], path: Path) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            raise invalid("must be in the head", where=path, key_path=name)
        if name not in wanted:
            raise invalid(
                "must not be in the head; the drafter has no such weight",
                where=path,
                key_path=name,
            )
        got, shape = tuple(saved[name].shape), tuple(wanted[name].shape)
        if got != shape:
            raise invalid(
                f"must have the shape {shape}",
                where=path,
                key_path=name,
                got=got,
                next_step="The head must have been trained for the same target.",
            )


def _not_a_head(path: Path, error: Exception) -> InputError:
    return invalid(f"must be part of a P-EAGLE head ({error})", where=path)
