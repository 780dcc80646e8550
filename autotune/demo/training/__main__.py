"""Command line of the training: `python -m autotune.demo.training answers|train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.errors import AutotuneError, PrerequisiteError

# As many as the head that ships was trained with.
DEFAULT_THREADS = 2

POSITIVE = click.IntRange(min=1)
POSITIVE_NUMBER = click.FloatRange(min=0, min_open=True)
PATH = click.Path(path_type=Path)


class ExplainingGroup(click.Group):
    """Shows our own errors as one line with their exit code, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except AutotuneError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


def parse_layers(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Turn "2,15,27" into numbers; the empty text into none."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"must be numbers such as 2,15,27, but got {text!r}") from error


def prepare_torch(num_threads: int) -> None:
    """Limit torch to some threads, or say how to install it where it is missing."""
    try:
        import torch
        import transformers  # noqa: F401  # both are needed, and this is the place to say so
    except ImportError as error:
        raise PrerequisiteError(
            f"training needs torch, transformers and safetensors ({error}). "
            "Install them with the lock file in requirements/."
        ) from error
    torch.set_num_threads(num_threads)


@click.group(cls=ExplainingGroup)
def cli() -> None:
    """Train a P-EAGLE head for a small Llama model on CPU."""


@cli.command()
@click.argument("prompt_files", nargs=-1, required=True, type=PATH)
@click.option("--target", "target_dir", required=True, type=PATH, help="Folder of the target.")
@click.option(
    "--out", "out_file", required=True, type=PATH, help="New JSONL file for the answers."
)
@click.option("--max-new-tokens", default=256, type=POSITIVE, show_default=True)
@click.option("--batch-size", default=8, type=POSITIVE, show_default=True)
@click.option("--threads", default=DEFAULT_THREADS, type=POSITIVE, show_default=True)
def answers(threads: int, **options: Any) -> None:
    """Let the target answer PROMPT_FILES greedily (JSONL with "prompt" on each line)."""
    prepare_torch(threads)
    from autotune.demo.training.answers import AnswerOptions, write_answers

    num_answers = write_answers(AnswerOptions(**options), click.echo)
    click.echo(f"{num_answers} answers in {options['out_file']}")


@cli.command()
@click.argument("answer_files", nargs=-1, required=True, type=PATH)
@click.option("--target", "target_dir", required=True, type=PATH, help="Folder of the target.")
@click.option("--out", "out_dir", required=True, type=PATH, help="Folder for the new head.")
@click.option("--init", "init_dir", type=PATH, help="Continue from this head.")
@click.option("--layers", "num_layers", default=3, type=POSITIVE, show_default=True)
@click.option(
    "--draft-vocab",
    "draft_vocab_size",
    default=4096,
    type=POSITIVE,
    show_default=True,
    help="Number of tokens the head can propose.",
)
@click.option(
    "--depth", default=8, type=POSITIVE, show_default=True, help="Tokens drafted in one pass."
)
@click.option(
    "--mask-token",
    "mask_token_id",
    default=4,
    type=click.IntRange(min=0),
    show_default=True,
    help="A token id that the target never says.",
)
@click.option(
    "--aux-layers",
    "aux_layer_ids",
    default="",
    callback=parse_layers,
    help="Target layers to read, such as 2,15,27.  [default: as vLLM]",
)
@click.option(
    "--anchors",
    "anchors_per_sample",
    default=20,
    type=POSITIVE,
    show_default=True,
    help="Drafts practised in one sample and step.",
)
@click.option(
    "--max-length",
    default=256,
    type=click.IntRange(min=32),
    show_default=True,
    help="Tokens kept of a sample.",
)
@click.option(
    "--held-out",
    "num_held_out",
    default=40,
    type=POSITIVE,
    show_default=True,
    help="Samples kept to measure accuracy.",
)
@click.option("--batch-size", default=4, type=POSITIVE, show_default=True)
@click.option("--learning-rate", default=1e-3, type=POSITIVE_NUMBER, show_default=True)
@click.option("--minutes", default=30.0, type=POSITIVE_NUMBER, show_default=True)
@click.option("--max-steps", type=POSITIVE, help="Stop here if the minutes are not over yet.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=DEFAULT_THREADS, type=POSITIVE, show_default=True)
def train(threads: int, **options: Any) -> None:
    """Train a head on ANSWER_FILES and save it for vLLM."""
    prepare_torch(threads)
    from autotune.demo.training.train import TrainingOptions, train_head

    train_head(TrainingOptions(**options), click.echo)


if __name__ == "__main__":
    cli(prog_name="python -m autotune.demo.training")
