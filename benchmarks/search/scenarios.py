"""What the search benchmark searches: simulated worlds, each under a traffic and limits of its own.

Traffics and the order in which worlds meet them are fixed here, before any search was run on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune.search.setup import SearchSettings, SearchSetup, prepare
from autotune.search.space import SearchSpace
from autotune.serving.engine import EngineSettings
from autotune.serving.simulated import SimulatedEngine
from autotune.serving.worlds import WORLDS
from autotune.traffic.profile import TrafficProfile

BUDGET_S = 3 * 3600.0
"""Of engine time, for every method."""
FEASIBLE_SHARES = (0.6, 0.3, 0.1)
"""Of the points that launch: what each tightness level aims to leave feasible."""
CLASS_NAME = "mixed"
OBJECTIVE = "output_throughput_tps"
TTFT, TPOT = "ttft_p95_ms", "tpot_p95_ms"
WORLD_ORDER_SEED = 4
STREAM_INTERVAL = 16
"""Tokens that leave together: coarser streams make simulation cheaper and change no ranking."""


@dataclass(frozen=True)
class Traffic:
    """A load with mixed lengths, in tokens."""

    concurrency: int
    """Users in a closed loop; in open loop the most requests in flight."""
    prompt_p50: int
    answer_p50: int
    num_requests: int
    rate_rps: float | None = None
    """Open loop at this rate; None for a closed loop."""


TRAFFICS = (
    Traffic(1, 700, 250, 40),
    Traffic(8, 1200, 300, 64),
    Traffic(64, 600, 250, 192),
    Traffic(2, 3000, 400, 40),
    Traffic(16, 500, 200, 80),
    Traffic(128, 300, 150, 200),
    Traffic(32, 2000, 250, 96),
    Traffic(4, 256, 500, 40),
    Traffic(256, 250, 120, 200),
    Traffic(64, 800, 200, 120, rate_rps=2.0),
)
"""Worlds meet them in turn. Ten traffics and three levels share no factor, so they mix freely."""


@dataclass(frozen=True)
class Scenario:
    """One search problem; its limits come from its own landscape (`benchmarks.search.truth`)."""

    number: int
    world: str
    traffic: Traffic
    feasible_share: float

    @property
    def name(self) -> str:
        return f"{self.number:02d}-{self.world}-c{self.traffic.concurrency}"

    @property
    def key(self) -> str:
        """Everything that sets it apart, as text."""
        return json.dumps(asdict(self), sort_keys=True)


def scenarios(count: int, worlds: Sequence[str] | None = None) -> list[Scenario]:
    """Return the first `count` scenarios; the CPU demo's world is left to the replay benchmark.

    Args:
        count: how many; the worlds are gone through again, under other traffic, when there are fewer.
        worlds: names to take; every GPU world when None.
    """
    names = list(worlds or [w for w in sorted(WORLDS) if w != "cpu-demo"])
    # Shuffled, so that the first few are of all GPUs and models.
    random.Random(WORLD_ORDER_SEED).shuffle(names)
    return [
        Scenario(
            number=i,
            world=names[i % len(names)],
            # A second pass over the worlds must not meet the same traffic again.
            traffic=TRAFFICS[(i + i // len(names)) % len(TRAFFICS)],
            feasible_share=FEASIBLE_SHARES[i % len(FEASIBLE_SHARES)],
        )
        for i in range(count)
    ]


def make_profile(scenario: Scenario, limits: dict[str, float]) -> TrafficProfile:
    """Return the scenario's traffic, with limits by metric; none for the landscape itself."""
    traffic = scenario.traffic
    load: dict[str, Any] = {"kind": "concurrency", "concurrency": traffic.concurrency}
    if traffic.rate_rps is not None:
        load = {
            "kind": "rate", "rps": traffic.rate_rps, "arrival": "poisson",
            "max_concurrency": traffic.concurrency,
        }  # fmt: skip
    return TrafficProfile.model_validate(
        {
            "version": 1,
            "name": "bench",
            "seed": scenario.number,
            "load": load,
            "measure": {
                "min_requests": traffic.num_requests, "warmup": 4, "max_duration_s": 900,
            },
            "classes": [
                {
                    "name": CLASS_NAME,
                    "prompts": {"builtin": "demo/chat"},
                    "lengths": {
                        "input": _lengths(traffic.prompt_p50),
                        "output": _lengths(traffic.answer_p50),
                    },
                    "output": {"ignore_eos": True},
                    "slo": limits,
                }
            ],
            "objective": {"maximize": OBJECTIVE},
            # Answers of simulated servers have no text to judge.
            "quality": {"gate": "off"},
        }
    )  # fmt: skip


def _lengths(p50: int) -> dict[str, Any]:
    return {"dist": "lognormal", "p50": p50, "p95": 2 * p50, "max": 3 * p50}


def make_space() -> SearchSpace:
    """Return the shipped P-EAGLE space, with coarse streams."""
    return SearchSpace.model_validate(
        {
            "version": 1,
            "name": "bench",
            "parameters": {
                "num_speculative_tokens": {"range": [0, 32]},
                "tree_width": {"choices": [1, 2, 4]},
                "weights": {"choices": ["as_is", "fp8"]},
                "kv_cache_dtype": {"choices": ["auto", "fp8"]},
                "max_num_seqs": {"powers_of_two": [8, 512]},
                "max_num_batched_tokens": {"powers_of_two": [2048, 32768]},
            },
            "fixed": {"gpu-memory-utilization": 0.9, "stream-interval": STREAM_INTERVAL},
        }
    )


def make_setup(
    scenario: Scenario, limits: dict[str, float], seed: int, sampler: str, folder: Path
) -> SearchSetup:
    """Prepare a search on the scenario.

    The seed moves the engine's noise and the sampler. The requests stay those of the scenario, because
    truth belongs to them.
    """
    engine = SimulatedEngine(EngineSettings(options={"world": scenario.world}, seed=seed))
    settings = SearchSettings(
        storage=str(folder / "bench.db"),
        out_dir=folder,
        sampler=sampler,
        budget_s=BUDGET_S,
        is_warm_started=False,
    )
    setup = prepare(
        make_profile(scenario, limits),
        make_space(),
        engine,
        "bench/model",
        ("bench/head",),
        settings,
    )
    return replace(setup, settings=replace(settings, seed=seed))
