"""The study loop: anchors, search, confirmation, decision; every step kept before the next begins."""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import Trial, TrialState

from autotune.errors import NothingFeasibleError, StudyChangedError
from autotune.measure.client import MeasurementStopped
from autotune.measure.metrics import Limits, observed, summarize, violations
from autotune.measure.quality.verdict import (
    QualityLevel,
    QualityVerdict,
    verdict_from_dict,
)
from autotune.measure.records import Measurement
from autotune.search.candidates import Candidate
from autotune.search.decision import BASELINE_ROLE, DEFAULT_ROLE, Decision, Finalist, decide
from autotune.search.definition import differences
from autotune.search.judging import MAX_LAUNCHES_PER_VERDICT, Judge
from autotune.search.launcher import Launcher
from autotune.search.ledger import optuna_storage, storage_errors
from autotune.search.listener import SearchListener, SilentListener
from autotune.search.samplers import DIGEST_ATTR, create_sampler, distributions, tried_digests
from autotune.search.setup import SearchSetup
from autotune.serving.clock import VirtualClock
from autotune.serving.config import ServingConfig
from autotune.serving.failures import TrialFailure
from autotune.store.records import LaunchRecord, LaunchState, Phase, StudyRecord
from autotune.store.repository import Store


class StopReason(StrEnum):
    """Why a search came to its end."""

    COMPLETE = "complete"
    BUDGET = "budget"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended."""

    study: StudyRecord
    stop_reason: StopReason
    decision: Decision | None


def run_search(
    setup: SearchSetup,
    store: Store,
    listener: SearchListener | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SearchOutcome:
    """Run a study to its decision, or go on with one that was cut off.

    Args:
        setup: from `prepare`.
        store: the open database.
        listener: is told what happens.
        should_stop: asked about twice a second; True ends the search cleanly, to be resumed.

    Raises:
        StudyChangedError: a study of this name exists and was defined otherwise.
        NothingFeasibleError: nothing that was tried keeps every limit.
        StudyError: another process runs it.
    """
    with storage_errors(setup.settings.storage):
        search = _Search(
            setup, store, listener or SilentListener(), should_stop or (lambda: False)
        )
        return search.run()


class _Search:
    """One session of a study."""

    def __init__(
        self,
        setup: SearchSetup,
        store: Store,
        listener: SearchListener,
        should_stop: Callable[[], bool],
    ) -> None:
        self.setup = setup
        self.store = store
        self.listener = listener
        self.should_stop = should_stop
        self.clock = setup.engine.clock
        self.study = open_study(setup, store)
        self.optuna_study = _open_optuna_study(setup)
        self.session_verdicts: dict[str, QualityVerdict] = {}
        self.launcher = Launcher(setup, store, self.study, listener, should_stop)
        self.spent_before_s = self.study.timings_s.get("total", 0.0)
        self.began_s = self.clock.now_s()

    def run(self) -> SearchOutcome:
        self.store.take_hold(self.study)
        try:
            self._go_on_in_time()
            self._recover()
            done = [x for x in self._launches() if x.state in _FINISHED]
            self.listener.on_start(self.setup, len(done))
            reason = self._run_phases()
        except MeasurementStopped:
            reason = StopReason.INTERRUPTED
        finally:
            self.launcher.keep_time({})
            self.store.release(self.study)
        decision = None if reason is StopReason.INTERRUPTED else self._decide()
        return SearchOutcome(self.study, reason, decision)

    def _run_phases(self) -> StopReason:
        self._search()
        if not self._feasible():
            raise NothingFeasibleError(self._nothing_feasible())
        finalists = self._finalists()
        is_complete = self._confirm(finalists) and self._check_quality()
        return StopReason.COMPLETE if is_complete else StopReason.BUDGET

    # Going on after a cut

    def _go_on_in_time(self) -> None:
        """Let virtual time go on where the last session left it; real time does so by itself."""
        if isinstance(self.clock, VirtualClock):
            ends = [x.ended_at_s or x.started_at_s for x in self._launches()]
            self.clock.advance_to(max(ends, default=0.0))
            self.began_s = self.launcher.kept_until_s = self.clock.now_s()

    def _recover(self) -> None:
        """Bring both ledgers into line after a session that was cut off at any point.

        Autotune's tables are written first, Optuna's second. So a measured launch whose trial still
        runs is told now, and a trial without a finished launch is dropped and its config tried anew.
        """
        self.store.abandon_running(self.study)
        finished: dict[int, LaunchRecord] = {
            launch.trial_number: launch
            for launch in self._launches(with_measurements=True)
            if launch.trial_number is not None and launch.state in _FINISHED
        }
        for frozen in self.optuna_study.get_trials(states=(TrialState.RUNNING,)):
            launch = finished.get(frozen.number)
            if launch is None:
                self.optuna_study.tell(frozen.number, state=TrialState.FAIL)
                continue
            trial = Trial(self.optuna_study, frozen._trial_id)
            self._tell(trial, launch.config, launch.measurements, launch.failure)

    # Search phase

    def _search(self) -> None:
        self.listener.on_phase(Phase.SEARCH, self.setup.max_trials)
        for candidate in self._anchors():
            if not self._fits(1):
                return
            if candidate.config.digest not in tried_digests(self.optuna_study):
                # A session that was cut off here may have left this very trial waiting.
                if not self.optuna_study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                    self.optuna_study.enqueue_trial(self._searched(candidate))
                self._try_next()
        while self._may_search():
            self._try_next()

    def _anchors(self) -> list[Candidate]:
        c = self.setup.candidates
        ordered = {x.config.digest: x for x in (c.baseline, c.default, c.starter)}
        return list(ordered.values())[: max(self.setup.max_trials, 1)]

    def _searched(self, candidate: Candidate) -> dict[str, Any]:
        moving = distributions(self.setup.candidates)
        return {name: value for name, value in candidate.params.items() if name in moving}

    def _may_search(self) -> bool:
        tried = tried_digests(self.optuna_study)
        if len(tried) >= self.setup.max_trials:
            return False
        open_items = [c for c in self.setup.candidates.items if c.config.digest not in tried]
        return bool(open_items) and self._fits(1 + self._num_confirmation_launches())

    def _num_confirmation_launches(self) -> int:
        settings = self.setup.settings
        return (settings.num_finalists + 2) * settings.num_repeats

    def _fits(self, num_launches: int) -> bool:
        """Whether the budget has room for that many more launches, at what they took so far."""
        budget_s = self.setup.settings.budget_s
        if budget_s is None:
            return True
        done = [x for x in self._launches() if x.ended_at_s is not None]
        mean_s = sum((x.ended_at_s or 0) - x.started_at_s for x in done) / max(len(done), 1)
        return self._spent_s() + num_launches * mean_s <= budget_s

    def _spent_s(self) -> float:
        return self.spent_before_s + self.clock.now_s() - self.began_s

    def _try_next(self) -> None:
        trial = self.optuna_study.ask(distributions(self.setup.candidates))
        candidate = self._candidate_of(trial)
        trial.set_user_attr(DIGEST_ATTR, candidate.config.digest)
        trial.set_user_attr("label", self.setup.label(candidate.config))
        result = self.launcher.measure(candidate.config, Phase.SEARCH, 0, trial.number)
        self._tell(trial, candidate.config, result.measurements, result.failure)

    def _candidate_of(self, trial: Trial) -> Candidate:
        standing = {d.name: d.values[0] for d in self.setup.candidates.dimensions}
        found = self.setup.candidates.nearest({**standing, **trial.params}, set())
        assert found is not None  # there is at least one candidate, or `prepare` had refused
        return found

    def _tell(
        self,
        trial: Trial,
        config: ServingConfig,
        measurements: tuple[Measurement, ...],
        failure: TrialFailure | None,
    ) -> None:
        """Report a trial to Optuna.

        A crash is a COMPLETE trial with a violated constraint, because samplers do not learn from
        FAIL and would propose the same again.
        """
        goal = self.setup.goal
        constraints = {"launch": -1.0 if failure is None else 1.0}
        if failure is not None:
            trial.set_user_attr("failure", str(failure))
            constraints |= dict.fromkeys(_limit_names(goal.limits), 1.0)
            value = self._worst_value()
        else:
            measurement = measurements[0]
            value = observed(goal.objective, measurement, goal.limits)
            constraints |= violations(measurement, goal.limits)
            for name, figure in summarize(measurement, goal.limits).items():
                if figure is not None:
                    trial.set_user_attr(name, round(figure, 6))
        _set_constraints(trial, constraints)
        self.optuna_study.tell(trial, value if math.isfinite(value) else self._worst_value())

    def _worst_value(self) -> float:
        """The worst value seen, for a trial without one.

        Far worse values would squeeze all real differences together when a model standardises.
        """
        done = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [t.value for t in done if t.value is not None]
        if not values:
            return 0.0 if self.setup.goal.is_maximized else 1e6
        return min(values) if self.setup.goal.is_maximized else max(values)

    # Confirmation phase

    def _feasible(self) -> list[LaunchRecord]:
        """Measured launches of the search that keep every limit, best first."""
        goal = self.setup.goal
        found = [
            x
            for x in self._launches(with_measurements=True)
            if x.phase is Phase.SEARCH
            and x.state is LaunchState.MEASURED
            and all(v <= 0 for v in violations(x.measurements[0], goal.limits).values())
        ]
        return sorted(
            found,
            key=lambda x: observed(goal.objective, x.measurements[0], goal.limits),
            reverse=goal.is_maximized,
        )

    def _finalists(self) -> dict[str, tuple[ServingConfig, tuple[str, ...]]]:
        """Choose who is confirmed: always no speculation and the default, and the best others.

        Only configs that could be measured; one that breaks a limit stays in when it is a point of
        comparison.
        """
        candidates = self.setup.candidates
        roles: dict[str, list[str]] = {}
        roles.setdefault(candidates.baseline.config.digest, []).append(BASELINE_ROLE)
        roles.setdefault(candidates.default.config.digest, []).append(DEFAULT_ROLE)
        feasible = [x.config.digest for x in self._feasible()]
        others = [digest for digest in feasible if digest not in roles]
        for digest in others[: self.setup.settings.num_finalists]:
            roles[digest] = []
        by_digest = {c.config.digest: c.config for c in candidates.items}
        measured = {x.config.digest for x in self._launches() if x.state is LaunchState.MEASURED}
        return {
            digest: (by_digest[digest], tuple(names))
            for digest, names in roles.items()
            if digest in measured
        }

    def _confirm(self, finalists: dict[str, tuple[ServingConfig, tuple[str, ...]]]) -> bool:
        """Launch every finalist anew, in rounds, so that slow drift of the machine hits all alike.

        Returns:
            False when the budget ended it early.
        """
        repeats = self.setup.settings.num_repeats
        self.listener.on_phase(Phase.CONFIRM, len(finalists) * repeats)
        for repeat in range(repeats):
            done = {
                x.config.digest
                for x in self._launches()
                if x.phase is Phase.CONFIRM and x.repeat == repeat and x.state in _FINISHED
            }
            order = list(finalists.values())
            # Every other round runs backwards: a steady drift then cancels in the means.
            for config, roles in reversed(order) if repeat % 2 else order:
                if config.digest in done:
                    continue
                if not self._fits(1):
                    return False
                self.launcher.measure(config, Phase.CONFIRM, repeat, roles=roles)
        return True

    # Quality

    def _check_quality(self) -> bool:
        """Put whoever would win before the quality gate, until one passes.

        Returns:
            False when the budget ended it early.
        """
        judge = Judge(self.setup, self.launcher)
        by_digest = {c.config.digest: c.config for c in self.setup.candidates.items}
        is_announced = False
        while (decision := self._conclusion()) is not None:
            config = by_digest[decision.winner]
            if config.digest in self._verdicts() or not judge.is_needed(config):
                return True
            if not self._fits(MAX_LAUNCHES_PER_VERDICT):
                return False
            if not is_announced:
                self.listener.on_phase(Phase.QUALITY, MAX_LAUNCHES_PER_VERDICT)
                is_announced = True
            self._keep_verdict(config, judge.verdict(config))
        return True

    def _keep_verdict(self, config: ServingConfig, verdict: QualityVerdict) -> None:
        """Keep a verdict; one that could not be reached only for this session, to be tried again."""
        self.session_verdicts[config.digest] = verdict
        if verdict.level is not QualityLevel.NOT_CHECKED:
            self.store.add_verdict(
                self.study, config.digest, verdict.as_dict(), self.clock.now_s()
            )

    def _verdicts(self) -> dict[str, QualityVerdict]:
        stored = self.store.verdicts(self.study)
        known = {digest: verdict_from_dict(verdict) for digest, verdict in stored.items()}
        return {**known, **self.session_verdicts}

    def _decide(self) -> Decision | None:
        """Draw the conclusion and keep it, unless it is the one that is kept already."""
        decision = self._conclusion()
        if decision is not None:
            stored = self.store.latest_decision(self.study)
            plain = json.loads(json.dumps(decision.as_dict()))
            if stored != plain:
                self.store.add_decision(self.study, decision.as_dict(), self.clock.now_s())
        return decision

    def _conclusion(self) -> Decision | None:
        confirmed: dict[str, list[LaunchRecord]] = {}
        for launch in self._launches(with_measurements=True):
            if launch.phase is Phase.CONFIRM and launch.state in _FINISHED:
                confirmed.setdefault(launch.config.digest, []).append(launch)
        verdicts = self._verdicts()
        finalists = [
            self._finalist(config, roles, confirmed[digest], verdicts.get(digest))
            for digest, (config, roles) in self._finalists().items()
            if digest in confirmed
        ]
        return decide(finalists, self.setup.goal, self.setup.trained_depth, self.setup.caveats)

    def _finalist(
        self,
        config: ServingConfig,
        roles: tuple[str, ...],
        launches: list[LaunchRecord],
        verdict: QualityVerdict | None,
    ) -> Finalist:
        measured = {x.repeat for x in launches if x.state is LaunchState.MEASURED}
        # A launch that was repeated with success is not held against the config.
        failed = {x.repeat for x in launches if x.state is LaunchState.FAILED} - measured
        return Finalist(
            config=config,
            roles=roles,
            measurements=tuple(m for x in launches for m in x.measurements),
            label=self.setup.label(config),
            num_failed=len(failed),
            quality=verdict,
        )

    def _launches(self, *, with_measurements: bool = False) -> list[LaunchRecord]:
        return self.store.launches(self.study, with_measurements=with_measurements)

    def _nothing_feasible(self) -> str:
        """Explain a study without any feasible trial, with the nearest miss."""
        everything = self._launches(with_measurements=True)
        launches = [x for x in everything if x.phase is Phase.SEARCH]
        failed = [x.failure for x in launches if x.failure is not None]
        lines = [f"study {self.study.name!r}: none of {len(launches)} launches is feasible."]
        if failed:
            kinds = sorted({f.kind.value for f in failed})
            lines.append(f"{len(failed)} failed ({', '.join(kinds)}); the first: {failed[0]}")
        measured = [x for x in launches if x.measurements]
        if measured:
            lines.append(self._nearest_miss(measured))
        return "\n".join(lines)

    def _nearest_miss(self, measured: list[LaunchRecord]) -> str:
        limits = self.setup.goal.limits
        worst = {
            x.launch_id: max(violations(x.measurements[0], limits).items(), key=lambda kv: kv[1])
            for x in measured
        }
        nearest = min(measured, key=lambda x: worst[x.launch_id][1])
        name, violation = worst[nearest.launch_id]
        return (
            f"Nearest miss: {self.setup.label(nearest.config)}, {name} is {violation:.1%} above its limit. "
            "Raise the limit, lower the load, or widen the search space."
        )


_FINISHED = frozenset({LaunchState.MEASURED, LaunchState.FAILED})


def open_study(setup: SearchSetup, store: Store) -> StudyRecord:
    """Find the study to go on with, or begin one.

    Raises:
        StudyChangedError: it exists and was defined otherwise.
    """
    name = setup.study_name
    existing = store.find_study(name)
    if existing is not None and setup.settings.is_fresh:
        store.take_hold(existing)  # refuses to delete under a running search
        # Ours goes last: cut off in between, it is still there to say that both are to be deleted.
        _delete_optuna_study(setup)
        store.delete_study(existing)
        existing = None
    if existing is None:
        _refuse_foreign_study(setup)
        return store.add_study(
            name,
            setup.definition,
            setup.environment,
            time.time(),
            is_simulated=setup.info.is_simulated,
        )
    changed = differences(existing.definition, json.loads(json.dumps(setup.definition)))
    if changed:
        raise StudyChangedError(
            f"{setup.settings.storage}: study {name!r} exists and was defined otherwise:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change to go on with it, give another name with --study, or start over "
            "with --fresh, which deletes it."
        )
    # A price changes no measurement, so a study goes on under another one.
    return store.update_environment(existing, {"cost": setup.environment["cost"]})


def _refuse_foreign_study(setup: SearchSetup) -> None:
    """A study of this name that is only in Optuna's tables was made by another program."""
    with _quiet_optuna():
        names = optuna.get_all_study_names(optuna_storage(setup.settings.storage))
    if setup.study_name in names:
        raise StudyChangedError(
            f"{setup.settings.storage}: an Optuna study called {setup.study_name!r} exists that is "
            "not Autotune's. Give another name with --study, or another database with --storage."
        )


def _delete_optuna_study(setup: SearchSetup) -> None:
    with _quiet_optuna():
        storage = optuna_storage(setup.settings.storage)
        if setup.study_name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=setup.study_name, storage=storage)


def _open_optuna_study(setup: SearchSetup) -> optuna.Study:
    sampler = create_sampler(setup.settings.sampler, setup.candidates, setup.seed)
    with _quiet_optuna():
        study = optuna.create_study(
            storage=optuna_storage(setup.settings.storage),
            study_name=setup.study_name,
            sampler=sampler,
            direction="maximize" if setup.goal.is_maximized else "minimize",
            load_if_exists=True,
        )
    study.set_metric_names([setup.goal.objective])
    return study


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Keep Optuna's own log lines out of the progress display, in this process, for good."""
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.simplefilter("ignore", ExperimentalWarning)
    yield


def _limit_names(limits: Limits) -> list[str]:
    return [f"{name}.{limit}" for name, of_class in limits.items() for limit in of_class]


def _set_constraints(trial: Trial, constraints: Mapping[str, float]) -> None:
    """Set constraints, above 0 means violated; those set before a session was cut off stay."""
    already = trial.constraints
    for name, value in constraints.items():
        if name not in already:
            trial.set_constraint(name, value)
