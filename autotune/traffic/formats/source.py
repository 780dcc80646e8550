"""A user's file as bytes: opened, unpacked, and refused with one message where it holds no text."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from autotune.errors import InputError, invalid
from autotune.paths import user_path

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The most bytes of one record. A million tokens of text are about 4 MB, so no request is larger."""

HEAD_BYTES = 64 * 1024

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\xfd7zXZ": "an xz archive",
    b"BZh": "a bzip2 archive",
    b"SQLite format 3": "an SQLite database",
}


class DamagedFileError(Exception):
    """The file cannot be read further; the message says why."""


@contextmanager
def open_text(path: Path, what: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, unpacked if it is gzip, with a byte order mark taken off.

    Args:
        path: the file.
        what: its role in messages, such as "prompt file".

    Raises:
        InputError: the file is missing, empty, no file, not readable, or holds no UTF-8 text.
        DamagedFileError: while reading, when the file or the packed data breaks off.
    """
    path = _existing_file(path, what)
    try:
        raw = path.open("rb")
    except OSError as err:
        raise invalid(f"the {what} cannot be read ({err.strerror})", where=path) from err
    with raw:
        is_packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        unpacked = gzip.GzipFile(fileobj=raw) if is_packed else raw
        stream = io.BufferedReader(_Guarded(unpacked), HEAD_BYTES)
        _check_is_text(path, what, stream)
        yield stream


def _existing_file(path: Path, what: str) -> Path:
    path = user_path(path, f"the {what}")
    if not path.exists():
        raise invalid(f"the {what} must exist", where=path, next_step="Check the path.")
    if not path.is_file():
        raise invalid(f"the {what} must be a file", where=path, next_step="Check the path.")
    return path


def _check_is_text(path: Path, what: str, stream: io.BufferedReader[Any]) -> None:
    try:
        head = stream.peek(HEAD_BYTES)
    except DamagedFileError as err:
        raise invalid(f"the {what} cannot be read ({err})", where=path) from err
    if not head:
        raise empty_file(path, what)
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise invalid(
                f"the {what} must be text, but is {name}",
                where=path,
                next_step="Unpack or convert it to JSON lines or CSV first.",
            )
    if head.startswith(_UTF16_BOMS):
        raise invalid(
            f"the {what} must be UTF-8 text, but is UTF-16",
            where=path,
            next_step="Convert it: iconv -f utf-16 -t utf-8.",
        )
    if b"\0" in head:
        raise invalid(f"the {what} must be text, but is binary", where=path)
    if head.startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))


def empty_file(path: Path, what: str) -> InputError:
    """Build the error for a file without a single record."""
    return invalid(f"the {what} must hold at least one record, but is empty", where=path)


class _Guarded(io.RawIOBase):
    """Turns every way in which reading can fail into `DamagedFileError`."""

    def __init__(self, inner: BinaryIO | gzip.GzipFile) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # Buffer from 3.12 on
        try:
            data = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error) as err:
            raise DamagedFileError(_reason(err)) from err
        buffer[: len(data)] = data
        return len(data)


def _reason(err: Exception) -> str:
    if isinstance(err, EOFError | zlib.error | gzip.BadGzipFile):
        return "its gzip data is damaged or cut off"
    return getattr(err, "strerror", None) or "reading failed"
