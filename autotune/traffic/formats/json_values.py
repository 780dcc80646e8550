"""One JSON text that holds many records, cut into the bytes of each, in constant memory.

A streaming JSON parser would do for whole files, but the ones at hand load a string of any length
and end at the first mistake. Cutting first keeps both apart: a record above the limit is passed
over, and a broken one costs only itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from autotune.traffic.formats.source import MAX_RECORD_BYTES

_CHUNK_BYTES = 256 * 1024
_SPACE = b" \t\r\n"

# Possessive, so that a long string of escapes needs no memory to go back to.
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BETWEEN_ITEMS = re.compile(rb'["\[\]{},]')
_INSIDE_ITEM = re.compile(rb'["\[\]{}]')


def numbered_values(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield each element of a JSON array, or each of several JSON objects one after the other.

    Elements come with their number from 1, as bytes that may or may not be JSON; None stands for an
    element above `MAX_RECORD_BYTES`. Text that is left over at the end is an element too.
    """
    cutter = _Cutter()
    number = 0
    while chunk := stream.read(_CHUNK_BYTES):
        for value in cutter.feed(chunk):
            number += 1
            yield number, value
    if cutter.has_rest:
        yield number + 1, cutter.take()


class _Cutter:
    """Where the scan of the text stands: how deep, in a string or not, and the element so far."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._depth = 0
        self._base = 0  # 1 inside a top-level array
        self._has_begun = False
        self._in_string = False
        self._is_escaped = False  # the chunk before ended with a backslash

    @property
    def has_rest(self) -> bool:
        return self._num_bytes > 0

    def take(self) -> bytes | None:
        """Hand over the element so far, or None if it is too large, and begin the next."""
        value = None if self._num_bytes > MAX_RECORD_BYTES else b"".join(self._parts)
        self._parts = []
        self._num_bytes = 0
        return value

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        position = self._begin(chunk)
        start = position
        while position < len(chunk):
            if self._in_string:
                position = self._skip_string(chunk, position)
                continue
            pattern = _BETWEEN_ITEMS if self._depth == self._base else _INSIDE_ITEM
            found = pattern.search(chunk, position)
            if found is None:
                break
            position = found.end()
            sign = found[0]
            if sign == b'"':
                self._in_string = True
            elif sign in b"[{":
                self._depth += 1
            elif sign == b",":
                if self._base:
                    self._keep(chunk, start, found.start())
                    yield self.take()
                    start = position
            elif self._depth > self._base:
                self._depth -= 1
                if self._depth == self._base == 0:
                    self._keep(chunk, start, position)
                    yield self.take()
                    start = position
            elif self._base and sign == b"]":
                self._keep(chunk, start, found.start())
                if self._num_bytes:
                    yield self.take()
                self._depth = self._base = (
                    0  # whatever follows the array is told as a broken record
                )
                start = position
        self._keep(chunk, start, len(chunk))

    def _begin(self, chunk: bytes) -> int:
        """Find whether the whole is an array; return where the scan of this chunk starts."""
        if self._has_begun:
            return 0
        position = len(chunk) - len(chunk.lstrip(_SPACE))
        if position == len(chunk):
            return position
        self._has_begun = True
        if chunk[position : position + 1] == b"[":
            self._depth = self._base = 1
            return position + 1
        return position

    def _skip_string(self, chunk: bytes, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        found = _IN_STRING.match(chunk, position)
        end = found.end() if found else position
        if chunk[end : end + 1] == b'"':
            self._in_string = False
            return end + 1
        # Short of the chunk's end, only a backslash that is its last byte stops the match.
        self._is_escaped = end < len(chunk)
        return len(chunk)

    def _keep(self, chunk: bytes, start: int, end: int) -> None:
        """Add a part to the element; space before and between elements is no part of one."""
        part = chunk[start:end]
        if not self._num_bytes:
            part = part.lstrip(_SPACE)
        self._num_bytes += len(part)
        if self._num_bytes > MAX_RECORD_BYTES:
            self._parts = []
        elif part:
            self._parts.append(part)
