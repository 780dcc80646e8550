"""Live progress of a search: a bar in a terminal, plain lines everywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autotune.measure.records import RequestRecord
from autotune.measure.stats import metric_interval
from autotune.report.table import figure, unit_of
from autotune.search.setup import SearchSetup
from autotune.search.trial import TrialResult
from autotune.serving.config import ServingConfig
from autotune.store.records import Phase

_TITLES = {
    Phase.SEARCH: "searching",
    Phase.CONFIRM: "racing the finalists",
    Phase.QUALITY: "checking answers",
    Phase.NOISE: "repeating one config",
}


class ProgressListener:
    """Prints one line a launch, and in a terminal shows what is going on below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._launches = self._progress.add_task("launches", total=None)
        self._requests = self._progress.add_task("requests", total=None, visible=False)
        self._setup: SearchSetup | None = None
        self._best: ServingConfig | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_start(self, setup: SearchSetup, num_done: int) -> None:
        self._setup = setup
        mark = " (simulated)" if setup.info.is_simulated else ""
        self._say(
            f"study {setup.study_name}: {len(setup.candidates.items)} candidates, served by "
            f"{setup.info.engine} {setup.info.version} on {setup.info.hardware}{mark}"
        )
        for fixed in setup.candidates.fixed:
            self._say(f"fixed: {fixed.knob} = {fixed.value}, because {fixed.reason}")
        for caveat in setup.caveats:
            self._say(f"caution: {caveat}")
        if num_done:
            self._say(f"going on: {num_done} launches are already done")

    def on_phase(self, phase: Phase, num_launches: int) -> None:
        what = "configs" if phase is Phase.SEARCH else "launches"
        self._say(f"{_TITLES[phase]} (up to {num_launches} {what})")
        self._progress.update(
            self._launches, description=_TITLES[phase], total=num_launches, completed=0
        )

    def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None:
        assert self._setup is not None  # on_start comes first
        self._progress.update(
            self._requests,
            description=f"launching {self._setup.label(config)}",
            total=len(self._setup.schedule.requests),
            completed=0,
            visible=True,
        )

    def on_record(self, record: RequestRecord) -> None:
        self._progress.update(self._requests, description="measuring", advance=1)

    def on_result(self, config: ServingConfig, phase: Phase, result: TrialResult) -> None:
        self._progress.update(self._launches, advance=1)
        self._progress.update(self._requests, visible=False)
        assert self._setup is not None  # on_start comes first
        self._say(f"  {self._setup.label(config):<24} {self._outcome(result)}")

    def on_recommendation(self, config: ServingConfig | None) -> None:
        assert self._setup is not None  # on_start comes first
        if config is not None and config != self._best:
            self._best = config
            self._say(f"  best so far: {self._setup.label(config)}")

    def _outcome(self, result: TrialResult) -> str:
        assert self._setup is not None  # on_start comes first
        if result.failure is not None:
            return str(result.failure)
        spent = result.timings_s
        took = f"launch {spent.get('launch', 0):.0f} s, traffic {spent.get('traffic', 0):.0f} s"
        if not result.measurements:
            return f"answers collected ({took})"
        goal = self._setup.goal
        # Repeated measurements of one launch are no launches: the first one stands for them.
        measurement = result.measurements[0]
        interval = metric_interval(goal.objective, [measurement], goal.limits)
        if measurement.stopped_early is not None:
            return f"given up: {measurement.stopped_early} ({took})"
        mark = " (simulated)" if measurement.is_simulated else ""
        length = measurement.counters.acceptance_length
        accepted = f", {length:.2f} tokens/step" if length is not None else ""
        return (
            f"{figure(interval, unit_of(goal.objective))}{mark}{accepted} "
            f"({len(measurement.records)} requests, {took})"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
