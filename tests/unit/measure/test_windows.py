"""The steady window, checked on records made by hand."""

from __future__ import annotations

import pytest
from record_helpers import measurement, record

from autotune.measure.records import RequestRecord
from autotune.measure.windows import (
    Window,
    cycle_start_s,
    share_in,
    steady_window,
    tokens_in,
)

# Two users, three requests, no two events at the same moment.
A = record(0, 0.00, [(0.50, 1), (1.00, 3), (1.50, 5)], 1.51)
B = record(1, 0.01, [(0.41, 2), (1.21, 6), (2.01, 10)], 2.02)
C = record(2, 1.52, [(2.12, 1), (2.62, 2), (3.12, 3)], 3.13)


def one_chunk(
    number: int, sent_s: float, finished_s: float, *, is_open: bool = False, think_s: float = 0.0
) -> RequestRecord:
    return record(
        number,
        sent_s,
        [(finished_s, 1)],
        finished_s,
        scheduled_s=sent_s if is_open else None,
        think_s=think_s,
    )


def bounds(window: Window) -> tuple[float, float]:
    return window.start_s, window.end_s


# --- closed loop ---


def test_closed_loop_goes_from_full_to_the_first_empty_slot() -> None:
    # Both users are busy from B's send at 0.01; the last send is C's at 1.52, and the first
    # completion after it is B's at 2.02.
    assert bounds(steady_window(measurement(A, B, C))) == (0.01, 2.02)


def test_a_completion_that_makes_room_for_the_last_send_leaves_no_slot_empty() -> None:
    # As above, but C is sent in the very moment A finishes (a simulated clock does that): the
    # slots stay full until B finishes at 2.02.
    at_once = record(2, 1.51, [(2.12, 1), (3.12, 3)], 3.13)
    assert steady_window(measurement(A, B, at_once)).end_s == 2.02


def test_the_window_ends_when_a_slot_stays_empty_whatever_other_slots_still_send() -> None:
    # Two users. The first has no more to do at 2.0; the second goes on with a long conversation and
    # sends its last turn at 4.0. From 2.0 on one slot is empty: the last send is no measure.
    records = [
        one_chunk(0, 0.0, 1.0),
        one_chunk(1, 0.0, 1.0),
        one_chunk(2, 1.0, 2.0),
        one_chunk(3, 1.0, 3.0),
        one_chunk(4, 3.0, 4.0),
        one_chunk(5, 4.0, 5.0),
    ]
    assert bounds(steady_window(measurement(*records))) == (0.0, 2.0)


def in_step(num_rounds: int) -> list[RequestRecord]:
    """Two slots that take 1 s for each request, the second half a second later than the first."""
    return [
        one_chunk(2 * i + slot, i + slot / 2, i + 1 + slot / 2)
        for i in range(num_rounds)
        for slot in (0, 1)
    ]


def test_a_long_closed_loop_waits_for_the_first_completions() -> None:
    # Full from 0.5 on; the first slot stays empty from num_rounds on. The ramp is the first request,
    # which ends at 1.0. Waiting for it leaves 9 of 9.5 s (95 %) with 10 rounds, and 1 of 1.5 s
    # (67 %, under 75 %) with 2.
    assert bounds(steady_window(measurement(*in_step(10)))) == (1.0, 10.0)
    assert bounds(steady_window(measurement(*in_step(2)))) == (0.5, 2.0)


def test_a_single_slot_has_no_ramp_to_wait_for() -> None:
    records = [one_chunk(i, i, i + 1) for i in range(8)]
    assert bounds(steady_window(measurement(*records, concurrency=1))) == (0.0, 8.0)


def test_a_slot_is_taken_while_its_user_thinks() -> None:
    # One user, 1 s of service, 3 s of thinking before each request but the first.
    records = [
        one_chunk(0, 0.0, 1.0),
        one_chunk(1, 4.0, 5.0, think_s=3.0),
        one_chunk(2, 8.0, 9.0, think_s=3.0),
    ]
    assert [cycle_start_s(r) for r in records] == [0.0, 1.0, 5.0]
    assert bounds(steady_window(measurement(*records, concurrency=1))) == (0.0, 9.0)
    # Two such users, in the same second: both slots are taken although nobody waits for an answer
    # between 1 and 4. The ramp is one user's first request, until 1.0.
    others = [
        one_chunk(3 + i, r.sent_s, r.finished_s, think_s=r.think_s) for i, r in enumerate(records)
    ]
    assert bounds(steady_window(measurement(*records, *others))) == (1.0, 9.0)


# --- open loop ---


def test_open_loop_goes_from_the_first_to_the_last_arrival() -> None:
    # The first completion is at 1.1, so the ramp is the arrivals at 0 and 1; it ends at 2.1, which
    # would leave 0.4 of 2.5 s: too little.
    records = [
        record(i, due + 0.001, [(due + 0.2, 1), (due + 1.0, 5)], due + 1.1, scheduled_s=due)
        for i, due in enumerate((0.0, 1.0, 2.5))
    ]
    assert bounds(steady_window(measurement(*records, concurrency=None))) == (0.0, 2.5)


def test_a_long_open_loop_waits_until_the_server_is_no_longer_empty() -> None:
    # One arrival a second, each takes 2.5 s. Before the first completion at 2.5 came the arrivals at
    # 0, 1 and 2; the last of them ends at 4.5. Of 0 to 9 that leaves exactly half; of 0 to 8 less.
    records = [one_chunk(i, i, i + 2.5, is_open=True) for i in range(10)]
    assert bounds(steady_window(measurement(*records, concurrency=None))) == (4.5, 9.0)
    assert bounds(steady_window(measurement(*records[:9], concurrency=None))) == (0.0, 8.0)


def test_without_a_steady_part_the_whole_counts() -> None:
    # Two slots for one request; and two arrivals within 0.1 s of a measurement of 3 s.
    assert bounds(steady_window(measurement(A))) == (0.0, 1.51)
    burst = measurement(
        record(0, 0.0, [(1.0, 1)], 1.1, scheduled_s=0.0),
        record(1, 0.1, [(3.0, 1)], 3.0, scheduled_s=0.1),
        concurrency=None,
    )
    assert bounds(steady_window(burst)) == (0.0, 3.0)
    assert steady_window(measurement()).duration_s == 0.0


# --- what of a request lies inside ---


@pytest.mark.parametrize(
    ("start_s", "end_s", "tokens"),
    [
        (0.00, 9.0, 5),  # all of A
        (0.50, 9.0, 4),  # its first token came at the window's edge, before it
        (0.60, 1.2, 2),  # the second chunk alone: tokens 2 and 3
        (1.60, 9.0, 0),  # nothing came later
        (0.00, 0.4, 0),  # nothing came yet
    ],
)
def test_tokens_count_where_their_chunk_arrived(start_s: float, end_s: float, tokens: int) -> None:
    assert tokens_in(A, Window(start_s, end_s)) == tokens


def test_a_request_counts_with_the_share_of_its_time_inside() -> None:
    # Sent at 4, after 3 s of thinking, answered at 5; or due at 3 and sent a second late.
    thinking = one_chunk(0, 4.0, 5.0, think_s=3.0)
    late = record(1, 4.0, [(5.0, 1)], 5.0, scheduled_s=3.0)
    inside = Window(2.0, 9.0)

    assert share_in(thinking, inside, is_closed_loop=True) == pytest.approx(
        3 / 4
    )  # 2 to 5 of 1 to 5
    assert share_in(late, Window(4.5, 9.0), is_closed_loop=False) == pytest.approx(0.5 / 2)
    assert share_in(late, Window(6.0, 9.0), is_closed_loop=False) == 0


def test_a_request_without_any_duration_counts_where_it_ended() -> None:
    refused = record(0, 2.0, [], 2.0, error="HTTP 429")
    assert share_in(refused, Window(1.0, 3.0), is_closed_loop=True) == 1
    assert share_in(refused, Window(2.0, 3.0), is_closed_loop=True) == 0
