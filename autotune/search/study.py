"""The study loop: anchors, search, race, decision; every step kept before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from optuna.samplers import BaseSampler

from autotune.errors import NothingFeasibleError
from autotune.measure.client import MeasurementStopped
from autotune.measure.metrics import observed, violations
from autotune.measure.records import Measurement
from autotune.search.auto import AutoSampler
from autotune.search.candidates import Candidate
from autotune.search.contest import Contest
from autotune.search.costmodel.physics import CostModel
from autotune.search.decision import Decision
from autotune.search.hopeless import HopelessRule
from autotune.search.ledger import storage_errors
from autotune.search.listener import SearchListener, SilentListener
from autotune.search.modelling import PhysicsFactory, create_proposer
from autotune.search.observing import Observer
from autotune.search.opening import open_optuna_study
from autotune.search.proposer import Proposer
from autotune.search.samplers import create_sampler
from autotune.search.session import FINISHED, Session
from autotune.search.setup import SearchSetup
from autotune.search.surrogate import Observation
from autotune.search.trials import Trials
from autotune.search.warm_start import choose_warm_start, keep_learnt, warm_unknowns
from autotune.search.worth import is_worth_more
from autotune.serving.config import ServingConfig
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
    physics: PhysicsFactory | None = CostModel,
) -> SearchOutcome:
    """Run a study to its decision, or go on with one that was cut off.

    Args:
        setup: from `prepare`.
        store: the open database.
        listener: is told what happens.
        should_stop: asked about twice a second; True ends the search cleanly, to be resumed.
        physics: makes the cost model of the `auto` sampler; None leaves it out.

    Raises:
        StudyChangedError: a study of this name exists and was defined otherwise.
        NothingFeasibleError: nothing that was tried keeps every limit.
        StudyError: another process runs it.
    """
    with storage_errors(setup.settings.storage):
        search = _Search(
            setup, store, listener or SilentListener(), should_stop or (lambda: False), physics
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
        physics: PhysicsFactory | None,
    ) -> None:
        self.setup = setup
        self.session = Session(setup, store, listener, should_stop)
        self.observer = Observer(setup.goal)
        self.proposer = self._create_proposer(physics) if self._is_auto else None
        self.trials = Trials(
            open_optuna_study(setup, self._sampler()), setup.candidates, setup.goal
        )
        self.contest = Contest(self.session, self._contenders, self._recommend)

    @property
    def _is_auto(self) -> bool:
        return self.setup.sampler == "auto"

    def _create_proposer(self, physics: PhysicsFactory | None) -> Proposer:
        if self.setup.settings.is_warm_started:
            self.session.study = choose_warm_start(self.session.store, self.session.study)
        return create_proposer(self.setup, physics, warm_unknowns(self.session.study))

    def _sampler(self) -> BaseSampler:
        setup = self.setup
        if self.proposer is not None:
            return AutoSampler(self.proposer, setup.candidates, self._observe)
        return create_sampler(setup.sampler, setup.candidates, setup.seed)

    def run(self) -> SearchOutcome:
        self.session.store.take_hold(self.session.study)
        try:
            self.session.go_on_in_time()
            self._recover()
            done = [x for x in self.session.launches() if x.state in FINISHED]
            self.session.listener.on_start(self.setup, len(done))
            reason = self._run_phases()
        except MeasurementStopped:
            reason = StopReason.INTERRUPTED
        finally:
            self.session.launcher.keep_time({})
            self._keep_models()
            self.session.store.release(self.session.study)
        decision = None if reason is StopReason.INTERRUPTED else self.contest.decide()
        return SearchOutcome(self.session.study, reason, decision)

    def _keep_models(self) -> None:
        """Keep what the models learnt, and how far off each was."""
        if self.proposer is None or not self.proposer.errors:
            return
        keep_learnt(self.session.store, self.session.study, self.proposer.models)
        report = {
            "leave_one_out": self.proposer.errors,
            "num_configs": self.proposer.num_measured,
            "findings": self.proposer.findings,
        }
        self.session.study = self.session.store.update_environment(
            self.session.study, {"models": report}
        )

    def _run_phases(self) -> StopReason:
        """Search and settle; where no finalist lives up to what the search saw of it, go on searching."""
        while True:
            num_before = self.session.num_finished()
            self._search()
            if not self._ranking():
                raise NothingFeasibleError(self._nothing_feasible())
            is_complete = self.contest.settle()
            if self.contest.conclusion() is not None or not is_complete:
                is_complete = is_complete and self.contest.refine()
                return StopReason.COMPLETE if is_complete else StopReason.BUDGET
            if self.session.num_finished() == num_before:
                return StopReason.COMPLETE

    # Going on after a cut

    def _recover(self) -> None:
        """Bring both ledgers into line after a session that was cut off at any point."""
        self.session.store.abandon_running(self.session.study)
        self.trials.recover(
            {
                launch.trial_number: launch
                for launch in self.session.launches(with_measurements=True)
                if launch.trial_number is not None and launch.state in FINISHED
            }
        )

    # Search phase

    def _search(self) -> None:
        self.session.listener.on_phase(Phase.SEARCH, self.setup.max_trials)
        for candidate in self._anchors():
            if not self.session.fits(1):
                return
            if candidate.config.digest not in self.trials.tried():
                self.trials.enqueue(candidate)
                self._try_next(is_anchor=True)
        while self._may_search():
            self._try_next(is_anchor=False)

    def _anchors(self) -> list[Candidate]:
        c = self.setup.candidates
        anchors = [c.baseline, c.default, c.starter]
        if self.proposer is not None:
            anchors.append(c.deepest)
        ordered = {x.config.digest: x for x in anchors}
        return list(ordered.values())[: max(self.setup.max_trials, 1)]

    def _may_search(self) -> bool:
        num_tried = len(self.trials.tried())
        if num_tried >= min(self.setup.max_trials, len(self.setup.candidates.items)):
            return False
        return self.session.fits(1 + self._num_race_launches()) and self._is_worth_more()

    def _is_worth_more(self) -> bool:
        if self.proposer is None:
            return True
        self.proposer.learn(self._observe())
        gain = self.proposer.expected_gain_ratio(self._tried_configs())
        return is_worth_more(self.trials.history(), gain, self.setup.goal)

    def _tried_configs(self) -> set[ServingConfig]:
        known = self.setup.candidates.by_digest()
        return {known[d].config for d in self.trials.tried() if d in known}

    def _num_race_launches(self) -> int:
        """Launches to keep the budget free for."""
        settings = self.setup.settings
        return (settings.num_finalists + 2) * settings.num_repeats

    def _try_next(self, *, is_anchor: bool) -> None:
        trial, config = self.trials.ask(self.setup.label)
        result = self.session.launcher.measure(
            config,
            Phase.SEARCH,
            0,
            trial.number,
            is_calibrating=is_anchor and self.proposer is not None,
            stop_rule=None if is_anchor else self._stop_rule(),
        )
        self.trials.tell(trial, result.measurements, result.failure)
        self._recommend()

    def _stop_rule(self) -> HopelessRule:
        """Return the rule for the next screen, which is compared with the best that keeps every limit.

        While no such config is believed in, slowness is no reason to stop: a slow one may be the only one.
        """
        best = next(iter(self._believed()), None)
        incumbent: Measurement | None = None
        if best is not None:
            incumbent = next(
                m
                for x in self.session.launches(with_measurements=True)
                if x.phase is Phase.SEARCH and x.config == best
                for m in x.measurements
            )
        return HopelessRule(self.setup.goal, self.setup.screen_schedule, incumbent)

    def _observe(self) -> list[Observation]:
        """Return what the models learn from: all but refinements, which are no candidates."""
        launches = self.session.launches(with_measurements=True)
        return self.observer.observations(
            [x for x in launches if x.config.speculation_off_above is None]
        )

    # Who is best so far

    def _ranking(self) -> list[ServingConfig]:
        """Return the configs of the search that seem to keep every limit, best first."""
        # Where the models doubt them all, what was seen to keep its limits is still the best there is.
        return self._believed() or [x.config for x in self._feasible()]

    def _believed(self) -> list[ServingConfig]:
        """The same, but by the models alone where there are any."""
        if self.proposer is None:
            return [x.config for x in self._feasible()]
        self.proposer.learn(self._observe())
        return [standing.config for standing in self.proposer.ranking()]

    def _feasible(self) -> list[LaunchRecord]:
        """Measured launches of the search that keep every limit, best first."""
        goal = self.setup.goal
        found = [
            x
            for x in self.session.launches(with_measurements=True)
            if x.phase is Phase.SEARCH
            and x.state is LaunchState.MEASURED
            and x.measurements[0].stopped_early is None
            and all(v <= 0 for v in violations(x.measurements[0], goal.limits).values())
        ]
        return sorted(
            found,
            key=lambda x: observed(goal.objective, x.measurements[0], goal.limits),
            reverse=goal.is_maximized,
        )

    def _contenders(self) -> list[ServingConfig]:
        """Return those of the ranking that are worth a fresh launch, best first."""
        if self.proposer is not None:
            self.proposer.learn(self._observe())
            if contenders := self.proposer.contenders():
                return contenders
        return [x.config for x in self._feasible()]

    def _recommend(self) -> None:
        """Tell the listener what would be recommended now."""
        is_racing = any(x.phase is Phase.CONFIRM for x in self.session.launches())
        decision = self.contest.standing() if is_racing else None
        if decision is not None:
            self.session.listener.on_recommendation(self.session.known_configs()[decision.winner])
        else:
            self.session.listener.on_recommendation(next(iter(self._ranking()), None))

    def _nothing_feasible(self) -> str:
        """Explain a study without any feasible trial, with the nearest miss."""
        everything = self.session.launches(with_measurements=True)
        launches = [x for x in everything if x.phase is Phase.SEARCH]
        failed = [x.failure for x in launches if x.failure is not None]
        lines = [
            f"study {self.session.study.name!r}: none of {len(launches)} launches is feasible."
        ]
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
