"""From a recorded trace to requests: at its times, of its lengths, with its own text or a class's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import invalid
from autotune.traffic.classes import TrafficClass
from autotune.traffic.content import Blocks, Content
from autotune.traffic.fields import MAX_TOKENS
from autotune.traffic.lengths import LengthSequence
from autotune.traffic.mixture import class_sequence
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.prompts import (
    Turn,
    conversation_of,
    own_messages,
    prompt_of,
    request_of,
    why_unusable,
)
from autotune.traffic.requests import make_request
from autotune.traffic.rows import Row, plain_class_name
from autotune.traffic.schedule import ScheduledRequest
from autotune.traffic.trace import TimedRow, Trace, places_of_conversations


@dataclass(frozen=True)
class _Unit:
    """A lone row of a trace, or the rows of one conversation."""

    number: int
    places: tuple[int, ...]
    c: TrafficClass
    index: int
    """Among the units of its class."""


class Replay:
    """Makes the requests of a trace.

    A row whose class has a class's name in the profile is of that class; the others are spread over
    the classes by weight. All rows of a conversation are of one class.
    """

    def __init__(
        self,
        profile: TrafficProfile,
        content: Content,
        trace: Trace,
        seed: int,
        rng: random.Random,
    ) -> None:
        """Take what is replayed.

        Raises:
            InputError: the trace takes longer than a measurement may.
        """
        limit_s = profile.measure.max_duration_s
        if trace.duration_s > limit_s:
            raise invalid(
                f"the replayed part of the trace takes {trace.duration_s:.0f} s, but "
                f"measure.max_duration_s is {limit_s:g}",
                where=profile.where,
                key_path="load.window",
                next_step="Give a shorter window, or raise max_duration_s.",
            )
        self._profile = profile
        self._content = content
        self._trace = trace
        self._seed = seed
        self._rng = rng
        units = _units(trace.rows, profile.classes, rng)
        self._unit_at = {place: unit for unit in units for place in unit.places}

    def warmup(self, count: int) -> list[ScheduledRequest]:
        """Make requests such as those of the trace, of rows spread over it, that share no prompt."""
        rows, lengths = self._trace.rows, self._length_sequences("warm-up")
        made: list[ScheduledRequest] = []
        for number in range(count):
            place = number * max(1, len(rows) // count) % len(rows)
            c, row, key = self._unit_at[place].c, rows[place].row, f"warm-up {number}"
            if self._content.has_pool(c):
                asked = self._content.conversation(c, number, for_warmup=True).turns[0]
                is_whole = self._trace.has_text
                turn = asked if is_whole else self._fitted(c, asked, row, key, lengths[c.name])
            else:
                turn = _marked(request_of(row), key)
            made.append(self._request(c, turn, number, number))
        return made

    def requests(self) -> list[ScheduledRequest]:
        """Make one request of every row, and of a script as many as its class's turns allow."""
        lengths = self._length_sequences("measured")
        num_asked = dict.fromkeys(lengths, 0)
        last: dict[int, TimedRow] = {}
        num_turns: Counter[int] = Counter()
        made: list[ScheduledRequest] = []
        for place, timed in enumerate(self._trace.rows):
            unit = self._unit_at[place]
            name = unit.c.name
            if timed.row.has_text:
                turns = self._with_text(unit.c, timed, is_later=unit.number in last)
            else:
                asked = self._content.conversation(unit.c, num_asked[name]).turns[0]
                num_asked[name] += 1
                # One key for a conversation: its prompts begin alike, as if with a history.
                key = f"{unit.number}"
                turns = [self._fitted(unit.c, asked, timed.row, key, lengths[name])]
            turns[0] = replace(turns[0], gap_s=_wait_s(timed, last.get(unit.number)))
            is_alone = len(unit.places) == len(turns) == 1
            for turn in turns:
                request = self._request(unit.c, turn, unit.index, len(made))
                if num_turns[unit.number] == 0:
                    request = replace(request, arrival_s=timed.arrival_s)
                else:
                    request = replace(request, think_s=turn.gap_s)
                if not is_alone:
                    request = replace(
                        request, conversation_id=unit.number, turn=num_turns[unit.number]
                    )
                made.append(request)
                num_turns[unit.number] += 1
            last[unit.number] = timed
        return made

    def _with_text(self, c: TrafficClass, timed: TimedRow, *, is_later: bool) -> list[Turn]:
        """Return what a row says itself: one request, or a script's turns."""
        row = timed.row
        if (reason := why_unusable(row, c.turns)) is not None:
            raise invalid(reason, where=f"{self._trace.path}:{row.number}")
        if row.turns and c.turns is not None:
            first, *others = conversation_of([row], c.turns).turns
            return [first, *(replace(t, gap_s=t.gap_s * timed.time_scale) for t in others)]
        turn = request_of(row)
        if is_later and c.turns is not None and c.turns.replay == "live":
            own = prompt_of(own_messages(turn.prompt.messages))
            turn = replace(turn, prompt=own, is_live=True)
        return [turn]

    def _fitted(
        self, c: TrafficClass, asked: Turn, row: Row, key: str, lengths: LengthSequence
    ) -> Turn:
        """Fit a prompt to the lengths of a row; where it has none, to those of its class."""
        drawn_input, drawn_output = lengths.next()
        num_input, prompt = row.num_input_tokens or drawn_input, asked.prompt
        if num_input is not None and row.prefix_ids:
            blocks = Blocks(row.prefix_ids, row.prefix_block_tokens)
            prompt = self._content.of_blocks(c, prompt, min(num_input, MAX_TOKENS), blocks, key)
        elif num_input is not None:
            prompt = self._content.fitted(c, prompt, min(num_input, MAX_TOKENS), key)
        return Turn(prompt, max_tokens=row.num_output_tokens or drawn_output)

    def _request(
        self, c: TrafficClass, turn: Turn, number: int, request_id: int
    ) -> ScheduledRequest:
        prompt = turn.prompt if turn.is_live else self._content.prefixed(c, turn.prompt, number)
        max_tokens = turn.max_tokens or c.output.limit(None)
        return make_request(c, replace(turn, prompt=prompt), request_id, max_tokens, self._rng)

    def _length_sequences(self, purpose: str) -> dict[str, LengthSequence]:
        return {
            c.name: LengthSequence(
                c, self._profile.folder, random.Random(f"{self._seed} lengths {c.name} {purpose}")
            )
            for c in self._profile.classes
        }


def _wait_s(timed: TimedRow, before: TimedRow | None) -> float:
    """Return how long a later row of a conversation waited after the answer before it."""
    if before is None:
        return 0.0
    return max(0.0, timed.arrival_s - before.arrival_s - before.answer_s)


def _named(row: Row, by_name: Mapping[str, TrafficClass]) -> TrafficClass | None:
    """Return the class that the trace itself names, as a drafted profile calls it."""
    return by_name.get(plain_class_name(row.class_name)) if row.class_name else None


def _units(
    rows: Sequence[TimedRow], classes: Sequence[TrafficClass], rng: random.Random
) -> list[_Unit]:
    several = places_of_conversations(rows)
    tied = {place for places in several for place in places}
    groups = sorted([*several, *([place] for place in range(len(rows)) if place not in tied)])
    by_name = {c.name: c for c in classes}
    named = [
        by_name.get(plain_class_name(rows[places[0]].row.class_name or "")) for places in groups
    ]
    drawn = iter(class_sequence(classes, named.count(None), rng))
    next_index = dict.fromkeys(by_name, 0)
    units = []
    for number, (places, c) in enumerate(zip(groups, named, strict=True)):
        c = c or next(drawn)
        units.append(_Unit(number, tuple(places), c, next_index[c.name]))
        next_index[c.name] += 1
    return units


def _marked(turn: Turn, key: str) -> Turn:
    """Let a prompt begin differently, so that the same one is not answered from the prefix cache."""
    (role, content), *rest = turn.prompt.messages
    return replace(turn, prompt=prompt_of([(role, f"({key})\n\n{content}"), *rest]))
