"""One trial: launch, warm up, measure. What comes back is a measurement or a failure, both values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.records import Measurement
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, LaunchContext, LaunchReport, Server
from autotune.serving.failures import TrialFailed, TrialFailure
from autotune.traffic.schedule import Schedule


@dataclass
class TrialResult:
    """What one launch brought, and where its time went."""

    report: LaunchReport | None = None
    measurements: tuple[Measurement, ...] = ()
    failure: TrialFailure | None = None
    timings_s: dict[str, float] = field(default_factory=dict)


def run_launch(
    engine: Engine, config: ServingConfig, context: LaunchContext, use: Callable[[Server], None]
) -> TrialResult:
    """Launch `config`, let `use` do something with the server, and close it.

    Returns:
        The launch's report, or its failure as a value, at launch or in use.

    Raises:
        MeasurementStopped: the launch or its use was stopped; the server is gone.
    """
    result, clock = TrialResult(), engine.clock
    began = clock.now_s()
    try:
        with engine.launch(config, context) as server:
            launched = clock.now_s()
            result.report = server.report
            use(server)
            used = clock.now_s()
        result.timings_s = {
            "launch": launched - began + clock.now_s() - used,
            "traffic": used - launched,
        }
    except TrialFailed as err:
        result.failure = err.failure
        result.timings_s = {"launch": clock.now_s() - began}
    return result


def run_trial(
    engine: Engine,
    config: ServingConfig,
    schedule: Schedule,
    context: LaunchContext,
    on_record: OnRecord | None = None,
    should_stop: ShouldStop | None = None,
    num_measurements: int = 1,
) -> TrialResult:
    """Launch `config` once, warm it up, and measure it.

    Args:
        num_measurements: how often the schedule is sent to the one launch.

    Raises:
        MeasurementStopped: `should_stop` said so; the server is gone.
    """
    measurements: list[Measurement] = []

    def measure(server: Server) -> None:
        server.warm_up(schedule, should_stop)
        for _ in range(num_measurements):
            measurements.append(server.measure(schedule, on_record, should_stop))

    result = run_launch(engine, config, context, measure)
    if result.failure is None:
        result.measurements = tuple(measurements)
    return result
