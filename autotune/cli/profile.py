"""`autotune profile`, a group of commands."""

from __future__ import annotations

import click

from autotune.cli.lazy import LazyGroup

COMMANDS = {
    "import": "Draft a profile from a log, a trace or a data set.",
    "show": "Draw a profile's arrivals and lengths.",
    "schema": "Print the JSON schema of profiles, for editors.",
}


class ProfileGroup(LazyGroup):
    """What can be done with profiles."""

    lazy_commands = COMMANDS
    module_prefix = "autotune.cli.profile_"


@click.group("profile", cls=ProfileGroup)
def command() -> None:
    """Make, look at and check traffic profiles."""
