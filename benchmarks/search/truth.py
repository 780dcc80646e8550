"""What every config would truly reach: where limits come from and what methods are judged by.

Throughput is that of a simulation without any noise. There the drafts accepted are exact as well, so every
request has the same luck, and a p95 would be too good: in truth some requests are unlucky. So the two p95
figures are multiplied by what luck alone does to them, by K (`chance_ratios`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.measure.metrics import observed
from autotune.measure.records import Measurement
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import TrialFailed
from autotune.serving.simulated import SimulatedEngine
from autotune.traffic.schedule import Schedule
from benchmarks.search.scenarios import OBJECTIVE, TPOT, TTFT

LIMIT_ROOM = 1.05
FEASIBILITY_SLACK = 0.03
"""By how much a limit may truly be exceeded before a recommendation counts as infeasible."""


@dataclass(frozen=True)
class Point:
    """One config's true figures."""

    throughput_tps: float
    ttft_p95_ms: float
    tpot_p95_ms: float


def true_point(config: ServingConfig, schedule: Schedule, world: str) -> Point | None:
    """Simulate without noise; None where the config cannot serve."""
    engine = SimulatedEngine(EngineSettings(options={"world": world, "noise": 0.0}))
    try:
        with engine.launch(config, LaunchContext(work_dir=Path(), name="truth")) as server:
            measured = server.measure(schedule)
    except TrialFailed:
        return None
    return _point(measured)


LUCK_ONLY = 1e-6
"""Noise of the engine at which times are exact to a millionth and acceptance is drawn."""
NUM_DRAWS = 5
Ratios = dict[int, tuple[float, float]]
"""Of p95 TTFT and p95 TPOT, by K."""


def chance_ratios(
    configs: Iterable[ServingConfig],
    points: Mapping[str, Point | None],
    schedule: Schedule,
    world: str,
) -> Ratios:
    """Return what drawing the accepted drafts does to the p95 figures, by K.

    Of the first candidate of each K that launches: the median over draws, which an outlier among the launches
    does not move, over its figure without luck.
    """
    ratios: Ratios = {}
    for config in configs:
        exact, k = points.get(config.digest), config.num_speculative_tokens
        if exact is None or k in ratios:
            continue
        drawn = [p for i in range(NUM_DRAWS) if (p := _drawn(config, schedule, world, i))]
        if drawn:
            ratios[k] = (
                float(np.median([p.ttft_p95_ms for p in drawn])) / exact.ttft_p95_ms,
                float(np.median([p.tpot_p95_ms for p in drawn])) / exact.tpot_p95_ms,
            )
    return ratios


def with_chance(point: Point | None, config_k: int, ratios: Ratios) -> Point | None:
    """Return a point with its p95 figures as luck has them."""
    if point is None or config_k not in ratios:
        return point
    ttft, tpot = ratios[config_k]
    return Point(point.throughput_tps, point.ttft_p95_ms * ttft, point.tpot_p95_ms * tpot)


def _drawn(config: ServingConfig, schedule: Schedule, world: str, number: int) -> Point | None:
    engine = SimulatedEngine(EngineSettings(options={"world": world, "noise": LUCK_ONLY}))
    context = LaunchContext(work_dir=Path(), name=f"draw-{number}")
    try:
        with engine.launch(config, context) as server:
            return _point(server.measure(schedule))
    except TrialFailed:
        return None


def _point(measured: Measurement) -> Point:
    return Point(*(float(observed(name, measured)) for name in (OBJECTIVE, TTFT, TPOT)))


def limits_for(points: Iterable[Point | None], feasible_share: float) -> dict[str, float]:
    """Return limits that leave about `feasible_share` of the points that launch feasible.

    Both limits are the same quantile of their own figure, so that neither is idle: the lowest quantile, in
    steps of 1 %, that leaves at least this share. Where most points share one figure it leaves more. Some
    room on top keeps a limit from lying exactly on the figure of many points, where noise alone decides.
    """
    launched = [p for p in points if p is not None]
    ttft = np.array([p.ttft_p95_ms for p in launched])
    tpot = np.array([p.tpot_p95_ms for p in launched])
    for quantile in np.arange(0.01, 1.0, 0.01):
        limits = float(np.quantile(ttft, quantile)), float(np.quantile(tpot, quantile))
        if np.mean((ttft <= limits[0]) & (tpot <= limits[1])) >= feasible_share:
            break
    return {TTFT: limits[0] * LIMIT_ROOM, TPOT: limits[1] * LIMIT_ROOM}


@dataclass
class Landscape:
    """The truth of one scenario; configs outside the candidates are simulated when they are asked for."""

    world: str
    schedule: Schedule
    limits: Mapping[str, float]
    points: dict[str, Point | None]
    """By digest, with chance."""
    ratios: Ratios

    @property
    def best_tps(self) -> float:
        """The most that any candidate reaches within the limits as they are."""
        return max(p.throughput_tps for p in self.points.values() if p and self.excess(p) <= 0)

    def excess(self, point: Point) -> float:
        """Return by what share the worst limit is exceeded; negative where all are kept."""
        return max(
            point.ttft_p95_ms / self.limits[TTFT] - 1, point.tpot_p95_ms / self.limits[TPOT] - 1
        )

    def point(self, config: ServingConfig) -> Point | None:
        if config.digest not in self.points:
            exact = true_point(config, self.schedule, self.world)
            self.points[config.digest] = with_chance(
                exact, config.num_speculative_tokens, self.ratios
            )
        return self.points[config.digest]

    def regret(self, config: ServingConfig | None, best_tps: float) -> float:
        """Return the share of the best throughput that is lost; infinite without a feasible config."""
        point = self.point(config) if config is not None else None
        if point is None or self.excess(point) > FEASIBILITY_SLACK:
            return math.inf
        return max(0.0, 1 - point.throughput_tps / best_tps)


def read_points(path: Path) -> dict[str, Point | None]:
    """Read points that `write_points` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {digest: Point(*values) if values else None for digest, values in data.items()}


def write_points(path: Path, points: Mapping[str, Point | None]) -> None:
    """Write points, whole or not at all."""
    data = {
        digest: [p.throughput_tps, p.ttft_p95_ms, p.tpot_p95_ms] if p else None
        for digest, p in points.items()
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)
