"""Kinds of value that several parts of a profile share, with their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from autotune.errors import suggestion
from autotune.traffic.builtin import builtin_sets
from autotune.traffic.formats import COLUMN_NAMES, FORMATS

MAX_REQUESTS = 100_000
"""More than one measurement can sensibly hold; a guard for memory."""

MAX_TOKENS = 1_000_000
WEEK_S = 604_800

Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=WEEK_S)]
SecondsOrZero = Annotated[float, Field(ge=0, le=WEEK_S)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Concurrency = Annotated[int, Field(ge=1, le=4096)]


def _one_of(names: Sequence[str], rule: str) -> AfterValidator:
    """Demand a known name; the message says which one was probably meant."""

    def check(name: str) -> str:
        if name not in names:
            raise PydanticCustomError("unknown_name", f"{rule} ({_hint(name, names)})")
        return name

    return AfterValidator(check)


def _hint(name: str, names: Sequence[str]) -> str:
    hint = suggestion(name, names).removesuffix(".")
    return hint[:1].lower() + hint[1:]


FormatName = Annotated[
    str,
    _one_of(("auto", *FORMATS), "must be a format of `autotune profile import`, or auto"),
    WithJsonSchema({"type": "string", "enum": ["auto", *FORMATS]}),
]
"""A format of `autotune profile import`, or auto."""


BuiltinName = Annotated[
    str,
    _one_of(builtin_sets(), "must be a built-in prompt set"),
    WithJsonSchema({"type": "string", "enum": builtin_sets()}),
]
"""A prompt set that ships with Autotune."""


def _known_columns(columns: dict[str, str]) -> dict[str, str]:
    for name in columns:
        if name not in COLUMN_NAMES:
            rule = f"no format knows a column {name!r} ({_hint(name, COLUMN_NAMES)})"
            raise PydanticCustomError("unknown_column", rule)
    return columns


Columns = Annotated[
    dict[str, str],
    AfterValidator(_known_columns),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {name: {"type": "string"} for name in COLUMN_NAMES},
            "additionalProperties": False,
        }
    ),
]
"""What a file calls its columns, by the names that formats know."""


def one_message(rule: str) -> WrapValidator:
    """Give a value that may be of several types one message, not one for each that does not fit."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as err:
            raise PydanticCustomError("no_type_fits", rule) from err

    return WrapValidator(check)
