"""Write a head the way vLLM reads it: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from autotune.demo.training.drafter import Drafter
from autotune.demo.training.samples import DraftVocabulary
from autotune.demo.training.spec import HeadSpec
from autotune.errors import invalid

NOT_OF_A_HEAD = ("_name_or_path", "_model_name_or_path", "quantization_config")
"""Keys of the target's configuration that would be wrong in a head's."""


def prepare_folder(folder: Path) -> None:
    """Make the folder now, so that half an hour of training is not lost for want of one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(f"must be a folder to write to ({error.strerror})", where=folder) from error


def save_head(
    drafter: Drafter, vocabulary: DraftVocabulary, spec: HeadSpec, target_dir: Path, out_dir: Path
) -> None:
    """Write the head; files of the same name are replaced.

    Args:
        drafter: the trained drafter.
        vocabulary: its draft vocabulary.
        spec: what it was built as.
        target_dir: the target, whose `config.json` gives the sizes and the rope settings.
        out_dir: an existing folder.
    """
    partial = out_dir / ".model.safetensors.partial"
    save_file(head_tensors(drafter, vocabulary), partial)
    partial.replace(out_dir / "model.safetensors")
    target_config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(head_config(target_config, spec), indent=2) + "\n"
    (out_dir / "config.json").write_text(text, encoding="utf-8")


def head_tensors(drafter: Drafter, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return every tensor of the head under vLLM's name, weights in bfloat16.

    There is no embedding among them, so vLLM shares the target's. `d2t` is left out when the
    draft vocabulary is the target's own: vLLM then has no place for it.
    """
    state = drafter.state_dict()
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in state.items()}
    if len(vocabulary) < len(drafter.embedding):
        tensors["d2t"] = torch.tensor(vocabulary.offsets())
    return tensors


def head_config(target_config: dict[str, Any], spec: HeadSpec) -> dict[str, Any]:
    """Return the head's `config.json`: the target's, with the drafter's own facts."""
    kept = {key: value for key, value in target_config.items() if key not in NOT_OF_A_HEAD}
    return {
        **kept,
        "architectures": ["LlamaForCausalLMEagle3"],
        "dtype": "bfloat16",
        "num_hidden_layers": spec.num_layers,
        "tie_word_embeddings": False,
        "draft_vocab_size": spec.draft_vocab_size,
        "ptd_token_id": spec.mask_token_id,
        "target_hidden_size": target_config["hidden_size"],
        "eagle_config": {
            # Here and not at top level: vLLM takes the width of `fc` from this list alone.
            "eagle_aux_hidden_state_layer_ids": list(spec.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
        "num_parallel_draft_tokens": spec.depth,
    }
