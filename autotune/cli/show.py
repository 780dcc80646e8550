"""`autotune show`."""

from __future__ import annotations

import json

import click

from autotune.cli.options import storage_option


@click.command("show")
@click.argument("study", required=False)
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of a table.")
@storage_option
def command(study: str | None, is_json: bool, storage: str) -> None:
    """Show a study: every config tried, and the decision.

    Without a name, the newest study of the database.
    """
    from autotune.cli.running import make_console, print_study
    from autotune.report.study import load_study
    from autotune.store.repository import Store

    store = Store(storage)
    try:
        view = load_study(store, study)
    finally:
        store.close()
    if is_json:
        click.echo(json.dumps(view.as_dict(), indent=2, sort_keys=True, ensure_ascii=False))
    else:
        print_study(make_console(), view)
