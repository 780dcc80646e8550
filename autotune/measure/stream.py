"""What a streamed answer says: server-sent events out of bytes, and tokens and text out of events.

It stands apart from the load generator so that it can be tested on bytes alone, cut anywhere, with
no server and no clock.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from autotune.measure.server_errors import told

ErrorKind = Literal[
    "timeout",
    "http_429",
    "http_503",
    "http_4xx",
    "http_5xx",
    "stream_error",
    "reset",
    "truncated",
    "protocol",
    "empty",
    "refused",
    "previous_turn",
]

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Size of one event above which the answer is given up: no chunk of a chat is that large, and the
client must not fill its memory with what a broken server sends."""

_ABORTED = frozenset({"abort", "error"})
"""What vLLM gives as finish_reason when it gave an answer up instead of finishing it."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""Names that vLLM has given to a reasoning model's thoughts."""


class AnswerError(Exception):
    """An answer cannot be used; `kind` sorts the reason."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class EventSplitter:
    """Cuts a stream of bytes into server-sent events, in time linear in the bytes.

    Events end with an empty line; lines end with LF, CRLF or CR. A read may hold several events or
    a part of one.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._held_cr = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what one read brought and return the events that are now complete.

        Raises:
            AnswerError: one event is larger than `MAX_EVENT_BYTES`.
        """
        if self._held_cr or b"\r" in data:
            data = self._with_lf(data)
        if self._pieces:
            # The empty line may be cut in two, so a last newline is looked at again.
            if self._pieces[-1].endswith(b"\n"):
                self._pieces[-1] = self._pieces[-1][:-1]
                self._num_bytes -= 1
                data = b"\n" + data
            head, end, data = data.partition(b"\n\n")
            self._keep(head)
            if not end:
                return []
            return [self.rest(), *self._split(data)]
        return self._split(data)

    def rest(self) -> bytes:
        """Return what came after the last complete event, and forget it."""
        event = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return event

    def _split(self, data: bytes) -> list[bytes]:
        *events, begun = data.split(b"\n\n")
        if begun:
            self._keep(begun)
        return events

    def _keep(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise AnswerError("protocol", f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        self._pieces.append(piece)

    def _with_lf(self, data: bytes) -> bytes:
        """Make every line end with LF; a CR at the very end waits, since its LF may follow."""
        data = self._held_cr + data
        self._held_cr = b"\r" if data.endswith(b"\r") else b""
        whole = data[: len(data) - len(self._held_cr)]
        return whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class Answer:
    """What one streamed answer brought so far.

    Tokens are what the server counted, never chunks. With `continuous_usage_stats` every chunk
    tells the count so far; servers that tell it only at the end leave those between open, see
    `chunk_tokens`.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        """Arrival of each chunk that brought tokens."""
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        """Completion tokens by the server's count, its highest: a count that goes back is no news."""
        self.finish_reason: str | None = None
        self.content: list[str] = []
        self.thoughts: list[str] = []
        self.num_reads = 0
        """Reads that brought tokens."""
        self._counts: list[int | None] = []
        self._splitter = EventSplitter()
        self._has_events = False
        self._is_done = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take what one read brought.

        Args:
            data: bytes of the stream, cut anywhere.
            now_s: when they arrived.

        Raises:
            AnswerError: the server says that it failed, or says what no OpenAI server says.
        """
        num_before = len(self.times_s)
        for event in self._splitter.feed(data):
            self._take(event, now_s)
        if len(self.times_s) > num_before:
            self.num_reads += 1

    def end(self, now_s: float) -> None:
        """Take the end of the stream.

        Raises:
            AnswerError: the answer is not a whole one.
        """
        if rest := self._splitter.rest():
            self._take_rest(rest, now_s)
        if not self._is_done and self.finish_reason is None:
            raise AnswerError("truncated", "the stream ended in the middle of an answer")
        if self.times_s and not self.num_tokens:
            raise AnswerError("protocol", "the server did not say how many tokens it sent")
        if not self.times_s:
            raise AnswerError("empty", "empty output")

    @property
    def chunk_tokens(self) -> list[int]:
        """Tokens up to and including each chunk.

        Where the server did not count in a chunk, its count lies between those of its neighbours:
        the first chunk has 1 token (a prompt's own step yields one), the last one has all, and those
        between are spread evenly. TTFT, TPOT and E2EL need the first and the last only, so the
        spread does not enter them.
        """
        counts = list(self._counts)
        if None not in counts:
            return [count for count in counts if count is not None]
        if counts[-1] is None:
            counts[-1] = self.num_tokens
        if counts[0] is None:
            counts[0] = min(1, self.num_tokens)
        known = [index for index, count in enumerate(counts) if count is not None]
        filled = [counts[0] or 0]
        for left, right in zip(known, known[1:], strict=False):
            first, last = counts[left] or 0, counts[right] or 0
            gap = right - left
            filled += [first + (last - first) * step // gap for step in range(1, gap + 1)]
        return filled

    def _take_rest(self, rest: bytes, now_s: float) -> None:
        """Take what stands after the last empty line: a last event without one, or half of one."""
        if not self._has_events and not rest.startswith((b"data:", b"event:", b"id:", b":")):
            raise AnswerError("protocol", "the answer is no stream of events")
        try:
            self._take(rest, now_s)
        except AnswerError as err:
            if err.kind == "protocol":
                raise AnswerError("truncated", "the stream ended inside an event") from err
            raise

    def _take(self, event: bytes, now_s: float) -> None:
        data = _data_of(event)
        if not data:
            return  # a keep-alive comment
        self._has_events = True
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = orjson.loads(data)
        except ValueError as err:
            raise AnswerError("protocol", f"an event of {len(data)} bytes is not JSON") from err
        if type(chunk) is not dict:
            raise AnswerError("protocol", "an event is JSON, but no object")
        error = chunk.get("error")
        if error is not None or chunk.get("object") == "error":
            raise AnswerError("stream_error", f"error in the stream: {_message(error or chunk)}")
        choices = chunk.get("choices")
        if choices is not None and type(choices) is not list:
            raise _wrong("choices", choices)
        has_text = False
        for choice in choices or ():
            has_text = self._take_choice(choice) or has_text
        self._count(self._usage(chunk), bool(choices), has_text, now_s)

    def _take_choice(self, choice: Any) -> bool:
        """Keep a choice's text and its end; return whether it brought any."""
        if type(choice) is not dict:
            raise _wrong("choices", choice)
        reason = choice.get("finish_reason")
        if reason is not None:
            if type(reason) is not str:
                raise _wrong("finish_reason", reason)
            if reason in _ABORTED:
                raise AnswerError("stream_error", f"the server gave the answer up: {reason}")
            self.finish_reason = reason
        delta = choice.get("delta", choice)
        if type(delta) is not dict:
            if delta is None:
                return False
            raise _wrong("delta", delta)
        text = delta.get("content") or delta.get("text")
        if text:
            if type(text) is not str:
                raise _wrong("content", text)
            self.content.append(text)
            return True
        for name in _THOUGHTS:
            thought = delta.get(name)
            if type(thought) is str and thought:
                self.thoughts.append(thought)
                return True
        return bool(delta.get("tool_calls"))

    def _usage(self, chunk: dict[str, Any]) -> int | None:
        """Take the chunk's token counts; return the completion tokens so far, None where untold."""
        usage = chunk.get("usage")
        if usage is None:
            return None
        if type(usage) is not dict:
            raise _wrong("usage", usage)
        prompt_tokens, total = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt_tokens) is int:
            self.num_prompt_tokens = prompt_tokens
        if total is None:
            return None
        if type(total) is not int:
            raise _wrong("completion_tokens", total)
        return total

    def _count(self, total: int | None, has_choices: bool, has_text: bool, now_s: float) -> None:
        """Note the chunk's time if it brought tokens."""
        if not total:  # a count of 0 beside text is none either
            if has_text:
                self.times_s.append(now_s)
                self._counts.append(None)
        elif total > self.num_tokens:
            self.num_tokens = total
            if has_choices:
                self.times_s.append(now_s)
                self._counts.append(total)


def _data_of(event: bytes) -> bytes:
    """Return an event's data: its `data:` lines, joined."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def _message(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return told(str(text or error))


def _wrong(name: str, value: object) -> AnswerError:
    # The value itself may be a part of a prompt or an answer, which belongs in no log.
    return AnswerError("protocol", f"`{name}` of an event is of type {type(value).__name__}")
