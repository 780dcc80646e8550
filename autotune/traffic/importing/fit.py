"""One pass over a log: everything that a profile can be drafted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InputError, invalid
from autotune.traffic.formats import RowReader
from autotune.traffic.importing.arrivals import ArrivalRecorder, Arrivals
from autotune.traffic.importing.inferred import (
    Inferred,
    MostCommon,
    Quantiles,
    Reservoir,
    ValueCounter,
)
from autotune.traffic.importing.sessions import SessionRecorder, Sessions
from autotune.traffic.importing.sharing import Blocks, SharingRecorder, SystemPrompts
from autotune.traffic.rows import BadRow, Row

MAX_CLASSES = 32
"""More names than that are no classes, but something else: users, documents."""

NUM_BAD_ROWS_KEPT = 3
SEED = 7
"""Of the samples that quantiles are taken from, so that a log always gives the same profile."""


@dataclass(frozen=True)
class Group:
    """What is known of the rows of one class, or of all rows."""

    num_rows: int
    num_with_text: int
    num_completions: int
    """Rows for the completions endpoint."""
    input_tokens: Inferred[Quantiles] | None
    output_tokens: Inferred[Quantiles] | None
    prompt_chars: Inferred[Quantiles] | None
    max_tokens: Inferred[MostCommon] | None
    sampling: Mapping[str, Inferred[MostCommon]]

    @property
    def has_text(self) -> bool:
        """Whether the prompts can be taken from the log: at least half of the rows have one."""
        return 2 * self.num_with_text >= self.num_rows


@dataclass(frozen=True)
class LogFit:
    """What a log shows."""

    path: Path
    format: str
    unit: str
    """What the numbers of rows count: lines, or elements of one JSON text."""
    num_bad_rows: int
    first_bad_rows: tuple[BadRow, ...]
    num_other: int
    """Parts of the file that are no requests."""
    whole: Group
    classes: Mapping[str, Group]
    """By the log's own names, in order of first appearance; empty where it has none, or too many."""
    arrivals: Arrivals | None
    """Of requests; None where the log has no times, or only one."""
    session_arrivals: Arrivals | None
    """Of first requests of conversations, and of requests outside of any."""
    sessions: Sessions | None
    blocks: Inferred[Blocks] | None
    system_prompts: Inferred[SystemPrompts] | None


def fit_log(reader: RowReader) -> LogFit:
    """Go through a log once, in constant memory.

    Raises:
        InputError: it cannot be read, or no row of it can be used.
    """
    whole = _GroupRecorder()
    classes: dict[str, _GroupRecorder] = {}
    arrivals, session_arrivals = ArrivalRecorder(), ArrivalRecorder()
    sessions, sharing = SessionRecorder(SEED), SharingRecorder()
    num_bad, has_too_many_classes = 0, False
    first_bad: list[BadRow] = []
    for row in reader:
        if isinstance(row, BadRow):
            num_bad += 1
            if len(first_bad) < NUM_BAD_ROWS_KEPT:
                first_bad.append(row)
            continue
        whole.add(row)
        sessions.add(row)
        sharing.add(row)
        if row.time_s is not None:
            arrivals.add(row.time_s)
            if row.turn == 0:
                session_arrivals.add(row.time_s)
        if row.class_name is not None and not has_too_many_classes:
            if row.class_name in classes or len(classes) < MAX_CLASSES:
                classes.setdefault(row.class_name, _GroupRecorder()).add(row)
            else:
                has_too_many_classes = True
                classes.clear()
    if not whole.num_rows:
        raise _nothing_usable(reader, num_bad, first_bad)
    return LogFit(
        path=reader.path,
        format=reader.format,
        unit=reader.unit,
        num_bad_rows=num_bad,
        first_bad_rows=tuple(first_bad),
        num_other=reader.num_other,
        whole=whole.result(),
        classes={name: recorder.result() for name, recorder in classes.items()},
        arrivals=arrivals.result(),
        session_arrivals=session_arrivals.result(),
        sessions=sessions.result(),
        blocks=sharing.blocks(),
        system_prompts=sharing.system_prompts(),
    )


class _GroupRecorder:
    """Counts and samples the rows of one group."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._num_with_text = 0
        self._num_completions = 0
        self._input_tokens = Reservoir(SEED)
        self._output_tokens = Reservoir(SEED)
        self._prompt_chars = Reservoir(SEED)
        self._max_tokens = ValueCounter()
        self._sampling: dict[str, ValueCounter] = {}

    def add(self, row: Row) -> None:
        self.num_rows += 1
        self._num_completions += row.is_completion
        if row.has_text:
            self._num_with_text += 1
            self._prompt_chars.add(_num_chars(row))
        if row.num_input_tokens:
            self._input_tokens.add(row.num_input_tokens)
        if row.num_output_tokens:
            self._output_tokens.add(row.num_output_tokens)
        if row.max_tokens:
            self._max_tokens.add(row.max_tokens)
        for name, value in row.sampling.items():
            self._sampling.setdefault(name, ValueCounter()).add(value)

    def result(self) -> Group:
        sampling = {name: counter.most_common() for name, counter in self._sampling.items()}
        return Group(
            num_rows=self.num_rows,
            num_with_text=self._num_with_text,
            num_completions=self._num_completions,
            input_tokens=self._input_tokens.quantiles(),
            output_tokens=self._output_tokens.quantiles(),
            prompt_chars=self._prompt_chars.quantiles(),
            max_tokens=self._max_tokens.most_common(),
            sampling={name: found for name, found in sampling.items() if found is not None},
        )


def _num_chars(row: Row) -> int:
    if row.messages is not None:
        return sum(len(content) for _, content in row.messages)
    return len(row.system or "") + len(row.turns[0])


def _nothing_usable(reader: RowReader, num_bad: int, first_bad: list[BadRow]) -> InputError:
    if not num_bad:
        other = f", only {reader.num_other:,} other records" if reader.num_other else ""
        return invalid(f"the log holds no request{other}", where=reader.path)
    lines = [f"{reader.unit} {bad.number}: {bad.reason}" for bad in first_bad]
    return invalid(
        f"no row of the log can be used; of {num_bad:,} broken ones the first: {'; '.join(lines)}",
        where=reader.path,
        next_step=f"It was read as {reader.format}; --format names another one.",
    )
