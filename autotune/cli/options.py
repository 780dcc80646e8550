"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_STORAGE = "autotune.db"

storage_option = click.option(
    "--storage",
    default=DEFAULT_STORAGE,
    show_default=True,
    help="Study database: a path (SQLite) or a database URL.",
)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}


class Duration(click.ParamType[float]):
    """A time such as 90m, 2h or 300s, as seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _DURATION.fullmatch(str(value).strip())
        if not found or float(found[1]) <= 0:
            self.fail(
                f"must be a time above 0 such as 300s, 90m or 2h, but got {value!r}", param, ctx
            )
        return float(found[1]) * _SECONDS[found[2]]


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose and set up the engine."""
    for option in (
        click.option(
            "--engine-option",
            "engine_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="Setting of the engine, such as world=h100-8b for the simulated one.",
        ),
        click.option(
            "--vllm-python",
            type=click.Path(path_type=Path),
            help="Interpreter of another environment that has vLLM.",
        ),
        click.option(
            "--engine",
            "engine_name",
            default="vllm",
            show_default=True,
            help="vllm, simulated, replay, or package.module:Class.",
        ),
    ):
        function = option(function)
    return function


def parse_engine_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """Split NAME=VALUE pairs.

    Raises:
        click.BadParameter: one has no equals sign.
    """
    options = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise click.BadParameter(
                f"must be NAME=VALUE, but got {pair!r}", param_hint="--engine-option"
            )
        options[name.strip()] = value.strip()
    return options
