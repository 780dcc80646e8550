"""One trial: whatever happens, the server is closed, and what comes back is a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_helpers import at_tps, config, make_profile, simulated

from autotune.measure.client import MeasurementStopped, OnRecord, ShouldStop
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.search.trial import run_trial
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import VirtualClock
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, LaunchContext, LaunchReport, Server
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.traffic.drawing import build_schedule
from autotune.traffic.schedule import Schedule

SCHEDULE = Schedule("chat", 1, (), (), 10.0, 10.0)
OUT_OF_MEMORY = TrialFailure(FailureKind.OUT_OF_MEMORY_UNDER_LOAD, "CUDA out of memory", "a.log")


class ScriptedServer(Server):
    """Takes 3 s to warm up, 20 s to measure, 2 s to stop; fails where it is told to."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.report = LaunchReport(launch_s=5.0)
        self._engine = engine

    def warm_up(self, schedule: Schedule, should_stop: ShouldStop | None = None) -> None:
        self._engine.step("warm up", 3.0)

    def measure(
        self,
        schedule: Schedule,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Measurement:
        self._engine.step("measure", 20.0)
        measurement = at_tps(100)
        for record in measurement.records:
            if on_record is not None:
                on_record(record)
        return measurement

    def counters(self) -> ServerCounters:
        return ServerCounters()

    def close(self) -> None:
        self._engine.step("close", 2.0)


class ScriptedEngine(Engine):
    def __init__(self, **errors: BaseException) -> None:
        self.clock = VirtualClock()
        self.done: list[str] = []
        self._errors = {name.replace("_", " "): error for name, error in errors.items()}

    def step(self, name: str, seconds: float) -> None:
        self.done.append(name)
        self.clock.sleep(seconds)
        if name in self._errors:
            raise self._errors[name]

    def describe(self) -> EngineInfo:
        return EngineInfo("scripted", "1", "cpu", "none")

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        self.step("launch", 5.0)
        return ScriptedServer(self)


def run(engine: ScriptedEngine, tmp_path: Path, **kwargs: Any) -> Any:
    return run_trial(engine, config(2), SCHEDULE, LaunchContext(tmp_path, "name"), **kwargs)


def test_a_trial_launches_warms_up_measures_and_closes(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    seen: list[int] = []

    result = run(engine, tmp_path, on_record=lambda record: seen.append(record.request_id))

    assert engine.done == ["launch", "warm up", "measure", "close"]
    assert result.measurements == (at_tps(100),)
    assert result.report == LaunchReport(launch_s=5.0)
    assert result.failure is None
    assert seen == list(range(10))


def test_its_time_is_split_into_launch_and_traffic(tmp_path: Path) -> None:
    result = run(ScriptedEngine(), tmp_path)

    # Starting (5 s) and stopping (2 s) are the launch; warming up (3 s) and measuring (20 s) traffic.
    assert result.timings_s == {"launch": 7.0, "traffic": 23.0}


@pytest.mark.parametrize(
    ("where", "done", "spent_s"),
    [
        ("launch", ["launch"], 5.0),
        ("warm_up", ["launch", "warm up", "close"], 5.0 + 3.0 + 2.0),
        ("measure", ["launch", "warm up", "measure", "close"], 5.0 + 3.0 + 20.0 + 2.0),
    ],
)
def test_a_failure_comes_back_as_a_value_and_the_server_is_closed(
    tmp_path: Path, where: str, done: list[str], spent_s: float
) -> None:
    engine = ScriptedEngine(**{where: TrialFailed(OUT_OF_MEMORY)})

    result = run(engine, tmp_path)

    assert result.failure == OUT_OF_MEMORY
    assert result.measurements == ()
    assert engine.done == done
    assert sum(result.timings_s.values()) == pytest.approx(spent_s)


def test_a_server_that_cannot_be_stopped_fails_its_trial(tmp_path: Path) -> None:
    """Its memory may not be back, and the next launch would be measured beside it."""
    engine = ScriptedEngine(close=TrialFailed(OUT_OF_MEMORY))

    result = run(engine, tmp_path)

    assert result.failure == OUT_OF_MEMORY


@pytest.mark.parametrize("error", [MeasurementStopped("stop"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("where", ["warm_up", "measure"])
def test_anything_else_goes_on_up_but_the_server_is_closed(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    engine = ScriptedEngine(**{where: error})

    with pytest.raises(type(error)):
        run(engine, tmp_path)
    assert engine.done[-1] == "close"


class StopAfter:
    """A rule that gives a run up after so many requests."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests

    def observe(self, record: RequestRecord) -> None:
        self._left -= 1

    @property
    def reason(self) -> str | None:
        return "hopeless" if self._left <= 0 else None


def simulated_trial(tmp_path: Path, **kwargs: Any) -> Any:
    profile = make_profile(tmp_path)
    schedule = build_schedule(profile)
    engine = simulated()
    return schedule, run_trial(
        engine, config(2), schedule, LaunchContext(tmp_path, "name"), **kwargs
    )


def test_a_hopeless_run_is_cut_off_and_keeps_what_was_seen(tmp_path: Path) -> None:
    schedule, whole = simulated_trial(tmp_path, stop_rule=StopAfter(10_000))
    _, cut = simulated_trial(tmp_path, stop_rule=StopAfter(3), ladder=[schedule])
    (measurement,) = cut.measurements
    assert cut.failure is None
    assert measurement.stopped_early == "hopeless"
    assert len(measurement.records) == 3 < len(whole.measurements[0].records)
    assert measurement.schedule_digest == schedule.digest
    assert measurement.duration_s < whole.measurements[0].duration_s
    assert cut.ladder == ()  # nobody calibrates on what is given up
    assert whole.measurements[0].stopped_early is None


def test_a_stop_from_outside_is_no_rule_of_ours(tmp_path: Path) -> None:
    with pytest.raises(MeasurementStopped):
        simulated_trial(tmp_path, stop_rule=StopAfter(10_000), should_stop=lambda: True)


def test_a_ladder_is_measured_in_the_same_launch(tmp_path: Path) -> None:
    rung = build_schedule(make_profile(tmp_path), 99).head(2)
    _, result = simulated_trial(tmp_path, ladder=[rung])
    assert [m.schedule_digest for m in result.ladder] == [rung.digest]
    assert len(result.measurements) == 1


def test_a_rung_that_fails_does_not_fail_the_trial(tmp_path: Path) -> None:
    engine = ScriptedEngine()

    class FailsSecond(ScriptedServer):
        def measure(
            self,
            schedule: Schedule,
            on_record: OnRecord | None = None,
            should_stop: ShouldStop | None = None,
        ) -> Measurement:
            if "measure" in engine.done:
                raise TrialFailed(OUT_OF_MEMORY)
            return super().measure(schedule, on_record, should_stop)

    engine.launch = lambda config, context: FailsSecond(engine)  # type: ignore[method-assign]
    result = run(engine, tmp_path, ladder=[SCHEDULE])
    assert result.failure is None
    assert len(result.measurements) == 1
    assert result.ladder == ()
