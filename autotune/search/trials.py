"""The trials of a study in Optuna's ledger: asked for, run by somebody, and told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import optuna
from optuna.trial import Trial, TrialState

from autotune.measure.metrics import Limits, observed, summarize, violations
from autotune.measure.records import Measurement
from autotune.search.auto import PROPOSED_BY_ATTR
from autotune.search.candidates import Candidate, Candidates
from autotune.search.decision import Goal
from autotune.search.samplers import DIGEST_ATTR, distributions, tried_digests
from autotune.search.worth import Tried
from autotune.serving.config import ServingConfig
from autotune.serving.failures import TrialFailure
from autotune.store.holders import is_alive, this_process
from autotune.store.records import LaunchRecord

LEASE_ATTR = "lease"
"""User attribute that says which process runs a trial; another one leaves it alone while that lives."""


class Trials:
    """Optuna's side of the search phase."""

    def __init__(self, study: optuna.Study, candidates: Candidates, goal: Goal) -> None:
        self._study = study
        self._candidates = candidates
        self._goal = goal

    def tried(self) -> set[str]:
        """Digests of the configs whose trials are finished or running."""
        return tried_digests(self._study)

    def history(self) -> list[Tried]:
        """Return what became of the trials that ended, in their order."""
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [
            Tried(
                value=t.value if all(v <= 0 for v in t.constraints.values()) else None,
                proposed_by=t.user_attrs.get(PROPOSED_BY_ATTR),
            )
            for t in trials
        ]

    def recover(self, finished: Mapping[int, LaunchRecord]) -> None:
        """Bring the ledger into line after a session that was cut off at any point.

        Autotune's tables are written first, Optuna's second. So a measured launch whose trial still
        runs is told now, and a trial without a finished launch is dropped and its config tried anew.

        Args:
            finished: the launches that ended, with their measurements, by trial number.
        """
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            if (holder := frozen.user_attrs.get(LEASE_ATTR)) is not None and is_alive(holder):
                continue
            launch = finished.get(frozen.number)
            if launch is None:
                self._study.tell(frozen.number, state=TrialState.FAIL)
                continue
            trial = Trial(self._study, frozen._trial_id)
            self.tell(trial, launch.measurements, launch.failure)

    def enqueue(self, candidate: Candidate) -> None:
        """Make a candidate the next one to be asked for."""
        # A session that was cut off here may have left this very trial waiting.
        if not self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            moving = distributions(self._candidates)
            self._study.enqueue_trial({n: v for n, v in candidate.params.items() if n in moving})

    def ask(self, label: Callable[[ServingConfig], str]) -> tuple[Trial, ServingConfig]:
        """Ask for the next trial.

        Args:
            label: names a config.
        """
        trial = self._study.ask(distributions(self._candidates))
        standing = {d.name: d.values[0] for d in self._candidates.dimensions}
        candidate = self._candidates.nearest({**standing, **trial.params}, set())
        assert candidate is not None  # there is at least one candidate, or `prepare` had refused
        trial.set_user_attr(DIGEST_ATTR, candidate.config.digest)
        trial.set_user_attr("label", label(candidate.config))
        # Optuna's heartbeat exists in `optimize` alone, not for trials that are asked for and told.
        trial.set_user_attr(LEASE_ATTR, this_process())
        return trial, candidate.config

    def tell(
        self,
        trial: Trial,
        measurements: tuple[Measurement, ...],
        failure: TrialFailure | None,
    ) -> None:
        """Report a trial.

        A crash is a COMPLETE trial with a violated constraint, because samplers do not learn from
        FAIL and would propose the same again. So is a run that was stopped as hopeless.
        """
        goal = self._goal
        # Every trial has every constraint: Optuna's GP refuses lists of different lengths.
        constraints = {"launch": -1.0 if failure is None else 1.0, "whole_run": -1.0}
        if failure is not None:
            trial.set_user_attr("failure", str(failure))
            constraints |= dict.fromkeys(_limit_names(goal.limits), 1.0)
            value = self._worst_value()
        else:
            measurement = measurements[0]
            value = observed(goal.objective, measurement, goal.limits)
            constraints |= violations(measurement, goal.limits)
            if measurement.stopped_early is not None:
                constraints["whole_run"] = 1.0
                trial.set_user_attr("stopped_early", measurement.stopped_early)
            for name, figure in summarize(measurement, goal.limits).items():
                if figure is not None:
                    trial.set_user_attr(name, round(figure, 6))
        _set_constraints(trial, constraints)
        self._study.tell(trial, value if math.isfinite(value) else self._worst_value())

    def _worst_value(self) -> float:
        """The worst value seen, for a trial without one.

        Far worse values would squeeze all real differences together when a model standardises.
        """
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [t.value for t in done if t.value is not None]
        if not values:
            return 0.0 if self._goal.is_maximized else 1e6
        return min(values) if self._goal.is_maximized else max(values)


def _limit_names(limits: Limits) -> list[str]:
    return [f"{name}.{limit}" for name, of_class in limits.items() for limit in of_class]


def _set_constraints(trial: Trial, constraints: Mapping[str, float]) -> None:
    """Set constraints, above 0 means violated; those set before a session was cut off stay."""
    already = trial.constraints
    for name, value in constraints.items():
        if name not in already:
            trial.set_constraint(name, value)
