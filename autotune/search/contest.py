"""The contest of the finalists: raced, refined, put before the quality gate, and decided."""

from __future__ import annotations

import json
from collections.abc import Callable

from autotune.measure.quality.verdict import (
    QualityLevel,
    QualityVerdict,
    verdict_from_dict,
)
from autotune.search.decision import (
    BASELINE_ROLE,
    DEFAULT_ROLE,
    MIN_LAUNCHES,
    Decision,
    Finalist,
    decide,
)
from autotune.search.judging import MAX_LAUNCHES_PER_VERDICT, Judge
from autotune.search.race import RaceStep, race_step
from autotune.search.refinement import batch_switches
from autotune.search.session import FINISHED, Session
from autotune.serving.config import ServingConfig
from autotune.store.records import LaunchRecord, LaunchState, Phase

Finalists = dict[str, tuple[ServingConfig, tuple[str, ...]]]
"""Config and roles by digest, in the order in which a round launches them."""


class Contest:
    """Who wins. Everything follows from the kept launches, so it goes on after a cut where it was."""

    def __init__(
        self,
        session: Session,
        ranking: Callable[[], list[ServingConfig]],
        tell: Callable[[], None],
    ) -> None:
        """Prepare the contest.

        Args:
            session: of the study.
            ranking: returns the configs of the search that keep every limit, as it seems, and may be the
                best, best first.
            tell: called after every launch of the race.
        """
        self._session = session
        self._ranking = ranking
        self._tell = tell
        self._session_verdicts: dict[str, QualityVerdict] = {}

    def _finalists(self) -> Finalists:
        """Choose who is raced: always no speculation and the default, and the best others.

        Only configs that could be measured; one that breaks a limit stays in when it is a point of
        comparison. Who was launched for the race stays in it; one that broke a limit there makes room
        for the next best.
        """
        candidates = self._session.setup.candidates
        roles: dict[str, list[str]] = {}
        roles.setdefault(candidates.baseline.config.digest, []).append(BASELINE_ROLE)
        roles.setdefault(candidates.default.config.digest, []).append(DEFAULT_ROLE)
        launches = self._session.launches()
        known = {x.config.digest: x.config for x in launches}
        ranked = [config.digest for config in self._ranking()]
        raced = [x.config.digest for x in launches if x.phase is Phase.CONFIRM]
        others = [d for d in dict.fromkeys(raced) if d not in roles]
        room = self._session.setup.settings.num_finalists - sum(d in ranked for d in others)
        fresh = [d for d in ranked if d not in roles and d not in others]
        for digest in (*others, *fresh[: max(room, 0)]):
            roles[digest] = []
        measured = {x.config.digest for x in launches if x.state is LaunchState.MEASURED}
        return {
            digest: (known[digest], tuple(names))
            for digest, names in roles.items()
            if digest in measured
        }

    def settle(self) -> bool:
        """Race the finalists and put whoever wins before the quality gate, until one passes.

        Returns:
            False when the budget ended it early.
        """
        judge = Judge(self._session.setup, self._session.launcher)
        while True:
            if not self._race():
                return False
            decision = self.conclusion()
            if decision is None:
                return True
            config = self._session.known_configs()[decision.winner]
            if config.digest in self._verdicts() or not judge.is_needed(config):
                return True
            if not self._session.fits(MAX_LAUNCHES_PER_VERDICT):
                return False
            self._session.listener.on_phase(Phase.QUALITY, MAX_LAUNCHES_PER_VERDICT)
            self._keep_verdict(config, judge.verdict(config))

    def _race(self) -> bool:
        """Launch finalists anew, one at a time, until the race is decided.

        Returns:
            False when the budget ended it early.
        """
        is_announced = False
        while (digest := self._race_step().next_digest) is not None:
            if not self._session.fits(1):
                return False
            finalists = self._finalists()
            if not is_announced:
                self._session.listener.on_phase(Phase.CONFIRM, self._max_race_launches(finalists))
                is_announced = True
            config, roles = finalists[digest]
            repeats = [
                x.repeat
                for x in self._session.launches()
                if x.phase is Phase.CONFIRM and x.config == config and x.state in FINISHED
            ]
            self._session.launcher.measure(
                config, Phase.CONFIRM, max(repeats, default=-1) + 1, roles=roles
            )
            self._tell()
        return True

    def refine(self) -> bool:
        """Race the winner against itself with speculation switched off above a batch size, if asked to.

        Returns:
            False when the budget ended it early.
        """
        decision = self.conclusion()
        if decision is None or not self._session.setup.settings.is_refined_by_batch:
            return True
        known = self._session.known_configs()
        switches = batch_switches(self._session.setup, known[decision.winner])
        for config in switches:
            if config.digest not in known:
                if not self._session.fits(1):
                    return False
                # Once launched for the race, it is a finalist, and the race goes on with it.
                self._session.launcher.measure(config, Phase.CONFIRM, 0)
        return self.settle() if switches else True

    def _race_step(self) -> RaceStep:
        finalists = self._finalists()
        return race_step(
            self._raced(finalists), self._session.setup.goal, self._max_race_launches(finalists)
        )

    def _max_race_launches(self, finalists: Finalists) -> int:
        return len(finalists) * self._session.setup.settings.num_repeats

    def _raced(self, finalists: Finalists) -> list[Finalist]:
        confirmed: dict[str, list[LaunchRecord]] = {digest: [] for digest in finalists}
        for launch in self._session.launches(with_measurements=True):
            if (
                launch.phase is Phase.CONFIRM
                and launch.state in FINISHED
                and launch.config.digest in confirmed
            ):
                confirmed[launch.config.digest].append(launch)
        verdicts = self._verdicts()
        return [
            self._finalist(config, roles, confirmed[digest], verdicts.get(digest))
            for digest, (config, roles) in finalists.items()
        ]

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
            label=self._session.setup.label(config),
            num_failed=len(failed),
            quality=verdict,
        )

    def decide(self) -> Decision | None:
        """Draw the conclusion and keep it, unless it is the one that is kept already."""
        decision = self.conclusion()
        if decision is not None:
            stored = self._session.store.latest_decision(self._session.study)
            plain = json.loads(json.dumps(decision.as_dict()))
            if stored != plain:
                self._session.store.add_decision(
                    self._session.study, decision.as_dict(), self._session.clock.now_s()
                )
        return decision

    def standing(self) -> Decision | None:
        """Decide by the race so far; None while its first rounds run, when a decision says who was lucky."""
        raced = self._raced(self._finalists())
        if any(len(f.measurements) + f.num_failed < MIN_LAUNCHES for f in raced):
            return None
        return self.conclusion()

    def conclusion(self) -> Decision | None:
        """Decide by the race so far; None before every finalist was launched often enough."""
        finalists = self._finalists()
        raced = self._raced(finalists)
        step = race_step(raced, self._session.setup.goal, self._max_race_launches(finalists))
        setup = self._session.setup
        return decide(
            [finalist for finalist in raced if finalist.measurements or finalist.num_failed],
            setup.goal,
            setup.trained_depth,
            setup.caveats,
            race=step,
            is_heldout=setup.schedule.digest != setup.confirm_schedule.digest,
        )

    # Quality

    def _keep_verdict(self, config: ServingConfig, verdict: QualityVerdict) -> None:
        """Keep a verdict; one that could not be reached only for this session, to be tried again."""
        self._session_verdicts[config.digest] = verdict
        if verdict.level is not QualityLevel.NOT_CHECKED:
            self._session.store.add_verdict(
                self._session.study, config.digest, verdict.as_dict(), self._session.clock.now_s()
            )

    def _verdicts(self) -> dict[str, QualityVerdict]:
        stored = self._session.store.verdicts(self._session.study)
        known = {digest: verdict_from_dict(verdict) for digest, verdict in stored.items()}
        return {**known, **self._session_verdicts}
