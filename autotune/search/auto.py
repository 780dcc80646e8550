"""The default sampler: our proposer as an Optuna `BaseSampler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.search.candidates import Candidates
from autotune.search.proposer import Proposer
from autotune.search.samplers import distributions, tried_digests
from autotune.search.surrogate import Observation

PROPOSED_BY_ATTR = "proposed_by"
"""User attribute with the name of the model that proposed a trial; anchors have none."""


class AutoSampler(BaseSampler):
    """Asks the proposer, and writes beside each trial who proposed it and what was expected of it.

    It reads observations (counters, step times, whole measurements), which say far more than the values
    in Optuna's ledger, from wherever `observe` takes them. Before anything was measured, and when the
    proposer has nothing to say, it takes the next candidate that was not tried.
    """

    def __init__(
        self,
        proposer: Proposer,
        candidates: Candidates,
        observe: Callable[[], Sequence[Observation]],
    ) -> None:
        self._proposer = proposer
        self._candidates = candidates
        self._observe = observe
        self._by_digest = candidates.by_digest()
        self._space = distributions(candidates)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        digests = tried_digests(study)
        tried = {self._by_digest[d].config for d in digests if d in self._by_digest}
        trials = study.get_trials(deepcopy=False)
        num_proposed = sum(PROPOSED_BY_ATTR in t.user_attrs for t in trials)
        self._proposer.learn(self._observe())
        proposal = self._proposer.propose(tried, num_proposed)
        if proposal is None:
            chosen = next((c for c in self._candidates.items if c.config not in tried), None)
            if chosen is None:
                raise RuntimeError("asked for a proposal although every candidate was tried")
        else:
            chosen = self._candidates.items[proposal.index]
            self._explain(
                study,
                trial,
                {
                    PROPOSED_BY_ATTR: proposal.model,
                    "expected_gain_ratio": round(proposal.expected_gain_ratio, 6),
                    "feasible_probability": round(proposal.feasible_probability, 4),
                    "predicted_objective": round(proposal.predicted, 4),
                    "predicted_s": round(proposal.seconds, 1),
                },
            )
        return {name: chosen.params[name] for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise RuntimeError(f"{param_name} is always sampled together with the others")

    @staticmethod
    def _explain(study: Study, trial: FrozenTrial, reasons: dict[str, Any]) -> None:
        for name, value in reasons.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, value)
