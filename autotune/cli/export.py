"""`autotune export`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import storage_option


@click.command("export")
@click.argument("study", required=False)
@click.option("--to", "target", default="vllm", show_default=True, help="Deployment target: vllm.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--trial", "trial_number", type=click.IntRange(0),
              help="Export this trial instead of the decision.")  # fmt: skip
@storage_option
def command(
    study: str | None, target: str, out: Path, trial_number: int | None, storage: str
) -> None:
    """Write the recommended config as files that deploy it.

    Without a name, of the newest study of the database.
    """
    from autotune.export.base import export_study
    from autotune.report.study import load_study
    from autotune.store.repository import Store

    store = Store(storage)
    try:
        view = load_study(store, study)
    finally:
        store.close()
    for path in export_study(view, target, out, trial_number):
        click.echo(path)
