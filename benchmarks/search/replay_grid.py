"""The search on recorded launches of real vLLM on CPU: how many of the grid's launches does it need?"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import NothingFeasibleError
from autotune.search.build import EngineChoice, build_search
from autotune.search.setup import SearchSettings
from autotune.serving.config import ServingConfig
from autotune.serving.replay import read_recording
from autotune.store.repository import Store
from autotune.traffic.profile import load_profile
from benchmarks.search.methods import Recorder

RECORDING = Path(__file__).parents[2] / "tests" / "data" / "demo_grid.jsonl.gz"
CONCURRENCIES = (1, 4, 16)
NUM_SEEDS = 10
LAUNCHES_PER_CONFIG = 3
"""Of the grid: every config as often as the recording has it."""


@dataclass(frozen=True)
class Found:
    """One search of the recording."""

    num_launches: int
    """Until it ended, the race included."""
    num_until_final: int
    """Launches after which the recommendation did not change any more."""
    k: int | None


class _Counter(Recorder):
    """Also counts after how many launches each recommendation came."""

    said: tuple[tuple[int, int | None], ...] = ()

    def on_recommendation(self, config: ServingConfig | None) -> None:
        super().on_recommendation(config)
        k = config.num_speculative_tokens if config is not None else None
        self.said = (*self.said, (self.history.num_launches, k))


def speeds(concurrency: int) -> dict[int, float]:
    """Return recorded tokens per second of a slot by K, by plain division."""
    tokens: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for row in read_recording(RECORDING).rows:
        if row.concurrency == concurrency:
            k = row.config.num_speculative_tokens
            tokens[k] += sum(r.num_completion_tokens for r in row.measurement.records)
            seconds[k] += sum(r.finished_s - r.sent_s for r in row.measurement.records)
    return {k: tokens[k] / seconds[k] for k in tokens}


def search(concurrency: int, seed: int, folder: Path) -> Found:
    """Search the recording once with the default sampler."""
    from autotune.search.study import run_search

    profile = load_profile(Path("demo")).with_concurrency(concurrency)
    settings = SearchSettings(
        storage=str(folder / "bench.db"), out_dir=folder, sampler="auto", is_warm_started=False
    )
    engine = EngineChoice("replay", options={"recording": str(RECORDING)})
    setup = build_search(profile, "demo-cpu", engine, settings)
    # The recording holds the profile's own requests: the seed moves only the sampler.
    setup = replace(setup, settings=replace(settings, seed=seed))
    counter = _Counter(setup.engine.clock)
    store = Store(settings.storage, create=True)
    try:
        decision = run_search(setup, store, counter).decision
        if decision is not None:
            known = {c.config.digest: c.config for c in setup.candidates.items}
            counter.on_recommendation(known[decision.winner])
    except NothingFeasibleError:
        counter.on_recommendation(None)
    finally:
        store.close()
    k = counter.said[-1][1]
    since = math.inf
    for launches, said in counter.said:
        since = min(since, launches) if said == k else math.inf
    return Found(counter.history.num_launches, int(since), k)


def report() -> str:
    """Return a table over all concurrencies and seeds."""
    lines = [
        "| concurrency | best K of the grid | K recommended | best, or within the margin "
        "| launches until final, most | launches in all, most | the grid's |",
        "|---|---|---|---|---|---|---|",
    ]
    margin_ratio = load_profile(Path("demo")).objective.practical_margin_ratio
    for concurrency in CONCURRENCIES:
        by_k = speeds(concurrency)
        best = max(by_k, key=lambda k: by_k[k])
        found = []
        for seed in range(NUM_SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                found.append(search(concurrency, seed, Path(folder)))
        good = sum(f.k is not None and by_k[f.k] >= (1 - margin_ratio) * by_k[best] for f in found)
        ks = ", ".join(str(k) for k in sorted({f.k for f in found if f.k is not None})) or "none"
        lines.append(
            f"| {concurrency} | {best} | {ks} | {good} of {len(found)} "
            f"| {max(f.num_until_final for f in found)} | {max(f.num_launches for f in found)} "
            f"| {LAUNCHES_PER_CONFIG * len(by_k)} |"
        )
    return "\n".join(lines)
