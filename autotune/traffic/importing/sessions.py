"""Conversations: how many turns they have, and how long users think between them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from autotune.traffic.importing.inferred import Inferred, Quantiles, Reservoir
from autotune.traffic.rows import Row

MAX_CONVERSATIONS_KEPT = 50_000
"""Of more, a share is kept that is chosen by the hash of the id, so that it has no bias."""

_MS = 1000


@dataclass(frozen=True)
class Sessions:
    """What a log says of its conversations, of those with one turn as well."""

    turns: Inferred[Quantiles]
    """Turns of a conversation; `num_rows` counts conversations."""
    recorded_ratio: float
    """Share of the conversations of several turns that hold what the model said in between."""
    think_ms: Inferred[Quantiles] | None
    """Time between an answer, or failing that a request, and the next request of the conversation."""
    is_think_after_request: bool
    """Whether the log does not say how long answers took, so that they are part of the time."""
    is_by_rows: bool
    """Whether each turn is a row of its own."""


class SessionRecorder:
    """Takes rows in one pass and constant memory.

    A conversation is several rows with one id, or one row with several turns.
    """

    def __init__(self, seed: int) -> None:
        self._kept: dict[
            str, tuple[int, float | None]
        ] = {}  # by id: turns, when the last one ended
        self._depth = 0
        self._seed = seed
        self._script_turns = Reservoir(seed)
        self._num_scripts_of_several = 0
        self._num_recorded = 0
        self._think_ms = Reservoir(seed)
        self._is_think_after_request = False

    def add(self, row: Row) -> None:
        if row.turns:
            self._add_script(row)
        elif row.conversation is not None:
            self._add_turn(row.conversation, row)

    def result(self) -> Sessions | None:
        """Return what was found, None if no conversation has a second turn."""
        is_by_rows = bool(self._kept)
        turns = self._script_turns
        if is_by_rows:
            turns = Reservoir(self._seed)
            for count, _ in self._kept.values():
                turns.add(count)
        found = turns.quantiles()
        if found is None or found.value.max < 2:
            return None
        several = self._num_scripts_of_several
        return Sessions(
            turns=found,
            recorded_ratio=1.0 if is_by_rows else self._num_recorded / several,
            think_ms=self._think_ms.quantiles(),
            is_think_after_request=self._is_think_after_request,
            is_by_rows=is_by_rows,
        )

    def _add_script(self, row: Row) -> None:
        self._script_turns.add(len(row.turns))
        if len(row.turns) > 1:
            self._num_scripts_of_several += 1
            between = row.answers[: len(row.turns) - 1]
            self._num_recorded += len(between) > 0 and None not in between
        for think_s in row.think_s[1:]:
            if think_s is not None:
                self._think_ms.add(round(think_s * _MS))

    def _add_turn(self, conversation: str, row: Row) -> None:
        if not self._is_kept(conversation):
            return
        count, ended_s = self._kept.get(conversation, (0, None))
        if ended_s is not None and row.time_s is not None and row.time_s >= ended_s:
            self._think_ms.add(round((row.time_s - ended_s) * _MS))
        if row.time_s is not None:
            ended_s = row.time_s + (row.duration_s or 0.0)
            self._is_think_after_request |= row.duration_s is None
        self._kept[conversation] = (count + 1, ended_s)
        while len(self._kept) > MAX_CONVERSATIONS_KEPT:
            self._depth += 1
            self._kept = {kept: v for kept, v in self._kept.items() if self._is_kept(kept)}

    def _is_kept(self, conversation: str) -> bool:
        return not zlib.crc32(conversation.encode()) & ((1 << self._depth) - 1)
