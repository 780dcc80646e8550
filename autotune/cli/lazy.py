"""A group of commands whose modules are imported only when called, so that help is quick."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click


class LazyGroup(click.Group):
    """Knows its commands by name and description; each lives in a module of its own.

    Set `lazy_commands` (what each does, in order of display) and `module_prefix` on a subclass; the
    command ``name`` is the attribute ``command`` of the module ``<module_prefix><name>``.
    """

    lazy_commands: Mapping[str, str]
    module_prefix: str

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy_commands:
            return None
        module = importlib.import_module(f"{self.module_prefix}{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their descriptions, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy_commands.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from autotune.errors import suggestion

        if args and args[0] not in self.lazy_commands and not args[0].startswith("-"):
            hint = suggestion(args[0], self.lazy_commands)
            raise click.UsageError(f"no such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)
