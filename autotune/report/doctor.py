"""What is installed here, what it can do, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autotune
from autotune.demo.target import TARGET_NAME, demo_cache_dir
from autotune.errors import AutotuneError
from autotune.serving.capabilities import EngineInfo, capabilities
from autotune.serving.gpu import list_gpus
from autotune.serving.vllm_install import find_vllm

KNOBS = ("tree_width", "weights", "kv_cache_dtype")
EXTRAS = {
    "optuna-dashboard": ("dashboard", "the dashboard"),
    "torch": ("gp", "the GP sampler"),
}


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    found: str
    is_ok: bool
    advice: str = ""

    @property
    def mark(self) -> str:
        return "ok " if self.is_ok else "-- "

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(vllm_python: Path | None = None) -> list[Check]:
    """Look at this machine and its environments; changes nothing."""
    return list(_checks(vllm_python))


def _checks(vllm_python: Path | None) -> Iterator[Check]:
    yield Check("autotune", autotune.__version__, True)
    yield Check("python", platform.python_version(), True)
    gpus = list_gpus()
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability))
        memory = f"{(gpu.total_bytes - gpu.used_bytes) / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free"
        yield Check("gpu", f"{gpu.name}, compute capability {capability}, {memory}", True)
    if not gpus:
        yield Check("gpu", "none found", False, "Searches run on the CPU or simulated.")
    try:
        info = find_vllm(vllm_python, None).info
    except AutotuneError as err:
        yield Check("vllm", "not found", False, str(err))
    else:
        yield from _engine(info)
    yield from _extras()
    yield _demo()


def _engine(info: EngineInfo) -> Iterator[Check]:
    yield Check("vllm", f"{info.version} for {info.device}, on {info.hardware}", True)
    capable = capabilities(info, None, [])
    for knob in KNOBS:
        fixed = capable.fixed.get(knob)
        if fixed is None:
            yield Check(f"knob {knob}", "lives", True)
        else:
            yield Check(f"knob {knob}", f"fixed at {fixed.value}: {fixed.reason}", False)


def _extras() -> Iterator[Check]:
    for package, (extra, purpose) in EXTRAS.items():
        try:
            yield Check(package, importlib.metadata.version(package), True)
        except importlib.metadata.PackageNotFoundError:
            advice = f'Needed for {purpose} only: pip install "autotune[{extra}]".'
            yield Check(package, "not installed", False, advice)


def _demo() -> Check:
    folder = demo_cache_dir() / TARGET_NAME
    if (folder / "config.json").is_file():
        return Check("demo model", str(folder), True)
    return Check(
        "demo model", "not made yet", False, "`autotune demo` makes it once, in about a minute."
    )
