"""The methods that are compared, by name: each spends a budget of engine time on one prepared search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from autotune.errors import NothingFeasibleError
from autotune.search.listener import SilentListener
from autotune.search.setup import SearchSetup
from autotune.search.trial import TrialResult
from autotune.serving.clock import Clock
from autotune.serving.config import ServingConfig
from autotune.store.records import Phase
from autotune.store.repository import Store
from benchmarks.search.blackbox import (
    History,
    grid_configs,
    nested_loop_configs,
    run_list,
    run_optuna,
)
from benchmarks.search.scenarios import BUDGET_S

Physics = Literal["right", "wrong", "none"]


class Recorder(SilentListener):
    """Writes down what a search recommends and when, and what its thinking costs."""

    def __init__(self, clock: Clock) -> None:
        self.history = History()
        self._clock = clock
        self._began_s = clock.now_s()
        self._thinks_since_s = time.process_time()

    @property
    def spent_s(self) -> float:
        return self._clock.now_s() - self._began_s

    def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None:
        if phase is Phase.SEARCH:
            self.history.cpu_s.append(time.process_time() - self._thinks_since_s)

    def on_result(self, config: ServingConfig, phase: Phase, result: TrialResult) -> None:
        self.history.num_launches += 1
        self.history.num_crashed += result.failure is not None
        self._thinks_since_s = time.process_time()

    def on_recommendation(self, config: ServingConfig | None) -> None:
        self.history.recommendations.append((self.spent_s, config))


def run_ours(setup: SearchSetup, folder: Path, seed: int, physics: Physics = "right") -> History:
    """Run our own search to its decision; CPU per proposal includes keeping books."""
    # Here and not above: the plain methods need nothing of our search.
    from autotune.search.costmodel.physics import CostModel
    from autotune.search.study import run_search
    from benchmarks.search.wrong_model import WrongCostModel

    recorder = Recorder(setup.engine.clock)
    factory = {"right": CostModel, "wrong": WrongCostModel, "none": None}[physics]
    store = Store(setup.settings.storage, create=True)
    try:
        decision = run_search(setup, store, recorder, physics=factory).decision
        if decision is not None:
            known = {c.config.digest: c.config for c in setup.candidates.items}
            recorder.on_recommendation(known[decision.winner])
    except NothingFeasibleError:
        recorder.on_recommendation(None)
    finally:
        store.close()
    recorder.history.ended_s = recorder.spent_s
    return recorder.history


@dataclass(frozen=True)
class Method:
    """A way to search."""

    run: Callable[[SearchSetup, Path, int], History]
    sampler: str = "random"
    """What `SearchSettings` is told; plain methods take no notice of it."""
    is_ours: bool = False
    """Whether it goes through `run_search`, so that a change there makes its results stale."""


def _plain(name: str) -> Method:
    return Method(lambda setup, folder, seed: run_optuna(setup, BUDGET_S, folder, name, seed))


def _listed(configs: Callable[[SearchSetup, int], Iterator[ServingConfig]]) -> Method:
    return Method(
        lambda setup, folder, seed: run_list(setup, BUDGET_S, folder, configs(setup, seed))
    )


METHODS: Mapping[str, Method] = {
    "random": _plain("random"),
    "grid": _listed(grid_configs),
    "auto_tune": _listed(nested_loop_configs),
    "tpe": _plain("tpe"),
    "gp": _plain("gp"),
    "tpe+": Method(run_ours, "tpe", is_ours=True),
    "gp+": Method(run_ours, "gp", is_ours=True),
    "ours": Method(run_ours, "auto", is_ours=True),
    "ours-wrong-model": Method(partial(run_ours, physics="wrong"), "auto", is_ours=True),
    "ours-no-physics": Method(partial(run_ours, physics="none"), "auto", is_ours=True),
}
