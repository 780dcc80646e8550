"""`autotune profile schema`."""

from __future__ import annotations

import json

import click


@click.command("schema")
def command() -> None:
    """Print the JSON schema of profiles, for editors.

    Beside a profile, as traffic.schema.json, it serves every editor that knows the first line of
    the shipped profiles.
    """
    from autotune.traffic.schema import profile_schema

    click.echo(json.dumps(profile_schema(), indent=2, ensure_ascii=False))
