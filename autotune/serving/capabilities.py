"""Which knobs can move, by engine version, hardware and model. What cannot move is fixed, with a reason.

The table's facts and their sources:

* Tree drafting left vLLM with PR #42121; 0.20.2 is the last release with `speculative_token_tree`,
  0.21.0 the first without (read in the wheels). It took autoregressive heads on CUDA only.
* FP8 weights made at load (`--quantization fp8`) need compute capability 7.5; real FP8 arithmetic
  starts at 8.9, below that only memory is saved (platforms/cuda.py, quantization/online).
* K by batch size (`num_speculative_tokens_per_batch_size`) came with PR #32374 and is searched from 0.25 on;
  vLLM turns it off, with a warning, where there are several data-parallel ranks (config/vllm.py).
* On CPU, FP8 weights made at load die with `static_scaled_fp8_quant() expected at most 0 argument(s)`
  (seen with 0.32); an FP8 KV cache needs AVX-512 or AMX and a head size divisible by 32
  (attention/backends/cpu_attn.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.serving.models import DrafterInfo, ModelInfo

FIRST_VERSION_WITHOUT_TREES = (0, 21)
FIRST_VERSION_WITH_DEPTH_BY_BATCH = (0, 25)
FP8_WEIGHTS_CAPABILITY = (7, 5)
FP8_ARITHMETIC_CAPABILITY = (8, 9)
TRAINED_DEPTH_SLACK = 2
"""How far past the trained depth K is searched without being asked: acceptance falls off there."""

Device = Literal["cpu", "cuda", "simulated"]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself before anything is launched."""

    engine: str
    version: str
    device: Device
    hardware: str
    """The GPU's or CPU's own name."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0); None without a CUDA GPU."""
    cpu_flags: frozenset[str] = field(default=frozenset())
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of what was involved, for the record."""
    is_simulated: bool = False
    has_trees: bool | None = None
    """Whether trees can be drafted; None: decided by the version."""

    @property
    def version_tuple(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])

    def as_dict(self) -> dict[str, Any]:
        """Return the plain data kept with a study."""
        return {
            "engine": self.engine,
            "version": self.version,
            "device": self.device,
            "hardware": self.hardware,
            "compute_capability": list(self.compute_capability)
            if self.compute_capability
            else None,
            "packages": dict(self.packages),
            "is_simulated": self.is_simulated,
        }


@dataclass(frozen=True)
class Fixed:
    """A knob that cannot move here, the value it keeps, and why."""

    knob: str
    value: str | int
    reason: str


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do with a target and its drafters on this hardware."""

    max_num_speculative_tokens: int
    fixed: Mapping[str, Fixed]
    why_not_off_by_batch: str | None = None
    """Why speculation cannot be switched off above a batch size; None where it can."""

    def is_live(self, knob: str) -> bool:
        return knob not in self.fixed


def capabilities(
    engine: EngineInfo,
    target: ModelInfo | None,
    drafters: Iterable[DrafterInfo],
    *,
    beyond_trained_depth: bool = False,
    max_num_speculative_tokens: int = 32,
    data_parallel_size: int = 1,
    is_quantized: bool = False,
) -> Capabilities:
    """Decide which knobs live.

    Args:
        engine: what would serve.
        target: the model's facts; None where they are not known (simulated engine).
        drafters: the heads that may be used.
        beyond_trained_depth: search K past what the heads were trained for.
        max_num_speculative_tokens: the cap that applies otherwise.
        data_parallel_size: ranks that the user's options ask for.
        is_quantized: whether the checkpoint is, where the target's own facts are not known.
    """
    heads = list(drafters)
    checks = {
        "tree_width": _tree_width(engine, heads),
        "weights": _weights(engine, target, is_quantized=is_quantized),
        "kv_cache_dtype": _kv_cache_dtype(engine, target),
        "num_speculative_tokens": None if heads else "no drafter is given",
    }
    defaults: dict[str, str | int] = {
        "tree_width": 1, "weights": "as_is", "kv_cache_dtype": "auto", "num_speculative_tokens": 0
    }  # fmt: skip
    fixed = {knob: Fixed(knob, defaults[knob], why) for knob, why in checks.items() if why}
    cap = max_num_speculative_tokens if heads else 0
    depths = [head.trained_depth for head in heads if head.trained_depth]
    if depths and not beyond_trained_depth:
        cap = min(cap, max(depths) + TRAINED_DEPTH_SLACK)
    return Capabilities(cap, fixed, _off_by_batch(engine, heads, data_parallel_size))


def _off_by_batch(
    engine: EngineInfo, drafters: list[DrafterInfo], data_parallel_size: int
) -> str | None:
    if not drafters:
        return "no drafter is given"
    if data_parallel_size > 1:
        return "vLLM ignores K by batch size where there are several data-parallel ranks"
    if engine.engine == "replay":
        return "it was not recorded"
    if engine.is_simulated:
        return None
    if engine.version_tuple < FIRST_VERSION_WITH_DEPTH_BY_BATCH:
        return f"K by batch size needs vLLM 0.25 or newer, this is {engine.version or 'unknown'}"
    return None


def _tree_width(engine: EngineInfo, drafters: list[DrafterInfo]) -> str | None:
    if engine.has_trees is not None:
        return None if engine.has_trees else f"the {engine.engine} engine drafts chains only"
    if not engine.version_tuple:
        return "the engine does not say its version, and current vLLM drafts chains only"
    if engine.version_tuple >= FIRST_VERSION_WITHOUT_TREES:
        return f"vLLM {engine.version} drafts chains only; tree drafting was removed in 0.21.0"
    if engine.device != "cuda":
        return "tree drafting needs the TREE_ATTN backend, which runs on CUDA only"
    if any(drafter.is_parallel for drafter in drafters):
        return "a parallel drafter (P-EAGLE) drafts a chain in one pass and ignores trees"
    return None


def _weights(engine: EngineInfo, target: ModelInfo | None, *, is_quantized: bool) -> str | None:
    if target is not None and target.quantization:
        return f"the checkpoint is already quantised ({target.quantization})"
    if is_quantized:
        return "the checkpoint is already quantised"
    if engine.device == "cpu":
        return "vLLM's CPU backend cannot make FP8 weights at load (it fails while loading)"
    if engine.compute_capability and engine.compute_capability < FP8_WEIGHTS_CAPABILITY:
        return f"FP8 weights need compute capability 7.5, this GPU has {_dotted(engine)}"
    return None


def _kv_cache_dtype(engine: EngineInfo, target: ModelInfo | None) -> str | None:
    if engine.device == "cpu":
        if not any(flag.startswith(("avx512", "amx")) for flag in engine.cpu_flags):
            return "an FP8 KV cache on CPU needs AVX-512 or AMX, which this CPU lacks"
        if target is not None and target.head_dim % 32:
            return (
                f"an FP8 KV cache on CPU needs a head size divisible by 32, not {target.head_dim}"
            )
    if engine.compute_capability and engine.compute_capability < FP8_ARITHMETIC_CAPABILITY:
        return f"an FP8 KV cache needs compute capability 8.9, this GPU has {_dotted(engine)}"
    return None


def _dotted(engine: EngineInfo) -> str:
    return ".".join(str(part) for part in engine.compute_capability or ())
