"""A simulated engine: a named GPU and model as a few numbers, a virtual clock, seeded noise.

It exists to try searches without hardware, and to test them where the truth is known: a study of
hours takes seconds. It is a model, not a measurement; whatever comes out of it is labelled
simulated. What a step costs:

    target  = max(bytes read / bandwidth, FLOPs / compute) + overhead, with a part per row
    drafter = the same for its own bytes and rows, once with parallel drafting, K times without

for B x (K + 1) verified rows and B x 2K drafted ones (vLLM's own padding with parallel drafting).
Left out on purpose: CUDA-graph padding, preemption, and the drafter's part of a prefill.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.errors import AutotuneError, invalid, suggestion
from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.metrics import Limits, observed
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import Clock, VirtualClock
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, EngineSettings, LaunchContext, LaunchReport, Server
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.serving.models import DrafterInfo, ModelInfo
from autotune.serving.replay import added, pass_time, play
from autotune.serving.token_budget import max_decoding_requests, tokens_per_step
from autotune.traffic.schedule import Schedule, ScheduledRequest

FloatArray = npt.NDArray[np.float64]

DEFAULT_WORLD = "h100-8b"
LAUNCH_SIGMA = 0.01
"""Spread of a launch's speed around its mean (lognormal): clocks, memory layout, neighbours."""
STEP_SIGMA = 0.02
LAUNCH_TIME_SIGMA = 0.05
MAX_NOISE = 100
MAX_ERROR_RATIO = 0.02
"""Share of failed requests above which a measurement fails, as with real vLLM."""
DEFAULT_MEMORY_UTILIZATION = 0.9
SMALLEST_KV_TOKENS = 2048
"""KV cache below which a launch fails when nobody says how long the requests are."""
COLLAPSE_RATIO = 0.3
"""Share of prefixes that survive each position past the trained depth."""
CHARS_PER_TOKEN = 4
MAX_STEPS_AT_ONCE = 512
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

_AT_LAUNCH = {
    FailureKind.INVALID_CONFIG,
    FailureKind.INSUFFICIENT_MEMORY,
    FailureKind.LAUNCH_ERROR,
    FailureKind.LAUNCH_TIMEOUT,
    FailureKind.SPECULATION_INACTIVE,
}


@dataclass(frozen=True)
class Hardware:
    """A GPU or CPU. Rates are what serving reaches, below the data sheet's peaks."""

    name: str
    bandwidth_bytes_per_s: float
    compute_flops_per_s: float
    """With 16-bit weights."""
    memory_bytes: float
    max_num_batched_tokens: int = 8192
    """What vLLM takes by default on it."""
    max_num_seqs: int = 256
    fp8_compute_gain: float = 1.7
    """How many times faster the arithmetic is with FP8 weights."""
    has_fp8: bool = True


@dataclass(frozen=True)
class Target:
    """A model to serve."""

    name: str
    weight_bytes: float
    active_bytes: float
    """Weights that one token needs; below `weight_bytes` for a mixture of experts."""
    flops_per_token: float
    kv_bytes_per_token: float
    """With a 16-bit cache."""
    num_layers: int
    overhead_s: float
    """Fixed part of a step: kernel launches, scheduling, sampling."""
    overhead_per_row_s: float = 0.0
    """Part that grows with the decoded rows: logits, sampling, accepting."""
    activation_bytes_per_token: float = 300e3
    """Working memory per token of `max_num_batched_tokens`."""
    is_quantized: bool = False
    """Whether the checkpoint is quantised already, so that FP8 cannot be asked for."""


@dataclass(frozen=True)
class Head:
    """A draft head."""

    weight_bytes: float
    num_layers: int
    overhead_s: float
    """Fixed part of one drafting pass."""
    survival: tuple[float, ...]
    """P(the first i + 1 drafts are all accepted), up to the trained depth; must not rise."""
    overhead_per_row_s: float = 0.0
    """Part that grows with the drafted rows: logits, picking the drafts."""
    draft_vocab_size: int = 32_000


@dataclass(frozen=True)
class World:
    """What is simulated: this target with this head on this hardware."""

    hardware: Hardware
    target: Target
    head: Head
    launch_s: float = 90.0


def _chain(first: float, keep: float, decline: float, depth: int) -> tuple[float, ...]:
    """Prefix survivals of a chain: position i survives with `keep` x `decline`^(i - 1)."""
    survival = [first]
    for position in range(1, depth):
        survival.append(survival[-1] * keep * decline ** (position - 1))
    return tuple(survival)


_TARGET_8B = Target(
    name="8B dense",
    weight_bytes=16.4e9,
    active_bytes=16.4e9,
    flops_per_token=16.4e9,
    kv_bytes_per_token=147_456,  # 36 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes
    num_layers=36,
    overhead_s=0.9e-3,
    overhead_per_row_s=5e-6,
)
_HEAD_8B = Head(2.2e9, 4, 0.5e-3, _chain(0.74, 0.72, 0.985, 8))

# Shaped like published figures where there are some, not fitted to any one machine.
WORLDS: dict[str, World] = {
    "h100-8b": World(
        Hardware("H100 SXM", 2.8e12, 560e12, 80e9), _TARGET_8B, _HEAD_8B
    ),
    "l40s-8b": World(
        Hardware("L40S", 0.72e12, 150e12, 48e9, max_num_batched_tokens=2048), _TARGET_8B, _HEAD_8B
    ),
    # About 370 tok/s alone without speculation, best K about 7 alone and 3 at 8 (vLLM PR #32887).
    "b200-gpt-oss-120b": World(
        Hardware("B200", 6.4e12, 1200e12, 180e9, max_num_batched_tokens=16384),
        Target(
            name="gpt-oss-120b",
            weight_bytes=63e9,
            active_bytes=2.9e9,
            flops_per_token=10.2e9,
            kv_bytes_per_token=73_728,  # 36 layers x 8 KV heads x 64 x 2 x 2 bytes
            num_layers=36,
            overhead_s=2.2e-3,
            overhead_per_row_s=5e-6,
            is_quantized=True,
        ),
        Head(3.4e9, 4, 0.4e-3, _chain(0.75, 0.74, 0.98, 8)),
        launch_s=180.0,
    ),
    # Fitted to real runs of the demo on 2 CPU cores (K 0 to 8, concurrency 1, 4 and 16), which it
    # meets within 16 %: alone speculation wins by a third to a half, at 16 every K loses.
    "cpu-demo": World(
        Hardware(
            "2-core CPU", 9.5e9, 212e9, 8e9,
            max_num_batched_tokens=2048, max_num_seqs=32, has_fp8=False,
        ),
        Target(
            name="SmolLM2-135M",
            weight_bytes=269e6,
            active_bytes=269e6,
            flops_per_token=269e6,
            kv_bytes_per_token=23_040,  # 30 layers x 3 KV heads x 64 x 2 x 2 bytes
            num_layers=30,
            overhead_s=1.2e-3,
            overhead_per_row_s=1.1e-3,
        ),
        Head(
            29e6, 3, 3.8e-3, (0.60, 0.25, 0.085, 0.042, 0.022, 0.012, 0.008, 0.005),
            overhead_per_row_s=0.35e-3, draft_vocab_size=4096,
        ),
        launch_s=36.0,
    ),
}  # fmt: skip


def survival(world: World, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return the prefix survivals of the first K drafts; past the trained depth they collapse."""
    trained = world.head.survival
    beyond = range(1, num_speculative_tokens - len(trained) + 1)
    return (*trained, *(trained[-1] * COLLAPSE_RATIO**i for i in beyond))[:num_speculative_tokens]


def step_time_s(
    world: World,
    config: ServingConfig,
    batch: int,
    context_tokens: FloatArray | float,
    prefill_tokens: int = 0,
) -> FloatArray:
    """Return the seconds that one step takes, without noise.

    Args:
        world: what serves.
        config: how it serves.
        batch: requests that decode in the step.
        context_tokens: KV cache tokens of all of them together; an array gives one time each.
        prefill_tokens: prompt tokens that the step computes beside them.
    """
    context: FloatArray = np.asarray(context_tokens, dtype=np.float64)
    rows = batch * (config.num_speculative_tokens + 1) + prefill_tokens
    total_s = _target_s(world, config, rows, context)
    total_s += batch * (config.num_speculative_tokens + 1) * world.target.overhead_per_row_s
    if config.is_speculative:
        total_s += _draft_s(world, config, batch, context)
    return total_s


def _target_s(world: World, config: ServingConfig, rows: int, context: FloatArray) -> FloatArray:
    hardware, target = world.hardware, world.target
    # Each row picks its experts on its own, so a larger batch reads more of them.
    touched = 1 - (1 - target.active_bytes / target.weight_bytes) ** rows
    weight_bytes = target.weight_bytes * touched * _weight_ratio(config)
    num_bytes = weight_bytes + context * target.kv_bytes_per_token * _kv_ratio(config)
    gain = hardware.fp8_compute_gain if config.weights == "fp8" else 1.0
    compute_s = rows * target.flops_per_token / (hardware.compute_flops_per_s * gain)
    busy_s: FloatArray = np.maximum(num_bytes / hardware.bandwidth_bytes_per_s, compute_s)
    return busy_s + target.overhead_s


def _draft_s(world: World, config: ServingConfig, batch: int, context: FloatArray) -> FloatArray:
    """Time to draft; the head stays 16-bit whatever the target's weights are, as in vLLM."""
    hardware, head = world.hardware, world.head
    k = config.num_speculative_tokens
    num_passes, rows = (1, 2 * k * batch) if config.parallel_drafting else (k, batch)
    kv_bytes = world.target.kv_bytes_per_token * head.num_layers / world.target.num_layers
    num_bytes = head.weight_bytes + context * kv_bytes * _kv_ratio(config)
    # 2 FLOPs and 2 bytes per parameter: the head's FLOPs per row are its bytes.
    compute_s = rows * head.weight_bytes / hardware.compute_flops_per_s
    busy_s: FloatArray = np.maximum(num_bytes / hardware.bandwidth_bytes_per_s, compute_s)
    return num_passes * (busy_s + head.overhead_s + rows * head.overhead_per_row_s)


def _tokens_per_step(config: ServingConfig) -> int:
    return tokens_per_step(config.num_speculative_tokens, is_parallel=config.parallel_drafting)


def _weight_ratio(config: ServingConfig) -> float:
    return 0.5 if config.weights == "fp8" else 1.0


def _kv_ratio(config: ServingConfig) -> float:
    return 0.5 if config.kv_cache_dtype == "fp8" else 1.0


@dataclass(frozen=True)
class SchedulerLimits:
    """What the server's scheduler may put into one step, and into the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int


def scheduler_limits(world: World, config: ServingConfig) -> SchedulerLimits:
    """Return the limits under `config`: its own, or the hardware's defaults."""
    hardware, target, head = world.hardware, world.target, world.head
    budget = config.max_num_batched_tokens or hardware.max_num_batched_tokens
    free = (
        hardware.memory_bytes * _utilization(config) - budget * target.activation_bytes_per_token
    )
    free -= target.weight_bytes * _weight_ratio(config)
    per_token = target.kv_bytes_per_token * _kv_ratio(config)
    if config.is_speculative:
        free -= head.weight_bytes
        per_token *= 1 + head.num_layers / target.num_layers
    seqs = config.max_num_seqs or hardware.max_num_seqs
    return SchedulerLimits(seqs, budget, max(0, int(free // per_token)))


def _utilization(config: ServingConfig) -> float:
    value = dict(config.flags).get("gpu-memory-utilization")
    return float(value) if isinstance(value, int | float) else DEFAULT_MEMORY_UTILIZATION


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
        _check_option_names(settings.options)
        self.world = _world(settings.options.get("world", DEFAULT_WORLD))
        self.noise = _noise(settings.options.get("noise", 1.0))
        self.seed = settings.seed
        self._faults = _faults(settings.options.get("faults", {}))

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="simulated",
            version="1",
            device="simulated",
            hardware=f"simulated {self.world.hardware.name}",
            is_simulated=True,
            has_trees=False,
        )

    def inspect(
        self, model: str, drafters: Sequence[str], where: str
    ) -> tuple[ModelInfo | None, tuple[DrafterInfo, ...]]:
        """Describe the world's own head under every name given; no files are read."""
        head = self.world.head
        return None, tuple(
            DrafterInfo(
                name=name,
                folder=Path(),
                kind="p-eagle",
                trained_depth=len(head.survival),
                num_layers=head.num_layers,
                draft_vocab_size=head.draft_vocab_size,
                target_hidden_size=0,
                vocab_size=0,
            )
            for name in drafters
        )

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        rng = _rng(self.seed, config.digest, context.name)
        launch_s = self.world.launch_s * _factor(rng, LAUNCH_TIME_SIGMA * self.noise)
        speed = _factor(rng, LAUNCH_SIGMA * self.noise)
        fault = self._faults.get(config.label()) or self._faults.get(config.digest)
        if fault in _AT_LAUNCH:
            failure: TrialFailure | None = TrialFailure(fault, "injected fault")
        else:
            failure = _launch_failure(self.world, config, context)
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


def _launch_failure(
    world: World, config: ServingConfig, context: LaunchContext
) -> TrialFailure | None:
    """Say why this config cannot be launched in this world, if it cannot."""
    limits = scheduler_limits(world, config)
    for is_wrong, detail in _rules(world, config, limits):
        if is_wrong:
            return TrialFailure(FailureKind.INVALID_CONFIG, detail)
    longest = context.needs.longest_request_tokens or SMALLEST_KV_TOKENS
    needed = longest + config.num_speculative_tokens
    if limits.kv_tokens < needed:
        return TrialFailure(
            FailureKind.INSUFFICIENT_MEMORY,
            f"KV cache for {needed} tokens is needed, but only {limits.kv_tokens} fit",
        )
    return None


def _rules(
    world: World, config: ServingConfig, limits: SchedulerLimits
) -> Iterable[tuple[bool, str]]:
    name = world.hardware.name
    asks_fp8 = config.weights == "fp8"
    budget = limits.max_num_batched_tokens
    return (
        (config.tree_width > 1, "the simulated engine drafts chains only"),
        (asks_fp8 and world.target.is_quantized, f"{world.target.name} is already quantised"),
        (asks_fp8 and not world.hardware.has_fp8, f"FP8 weights cannot be made on {name}"),
        (
            max_decoding_requests(config, budget) < 1,
            f"max_num_batched_tokens = {budget} does not give one request enough slots: "
            f"it takes {_tokens_per_step(config)} a step",
        ),
    )


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

    def _run(self, schedule: Schedule, requests: Sequence[ScheduledRequest]) -> _Run:
        if not self._is_open:
            raise AutotuneError("the server is closed and cannot measure")
        engine, self._num_runs = self._engine, self._num_runs + 1
        rng = _rng(
            engine.seed, self._config.digest, self._name, schedule.digest, f"run {self._num_runs}"
        )
        cost = _StepCost(engine.world, self._config, self._speed, STEP_SIGMA * engine.noise, rng)
        run = _Run(cost, self._limits, schedule, requests, engine.seed)
        run.go()
        self._counters = added(self._counters, run.counters())
        return run

    def _fail_half_way(
        self, run: _Run, on_record: OnRecord | None, should_stop: ShouldStop | None
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


def _refused(records: Sequence[RequestRecord]) -> TrialFailed:
    errors = [record.error for record in records if record.error]
    detail = f"{len(errors)} of {len(records)} requests failed: {errors[0] if errors else ''}"
    return TrialFailed(TrialFailure(FailureKind.REQUEST_ERRORS, detail))


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
        TrialFailed: the config cannot serve at all.
    """
    engine = SimulatedEngine(EngineSettings(options={"world": world, "noise": 0.0}, seed=seed))
    with engine.launch(config, LaunchContext(work_dir=Path(), name="truth")) as server:
        return observed(metric, server.measure(schedule), limits)


@dataclass
class _StepCost:
    """Times and acceptances of one launch, with its noise."""

    world: World
    config: ServingConfig
    speed: float
    """Factor on every step's time."""
    sigma: float
    """Spread of single steps; 0 turns all randomness off."""
    rng: np.random.Generator

    def __post_init__(self) -> None:
        # Ascending, as searchsorted wants it.
        self._survival = np.array(survival(self.world, self.config.num_speculative_tokens)[::-1])
        self.mean_tokens = 1.0 + float(self._survival.sum())

    def steps_s(self, batch: int, context_tokens: FloatArray, prefill_tokens: int) -> FloatArray:
        """Return the time of each of a row of steps."""
        exact = step_time_s(self.world, self.config, batch, context_tokens, prefill_tokens)
        if not self.sigma:
            return exact * self.speed
        return exact * self.speed * self.rng.lognormal(0.0, self.sigma, len(exact))

    def accepted(self, num_steps: int, flights: Sequence[_Flight]) -> npt.NDArray[np.intp]:
        """Draw how many drafts are accepted, shape (num_steps, number of flights)."""
        k = self.config.num_speculative_tokens
        if k == 0:
            return np.zeros((num_steps, len(flights)), dtype=np.intp)
        if self.sigma:
            level = self.rng.random((num_steps, len(flights)))
        else:
            level = _even_levels(num_steps, flights)
        # As many as there are positions whose prefixes survive more often than the drawn level.
        return k - np.searchsorted(self._survival, level, side="right")


def _even_levels(num_steps: int, flights: Sequence[_Flight]) -> FloatArray:
    """Spread levels evenly over (0, 1): their averages come out exact where random ones scatter.

    The fractional parts of multiples of the golden ratio are such a sequence (Weyl 1916).
    """
    first = np.array([flight.request.request_id * 7919 + flight.num_steps for flight in flights])
    levels: FloatArray = ((first + np.arange(num_steps)[:, None] + 0.5) * _GOLDEN_RATIO) % 1.0
    return levels


@dataclass(eq=False)
class _Flight:
    """One request on its way through the server."""

    request: ScheduledRequest
    sent_s: float
    num_prompt_tokens: int
    num_tokens: int
    """How many it will generate."""
    prefill_left: int
    num_steps: int = 0
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def received(self) -> int:
        return self.tokens[-1] if self.tokens else 0

    @property
    def is_done(self) -> bool:
        return self.received >= self.num_tokens

    def take(self, times_s: list[float], tokens: list[int]) -> None:
        self.times_s += times_s
        self.tokens += tokens


class _Arrivals:
    """Hands out requests when they are due: at their times, or as closed-loop users get free."""

    def __init__(self, schedule: Schedule, requests: Sequence[ScheduledRequest]) -> None:
        self._pending = deque(requests)
        # Warm-up requests have no arrival times, so they go in closed loop whatever the load is.
        self._is_open_loop = bool(requests) and requests[0].arrival_s is not None
        num_users = 0 if self._is_open_loop else schedule.concurrency or len(requests)
        self._free_at_s = [0.0] * num_users
        self._max_duration_s = schedule.max_duration_s

    @property
    def next_s(self) -> float:
        """When the next request is sent, as far as is known; infinite when none is."""
        if not self._pending:
            return math.inf
        if self._is_open_loop:
            next_s = self._pending[0].arrival_s or 0.0
        else:
            next_s = self._free_at_s[0] if self._free_at_s else math.inf
        return next_s if next_s <= self._max_duration_s else math.inf

    def take(self, now_s: float) -> tuple[ScheduledRequest, float] | None:
        """Return a request that is due and when it was sent."""
        sent_s = self.next_s
        if sent_s > now_s:
            return None
        if not self._is_open_loop:
            heapq.heappop(self._free_at_s)
        return self._pending.popleft(), sent_s

    def answered(self, at_s: float) -> None:
        """Let the user whose request ended send the next one."""
        if not self._is_open_loop:
            heapq.heappush(self._free_at_s, at_s)


class _Run:
    """One list of requests going through one server, from the first send to the last answer.

    Steps between two events (a request arrives, ends, or times out) are computed as one block.
    """

    def __init__(
        self,
        cost: _StepCost,
        limits: SchedulerLimits,
        schedule: Schedule,
        requests: Sequence[ScheduledRequest],
        seed: int,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._cost = cost
        self._config = cost.config
        self._limits = limits
        self._timeout_s = schedule.request_timeout_s
        self._seed = seed
        self._arrivals = _Arrivals(schedule, requests)
        self._waiting: deque[_Flight] = deque()
        self._running: list[_Flight] = []
        self._now_s = 0.0
        self._num_drafts = 0
        self._per_position = np.zeros(self._config.num_speculative_tokens, dtype=np.int64)
        self._num_prompt_tokens = 0
        self._num_generated = 0

    @property
    def duration_s(self) -> float:
        return max((record.finished_s for record in self.records), default=0.0)

    def go(self) -> None:
        """Run until every request that was sent has ended."""
        while True:
            self._receive()
            self._admit()
            if self._running:
                self._advance()
                self._retire()
            elif math.isfinite(self._arrivals.next_s):
                self._now_s = self._arrivals.next_s
            else:
                return

    def counters(self) -> ServerCounters:
        """Return what the server counted during the run.

        As in vLLM, accepted drafts past a request's end count as accepted.
        """
        return ServerCounters(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_drafts * self._config.num_speculative_tokens,
            num_accepted_tokens=int(self._per_position.sum()),
            num_accepted_tokens_per_pos=tuple(int(n) for n in self._per_position),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generated,
            has_speculation=self._config.is_speculative,
        )

    def _receive(self) -> None:
        while (sent := self._arrivals.take(self._now_s)) is not None:
            request, sent_s = sent
            num_prompt = -(-request.prompt.num_chars // CHARS_PER_TOKEN) or 1
            flight = _Flight(
                request, sent_s, num_prompt, _answer_tokens(request, self._seed), num_prompt
            )
            if self._kv_tokens(flight) > self._limits.kv_tokens:
                self._end(flight, sent_s, "HTTP 400: the request does not fit into the KV cache")
            else:
                self._waiting.append(flight)

    def _admit(self) -> None:
        """Move requests from the queue into the batch, in order.

        Room for a whole answer is kept from the start, where vLLM would preempt later on.
        """
        kept = sum(map(self._kv_tokens, self._running))
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            kept += self._kv_tokens(self._waiting[0])
            if kept > self._limits.kv_tokens:
                return
            self._running.append(self._waiting.popleft())

    def _kv_tokens(self, flight: _Flight) -> int:
        return flight.num_prompt_tokens + flight.num_tokens + self._config.num_speculative_tokens

    def _advance(self) -> None:
        """Compute the steps up to the next event, or a single one that also prefills."""
        budget = self._limits.max_num_batched_tokens
        decoding = [flight for flight in self._running if not flight.prefill_left]
        # The silent cap: what the token budget has no room for just waits.
        decoding = decoding[: max_decoding_requests(self._config, budget)]
        chunks = self._prefill_chunks(budget - len(decoding) * _tokens_per_step(self._config))
        num_steps = 1 if chunks else self._steps_to_plan(decoding)
        ends_s = self._decode(decoding, num_steps, sum(tokens for _, tokens in chunks))
        self._now_s = ends_s[-1]
        for flight, tokens in chunks:
            flight.prefill_left -= tokens
            self._num_prompt_tokens += tokens
            if not flight.prefill_left:
                flight.take([self._now_s], [1])
                self._num_generated += 1

    def _prefill_chunks(self, budget: int) -> list[tuple[_Flight, int]]:
        """Share what decoding leaves of the budget among the prompts, in order."""
        chunks = []
        for flight in self._running:
            tokens = min(flight.prefill_left, budget)
            if tokens > 0:
                chunks.append((flight, tokens))
                budget -= tokens
        return chunks

    def _steps_to_plan(self, decoding: Sequence[_Flight]) -> int:
        left = min(flight.num_tokens - flight.received for flight in decoding)
        return min(MAX_STEPS_AT_ONCE, math.ceil(left / self._cost.mean_tokens))

    def _decode(
        self, decoding: Sequence[_Flight], num_steps: int, prefill_tokens: int
    ) -> list[float]:
        """Decode for up to `num_steps` steps and return when each of them ended."""
        accepted = self._cost.accepted(num_steps, decoding)
        gained = (accepted + 1).cumsum(axis=0)
        before = np.vstack([np.zeros_like(gained[:1]), gained[:-1]]).sum(axis=1)
        context = sum(flight.num_prompt_tokens + flight.received for flight in decoding)
        steps_s = self._cost.steps_s(len(decoding), context + before * 1.0, prefill_tokens)
        ends_s = self._now_s + steps_s.cumsum()
        count = self._steps_to_event(decoding, gained, ends_s)
        times_s: list[float] = ends_s[:count].tolist()
        for column, flight in enumerate(decoding):
            tokens = flight.received + gained[:count, column]
            tokens = np.minimum(tokens, flight.num_tokens).tolist()
            self._num_generated += tokens[-1] - flight.received
            flight.take(times_s, tokens)
            flight.num_steps += count
        self._count(accepted[:count])
        return times_s

    def _steps_to_event(
        self, decoding: Sequence[_Flight], gained: npt.NDArray[np.intp], ends_s: FloatArray
    ) -> int:
        """Cut a block of steps after the first in which a request ends, arrives or times out."""
        left = np.array([flight.num_tokens - flight.received for flight in decoding])
        # Both queues are in the order of sending, so the first one running is the oldest.
        event_s = min(self._arrivals.next_s, self._running[0].sent_s + self._timeout_s)
        is_event = (gained >= left).any(axis=1) | (ends_s >= event_s)
        return int(is_event.argmax()) + 1 if is_event.any() else len(ends_s)

    def _count(self, accepted: npt.NDArray[np.intp]) -> None:
        """Update the speculation counters; position i counts drafts with more than i accepted."""
        k = self._config.num_speculative_tokens
        if k:
            self._num_drafts += accepted.size
            exactly = np.bincount(accepted.ravel(), minlength=k + 1)
            self._per_position += exactly[::-1].cumsum()[::-1][1:]

    def _retire(self) -> None:
        """End the requests that are done, or that their client gave up."""
        self._running = [flight for flight in self._running if not self._has_ended(flight)]
        while self._waiting and self._has_ended(self._waiting[0]):
            self._waiting.popleft()

    def _has_ended(self, flight: _Flight) -> bool:
        deadline_s = flight.sent_s + self._timeout_s
        if self._now_s > deadline_s:
            self._end(flight, deadline_s, f"timeout after {self._timeout_s} s")
        elif flight.is_done:
            self._end(flight, self._now_s)
        else:
            return False
        return True

    def _end(self, flight: _Flight, at_s: float, error: str | None = None) -> None:
        num_chunks = sum(time_s <= at_s for time_s in flight.times_s)
        tokens = tuple(flight.tokens[:num_chunks])
        is_full = flight.num_tokens == flight.request.max_tokens
        self.records.append(
            RequestRecord(
                request_id=flight.request.request_id,
                class_name=flight.request.class_name,
                prompt_id=flight.request.prompt.prompt_id,
                scheduled_s=flight.request.arrival_s,
                sent_s=flight.sent_s,
                chunk_times_s=tuple(flight.times_s[:num_chunks]),
                chunk_tokens=tokens,
                finished_s=at_s,
                num_prompt_tokens=flight.num_prompt_tokens if error is None else 0,
                num_completion_tokens=tokens[-1] if tokens else 0,
                finish_reason=None if error else ("length" if is_full else "stop"),
                error=error,
            )
        )
        self._arrivals.answered(at_s)


def _answer_tokens(request: ScheduledRequest, seed: int) -> int:
    """Say how long a request's answer is, whichever config gives it."""
    if request.ignore_eos:
        return request.max_tokens
    rng = random.Random(f"{seed} {request.prompt.prompt_id} {request.sampling_seed}")
    drawn = round(request.max_tokens * rng.lognormvariate(-0.2, 0.5))
    return min(request.max_tokens, max(1, drawn))


def _rng(*parts: object) -> np.random.Generator:
    """Make a generator from names; `hash` would differ from process to process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def _factor(rng: np.random.Generator, sigma: float) -> float:
    return float(rng.lognormal(0.0, sigma)) if sigma else 1.0


def _check_option_names(options: Mapping[str, Any]) -> None:
    known = ("world", "noise", "faults")
    for name in options:
        if name not in known:
            raise invalid("the simulated engine has no such option", where="engine options",
                          got=name, next_step=suggestion(str(name), known))  # fmt: skip


def _world(value: object) -> World:
    if isinstance(value, World):
        return value
    if isinstance(value, str) and value in WORLDS:
        return WORLDS[value]
    raise invalid(
        "no simulated world has this name",
        where="engine options",
        key_path="world",
        got=value,
        next_step=suggestion(str(value), WORLDS),
    )


def _noise(value: object) -> float:
    """Check the factor on the noise; text comes from the command line."""
    factor = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            factor = float(value)
    if 0 <= factor <= MAX_NOISE:
        return factor
    raise invalid(
        f"the noise must be a factor from 0 to {MAX_NOISE}",
        where="engine options",
        key_path="noise",
        got=value,
        next_step="1 is realistic, 0 is none.",
    )


def _faults(value: object) -> dict[str, FailureKind]:
    """Check the faults: a mapping, or ``CONFIG:KIND,CONFIG:KIND`` from the command line."""
    if isinstance(value, str):
        pairs = (pair.partition(":") for pair in value.split(",") if pair.strip())
        value = {config.strip(): kind.strip() for config, _, kind in pairs}
    if not isinstance(value, Mapping):
        raise invalid(
            "the faults must map config labels or digests to failure kinds",
            where="engine options",
            key_path="faults",
            got=value,
        )
    return {str(config): _fault(str(config), kind) for config, kind in value.items()}


def _fault(config: str, kind: object) -> FailureKind:
    kinds = {kind.value: kind for kind in FailureKind}
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    raise invalid(
        "the fault must be a failure kind",
        where="engine options",
        key_path=f"faults.{config}",
        got=kind,
        next_step=suggestion(str(kind), kinds),
    )
