"""Bytes of a stream, cut anywhere and of any sort, become an answer or one clear error."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.measure.stream import MAX_EVENT_BYTES, Answer, AnswerError, EventSplitter

TEXTS = ("Zo\u00eb", " pays 5 \u20ac", " \U0001f600", " \r\n\n twice")
"""Characters of 2, 3 and 4 bytes, and line ends, which stand escaped inside JSON."""
TOTALS = (1, 4, 6, 11)


def event(data: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}{end}{end}".encode()


def chunk(
    text: str | None,
    total: int | None = None,
    *,
    finish_reason: str | None = None,
    key: str = "content",
) -> dict[str, Any]:
    """Make a chat chunk; `total` is its token count so far, absent when None."""
    delta = {} if text is None else {key: text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    usage = {} if total is None else {"usage": usage_of(total)}
    return {"object": "chat.completion.chunk", "choices": [choice], **usage}


def usage_of(total: int) -> dict[str, int]:
    return {"prompt_tokens": 9, "total_tokens": 9 + total, "completion_tokens": total}


def whole_stream(end: str = "\n") -> bytes:
    events = [event(chunk("", 0), end)]
    events += [
        event(chunk(text, total, finish_reason="stop" if total == TOTALS[-1] else None), end)
        for text, total in zip(TEXTS, TOTALS, strict=True)
    ]
    # The count at the end in a field of two lines, which the reader joins.
    events.append(f'data: {{"choices": [],{end}data: "usage": USAGE}}{end}{end}'.encode())
    events[-1] = events[-1].replace(b"USAGE", json.dumps(usage_of(TOTALS[-1])).encode())
    events.insert(2, f": keep-alive{end}{end}".encode())
    return b"".join([*events, f"data: [DONE]{end}{end}".encode()])


def read(pieces: Iterable[bytes]) -> Answer:
    """Feed an answer with one piece a second and end it."""
    answer, now_s = Answer(), 0.0
    for piece in pieces:
        now_s += 1.0
        answer.feed(piece, now_s)
    answer.end(now_s)
    return answer


def error_of(*data: object) -> AnswerError:
    with pytest.raises(AnswerError) as caught:
        read([event(item) for item in data])
    return caught.value


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# --- cutting ---


@settings(deadline=None)
@given(
    places=st.lists(st.integers(min_value=0, max_value=10_000), max_size=30),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
)
@example(places=list(range(10_000)), end="\r\n")  # a byte at a time
@example(places=list(range(10_000)), end="\r")
@example(places=list(range(10_000)), end="\n")
def test_a_stream_says_the_same_however_it_is_cut(places: list[int], end: str) -> None:
    answer = read(cut(whole_stream(end), places))

    assert answer.chunk_tokens == list(TOTALS)
    assert "".join(answer.content) == "".join(TEXTS)
    assert (answer.num_tokens, answer.num_prompt_tokens) == (11, 9)
    assert answer.finish_reason == "stop"
    assert answer.times_s == sorted(answer.times_s)


def test_a_chunk_has_the_time_of_the_read_that_completed_it() -> None:
    first, second = event(chunk("a", 1)), event(chunk("b", 2, finish_reason="stop"))
    answer = read([first[:20], first[20:-1], first[-1:] + second])
    assert answer.times_s == [3.0, 3.0]


def test_reads_that_brought_several_chunks_show() -> None:
    # Reads bring 2, 0 and 1 chunks with tokens: 3 chunks in 2 reads.
    three = [event(chunk("x", total)) for total in (1, 2, 3)]
    answer = Answer()
    for number, piece in enumerate((three[0] + three[1], b": comment\n\n", three[2])):
        answer.feed(piece, float(number))
    assert (len(answer.times_s), answer.num_reads) == (3, 2)


def test_a_large_event_in_small_pieces_takes_linear_time() -> None:
    # 15 MiB in pieces of 512 bytes. Copying what came before at each of the 30,720 pieces would move
    # 30,720 x 7.5 MiB on average = 225 GiB, which takes more than 10 s at any memory's speed.
    data = b"data: " + b"x" * (15 * 2**20) + b"\n\n"
    splitter, events = EventSplitter(), []
    began = time.process_time()
    for start in range(0, len(data), 512):
        events += splitter.feed(data[start : start + 512])
    assert time.process_time() - began < 2.0
    assert events == [data[:-2]]


def test_an_event_without_end_is_given_up_before_it_fills_the_memory() -> None:
    splitter, piece = EventSplitter(), b"x" * 2**19
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        splitter.feed(piece)
    with pytest.raises(AnswerError, match="an event of more than 16 MiB") as caught:
        splitter.feed(b"x")
    assert caught.value.kind == "protocol"


def test_a_data_field_may_stand_on_several_lines_and_beside_others() -> None:
    # The pieces of a field are joined by a line end, which JSON takes as white space.
    text = json.dumps(chunk("a", 1, finish_reason="stop"))
    middle = text.index("{", 1)
    lines = ["event: message", "id: 7", f"data:{text[:middle]}", f"data: {text[middle:]}", ""]
    assert read(["\n".join([*lines, ""]).encode()]).chunk_tokens == [1]


# --- what a chunk brings ---


def test_a_role_only_chunk_brings_no_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": usage_of(0)}
    answer = read([event(role), event(chunk("a", 1, finish_reason="stop"))])
    assert answer.times_s == [2.0]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "tool_calls"])
def test_thoughts_and_tool_calls_count_as_the_server_counts_them(key: str) -> None:
    # Three chunks of 2, 3 and 1 tokens.
    pieces = [chunk("a", 2, key=key), chunk("b", 5, key=key), chunk("c", 6, finish_reason="stop")]
    answer = read([event(piece) for piece in pieces])
    assert answer.chunk_tokens == [2, 5, 6]
    assert answer.times_s == [1.0, 2.0, 3.0]
    assert answer.content == ["c"]
    assert answer.thoughts == ([] if key == "tool_calls" else ["a", "b"])


def test_a_token_without_text_counts_too() -> None:
    # A byte of a character that is not whole yet: the server sends the chunk with an empty text.
    answer = read([event(chunk(t, n)) for t, n in (("a", 1), ("", 2))] + [b"data: [DONE]\n\n"])
    assert answer.chunk_tokens == [1, 2]


def test_completions_have_their_text_in_the_choice() -> None:
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
    answer = read([event({"choices": [choice], "usage": usage_of(1)})])
    assert (answer.content, answer.finish_reason) == (["a"], "length")


def test_a_count_that_goes_back_is_no_news() -> None:
    totals = (2, 4, 3, 5)
    pieces = [event(chunk("x", total)) for total in totals]
    answer = read([*pieces, event({"choices": [], "usage": usage_of(1)}), b"data: [DONE]\n\n"])
    assert answer.chunk_tokens == [2, 4, 5]
    assert answer.num_tokens == 5


def test_tokens_that_no_chunk_brought_are_in_the_total_alone() -> None:
    last = event({"choices": [], "usage": usage_of(5)})
    answer = read([event(chunk("x", 3, finish_reason="stop")), last])
    assert (answer.chunk_tokens, answer.num_tokens) == ([3], 5)


# --- servers that count at the end only ---


@pytest.mark.parametrize(
    ("num_chunks", "total", "expected"),
    [
        # First 1, last all, those between evenly: 1 + 12 * i // 4 for i = 0 to 4.
        (5, 13, [1, 4, 7, 10, 13]),
        # 1 + 6 * i // 4 = 1, 2.5, 4, 5.5, 7, rounded down.
        (5, 7, [1, 2, 4, 5, 7]),
        (2, 9, [1, 9]),
        (1, 9, [9]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_counts_between_are_spread_evenly(
    num_chunks: int, total: int, expected: list[int]
) -> None:
    pieces = [event({**chunk("x"), "usage": None}) for _ in range(num_chunks)]
    last = event({"choices": [], "usage": usage_of(total)})
    answer = read([*pieces, last, b"data: [DONE]\n\n"])
    assert answer.chunk_tokens == expected
    assert answer.num_tokens == total
    assert len(answer.times_s) == num_chunks


def test_a_zero_beside_text_is_no_count() -> None:
    pieces = [event(chunk("x", 0)), event(chunk("y", 0, finish_reason="stop"))]
    answer = read([*pieces, event({"choices": [], "usage": usage_of(4)})])
    assert answer.chunk_tokens == [1, 4]


def test_counts_that_are_known_are_kept_among_those_that_are_not() -> None:
    # Known: 5 at the second chunk, 9 at the end; the first has 1, the third lies half way.
    pieces = [chunk("a"), chunk("b", 5), chunk("c"), chunk("d", finish_reason="stop")]
    answer = read([*(event(p) for p in pieces), event({"choices": [], "usage": usage_of(9)})])
    assert answer.chunk_tokens == [1, 5, 7, 9]


def test_chunks_are_never_counted_as_tokens() -> None:
    error = error_of(chunk("a"), chunk("b", finish_reason="stop"))
    assert error.kind == "protocol"
    assert str(error) == "the server did not say how many tokens it sent"


# --- how an answer ends ---


@pytest.mark.parametrize("ending", [b"", b"data: [DONE]", b"data: [DONE]\n"])
def test_finish_reason_is_end_enough(ending: bytes) -> None:
    assert read([event(chunk("a", 1, finish_reason="stop")), ending]).num_tokens == 1


def test_done_is_end_enough() -> None:
    assert read([event(chunk("a", 1)), b"data: [DONE]\n\n"]).num_tokens == 1


def test_a_last_event_without_an_empty_line_counts() -> None:
    assert read([event(chunk("a", 1, finish_reason="stop"))[:-2]]).chunk_tokens == [1]


@pytest.mark.parametrize(
    ("stream", "kind", "told"),
    [
        (b"", "truncated", "in the middle of an answer"),
        (event(chunk("a", 1)), "truncated", "in the middle of an answer"),
        (event(chunk("a", 1)) + b'data: {"choi', "truncated", "inside an event"),
        (b'{"id": 1, "choices": []}', "protocol", "no stream of events"),
        (b"<html>502 Bad Gateway</html>", "protocol", "no stream of events"),
        (b"data: [DONE]\n\n", "empty", "empty output"),
        (event(chunk("", 0, finish_reason="stop")), "empty", "empty output"),
        (b"data: {oops\n\n", "protocol", "an event of 5 bytes is not JSON"),
        (b"data: 5\n\n", "protocol", "no object"),
        (b"data: [1]\n\n", "protocol", "no object"),
        (b"data: \xff\xfe\n\n", "protocol", "not JSON"),
        (event({"choices": "x"}), "protocol", "`choices` of an event is of type str"),
        (event({"choices": [1]}), "protocol", "`choices` of an event is of type int"),
        (event({"choices": [{"delta": 3}]}), "protocol", "`delta`"),
        (event({"choices": [{"delta": {"content": 3}}]}), "protocol", "`content`"),
        (event({"choices": [{"finish_reason": []}]}), "protocol", "`finish_reason`"),
        (event({"choices": [], "usage": 3}), "protocol", "`usage`"),
        (event({"usage": {"completion_tokens": "3"}}), "protocol", "`completion_tokens`"),
        (event({"usage": {"completion_tokens": 2.5}}), "protocol", "`completion_tokens`"),
        (event({"error": {"message": "boom", "code": 500}}), "stream_error", "boom"),
        (event({"error": "boom"}), "stream_error", "boom"),
        (event({"object": "error", "message": "old style"}), "stream_error", "old style"),
        (event(chunk(None, finish_reason="abort")), "stream_error", "gave the answer up: abort"),
    ],
)
def test_what_is_wrong_has_a_kind_and_a_reason(stream: bytes, kind: str, told: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read([stream])
    assert caught.value.kind == kind
    assert told in str(caught.value)


def test_an_error_that_is_null_is_none() -> None:
    assert read([event({**chunk("a", 1, finish_reason="stop"), "error": None})]).num_tokens == 1


def test_what_a_server_says_is_not_repeated_where_it_may_be_an_answer() -> None:
    assert "secret" not in str(error_of({"choices": "secret"}))
    with pytest.raises(AnswerError) as caught:
        read([b"data: {secret\n\n"])
    assert "secret" not in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "content",
                    "usage",
                    "error",
                    "completion_tokens",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(JSON_VALUES, max_size=3))
def test_any_json_is_an_answer_or_an_error(values: list[object]) -> None:
    _is_answer_or_error([event(value) for value in values])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
@example([b"data: " + b"[" * 100_000 + b"\n\n"])  # deeper than a parser's stack
@example([b"data: 1" + b"0" * 5000 + b"\n\n"])
@example([b'data: {"usage": {"completion_tokens": 1' + b"0" * 400 + b"}}\n\n"])
def test_any_bytes_are_an_answer_or_an_error(pieces: list[bytes]) -> None:
    _is_answer_or_error(pieces)


def _is_answer_or_error(pieces: Iterable[bytes]) -> None:
    answer = Answer()
    with contextlib.suppress(AnswerError):
        for piece in pieces:
            answer.feed(piece, 0.0)
        answer.end(0.0)
    assert len(answer.chunk_tokens) == len(answer.times_s)
    assert answer.chunk_tokens == sorted(answer.chunk_tokens)
