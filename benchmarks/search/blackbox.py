"""Methods that know nothing of serving: points of the plain space, one launch each, the best observed wins.

They see the space as the YAML has it, with K capped like ours. What cannot run is launched and crashes.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from autotune.measure.metrics import observed, violations
from autotune.search.setup import SearchSetup
from autotune.search.trial import TrialResult, run_trial
from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchContext

BEYOND_TRAINED_DEPTH = 2
"""How far past its trained depth K is searched, as in our own candidates."""
Params = Mapping[str, Any]


@dataclass
class History:
    """What a method did, in order."""

    recommendations: list[tuple[float, ServingConfig | None]] = field(default_factory=list)
    """(seconds since the start, config) whenever the recommendation may have changed."""
    num_launches: int = 0
    num_crashed: int = 0
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each proposal."""
    ended_s: float = 0.0


def plain_knobs(setup: SearchSetup) -> dict[str, list[Any]]:
    """Return the values of every knob, without any knowledge of which of them launch."""
    depths = setup.space.values_of("num_speculative_tokens") or [0]
    most = (setup.trained_depth or max(depths)) + BEYOND_TRAINED_DEPTH
    knobs = {"num_speculative_tokens": [k for k in depths if k <= most]}
    names = ["weights", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens"]
    if setup.info.has_trees:
        names.insert(0, "tree_width")
    for name in names:
        knobs[name] = setup.space.values_of(name) or [None]
    return knobs


def plain_config(setup: SearchSetup, params: Params) -> ServingConfig | None:
    """Return the config at a point; None where a tree's width does not divide K."""
    k, width = params["num_speculative_tokens"], params.get("tree_width", 1)
    if k % width:
        return None
    head = setup.drafters[0]
    return ServingConfig(
        model=setup.candidates.baseline.config.model,
        drafter=head.serve_as if k else None,
        num_speculative_tokens=k,
        parallel_drafting=bool(k) and head.is_parallel,
        tree_width=width if k else 1,
        weights=params["weights"],
        kv_cache_dtype=params["kv_cache_dtype"],
        max_num_seqs=params["max_num_seqs"],
        max_num_batched_tokens=params["max_num_batched_tokens"],
        flags=tuple(sorted(setup.space.fixed_flags.items())),
    )


class _Bench:
    """Launches configs and keeps the history."""

    def __init__(self, setup: SearchSetup, budget_s: float, folder: Path) -> None:
        self.setup = setup
        self.history = History()
        self._clock = setup.engine.clock
        self._began_s = self._clock.now_s()
        self._budget_s = budget_s
        self._folder = folder

    @property
    def spent_s(self) -> float:
        return self._clock.now_s() - self._began_s

    @property
    def has_time(self) -> bool:
        return self.spent_s < self._budget_s

    def launch(self, config: ServingConfig) -> TrialResult:
        self.history.num_launches += 1
        name = f"{self.history.num_launches:04d}-{config.digest}"
        context = LaunchContext(work_dir=self._folder, name=name, needs=self.setup.needs)
        result = run_trial(self.setup.engine, config, self.setup.schedule, context)
        self.history.num_crashed += result.failure is not None
        return result

    def recommend(self, config: ServingConfig | None) -> None:
        self.history.recommendations.append((self.spent_s, config))

    def end(self) -> History:
        self.history.ended_s = self.spent_s
        return self.history


def run_list(
    setup: SearchSetup, budget_s: float, folder: Path, configs: Iterator[ServingConfig]
) -> History:
    """Launch configs in the order given; recommend the best that was seen to keep every limit."""
    bench, goal = _Bench(setup, budget_s, folder), setup.goal
    best: ServingConfig | None = None
    best_tps = -math.inf
    for config in configs:
        if not bench.has_time:
            break
        result = bench.launch(config)
        if result.failure is None:
            measured = result.measurements[0]
            tps = observed(goal.objective, measured, goal.limits)
            is_kept = all(v <= 0 for v in violations(measured, goal.limits).values())
            if is_kept and tps > best_tps:
                best, best_tps = config, tps
        bench.recommend(best)
    return bench.end()


def grid_configs(setup: SearchSetup, seed: int) -> Iterator[ServingConfig]:
    """Yield a coarse grid in shuffled order: 4 K x 2 x 2 x 3 x 3 = 144 points where all knobs move."""
    knobs = plain_knobs(setup)
    coarse = {
        name: _spread(values, 4 if name == "num_speculative_tokens" else 3)
        for name, values in knobs.items()
        if name != "tree_width"
    }
    points = [
        dict(zip(coarse, values, strict=True)) for values in itertools.product(*coarse.values())
    ]
    random.Random(seed).shuffle(points)
    yield from (config for p in points if (config := plain_config(setup, p)) is not None)


def _spread(values: list[Any], count: int) -> list[Any]:
    """Return up to `count` of the values, evenly spread with both ends."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def nested_loop_configs(setup: SearchSetup, seed: int) -> Iterator[ServingConfig]:
    """Yield every max_num_seqs x max_num_batched_tokens, K by K: the trained depth, 3, none.

    The loop of vLLM's benchmarks/auto_tune, which has no K of its own and no other knob. The descent of the
    request rate, its third loop, has nothing to find here: the load is the profile's.
    """
    knobs = plain_knobs(setup)
    for k in dict.fromkeys((setup.trained_depth or 3, 3, 0)):
        for seqs in knobs["max_num_seqs"]:
            for budget in knobs["max_num_batched_tokens"]:
                config = plain_config(
                    setup,
                    {
                        "num_speculative_tokens": k,
                        "weights": "as_is",
                        "kv_cache_dtype": "auto",
                        "max_num_seqs": seqs,
                        "max_num_batched_tokens": budget,
                    },
                )
                assert config is not None  # no width, which alone can refuse
                yield config


SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed),
    "gp": lambda seed: GPSampler(seed=seed),
}
"""Optuna's own, with its defaults."""


def run_optuna(setup: SearchSetup, budget_s: float, folder: Path, name: str, seed: int) -> History:
    """Let an Optuna sampler propose; recommend its study's best trial.

    A crash is a COMPLETE trial with violated constraints and the worst value seen, as in our own studies.
    """
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.simplefilter("ignore", ExperimentalWarning)
    bench = _Bench(setup, budget_s, folder)
    study = optuna.create_study(sampler=SAMPLERS[name](seed), direction="maximize")
    knobs = plain_knobs(setup)
    space = {knob: _distribution(values) for knob, values in knobs.items()}
    configs: dict[int, ServingConfig] = {}
    while bench.has_time:
        began_s = time.process_time()
        trial = study.ask(space)
        bench.history.cpu_s.append(time.process_time() - began_s)
        config = plain_config(setup, _values(trial.params, knobs))
        if config is None:
            # No config stands for this point; the sampler is told so, at no cost in time.
            _tell_failed(study, trial, setup)
            continue
        configs[trial.number] = config
        _tell(study, trial, setup, bench.launch(config))
        try:
            best = study.best_trial.number
        except ValueError:  # no feasible trial yet
            bench.recommend(None)
        else:
            bench.recommend(configs.get(best))
    return bench.end()


def _tell(
    study: optuna.Study, trial: optuna.Trial, setup: SearchSetup, result: TrialResult
) -> None:
    goal = setup.goal
    if result.failure is not None:
        _tell_failed(study, trial, setup)
        return
    measured = result.measurements[0]
    trial.set_constraint("launch", -1.0)
    for name, value in violations(measured, goal.limits).items():
        trial.set_constraint(name, value)
    study.tell(trial, observed(goal.objective, measured, goal.limits))


def _tell_failed(study: optuna.Study, trial: optuna.Trial, setup: SearchSetup) -> None:
    """Report a trial without figures: every constraint is violated, since samplers want all in all trials."""
    limits = [f"{c}.{limit}" for c, of_class in setup.goal.limits.items() for limit in of_class]
    for name in ("launch", *limits):
        trial.set_constraint(name, 1.0)
    study.tell(trial, _worst(study))


def _worst(study: optuna.Study) -> float:
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min((t.value for t in done if t.value is not None), default=0.0)


def _distribution(values: list[Any]) -> BaseDistribution:
    """Numbers as their place in the list, so that powers of two are evenly spaced; else categories."""
    if all(isinstance(v, int) for v in values):
        return IntDistribution(0, len(values) - 1)
    return CategoricalDistribution(values)


def _values(params: Params, knobs: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {
        name: knobs[name][value] if isinstance(value, int) else value
        for name, value in params.items()
    }
