"""Prompts and conversations out of files, whatever format they are in."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import InputError, invalid
from autotune.paths import user_path
from autotune.traffic.builtin import builtin_path
from autotune.traffic.classes import PromptSource, Turns
from autotune.traffic.formats import read_rows
from autotune.traffic.rows import BadRow, Message, Row

WRITTEN_BY_HAND = frozenset({"jsonl", "text"})
"""Formats in which a row that cannot be read is a mistake to be mended, not a scar of a log."""

ASKING_ROLES = frozenset({"user", "tool"})
"""Whose messages the model answers."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, as chat messages."""

    prompt_id: str
    """Names what is asked: prompts of one id differ at most in the context put before it."""
    messages: tuple[Message, ...]
    """(role, content) pairs, the last one by the user or a tool."""

    @property
    def text(self) -> str:
        """The prompt without roles, for the completions endpoint."""
        return "\n\n".join(content for _, content in self.messages)

    @property
    def num_chars(self) -> int:
        return sum(len(content) for _, content in self.messages)

    def as_chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    prompt: Prompt
    is_live: bool = False
    """The prompt holds this turn's own messages only; the history comes from the server."""
    gap_s: float = 0.0
    """Recorded wait after the previous turn's answer."""
    max_tokens: int | None = None
    """How long the answer may be, as far as the file knows."""


@dataclass(frozen=True)
class Conversation:
    """A prompt, or several that follow each other; at least one turn."""

    turns: tuple[Turn, ...]

    @property
    def content_id(self) -> str:
        """Names how it begins, which is what a prefix cache knows it by."""
        return self.turns[0].prompt.prompt_id


@dataclass(frozen=True)
class PromptFile:
    """What was read of one source."""

    conversations: tuple[Conversation, ...]
    """Each begins differently; in file order."""
    notes: tuple[str, ...] = ()
    """What the user should know: rows that were skipped, a sample that was taken."""


def load_conversations(
    source: PromptSource, folder: Path, turns: Turns | None = None
) -> PromptFile:
    """Read the distinct prompts of one source.

    Files of any size are read in constant memory: of more than `source.sample` conversations the
    same sample is kept every time.

    Args:
        source: a file or a built-in set.
        folder: where a relative file path starts.
        turns: how conversations are sent; None: each row is one request, of a script the first turn.

    Raises:
        InputError: the file is missing, empty, or has no usable row, or a row that was written by
            hand cannot be read.
    """
    path = _path_of(source, folder)
    usable = _UsableRows(path, source, turns)
    groups, num_left_out = _sampled(usable, source.sample, turns)
    conversations: dict[str, Conversation] = {}
    for rows in groups:
        conversation = conversation_of(rows, turns)
        conversations.setdefault(conversation.content_id, conversation)
    if not conversations:
        raise usable.nothing_usable()
    return PromptFile(tuple(conversations.values()), tuple(usable.notes(num_left_out)))


class _UsableRows:
    """The rows of a source that can be sent, and a tally of the others."""

    def __init__(self, path: Path, source: PromptSource, turns: Turns | None) -> None:
        self._path, self._source, self._turns = path, source, turns
        self._reader = read_rows(path, source.format, source.columns, "prompt file")
        self._num_good = self._num_bad = self._num_of_other_categories = 0
        self._first_bad: BadRow | None = None

    def __iter__(self) -> Iterator[Row]:
        category = self._source.category
        for row in self._reader:
            if isinstance(row, BadRow):
                self._count_bad(row)
            elif category is not None and row.class_name != category:
                self._num_of_other_categories += 1
            elif (reason := self._why_unusable(row)) is not None:
                self._count_bad(BadRow(row.number, reason))
            else:
                self._num_good += 1
                yield row

    def _why_unusable(self, row: Row) -> str | None:
        return why_unusable(row, self._turns) if row.has_text else "the row has no prompt"

    def _count_bad(self, row: BadRow) -> None:
        if self._reader.format in WRITTEN_BY_HAND:
            raise invalid(row.reason, where=f"{self._path}:{row.number}")
        self._num_bad += 1
        self._first_bad = self._first_bad or row

    def notes(self, num_left_out: int) -> Iterator[str]:
        if self._first_bad is not None:
            yield (
                f"{self._path}: {self._num_bad} of {self._num_bad + self._num_good} rows were "
                f"skipped; the first: {self._reader.unit} {self._first_bad.number}: {self._first_bad.reason}"
            )
        if num_left_out:
            yield (
                f"{self._path}: {self._num_good - num_left_out} of {self._num_good} rows are used "
                "as prompts (prompts.sample)"
            )

    def nothing_usable(self) -> InputError:
        if self._num_of_other_categories:
            return invalid(
                "no row of the prompt file is of this category",
                where=self._path,
                key_path="prompts.category",
                got=self._source.category,
            )
        if self._first_bad is not None:
            return invalid(
                f"the prompt file must hold at least one usable prompt, but {self._first_bad.reason}",
                where=f"{self._path}:{self._first_bad.number}",
            )
        return invalid(
            "the prompt file must hold at least one prompt, but no record of it is a request",
            where=self._path,
            next_step='Write one JSON object a line, such as {"prompt": "..."}.',
        )


def load_prompts(source: PromptSource, folder: Path) -> list[Prompt]:
    """Read the distinct prompts of one source, one request each, in file order."""
    return [c.turns[0].prompt for c in load_conversations(source, folder).conversations]


def prompt_of(messages: Iterable[Message]) -> Prompt:
    """Make a prompt and name it after its content."""
    kept = tuple(messages)
    content = json.dumps(kept, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return Prompt(hashlib.sha256(content).hexdigest()[:16], kept)


def request_of(row: Row) -> Turn:
    """Turn a row with text into one request: all its history, of a script the first turn."""
    if row.messages is not None:
        messages = row.messages
    else:
        head, parts = _script_of(row)
        messages = (*head, *parts[0].messages)
    return Turn(prompt_of(messages), max_tokens=row.max_tokens or row.num_output_tokens)


def conversation_of(rows: Sequence[Row], turns: Turns | None) -> Conversation:
    """Turn the rows of one conversation, which all have text, into its requests.

    Args:
        rows: one row that holds all of it, or a row for each request.
        turns: how it is sent; None: its first request alone.
    """
    if turns is None:
        return Conversation((request_of(rows[0]),))
    # A log with conversations has one row for each request; where only one is left, that is all.
    is_log = rows[0].messages is not None and rows[0].conversation is not None
    if is_log or len(rows) > 1:
        return Conversation(tuple(_logged_turns(rows, turns)))
    return Conversation(tuple(_script_turns(rows[0], turns)))


def why_unusable(row: Row, turns: Turns | None) -> str | None:
    """Say why a row with text cannot be sent as `turns` ask, if so."""
    if turns is None:
        return None
    _, parts = _script_of(row)
    # Of a log each row is one request, of which only the last part can be live.
    later = parts[1:][-1:] if row.conversation is not None else parts[1 : turns.max]
    before = parts[: min(len(parts), turns.max) - 1]
    if turns.replay == "recorded" and any(part.answer is None for part in before):
        return "`replay: recorded` needs an answer between two turns; use `replay: live`"
    if turns.replay == "live" and any(part.has_tool_result for part in later):
        return "a tool's result follows a recorded answer only; use `replay: recorded`"
    return None


def own_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return what a request adds to its conversation: what stands after the last answer."""
    answers = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
    return tuple(messages[max(answers, default=-1) + 1 :])


def _path_of(source: PromptSource, folder: Path) -> Path:
    if source.builtin is not None:
        return builtin_path(source.builtin)
    assert source.file is not None  # random words have no file and never come here
    return folder / user_path(source.file, "prompts.file")


def _sampled(rows: Iterable[Row], most: int, turns: Turns | None) -> tuple[list[list[Row]], int]:
    """Group rows by conversation and keep the groups with the smallest hashes, in file order.

    A hash instead of a draw: all rows of a conversation share their fate, the choice is the same
    every time, and nothing but what is kept has to be remembered.

    Returns:
        The groups, and how many rows the sample left out.
    """
    kept: dict[str, list[Row]] = {}
    largest: list[tuple[int, str]] = []
    num_left_out = 0
    for row in rows:
        is_grouped = turns is not None and row.conversation is not None
        key = f"c{row.conversation}" if is_grouped else f"r{row.number}"
        if key in kept:
            kept[key].append(row)
            if turns is not None and len(kept[key]) > 2 * turns.max:
                kept[key] = _in_order(kept[key])[: turns.max]
            continue
        rank = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8])
        if len(kept) < most:
            heapq.heappush(largest, (-rank, key))
        elif rank < -largest[0][0]:
            num_left_out += len(kept.pop(heapq.heapreplace(largest, (-rank, key))[1]))
        else:
            num_left_out += 1
            continue
        kept[key] = [row]
    groups = sorted(kept.values(), key=lambda group: min(row.number for row in group))
    return groups, num_left_out


def _in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.turn, row.time_s or 0.0, row.number))


def _logged_turns(rows: Sequence[Row], turns: Turns) -> Iterable[Turn]:
    """Turns that a log holds as one request each, every one with its history."""
    before: Row | None = None
    for row in _in_order(rows)[: turns.max]:
        request = request_of(row)
        is_live = turns.replay == "live" and before is not None
        prompt = prompt_of(own_messages(request.prompt.messages)) if is_live else request.prompt
        yield Turn(prompt, is_live, _wait_s(row, before), request.max_tokens)
        before = row


def _wait_s(row: Row, before: Row | None) -> float:
    """Return the recorded wait between an answer and the next request.

    Where the log does not say how long the answer took, the wait counts from the request before.
    """
    if before is None or row.time_s is None or before.time_s is None:
        return 0.0
    return max(0.0, row.time_s - before.time_s - (before.duration_s or 0.0))


def _script_turns(row: Row, turns: Turns) -> Iterable[Turn]:
    """Turns that one row holds together."""
    history, parts = _script_of(row)
    for number, part in enumerate(parts[: turns.max]):
        is_live = turns.replay == "live" and number > 0
        # A live turn brings its own words; what stands before it is known when it is sent.
        messages = part.messages if is_live else (*history, *part.messages)
        yield Turn(prompt_of(messages), is_live, part.wait_s, row.max_tokens)
        history = (*history, *part.messages, ("assistant", part.answer or ""))


@dataclass(frozen=True)
class _Part:
    """What is said to the model at once, and what it answered."""

    messages: tuple[Message, ...]
    answer: str | None
    wait_s: float = 0.0

    @property
    def has_tool_result(self) -> bool:
        return any(role == "tool" for role, _ in self.messages)


def _script_of(row: Row) -> tuple[tuple[Message, ...], list[_Part]]:
    """Take a row's conversation apart: what stands before it, and its turns."""
    head: tuple[Message, ...] = (("system", row.system),) if row.system else ()
    if row.messages is None:
        answers = row.answers or (None,) * len(row.turns)
        waits = row.think_s or (None,) * len(row.turns)
        return head, [
            _Part((("user", said),), answer, wait_s or 0.0)
            for said, answer, wait_s in zip(row.turns, answers, waits, strict=True)
        ]
    parts: list[_Part] = []
    said: list[Message] = []
    for role, content in row.messages:
        is_answer = role == "assistant"
        if is_answer and any(role in ASKING_ROLES for role, _ in said):
            parts.append(_Part(tuple(said), content))
            said = []
        elif is_answer and parts:  # the model said two things in a row
            parts[-1] = replace(parts[-1], answer=f"{parts[-1].answer}\n{content}")
        else:
            said.append((role, content))
    return head, [*parts, _Part(tuple(said), None)] if said else parts
