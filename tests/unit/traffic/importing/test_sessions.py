"""Conversations, told by ids or by scripts."""

from __future__ import annotations

import pytest

from autotune.traffic.importing import sessions
from autotune.traffic.importing.sessions import SessionRecorder, Sessions
from autotune.traffic.rows import Row


def recorded(*rows: Row) -> Sessions | None:
    recorder = SessionRecorder(seed=1)
    for row in rows:
        recorder.add(row)
    return recorder.result()


def turn(conversation: str, time_s: float | None = None, duration_s: float | None = None) -> Row:
    return Row(1, time_s=time_s, duration_s=duration_s, conversation=conversation)


def test_rows_of_one_id_are_one_conversation() -> None:
    found = recorded(
        turn("a", 0.0, 2.0), turn("b", 1.0, 5.0), turn("a", 5.0, 1.0), turn("a", 16.0, 1.0), turn("c", 20.0)
    )  # fmt: skip
    assert found is not None
    assert found.turns.num_rows == 3
    assert (found.turns.value.p50, found.turns.value.max) == (1, 3)
    assert found.is_by_rows
    # From the answer's end to the next request: 5 - 2 = 3 s and 16 - 6 = 10 s.
    assert found.think_ms is not None
    assert (found.think_ms.num_rows, found.think_ms.value.p50, found.think_ms.value.max) == (
        2,
        3000,
        10_000,
    )
    assert found.is_think_after_request  # of the row without a duration
    assert found.recorded_ratio == 1.0


def test_without_durations_the_time_counts_from_the_request() -> None:
    found = recorded(turn("a", 0.0), turn("a", 5.0))
    assert found is not None
    assert found.is_think_after_request
    assert found.think_ms is not None
    assert found.think_ms.value.p50 == 5000


def test_a_request_before_the_answer_is_no_thinking() -> None:
    found = recorded(turn("a", 0.0, 9.0), turn("a", 5.0, 1.0))
    assert found is not None
    assert found.think_ms is None
    found = recorded(turn("a"), turn("a"))
    assert found is not None
    assert found.think_ms is None


def test_scripts_are_conversations() -> None:
    found = recorded(
        Row(1, turns=("a", "b"), answers=("x", None)),
        Row(2, turns=("a", "b", "c"), answers=("x", None, "z")),  # one is missing in between
        Row(3, turns=("a", "b"), think_s=(None, 0.5)),
        Row(4, turns=("a",)),
    )
    assert found is not None
    assert (found.turns.num_rows, found.turns.value.p50, found.turns.value.max) == (4, 2, 3)
    assert found.recorded_ratio == pytest.approx(1 / 3)
    assert not found.is_by_rows
    assert found.think_ms is not None
    assert found.think_ms.value.p50 == 500


@pytest.mark.parametrize(
    "rows",
    [(), (Row(1, messages=(("user", "a"),)),), (Row(1, turns=("a",)),), (turn("a"), turn("b"))],
)
def test_no_conversation_of_several_turns(rows: tuple[Row, ...]) -> None:
    assert recorded(*rows) is None


def test_of_many_conversations_an_unbiased_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CONVERSATIONS_KEPT", 1000)
    # Half of 20,000 conversations have three turns, and their later turns come at the very end.
    rows = [turn(f"c{n}") for n in range(20_000)]
    rows += [turn(f"c{n}") for n in range(0, 20_000, 2)] * 2
    found = recorded(*rows)
    assert found is not None
    assert 300 < found.turns.num_rows <= 1000
    recorder = SessionRecorder(seed=1)
    for row in rows:
        recorder.add(row)
    counts = [count for count, _ in recorder._kept.values()]
    assert set(counts) == {1, 3}
    assert counts.count(3) / len(counts) == pytest.approx(0.5, abs=4 * 0.5 / len(counts) ** 0.5)
