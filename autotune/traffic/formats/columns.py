"""Fields of a file under the names that its format expects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autotune.errors import invalid, suggestion
from autotune.traffic.formats.generic import PROMPT_NAMES
from autotune.traffic.formats.records import Record
from autotune.traffic.formats.requests import MAX_TOKENS_NAMES, SAMPLING_NAMES

COLUMN_NAMES = (
    *PROMPT_NAMES, "system", "timestamp", "input_length", "output_length", "input_tokens",
    "output_tokens", "hash_ids", "conversation_id", "turn", "category", "duration_s",
    *MAX_TOKENS_NAMES, *SAMPLING_NAMES,
)  # fmt: skip
"""The names that a user may give a file's own fields to."""

_UNIT = re.compile(r"(?P<field>.+)\[(?P<unit>s|ms|us|ns)\]")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class Columns:
    """Renames fields: each name takes its value from a field, or a path of fields with dots.

    A field may have a unit, as in ``ts[ms]``, where it holds a number of something but seconds.
    """

    def __init__(self, fields: Mapping[str, str], where: object) -> None:
        """Take the field of each name.

        Raises:
            InputError: a name is not one of `COLUMN_NAMES`.
        """
        self._paths: dict[str, tuple[str, float | None]] = {}
        for name, field in fields.items():
            if name not in COLUMN_NAMES:
                raise invalid(
                    "a column must have a name that a format knows",
                    where=where,
                    got=name,
                    next_step=suggestion(name, COLUMN_NAMES),
                )
            found = _UNIT.fullmatch(field)
            unit_s = _SECONDS[found["unit"]] if found else None
            self._paths[name] = (found["field"] if found else field, unit_s)

    def renamed(self, record: Record) -> Record:
        """Return the record with the names in place; a field that is not there leaves no name."""
        if not self._paths:
            return record
        values = {name: _value(record, *path) for name, path in self._paths.items()}
        return {**record, **values}


def _value(record: Record, path: str, unit_s: float | None) -> Any:
    value: Any = record
    if path in record:
        value = record[path]
    else:
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
    if unit_s is None or isinstance(value, bool):
        return value
    try:
        return float(value) * unit_s
    except (TypeError, ValueError, OverflowError):
        return value
