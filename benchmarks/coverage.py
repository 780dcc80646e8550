"""How often do Autotune's 95 % intervals hold the truth? On simulated measurements, where it is known.

    python benchmarks/coverage.py --trials 1000

The generator shares no code with the package but the records.

Closed loop: requests have lognormal times, with an effect of each prompt (the same for all launches and,
but for a part of its own, all configs), of each launch, and of each request; prompts come up twice, and
some requests fail. Every trial draws new prompts, launches and requests. Truth is the mean over all prompts
and launches there could be; for a single launch it is that launch's own, which is what its interval
speaks of.

Open loop: Poisson arrivals at a server whose capacity is shared by the requests in flight, so that
neighbours wait for each other. A profile has one schedule of arrivals, so truth is the mean over all prompts
that could be sent at its times; it comes from many runs.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from autotune.measure.launch_spread import estimate_launch_spread
from autotune.measure.metrics import observed
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.measure.stats import Interval, metric_interval, ratio_interval

FloatArray = npt.NDArray[np.float64]

METRICS = (
    "output_throughput_tps",
    "goodput_tps",
    "ttft_mean_ms",
    "tpot_mean_ms",
    "ttft_p95_ms",
    "slo_attainment_ratio",
)
RATIOS = ("output_throughput_tps", "goodput_tps", "tpot_mean_ms", "ttft_p95_ms")
NAIVE = "ttft_mean_ms, requests taken as independent"
CONCURRENCY = {12: 1, 64: 4, 200: 8}
"""By requests of a measurement: enough of each slot for the window to leave out the ramp."""
LAUNCHES = (1, 2, 3, 5)
NUM_CONFIGS = 4
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)
OPEN_LOOP_SIZES = (200, 600)
RUNS_FOR_TRUTH = 400
TRIALS_PER_SCHEDULE = 100
SEED = 20261130


@dataclass(frozen=True)
class Population:
    """What requests are drawn from. Spreads are standard deviations of logarithms."""

    concurrency: int = 4
    repeats: int = 2
    """How often each prompt comes up in one measurement."""
    ttft_s: float = 0.2
    tpot_s: float = 0.02
    median_tokens: float = 60.0
    tokens_spread: float = 0.5
    prompt_ttft_spread: float = 0.4
    prompt_tpot_spread: float = 0.2
    own_tpot_spread: float = 0.05
    """Of a prompt's TPOT under one config, beside what it is under all."""
    request_spread: float = 0.1
    launch_spread: float = 0.02
    failure_ratio: float = 0.02
    ttft_limit_s: float = 0.35

    @property
    def limits(self) -> Mapping[str, Mapping[str, float]]:
        return {"all": {"ttft_p95_ms": self.ttft_limit_s * 1e3}}

    def truth(self, metric: str, launch_factor: float = 1.0) -> float:
        """Return a metric's mean over the population, with a launch that slows all times down."""
        ttft_spread = math.hypot(self.prompt_ttft_spread, self.request_spread)
        tpot_spread = math.hypot(
            self.prompt_tpot_spread, self.own_tpot_spread, self.request_spread
        )
        ttft_s = self.ttft_s * math.exp(ttft_spread**2 / 2) * launch_factor
        tpot_s = self.tpot_s * math.exp(tpot_spread**2 / 2) * launch_factor
        tokens, answered = self.mean_tokens(), 1 - self.failure_ratio
        cycle_s = ttft_s + answered * tpot_s * (tokens - 1)
        log_limit = math.log(self.ttft_limit_s / self.ttft_s / launch_factor)
        in_time = NormalDist().cdf(log_limit / ttft_spread)
        throughput = self.concurrency * answered * tokens / cycle_s
        p95 = self.ttft_s * launch_factor * math.exp(NormalDist().inv_cdf(0.95) * ttft_spread)
        return {
            "output_throughput_tps": throughput,
            "goodput_tps": throughput * in_time,
            "ttft_mean_ms": ttft_s * 1e3,
            "tpot_mean_ms": tpot_s * 1e3,
            "ttft_p95_ms": p95 * 1e3,
            "slo_attainment_ratio": answered * in_time,
        }[metric]

    def mean_tokens(self) -> float:
        """Mean of 2 + the whole part of a lognormal variable: 2 + the sum of P(X >= k)."""
        normal = NormalDist(math.log(self.median_tokens), self.tokens_spread)
        return 2 + sum(1 - normal.cdf(math.log(k)) for k in range(1, int(50 * self.median_tokens)))


@dataclass(frozen=True)
class Prompts:
    """Effects of the prompts of one trial, shape (prompts,)."""

    tokens: npt.NDArray[np.int64]
    ttft: FloatArray
    tpot: FloatArray


def draw_prompts(population: Population, num_prompts: int, rng: np.random.Generator) -> Prompts:
    tokens = rng.lognormal(
        math.log(population.median_tokens), population.tokens_spread, num_prompts
    )
    return Prompts(
        2 + np.floor(tokens).astype(np.int64),
        rng.lognormal(0, population.prompt_ttft_spread, num_prompts),
        rng.lognormal(0, population.prompt_tpot_spread, num_prompts),
    )


def of_config(population: Population, prompts: Prompts, rng: np.random.Generator) -> Prompts:
    """Give the prompts the effects they have under one config alone."""
    own = rng.lognormal(0, population.own_tpot_spread, len(prompts.tpot))
    return replace(prompts, tpot=prompts.tpot * own)


def measure(
    population: Population, prompts: Prompts, launch_factor: float, rng: np.random.Generator
) -> Measurement:
    """Send every prompt `repeats` times, in one shuffled order, through a closed loop."""
    order = np.tile(np.arange(len(prompts.tokens)), population.repeats)
    np.random.default_rng(0).shuffle(order)
    noise = rng.lognormal(0, population.request_spread, (2, len(order))) * launch_factor
    fails = rng.random(len(order)) < population.failure_ratio
    free_at_s = [0.0] * population.concurrency
    records = []
    for request_id, prompt in enumerate(order):
        sent_s = heapq.heappop(free_at_s)
        first_s = float(sent_s + population.ttft_s * prompts.ttft[prompt] * noise[0, request_id])
        step_s = float(population.tpot_s * prompts.tpot[prompt] * noise[1, request_id])
        counts = () if fails[request_id] else chunk_counts(int(prompts.tokens[prompt]))
        times = tuple(first_s + step_s * (count - 1) for count in counts)
        finished_s = times[-1] if times else first_s
        heapq.heappush(free_at_s, finished_s)
        records.append(_record(request_id, f"p{prompt}", sent_s, times, counts, finished_s))
    return Measurement(
        "digest", population.concurrency, 0.0, max(free_at_s), tuple(records), ServerCounters()
    )


def chunk_counts(tokens: int) -> tuple[int, ...]:
    """Tokens so far at each chunk: one at first, then up to ten chunks of about equal size."""
    return tuple(sorted({1, *(1 + (tokens - 1) * i // 10 for i in range(1, 11))}))


def _record(
    request_id: int,
    prompt_id: str,
    sent_s: float,
    times_s: tuple[float, ...],
    tokens: tuple[int, ...],
    finished_s: float,
    scheduled_s: float | None = None,
) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        class_name="all",
        prompt_id=prompt_id,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        chunk_times_s=times_s,
        chunk_tokens=tokens,
        finished_s=finished_s,
        num_prompt_tokens=1,
        num_completion_tokens=tokens[-1] if tokens else 0,
        finish_reason="stop" if tokens else None,
        error=None if tokens else "HTTP 503",
    )


@dataclass
class Count:
    """How many intervals held the truth, and how many lay above and below it."""

    held: int = 0
    too_high: int = 0
    too_low: int = 0
    unbounded: int = 0

    def add(self, interval: Interval | None, truth: float) -> None:
        assert interval is not None
        self.add_bounds(interval.low, interval.high, truth)
        self.unbounded += not interval.has_upper_bound

    def add_bounds(self, low: float, high: float, truth: float) -> None:
        self.held += bool(low <= truth <= high)
        self.too_high += bool(truth < low)
        self.too_low += bool(truth > high)

    @property
    def ratio(self) -> float:
        return self.held / (self.held + self.too_high + self.too_low)

    def __str__(self) -> str:
        return f"{self.ratio:.1%}" + ("*" if self.unbounded else "")


def coverage(
    population: Population,
    num_requests: int,
    num_launches: int,
    num_trials: int,
    metrics: Sequence[str] = METRICS,
    ratios: Sequence[str] = RATIOS,
) -> dict[str, Count]:
    """Count how often intervals hold the truth.

    One launch: of one config, for that launch; its ratios are to one launch of another config. More:
    of one of `NUM_CONFIGS` configs, with the spread between launches pooled over all.

    Returns:
        Counts by metric; those of ratios under ``<metric> ratio``; and under `NAIVE` those of an
        interval that knows neither prompts nor launches.
    """
    rng = np.random.default_rng([SEED, num_requests, num_launches])
    names = [*metrics, *(f"{name} ratio" for name in ratios), NAIVE]
    counts = {name: Count() for name in names}
    num_configs = 2 if num_launches == 1 else NUM_CONFIGS
    for trial in range(num_trials):
        common = draw_prompts(population, num_requests // population.repeats, rng)
        factors = rng.lognormal(0, population.launch_spread, (num_configs, num_launches))
        groups = []
        for config in range(num_configs):
            prompts = of_config(population, common, rng)
            groups.append([measure(population, prompts, f, rng) for f in factors[config]])
        first, second = factors[:2, 0] if num_launches == 1 else (1.0, 1.0)
        for name in dict.fromkeys([*metrics, *ratios]):
            spread = estimate_launch_spread(name, groups, population.limits, trial)
            if name in metrics:
                interval = metric_interval(name, groups[0], population.limits, trial, spread)
                counts[name].add(interval, population.truth(name, first))
            if name in ratios:
                interval = ratio_interval(
                    name, groups[0], groups[1], population.limits, trial, spread
                )
                truth = population.truth(name, first) / population.truth(name, second)
                counts[f"{name} ratio"].add(interval, truth)
        counts[NAIVE].add_bounds(
            *naive_ttft_bounds(groups[0]), population.truth("ttft_mean_ms", first)
        )
    return counts


def naive_ttft_bounds(launches: Sequence[Measurement]) -> tuple[float, float]:
    """Textbook interval of the mean TTFT, as if no two requests had anything in common."""
    values = [
        (r.chunk_times_s[0] - r.sent_s) * 1e3 for m in launches for r in m.records if r.is_ok
    ]
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


@dataclass(frozen=True)
class SharedServer:
    """A server of which each request in flight gets an equal share, up to a share of its own."""

    load_ratio: float
    """Arrivals over capacity."""
    slots: int = 8
    """Requests it takes to use the whole capacity."""
    arrivals_rps: float = 6.0
    prompt_spread: float = 0.8
    request_spread: float = 0.1

    def serve(
        self, due_s: FloatArray, prompts: np.random.Generator, noise: np.random.Generator
    ) -> Measurement:
        """Answer the requests due at these times, each with one chunk of 10 tokens."""
        num_requests = len(due_s)
        work = prompts.lognormal(-(self.prompt_spread**2) / 2, self.prompt_spread, num_requests)
        work *= noise.lognormal(0, self.request_spread, num_requests)
        capacity = self.arrivals_rps / self.load_ratio
        # Work done for a request that was there from the start; another one ends when that has grown by
        # its own work.
        done, now_s, num_arrived = 0.0, 0.0, 0
        in_flight: list[tuple[float, int]] = []
        records = []
        while num_arrived < num_requests or in_flight:
            speed = capacity / max(len(in_flight), self.slots)
            end_s = now_s + (in_flight[0][0] - done) / speed if in_flight else math.inf
            next_s = float(due_s[num_arrived]) if num_arrived < num_requests else math.inf
            at_s = min(end_s, next_s)
            done, now_s = done + speed * (at_s - now_s), at_s
            if next_s <= end_s:
                heapq.heappush(in_flight, (done + float(work[num_arrived]), num_arrived))
                num_arrived += 1
            else:
                _, number = heapq.heappop(in_flight)
                sent_s = float(due_s[number])
                records.append(
                    _record(number, f"p{number}", sent_s, (now_s,), (10,), now_s, sent_s)
                )
        return Measurement("digest", None, 0.0, now_s, tuple(records), ServerCounters())

    def arrivals_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        """Draw Poisson arrivals, rescaled to the exact rate."""
        due_s: FloatArray = np.cumsum([0.0, *rng.exponential(1, num_requests - 1)])
        due_s *= (num_requests - 1) / self.arrivals_rps / due_s[-1]
        return due_s


def open_loop_coverage(load_ratio: float, num_requests: int, num_trials: int) -> dict[str, Count]:
    """Count how often intervals of one launch in open loop hold the truth.

    The ratio is of the mean latency to that of a server with 10 % more capacity.
    """
    servers = SharedServer(load_ratio), SharedServer(load_ratio / 1.1)
    rng = np.random.default_rng([SEED, round(100 * load_ratio)])
    metrics = ("e2el_mean_ms", "e2el_p95_ms", "output_throughput_tps")
    counts = {name: Count() for name in [*metrics, "e2el_mean_ms ratio"]}

    def both(due_s: FloatArray) -> list[Measurement]:
        """Send the same prompts at the same times to both servers."""
        seed = int(rng.integers(2**63))
        return [server.serve(due_s, np.random.default_rng(seed), rng) for server in servers]

    for trial in range(num_trials):
        if trial % TRIALS_PER_SCHEDULE == 0:
            due_s = servers[0].arrivals_s(num_requests, rng)
            runs = [both(due_s) for _ in range(RUNS_FOR_TRUTH)]
            truth = {
                name: float(np.mean([observed(name, a) for a, _ in runs])) for name in metrics
            }
            # Unlike a mean, the mean of percentiles is not the percentile.
            pooled = [r.finished_s - due_s[r.request_id] for a, _ in runs for r in a.records]
            truth["e2el_p95_ms"] = float(np.percentile(pooled, 95)) * 1e3
            ratio = truth["e2el_mean_ms"] / np.mean([observed("e2el_mean_ms", b) for _, b in runs])
        one, other = both(due_s)
        for name in metrics:
            counts[name].add(metric_interval(name, [one], seed=trial), truth[name])
        compared = ratio_interval("e2el_mean_ms", [one], [other], seed=trial)
        counts["e2el_mean_ms ratio"].add(compared, float(ratio))
    return counts


def print_table(head: str, columns: Sequence[str], found: Sequence[Mapping[str, Count]]) -> None:
    print(f"\n| {head} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in found[0]:
        print(f"| {name} | " + " | ".join(str(counts[name]) for counts in found) + " |")


def main() -> None:
    """Print the tables of docs/statistics.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    cells = [(launches, size) for launches in LAUNCHES for size in CONCURRENCY]
    found = []
    for launches, size in cells:
        population = Population(concurrency=CONCURRENCY[size])
        found.append(coverage(population, size, launches, trials))
        print(f"{launches} x {size}:", *found[-1].values(), flush=True)
    print_table("launches x requests", [f"{a} x {b}" for a, b in cells], found)
    short = [coverage(Population(concurrency=4), 12, launches, trials) for launches in LAUNCHES]
    print_table("12 requests on 4 slots", [f"{launches} x 12" for launches in LAUNCHES], short)
    for size in OPEN_LOOP_SIZES:
        opened = [open_loop_coverage(load, size, trials) for load in LOADS]
        head = f"open loop, {size} requests, load / capacity"
        print_table(head, [f"{load:.0%}" for load in LOADS], opened)
    print("\n* no upper bound in some or all trials: too few requests")


if __name__ == "__main__":
    main()
