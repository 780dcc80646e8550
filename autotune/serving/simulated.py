"""A simulated engine: a named GPU and model as a few numbers, a virtual clock, seeded noise.

It exists to try searches without hardware, and to test them where the truth is known: a study of
hours takes seconds. It is a model, not a measurement; whatever comes out of it is labelled
simulated. What a step costs stands in `autotune.serving.step_cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.metrics import Limits, observed
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import Clock, VirtualClock
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, EngineSettings, LaunchContext, LaunchReport, Server
from autotune.serving.failures import MAX_ERROR_RATIO, FailureKind, TrialFailed, TrialFailure
from autotune.serving.models import DrafterInfo, ModelInfo
from autotune.serving.scheduler_limits import launch_failure, scheduler_limits
from autotune.serving.simulated_options import parse_options
from autotune.serving.simulation import Simulation
from autotune.serving.sizes import ServingSizes
from autotune.serving.step_sampler import StepSampler, named_rng, noise_factor
from autotune.serving.virtual import added, pass_time, play
from autotune.serving.vllm_options import Needs
from autotune.serving.worlds import DEFAULT_WORLD, World
from autotune.serving.worlds_sizes import world_sizes
from autotune.traffic.schedule import Schedule, ScheduledRequest

LAUNCH_SIGMA = 0.01
"""Spread of a launch's speed around its mean (lognormal): clocks, memory layout, neighbours."""
RUN_SIGMA = 0.005
"""Spread of single measurements of one launch."""
STEP_SIGMA = 0.02
LAUNCH_TIME_SIGMA = 0.05
OUTLIER_RATIO = 0.03
"""Share of launches that are slower by `OUTLIER_SLOWDOWN`: a throttled or busy machine."""
OUTLIER_SLOWDOWN = 1.10
CRASH_RATIO = 0.01
"""Share of launches that crash for no fault of the config."""
FP8_LAUNCH_S = 25.0
"""What making FP8 weights adds to a launch."""

_AT_LAUNCH = {
    FailureKind.INVALID_CONFIG,
    FailureKind.INSUFFICIENT_MEMORY,
    FailureKind.LAUNCH_ERROR,
    FailureKind.LAUNCH_TIMEOUT,
    FailureKind.SPECULATION_INACTIVE,
}


class SimulatedEngine(Engine):
    """Launches simulated servers.

    Options: ``world`` (a name in `WORLDS`, or a `World`), ``noise`` (factor on the noise of launches
    and steps, 1 by default; 0 also makes acceptance exact, which gives the truth), ``faults``
    (failure kind by config label or digest).

    Equal seed, config, schedule and launch name give equal results; another launch name stands for
    another launch, with other noise.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.clock: Clock = VirtualClock()
        options = parse_options(settings.options)
        self.world = options.world
        self.noise = options.noise
        self.seed = settings.seed
        self._faults = options.faults

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="simulated",
            version="1",
            device="simulated",
            hardware=f"simulated {self.world.hardware.name}",
            is_simulated=True,
            compute_capability=self.world.hardware.compute_capability,
            has_trees=self.world.has_trees,
        )

    def inspect(
        self, model: str, drafters: Sequence[str], model_where: str, drafter_where: str
    ) -> tuple[ModelInfo | None, tuple[DrafterInfo, ...]]:
        """Describe the world's own head under every name given; no files are read."""
        head = self.world.head
        return None, tuple(
            DrafterInfo(
                name=name,
                folder=Path(),
                kind="p-eagle" if head.is_parallel else "eagle3",
                trained_depth=head.trained_depth,
                num_layers=head.num_layers,
                draft_vocab_size=head.draft_vocab_size,
                target_hidden_size=0,
                vocab_size=0,
            )
            for name in drafters
        )

    def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes:
        """Return the world's sizes with the data sheet's rates, not those that serving reaches."""
        return world_sizes(self.world, [drafter.serve_as for drafter in drafters])

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        rng = named_rng(self.seed, config.digest, context.name)
        nominal_s = self.world.launch_s + (FP8_LAUNCH_S if config.weights == "fp8" else 0.0)
        launch_s = nominal_s * noise_factor(rng, LAUNCH_TIME_SIGMA * self.noise)
        speed = noise_factor(rng, LAUNCH_SIGMA * self.noise)
        # Rarer where noise is turned down, never more frequent than stated.
        luck = rng.random() / min(1.0, self.noise) if self.noise else 1.0
        if CRASH_RATIO <= luck < CRASH_RATIO + OUTLIER_RATIO:
            speed *= OUTLIER_SLOWDOWN
        fault = self._faults.get(config.label()) or self._faults.get(config.digest)
        if fault in _AT_LAUNCH:
            failure: TrialFailure | None = TrialFailure(fault, "injected fault")
        else:
            failure = launch_failure(self.world, config, context)
            if failure is None and luck < CRASH_RATIO:
                failure = TrialFailure(FailureKind.UNSTABLE, "the launch crashed at random")
        if failure is None and launch_s > context.timeout_s:
            detail = f"not healthy after {context.timeout_s:.0f} s"
            failure = TrialFailure(FailureKind.LAUNCH_TIMEOUT, detail)
        pass_time(self.clock, _waited_s(failure, launch_s, context), context.should_stop, "launch")
        if failure is not None:
            raise TrialFailed(failure)
        return SimulatedServer(self, config, context.name, launch_s, speed, fault)


def _waited_s(failure: TrialFailure | None, launch_s: float, context: LaunchContext) -> float:
    """Seconds until a launch is healthy or has failed: most failures show half-way."""
    if failure is None:
        return launch_s
    return context.timeout_s if failure.kind is FailureKind.LAUNCH_TIMEOUT else launch_s / 2


class SimulatedServer(Server):
    """One simulated launch."""

    def __init__(
        self,
        engine: SimulatedEngine,
        config: ServingConfig,
        name: str,
        launch_s: float,
        speed: float,
        fault: FailureKind | None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._name = name
        self._speed = speed
        self._fault = fault
        self._is_open = True
        self._num_runs = 0
        self._limits = scheduler_limits(engine.world, config)
        self._counters = ServerCounters(has_speculation=config.is_speculative)
        self.report = LaunchReport(launch_s=launch_s, resolved=self._resolved())

    def warm_up(self, schedule: Schedule, should_stop: ShouldStop | None = None) -> None:
        run = self._run(schedule, schedule.warmup)
        play(run.records, run.duration_s, self._engine.clock, None, should_stop)
        _check_memory(run)
        if run.records and not any(record.is_ok for record in run.records):
            raise _refused(run.records)

    def measure(
        self,
        schedule: Schedule,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Measurement:
        started_at_s = self._engine.clock.now_s()
        run = self._run(schedule, schedule.requests)
        if self._fault is not None:
            self._fail_half_way(run, on_record, should_stop)
        play(run.records, run.duration_s, self._engine.clock, on_record, should_stop)
        _check_memory(run)
        if sum(not r.is_ok for r in run.records) > MAX_ERROR_RATIO * len(run.records):
            raise _refused(run.records)
        return Measurement(
            schedule_digest=schedule.digest,
            concurrency=schedule.concurrency,
            started_at_s=started_at_s,
            duration_s=run.duration_s,
            records=tuple(run.records),
            counters=run.counters(),
            is_simulated=True,
        )

    def counters(self) -> ServerCounters:
        return self._counters

    def close(self) -> None:
        self._is_open = False

    def _run(self, schedule: Schedule, requests: Sequence[ScheduledRequest]) -> Simulation:
        if not self._is_open:
            raise AutotuneError("the server is closed and cannot measure")
        engine, self._num_runs = self._engine, self._num_runs + 1
        rng = named_rng(
            engine.seed, self._config.digest, self._name, schedule.digest, f"run {self._num_runs}"
        )
        speed = self._speed * noise_factor(rng, RUN_SIGMA * engine.noise)
        sampler = StepSampler(engine.world, self._config, speed, STEP_SIGMA * engine.noise, rng)
        run = Simulation(sampler, self._limits, schedule, requests, engine.seed)
        run.go()
        self._counters = added(self._counters, run.counters())
        return run

    def _fail_half_way(
        self, run: Simulation, on_record: OnRecord | None, should_stop: ShouldStop | None
    ) -> None:
        assert self._fault is not None  # the caller asked
        half_s = run.duration_s / 2
        early = [record for record in run.records if record.finished_s <= half_s]
        play(early, half_s, self._engine.clock, on_record, should_stop)
        raise TrialFailed(TrialFailure(self._fault, "injected fault"))

    def _resolved(self) -> dict[str, Any]:
        config, world = self._config, self._engine.world
        return {
            "model": world.target.name,
            "num_speculative_tokens": config.num_speculative_tokens or None,
            "parallel_drafting": config.parallel_drafting if config.is_speculative else None,
            "max_num_seqs": self._limits.max_num_seqs,
            "max_num_batched_tokens": self._limits.max_num_batched_tokens,
            "kv_cache_size_tokens": self._limits.kv_tokens,
        }


def _check_memory(run: Simulation) -> None:
    if run.out_of_memory_s is not None:
        detail = "torch.OutOfMemoryError: CUDA out of memory in the rejection sampler"
        raise TrialFailed(TrialFailure(FailureKind.OUT_OF_MEMORY_UNDER_LOAD, detail))


def _refused(records: Sequence[RequestRecord]) -> TrialFailed:
    errors = [record.error for record in records if record.error]
    detail = f"{len(errors)} of {len(records)} requests failed: {errors[0] if errors else ''}"
    return TrialFailed(TrialFailure(FailureKind.REQUEST_ERRORS, detail))


def true_measurement(
    config: ServingConfig,
    schedule: Schedule,
    *,
    world: str | World = DEFAULT_WORLD,
    seed: int = 0,
    needs: Needs | None = None,
) -> Measurement:
    """Return the measurement as it would be without any noise, outlier or crash.

    Args:
        config: what serves.
        schedule: what is sent.
        world: a name in `WORLDS`, or a world.
        seed: the engine's seed, which decides how long the answers are.
        needs: what the traffic needs of the server; decides whether the memory is enough.

    Raises:
        TrialFailed: the config cannot serve at all, or not this load.
    """
    engine = SimulatedEngine(EngineSettings(options={"world": world, "noise": 0.0}, seed=seed))
    context = LaunchContext(work_dir=Path(), name="truth", needs=needs or Needs())
    with engine.launch(config, context) as server:
        return server.measure(schedule)


def true_objective(
    config: ServingConfig,
    schedule: Schedule,
    metric: str = "output_throughput_tps",
    *,
    world: str | World = DEFAULT_WORLD,
    limits: Limits | None = None,
    seed: int = 0,
) -> float:
    """Return a metric as it would be measured without any noise: what a search is judged by.

    Args:
        config: what serves.
        schedule: what is sent.
        metric: a metric of the glossary, see `autotune.measure.metrics.observed`.
        world: a name in `WORLDS`, or a world.
        limits: each class's limits, for goodputs.
        seed: the engine's seed, which decides how long the answers are.

    Raises:
        TrialFailed: the config cannot serve at all, or not this load.
    """
    return observed(metric, true_measurement(config, schedule, world=world, seed=seed), limits)
