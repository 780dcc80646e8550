"""What `search` and `demo` share: the plan, the run under signals, the closing words."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console
from rich.markup import escape

from autotune.errors import InputError, NothingFeasibleError, suggestion
from autotune.export.base import export_study
from autotune.measure.client import MeasurementStopped
from autotune.measure.noise import noise_report
from autotune.report.evidence import evidence_text
from autotune.report.models import models_text
from autotune.report.noise import SHOWN_METRICS, explanation, noise_table
from autotune.report.progress import ProgressListener
from autotune.report.quality import answers_text, solved_task_costs
from autotune.report.study import StudyView, load_study
from autotune.report.table import dollars, ratio, study_table
from autotune.search.noise import noise_config, run_noise
from autotune.search.plan import make_plan
from autotune.search.samplers import SAMPLER_NAMES
from autotune.search.setup import SearchSetup, prepare_out_dir
from autotune.search.study import SearchOutcome, StopReason, run_search
from autotune.store.repository import Store

PIPE_COLUMNS = 140


def make_console() -> Console:
    """Return the console; a file or a pipe gets lines long enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PIPE_COLUMNS))


def check_sampler(name: str) -> None:
    """Refuse an unknown sampler.

    Raises:
        InputError: it is unknown.
    """
    if name not in SAMPLER_NAMES:
        raise InputError(
            f"--sampler: must be one of {', '.join(SAMPLER_NAMES)}, but got {name!r}. "
            f"{suggestion(name, SAMPLER_NAMES)}"
        )


def print_plan(setup: SearchSetup) -> None:
    """Say what a search would do."""
    click.echo(make_plan(setup).as_text())


def run_and_report(setup: SearchSetup) -> int:
    """Run a search, print what came of it, write the files that deploy it; return the exit code."""
    prepare_out_dir(setup.settings.out_dir)
    store = Store(setup.settings.storage, create=True)
    console = make_console()
    try:
        try:
            with _stop_flag() as stop, ProgressListener(console) as listener:
                outcome = run_search(setup, store, listener, stop.is_set)
        except NothingFeasibleError:
            print_study(console, load_study(store, setup.study_name))
            raise
        view = load_study(store, outcome.study.name)
        print_study(console, view)
        return _closing_words(console, setup, outcome, view)
    finally:
        store.close()


def run_noise_and_report(
    setup: SearchSetup,
    num_speculative_tokens: int | None,
    num_launches: int,
    num_measurements: int,
    *,
    is_json: bool,
) -> int:
    """Run A/A launches, print the noise floor; return the exit code."""
    config = noise_config(setup, num_speculative_tokens)
    prepare_out_dir(setup.settings.out_dir)
    store = Store(setup.settings.storage, create=True)
    # What is for scripts stands alone on standard output.
    console = Console(stderr=True) if is_json else make_console()
    try:
        with _stop_flag() as stop, ProgressListener(console) as listener:
            launches = run_noise(
                setup, store, config, num_launches, num_measurements, listener, stop.is_set
            )
    except MeasurementStopped:
        console.print("Stopped. Run the same command again to go on; nothing measured is lost.")
        return 130
    finally:
        store.close()
    found = [noise_report(metric, launches, setup.goal.limits) for metric in SHOWN_METRICS]
    reports = [report for report in found if report is not None]
    if not reports:
        console.print("No request was answered, so there is nothing to compare.")
        return 1
    if is_json:
        click.echo(json.dumps([report.as_dict() for report in reports], indent=2))
        return 0
    mark = " (simulated)" if setup.info.is_simulated else ""
    console.print(noise_table(reports, f"noise of {setup.label(config)}{mark}"))
    console.print(explanation(reports[0]), markup=False, highlight=False)
    return 0


def print_study(console: Console, view: StudyView) -> None:
    """Print the table of a study and its decision."""
    title = f"study {view.record.name}: {view.record.environment['engine']['hardware']}"
    console.print(
        study_table(
            view.rows,
            view.goal.objective,
            title,
            mark=view.record.source_mark,
            prompt_mark=view.record.prompt_mark,
            width=console.width,
        )
    )
    decision = view.decision
    if decision is None:
        console.print("No decision yet: the finalists were not launched often enough.")
        return
    mark = f" ({view.record.mark})" if view.record.mark else ""
    console.print(f"[bold]Recommended{mark}: {decision.winner_label}[/bold] – {decision.reason}.")
    for name, gain in (
        ("no speculation", decision.gain_over_baseline),
        ("the default", decision.gain_over_default),
    ):
        if gain is not None:
            console.print(
                escape(
                    f"{decision.objective}{mark} against {name}: {ratio(gain)} "
                    f"({gain.num_launches} fresh launches, {gain.num_requests} requests)"
                )
            )
    console.print(evidence_text(decision), markup=False, highlight=False)
    _print_quality(console, view)
    for line in models_text(view.record.environment):
        console.print(f"{line}.", markup=False, highlight=False)
    for warning in decision.warnings:
        console.print(f"[yellow]Note:[/yellow] {warning}.")


def _print_quality(console: Console, view: StudyView) -> None:
    winner = view.winner
    if winner is None or winner.quality is None:
        return
    console.print(f"Answers: {answers_text(winner.quality)}.", markup=False, highlight=False)
    if view.cost is None or winner.request_throughput_rps is None:
        return
    costs = solved_task_costs(winner.quality, winner.request_throughput_rps, view.cost)
    for file, usd in costs.items():
        console.print(f"A solved task of {file} costs {dollars(usd)}.", markup=False)


def _closing_words(
    console: Console, setup: SearchSetup, outcome: SearchOutcome, view: StudyView
) -> int:
    if outcome.stop_reason is StopReason.INTERRUPTED:
        console.print("Stopped. Run the same command again to go on; nothing measured is lost.")
        return 130
    if outcome.stop_reason is StopReason.BUDGET:
        console.print("The budget is used up. Run again with a larger --budget to go on.")
    if view.decision is None:
        console.print("No config could be confirmed, so none is recommended.")
        return 1
    out = setup.settings.out_dir / "vllm"
    export_study(view, "vllm", out)
    console.print(f"Files that deploy it: {out}/  (start: {out}/serve.sh)", soft_wrap=True)
    _print_timings(console, view)
    return 0


def _print_timings(console: Console, view: StudyView) -> None:
    spent = view.record.timings_s
    total = spent.get("total", 0.0)
    if total <= 0:
        return
    mark = f" ({view.record.source_mark})" if view.record.source_mark else ""
    ours = total - spent.get("launch", 0.0) - spent.get("traffic", 0.0)
    console.print(
        f"Time{mark}: {total / 60:.1f} min; launches {spent.get('launch', 0) / total:.0%}, traffic "
        f"{spent.get('traffic', 0) / total:.0%}, everything else {ours / total:.1%}."
    )


class _StopFlag:
    """Set by the first ctrl-C or SIGTERM; the second one ends the process."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
        click.echo("\nstopping: the current launch is being ended ...", err=True)


@contextmanager
def _stop_flag() -> Iterator[_StopFlag]:
    flag = _StopFlag()
    before = {n: signal.signal(n, flag.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
