"""Launches of a study, each written down before it begins and kept when it ends."""

from __future__ import annotations

from collections.abc import Callable

from autotune.measure.client import MeasurementStopped
from autotune.measure.metrics import summarize
from autotune.search.listener import SearchListener
from autotune.search.setup import SearchSetup
from autotune.search.trial import StopRule, TrialResult, run_launch, run_trial
from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchContext, Server
from autotune.store.records import Phase, StudyRecord
from autotune.store.repository import Store

MAX_ATTEMPTS = 2
"""Launches of one trial, the second one only after a failure that the config is not to blame for."""


class Launcher:
    """Launches configs for one session of a study."""

    def __init__(
        self,
        setup: SearchSetup,
        store: Store,
        study: StudyRecord,
        listener: SearchListener,
        should_stop: Callable[[], bool],
    ) -> None:
        self._setup = setup
        self._store = store
        self._study = study
        self._listener = listener
        self.should_stop = should_stop
        self._clock = setup.engine.clock
        self.kept_until_s = self._clock.now_s()
        """Until when the study's account of its time is complete."""

    def measure(
        self,
        config: ServingConfig,
        phase: Phase,
        repeat: int,
        trial_number: int | None = None,
        roles: tuple[str, ...] = (),
        num_measurements: int = 1,
        *,
        is_calibrating: bool = False,
        stop_rule: StopRule | None = None,
    ) -> TrialResult:
        """Launch and measure; see `run_trial`.

        Args:
            is_calibrating: whether the study's ladder is climbed as well.
            stop_rule: cuts a hopeless measurement off.

        Raises:
            MeasurementStopped: the search was stopped.
        """
        setup = self._setup

        def trial(context: LaunchContext) -> TrialResult:
            return run_trial(
                setup.engine,
                config,
                setup.schedule_of(phase),
                context,
                self._listener.on_record,
                self.should_stop,
                num_measurements,
                ladder=setup.ladder if is_calibrating else (),
                stop_rule=stop_rule,
            )

        return self._launch(config, phase, repeat, trial_number, roles, trial)

    def use(
        self,
        config: ServingConfig,
        phase: Phase,
        use: Callable[[Server], None],
        roles: tuple[str, ...] = (),
    ) -> TrialResult:
        """Launch and let `use` do something with the server; see `run_launch`.

        Raises:
            MeasurementStopped: the search was stopped.
        """

        def trial(context: LaunchContext) -> TrialResult:
            return run_launch(self._setup.engine, config, context, use)

        return self._launch(config, phase, 0, None, roles, trial)

    def keep_time(self, timings_s: dict[str, float]) -> None:
        """Add to the study's account of its time: what is given, and all that has passed."""
        now_s = self._clock.now_s()
        self._store.add_timings(self._study, {**timings_s, "total": now_s - self.kept_until_s})
        self.kept_until_s = now_s

    def _launch(
        self,
        config: ServingConfig,
        phase: Phase,
        repeat: int,
        trial_number: int | None,
        roles: tuple[str, ...],
        trial: Callable[[LaunchContext], TrialResult],
    ) -> TrialResult:
        """Launch once, or twice where the first failure was not the config's doing."""
        self._listener.on_launch(config, phase, roles)
        for _ in range(MAX_ATTEMPTS):
            result = self._launch_once(config, phase, repeat, trial_number, trial)
            if result.failure is None or not result.failure.kind.is_worth_a_retry:
                break
        self._listener.on_result(config, phase, result)
        return result

    def _launch_once(
        self,
        config: ServingConfig,
        phase: Phase,
        repeat: int,
        trial_number: int | None,
        trial: Callable[[LaunchContext], TrialResult],
    ) -> TrialResult:
        if self.should_stop():
            raise MeasurementStopped("the search was stopped")
        launch_id = self._store.begin_launch(
            self._study, config, phase, repeat, trial_number, self._clock.now_s()
        )
        try:
            result = trial(self._context(config, launch_id))
        except BaseException:
            self._store.abandon_launch(launch_id, self._clock.now_s())
            raise
        self._keep(launch_id, result)
        return result

    def _context(self, config: ServingConfig, launch_id: int) -> LaunchContext:
        return LaunchContext(
            # Absolute, because the log's path is kept and read from wherever somebody stands then.
            work_dir=(self._setup.settings.out_dir / "logs").absolute(),
            name=f"{launch_id:04d}-k{config.num_speculative_tokens}-{config.digest}",
            needs=self._setup.needs,
            timeout_s=self._setup.profile.serve.launch_timeout_s,
            should_stop=self.should_stop,
        )

    def _keep(self, launch_id: int, result: TrialResult) -> None:
        now_s = self._clock.now_s()
        if result.failure is not None:
            self._store.end_failed(launch_id, result.failure, now_s)
        else:
            assert result.report is not None  # a launch without failure has one
            limits = self._setup.goal.limits
            everything = (*result.measurements, *result.ladder)
            measured = [(m, summarize(m, limits)) for m in everything]
            self._store.end_measured(launch_id, result.report, measured, now_s)
        self.keep_time(result.timings_s)
