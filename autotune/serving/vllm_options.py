"""A serving config as vLLM's own options: one mapping, from which flags and files are made.

The engine that measures and the exporter that deploys both start from `vllm_options`, so what is
deployed is what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.serving.capabilities import Device
from autotune.serving.config import Flag, ServingConfig
from autotune.serving.token_budget import (
    DEFAULT_CAPTURE_SIZE,
    graph_ceiling,
    needed_model_len,
)

LARGEST_BATCH = 65_536
"""Beyond any batch size, for the end of a schedule by batch size."""

VllmOptions = dict[str, Any]
"""Dashed option names without leading dashes; nested mappings become JSON."""


@dataclass(frozen=True)
class Needs:
    """What the traffic needs of the server, whichever config serves it."""

    concurrency: int | None = None
    """Most requests in flight at once; None when the profile does not say."""
    longest_request_tokens: int | None = None
    """Longest prompt plus its output; None when it is not known."""
    max_num_speculative_tokens: int = 0
    """The largest K of the study, so that all its configs get one `max-model-len`."""
    model_max_len: int | None = None


def vllm_options(config: ServingConfig, needs: Needs, device: Device) -> VllmOptions:
    """Return all options for serving `config`, the derived ones included.

    Derived, where the user did not fix them: `max-model-len` above the longest request by K, and on
    CUDA a graph capture size that keeps the drafter out of eager mode.
    """
    options: VllmOptions = {"model": config.model}
    if config.weights == "fp8":
        options["quantization"] = "fp8"
    if config.kv_cache_dtype != "auto":
        options["kv-cache-dtype"] = config.kv_cache_dtype
    if config.max_num_seqs is not None:
        options["max-num-seqs"] = config.max_num_seqs
    if config.max_num_batched_tokens is not None:
        options["max-num-batched-tokens"] = config.max_num_batched_tokens
    if config.is_speculative:
        options["speculative-config"] = _speculative_config(config)
    derived = _derived_options(config, needs, device)
    flags = dict(_positive(name, value) for name, value in config.flags if value is not None)
    return {**options, **derived, **flags}


def _positive(name: str, value: Flag) -> tuple[str, Flag]:
    """Write `no-x: false` as `x: true`: vLLM's config file drops a false it has no `--no-` form of."""
    if name.startswith("no-") and isinstance(value, bool):
        return negated(name), not value
    return name, value


def to_argv(options: Mapping[str, Any], *, has_positional_model: bool = False) -> list[str]:
    """Write options as command-line arguments.

    Args:
        options: as `vllm_options` returns them.
        has_positional_model: whether the model goes first without a flag, as in `vllm serve MODEL`.
    """
    argv: list[str] = []
    for name, value in options.items():
        if name == "model" and has_positional_model:
            argv.insert(0, str(value))
        else:
            argv.extend(_argument(name, value))
    return argv


def negated(name: str) -> str:
    """Return the option that turns a boolean one off: `enforce-eager` and `no-enforce-eager`."""
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def _argument(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--{negated(name)}"]
    if isinstance(value, Mapping | list):
        return [f"--{name}", json.dumps(value, sort_keys=True)]
    return [f"--{name}", str(value)]


def _speculative_config(config: ServingConfig) -> dict[str, Any]:
    """Build vLLM's SpeculativeConfig.

    `method` and `parallel_drafting` are always given: vLLM guesses them from the drafter's name,
    and guesses wrong for published P-EAGLE heads.
    """
    spec: dict[str, Any] = {
        "method": "eagle3",
        "model": config.drafter,
        "num_speculative_tokens": config.num_speculative_tokens,
        "parallel_drafting": config.parallel_drafting,
    }
    if config.tree_width > 1:
        spec["speculative_token_tree"] = speculative_token_tree(
            config.tree_width, config.num_speculative_tokens // config.tree_width
        )
    if config.speculation_off_above is not None:
        spec["num_speculative_tokens_per_batch_size"] = depth_by_batch_size(
            config.speculation_off_above, config.num_speculative_tokens
        )
    return spec


def depth_by_batch_size(off_above: int, num_speculative_tokens: int) -> list[list[int]]:
    """Write K for every batch size up to `off_above` requests, and none beyond.

    vLLM takes a list of [first size, last size, K], both ends inclusive, sorted and starting at 1
    (`v1/spec_decode/dynamic/utils.py`). With a parallel drafter only K and 0 are safe.
    """
    return [
        [1, off_above, num_speculative_tokens],
        [off_above + 1, max(LARGEST_BATCH, off_above + 1), 0],
    ]


def speculative_token_tree(width: int, depth: int) -> str:
    """Write a tree for vLLM up to 0.20: `width` branches at the root, each a chain of `depth`.

    The format is the literal of a list of node paths, breadth first; it holds width x depth nodes,
    which is the number of draft tokens.
    """
    nodes = [(branch, *([0] * level)) for level in range(depth) for branch in range(width)]
    return str(nodes)


def _derived_options(config: ServingConfig, needs: Needs, device: Device) -> dict[str, Flag]:
    fixed = {name for name, _ in config.flags}
    derived: dict[str, Flag] = {}
    if needs.longest_request_tokens is not None:
        length = needed_model_len(needs.longest_request_tokens, needs.max_num_speculative_tokens)
        if needs.model_max_len is None or length < needs.model_max_len:
            derived["max-model-len"] = length
    if device == "cuda" and config.is_speculative and needs.concurrency is not None:
        size = graph_ceiling(config, needs.concurrency)
        if size > DEFAULT_CAPTURE_SIZE:
            derived["max-cudagraph-capture-size"] = size
    return {name: value for name, value in derived.items() if name not in fixed}
