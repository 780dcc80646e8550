"""Lengths of requests, drawn from a distribution or from the rows of a log."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import NormalDist

from autotune.errors import invalid
from autotune.paths import user_path
from autotune.traffic.classes import (
    EmpiricalLength,
    FixedLength,
    LengthDistribution,
    LognormalLength,
    TrafficClass,
)
from autotune.traffic.fields import MAX_TOKENS
from autotune.traffic.formats import read_rows
from autotune.traffic.rows import BadRow, Row

MAX_LENGTH_ROWS = 100_000
_Z95 = NormalDist().inv_cdf(0.95)


class LengthSequence:
    """Draws input and output lengths of one class, request by request."""

    def __init__(self, c: TrafficClass, folder: Path, rng: random.Random) -> None:
        """Take the class's distributions, if it has any.

        Args:
            c: the class.
            folder: where a relative path starts.
            rng: decides what is drawn.

        Raises:
            InputError: a file of lengths cannot be used.
        """
        self._input = c.lengths.input if c.lengths is not None else None
        self._output = c.lengths.output if c.lengths is not None else None
        self._rng = rng
        self._number = -1
        self._rows: dict[Path, list[Row]] = {}
        for distribution in (self._input, self._output):
            if isinstance(distribution, EmpiricalLength) and distribution.file not in self._rows:
                rows = _rows_with_lengths(distribution, folder)
                rng.shuffle(rows)
                self._rows[distribution.file] = rows

    def next(self) -> tuple[int | None, int | None]:
        """Return the input and output tokens of the next request, None where it is free."""
        self._number += 1
        return self._draw(self._input, "input"), self._draw(self._output, "output")

    def _draw(self, distribution: LengthDistribution | None, side: str) -> int | None:
        if distribution is None:
            return None
        if not isinstance(distribution, EmpiricalLength):
            return drawn_length(distribution, self._rng)
        rows = self._rows[distribution.file]
        row = rows[self._number % len(rows)]
        tokens = row.num_input_tokens if side == "input" else row.num_output_tokens
        assert tokens is not None  # rows without both lengths were left out
        return min(tokens, distribution.max or MAX_TOKENS)


def _rows_with_lengths(distribution: EmpiricalLength, folder: Path) -> list[Row]:
    path = folder / user_path(distribution.file, "lengths.file")
    found: list[Row] = []
    for row in read_rows(path, distribution.format, what="file of lengths"):
        if not isinstance(row, BadRow) and row.num_input_tokens and row.num_output_tokens:
            found.append(row)
        if len(found) == MAX_LENGTH_ROWS:
            break
    if not found:
        raise invalid(
            "a file of lengths must have rows with input and output tokens, but none has both",
            where=path,
            next_step="Give another file, or `dist: lognormal`.",
        )
    return found


def drawn_length(distribution: FixedLength | LognormalLength, rng: random.Random) -> int:
    """Draw one length in tokens.

    The lognormal with median p50 and 95th percentile p95 has sigma = ln(p95 / p50) / 1.645.
    """
    if isinstance(distribution, FixedLength):
        return distribution.tokens
    sigma = math.log(distribution.p95 / distribution.p50) / _Z95
    drawn = round(distribution.p50 * rng.lognormvariate(0.0, sigma))
    return min(distribution.max, max(1, drawn))
