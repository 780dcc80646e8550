"""Windows of a trace: which rows are sent, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.traffic import trace as trace_module
from autotune.traffic.loads import TraceLoad
from autotune.traffic.trace import Trace, load_trace


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def timed(path: Path, *times_s: float) -> None:
    """Write a trace whose rows are as long as their number in the file, from 1."""
    write(
        path,
        *(
            {"timestamp": time_s, "input_length": number, "output_length": 1}
            for number, time_s in enumerate(times_s, 1)
        ),
    )


def replayed(folder: Path, seed: int = 1, **load: Any) -> Trace:
    given = {"kind": "trace", "file": "trace.jsonl", **load}
    return load_trace(TraceLoad.model_validate(given), folder, seed)


def arrivals(found: Trace) -> list[float]:
    return [row.arrival_s for row in found.rows]


def lengths(found: Trace) -> list[int | None]:
    return [row.row.num_input_tokens for row in found.rows]


TIMES = (100.0, 101.0, 104.0, 109.0, 110.0, 115.5)


def test_a_whole_trace_begins_at_its_first_request(tmp_path: Path) -> None:
    timed(tmp_path / "trace.jsonl", *TIMES)
    found = replayed(tmp_path)
    assert arrivals(found) == [0.0, 1.0, 4.0, 9.0, 10.0, 15.5]
    assert lengths(found) == [1, 2, 3, 4, 5, 6]
    assert found.duration_s == 15.5
    assert found.notes == (f"{tmp_path / 'trace.jsonl'}: 6 requests are replayed",)


def test_a_window_has_its_start_and_not_its_end(tmp_path: Path) -> None:
    # 4 to 10 s after the first request: 104.0 and 109.0; 110.0 is the first that is too late.
    timed(tmp_path / "trace.jsonl", *TIMES)
    found = replayed(tmp_path, window={"start_s": 4, "duration_s": 6})
    assert arrivals(found) == [0.0, 5.0]
    assert lengths(found) == [3, 4]


def test_a_window_may_begin_between_two_requests(tmp_path: Path) -> None:
    timed(tmp_path / "trace.jsonl", *TIMES)
    found = replayed(tmp_path, window={"start_s": 2.5, "duration_s": 7})
    assert arrivals(found) == [1.5, 6.5]


@pytest.mark.parametrize(("scale", "expected"), [(2, [0.0, 10.0]), (0.5, [0.0, 2.5])])
def test_times_are_scaled_after_the_window_is_cut(
    tmp_path: Path, scale: float, expected: list[float]
) -> None:
    timed(tmp_path / "trace.jsonl", *TIMES)
    window = {"start_s": 4, "duration_s": 6}
    assert arrivals(replayed(tmp_path, window=window, time_scale=scale)) == expected


def test_jitter_spreads_a_coarse_clock(tmp_path: Path) -> None:
    # All at 0 and at 3 s by a clock that ticks every 3 s.
    timed(tmp_path / "trace.jsonl", *[0.0] * 300, *[3.0] * 300)
    found = arrivals(replayed(tmp_path, jitter_s=3, time_scale=2))
    assert found == sorted(found)
    assert len(set(found)) == 600
    # Twice 0 to 3 and twice 3 to 6.
    assert 0 <= found[0] < 5 < found[299] < 6 < found[300] < 11 < found[599] < 12
    assert arrivals(replayed(tmp_path, jitter_s=3, time_scale=2)) == found
    assert arrivals(replayed(tmp_path, jitter_s=3, time_scale=2, seed=2)) != found


def test_requests_are_sent_in_order_of_time_however_they_were_logged(tmp_path: Path) -> None:
    # Many logs are written when a request ends; the earliest here stands second.
    timed(tmp_path / "trace.jsonl", 103.0, 100.0, 101.0)
    found = replayed(tmp_path)
    assert arrivals(found) == [0.0, 1.0, 3.0]
    assert lengths(found) == [2, 3, 1]
    assert lengths(replayed(tmp_path, window={"duration_s": 2})) == [2, 3]


def test_jitter_never_swaps_the_turns_of_a_conversation(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": "c",
            "timestamp": 1000 * number,
            "input_length": number + 1,
            "hash_ids": [1],
        }
        for number in range(5)
    ]
    write(tmp_path / "trace.jsonl", *rows)
    for seed in range(20):
        found = replayed(tmp_path, seed, jitter_s=60, format="aiperf")
        assert lengths(found) == [1, 2, 3, 4, 5]
        assert arrivals(found) == sorted(arrivals(found))


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", *({"ts": t, "in": 7, "out": 3} for t in (5, 9)))
    columns = {"timestamp": "ts", "input_length": "in", "output_length": "out"}
    assert arrivals(replayed(tmp_path, columns=columns)) == [0.0, 4.0]


def test_rows_that_are_not_replayed_are_counted(tmp_path: Path) -> None:
    row = {"input_length": 7, "output_length": 3}
    write(
        tmp_path / "trace.jsonl",
        *({"timestamp": t, **row} for t in range(5)),
        {"timestamp": 6, **row, "input_length": -7},
        row,
    )
    found = replayed(tmp_path)
    assert len(found.rows) == 5
    assert found.notes[1] == (
        f"{tmp_path / 'trace.jsonl'}: 1 broken rows and 1 without a time were skipped; "
        "the first: line 6: `input_length` must not be negative"
    )


# --- what is refused ---


def refusal(folder: Path, **load: Any) -> str:
    with pytest.raises(InputError) as caught:
        replayed(folder, **load)
    return str(caught.value)


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", *[{"prompt": "a"}] * 3)
    assert refusal(tmp_path) == (
        f"{tmp_path / 'trace.jsonl'}: a trace must say when each request was sent, but no row "
        "does. Use the file as `prompts`, with another kind of load."
    )


def test_an_empty_window_is_refused(tmp_path: Path) -> None:
    timed(tmp_path / "trace.jsonl", *TIMES)
    assert refusal(tmp_path, window={"start_s": 99, "duration_s": 5}) == (
        f"{tmp_path / 'trace.jsonl'}: load.window: no request of the trace lies in the window, "
        "but got {'start_s': 99.0, 'duration_s': 5.0}."
    )


def test_a_trace_of_broken_rows_is_refused(tmp_path: Path) -> None:
    broken = {"timestamp": "?", "input_length": 7, "output_length": 3}
    write(tmp_path / "trace.jsonl", broken, broken)
    assert refusal(tmp_path).startswith(
        f"{tmp_path / 'trace.jsonl'}:1: the trace must hold at least one usable request, but "
    )


def test_more_requests_than_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 5)
    timed(tmp_path / "trace.jsonl", *TIMES)
    assert refusal(tmp_path) == (
        f"{tmp_path / 'trace.jsonl'}: load.window: the replayed part of a trace must have at most "
        "5 requests. Give a window, such as {start_s: 0, duration_s: 300}."
    )
    assert len(replayed(tmp_path, window={"duration_s": 10}).rows) == 4


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    assert "trace.jsonl: the trace must exist" in refusal(tmp_path)
