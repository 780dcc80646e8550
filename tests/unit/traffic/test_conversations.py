"""Conversations out of files: whole ones in a row, or logged request by request."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.traffic.classes import PromptSource, Turns
from autotune.traffic.prompts import Conversation, load_conversations

LIVE = Turns(replay="live")
RECORDED = Turns(replay="recorded")

Write = Callable[..., Path]


def read(folder: Path, turns: Turns | None, **source: Any) -> list[Conversation]:
    given = PromptSource.model_validate({"file": "prompts.jsonl", **source})
    return list(load_conversations(given, folder, turns).conversations)


def notes(folder: Path, turns: Turns | None = None, **source: Any) -> list[str]:
    given = PromptSource.model_validate({"file": "prompts.jsonl", **source})
    return list(load_conversations(given, folder, turns).notes)


def said(conversation: Conversation) -> list[list[tuple[str, str]]]:
    return [list(turn.prompt.messages) for turn in conversation.turns]


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


# --- whole conversations in one row ---

SCRIPT = {"turns": ["u1", "u2", "u3"], "system": "s"}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u1"},
        {"from": "gpt", "value": "a1"},
        {"from": "human", "value": "u2"},
        {"from": "gpt", "value": "a2"},
        {"from": "human", "value": "u3"},
    ]
}
MESSAGES = chat(
    ("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2"),
    ("user", "u3"),
)  # fmt: skip


@pytest.mark.parametrize(
    "row", [SCRIPT, SHAREGPT, MESSAGES], ids=["turns", "sharegpt", "messages"]
)
def test_live_turns_bring_their_own_words_alone(
    tmp_path: Path, write_rows: Write, row: dict[str, Any]
) -> None:
    write_rows([row])
    (conversation,) = read(tmp_path, LIVE)
    assert said(conversation) == [
        [("system", "s"), ("user", "u1")],
        [("user", "u2")],
        [("user", "u3")],
    ]
    assert [turn.is_live for turn in conversation.turns] == [False, True, True]


@pytest.mark.parametrize("row", [SHAREGPT, MESSAGES], ids=["sharegpt", "messages"])
def test_recorded_turns_hold_all_that_was_said(
    tmp_path: Path, write_rows: Write, row: dict[str, Any]
) -> None:
    write_rows([row])
    (conversation,) = read(tmp_path, RECORDED)
    first = [("system", "s"), ("user", "u1")]
    second = [*first, ("assistant", "a1"), ("user", "u2")]
    assert said(conversation) == [first, second, [*second, ("assistant", "a2"), ("user", "u3")]]
    assert not any(turn.is_live for turn in conversation.turns)


def test_recorded_turns_need_answers(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{"turns": ["only"]}, SCRIPT])  # one turn needs none
    with pytest.raises(InputError) as caught:
        read(tmp_path, RECORDED)
    assert str(caught.value) == (
        f"{tmp_path / 'prompts.jsonl'}:2: `replay: recorded` needs an answer between two turns; "
        "use `replay: live`."
    )


@pytest.mark.parametrize(("most", "count"), [(1, 1), (2, 2), (9, 3)])
def test_no_more_turns_than_asked_for(
    tmp_path: Path, write_rows: Write, most: int, count: int
) -> None:
    write_rows([SHAREGPT])
    for replay in ("live", "recorded"):
        (conversation,) = read(tmp_path, Turns(max=most, replay=replay))
        assert len(conversation.turns) == count


def test_turns_that_are_not_sent_need_no_answer(tmp_path: Path, write_rows: Write) -> None:
    write_rows([SCRIPT])
    (conversation,) = read(tmp_path, Turns(max=1, replay="recorded"))
    assert said(conversation) == [[("system", "s"), ("user", "u1")]]


def test_without_turns_a_script_is_its_first_turn(tmp_path: Path, write_rows: Write) -> None:
    write_rows([SCRIPT, MESSAGES])
    script, messages = read(tmp_path, None)
    assert said(script) == [[("system", "s"), ("user", "u1")]]
    assert len(said(messages)[0]) == 6  # one request, with all its history


def test_a_greeting_and_two_answers_in_a_row_are_kept(tmp_path: Path, write_rows: Write) -> None:
    write_rows(
        [
            chat(
                ("assistant", "welcome"), ("user", "u1"), ("assistant", "a"), ("assistant", "b"),
                ("user", "u2"), ("user", "u3"),
            )
        ]
    )  # fmt: skip
    (conversation,) = read(tmp_path, RECORDED)
    assert said(conversation) == [
        [("assistant", "welcome"), ("user", "u1")],
        [("assistant", "welcome"), ("user", "u1"), ("assistant", "a\nb"), ("user", "u2"),
         ("user", "u3")],
    ]  # fmt: skip


def test_results_of_tools_follow_recorded_answers_only(tmp_path: Path, write_rows: Write) -> None:
    write_rows([chat(("user", "u1"), ("assistant", "call"), ("tool", "result"))])
    (conversation,) = read(tmp_path, RECORDED)
    assert said(conversation)[1][-1] == ("tool", "result")
    with pytest.raises(InputError, match=r":1: a tool's result follows a recorded answer only"):
        read(tmp_path, LIVE)


def test_results_of_tools_may_stand_in_the_history_of_a_log(
    tmp_path: Path, write_rows: Write
) -> None:
    said = [("user", "u1"), ("assistant", "call"), ("tool", "result"), ("assistant", "a1")]
    write_rows([logged("x", 1.0, *said[:3]), logged("y", 1.0, *said, ("user", "u2"))])
    (y,) = read(tmp_path, LIVE)
    assert y.turns[0].prompt.messages[-1] == ("user", "u2")
    (note,) = notes(tmp_path, LIVE)
    assert "1 of 2 rows were skipped; the first: line 1: a tool's result follows" in note


def test_waits_that_a_file_gives_are_kept(tmp_path: Path, write_rows: Write) -> None:
    turns = [{"text": "u1"}, {"text": "u2", "delay": 1500}, {"text": "u3"}]
    write_rows([{"session_id": "a", "turns": turns}])
    (conversation,) = read(tmp_path, LIVE, format="aiperf")
    assert [turn.gap_s for turn in conversation.turns] == [0.0, 1.5, 0.0]


# --- logs with a row for each request ---


def logged(name: str, time_s: float, *messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversation_id": name, "timestamp": time_s, "model": "m", **chat(*messages), **more}


LOG = [
    logged("x", 10.0, ("user", "x1"), max_tokens=50),
    logged("y", 11.0, ("user", "y1")),
    logged("x", 15.0, ("user", "x1"), ("assistant", "ax"), ("user", "x2"), max_tokens=60),
    logged("x", 35.0, ("user", "x1"), ("assistant", "ax"), ("user", "x2"), ("assistant", "bx"),
           ("user", "x3")),
]  # fmt: skip


def test_rows_of_a_log_are_grouped_by_conversation(tmp_path: Path, write_rows: Write) -> None:
    write_rows(LOG)
    x, y = read(tmp_path, RECORDED)
    assert [messages[-1][1] for messages in said(x)] == ["x1", "x2", "x3"]
    assert [len(messages) for messages in said(x)] == [1, 3, 5]
    assert said(y) == [[("user", "y1")]]
    assert [turn.max_tokens for turn in x.turns] == [50, 60, None]


def test_live_turns_of_a_log_bring_what_stands_after_the_last_answer(
    tmp_path: Path, write_rows: Write
) -> None:
    write_rows(LOG)
    x, _ = read(tmp_path, LIVE)
    assert said(x) == [[("user", "x1")], [("user", "x2")], [("user", "x3")]]
    assert [turn.is_live for turn in x.turns] == [False, True, True]


def test_recorded_waits_count_from_the_answer_where_the_log_knows_it(
    tmp_path: Path, write_rows: Write
) -> None:
    # Requests at 10, 15 and 35 s; the second answer took 4 s, the others are not known.
    rows = [dict(row) for row in LOG]
    rows[2]["duration_s"] = 4.0
    write_rows(rows)
    x, _ = read(tmp_path, LIVE)
    assert [turn.gap_s for turn in x.turns] == [0.0, 5.0, 16.0]


def test_a_log_that_begins_at_zero_has_waits_as_well(tmp_path: Path, write_rows: Write) -> None:
    write_rows([logged("x", 0.0, ("user", "a")), logged("x", 3.0, ("user", "a"), ("user", "b"))])
    (x,) = read(tmp_path, LIVE)
    assert [turn.gap_s for turn in x.turns] == [0.0, 3.0]


def test_what_is_left_of_a_conversation_is_one_request(tmp_path: Path, write_rows: Write) -> None:
    """Its earlier requests are not in the log, so they are not made up from its history."""
    write_rows([LOG[3]])
    (x,) = read(tmp_path, LIVE)
    assert len(x.turns) == 1
    assert len(said(x)[0]) == 5


def test_without_turns_each_row_of_a_log_is_one_request(tmp_path: Path, write_rows: Write) -> None:
    write_rows(LOG)
    assert [len(c.turns) for c in read(tmp_path, None)] == [1, 1, 1, 1]


# --- categories, samples, rows that cannot be used ---


def test_a_category_keeps_its_rows_alone(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{"prompt": f"p{i}", "category": "abc"[i % 3]} for i in range(9)])
    assert [said(c)[0][0][1] for c in read(tmp_path, None, category="b")] == ["p1", "p4", "p7"]


def test_an_unknown_category_is_refused(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{"prompt": "p", "category": "a"}])
    with pytest.raises(InputError) as caught:
        read(tmp_path, None, category="z")
    assert str(caught.value) == (
        f"{tmp_path / 'prompts.jsonl'}: prompts.category: "
        "no row of the prompt file is of this category, but got 'z'."
    )


def test_rows_of_other_categories_may_be_unusable(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{**SCRIPT, "category": "a"}, {"prompt": "p", "category": "b"}])
    assert len(read(tmp_path, RECORDED, category="b")) == 1


def test_columns_of_a_file_may_have_other_names(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{"q": {"text": "hi"}, "kind": "z"}])
    columns = {"prompt": "q.text", "category": "kind"}
    (only,) = read(tmp_path, None, columns=columns, category="z", format="jsonl")
    assert said(only) == [[("user", "hi")]]


def test_a_sample_is_the_same_every_time_and_in_file_order(
    tmp_path: Path, write_rows: Write
) -> None:
    write_rows([{"prompt": f"{i}"} for i in range(1000)])
    once, again = ([int(said(c)[0][0][1]) for c in read(tmp_path, None, sample=50)] for _ in "ab")
    assert once == again == sorted(once)
    assert len(set(once)) == 50
    # Spread over the whole file: with 50 of 1000, both halves have some with near certainty.
    assert min(once) < 500 < max(once)
    assert notes(tmp_path, sample=50) == [
        f"{tmp_path / 'prompts.jsonl'}: 50 of 1000 rows are used as prompts (prompts.sample)"
    ]


def test_a_smaller_sample_is_part_of_a_larger_one(tmp_path: Path, write_rows: Write) -> None:
    write_rows([{"prompt": f"{i}"} for i in range(300)])
    small, large = ({c.content_id for c in read(tmp_path, None, sample=n)} for n in (20, 90))
    assert small < large


def test_all_rows_of_a_conversation_share_their_fate(tmp_path: Path, write_rows: Write) -> None:
    rows = []
    for number in range(200):
        first = ("user", f"{number}")
        rows += [
            logged(f"{number}", 0.0, first),
            logged(f"{number}", 1.0, first, ("assistant", "a"), ("user", "b")),
        ]
    rows.sort(key=lambda row: row["timestamp"])
    write_rows(rows)
    found = read(tmp_path, LIVE, sample=30)
    assert [len(c.turns) for c in found] == [2] * 30


def test_a_large_file_is_read_in_constant_memory(tmp_path: Path) -> None:
    # 30,000 prompts of 1,000 characters: 30 MB. The sample of 10 and the reader need far less.
    path = tmp_path / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(30_000):
            file.write(f'{{"prompt": "{number:06} {"x" * 990}"}}\n')
    tracemalloc.start()
    try:
        found = read(tmp_path, None, sample=10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 10
    assert peak < 3_000_000


def test_an_endless_conversation_is_read_in_constant_memory(tmp_path: Path) -> None:
    """A log whose rows all claim to be of one conversation: only its first turns are kept."""
    path = tmp_path / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(10_000):
            file.write(f'{{"conversation_id": "c", "prompt": "{number:06} {"x" * 990}"}}\n')
    tracemalloc.start()
    try:
        (only,) = read(tmp_path, Turns(max=3, replay="live"), format="jsonl")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [messages[0][1][:6] for messages in said(only)] == ["000000", "000001", "000002"]
    assert peak < 3_000_000


def test_scars_of_a_log_are_counted(tmp_path: Path, write_rows: Write) -> None:
    # Eight rows that can be read, or the reader would not believe in its guess of the format.
    good = [logged(f"{i}", float(i), ("user", f"p{i}")) for i in range(8)]
    write_rows([*good[:4], {"model": "m", "messages": 3}, *good[4:]])
    assert len(read(tmp_path, None)) == 8
    (note,) = notes(tmp_path)
    assert note == (
        f"{tmp_path / 'prompts.jsonl'}: 1 of 9 rows were skipped; the first: line 5: "
        "`messages` must be a list"
    )


def test_traces_without_text_are_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-05 09:00:00,5,6\n")
    with pytest.raises(InputError) as caught:
        read(tmp_path, None, file="log.csv")
    assert str(caught.value) == (
        f"{path}:2: the prompt file must hold at least one usable prompt, "
        "but the row has no prompt."
    )
