"""Recorded times and lengths, cut to the window that is replayed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.errors import InputError, invalid
from autotune.paths import user_path
from autotune.traffic.fields import MAX_REQUESTS
from autotune.traffic.formats import RowReader, read_rows
from autotune.traffic.loads import TraceLoad
from autotune.traffic.rows import BadRow, Row


@dataclass(frozen=True)
class TimedRow:
    """A row and when it is sent."""

    row: Row
    arrival_s: float
    """Since the window's start, scaled and jittered."""
    time_scale: float

    @property
    def answer_s(self) -> float:
        """How long the recorded answer took, scaled; 0 where the trace does not say."""
        return (self.row.duration_s or 0.0) * self.time_scale


@dataclass(frozen=True)
class Trace:
    """The rows that are sent."""

    path: Path
    rows: tuple[TimedRow, ...]
    """In order of time; those of one conversation in the order of its turns as well."""
    notes: tuple[str, ...]

    @property
    def has_text(self) -> bool:
        return all(timed.row.has_text for timed in self.rows)

    @property
    def duration_s(self) -> float:
        return self.rows[-1].arrival_s


def load_trace(load: TraceLoad, folder: Path, seed: int) -> Trace:
    """Read the window of a trace.

    Args:
        load: which file and window.
        folder: where a relative path starts.
        seed: decides the jitter.

    Raises:
        InputError: the file cannot be read, has no times, or has nothing in the window.
    """
    path = folder / user_path(load.file, "load.file")
    reader = read_rows(path, load.format, load.columns, "trace")
    found = _read_window(reader, load, path)
    rng = random.Random(f"{seed} jitter")
    moved = [
        replace(
            timed,
            arrival_s=(timed.arrival_s + rng.uniform(0, load.jitter_s)) * load.time_scale,
        )
        for timed in found.rows
    ]
    notes = [f"{path}: {len(moved)} requests are replayed", *found.notes(path, reader.unit)]
    return Trace(path, tuple(_in_order(moved)), tuple(notes))


def places_of_conversations(rows: Sequence[TimedRow]) -> list[list[int]]:
    """Return the places of each conversation's rows, of those that have several."""
    places: dict[str, list[int]] = {}
    for place, timed in enumerate(rows):
        if timed.row.conversation is not None:
            places.setdefault(timed.row.conversation, []).append(place)
    return [found for found in places.values() if len(found) > 1]


@dataclass
class _Window:
    """What was found in the window, in file order, and a tally of what is not replayed."""

    rows: list[TimedRow] = field(default_factory=list)
    num_bad: int = 0
    first_bad: BadRow | None = None
    num_timeless: int = 0
    num_timed: int = 0
    """In the window or not."""

    def notes(self, path: Path, unit: str) -> Iterator[str]:
        if self.num_bad or self.num_timeless:
            note = (
                f"{path}: {self.num_bad} broken rows and {self.num_timeless} without a time "
                "were skipped"
            )
            if self.first_bad is not None:
                note += f"; the first: {unit} {self.first_bad.number}: {self.first_bad.reason}"
            yield note

    def nothing_to_replay(self, path: Path, load: TraceLoad) -> InputError:
        if not self.num_timed and self.num_timeless:
            return invalid(
                "a trace must say when each request was sent, but no row does",
                where=path,
                next_step="Use the file as `prompts`, with another kind of load.",
            )
        if not self.num_timed and self.first_bad is not None:
            return invalid(
                f"the trace must hold at least one usable request, but {self.first_bad.reason}",
                where=f"{path}:{self.first_bad.number}",
            )
        return invalid(
            "no request of the trace lies in the window",
            where=path,
            key_path="load.window",
            got=load.window.model_dump() if load.window is not None else None,
        )


def _read_window(reader: RowReader, load: TraceLoad, path: Path) -> _Window:
    origin_s = _first_time_s(reader)
    start_s, end_s = origin_s, float("inf")
    if load.window is not None:
        start_s = origin_s + load.window.start_s
        end_s = start_s + load.window.duration_s
    found = _Window()
    for row in reader:
        if isinstance(row, BadRow):
            found.num_bad += 1
            found.first_bad = found.first_bad or row
        elif row.time_s is None:
            found.num_timeless += 1
        else:
            found.num_timed += 1
            if start_s <= row.time_s < end_s:
                found.rows.append(TimedRow(row, row.time_s - start_s, load.time_scale))
        if len(found.rows) > MAX_REQUESTS:
            raise invalid(
                f"the replayed part of a trace must have at most {MAX_REQUESTS:,} requests",
                where=path,
                key_path="load.window",
                next_step="Give a window, such as {start_s: 0, duration_s: 300}.",
            )
    if not found.rows:
        raise found.nothing_to_replay(path, load)
    return found


def _first_time_s(reader: RowReader) -> float:
    """Return when a trace begins: logs are often written when requests end, so out of order."""
    times = (row.time_s for row in reader if isinstance(row, Row) and row.time_s is not None)
    return min(times, default=0.0)


def _in_order(rows: Iterable[TimedRow]) -> list[TimedRow]:
    """Sort by time; of a conversation the turns keep their order and share out its times."""
    ordered = sorted(rows, key=lambda timed: (timed.arrival_s, timed.row.number))
    for places in places_of_conversations(ordered):
        times = [ordered[place].arrival_s for place in places]
        turns = sorted(
            (ordered[place] for place in places),
            key=lambda timed: (timed.row.turn, timed.row.number),
        )
        for place, time_s, timed in zip(places, times, turns, strict=True):
            ordered[place] = replace(timed, arrival_s=time_s)
    return ordered
