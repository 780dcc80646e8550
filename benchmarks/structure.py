"""Raw throughput beside the structured estimate, on recorded launches of real vLLM and on simulated ones.

python benchmarks/structure.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from autotune.measure.launch_spread import estimate_launch_spread
from autotune.measure.metrics import observed
from autotune.measure.records import Measurement
from autotune.measure.stats import Interval, metric_interval
from autotune.measure.structure import (
    structured_interval,
    structured_launch_spread,
    structured_throughputs_tps,
)
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import TrialFailed
from autotune.serving.replay import read_recording
from autotune.serving.simulated import SimulatedEngine
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import load_profile

RECORDING = Path(__file__).parents[1] / "tests" / "data" / "demo_grid.jsonl.gz"
RAW = "output_throughput_tps"
CONCURRENCIES = (1, 4, 16)
SIMULATED_DEPTHS = (0, 2, 4, 8)
SIMULATED_LAUNCHES = 20

Launches = Mapping[int, Sequence[Measurement]]
"""Launches of one load, by K."""


def recorded(concurrency: int) -> Launches:
    by_k = defaultdict[int, list[Measurement]](list)
    for row in read_recording(RECORDING).rows:
        if row.concurrency == concurrency:
            by_k[row.config.num_speculative_tokens].append(row.measurement)
    return dict(sorted(by_k.items()))


def simulated(concurrency: int) -> Launches:
    schedule = build_schedule(load_profile(Path("demo")).with_concurrency(concurrency))
    engine = SimulatedEngine(EngineSettings(seed=1))
    by_k = defaultdict[int, list[Measurement]](list)
    for k in SIMULATED_DEPTHS:
        config = ServingConfig(
            model="model",
            drafter="head" if k else None,
            num_speculative_tokens=k,
            parallel_drafting=k > 0,
        )
        for number in range(SIMULATED_LAUNCHES):
            context = LaunchContext(Path(), f"launch {number}")
            # One launch in a hundred crashes, as real ones do.
            with suppress(TrialFailed), engine.launch(config, context) as server:
                by_k[k].append(server.measure(schedule))
    return by_k


def cells(by_k: Launches) -> dict[int, tuple[str, str]]:
    """Return the raw and the structured figure of each K: mean, interval, CV between launches."""
    groups = list(by_k.values())
    pool = [m for group in groups for m in group]
    spread = estimate_launch_spread(RAW, groups)
    structured_spread = structured_launch_spread(groups, pool)
    assert spread is not None
    assert structured_spread is not None
    print(
        f"pooled CV between launches: raw {spread.variance**0.5:.1%}, "
        f"structured {structured_spread.variance**0.5:.1%}; "
        f"explained by requests {spread.request_variance**0.5:.1%}"
    )
    found = {}
    for k, launches in by_k.items():
        raw = metric_interval(RAW, launches, launch_spread=spread)
        structured = structured_interval(launches, pool, launch_spread=structured_spread)
        found[k] = (
            _cell(raw, np.array([observed(RAW, m) for m in launches])),
            _cell(structured, structured_throughputs_tps(launches, pool)),
        )
    return found


def _cell(interval: Interval | None, figures: np.ndarray) -> str:
    assert interval is not None
    cv = float(np.log(figures).std(ddof=1))
    return f"{interval.estimate:.1f} [{interval.low:.1f}, {interval.high:.1f}], {cv:.1%}"


def print_table(title: str, loads: Mapping[int, Launches]) -> None:
    print(f"\n{title}; tokens/s [95 % interval], CV between launches")
    found = {concurrency: cells(by_k) for concurrency, by_k in loads.items()}
    heads = [f"{kind}, concurrency {c}" for c in loads for kind in ("raw", "structured")]
    print("\n| K | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for k in next(iter(found.values())):
        print(f"| {k} | " + " | ".join(c for load in found.values() for c in load[k]) + " |")


def main() -> None:
    """Print both tables."""
    print_table("recorded vLLM on CPU", {c: recorded(c) for c in CONCURRENCIES})
    print_table("simulated", {c: simulated(c) for c in CONCURRENCIES})


if __name__ == "__main__":
    main()
