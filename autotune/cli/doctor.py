"""`autotune doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("doctor")
@click.option("--vllm-python", type=click.Path(path_type=Path),
              help="Interpreter of another environment that has vLLM.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of lines.")
def command(vllm_python: Path | None, is_json: bool) -> None:
    """Say what is installed, which knobs live here, and what to do about what is missing."""
    from autotune.report.doctor import examine

    checks = examine(vllm_python)
    if is_json:
        click.echo(json.dumps([check.as_dict() for check in checks], indent=2))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{check.mark} {check.name:<{width}}  {check.found}")
        if check.advice:
            click.echo(f"  {'':<{width}}  {check.advice}")
