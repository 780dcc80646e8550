"""Lines of a file in constant memory: a monstrous one is passed over, never loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from autotune.traffic.formats.source import MAX_RECORD_BYTES

_SKIP_BYTES = 1024 * 1024

TOO_LARGE = f"is larger than {MAX_RECORD_BYTES // 2**20} MiB"
NOT_UTF8 = "is not UTF-8 text"


def numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number from 1; None stands for a line above `MAX_RECORD_BYTES`."""
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            while not line.endswith(b"\n") and (line := stream.readline(_SKIP_BYTES)):
                pass
            yield number, None
        else:
            yield number, line
