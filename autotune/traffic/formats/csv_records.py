"""Records of a CSV file: one mapping a row, by the header's names."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from autotune.errors import invalid
from autotune.traffic.formats.lines import NOT_UTF8, TOO_LARGE, numbered_lines
from autotune.traffic.formats.source import MAX_RECORD_BYTES
from autotune.traffic.rows import BadRow

DELIMITERS = ",;\t"


def numbered_csv_rows(
    stream: BinaryIO, where: object
) -> Iterator[tuple[int, dict[str, str]] | BadRow]:
    """Yield each row with the number of the line that it begins at; blank lines are no rows.

    Raises:
        InputError: the first line is no header.
    """
    # The default of 128 KiB is less than a long prompt, and no single reader has a limit of its own.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
    lines = _RecordLines(stream)
    header_line = lines.first()
    names = _header(header_line)
    if not any(names):
        raise invalid("the first line must be a header with the columns' names", where=where)
    for row in _rows(lines, delimiter_of(header_line)):
        if isinstance(row, BadRow):
            yield row
        elif len(row) != len(names):
            reason = f"has {len(row)} columns, but the header has {len(names)}"
            yield BadRow(lines.record_number, reason + lines.extent())
        else:
            yield lines.record_number, dict(zip(names, row, strict=True))


def delimiter_of(header: str) -> str:
    """Return the sign that parts a header's names: the one that stands there most often."""
    return max(DELIMITERS, key=header.count)


def _header(line: str) -> list[str]:
    try:
        names = next(csv.reader([line], delimiter=delimiter_of(line)), [])
    except csv.Error:
        return []
    return [name.strip() for name in names]


def _rows(lines: _RecordLines, delimiter: str) -> Iterator[list[str] | BadRow]:
    # Strict, or a quote that is open at the end of the file would pass for a long text.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin_record()
        try:
            row = next(reader)
        except StopIteration:
            return
        except (csv.Error, _BadLineError) as err:
            yield BadRow(lines.record_number, _reason(err) + lines.extent())
            continue
        if row:
            yield row


def _reason(err: Exception) -> str:
    if "field limit" in str(err):
        return TOO_LARGE
    return str(err) if isinstance(err, _BadLineError) else "is not CSV"


class _BadLineError(Exception):
    """A line that cannot be handed to the CSV reader; the message says why."""


class _RecordLines:
    """Decoded lines for the CSV reader, which asks for more of them while a quote is open.

    An iterator of its own, because a generator would be at its end after the first bad line. The
    reader, too, begins afresh after an exception.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._lines = numbered_lines(stream)
        self._number = 0
        self._num_record_bytes = 0
        self.record_number = 1

    def begin_record(self) -> None:
        self.record_number = self._number + 1
        self._num_record_bytes = 0

    def extent(self) -> str:
        """Say how far a record of several lines goes: a quote that never closes hides them."""
        if self._number == self.record_number:
            return ""
        return f" (up to line {self._number}: a quote may not be closed)"

    def first(self) -> str:
        """Return the header's line, or nothing if it cannot be read."""
        try:
            return next(self)
        except (StopIteration, _BadLineError):
            return ""

    def __iter__(self) -> _RecordLines:
        return self

    def __next__(self) -> str:
        self._number, line = next(self._lines)
        if line is None:
            raise _BadLineError(TOO_LARGE)
        self._num_record_bytes += len(line)
        if self._num_record_bytes > MAX_RECORD_BYTES:
            raise _BadLineError(TOO_LARGE)
        try:
            return line.decode()
        except UnicodeDecodeError as err:
            raise _BadLineError(NOT_UTF8) from err
