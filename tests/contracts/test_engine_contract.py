"""What every engine must do, whatever serves: one suite, a subclass per engine.

An engine that needs vLLM is put through it in a test module of its own, with its own `engine`,
`config_for` and loads that suit its speed. Where a launch is dear, `ServerContract` can be given a
class-scoped `server`: its tests leave the server usable, and each launch of `LaunchContract` is
over when its test ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.measure.client import MeasurementStopped
from autotune.measure.metrics import steady_window, summarize
from autotune.measure.records import (
    Measurement,
    RequestRecord,
    ServerCounters,
    measurement_from_dict,
)
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, EngineSettings, LaunchContext, Server
from autotune.serving.replay import RecordingWriter, ReplayEngine, recording_header
from autotune.serving.simulated import SimulatedEngine
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest


class Loads:
    """What the suite serves and sends; subclasses change it where they must."""

    num_requests = 12
    concurrency = 3
    max_tokens = 24
    rps = 20.0
    k = 3
    max_duration_s = 120.0

    def config_for(self, k: int) -> ServingConfig:
        """Return a config that the engine can serve with K draft tokens."""
        return config_for(k)

    def closed_loop(self) -> Schedule:
        return make_schedule(self.requests(), self.concurrency, self.max_duration_s)

    def open_loop(self) -> Schedule:
        requests = self.requests(gap_s=1 / self.rps)
        return make_schedule(requests, None, self.max_duration_s)

    def requests(self, gap_s: float | None = None) -> tuple[ScheduledRequest, ...]:
        return tuple(
            make_request(number, self.max_tokens, None if gap_s is None else number * gap_s)
            for number in range(self.num_requests)
        )


class LaunchContract(Loads):
    """Tests that launch servers of their own, one at a time."""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def context(self, tmp_path: Path) -> LaunchContext:
        return LaunchContext(work_dir=tmp_path, name="launch-1")

    def test_it_says_what_it_is_before_anything_is_launched(self, engine: Engine) -> None:
        info = engine.describe()

        assert info.engine
        assert info.version
        assert info.hardware

    def test_a_launch_takes_time_on_the_engines_clock(
        self, engine: Engine, context: LaunchContext
    ) -> None:
        before_s = engine.clock.now_s()

        with engine.launch(self.config_for(0), context) as server:
            passed_s = engine.clock.now_s() - before_s
            assert passed_s == pytest.approx(server.report.launch_s, rel=0.05, abs=1.0)

    def test_a_launch_can_be_given_up(self, engine: Engine, tmp_path: Path) -> None:
        context = LaunchContext(work_dir=tmp_path, name="given-up", should_stop=lambda: True)

        with pytest.raises(MeasurementStopped):
            engine.launch(self.config_for(self.k), context)

    def test_closing_twice_is_fine(self, engine: Engine, context: LaunchContext) -> None:
        with engine.launch(self.config_for(0), context) as server:
            pass

        server.close()

    def test_without_speculation_nothing_is_drafted(
        self, engine: Engine, context: LaunchContext
    ) -> None:
        with engine.launch(self.config_for(0), context) as server:
            assert not server.counters().has_speculation
            measurement = server.measure(self.closed_loop())

        assert not measurement.counters.has_speculation
        assert measurement.counters.num_drafts == 0
        assert measurement.counters.acceptance_length is None
        assert measurement.counters.acceptance_rate is None

    def test_a_measurement_can_be_stopped(self, engine: Engine, context: LaunchContext) -> None:
        seen: list[RequestRecord] = []

        with (
            engine.launch(self.config_for(self.k), context) as server,
            pytest.raises(MeasurementStopped),
        ):
            server.measure(self.closed_loop(), seen.append, should_stop=lambda: len(seen) >= 2)
        assert 2 <= len(seen) < self.num_requests


class ServerContract(Loads):
    """Tests of one launched server with K = `k`, which they may share."""

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        raise NotImplementedError

    def test_a_launch_returns_a_healthy_server_with_a_report(self, server: Server) -> None:
        assert server.report.launch_s > 0
        assert server.counters().num_generation_tokens >= 0

    def test_a_closed_loop_sends_every_request_once(self, server: Server) -> None:
        schedule = self.closed_loop()
        server.warm_up(schedule)
        measurement = server.measure(schedule)

        assert_complete(measurement, schedule)

    def test_a_closed_loop_keeps_to_its_concurrency(self, server: Server) -> None:
        measurement = server.measure(self.closed_loop())

        assert most_in_flight(measurement) == self.concurrency
        assert all(record.scheduled_s is None for record in measurement.records)

    def test_an_open_loop_sends_every_request_once_and_never_early(self, server: Server) -> None:
        schedule = self.open_loop()
        measurement = server.measure(schedule)

        assert_complete(measurement, schedule)
        arrivals = {request.request_id: request.arrival_s for request in schedule.requests}
        for record in measurement.records:
            assert record.scheduled_s == arrivals[record.request_id]
            assert record.scheduled_s is not None
            assert record.sent_s >= record.scheduled_s

    def test_every_record_is_consistent_in_itself(self, server: Server) -> None:
        schedule = self.closed_loop()
        limits = {request.request_id: request.max_tokens for request in schedule.requests}

        for record in server.measure(schedule).records:
            assert_consistent(record, limits[record.request_id])

    def test_speculation_brings_several_tokens_in_a_chunk(self, server: Server) -> None:
        measurement = server.measure(self.closed_loop())

        assert any(len(r.chunk_tokens) < r.num_completion_tokens for r in measurement.records)

    def test_counters_only_grow_and_agree_with_the_measurement(self, server: Server) -> None:
        before = server.counters()
        measurement = server.measure(self.closed_loop())
        difference = server.counters().minus(before)

        assert all(value >= 0 for value in numbers_of(difference))
        assert numbers_of(difference) == numbers_of(measurement.counters)

    def test_counters_agree_with_the_tokens_that_arrived(self, server: Server) -> None:
        measurement = server.measure(self.closed_loop())
        counters, k = measurement.counters, self.k
        generated = sum(record.num_completion_tokens for record in measurement.records)

        assert counters.has_speculation
        assert 0 < counters.num_draft_tokens <= k * counters.num_drafts
        assert len(counters.num_accepted_tokens_per_pos) == k
        assert sum(counters.num_accepted_tokens_per_pos) == counters.num_accepted_tokens
        rates = counters.per_position_acceptance_rates
        assert list(rates) == sorted(rates, reverse=True)
        # A request's first token comes without a draft; its last step may draft past its end.
        assert counters.acceptance_length is not None
        expected = len(measurement.records) + counters.acceptance_length * counters.num_drafts
        assert abs(generated - expected) <= (k + 1) * len(measurement.records)
        assert abs(counters.num_generation_tokens - generated) <= len(measurement.records)

    def test_each_record_is_handed_out_once_as_it_finishes(self, server: Server) -> None:
        seen: list[RequestRecord] = []
        measurement = server.measure(self.closed_loop(), on_record=seen.append)

        assert seen == list(measurement.records)

    def test_the_measurement_names_its_schedule_and_load(self, server: Server) -> None:
        closed_loop, open_loop = self.closed_loop(), self.open_loop()

        of_closed_loop, of_open_loop = server.measure(closed_loop), server.measure(open_loop)
        assert of_closed_loop.schedule_digest == closed_loop.digest
        assert of_closed_loop.concurrency == self.concurrency
        assert of_open_loop.schedule_digest == open_loop.digest
        assert of_open_loop.concurrency is None

    def test_several_measurements_in_one_launch(self, server: Server) -> None:
        schedule = self.closed_loop()

        assert_complete(server.measure(schedule), schedule)
        assert_complete(server.measure(schedule), schedule)

    def test_a_measurement_can_be_summarised_and_kept(self, server: Server) -> None:
        measurement = server.measure(self.closed_loop())
        figures = summarize(measurement)

        assert steady_window(measurement).duration_s > 0
        assert (figures["output_throughput_tps"] or 0) > 0
        assert measurement_from_dict(measurement.as_dict()) == measurement


class EngineContract(LaunchContract, ServerContract):
    """The whole suite, for an engine that launches quickly."""

    @pytest.fixture
    def server(self, engine: Engine, context: LaunchContext) -> Iterator[Server]:
        with engine.launch(self.config_for(self.k), context) as server:
            yield server


class TestSimulated(EngineContract):
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        return SimulatedEngine(EngineSettings())

    def test_it_always_says_that_it_is_simulated(self, engine: Engine, server: Server) -> None:
        assert engine.describe().is_simulated
        assert server.measure(self.closed_loop()).is_simulated


class TestReplay(EngineContract):
    """Replays what a simulated engine did, as a stand-in for a recording of real hardware."""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        path = tmp_path / "recording.jsonl.gz"
        source = SimulatedEngine(EngineSettings())
        with RecordingWriter(path, recording_header(source.describe(), "model")) as writer:
            for k in (0, self.k):
                config = self.config_for(k)
                context = LaunchContext(work_dir=tmp_path, name=f"record-{k}")
                with source.launch(config, context) as server:
                    for schedule in (self.closed_loop(), self.open_loop()):
                        measurement = server.measure(schedule)
                        writer.add(config, 0, server.report.launch_s, measurement)
        return ReplayEngine(EngineSettings(options={"recording": path}))

    def test_it_says_that_it_replays(self, engine: Engine) -> None:
        assert engine.describe().engine == "replay"


def config_for(k: int) -> ServingConfig:
    return ServingConfig(
        model="model",
        drafter="drafter" if k else None,
        num_speculative_tokens=k,
        parallel_drafting=k > 0,
    )


def make_request(
    number: int, max_tokens: int, arrival_s: float | None = None, ignore_eos: bool = False
) -> ScheduledRequest:
    content = f"Question {number}: what is {number} times {number + 1}? Explain each step."
    prompt_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    return ScheduledRequest(
        request_id=number,
        class_name="default",
        prompt=Prompt(prompt_id, (("user", content),)),
        max_tokens=max_tokens,
        temperature=0.0,
        top_p=1.0,
        ignore_eos=ignore_eos,
        sampling_seed=number,
        arrival_s=arrival_s,
    )


def make_schedule(
    requests: tuple[ScheduledRequest, ...], concurrency: int | None, max_duration_s: float
) -> Schedule:
    warmup = tuple(make_request(1000 + number, 8) for number in range(2))
    return Schedule(
        endpoint="chat",
        concurrency=concurrency,
        requests=requests,
        warmup=warmup,
        max_duration_s=max_duration_s,
        request_timeout_s=120.0,
    )


def assert_complete(measurement: Measurement, schedule: Schedule) -> None:
    sent = {r.request_id: (r.class_name, r.prompt.prompt_id) for r in schedule.requests}
    seen = {r.request_id: (r.class_name, r.prompt_id) for r in measurement.records}

    assert len(measurement.records) == len(schedule.requests)
    assert seen == sent
    assert measurement.num_errors == 0
    assert measurement.duration_s >= max(r.finished_s for r in measurement.records)


def assert_consistent(record: RequestRecord, max_tokens: int) -> None:
    times_s, tokens = record.chunk_times_s, record.chunk_tokens

    assert record.is_ok
    assert len(times_s) == len(tokens) > 0
    assert list(times_s) == sorted(times_s)
    assert all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
    assert 0 <= record.sent_s < times_s[0]
    assert times_s[-1] <= record.finished_s
    assert tokens[0] >= 1
    assert tokens[-1] == record.num_completion_tokens <= max_tokens
    assert record.num_prompt_tokens > 0
    assert record.finish_reason in {"stop", "length"}


def most_in_flight(measurement: Measurement) -> int:
    """Sweep over sends and ends; at equal times an end comes first."""
    events = [(record.finished_s, -1) for record in measurement.records]
    events += [(record.sent_s, 1) for record in measurement.records]
    in_flight = most = 0
    for _, change in sorted(events):
        in_flight += change
        most = max(most, in_flight)
    return most


def numbers_of(counters: ServerCounters) -> list[float]:
    return [
        counters.num_drafts,
        counters.num_draft_tokens,
        counters.num_accepted_tokens,
        *counters.num_accepted_tokens_per_pos,
        counters.num_preemptions,
        counters.num_prompt_tokens,
        counters.num_generation_tokens,
    ]
