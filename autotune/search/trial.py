"""One trial: launch, warm up, measure. What comes back is a measurement or a failure, both values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.measure.client import MeasurementStopped, OnRecord, ShouldStop
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, LaunchContext, LaunchReport, Server
from autotune.serving.failures import TrialFailed, TrialFailure
from autotune.traffic.schedule import Schedule


class StopRule(Protocol):
    """Decides while a measurement runs whether it is worth going on with."""

    @property
    def reason(self) -> str | None:
        """Why it is not; None while it is."""

    def observe(self, record: RequestRecord) -> None:
        """Take a request that has ended into account."""


@dataclass
class TrialResult:
    """What one launch brought, and where its time went."""

    report: LaunchReport | None = None
    measurements: tuple[Measurement, ...] = ()
    ladder: tuple[Measurement, ...] = ()
    """Under other concurrencies, see `run_trial`."""
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
    ladder: Sequence[Schedule] = (),
    stop_rule: StopRule | None = None,
) -> TrialResult:
    """Launch `config` once, warm it up, and measure it.

    Args:
        num_measurements: how often the schedule is sent to the one launch.
        ladder: short schedules at other concurrencies, sent after it. What fails there is left out: it
            is not the load that the config is judged by.
        stop_rule: cuts a hopeless measurement off, which then says so and has no ladder.

    Raises:
        MeasurementStopped: `should_stop` said so; the server is gone.
    """
    measurements: list[Measurement] = []
    rungs: list[Measurement] = []

    def measure(server: Server) -> None:
        server.warm_up(schedule, should_stop)
        for _ in range(num_measurements):
            if stop_rule is None:
                measurements.append(server.measure(schedule, on_record, should_stop))
            else:
                measurements.append(
                    _measure_while_worthwhile(
                        engine, server, schedule, stop_rule, on_record, should_stop
                    )
                )
        if measurements[-1].stopped_early is None:
            rungs.extend(_climb(server, ladder, should_stop))

    result = run_launch(engine, config, context, measure)
    if result.failure is None:
        result.measurements, result.ladder = tuple(measurements), tuple(rungs)
    return result


def _climb(
    server: Server, ladder: Sequence[Schedule], should_stop: ShouldStop | None
) -> list[Measurement]:
    rungs: list[Measurement] = []
    for schedule in ladder:
        try:
            rungs.append(server.measure(schedule, None, should_stop))
        except TrialFailed:
            break
    return rungs


def _measure_while_worthwhile(
    engine: Engine,
    server: Server,
    schedule: Schedule,
    rule: StopRule,
    on_record: OnRecord | None,
    should_stop: ShouldStop | None,
) -> Measurement:
    """Measure until the end, or until the rule says that it is hopeless.

    Raises:
        MeasurementStopped: `should_stop` said so.
        TrialFailed: as `Server.measure`.
    """
    seen: list[RequestRecord] = []
    before, began_s = server.counters(), engine.clock.now_s()

    def observe(record: RequestRecord) -> None:
        seen.append(record)
        rule.observe(record)
        if on_record is not None:
            on_record(record)

    def stop() -> bool:
        return rule.reason is not None or (should_stop is not None and should_stop())

    try:
        return server.measure(schedule, observe, stop)
    except MeasurementStopped:
        if rule.reason is None or not seen:
            raise
        return Measurement(
            schedule_digest=schedule.digest,
            concurrency=schedule.concurrency,
            started_at_s=began_s,
            duration_s=engine.clock.now_s() - began_s,
            records=tuple(seen),
            counters=_counted_since(server, before),
            is_simulated=engine.describe().is_simulated,
            stopped_early=rule.reason,
        )


def _counted_since(server: Server, before: ServerCounters) -> ServerCounters:
    """Return what a server counted; nothing where it cannot say any more."""
    try:
        return server.counters().minus(before)
    except TrialFailed:
        return ServerCounters()
