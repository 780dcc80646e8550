"""One session of a study: its ledgers, its clock and its budget, shared by search and race."""

from __future__ import annotations

from collections.abc import Callable

from autotune.search.launcher import Launcher
from autotune.search.listener import SearchListener
from autotune.search.opening import open_study
from autotune.search.setup import SearchSetup
from autotune.serving.clock import VirtualClock
from autotune.serving.config import ServingConfig
from autotune.store.records import LaunchRecord, LaunchState
from autotune.store.repository import Store

FINISHED = frozenset({LaunchState.MEASURED, LaunchState.FAILED})
"""States of launches that ended and count."""


class Session:
    """What is open while a study runs."""

    def __init__(
        self,
        setup: SearchSetup,
        store: Store,
        listener: SearchListener,
        should_stop: Callable[[], bool],
    ) -> None:
        """Open the study, or begin it; see `open_study` for what can be wrong."""
        self.setup = setup
        self.store = store
        self.listener = listener
        self.clock = setup.engine.clock
        self.study = open_study(setup, store)
        self.launcher = Launcher(setup, store, self.study, listener, should_stop)
        self._finished: dict[int, LaunchRecord] = {}
        """Launches that ended, with what they measured."""
        self._spent_before_s = self.study.timings_s.get("total", 0.0)
        self._began_s = self.clock.now_s()

    def go_on_in_time(self) -> None:
        """Let virtual time go on where the last session left it; real time does so by itself."""
        if isinstance(self.clock, VirtualClock):
            ends = [x.ended_at_s or x.started_at_s for x in self.launches()]
            self.clock.advance_to(max(ends, default=0.0))
            self._began_s = self.launcher.kept_until_s = self.clock.now_s()

    def launches(self, *, with_measurements: bool = False) -> list[LaunchRecord]:
        """Return the study's launches. What a finished one measured is read once a session."""
        launches = self.store.launches(self.study, with_measurements=False)
        if not with_measurements:
            return launches
        wanted = [
            x.launch_id
            for x in launches
            if x.state in FINISHED and x.launch_id not in self._finished
        ]
        if wanted:
            for launch in self.store.launches(self.study, launch_ids=wanted):
                self._finished[launch.launch_id] = launch
        return [self._finished.get(x.launch_id, x) for x in launches]

    def num_finished(self) -> int:
        """How many launches ended and count."""
        return sum(x.state in FINISHED for x in self.launches())

    def known_configs(self) -> dict[str, ServingConfig]:
        """Return every config that was launched, by digest."""
        return {x.config.digest: x.config for x in self.launches()}

    def fits(self, num_launches: int) -> bool:
        """Whether the budget has room for that many more launches, at what they took so far."""
        budget_s = self.setup.settings.budget_s
        if budget_s is None:
            return True
        done = [x for x in self.launches() if x.ended_at_s is not None]
        mean_s = sum((x.ended_at_s or 0) - x.started_at_s for x in done) / max(len(done), 1)
        return self._spent_s() + num_launches * mean_s <= budget_s

    def _spent_s(self) -> float:
        return self._spent_before_s + self.clock.now_s() - self._began_s
