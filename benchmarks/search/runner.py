"""Runs what is asked for in several processes, and keeps every finished piece so that a run can go on."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from benchmarks.search.blackbox import History
from benchmarks.search.methods import METHODS
from benchmarks.search.scenarios import BUDGET_S, Scenario, make_setup
from benchmarks.search.timeline import Run
from benchmarks.search.truth import (
    Landscape,
    Point,
    Ratios,
    chance_ratios,
    limits_for,
    read_points,
    true_point,
    with_chance,
    write_points,
)

ROOT = Path(__file__).parents[2]
TRUTH_SOURCES = (
    "autotune/serving/sim*.py",
    "autotune/serving/step_*.py",
    "autotune/serving/worlds*.py",
    "autotune/serving/flights.py",
    "autotune/serving/scheduler_limits.py",
    "autotune/serving/virtual.py",
    "autotune/traffic",
    "autotune/measure/metrics.py",
    "benchmarks/search/scenarios.py",
)
"""What decides over the truth of a scenario, beside the scenario itself."""
PLAIN_SOURCES = (*TRUTH_SOURCES, "benchmarks/search/blackbox.py", "benchmarks/search/truth.py")
OUR_SOURCES = (
    *PLAIN_SOURCES,
    "autotune/search",
    "autotune/measure",
    "autotune/serving/memory.py",
    "benchmarks/search/methods.py",
    "benchmarks/search/wrong_model.py",
)


@dataclass(frozen=True)
class Task:
    """One run of one method."""

    scenario: Scenario
    method: str
    seed: int


@cache
def source_digest(sources: tuple[str, ...]) -> str:
    """Return a digest of Python files, given by patterns or folders from the repository's root."""
    digest = hashlib.sha256()
    for path in sorted(path for source in sources for path in ROOT.glob(source)):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _cached(cache_dir: Path, kind: str, *parts: str) -> Path:
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    folder = cache_dir / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{key}.json"


def truth_path(cache_dir: Path, scenario: Scenario) -> Path:
    return _cached(cache_dir, "truth", scenario.key, source_digest(TRUTH_SOURCES))


def run_path(cache_dir: Path, task: Task) -> Path:
    sources = OUR_SOURCES if METHODS[task.method].is_ours else PLAIN_SOURCES
    return _cached(
        cache_dir,
        "runs",
        task.scenario.key,
        task.method,
        str(task.seed),
        source_digest(sources),
    )


def luck_path(cache_dir: Path, scenario: Scenario) -> Path:
    sources = (*TRUTH_SOURCES, "benchmarks/search/truth.py")
    return _cached(cache_dir, "luck", scenario.key, source_digest(sources))


def make_truth(cache_dir: Path, scenario: Scenario) -> None:
    """Simulate every candidate of a scenario without noise, in full, and what luck adds to it."""
    path, luck = truth_path(cache_dir, scenario), luck_path(cache_dir, scenario)
    if path.exists() and luck.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(scenario, {}, 0, "random", Path(folder))
    configs = [c.config for c in setup.candidates.items]
    if not path.exists():
        exact = {c.digest: true_point(c, setup.schedule, scenario.world) for c in configs}
        write_points(path, exact)
    points = read_points(path)
    ratios = chance_ratios(configs, points, setup.schedule, scenario.world)
    depths = {c.digest: c.num_speculative_tokens for c in configs}
    luck.write_text(json.dumps({"ratios": ratios, "depths": depths}), encoding="utf-8")


def read_truth(cache_dir: Path, scenario: Scenario) -> tuple[dict[str, Point | None], Ratios]:
    """Return every candidate's true figures, luck included, and what luck does by K."""
    data = json.loads(luck_path(cache_dir, scenario).read_text(encoding="utf-8"))
    ratios: Ratios = {int(k): (ttft, tpot) for k, (ttft, tpot) in data["ratios"].items()}
    exact = read_points(truth_path(cache_dir, scenario))
    depths: dict[str, int] = data["depths"]
    return {d: with_chance(p, depths[d], ratios) for d, p in exact.items()}, ratios


def do_task(cache_dir: Path, task: Task) -> None:
    """Run one method once and judge it; does nothing where the result is known."""
    path = run_path(cache_dir, task)
    if path.exists():
        return
    method = METHODS[task.method]
    points, ratios = read_truth(cache_dir, task.scenario)
    limits = limits_for(points.values(), task.scenario.feasible_share)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        setup = make_setup(task.scenario, limits, task.seed, method.sampler, folder)
        history = method.run(setup, folder, task.seed)
    landscape = Landscape(task.scenario.world, setup.schedule, limits, points, ratios)
    run = judge(history, landscape, task)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(run_data(run)), encoding="utf-8")
    part.replace(path)


def judge(history: History, landscape: Landscape, task: Task) -> Run:
    """Return what the recommendations were worth."""
    best_tps = landscape.best_tps
    in_time = [config for at_s, config in history.recommendations if at_s <= BUDGET_S]
    return Run(
        scenario=task.scenario.name,
        method=task.method,
        seed=task.seed,
        steps=[
            (at_s / 3600, landscape.regret(config, best_tps))
            for at_s, config in history.recommendations
        ],
        has_recommendation=bool(in_time) and in_time[-1] is not None,
        num_launches=history.num_launches,
        num_crashed=history.num_crashed,
        cpu_s_per_proposal=fmean(history.cpu_s) if history.cpu_s else 0.0,
        ended_h=history.ended_s / 3600,
    )


def run_data(run: Run) -> dict[str, Any]:
    """Return a run as plain data; JSON has no infinity, so regret without a feasible config is null."""
    steps = [(hour, None if math.isinf(regret) else regret) for hour, regret in run.steps]
    return {**asdict(run), "steps": steps}


def read_run(path: Path) -> Run:
    """Read a run that was kept."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["steps"] = [(hour, math.inf if r is None else r) for hour, r in data["steps"]]
    return Run(**data)


Item = TypeVar("Item")


def in_parallel(
    work: Callable[[Path, Item], None],
    cache_dir: Path,
    items: Iterable[Item],
    jobs: int,
    told: Callable[[str], None],
) -> list[str]:
    """Do the work on every item and return what went wrong; one failed item stops no other."""
    failed: list[str] = []
    # A fresh interpreter each: Torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(work, cache_dir, item): item for item in items}
        for number, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            if error is not None:
                failed.append(f"{futures[future]}: {type(error).__name__}: {error}")
                told(f"FAILED {failed[-1]}")
            if number % 10 == 0 or number == len(futures):
                told(f"{number} of {len(futures)} done")
    return failed
