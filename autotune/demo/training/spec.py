"""What a head is: the choices that end up in its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import invalid

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class HeadSpec:
    """The choices that make one head differ from another for the same target."""

    num_layers: int
    draft_vocab_size: int
    depth: int
    """Tokens drafted in one pass: one slot with a real token and `depth - 1` mask slots."""
    mask_token_id: int
    aux_layer_ids: tuple[int, ...]
    """Target layers whose *input* the drafter reads; at least one, all different."""


def default_aux_layers(num_target_layers: int) -> tuple[int, ...]:
    """Return the layers vLLM taps when a head names none: an early, a middle and a late one."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def check_spec(spec: HeadSpec, config: LlamaConfig, where: Path) -> None:
    """Raise an `InputError` when the head cannot be built for this target.

    Args:
        spec: the head's choices.
        config: the target's configuration.
        where: the target's folder, for the message.
    """
    vocab_size = config.vocab_size
    if spec.mask_token_id >= vocab_size:
        rule = f"the mask token must be below the {vocab_size} tokens of the target's vocabulary"
        raise invalid(rule, where=where, got=spec.mask_token_id)
    if spec.draft_vocab_size > vocab_size:
        rule = f"the draft vocabulary must have at most the target's {vocab_size} tokens"
        raise invalid(rule, where=where, got=spec.draft_vocab_size)
    layers = spec.aux_layer_ids
    known = range(config.num_hidden_layers)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(known):
        raise invalid(
            f"the auxiliary layers must be different numbers from 0 to {known.stop - 1}",
            where=where,
            got=",".join(map(str, layers)),
            next_step="Name them with --aux-layers, such as --aux-layers 1,3,5.",
        )
