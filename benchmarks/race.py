"""How often the race picks well, and how often early stop cuts runs off: the tables of docs/decision.md.

    python benchmarks/race.py

The generator shares no code with the package but the records. A race: six finalists whose true throughputs
lie at the gaps below, and launches that differ by a normal error on the logarithm. It is compared with as
many launches dealt out in turn. An early stop: a run of sixty requests beside the best config's run with
the same prompts (spread by 40 %, 10 % more for every run, 1.4 % between launches).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.search.decision import Finalist, Goal
from autotune.search.hopeless import HopelessRule
from autotune.search.race import race_step
from autotune.serving.config import ServingConfig
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

FloatArray = npt.NDArray[np.float64]

GAPS = (0.0, 0.02, 0.02, 0.06, 0.08, 0.10)
"""Of each finalist's throughput to the best."""
SPREADS = (0.006, 0.018)
MARGINS = (0.01, 0.02)
MAX_LAUNCHES = 30
BEST_TPS = 100.0
TOKENS = 101
NUM_REQUESTS = 60
SLOWDOWNS = (1.053, 1.15, 1.25, 1.35)
CORRELATIONS = (0.0, 0.5)
SEED = 20261201


@dataclass(frozen=True)
class Rates:
    """What came of many races in one setting."""

    right_ratio: float
    """Races whose leader is within the margin of the best."""
    equal_ratio: float
    """The same of as many launches, dealt out in turn."""
    launches: float
    decided_ratio: float
    false_stop_ratio: float
    """Of all races: decided, with a leader that is not within the margin."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--runs", type=int, default=400)
    arguments = parser.parse_args()
    print("| spread | margin | race right | equal right | launches | decided | false stops |")
    print("|---|---|---|---|---|---|---|")
    for spread in SPREADS:
        for margin in MARGINS:
            r = race_rates(spread, margin, arguments.races)
            print(
                f"| {spread:.1%} | {margin:.0%} | {r.right_ratio:.1%} | {r.equal_ratio:.1%} "
                f"| {r.launches:.1f} | {r.decided_ratio:.1%} | {r.false_stop_ratio:.1%} |"
            )
    print()
    print("| requests | " + " | ".join(f"{s - 1:.1%} slower" for s in SLOWDOWNS) + " |")
    print("|---" * (len(SLOWDOWNS) + 1) + "|")
    for correlation in CORRELATIONS:
        rates = [stop_rate(s, arguments.runs, correlation) for s in SLOWDOWNS]
        kind = f"AR(1), {correlation}" if correlation else "independent"
        print(f"| {kind} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |")


def race_rates(spread: float, margin: float, num_races: int) -> Rates:
    """Run many races, each with its own launches."""
    rng = np.random.default_rng(SEED)
    truth = np.log(BEST_TPS * (1 - np.array(GAPS)))
    is_good = truth.max() - truth <= math.log1p(margin)
    goal = Goal("output_throughput_tps", True, {}, margin)
    right = equal = decided = false = launches = 0
    for _ in range(num_races):
        order = rng.permutation(len(GAPS))
        configs = [_config(int(k)) for k in range(len(GAPS))]
        done: dict[str, list[Measurement]] = {c.digest: [] for c in configs}
        of_truth = {c.digest: int(i) for c, i in zip(configs, order, strict=True)}
        while True:
            finalists = [Finalist(c, (), tuple(done[c.digest]), c.label()) for c in configs]
            step = race_step(finalists, goal, MAX_LAUNCHES)
            if step.next_digest is None:
                break
            value = truth[of_truth[step.next_digest]] + spread * rng.standard_normal()
            at_s = float(step.num_launches)
            done[step.next_digest].append(_at_tps(float(np.exp(value)), at_s))
        assert step.leader is not None
        is_right = bool(is_good[of_truth[step.leader]])
        right += is_right
        decided += step.is_decided
        false += step.is_decided and not is_right
        launches += step.num_launches
        equal += bool(is_good[_equal_leader(rng, truth, spread, step.num_launches)])
    return Rates(
        right / num_races,
        equal / num_races,
        launches / num_races,
        decided / num_races,
        false / num_races,
    )


def stop_rate(slowdown: float, num_runs: int, correlation: float) -> float:
    """Return the share of runs that are cut off."""
    rng = np.random.default_rng(SEED)
    goal = Goal("output_throughput_tps", True, {}, 0.02)
    schedule = _schedule()
    stopped = 0
    for _ in range(num_runs):
        prompts = rng.lognormal(0.0, 0.4, NUM_REQUESTS)
        sides = [
            prompts
            * np.exp(0.014 * rng.standard_normal())
            * np.exp(0.1 * _correlated(rng, correlation))
            for _ in range(2)
        ]
        rule = HopelessRule(goal, schedule, _measured(sides[0]))
        for record in _records(sides[1] * slowdown):
            rule.observe(record)
        stopped += rule.reason is not None
    return stopped / num_runs


def _equal_leader(
    rng: np.random.Generator, truth: FloatArray, spread: float, num_launches: int
) -> int:
    counts = np.full(len(truth), num_launches // len(truth))
    counts[rng.permutation(len(truth))[: num_launches % len(truth)]] += 1
    means = truth + spread * rng.standard_normal(len(truth)) / np.sqrt(counts)
    return int(means.argmax())


def _config(k: int) -> ServingConfig:
    return ServingConfig(
        model="model", drafter="head" if k else None, num_speculative_tokens=k,
        parallel_drafting=k > 0,
    )  # fmt: skip


def _at_tps(tps: float, started_at_s: float) -> Measurement:
    """Return one user's ten requests, one after the other."""
    took_s = TOKENS / tps
    records = [_record(i, i * took_s, took_s) for i in range(10)]
    return Measurement("d", 1, started_at_s, 10 * took_s, tuple(records), ServerCounters())


def _records(seconds: FloatArray) -> list[RequestRecord]:
    return [_record(i, 0.0, float(s)) for i, s in enumerate(seconds)]


def _measured(seconds: FloatArray) -> Measurement:
    return Measurement("d", 1, 0.0, 1.0, tuple(_records(seconds)), ServerCounters())


def _record(number: int, sent_s: float, took_s: float) -> RequestRecord:
    end_s = sent_s + took_s
    return RequestRecord(
        number, "a", f"p{number}", None, sent_s, (sent_s + took_s / 10, end_s), (1, TOKENS), end_s,
        10, TOKENS, "stop",
    )  # fmt: skip


def _schedule() -> Schedule:
    prompt = Prompt("p", (("user", "hello"),))
    requests: Sequence[ScheduledRequest] = [
        ScheduledRequest(i, "a", prompt, TOKENS, 0.0, 1.0, False, i, None)
        for i in range(NUM_REQUESTS)
    ]
    return Schedule("chat", 1, tuple(requests), (), 1e9, 1e9)


def _correlated(rng: np.random.Generator, correlation: float) -> FloatArray:
    """Return a first-order autoregression with unit variance."""
    values = rng.standard_normal(NUM_REQUESTS)
    for i in range(1, NUM_REQUESTS):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return values


if __name__ == "__main__":
    main()
