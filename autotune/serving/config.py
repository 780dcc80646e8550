"""One point of the search space: a complete description of how to serve the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal

MAX_NUM_SPECULATIVE_TOKENS = 32
"""The most draft tokens that Autotune searches; vLLM's own limit is 128 (`MAX_SPEC_LEN`)."""

Flag = str | int | float | bool | None
Weights = Literal["as_is", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]


@dataclass(frozen=True)
class ServingConfig:
    """How to serve: immutable, comparable, and the same everywhere from search to export."""

    model: str
    drafter: str | None = None
    """Folder or hub id of the draft head; None without speculation."""
    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    """The P-EAGLE switch: all draft tokens in one pass."""
    tree_width: int = 1
    weights: Weights = "as_is"
    kv_cache_dtype: KvCacheDtype = "auto"
    max_num_seqs: int | None = None
    """Most sequences in a batch; None leaves the engine's default."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None leaves the engine's default."""
    speculation_off_above: int | None = None
    """Batch size, in requests, above which nothing is drafted; None drafts always.

    The only schedule of K by batch size that is safe with a parallel drafter: vLLM shapes the mask slots by
    the full K, so any K between 0 and that is refused or, worse, takes the wrong rows."""
    flags: tuple[tuple[str, Flag], ...] = ()
    """Any other vLLM options, dashed names without the leading dashes, sorted by name."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_speculative_tokens <= MAX_NUM_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be 0 to {MAX_NUM_SPECULATIVE_TOKENS}, "
                f"but got {self.num_speculative_tokens}"
            )
        if (self.drafter is None) != (self.num_speculative_tokens == 0):
            raise ValueError(
                "a drafter must be given exactly when num_speculative_tokens is above 0"
            )
        if self.speculation_off_above is not None and (
            self.speculation_off_above < 1 or not self.is_speculative
        ):
            raise ValueError(
                "speculation_off_above must be at least 1 and needs speculation, "
                f"but got {self.speculation_off_above}"
            )
        if self.tree_width < 1 or self.num_speculative_tokens % self.tree_width:
            raise ValueError(
                "tree_width must be at least 1 and divide num_speculative_tokens, "
                f"but got {self.tree_width} and {self.num_speculative_tokens}"
            )

    @property
    def is_speculative(self) -> bool:
        return self.num_speculative_tokens > 0

    @property
    def digest(self) -> str:
        """A short name for this content, equal exactly where the configs are equal."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sorts simpler configs first; ties between measured configs are broken by it.

        No speculation before speculation, smaller K before larger, always before by batch size,
        unquantised before quantised, the engine's default limits before other ones.
        """
        return (
            self.num_speculative_tokens,
            self.tree_width,
            self.speculation_off_above is not None,
            (self.weights != "as_is") + (self.kv_cache_dtype != "auto"),
            (self.max_num_seqs is not None) + (self.max_num_batched_tokens is not None),
            self.max_num_seqs or 0,
            self.max_num_batched_tokens or 0,
        )

    def label(self, hidden: Collection[str] = (), named: Collection[str] = ()) -> str:
        """Name the config in a few words: ``K=4 fp8-kv seqs=64``.

        Args:
            hidden: knobs to leave out, because they are the same for all configs at hand.
            named: what to mention beside the knobs: ``drafter`` and options, where they differ.
        """
        parts = [f"K={self.num_speculative_tokens}"]
        if self.tree_width > 1:
            parts.append(f"width={self.tree_width}")
        if self.speculation_off_above is not None:
            parts.append(f"off-above={self.speculation_off_above}")
        if self.weights != "as_is" and "weights" not in hidden:
            parts.append(f"{self.weights}-weights")
        if self.kv_cache_dtype != "auto" and "kv_cache_dtype" not in hidden:
            parts.append(f"{self.kv_cache_dtype}-kv")
        if self.max_num_seqs is not None and "max_num_seqs" not in hidden:
            parts.append(f"seqs={self.max_num_seqs}")
        if self.max_num_batched_tokens is not None and "max_num_batched_tokens" not in hidden:
            parts.append(f"tokens={self.max_num_batched_tokens}")
        if self.drafter is not None and "drafter" in named:
            parts.append(f"drafter={PurePath(self.drafter).name}")
        parts += [f"{name}={value}" for name, value in self.flags if name in named]
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that `config_from_dict` turns back into an equal config."""
        data = asdict(self)
        data["flags"] = dict(self.flags)
        if self.speculation_off_above is None:
            # Left out, so that configs keep the digests they had before this knob existed.
            del data["speculation_off_above"]
        return data


def config_from_dict(data: Mapping[str, Any]) -> ServingConfig:
    """Rebuild a config from `ServingConfig.as_dict`."""
    return ServingConfig(**{**data, "flags": tuple(sorted(data["flags"].items()))})
