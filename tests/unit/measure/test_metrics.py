"""Definitions, checked on records made by hand; the arithmetic stands beside each number."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from record_helpers import measurement, record

from autotune.measure.metrics import (
    Latency,
    e2el_ms,
    error_counts,
    estimate,
    icl_ms,
    latency_of,
    meets_limits,
    observed,
    quotient_parts,
    samples_of,
    summarize,
    tpot_ms,
    ttft_ms,
    violations,
)
from autotune.measure.records import RequestRecord, ServerCounters, measurement_from_dict

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


# --- throughputs ---


def test_throughputs_are_those_of_the_window() -> None:
    # Window (0.01, 2.02], 2.01 s. Tokens inside: A 5; B 10 (its last chunk came at 2.01); C 0.
    # Of A's time 1.50 of 1.51 s lie inside, of B's all, of C's 0.50 of 1.61 s.
    assert observed("output_throughput_tps", CLOSED) == pytest.approx(15 / 2.01)
    requests = 1.50 / 1.51 + 1 + 0.50 / 1.61
    assert observed("request_throughput_rps", CLOSED) == pytest.approx(requests / 2.01)


def test_answers_that_end_together_at_the_edge_are_not_lost() -> None:
    # Four slots in step, 12 answers of 1 s each, 4 a second. The slots do not end at quite the same
    # moment, so counting completions up to the first empty slot would find 9.
    together = [
        record(4 * i + slot, i + slot * 1e-4, [(i + 1 + slot * 1e-4, 8)], i + 1 + slot * 1e-4)
        for i in range(3)
        for slot in range(4)
    ]
    found = observed("request_throughput_rps", measurement(*together, concurrency=4))
    assert found == pytest.approx(4, rel=1e-3)


def test_goodput_counts_only_requests_that_keep_every_limit() -> None:
    # B (ttft 400, tpot 200) keeps both limits; A (500, 250) breaks the second one.
    limits = {"chat": {"ttft_p95_ms": 550.0, "tpot_p95_ms": 240.0}}
    assert observed("goodput_tps", CLOSED, limits) == pytest.approx(10 / 2.01)
    assert observed("goodput_rps", CLOSED, limits) == pytest.approx(1 / 2.01)
    assert observed("slo_attainment_ratio", CLOSED, limits) == pytest.approx(1 / 3)  # C has 600 ms


def test_limits_of_another_class_do_not_matter() -> None:
    limits = {"code": {"ttft_p95_ms": 1.0}}
    assert observed("goodput_rps", CLOSED, limits) == observed("request_throughput_rps", CLOSED)


def test_a_failed_request_brings_no_throughput() -> None:
    # B breaks off after its last chunk: its 10 tokens reached nobody as an answer, A's 5 did.
    broken = record(1, 0.01, [(0.41, 2), (1.21, 6), (2.01, 10)], 2.02, error="reset")
    failing = measurement(A, broken, C)
    answered = 1.50 / 1.51 + 0.50 / 1.61
    assert observed("request_throughput_rps", failing) == pytest.approx(answered / 2.01)
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


def test_a_throughput_is_a_quotient_of_sums_over_requests() -> None:
    # Slot time inside (0.01, 2.02]: A 1.50, B 2.01, C 0.50, together 4.01; it is scaled to the
    # window's 2.01 s, because two slots share it.
    tokens, slot_s = quotient_parts("output_throughput_tps", samples_of(CLOSED))
    assert tokens == pytest.approx([5, 10, 0])
    assert slot_s == pytest.approx([1.50 / 4.01 * 2.01, 2.01 / 4.01 * 2.01, 0.50 / 4.01 * 2.01])


def test_thinking_is_part_of_a_users_cycle() -> None:
    # One user: 10 tokens in 1 s, then 3 s of thinking, three times. 30 tokens in 9 s; the cycles are
    # 1, 4 and 4 s.
    records = [
        record(i, sent_s, [(sent_s + 1, 10)], sent_s + 1, think_s=think_s)
        for i, (sent_s, think_s) in enumerate([(0.0, 0.0), (4.0, 3.0), (8.0, 3.0)])
    ]
    samples = samples_of(measurement(*records, concurrency=1))
    assert estimate("output_throughput_tps", samples) == pytest.approx(30 / 9)
    assert samples.window_slot_s == pytest.approx([1, 4, 4])


def test_in_open_loop_the_window_is_shared_by_the_arrivals_inside() -> None:
    # Arrivals at 0, 1, 2; each brings 6 tokens 0.1 s later. The first one is the ramp, so the window
    # is 0.1 to 2, with one answer inside and two arrivals.
    records = [
        record(i, due, [(due + 0.1, 6)], due + 0.1, scheduled_s=due)
        for i, due in enumerate((0.0, 1.0, 2.0))
    ]
    samples = samples_of(measurement(*records, concurrency=None))
    assert estimate("output_throughput_tps", samples) == pytest.approx(6 / 1.9)
    assert samples.window_slot_s == pytest.approx([0, 0.95, 0.95])
    assert samples.is_open_loop


def test_samples_are_ordered_by_request() -> None:
    assert [r.request_id for r in samples_of(measurement(C, A, B)).records] == [0, 1, 2]


def test_turns_of_a_conversation_hang_together_by_its_first_prompt() -> None:
    turns = [
        record(i, 0.0, [(1.0, 1)], 1.0, prompt_id=prompt, conversation_id=conversation, turn=turn)
        for i, (prompt, conversation, turn) in enumerate(
            [("b2", 7, 1), ("b1", 7, 0), ("b1", 9, 0), ("c", None, 0), ("d", 11, 3)]
        )
    ]
    # Conversations 7 and 9 run the same script. Of 11 the earlier turns are missing.
    assert samples_of(measurement(*turns)).clusters == ("b1", "b1", "b1", "c", "d")


def test_summary_holds_every_figure_and_none_where_there_is_none() -> None:
    summary = summarize(CLOSED)
    assert summary["ttft_mean_ms"] == pytest.approx(500)
    assert summary["tpot_p50_ms"] == pytest.approx(250)
    assert summary["output_throughput_tps"] == pytest.approx(15 / 2.01)
    assert summary["slo_attainment_ratio"] == 1
    assert summary["error_ratio"] == 0
    assert summary["acceptance_length"] is None
    assert summary["acceptance_rate"] is None
    # Throughputs, attainment, latencies x statistics, ICL, errors, acceptance.
    assert len(summary) == 4 + 1 + 3 * 5 + 4 + 1 + 2
    assert set(summarize(measurement()).values()) == {None}


# --- gaps between chunks ---


def test_gaps_are_between_chunks_whatever_they_hold() -> None:
    # A: 0.5, 0.5; B: 0.8, 0.8; C: 0.5, 0.5 s. Sorted: 500 x 4, 800 x 2; p95 at rank 4.75 is 800.
    assert icl_ms(B) == pytest.approx([800, 800])
    assert len(icl_ms(record(0, 0.0, [(0.5, 3)], 0.6))) == 0
    summary = summarize(CLOSED)
    assert summary["icl_p50_ms"] == pytest.approx(500)
    assert summary["icl_p95_ms"] == pytest.approx(800)
    assert summary["icl_max_ms"] == pytest.approx(800)
    assert "icl_mean_ms" not in summary


def test_a_limit_on_gaps_is_on_the_requests_own() -> None:
    # Gaps of 100, 100 and 700 ms: the median is 100, the largest 700, p95 at rank 1.9 is 640.
    stutter = record(0, 0.0, [(0.1, 1), (0.2, 2), (0.3, 3), (1.0, 4)], 1.0)
    assert meets_limits(stutter, {"icl_p50_ms": 100.1, "icl_p95_ms": 640.1, "icl_max_ms": 700.1})
    assert not meets_limits(stutter, {"icl_p95_ms": 639.9})
    assert meets_limits(record(0, 0.0, [(0.1, 1)], 0.1), {"icl_max_ms": 1.0})  # there is no gap


def test_a_failed_request_stands_for_as_many_worst_gaps_as_an_answer_has() -> None:
    # Nine answers of two gaps each and a failure: 18 gaps of 100 ms and 2 of the worst, 10 % of all.
    # p90 lies at rank 0.9 x 19 = 17.1, between the last good one and the first bad one.
    quick = [record(i, 0.0, [(0.1, 1), (0.2, 2), (0.3, 3)], 0.3) for i in range(9)]
    failed = record(9, 0.0, [], 0.001, error="HTTP 503")
    limits = {"chat": {"icl_p50_ms": 200.0, "icl_p90_ms": 200.0}}
    found = violations(measurement(*quick, failed), limits)
    assert found["chat.icl_p50_ms"] == pytest.approx(-0.5)
    assert found["chat.icl_p90_ms"] > 1000


@pytest.mark.parametrize("name", ["itl_p95_ms", "ttft_p42_ms", "icl_p95", "output_throughput_tps"])
def test_other_names_are_no_latencies(name: str) -> None:
    assert latency_of(name) is None


def test_a_latency_name_tells_metric_and_statistic() -> None:
    assert latency_of("icl_p99_ms") == Latency("icl", "p99")
    assert Latency("icl", "p99").percentile == 99
    assert Latency("icl", "max").percentile is None
    assert Latency("ttft", "mean").percentile is None


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


# --- records ---


def test_a_measurement_survives_json() -> None:
    original = measurement(A, B, C, counters=counters(100, 300, [80, 50, 20]))
    assert measurement_from_dict(json.loads(json.dumps(original.as_dict()))) == original


def test_errors_and_empty_answers_are_counted() -> None:
    failed = record(3, 0.0, [(0.1, 1)], 0.2, error="reset")
    empty = record(4, 0.0, [], 0.2)
    late = [record(5 + i, 0.0, [], 9.0, error="no answer", error_kind="timeout") for i in range(2)]
    mixed = measurement(A, failed, empty, *late)
    assert mixed.num_errors == 4
    assert error_counts(mixed) == {"timeout": 2, "unknown": 1, "empty": 1}
    assert summarize(mixed)["error_ratio"] == pytest.approx(4 / 5)
    assert error_counts(CLOSED) == {}
