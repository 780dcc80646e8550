"""`autotune profile show`."""

from __future__ import annotations

import json
from pathlib import Path

import click

PIPE_COLUMNS = 100


@click.command("show")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(0, 2**32 - 1),
              help="Draw with this seed instead of the profile's.")  # fmt: skip
@click.option("--model", help="Count tokens with the tokenizer of this model, not the profile's.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of pictures.")
def command(profile: Path, seed: int | None, model: str | None, is_json: bool) -> None:
    """Draw a profile's arrivals, lengths and classes, and say what limits its results.

    Prompts are never printed. Tokens are counted exactly where the model is on this machine, and
    estimated otherwise.
    """
    from rich.console import Console

    from autotune.report.traffic import draw_traffic, view_traffic
    from autotune.traffic.profile import load_profile
    from autotune.traffic.tokens import token_counter

    traffic = load_profile(profile)
    counter = token_counter(_model_folder(traffic.model, model, traffic.where))
    view = view_traffic(traffic, counter, traffic.seed if seed is None else seed)
    if is_json:
        click.echo(json.dumps(view.as_dict(), indent=2, ensure_ascii=False))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, PIPE_COLUMNS))
    for part in draw_traffic(view, console.width):
        console.print(part)


def _model_folder(of_profile: str | None, of_option: str | None, where: str) -> Path | None:
    """Return the folder whose tokenizer counts; None for an estimate. Nothing is downloaded."""
    from autotune.demo.target import TARGET_NAME, demo_cache_dir
    from autotune.errors import AutotuneError
    from autotune.serving.models import find_model

    name = of_option or of_profile
    if name is None:
        return None
    if name == "demo:target":
        return demo_cache_dir() / TARGET_NAME
    try:
        return find_model(name, "model", "--model" if of_option else where)
    except AutotuneError:
        if of_option:
            raise
        return None  # a profile may well be looked at where its model is not
