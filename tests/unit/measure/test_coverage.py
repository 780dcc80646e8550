"""Do intervals hold the truth as often as they say? And would this test notice if they did not?

Slimmed from `benchmarks/coverage.py`, which makes the table of docs/statistics.md with 1,000 trials. With
100 trials a sound 95 % interval holds the truth in 89 or fewer of them once in a hundred times; seeds are
fixed, so a failure is a change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

import benchmarks.coverage
from autotune.measure import launch_spread, metrics
from autotune.measure.distributions import normal_quantile
from autotune.measure.half_widths import HalfWidths
from autotune.measure.launch_spread import estimate_launch_spread
from autotune.measure.records import Measurement, RequestRecord
from autotune.measure.stats import ratio_interval
from autotune.serving.replay import read_recording
from benchmarks.coverage import NAIVE, Count, Population, coverage, open_loop_coverage

GRID = Path(__file__).parents[2] / "data" / "demo_grid.jsonl.gz"
NUM_TRIALS = 100
SOUND = pytest.approx(0.95, abs=0.055)
"""0.90 to 1.00."""


def test_one_launch_with_repeated_prompts() -> None:
    found = coverage(
        Population(concurrency=2),
        40,
        1,
        NUM_TRIALS,
        ("output_throughput_tps", "goodput_tps", "ttft_mean_ms", "slo_attainment_ratio"),
        ("tpot_mean_ms",),
    )
    naive = found.pop(NAIVE)
    assert {name: count.ratio for name, count in found.items()} == dict.fromkeys(found, SOUND)
    assert naive.ratio < 0.9


@pytest.mark.parametrize("num_launches", [2, 3])
def test_launches_with_their_spread_pooled_over_configs(num_launches: int) -> None:
    # Launches that differ by 10 % and prompts that differ little, so that the launches decide.
    population = Population(concurrency=1, launch_spread=0.1, prompt_ttft_spread=0.1)
    found = coverage(
        population, 20, num_launches, NUM_TRIALS, ("ttft_mean_ms",), ("ttft_mean_ms",)
    )
    naive = found.pop(NAIVE)
    assert {name: count.ratio for name, count in found.items()} == dict.fromkeys(found, SOUND)
    assert naive.ratio < 0.6


def test_percentiles_from_order_statistics() -> None:
    population = Population(concurrency=2, repeats=1)
    found = coverage(population, 120, 1, 60, ("ttft_p95_ms",), ("ttft_p95_ms",))
    assert found["ttft_p95_ms"].ratio == SOUND
    assert found["ttft_p95_ms"].unbounded == 0
    assert found["ttft_p95_ms ratio"].ratio == SOUND


def test_open_loop_at_half_of_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.coverage, "RUNS_FOR_TRUTH", 60)
    found = open_loop_coverage(0.5, 200, 50)
    assert found["e2el_mean_ms"].ratio == SOUND
    assert found["e2el_mean_ms ratio"].ratio == SOUND


def test_real_launches_of_one_config_are_not_told_apart() -> None:
    """Recorded vLLM: 8 K at 3 loads, 3 launches each; a launch against another of its own config is 1.

    The spread between launches comes from the other seven K, so the launches compared have no say in it.
    """
    by_load: dict[int | None, dict[int, list[Measurement]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in read_recording(GRID).rows:
        by_load[row.concurrency][row.config.num_speculative_tokens].append(row.measurement)
    with_spread, without = Count(), Count()
    for by_k in by_load.values():
        for k, launches in by_k.items():
            others = [group for other, group in by_k.items() if other != k]
            spread = estimate_launch_spread("output_throughput_tps", others)
            for one, other in combinations(launches, 2):
                pair = "output_throughput_tps", [one], [other]
                with_spread.add(ratio_interval(*pair, launch_spread=spread), 1.0)
                without.add(ratio_interval(*pair), 1.0)
    assert (with_spread.held + with_spread.too_high + with_spread.too_low) == 8 * 3 * 3
    assert with_spread.ratio == SOUND
    assert without.ratio < 0.5


# --- what a wrong interval would look like ---


def test_prompts_taken_as_independent_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_request_alone(records: Sequence[RequestRecord]) -> tuple[str, ...]:
        return tuple(str(record.request_id) for record in records)

    population = Population(concurrency=2, repeats=4)
    sound = coverage(population, 40, 1, NUM_TRIALS, ("ttft_mean_ms",), ())
    monkeypatch.setattr(metrics, "_clusters", every_request_alone)
    wrong = coverage(population, 40, 1, NUM_TRIALS, ("ttft_mean_ms",), ())
    assert sound["ttft_mean_ms"].ratio == SOUND
    assert wrong["ttft_mean_ms"].ratio < 0.8


def test_normal_quantiles_instead_of_students_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two configs of two launches: two degrees of freedom. P(|t| < 1.96) is 0.81 then.
    def normal(variance: float, degrees_of_freedom: float, confidence: float) -> HalfWidths:
        half = normal_quantile((1 + confidence) / 2) * variance**0.5
        return HalfWidths(half, half)

    population = Population(concurrency=1, launch_spread=0.1, prompt_ttft_spread=0.1)
    monkeypatch.setattr(benchmarks.coverage, "NUM_CONFIGS", 2)
    sound = coverage(population, 20, 2, NUM_TRIALS, (), ("ttft_mean_ms",))
    monkeypatch.setattr(launch_spread, "of_variance", normal)
    wrong = coverage(population, 20, 2, NUM_TRIALS, (), ("ttft_mean_ms",))
    assert sound["ttft_mean_ms ratio"].ratio == SOUND
    assert wrong["ttft_mean_ms ratio"].ratio < 0.88
