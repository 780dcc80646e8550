"""How many GPU-hours does a search need until it is right? Simulated worlds, several methods, one command.

    python -m benchmarks.search --out docs

Every run gets three simulated GPU-hours, launches and warm-ups included. What counts is what a method would
recommend at a time, judged by simulation without noise. Finished runs are kept in ``--cache``, keyed by the
scenario and the sources that matter: the same command goes on where it was cut off, or adds methods. See
docs/search-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.search import proposer_cost, replay_grid
from benchmarks.search.methods import METHODS
from benchmarks.search.report import plot, table
from benchmarks.search.runner import (
    Task,
    do_task,
    in_parallel,
    make_truth,
    read_run,
    run_data,
    run_path,
)
from benchmarks.search.scenarios import scenarios

GP_METHODS = frozenset({"gp", "gp+"})
"""Asking Optuna's GP costs 0.4 s of CPU, so it gets fewer seeds."""


def main() -> int:
    """Run what is asked for and write table, plot and raw results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--worlds", type=int, default=21, metavar="N", help="scenarios")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each scenario")
    parser.add_argument("--gp-seeds", type=int, default=1, metavar="N", help="for gp and gp+")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--cache", type=Path, default=Path(".bench-cache"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for table, plot and raw runs")
    parser.add_argument("--replay", action="store_true", help="only the recorded CPU trials")
    parser.add_argument("--proposer", action="store_true", help="only the cost of proposals")
    arguments = parser.parse_args()
    if arguments.proposer:
        print(proposer_cost.report())
        return 0
    if arguments.replay:
        print(replay_grid.report())
        return 0
    methods = arguments.methods.split(",")
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        parser.error(f"unknown methods {', '.join(unknown)}; there are {', '.join(METHODS)}")
    if min(arguments.worlds, arguments.seeds, arguments.gp_seeds, arguments.jobs) < 1:
        parser.error("--worlds, --seeds, --gp-seeds and --jobs must be at least 1")
    return compare(arguments, methods)


def compare(arguments: argparse.Namespace, methods: list[str]) -> int:
    """Compare the methods; 1 where some run failed, which the output then names."""
    began_s = time.monotonic()
    chosen = scenarios(arguments.worlds)
    tasks = [
        Task(scenario, method, seed)
        for method in methods
        for scenario in chosen
        for seed in range(arguments.gp_seeds if method in GP_METHODS else arguments.seeds)
    ]
    failed = in_parallel(make_truth, arguments.cache, chosen, arguments.jobs, _tell)
    if not failed:
        failed = in_parallel(do_task, arguments.cache, tasks, arguments.jobs, _tell)
    paths = [run_path(arguments.cache, task) for task in tasks]
    runs = [read_run(path) for path in paths if path.exists()]
    _tell(f"{len(runs)} of {len(tasks)} runs, {time.monotonic() - began_s:.0f} s")
    if runs:
        text = table(runs, methods)
        print(text)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "search-benchmark-table.md").write_text(text + "\n", encoding="utf-8")
            (arguments.out / "search-benchmark.svg").write_text(
                plot(runs, methods), encoding="utf-8"
            )
            (arguments.out / "search-benchmark.json").write_text(
                json.dumps([run_data(run) for run in runs]) + "\n", encoding="utf-8"
            )
    return 1 if failed else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
