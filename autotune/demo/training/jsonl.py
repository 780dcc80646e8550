"""Read JSONL files that people hand in, with the line number in every complaint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.errors import invalid


def numbered_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `<file>:<line>` and the object on that line; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, is no UTF-8, or a line is no JSON object.
    """
    # Not splitlines(): it also cuts at U+2028 and its kin, which JSON allows inside a string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _parse_object(line, where)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise invalid(f"must be a readable file ({error.strerror})", where=path) from error
    except UnicodeDecodeError as error:
        raise invalid(f"must be UTF-8 text (see byte {error.start})", where=path) from error


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise invalid(f"must be JSON ({error})", where=where) from error
    if not isinstance(row, dict):
        raise invalid("must be a JSON object", where=where, got=row)
    return row
