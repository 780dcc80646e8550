"""The `autotune` command and the one place where exceptions become text and exit codes."""

from __future__ import annotations

import importlib
import sys

import click

import autotune

COMMANDS = {
    "search": "Search serving configs for your traffic, and recommend one.",
    "demo": "Run the embedded example: a small real model on this machine.",
    "show": "Show a study: every config tried, and the decision.",
    "export": "Write the recommended config as files that deploy it.",
    "dashboard": "Browse studies in optuna-dashboard, read-only.",
    "doctor": "Say what is installed, which knobs live here, and what is missing.",
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command is called, so that help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"autotune.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from `COMMANDS`, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from autotune.errors import suggestion

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = suggestion(args[0], COMMANDS)
            raise click.UsageError(f"no such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autotune.__version__, prog_name="autotune")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Find, by measuring, the speculative-decoding config that serves your traffic best."""
    ctx.obj = {"debug": debug}


def main() -> None:
    """Run the command line; exit with 0, 1 (failed), 2 (usage) or 130 (interrupted)."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line with `arguments` and return the exit code."""
    from autotune.errors import AutotuneError

    try:
        result = cli.main(arguments, prog_name="autotune", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as err:
        err.show()
        return err.exit_code
    except AutotuneError as err:
        if "--debug" in arguments:
            raise
        click.echo(f"error: {err}", err=True)
        return err.exit_code
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing is wrong, nothing is left to say.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    main()
