"""The frozen model that the head drafts for, and the hidden states it gives away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from autotune.errors import InputError, invalid


def load_target(folder: Path) -> LlamaForCausalLM:
    """Return the target in float32, ready to be read and never to be changed.

    Raises:
        InputError: the folder holds no Llama model of the plain kind the drafter copies.
    """
    config = _load_config(folder)
    _check_plain_llama(config, folder)
    try:
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_a_model(folder, error) from error
    model.requires_grad_(False)
    loaded: LlamaForCausalLM = model.eval()
    return loaded


def auxiliary_states(
    target: LlamaForCausalLM, token_ids: Sequence[int], layer_ids: Sequence[int]
) -> Tensor:
    """Return what the drafter sees of the target at every position.

    vLLM collects the residual stream *before* layer i runs, and so does this: `hidden_states[i]`
    of transformers is the input of layer i.

    Returns:
        bfloat16 of shape (len(token_ids), len(layer_ids) * hidden size). Half the memory of
        float32, since the states of all samples stay in memory during training.
    """
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = target.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
    states: tuple[Tensor, ...] = output.hidden_states
    return torch.cat([states[i][0] for i in layer_ids], dim=-1).to(torch.bfloat16)


def _load_config(folder: Path) -> LlamaConfig:
    if not (folder / "config.json").is_file():
        raise invalid(
            "must be a folder with a model and its config.json",
            where=folder,
            next_step="`autotune.demo.target.ensure_target()` makes the demo's target.",
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _not_a_model(folder, error) from error
    if not isinstance(config, LlamaConfig):
        raise invalid(
            "must be a model of type llama",
            where=folder,
            key_path="model_type",
            got=config.model_type,
        )
    return config


def _check_plain_llama(config: LlamaConfig, folder: Path) -> None:
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    expected = {
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key_path, (got, wanted) in expected.items():
        if got != wanted:
            raise invalid(
                f"must be {wanted!r}, the only kind this drafter is written for",
                where=folder / "config.json",
                key_path=key_path,
                got=got,
            )


def _not_a_model(folder: Path, error: Exception) -> InputError:
    lines = str(error).splitlines() or [type(error).__name__]
    return invalid(f"must be a model that transformers can load ({lines[0]})", where=folder)
