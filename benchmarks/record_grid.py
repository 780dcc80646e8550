"""Measure a grid of K and concurrency on the demo model with real vLLM, and keep it for the replay engine.

    python benchmarks/record_grid.py tests/data/demo_grid.jsonl.gz

Every launch measures all concurrencies, in an order that changes from launch to launch; launches are in
shuffled order within each of the rounds, so that a slow drift of the machine hits all K alike. Run it on
an otherwise idle machine. A launch that is in the file already is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.demo.target import demo_cache_dir, ensure_target, head_dir
from autotune.measure.metrics import observed
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.models import inspect_drafter
from autotune.serving.replay import RecordingWriter, read_recording, recording_header
from autotune.serving.sizes import ServingSizes
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_options import Needs
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import load_profile
from autotune.traffic.schedule import Schedule

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 10)
CONCURRENCIES = (1, 4, 16)
ROUNDS = 3
SEED = 20261130
NOTES = (
    f"K {DEPTHS} x concurrency {CONCURRENCIES}, shuffled launches, profile demo, "
    "two CPU cores, benchmarks/record_grid.py"
)


def main() -> None:
    """Run the grid, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    profile = load_profile(Path("demo"))
    schedules = {c: build_schedule(profile.with_concurrency(c)) for c in CONCURRENCIES}
    engine = VllmEngine(EngineSettings(env=profile.serve.env, cache_dir=demo_cache_dir()))
    depth = inspect_drafter(str(head_dir())).trained_depth
    done = already_recorded(arguments.out)
    sizes = portable_sizes(engine)
    header = recording_header(engine.describe(), "demo:target", NOTES, depth, sizes)
    with RecordingWriter(arguments.out, header) as writer:
        for launch, k, order in plan(arguments.rounds):
            if (launch, k) not in done:
                record(engine, k, launch, {c: schedules[c] for c in order}, writer)


def portable_sizes(engine: VllmEngine) -> ServingSizes | None:
    """Return the sizes under the names that the recording uses."""
    sizes = engine.sizes(str(ensure_target()), [inspect_drafter(str(head_dir()))])
    if sizes is None:
        return None
    return dataclasses.replace(sizes, drafters={"demo:head": next(iter(sizes.drafters.values()))})


def plan(rounds: int) -> Sequence[tuple[int, int, Sequence[int]]]:
    """Return (launch number, K, order of concurrencies) for every launch of the grid."""
    rng = random.Random(SEED)
    return [
        (launch, k, rng.sample(CONCURRENCIES, len(CONCURRENCIES)))
        for launch in range(rounds)
        for k in rng.sample(DEPTHS, len(DEPTHS))
    ]


def already_recorded(path: Path) -> set[tuple[int, int]]:
    """Return (launch number, K) of the launches that are complete in the file."""
    if not path.exists():
        return set()
    seen: dict[tuple[int, int], int] = {}
    for row in read_recording(path).rows:
        key = (row.launch, row.config.num_speculative_tokens)
        seen[key] = seen.get(key, 0) + 1
    return {key for key, count in seen.items() if count == len(CONCURRENCIES)}


def record(
    engine: VllmEngine,
    k: int,
    launch: int,
    schedules: Mapping[int, Schedule],
    writer: RecordingWriter,
) -> None:
    """Launch one K once and measure every concurrency; written down only when all are measured."""
    config = ServingConfig(
        model=str(ensure_target()),
        drafter=str(head_dir()) if k else None,
        num_speculative_tokens=k,
        parallel_drafting=k > 0,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        flags=(("enforce-eager", True),),
    )
    with tempfile.TemporaryDirectory() as logs:
        context = LaunchContext(Path(logs), "grid", Needs(16, 600, max(DEPTHS), 8192))
        with engine.launch(config, context) as server:
            measured = []
            for schedule in schedules.values():
                server.warm_up(schedule)
                measured.append(server.measure(schedule))
    # Folders of the machine that recorded mean nothing elsewhere.
    portable = dataclasses.replace(config, model="demo:target", drafter="demo:head" if k else None)
    for measurement in measured:
        writer.add(portable, launch, server.report.launch_s, measurement)
        speed = observed("output_throughput_tps", measurement)
        length = measurement.counters.acceptance_length
        print(
            f"launch {launch} K={k:<2} concurrency {measurement.concurrency:<2} {speed:6.1f} tok/s"
            + (f", {length:.2f} tokens/step" if length else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
