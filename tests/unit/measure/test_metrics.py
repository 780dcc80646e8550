"""Definitions, checked on records made by hand; the arithmetic stands beside each number."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from autotune.measure.metrics import (
    Window,
    e2el_ms,
    estimate,
    meets_limits,
    observed,
    pooled_acceptance,
    samples_of,
    steady_window,
    summarize,
    tokens_in,
    tpot_ms,
    ttft_ms,
    violations,
)
from autotune.measure.records import (
    Measurement,
    RequestRecord,
    ServerCounters,
    measurement_from_dict,
)


def record(
    request_id: int,
    sent_s: float,
    chunks: Sequence[tuple[float, int]],
    finished_s: float,
    *,
    scheduled_s: float | None = None,
    class_name: str = "chat",
    error: str | None = None,
) -> RequestRecord:
    """Make a record; `chunks` are (arrival, tokens so far)."""
    return RequestRecord(
        request_id=request_id,
        class_name=class_name,
        prompt_id=f"p{request_id}",
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        chunk_times_s=tuple(time_s for time_s, _ in chunks),
        chunk_tokens=tuple(tokens for _, tokens in chunks),
        finished_s=finished_s,
        num_prompt_tokens=10,
        num_completion_tokens=chunks[-1][1] if chunks else 0,
        finish_reason="stop",
        error=error,
    )


def measurement(
    *records: RequestRecord, concurrency: int | None = 2, counters: ServerCounters | None = None
) -> Measurement:
    return Measurement(
        schedule_digest="0123456789abcdef",
        concurrency=concurrency,
        started_at_s=1_700_000_000.0,
        duration_s=max((r.finished_s for r in records), default=0.0),
        records=records,
        counters=counters or ServerCounters(),
    )


# Two users, three requests, no two events at the same moment.
#
#         sent   chunks (s: tokens so far)    finished   ttft    tpot                e2el
#   A     0.00   0.50: 1  1.00: 3  1.50: 5      1.51     500     1000 / (5 - 1) = 250   1500
#   B     0.01   0.41: 2  1.21: 6  2.01: 10     2.02     400     1600 / (10 - 2) = 200  2000
#   C     1.52   2.12: 1  2.62: 2  3.12: 3      3.13     600     1000 / (3 - 1) = 500   1600
A = record(0, 0.00, [(0.50, 1), (1.00, 3), (1.50, 5)], 1.51)
B = record(1, 0.01, [(0.41, 2), (1.21, 6), (2.01, 10)], 2.02)
C = record(2, 1.52, [(2.12, 1), (2.62, 2), (3.12, 3)], 3.13)
CLOSED = measurement(A, B, C)


# --- one request ---


@pytest.mark.parametrize(
    ("one", "ttft", "tpot", "e2el"),
    [(A, 500, 250, 1500), (B, 400, 200, 2000), (C, 600, 500, 1600)],
)
def test_latencies_of_a_request(one: RequestRecord, ttft: float, tpot: float, e2el: float) -> None:
    assert ttft_ms(one) == pytest.approx(ttft)
    assert tpot_ms(one) == pytest.approx(tpot)
    assert e2el_ms(one) == pytest.approx(e2el)


def test_open_loop_latencies_count_from_the_schedule() -> None:
    # Due at 2.0 s, sent only at 2.3 s, first token at 2.5 s, last at 3.1 s.
    late = record(0, 2.3, [(2.5, 1), (3.1, 4)], 3.2, scheduled_s=2.0)
    assert ttft_ms(late) == pytest.approx(500)
    assert e2el_ms(late) == pytest.approx(1100)
    assert tpot_ms(late) == pytest.approx(200)  # 600 ms for 3 tokens: the schedule plays no part


def test_a_single_chunk_has_no_time_per_token() -> None:
    one = record(0, 0.0, [(0.5, 3)], 0.6)
    assert tpot_ms(one) is None
    assert ttft_ms(one) == pytest.approx(500)
    assert e2el_ms(one) == pytest.approx(500)


def test_no_token_has_no_latency_at_all() -> None:
    none = record(0, 0.0, [], 0.6, error="HTTP 503")
    assert (ttft_ms(none), tpot_ms(none), e2el_ms(none)) == (None, None, None)


# --- the steady window and throughputs ---


def test_closed_loop_window_goes_from_full_to_the_first_empty_slot() -> None:
    # Both users are busy from B's send at 0.01; the last send is C's at 1.52, and the first
    # completion after it is B's at 2.02.
    window = steady_window(CLOSED)
    assert (window.start_s, window.end_s) == (0.01, 2.02)


def test_a_completion_that_makes_room_for_the_last_send_leaves_no_slot_empty() -> None:
    # As above, but C is sent in the very moment A finishes (a simulated clock does that): the
    # slots stay full until B finishes at 2.02.
    at_once = record(2, 1.51, [(2.12, 1), (3.12, 3)], 3.13)
    assert steady_window(measurement(A, B, at_once)).end_s == 2.02


def test_open_loop_window_goes_from_the_first_to_the_last_arrival() -> None:
    records = [
        record(i, due + 0.001, [(due + 0.2, 1), (due + 1.0, 5)], due + 1.1, scheduled_s=due)
        for i, due in enumerate((0.0, 1.0, 2.5))
    ]
    window = steady_window(measurement(*records, concurrency=None))
    assert (window.start_s, window.end_s) == (0.0, 2.5)


def test_without_a_steady_part_the_whole_counts() -> None:
    # Two slots for one request; and two arrivals within 0.1 s of a measurement of 3 s.
    alone = measurement(A)
    assert (steady_window(alone).start_s, steady_window(alone).end_s) == (0.0, 1.51)
    burst = measurement(
        record(0, 0.0, [(1.0, 1)], 1.1, scheduled_s=0.0),
        record(1, 0.1, [(3.0, 1)], 3.0, scheduled_s=0.1),
        concurrency=None,
    )
    assert (steady_window(burst).start_s, steady_window(burst).end_s) == (0.0, 3.0)
    assert steady_window(measurement()).duration_s == 0.0


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


def test_throughputs_are_those_of_the_window() -> None:
    # Window (0.01, 2.02], 2.01 s. Tokens inside: A 5; B 10 (its last chunk came at 2.01); C 0.
    # Finished inside: A at 1.51 and B at 2.02.
    assert observed("output_throughput_tps", CLOSED) == pytest.approx(15 / 2.01)
    assert observed("request_throughput_rps", CLOSED) == pytest.approx(2 / 2.01)


def test_goodput_counts_only_requests_that_keep_every_limit() -> None:
    # B (ttft 400, tpot 200) keeps both limits; A (500, 250) breaks the second one.
    limits = {"chat": {"ttft_p95_ms": 550.0, "tpot_p95_ms": 240.0}}
    assert observed("goodput_tps", CLOSED, limits) == pytest.approx(10 / 2.01)
    assert observed("goodput_rps", CLOSED, limits) == pytest.approx(1 / 2.01)


def test_limits_of_another_class_do_not_matter() -> None:
    limits = {"code": {"ttft_p95_ms": 1.0}}
    assert observed("goodput_rps", CLOSED, limits) == observed("request_throughput_rps", CLOSED)


def test_a_failed_request_brings_no_throughput() -> None:
    # B breaks off after its last chunk: its 10 tokens reached nobody as an answer, A's 5 did.
    broken = record(1, 0.01, [(0.41, 2), (1.21, 6), (2.01, 10)], 2.02, error="reset")
    failing = measurement(A, broken, C)
    assert observed("request_throughput_rps", failing) == pytest.approx(1 / 2.01)
    assert observed("goodput_tps", failing) == pytest.approx(5 / 2.01)
    assert observed("output_throughput_tps", failing) == pytest.approx(5 / 2.01)


def test_an_empty_measurement_has_no_throughput() -> None:
    assert math.isnan(observed("output_throughput_tps", measurement()))


# --- limits ---


def test_a_request_meets_its_limits_up_to_and_including_them() -> None:
    assert meets_limits(C, {"ttft_p95_ms": 600.1, "tpot_mean_ms": 500.1, "e2el_p50_ms": 1600.1})
    assert not meets_limits(C, {"ttft_p95_ms": 599.9})
    assert not meets_limits(C, {"ttft_p95_ms": 600.1, "e2el_p99_ms": 1599.9})
    exact = record(0, 0.0, [(0.5, 1)], 0.5)
    assert meets_limits(exact, {"ttft_p95_ms": 500.0})
    assert meets_limits(exact, {"tpot_p95_ms": 0.001})  # one chunk: there is no time per token
    assert not meets_limits(record(0, 0.0, [(0.5, 1)], 0.5, error="reset"), {})


def test_violation_is_relative_to_the_limit() -> None:
    # ttft 500, 400, 600: mean 500. tpot 250, 200, 500: median 250. e2el 1500, 2000, 1600.
    limits = {"chat": {"ttft_mean_ms": 400.0, "tpot_p50_ms": 500.0, "e2el_p50_ms": 1600.0}}
    found = violations(CLOSED, limits)
    assert found == {
        "chat.ttft_mean_ms": pytest.approx(0.25),  # (500 - 400) / 400
        "chat.tpot_p50_ms": pytest.approx(-0.5),  # (250 - 500) / 500
        "chat.e2el_p50_ms": pytest.approx(0.0),  # (1600 - 1600) / 1600
    }


def test_failed_requests_count_as_the_worst() -> None:
    # Nine requests at 100 ms and one that failed after 1 ms: the 95th percentile lies between the
    # two worst values, one of which is the failure. Counting only answers it would be 100.
    quick = [record(i, 0.0, [(0.1, 1), (0.2, 2)], 0.2) for i in range(9)]
    failed = record(9, 0.0, [], 0.001, error="HTTP 503")
    limits = {"chat": {"ttft_p95_ms": 200.0, "ttft_p50_ms": 200.0}}
    found = violations(measurement(*quick, failed), limits)
    assert found["chat.ttft_p95_ms"] > 1000
    assert found["chat.ttft_p50_ms"] == pytest.approx(-0.5)
    assert all(math.isfinite(value) for value in found.values())


def test_a_request_that_broke_off_counts_as_the_worst_too() -> None:
    # It has a first token, but no answer.
    broken = record(0, 0.0, [(0.1, 1)], 0.2, error="reset")
    found = violations(measurement(broken), {"chat": {"ttft_mean_ms": 200.0}})
    assert found["chat.ttft_mean_ms"] > 1000


def test_violations_look_at_each_class_alone() -> None:
    slow = record(3, 0.0, [(0.9, 1)], 1.0, class_name="code")
    limits = {"chat": {"ttft_mean_ms": 500.0}, "code": {"ttft_mean_ms": 450.0}}
    found = violations(measurement(A, B, C, slow), limits)
    assert found["chat.ttft_mean_ms"] == pytest.approx(0.0)
    assert found["code.ttft_mean_ms"] == pytest.approx(1.0)  # (900 - 450) / 450


# --- statistics over requests ---


def test_percentiles_interpolate_between_requests() -> None:
    # ttft of 100, 200, ..., 1100 ms: rank q * (11 - 1) gives p50 = 600, p90 = 1000, p95 = 1050,
    # p99 = 1090; mean 600.
    records = [record(i, 0.0, [((i + 1) * 0.1, 1)], 2.0) for i in range(11)]
    samples = samples_of(measurement(*records))
    found = {s: estimate(f"ttft_{s}_ms", samples) for s in ("mean", "p50", "p90", "p95", "p99")}
    assert found == pytest.approx({"mean": 600, "p50": 600, "p90": 1000, "p95": 1050, "p99": 1090})


def test_requests_without_a_value_are_left_out_of_its_statistics() -> None:
    single = record(3, 0.0, [(0.5, 1)], 0.6)
    samples = samples_of(measurement(A, B, C, single))
    assert estimate("tpot_mean_ms", samples) == pytest.approx(950 / 3)  # 250, 200, 500
    assert math.isnan(estimate("tpot_mean_ms", samples_of(measurement(single))))


def test_throughput_for_resampling_is_per_busy_second() -> None:
    # In flight: A 1.51 s, B 2.01 s, C 1.61 s, together 5.13 s; 18 tokens, 3 requests.
    samples = samples_of(CLOSED)
    assert estimate("output_throughput_tps", samples) == pytest.approx(18 / 5.13)
    assert estimate("request_throughput_rps", samples) == pytest.approx(3 / 5.13)


def test_samples_are_ordered_by_request() -> None:
    assert samples_of(measurement(C, A, B)).request_ids == (0, 1, 2)


def test_summary_holds_every_figure_and_none_where_there_is_none() -> None:
    summary = summarize(CLOSED)
    assert summary["ttft_mean_ms"] == pytest.approx(500)
    assert summary["tpot_p50_ms"] == pytest.approx(250)
    assert summary["output_throughput_tps"] == pytest.approx(15 / 2.01)
    assert summary["acceptance_length"] is None
    assert summary["acceptance_rate"] is None
    assert len(summary) == 4 + 3 * 5 + 2  # throughputs, latencies x statistics, acceptance
    assert set(summarize(measurement()).values()) == {None}


# --- counters ---


def counters(drafts: float, drafted: float, per_position: Sequence[float]) -> ServerCounters:
    return ServerCounters(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(per_position),
        num_accepted_tokens_per_pos=tuple(per_position),
        has_speculation=True,
    )


def test_acceptance_comes_from_the_counters() -> None:
    # 100 drafts of 3 tokens: 80, 50 and 20 of them had their first 1, 2 and 3 tokens accepted.
    some = counters(100, 300, [80, 50, 20])
    assert some.acceptance_length == pytest.approx(2.5)  # 1 + 150 / 100, bonus token included
    assert some.acceptance_rate == pytest.approx(0.5)  # 150 / 300
    assert some.per_position_acceptance_rates == pytest.approx((0.8, 0.5, 0.2))


def test_without_drafts_there_is_no_acceptance() -> None:
    none = ServerCounters(has_speculation=True)
    assert none.acceptance_length is None
    assert none.acceptance_rate is None
    assert none.per_position_acceptance_rates == ()


def test_difference_of_counters() -> None:
    before = counters(40, 120, [30, 20, 10])
    after = counters(140, 420, [110, 70, 30])
    spent = after.minus(before)
    assert spent == counters(100, 300, [80, 50, 20])


def test_difference_where_positions_appeared_in_between() -> None:
    # A server tells no position before its first draft.
    assert counters(100, 300, [80, 50, 20]).minus(ServerCounters()) == counters(
        100, 300, [80, 50, 20]
    )
    half = counters(10, 20, [5, 1])
    assert counters(110, 320, [85, 51, 20]).minus(half) == counters(100, 300, [80, 50, 20])


def test_acceptance_pools_measurements_by_their_drafts() -> None:
    # Position 0: (80 + 10) / (100 + 20) = 0.75. Position 1: (50 + 4) / 120 = 0.45.
    # Position 2 was drafted in the first alone: 20 / 100 = 0.2.
    first = measurement(A, counters=counters(100, 300, [80, 50, 20]))
    second = measurement(A, counters=counters(20, 40, [10, 4]))
    assert pooled_acceptance([first, second]) == pytest.approx((0.75, 0.45, 0.2))
    assert pooled_acceptance([measurement(A)]) == ()
    assert pooled_acceptance([]) == ()
    idle = measurement(A, counters=counters(0, 0, [0, 0]))
    assert pooled_acceptance([idle]) == (0.0, 0.0)


# --- records ---


def test_a_measurement_survives_json() -> None:
    original = measurement(A, B, C, counters=counters(100, 300, [80, 50, 20]))
    assert measurement_from_dict(json.loads(json.dumps(original.as_dict()))) == original


def test_errors_and_empty_answers_are_counted() -> None:
    failed = record(3, 0.0, [(0.1, 1)], 0.2, error="reset")
    empty = record(4, 0.0, [], 0.2)
    assert measurement(A, failed, empty).num_errors == 2
