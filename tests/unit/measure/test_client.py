"""The load generator against a server whose delays and token counts are known."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from mock_server import EVERY, MockServer, Truth

from autotune.measure.client import ClientFailed, Drive, LoadClient, MeasurementStopped
from autotune.measure.metrics import e2el_ms, tpot_ms, ttft_ms
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


def drive(client: LoadClient, server: MockServer, plan: Schedule) -> Drive:
    return client.run(plan, plan.requests, server.base_url, server.model)


def by_id(result: Drive) -> list[RequestRecord]:
    return sorted(result.records, key=lambda record: record.request_id)


def median_of(
    metric: Callable[[RequestRecord], float | None], records: tuple[RequestRecord, ...]
) -> float:
    return statistics.median(value for r in records if (value := metric(r)) is not None)


# --- what is measured is what the server did ---


def test_latencies_are_those_of_the_server(client: LoadClient) -> None:
    # 21 tokens in 21 chunks: first after 100 ms, then 20 steps of 20 ms = 400 ms more.
    with MockServer(Truth(first_token_s=0.1, step_s=0.02, num_output_tokens=21)) as server:
        result = drive(client, server, schedule(6, concurrency=3))

    assert median_of(tpot_ms, result.records) == pytest.approx(20.0, rel=0.05)
    assert median_of(ttft_ms, result.records) == pytest.approx(100.0, abs=15)
    assert median_of(e2el_ms, result.records) == pytest.approx(500.0, abs=25)


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
    assert median_of(tpot_ms, result.records) == pytest.approx(7.143, rel=0.05)


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

    assert ttft_ms(record) == pytest.approx(150.0, abs=25)


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

    assert 3 <= len(result.records) <= 4
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
    assert arrivals_s == pytest.approx([0.05 * i for i in range(6)], abs=0.02)
    assert [record.sent_s for record in records] == pytest.approx(
        [0.05 * i for i in range(6)], abs=0.02
    )
    assert [ttft_ms(record) for record in records] == pytest.approx(
        [100 + 50 * i for i in range(6)], abs=30
    )
    assert 0 <= result.audit.send_lateness_p99_ms < 20


def test_open_loop_stops_sending_at_the_time_limit(client: LoadClient) -> None:
    # Arrivals at 0, 50, 100, 150, 200 ms lie within 220 ms, the sixth at 250 ms does not.
    with MockServer() as server:
        result = drive(client, server, schedule(40, gap_s=0.05, max_duration_s=0.22))

    assert sorted(record.request_id for record in result.records) == [0, 1, 2, 3, 4]


# --- errors are data ---


@pytest.mark.parametrize(
    ("fault", "told", "num_tokens"),
    [
        ("http_429", "HTTP 429: .*Too many requests", 0),
        ("http_500", "HTTP 500: .*EngineCore encountered an issue", 0),
        ("http_503", "HTTP 503: .*overloaded", 0),
        ("error_in_stream", "error in the stream: EngineCore encountered an issue", 2),
        ("not_json", "JSONDecodeError", 2),
        ("reset", "ClientPayloadError|ClientOSError|ServerDisconnected|ConnectionReset", 2),
        ("truncated", "the stream ended in the middle of an answer", 2),
        ("empty", "empty output", 0),
    ],
)
def test_a_fault_is_recorded_and_hurts_no_other_request(
    client: LoadClient, fault: str, told: str, num_tokens: int
) -> None:
    with MockServer(Truth(num_output_tokens=5, faults={1: fault})) as server:
        first, failed, last = by_id(drive(client, server, schedule(3)))

    assert failed.error is not None
    assert not failed.is_ok
    assert failed.num_completion_tokens == num_tokens
    assert re.search(told, failed.error), failed.error
    _assert_ok(first)
    _assert_ok(last)


def _assert_ok(record: RequestRecord) -> None:
    assert record.error is None
    assert record.is_ok
    assert record.num_completion_tokens == 5


def test_an_event_that_is_no_object_is_recorded_too(own_client: LoadClient) -> None:
    with MockServer(Truth(num_output_tokens=5, faults={0: "not_an_object"})) as server:
        failed, last = by_id(drive(own_client, server, schedule(2)))

    assert failed.error is not None
    _assert_ok(last)


def test_a_prompt_that_no_utf8_can_hold_is_recorded_too(own_client: LoadClient) -> None:
    # A lone half of a surrogate pair is valid as an escape in JSON, but cannot be sent.
    odd, plain = schedule(2, max_tokens=5).requests
    odd = replace(odd, prompt=Prompt("odd", (("user", "half \ud83d"),)))
    with MockServer() as server:
        result = own_client.run(schedule(2), (odd, plain), server.base_url, "mock")
    failed, last = by_id(result)

    assert failed.error is not None
    _assert_ok(last)


def test_a_request_that_hangs_ends_at_its_own_time_limit(client: LoadClient) -> None:
    with MockServer(Truth(faults={0: "hang"})) as server:
        hung, last = by_id(drive(client, server, schedule(2, request_timeout_s=0.4)))

    assert hung.error == "timeout after 0.4 s"
    assert hung.finished_s - hung.sent_s == pytest.approx(0.4, abs=0.1)
    assert last.is_ok


def test_a_stream_that_goes_on_too_long_keeps_what_came(client: LoadClient) -> None:
    # A token every 100 ms, the first at 20 ms: within 400 ms come those at 20, 120, 220, 320 ms.
    with MockServer(Truth(step_s=0.1, num_output_tokens=50)) as server:
        (record,) = drive(client, server, schedule(1, request_timeout_s=0.4)).records

    assert record.error == "timeout after 0.4 s"
    assert 3 <= record.num_completion_tokens <= 4
    assert not record.is_ok


def test_nobody_listening_is_recorded(client: LoadClient) -> None:
    plan = schedule(3)
    result = client.run(plan, plan.requests, f"http://127.0.0.1:{free_port()}", "mock")

    assert len(result.records) == 3
    assert all("Cannot connect" in str(record.error) for record in result.records)


def test_all_requests_failing_still_ends_in_a_result(client: LoadClient) -> None:
    with MockServer(Truth(faults={EVERY: "http_503"})) as server:
        result = drive(client, server, schedule(10, concurrency=4))

    assert [record.is_ok for record in result.records] == [False] * 10


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
