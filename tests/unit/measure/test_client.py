"""The load generator against a server whose delays and token counts are known."""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from mock_server import EVERY, MockServer, Truth

from autotune.measure.client import ClientFailed, Drive, LoadClient, MeasurementStopped
from autotune.measure.client_worker import ERROR_KINDS
from autotune.measure.metrics import e2el_ms, meets_limits, tpot_ms, ttft_ms
from autotune.measure.records import RequestRecord
from autotune.serving.process import free_port
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def client() -> Iterator[LoadClient]:
    """One load generator for all tests that leave it alive, since it takes a second to start."""
    with LoadClient() as shared:
        yield shared


@pytest.fixture
def own_client() -> Iterator[LoadClient]:
    """A load generator that the test may break."""
    with LoadClient() as mine:
        yield mine


def schedule(
    count: int,
    *,
    concurrency: int | None = 1,
    gap_s: float | None = None,
    max_tokens: int = 4,
    endpoint: str = "chat",
    max_duration_s: float = 30.0,
    request_timeout_s: float = 10.0,
) -> Schedule:
    """Make a schedule: closed loop, or open loop with one arrival every `gap_s` seconds."""
    requests = tuple(
        ScheduledRequest(
            request_id=number,
            class_name="default",
            prompt=Prompt(f"prompt-{number}", (("user", f"say {number}"),)),
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=False,
            sampling_seed=100 + number,
            arrival_s=None if gap_s is None else number * gap_s,
        )
        for number in range(count)
    )
    return Schedule(
        endpoint=endpoint,
        concurrency=None if gap_s is not None else concurrency,
        requests=requests,
        warmup=(),
        max_duration_s=max_duration_s,
        request_timeout_s=request_timeout_s,
    )


def turns(
    conversation_id: int | None,
    *texts: str,
    first_id: int = 0,
    arrival_s: float | None = None,
    think_s: float = 0.0,
    is_live: bool = False,
    max_tokens: Sequence[int] = (1,),
) -> list[ScheduledRequest]:
    """Make the turns of one conversation, or one lone request where its id is None."""
    return [
        ScheduledRequest(
            request_id=first_id + number,
            class_name="default",
            prompt=Prompt(f"prompt-{first_id + number}", (("user", text),)),
            max_tokens=max_tokens[number % len(max_tokens)],
            temperature=0.0,
            top_p=1.0,
            ignore_eos=False,
            sampling_seed=1,
            arrival_s=arrival_s if number == 0 else None,
            conversation_id=conversation_id,
            turn=number,
            think_s=think_s,
            is_live=is_live,
        )
        for number, text in enumerate(texts)
    ]


def plan_of(
    requests: Sequence[ScheduledRequest], concurrency: int | None = 1, **changes: Any
) -> Schedule:
    return replace(schedule(0, concurrency=concurrency), requests=tuple(requests), **changes)


def drive(client: LoadClient, server: MockServer, plan: Schedule) -> Drive:
    return client.run(plan, plan.requests, server.base_url, server.model)


def by_id(result: Drive) -> list[RequestRecord]:
    return sorted(result.records, key=lambda record: record.request_id)


def median_of(
    metric: Callable[[RequestRecord], float | None], records: tuple[RequestRecord, ...]
) -> float:
    return statistics.median(value for r in records if (value := metric(r)) is not None)


def sent_tpot_ms(server: MockServer) -> float:
    """Say what the server really did, which a busy machine may have made slower than intended."""
    return statistics.median(
        (sent.last_sent_s - sent.first_sent_s) / (sent.num_tokens - sent.num_first_tokens) * 1e3
        for sent in server.app.sent
    )


# --- what is measured is what the server did ---


def test_latencies_are_those_of_the_server(client: LoadClient) -> None:
    # 21 tokens in 21 chunks: first after 100 ms, then 20 steps of 20 ms = 400 ms more.
    with MockServer(Truth(first_token_s=0.1, step_s=0.02, num_output_tokens=21)) as server:
        result = drive(client, server, schedule(6, concurrency=3))

    assert sent_tpot_ms(server) == pytest.approx(20.0, rel=0.3)
    assert median_of(tpot_ms, result.records) == pytest.approx(sent_tpot_ms(server), rel=0.1)
    assert median_of(ttft_ms, result.records) == pytest.approx(100.0, abs=40)
    assert median_of(e2el_ms, result.records) == pytest.approx(500.0, abs=60)


def test_tpot_counts_tokens_not_chunks(client: LoadClient) -> None:
    # Chunks of 2, 4, 1, 4, 1, 4 tokens = 16; the 5 gaps of 20 ms = 100 ms bring 14 tokens:
    # 100 / 14 = 7.143 ms per token.
    truth = Truth(
        first_token_s=0.05,
        step_s=0.02,
        first_chunk_tokens=2,
        tokens_per_step=(4, 1),
        num_output_tokens=16,
    )
    with MockServer(truth) as server:
        result = drive(client, server, schedule(8, concurrency=4))

    assert {record.chunk_tokens for record in result.records} == {(2, 6, 7, 11, 12, 16)}
    assert {record.num_completion_tokens for record in result.records} == {16}
    assert sent_tpot_ms(server) == pytest.approx(7.143, rel=0.5)
    assert median_of(tpot_ms, result.records) == pytest.approx(sent_tpot_ms(server), rel=0.15)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_both_endpoints_are_read_alike(client: LoadClient, endpoint: str) -> None:
    with MockServer(Truth(num_prompt_tokens=9, num_output_tokens=3)) as server:
        (record,) = drive(client, server, schedule(1, endpoint=endpoint)).records

    assert record.error is None
    assert record.is_ok
    assert record.chunk_tokens == (1, 2, 3)
    assert len(record.chunk_times_s) == 3
    assert record.num_prompt_tokens == 9
    assert record.finish_reason == "length"
    assert (record.class_name, record.prompt_id) == ("default", "prompt-0")
    assert server.seen[0].path == (
        "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    )


def test_a_chunk_without_tokens_is_not_the_first_token(client: LoadClient) -> None:
    # The role-only chunk comes at once; the first token only after 150 ms.
    with MockServer(Truth(first_token_s=0.15, sends_role_at_once=True)) as server:
        (record,) = drive(client, server, schedule(1)).records

    assert ttft_ms(record) == pytest.approx(150.0, abs=60)


@pytest.mark.parametrize("truth", [Truth(has_keep_alive=True), Truth(cuts_events=True)])
def test_comments_and_cut_events_change_nothing(client: LoadClient, truth: Truth) -> None:
    with MockServer(truth) as server:
        (record,) = drive(client, server, schedule(1, max_tokens=6)).records

    assert record.error is None
    assert record.chunk_tokens == (1, 2, 3, 4, 5, 6)


def test_each_request_is_sent_as_scheduled(client: LoadClient) -> None:
    with MockServer() as server:
        drive(client, server, schedule(2, max_tokens=3))
        body = server.seen[1].body

    assert body == {
        "model": "mock",
        "messages": [{"role": "user", "content": "say 1"}],
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 101,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_every_record_is_reported_as_it_arrives(client: LoadClient) -> None:
    reported: list[RequestRecord] = []
    plan = schedule(5, concurrency=2)
    with MockServer() as server:
        result = client.run(
            plan, plan.requests, server.base_url, "mock", on_record=reported.append
        )

    assert tuple(reported) == result.records
    assert sorted(record.request_id for record in reported) == [0, 1, 2, 3, 4]


def test_nothing_to_send_is_an_empty_result(client: LoadClient) -> None:
    assert client.run(schedule(0), (), "http://127.0.0.1:1", "mock").records == ()


# --- closed loop ---


def test_closed_loop_fills_but_never_exceeds_its_concurrency(client: LoadClient) -> None:
    with MockServer(Truth(first_token_s=0.03)) as server:
        result = drive(client, server, schedule(15, concurrency=3))
        peak = server.app.peak_in_flight

    assert len(result.records) == 15
    assert peak == 3
    assert result.audit.send_lateness_p99_ms == 0.0


def test_closed_loop_stops_sending_at_the_time_limit(client: LoadClient) -> None:
    # One token after 100 ms, one user: sends at 0, 100, 200, 300 ms; at 400 ms the 350 are over.
    truth = Truth(first_token_s=0.1, num_output_tokens=1)
    with MockServer(truth) as server:
        result = drive(client, server, schedule(50, max_duration_s=0.35))

    assert 2 <= len(result.records) <= 4
    assert all(record.is_ok for record in result.records)
    assert max(record.sent_s for record in result.records) <= 0.35


def test_warm_up_of_an_open_loop_goes_all_at_once(client: LoadClient) -> None:
    # Warm-up requests have no arrival times, and an open loop has no concurrency to keep to.
    plan = schedule(4, concurrency=None)
    with MockServer(Truth(first_token_s=0.1)) as server:
        result = drive(client, server, plan)
        peak = server.app.peak_in_flight

    assert len(result.records) == 4
    assert peak == 4


# --- open loop ---


def test_open_loop_keeps_its_times_while_the_server_stalls(client: LoadClient) -> None:
    # A request each 50 ms, but the server works on one at a time, 100 ms each: request i is
    # answered at 100 (i + 1) ms, so it waited 100 (i + 1) - 50 i = 100 + 50 i ms since its arrival.
    truth = Truth(first_token_s=0.1, num_output_tokens=1, num_slots=1)
    with MockServer(truth) as server:
        result = drive(client, server, schedule(6, gap_s=0.05))
        arrivals_s = [seen.at_s - server.seen[0].at_s for seen in server.seen]

    records = by_id(result)
    assert [record.scheduled_s for record in records] == [0.05 * i for i in range(6)]
    assert arrivals_s == pytest.approx([0.05 * i for i in range(6)], abs=0.06)
    assert [record.sent_s for record in records] == pytest.approx(
        [0.05 * i for i in range(6)], abs=0.06
    )
    assert [ttft_ms(record) for record in records] == pytest.approx(
        [100 + 50 * i for i in range(6)], abs=60
    )
    # A send is late at most by what the last one was late, and never early.
    assert 0 <= result.audit.send_lateness_p99_ms < 60


def test_open_loop_stops_sending_at_the_time_limit(client: LoadClient) -> None:
    # Arrivals at 0, 50, 100, 150, 200 ms lie within 220 ms, the sixth at 250 ms does not.
    with MockServer() as server:
        result = drive(client, server, schedule(40, gap_s=0.05, max_duration_s=0.22))

    assert sorted(record.request_id for record in result.records) == [0, 1, 2, 3, 4]


# --- conversations ---


def messages_seen(server: MockServer) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in seen.body["messages"]] for seen in server.seen]


@pytest.mark.parametrize("arrival_s", [None, 0.0])
def test_a_live_conversation_carries_the_server_s_own_answers(
    client: LoadClient, arrival_s: float | None
) -> None:
    # Answers of 2, 1 and 3 tokens, each a word: " w0 w1", " w0", " w0 w1 w2".
    requests = turns(
        5, "one", "two", "three", is_live=True, max_tokens=(2, 1, 3), arrival_s=arrival_s
    )
    opening = Prompt("opening", (("system", "be brief"), ("user", "one")))
    requests[0] = replace(requests[0], prompt=opening)
    with MockServer() as server:
        result = drive(client, server, plan_of(requests, None if arrival_s == 0 else 1))

    first = [("system", "be brief"), ("user", "one")]
    second = [*first, ("assistant", " w0 w1"), ("user", "two")]
    assert messages_seen(server) == [
        first,
        second,
        [*second, ("assistant", " w0"), ("user", "three")],
    ]
    assert [(r.conversation_id, r.turn) for r in by_id(result)] == [(5, 0), (5, 1), (5, 2)]


def test_a_live_conversation_is_one_text_at_the_completions_endpoint(client: LoadClient) -> None:
    requests = turns(5, "one", "two", is_live=True)
    with MockServer() as server:
        drive(client, server, plan_of(requests, endpoint="completions"))
    assert [seen.body["prompt"] for seen in server.seen] == ["one", "one\n\n w0\n\ntwo"]


def test_thoughts_are_not_told_to_the_server_again(client: LoadClient) -> None:
    requests = turns(5, "one", "two", is_live=True)
    with MockServer(Truth(text_key="reasoning_content")) as server:
        drive(client, server, plan_of(requests))
    assert messages_seen(server)[1] == [("user", "one"), ("assistant", ""), ("user", "two")]


def test_a_recorded_conversation_is_sent_as_it_was(client: LoadClient) -> None:
    requests = turns(5, "one", "two")
    recorded = (("user", "one"), ("assistant", "as recorded"), ("user", "two"))
    requests[1] = replace(requests[1], prompt=Prompt("second", recorded))
    with MockServer() as server:
        drive(client, server, plan_of(requests))
    assert messages_seen(server) == [[("user", "one")], list(recorded)]


def test_users_take_conversation_after_conversation(client: LoadClient) -> None:
    # Two users, three conversations of two turns, a lone request; the turns come mixed.
    pairs = [turns(c, "a", "b", first_id=10 * c) for c in (1, 2, 3)]
    lone = turns(None, "alone", first_id=99)
    mixed = [pairs[0][0], pairs[1][0], lone[0], pairs[2][1], pairs[1][1], pairs[0][1], pairs[2][0]]
    with MockServer(Truth(first_token_s=0.03)) as server:
        result = drive(client, server, plan_of(mixed, 2))

    by_sending = sorted(result.records, key=lambda record: record.sent_s)
    assert server.app.peak_in_flight == 2
    assert {r.request_id for r in by_sending[:2]} == {10, 20}
    # Each user stays with its conversation before it takes what comes next in the schedule.
    assert {r.request_id for r in by_sending[2:4]} == {11, 21}
    records = {record.request_id: record for record in result.records}
    assert len(records) == 7
    for first in (10, 20, 30):
        assert records[first + 1].sent_s >= records[first].finished_s


def test_a_user_thinks_before_each_request(client: LoadClient) -> None:
    # 100 ms of thought, 50 ms until the only token: sends at 100, 250, 400, 550 ms.
    requests = [
        *turns(1, "a", "b", think_s=0.1),
        *turns(None, "c", first_id=2, think_s=0.1),
        *turns(None, "d", first_id=3, think_s=0.1),
    ]
    with MockServer(Truth(first_token_s=0.05)) as server:
        result = drive(client, server, plan_of(requests))

    records = by_id(result)
    for record, earliest_s in zip(records, [0.1, 0.25, 0.4, 0.55], strict=True):
        assert earliest_s <= record.sent_s < earliest_s + 0.15
    assert [r.think_s for r in records] == [0.1] * 4
    assert {r.scheduled_s for r in records} == {None}


def test_a_later_turn_of_an_open_loop_is_due_after_the_answer_and_the_thought(
    client: LoadClient,
) -> None:
    # The server works on one request at a time, 100 ms each. The conversation's first turn arrives at
    # 0 and is answered at 100 ms; its second is due at 150 ms. A lone request arrived at 90 ms and
    # is worked on from 100 to 200 ms, so the second turn's answer comes at 300 ms: TTFT 150 ms.
    requests = [
        *turns(1, "a", "b", think_s=0.05, arrival_s=0.0),
        *turns(None, "c", first_id=2, arrival_s=0.09),
    ]
    with MockServer(Truth(first_token_s=0.1, num_slots=1)) as server:
        result = drive(client, server, plan_of(requests, None))

    first, second, lone = by_id(result)
    assert (first.scheduled_s, lone.scheduled_s) == (0.0, 0.09)
    assert second.scheduled_s == pytest.approx(first.finished_s + 0.05, abs=0.02)
    assert ttft_ms(first) == pytest.approx(100, abs=50)
    assert ttft_ms(lone) == pytest.approx(110, abs=50)
    assert ttft_ms(second) == pytest.approx(150, abs=60)


def test_conversations_of_an_open_loop_do_not_wait_for_each_other(client: LoadClient) -> None:
    # Given out of order; each takes 200 ms a turn, and they begin 50 ms apart.
    late = turns(2, "a", "b", arrival_s=0.05, first_id=20)
    requests = [late[1], late[0], *turns(1, "a", "b", arrival_s=0.0, first_id=10)]
    with MockServer(Truth(first_token_s=0.2)) as server:
        result = drive(client, server, plan_of(requests, None))

    sent_s = {record.request_id: record.sent_s for record in result.records}
    assert sorted(sent_s, key=sent_s.__getitem__) == [10, 20, 11, 21]
    assert 0.05 <= sent_s[20] < 0.2
    assert None not in {record.scheduled_s for record in result.records}


@pytest.mark.parametrize("arrival_s", [None, 0.0])
def test_the_turns_after_a_failed_one_are_failed_too(
    client: LoadClient, arrival_s: float | None
) -> None:
    requests = [
        *turns(1, "a", "b", "c", "d", arrival_s=arrival_s, is_live=True),
        *turns(None, "e", first_id=4, arrival_s=None if arrival_s is None else 0.3),
    ]
    with MockServer(Truth(faults={1: "http_500"})) as server:
        result = drive(client, server, plan_of(requests, 1 if arrival_s is None else None))

    records = by_id(result)
    kinds = [record.error_kind for record in records]
    assert kinds == [None, "http_5xx", "previous_turn", "previous_turn", None]
    assert len(server.seen) == 3
    # They are misses of every limit, and were given up when the turn before them ended.
    assert not any(meets_limits(record, {"ttft_p95_ms": 1e9}) for record in records[1:4])
    assert [r.finished_s for r in records[2:4]] == pytest.approx(
        [records[1].finished_s] * 2, abs=0.1
    )
    assert [r.scheduled_s is None for r in records] == [arrival_s is None] * 5


@pytest.mark.parametrize("arrival_s", [None, 0.0])
def test_no_turn_is_sent_after_the_time_limit(client: LoadClient, arrival_s: float | None) -> None:
    # The second turn would be due after 10 s of thought; the run does not wait for it.
    second, *_ = turns(1, "a", "b", think_s=10.0)[1:]
    requests = [*turns(1, "a", arrival_s=arrival_s), second]
    began = time.monotonic()
    with MockServer() as server:
        plan = plan_of(requests, 1 if arrival_s is None else None, max_duration_s=0.5)
        result = drive(client, server, plan)
    assert [record.request_id for record in result.records] == [0]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("conversation_id", [None, 1])
def test_an_open_loop_needs_the_arrival_of_each_first_turn(
    client: LoadClient, conversation_id: int | None
) -> None:
    requests = [
        *turns(7, "a", arrival_s=0.0),
        *turns(conversation_id, "b", first_id=1),
    ]
    plan = plan_of(requests, None)
    with pytest.raises(ValueError, match="request 1 has no arrival time"):
        client.run(plan, plan.requests, "http://127.0.0.1:1", "mock")


# --- servers of other kinds ---


def test_tpot_is_exact_with_a_server_that_counts_at_the_end(client: LoadClient) -> None:
    # Chunks of 1, 4, 1, 4 tokens 40 ms apart: 120 ms for 9 tokens after the first = 13.33 ms. By
    # chunks it would be 40 ms.
    truth = Truth(
        step_s=0.04, tokens_per_step=(4, 1), num_output_tokens=10, has_continuous_usage=False
    )
    with MockServer(truth) as server:
        result = drive(client, server, schedule(6, concurrency=3))

    assert sent_tpot_ms(server) == pytest.approx(13.33, rel=0.5)
    assert median_of(tpot_ms, result.records) == pytest.approx(sent_tpot_ms(server), rel=0.15)
    assert {r.num_completion_tokens for r in result.records} == {10}
    # Between 1 and 10 the counts are spread evenly: 1 + 9 * i // 3.
    assert {r.chunk_tokens for r in result.records} == {(1, 4, 7, 10)}


@pytest.mark.parametrize(
    "truth",
    [
        Truth(has_done=False),
        Truth(final_usage_falls_short=2),
        Truth(text_key="reasoning"),
        Truth(text_key="tool_calls"),
        Truth(word=" caf\u00e9 \u20ac \U0001f600", cuts_events=True),
        Truth(has_final_usage=False),
    ],
)
def test_variants_of_the_protocol_are_read_alike(client: LoadClient, truth: Truth) -> None:
    with MockServer(truth) as server:
        (record,) = drive(client, server, schedule(1, max_tokens=5)).records

    assert record.error is None
    assert record.chunk_tokens == (1, 2, 3, 4, 5)
    assert record.num_completion_tokens == 5


# --- texts ---


def test_no_answer_is_kept_unless_asked_for(client: LoadClient) -> None:
    plan = schedule(1, max_tokens=3)
    with MockServer() as server:
        (without,) = drive(client, server, plan).records
        (with_text,) = drive(client, server, replace(plan, keeps_outputs=True)).records
    assert (without.output_text, with_text.output_text) == (None, " w0 w1 w2")


@pytest.mark.parametrize("text_key", ["content", "reasoning"])
def test_an_answer_that_loops_is_marked(client: LoadClient, text_key: str) -> None:
    plan = schedule(1, max_tokens=60)
    quick = Truth(first_token_s=0.0, step_s=0.0, text_key=text_key)
    with MockServer(quick) as server:
        (varied,) = drive(client, server, plan).records
    with MockServer(replace(quick, word=" again")) as server:  # 60 x 6 characters
        (looping,) = drive(client, server, plan).records
    assert (varied.is_looping, looping.is_looping) == (False, True)
    assert looping.is_ok
    assert looping.output_text is None


def test_fields_of_the_profile_are_sent_but_cannot_turn_the_counts_off(client: LoadClient) -> None:
    (request,) = schedule(1).requests
    extra: Mapping[str, Any] = {"top_k": 5, "stream": False, "stream_options": {}}
    with MockServer() as server:
        result = drive(client, server, plan_of([replace(request, extra_body=extra)]))
    body = server.seen[0].body
    assert body["top_k"] == 5
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert result.records[0].is_ok


# --- the audit ---


def test_the_audit_counts_what_came_and_what_it_cost(client: LoadClient) -> None:
    # 12 answers of 4 chunks of 3, 5, 5, 5 tokens, and a failed one that brought 2 chunks.
    truth = Truth(
        first_chunk_tokens=3, tokens_per_step=(5,), num_output_tokens=18, faults={4: "truncated"}
    )
    with MockServer(truth) as server:
        audit = drive(client, server, schedule(13, gap_s=0.02)).audit

    assert audit.num_chunks == 12 * 4 + 2
    assert 1.0 <= audit.chunks_per_read < 1.5
    assert 0.0 < audit.cpu_ratio < 1.0
    assert 0.0 < audit.loop_lag_p99_ms < 1000
    assert 0.0 <= audit.send_lateness_p99_ms < 1000


def test_each_run_has_an_audit_of_its_own(client: LoadClient) -> None:
    with MockServer() as server:
        audits = [drive(client, server, schedule(n, max_tokens=5)).audit for n in (3, 1)]
    assert [audit.num_chunks for audit in audits] == [15, 5]


# --- errors are data ---


@pytest.mark.parametrize(
    ("fault", "kind", "told", "num_tokens"),
    [
        ("http_400", "http_4xx", "HTTP 400: .*maximum context length", 0),
        ("http_429", "http_429", "HTTP 429: .*Too many requests", 0),
        ("http_500", "http_5xx", "HTTP 500: .*EngineCore encountered an issue", 0),
        ("http_503", "http_503", "HTTP 503: .*overloaded", 0),
        ("error_in_stream", "stream_error", "error in the stream: EngineCore encountered", 2),
        ("aborted", "stream_error", "the server gave the answer up: abort", 2),
        ("not_json", "protocol", "an event of 5 bytes is not JSON", 2),
        ("not_an_object", "protocol", "an event is JSON, but no object", 2),
        ("wrong_shape", "protocol", "`choices` of an event is of type str", 2),
        ("huge_event", "protocol", "an event of more than 16 MiB", 2),
        ("not_a_stream", "protocol", "the answer is no stream of events", 0),
        ("reset", "reset", "ClientPayloadError|ClientOSError|ServerDisconnected", 2),
        ("truncated", "truncated", "the stream ended in the middle of an answer", 2),
        ("empty", "empty", "empty output", 0),
    ],
)
def test_a_fault_is_recorded_and_hurts_no_other_request(
    client: LoadClient, fault: str, kind: str, told: str, num_tokens: int
) -> None:
    with MockServer(Truth(num_output_tokens=5, faults={1: fault})) as server:
        first, failed, last = by_id(drive(client, server, schedule(3)))
        num_seen = len(server.seen)

    assert failed.error is not None
    assert not failed.is_ok
    assert failed.error_kind == kind
    assert failed.num_completion_tokens == num_tokens
    assert re.search(told, failed.error), failed.error
    assert num_seen == 3, "a request was sent again"
    _assert_ok(first)
    _assert_ok(last)


def _assert_ok(record: RequestRecord) -> None:
    assert (record.error, record.error_kind) == (None, None)
    assert record.is_ok
    assert record.num_completion_tokens == 5


def test_a_server_that_never_counts_is_no_server_to_measure(client: LoadClient) -> None:
    with MockServer(Truth(has_continuous_usage=False, has_final_usage=False)) as server:
        (record,) = drive(client, server, schedule(1)).records
    assert record.error_kind == "protocol"
    assert record.error == "the server did not say how many tokens it sent"
    assert record.num_completion_tokens == 0


def test_a_prompt_that_no_utf8_can_hold_is_recorded_too(own_client: LoadClient) -> None:
    # A lone half of a surrogate pair is valid as an escape in JSON, but cannot be sent.
    odd, plain = schedule(2, max_tokens=5).requests
    odd = replace(odd, prompt=Prompt("odd", (("user", "half \ud83d"),)))
    with MockServer() as server:
        result = own_client.run(schedule(2), (odd, plain), server.base_url, "mock")
    failed, last = by_id(result)

    assert failed.error_kind == "protocol"
    assert failed.error == "the prompt cannot be encoded as UTF-8"
    _assert_ok(last)


def test_a_request_that_hangs_ends_at_its_own_time_limit(client: LoadClient) -> None:
    with MockServer(Truth(faults={0: "hang"})) as server:
        hung, last = by_id(drive(client, server, schedule(2, request_timeout_s=0.4)))

    assert (hung.error, hung.error_kind) == ("timeout after 0.4 s", "timeout")
    assert 0.4 <= hung.finished_s - hung.sent_s < 0.8
    assert last.is_ok


def test_a_stream_that_goes_on_too_long_keeps_what_came(client: LoadClient) -> None:
    # A token every 100 ms, the first at 20 ms: within 400 ms come those at 20, 120, 220, 320 ms.
    with MockServer(Truth(step_s=0.1, num_output_tokens=50)) as server:
        (record,) = drive(client, server, schedule(1, request_timeout_s=0.4)).records

    assert record.error == "timeout after 0.4 s"
    assert 2 <= record.num_completion_tokens <= 4
    assert not record.is_ok


def test_nobody_listening_is_recorded(client: LoadClient) -> None:
    plan = schedule(3)
    result = client.run(plan, plan.requests, f"http://127.0.0.1:{free_port()}", "mock")

    assert len(result.records) == 3
    assert all("Cannot connect" in str(record.error) for record in result.records)
    assert {record.error_kind for record in result.records} == {"refused"}


def test_all_requests_failing_still_ends_in_a_result(client: LoadClient) -> None:
    with MockServer(Truth(faults={EVERY: "http_503"})) as server:
        result = drive(client, server, schedule(10, concurrency=4))

    assert [record.is_ok for record in result.records] == [False] * 10


@contextmanager
def raw_server(*pieces: bytes) -> Iterator[str]:
    """Answer one connection with these bytes, piece by piece, and close it; yield the address."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ONE = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":1}}'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":2}}'


@pytest.mark.parametrize(
    ("pieces", "kind", "num_tokens"),
    [
        # The body goes on to the end of the connection: all is well if the answer is whole.
        ((HEAD + b"\r\n" + ONE + b"\r\n\r", b"\n" + LAST + b"\r\n\r\n"), None, 2),
        ((HEAD + b"\r\n" + ONE + b"\n\n",), "truncated", 1),
        # A body of announced length that stops early, and a connection that says nothing.
        ((HEAD + b"Content-Length: 9999\r\n\r\n" + ONE + b"\n\n",), "reset", 1),
        ((b"",), "reset", 0),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "protocol", 0),
        ((b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",), "protocol", 0),
        ((b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n\xff\xfe",), "http_5xx", 0),
    ],
)
def test_odd_servers_are_no_more_than_failed_requests(
    own_client: LoadClient, pieces: Sequence[bytes], kind: str | None, num_tokens: int
) -> None:
    plan = schedule(1)
    with raw_server(*pieces) as base_url:
        (record,) = own_client.run(plan, plan.requests, base_url, "mock").records

    assert record.error_kind == kind
    assert record.num_completion_tokens == num_tokens
    assert (record.error is None) == (kind is None)


def test_every_kind_of_error_has_a_name() -> None:
    assert set(ERROR_KINDS) == {
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
    }


# --- stopping, dying ---


def _child_pids() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def test_being_stopped_ends_the_process(
    is_running: Callable[[int], bool], no_process_left: None
) -> None:
    before = _child_pids()
    seen: list[RequestRecord] = []
    plan = schedule(200)
    with MockServer(Truth(first_token_s=0.05)) as server, LoadClient() as client:
        (pid,) = _child_pids() - before
        with pytest.raises(MeasurementStopped):
            client.run(
                plan,
                plan.requests,
                server.base_url,
                "mock",
                on_record=seen.append,
                should_stop=lambda: len(seen) >= 3,
            )
        assert not is_running(pid)

    assert 3 <= len(seen) <= 4


def test_being_stopped_does_not_wait_for_an_answer(no_process_left: None) -> None:
    began = time.monotonic()
    plan = schedule(1)
    with (
        MockServer(Truth(faults={0: "hang"})) as server,
        LoadClient() as client,
        pytest.raises(MeasurementStopped),
    ):
        client.run(
            plan,
            plan.requests,
            server.base_url,
            "mock",
            should_stop=lambda: len(server.seen) > 0,
        )
    assert time.monotonic() - began < 5


_PARENT = """
import sys
from autotune.measure.client import LoadClient
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

request = ScheduledRequest(0, "default", Prompt("p", (("user", "hi"),)), 4, 0.0, 1.0, False, 1, None)
client = LoadClient()
print(client._process.pid, flush=True)
client.run(Schedule("chat", 1, (request,), (), 30.0, 30.0), (request,), sys.argv[1], "mock")
"""


def test_the_process_ends_with_a_parent_that_was_killed(
    wait_until: Callable[..., bool], is_running: Callable[[int], bool]
) -> None:
    with MockServer(Truth(faults={0: "hang"})) as server:
        parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, server.base_url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with parent:
            assert parent.stdout is not None
            worker_pid = int(parent.stdout.readline())
            assert wait_until(lambda: len(server.seen) == 1, 20)
            assert is_running(worker_pid)
            parent.kill()
        assert wait_until(lambda: not is_running(worker_pid), 10)


def test_a_load_generator_that_died_is_said_so(own_client: LoadClient) -> None:
    plan = schedule(3)
    with MockServer(Truth(faults={EVERY: "hang"})) as server:

        def kill_once_sent() -> bool:
            if server.seen:
                own_client._process.kill()
            return False

        with pytest.raises(ClientFailed, match="ended with code -9"):
            own_client.run(
                plan, plan.requests, server.base_url, "mock", should_stop=kill_once_sent
            )


def test_a_load_generator_that_died_can_be_asked_and_closed_again(own_client: LoadClient) -> None:
    with MockServer() as server:
        drive(own_client, server, schedule(1))
        own_client._process.kill()
        own_client._process.wait()
        with pytest.raises(ClientFailed):
            drive(own_client, server, schedule(1))
        with pytest.raises(ClientFailed):
            drive(own_client, server, schedule(1))
    own_client.close()
    own_client.close()


def test_a_closed_load_generator_says_so(own_client: LoadClient) -> None:
    with MockServer() as server:
        drive(own_client, server, schedule(1))
        own_client.close()
        with pytest.raises(ClientFailed):
            drive(own_client, server, schedule(1))
