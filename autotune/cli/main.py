"""The `autotune` command and the one place where exceptions become text and exit codes."""

from __future__ import annotations

import sys

import click

import autotune
from autotune.cli.lazy import LazyGroup

COMMANDS = {
    "search": "Search serving configs for your traffic, and recommend one.",
    "profile": "Make, look at and check traffic profiles.",
    "demo": "Run the embedded example: a small real model on this machine.",
    "noise": "Launch one config again and again: how far do equal things differ here?",
    "show": "Show a study: every config tried, and the decision.",
    "export": "Write the recommended config as files that deploy it.",
    "dashboard": "Browse studies in optuna-dashboard, read-only.",
    "doctor": "Say what is installed, which knobs live here, and what is missing.",
}


class AutotuneGroup(LazyGroup):
    """The top level."""

    lazy_commands = COMMANDS
    module_prefix = "autotune.cli."


@click.group(cls=AutotuneGroup, context_settings={"help_option_names": ["-h", "--help"]})
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
