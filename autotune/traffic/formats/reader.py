"""The one way to read a file of requests: whatever its format, rows come out, one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.errors import InputError, invalid
from autotune.traffic.formats.columns import Columns
from autotune.traffic.formats.lines import NOT_UTF8
from autotune.traffic.formats.records import Container, container_of, read_records
from autotune.traffic.formats.registry import Format, fitting, format_named, unknown_format
from autotune.traffic.formats.values import Record, RowError, shown_keys
from autotune.traffic.rows import BadRow, Row

NUM_DETECTION_RECORDS = 20
_MAX_BROKEN_RECORDS = 100
_MAX_OPEN_CONVERSATIONS = 100_000


class RowReader:
    """The rows of one file, in file order; may be gone through several times."""

    def __init__(
        self, path: Path, known: Format, container: Container, columns: Columns, what: str
    ) -> None:
        """Take what was found out about the file; see `read_rows`."""
        self.path = path
        self.format = known.name
        self.container = container
        self.num_other = 0
        """Parts of the file that are no requests, such as spans of other calls; of the last pass."""
        self._rows_of = known.rows
        self._columns = columns
        self._what = what

    @property
    def unit(self) -> str:
        """What a row's number counts: lines, or in one JSON text its elements."""
        return "element" if self.container is Container.JSON else "line"

    def __iter__(self) -> Iterator[Row | BadRow]:
        """Go through the file in constant memory.

        Raises:
            InputError: it cannot be opened any more.
        """
        self.num_other = 0
        turns = _TurnCounter()
        for found in read_records(self.path, self.container, self._what):
            if isinstance(found, BadRow):
                yield found
                continue
            number, record = found
            try:
                for row in self._rows_of(number, self._columns.renamed(record)):
                    if row is None:
                        self.num_other += 1
                    else:
                        yield turns.numbered(row)
            except RowError as err:
                yield BadRow(number, str(err))


def read_rows(
    path: Path,
    format: str = "auto",  # the profile's key has this name, too
    columns: Mapping[str, str] | None = None,
    what: str = "file",
) -> RowReader:
    """Open a file of requests, packed with gzip or not.

    Args:
        path: the file.
        format: one of `FORMATS`, or ``auto``.
        columns: for names such as ``timestamp``, what the file calls them; see `Columns`.
        what: the file's role in messages, such as "prompt file".

    Raises:
        InputError: the file is missing, empty, or no text; the format is unknown, or cannot be told;
            no record among the first can be read.
    """
    renaming = Columns(columns or {}, "--column")
    if format == "auto":
        known, container = _detected(path, renaming, what)
    else:
        known = format_named(format, path)
        found = container_of(path, what, is_text=known.name == "text")
        assert found is not None  # a format was named, which leaves no doubt
        container = found
    return RowReader(path, known, container, renaming, what)


def detect(path: Path, columns: Mapping[str, str] | None = None) -> str:
    """Return the name of a file's format, from its extension, then the keys of its first records.

    Raises:
        InputError: see `read_rows`.
    """
    return read_rows(path, "auto", columns).format


def _detected(path: Path, columns: Columns, what: str) -> tuple[Format, Container]:
    container = container_of(path, what)
    if container is None:
        raise unknown_format(path, "neither its name nor its first lines say so")
    records = [columns.renamed(record) for record in _first_records(path, container, what)]
    if container is Container.TEXT:
        return format_named("text", path), container
    fits = [fitting(record, is_csv=container is Container.CSV) for record in records]
    names = [known.name for known in fits if known is not None]
    if not names:
        raise unknown_format(path, _what_was_found(records[0], container))
    # Optional keys are missing in some records; a single odd record must not decide.
    most_common = max(dict.fromkeys(names), key=names.count)
    return format_named(most_common, path), container


def _first_records(path: Path, container: Container, what: str) -> list[Record]:
    records: list[Record] = []
    broken: list[BadRow] = []
    for found in read_records(path, container, what):
        if isinstance(found, BadRow):
            broken.append(found)
        else:
            records.append(found[1])
        if len(records) == NUM_DETECTION_RECORDS or len(broken) == _MAX_BROKEN_RECORDS:
            break
    if records:
        return records
    raise _nothing_readable(path, broken, what)


def _nothing_readable(path: Path, broken: list[BadRow], what: str) -> InputError:
    if not broken:
        return invalid(f"the {what} must hold at least one record below its header", where=path)
    is_encoding = broken[0].reason == NOT_UTF8
    return invalid(
        f"{broken[0].reason}; no record among the first can be read"
        if len(broken) > 1
        else broken[0].reason,
        where=f"{path}:{broken[0].number}",
        next_step="Convert it, for example: iconv -f latin1 -t utf-8." if is_encoding else "",
    )


def _what_was_found(record: Record, container: Container) -> str:
    if (
        container is Container.CSV
    ):  # its header may be no header, but a text that is not for messages
        return "no column has a name that a format knows"
    return f"the first record has the keys {shown_keys(record)}"


class _TurnCounter:
    """Numbers the requests of each conversation, in file order, where the file does not.

    Only as many conversations as fit are remembered: the ones that went on most recently.
    """

    def __init__(self) -> None:
        self._next: OrderedDict[str, int] = OrderedDict()

    def numbered(self, row: Row | BadRow) -> Row | BadRow:
        if isinstance(row, BadRow) or row.conversation is None:
            return row
        turn = max(row.turn, self._next.pop(row.conversation, 0))
        self._next[row.conversation] = turn + 1
        if len(self._next) > _MAX_OPEN_CONVERSATIONS:
            self._next.popitem(last=False)
        return row if turn == row.turn else replace(row, turn=turn)
