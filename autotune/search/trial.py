"""One trial: launch, warm up, measure. What comes back is a measurement or a failure, both values."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.records import Measurement
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, LaunchContext, LaunchReport
from autotune.serving.failures import TrialFailed, TrialFailure
from autotune.traffic.schedule import Schedule


@dataclass
class TrialResult:
    """What one launch brought, and where its time went."""

    report: LaunchReport | None = None
    measurement: Measurement | None = None
    failure: TrialFailure | None = None
    timings_s: dict[str, float] = field(default_factory=dict)


def run_trial(
    engine: Engine,
    config: ServingConfig,
    schedule: Schedule,
    context: LaunchContext,
    on_record: OnRecord | None = None,
    should_stop: ShouldStop | None = None,
) -> TrialResult:
    """Launch `config` once and measure it once.

    Raises:
        MeasurementStopped: `should_stop` said so; the server is gone.
    """
    result, clock = TrialResult(), engine.clock
    began = clock.now_s()
    try:
        with engine.launch(config, context) as server:
            launched = clock.now_s()
            result.report = server.report
            server.warm_up(schedule, should_stop)
            result.measurement = server.measure(schedule, on_record, should_stop)
            measured = clock.now_s()
        result.timings_s = {
            "launch": launched - began + clock.now_s() - measured,
            "traffic": measured - launched,
        }
    except TrialFailed as err:
        result.failure = err.failure
        result.timings_s = {"launch": clock.now_s() - began}
    return result
