"""Samplers over the candidate list: Optuna's own, kept on what can be launched and is not yet known.

The default is none of them, where the sizes of model and device are known: `autotune.search.auto`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import PrerequisiteError
from autotune.search.candidates import Candidates, Dimension

DIGEST_ATTR = "config_digest"
"""User attribute that says which candidate a trial stands for."""


def distributions(candidates: Candidates) -> dict[str, BaseDistribution]:
    """Return Optuna's description of every dimension that moves."""
    return {d.name: _distribution(d) for d in candidates.dimensions if len(d.values) > 1}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.is_ordered:
        return IntDistribution(dimension.values[0], dimension.values[-1])
    return CategoricalDistribution(dimension.values)


class CandidateSampler(BaseSampler):
    """Lets an inner sampler propose, and answers with the nearest candidate not measured yet.

    Optuna's samplers propose from a full product of the knobs and propose the same point again once
    they have converged. Each launch costs minutes, so both are turned into a launch that tells
    something new.
    """

    def __init__(self, inner: BaseSampler | None, candidates: Candidates, seed: int) -> None:
        """Wrap `inner`; None visits the candidates in shuffled order (a grid)."""
        self._inner = inner
        self._candidates = candidates
        self._order = list(candidates.items)
        random.Random(seed).shuffle(self._order)
        self._space = distributions(candidates)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        tried = tried_digests(study)
        if self._inner is None:
            chosen = next((c for c in self._order if c.config.digest not in tried), None)
        else:
            chosen = self._candidates.nearest(self._propose(study, trial), tried)
        if chosen is None:
            raise RuntimeError("asked for a proposal although every candidate was tried")
        return {name: chosen.params[name] for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise RuntimeError(f"{param_name} is always sampled together with the others")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        if self._inner is not None:
            self._inner.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Any
    ) -> None:
        if self._inner is not None:
            self._inner.after_trial(study, trial, state, values)

    def _propose(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        assert self._inner is not None  # the grid has no inner sampler
        space = self._inner.infer_relative_search_space(study, trial)
        proposal = self._inner.sample_relative(study, trial, space)
        for name, distribution in self._space.items():
            if name not in proposal:
                proposal[name] = self._inner.sample_independent(study, trial, name, distribution)
        standing = {d.name: d.values[0] for d in self._candidates.dimensions}
        return {**standing, **proposal}


def tried_digests(study: Study) -> set[str]:
    """Digests of the configs whose trials are finished or waiting to be."""
    states = (TrialState.COMPLETE, TrialState.RUNNING)
    trials = study.get_trials(deepcopy=False, states=states)
    return {t.user_attrs[DIGEST_ATTR] for t in trials if DIGEST_ATTR in t.user_attrs}


def _tpe(seed: int, num_startup: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_startup)


def _gp(seed: int, num_startup: int) -> BaseSampler:
    if find_spec("torch") is None:
        raise PrerequisiteError(
            'the GP sampler needs torch: pip install "autotune[gp]". '
            "Or choose another one: --sampler tpe."
        )
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=num_startup)


def _random(seed: int, num_startup: int) -> BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


SAMPLERS: Mapping[str, Callable[[int, int], BaseSampler | None]] = {
    "tpe": _tpe,
    "gp": _gp,
    "random": _random,
    "grid": lambda seed, num_startup: None,
}
SAMPLER_NAMES = ("auto", *SAMPLERS)
MAX_STARTUP_TRIALS = 10


def resolve_sampler(name: str, *, has_sizes: bool) -> str:
    """Return the sampler that a study uses: `auto` needs sizes, and falls back to GP, without torch to TPE.

    Our physics-free model alone needs twice the time of either (docs/search-benchmark.md).
    """
    if name != "auto" or has_sizes:
        return name
    return "gp" if find_spec("torch") is not None else "tpe"


def create_sampler(name: str, candidates: Candidates, seed: int) -> CandidateSampler:
    """Build the sampler called `name`.

    The number of random trials before the model takes over shrinks with the number of candidates:
    Optuna's ten would use up a small study.
    """
    num_startup = min(MAX_STARTUP_TRIALS, max(3, len(candidates.items) // 5))
    return CandidateSampler(SAMPLERS[name](seed, num_startup), candidates, seed)
