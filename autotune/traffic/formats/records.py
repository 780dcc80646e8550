"""Records of a file, whatever holds them: JSON lines, one JSON text, CSV, or plain lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from autotune.traffic.formats.csv_records import delimiter_of, numbered_csv_rows
from autotune.traffic.formats.json_values import numbered_values
from autotune.traffic.formats.lines import NOT_UTF8, TOO_LARGE, numbered_lines
from autotune.traffic.formats.source import HEAD_BYTES, DamagedFileError, empty_file, open_text
from autotune.traffic.rows import BadRow

Record = Mapping[str, Any]

TEXT_KEY = "prompt"
"""The key under which a plain line stands in its record."""


class Container(StrEnum):
    """How records stand in their file."""

    JSON_LINES = "JSON lines"
    JSON = "JSON"
    CSV = "CSV"
    TEXT = "plain text"


_BY_SUFFIX = {
    ".jsonl": Container.JSON_LINES,
    ".ndjson": Container.JSON_LINES,
    ".csv": Container.CSV,
    ".tsv": Container.CSV,
    ".txt": Container.TEXT,
    ".text": Container.TEXT,
    ".md": Container.TEXT,
}


def container_of(path: Path, what: str, *, is_text: bool | None = None) -> Container | None:
    """Tell from the extension, then from the first bytes, how the records stand.

    Args:
        path: the file.
        what: its role in messages.
        is_text: what the format demands: plain lines or not; None if no format was named.

    Returns:
        None if neither says.

    Raises:
        InputError: the file cannot be read, is empty, or holds no text.
    """
    lines = _first_lines(path, what)
    if is_text:
        return Container.TEXT
    by_suffix = _BY_SUFFIX.get(_suffix(path))
    if by_suffix is not None and not (is_text is False and by_suffix is Container.TEXT):
        return by_suffix
    first = lines[0].strip()
    if first.startswith(b"[") or first == b"{":
        return Container.JSON
    num_objects = sum(line.lstrip().startswith(b"{") for line in lines)
    if 2 * num_objects > len(lines) or _suffix(path) == ".json":
        return Container.JSON_LINES
    if is_text is False or _may_be_header(first):
        return Container.CSV
    return None


def _first_lines(path: Path, what: str) -> list[bytes]:
    """Return the lines at the start that are not blank, at least one."""
    with open_text(path, what) as stream:
        head = stream.peek(HEAD_BYTES)
        lines = [line for line in head.splitlines() if line.strip()]
        if lines:
            return lines
        try:
            for _, line in numbered_lines(stream):
                if line is None or line.strip():
                    return [line or b""]
        except DamagedFileError:
            pass
    raise empty_file(path, what)


def _may_be_header(line: bytes) -> bool:
    text = line.decode(errors="replace")
    names = text.split(delimiter_of(text))
    return len(names) > 1 and all(0 < len(name.strip()) <= 40 for name in names)


def read_records(
    path: Path, container: Container, what: str
) -> Iterator[tuple[int, Record] | BadRow]:
    """Yield every record with its number: the line's, or in one JSON text the element's.

    Raises:
        InputError: the file cannot be read, is empty, or holds no text.
    """
    number = 0
    with open_text(path, what) as stream:
        try:
            for found in _records(stream, container, path):
                number = found.number if isinstance(found, BadRow) else found[0]
                yield found
        except DamagedFileError as err:
            yield BadRow(number + 1, f"cannot be read, nor can what follows: {err}")


def _records(
    stream: BinaryIO, container: Container, path: Path
) -> Iterator[tuple[int, Record] | BadRow]:
    if container is Container.CSV:
        yield from numbered_csv_rows(stream, path)
        return
    is_one_text = container is Container.JSON
    parts = numbered_values(stream) if is_one_text else numbered_lines(stream)
    for number, part in parts:
        if part is None:
            yield BadRow(number, TOO_LARGE)
        elif is_one_text or part.strip():
            try:
                if container is Container.TEXT:
                    yield number, {TEXT_KEY: _decoded(part).strip()}
                else:
                    yield number, _json_object(part, "element" if is_one_text else "line")
            except _UnreadableError as err:
                yield BadRow(number, str(err))


class _UnreadableError(Exception):
    """Bytes that are no record; the message says why, and never holds any of them."""


def _json_object(part: bytes, unit: str) -> Record:
    rule = f"each {unit} must be one JSON object"
    try:
        value = json.loads(_decoded(part))
    except json.JSONDecodeError as err:
        raise _UnreadableError(f"{rule} ({err.msg}: character {err.pos + 1})") from err
    except RecursionError as err:
        raise _UnreadableError(f"{rule} (it is nested too deeply)") from err
    except ValueError as err:  # a whole number of more than 4300 digits, Python's own limit
        raise _UnreadableError(f"{rule} (a number has too many digits)") from err
    if not isinstance(value, dict):
        raise _UnreadableError(rule)
    return value


def _decoded(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError as err:
        raise _UnreadableError(NOT_UTF8) from err


def _suffix(path: Path) -> str:
    """Return the extension in small letters, that of the packed file if it is gzip."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
