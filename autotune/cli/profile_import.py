"""`autotune profile import`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("-o", "--out", "out", required=True, type=click.Path(path_type=Path),
              help="The profile to write, such as traffic.yaml.")  # fmt: skip
@click.option("--format", "format_name", default="auto", show_default=True,
              help="Format of the log; docs/importing.md lists them.")  # fmt: skip
@click.option("--column", "columns", multiple=True, metavar="NAME=FIELD",
              help="What the log calls a field, such as timestamp=ts or timestamp=ts[ms].")  # fmt: skip
@click.option("--name", help="Name of the profile. Default: made of the log's.")
@click.option("--model", help="Target model to write into the profile.")
@click.option("--drafter", help="Draft head to write into the profile.")
@click.option("--force", "is_forced", is_flag=True, help="Overwrite an existing profile.")
def command(
    log: Path,
    out: Path,
    format_name: str,
    columns: tuple[str, ...],
    name: str | None,
    model: str | None,
    drafter: str | None,
    is_forced: bool,
) -> None:
    """Draft a profile from a log, a trace or a data set.

    Says what the log shows, and from how many rows. Prompts are never printed.
    """
    from autotune.traffic.formats import read_rows
    from autotune.traffic.importing.draft import DraftOptions, draft_profile
    from autotune.traffic.importing.fit import fit_log
    from autotune.traffic.importing.summary import summary_lines
    from autotune.traffic.importing.writing import check_target, write_text

    target = check_target(out, log, is_forced=is_forced)
    fields = _fields_by_name(columns)
    fit = fit_log(read_rows(log, format_name, fields, what="log"))
    options = DraftOptions(target, name, model, drafter, fields)
    text = draft_profile(fit, options)
    write_text(target, text)
    for line in summary_lines(fit):
        click.echo(line)
    click.echo(f"{target} written; check what it says is not in the log")


def _fields_by_name(pairs: tuple[str, ...]) -> dict[str, str]:
    """Split NAME=FIELD pairs.

    Raises:
        click.BadParameter: one has no equals sign, or an empty side.
    """
    fields = {}
    for pair in pairs:
        name, _, field = pair.partition("=")
        if not name.strip() or not field.strip():
            raise click.BadParameter(
                f"must be NAME=FIELD, but got {pair!r}", param_hint="--column"
            )
        fields[name.strip()] = field.strip()
    return fields
