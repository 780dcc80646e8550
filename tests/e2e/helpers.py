"""What the end-to-end tests share: configs and traffic small enough for a CPU."""

from __future__ import annotations

from pathlib import Path

import psutil

from autotune.serving.config import ServingConfig
from autotune.traffic.profile import TrafficProfile

MEASURED_REQUESTS = 6
PROFILE = {
    "version": 1,
    "name": "e2e",
    "load": {"kind": "concurrency", "concurrency": 2},
    "measure": {
        "min_requests": MEASURED_REQUESTS,
        "warmup": 2,
        "max_duration_s": 60,
        "late_client": "warn",
    },
    "classes": [
        {"name": "maths", "prompts": {"builtin": "demo/maths"}, "output": {"max_tokens": 32}}
    ],
    "serve": {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "launch_timeout_s": 300},
}


def profile(**changes: object) -> TrafficProfile:
    return TrafficProfile.model_validate({**PROFILE, **changes})


def serving_config(target: Path, head: Path, k: int, **changes: object) -> ServingConfig:
    """A config of the demo model that launches as quickly as it can."""
    defaults: dict[str, object] = {
        "model": str(target),
        "drafter": str(head) if k else None,
        "num_speculative_tokens": k,
        "parallel_drafting": k > 0,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "flags": (("enforce-eager", True),),
    }
    return ServingConfig(**{**defaults, **changes})  # type: ignore[arg-type]  # checked by the class


def vllm_processes() -> list[str]:
    """Command lines of everything on this machine that looks like a vLLM process."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        if "vllm.entrypoints" in line or "VLLM::" in line or "autotune.serving.supervisor" in line:
            found.append(line)
    return found
