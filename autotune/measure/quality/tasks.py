"""Questions with checkable answers, put to a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.measure.client import MeasurementStopped, ShouldStop
from autotune.measure.quality.check_runner import CheckOutcome, CheckRunner
from autotune.measure.quality.checks import CheckRow, load_task
from autotune.measure.quality.endpoint import Endpoint, collect_answers
from autotune.measure.quality.prompts import QualityPrompt
from autotune.measure.quality.shares import mcnemar_exact
from autotune.measure.quality.verdict import TaskFigures
from autotune.paths import user_path
from autotune.traffic.quality import QualitySettings, QualityTask


@dataclass(frozen=True)
class LoadedTask:
    """A task whose file has been read and whose checks can be applied."""

    settings: QualityTask
    path: Path
    rows: tuple[CheckRow, ...]


def load_tasks(settings: QualitySettings, folder: Path) -> tuple[LoadedTask, ...]:
    """Read all tasks' files and try their checks on nothing, before any server is launched.

    Args:
        folder: where relative paths start: that of the profile.

    Raises:
        InputError: a file or a check cannot be used; the message says which and why.
    """
    loaded = []
    for task in settings.tasks:
        path = folder / user_path(task.file, "quality.tasks.file")
        rows = load_task(task, folder)
        with CheckRunner(path.parent) as runner:
            runner.prepare(rows)
        loaded.append(LoadedTask(task, path, rows))
    return tuple(loaded)


def solve(
    task: LoadedTask, endpoint: Endpoint, concurrency: int, should_stop: ShouldStop | None = None
) -> tuple[CheckOutcome, ...]:
    """Ask a task's questions, greedily, and check the answers.

    Raises:
        EndpointFailed: the server did not answer one of them.
        MeasurementStopped: `should_stop` said so.
    """
    prompts = [
        QualityPrompt.of_messages(
            [{"role": role, "content": content} for role, content in row.messages],
            endpoint.kind,
            task.settings.max_tokens,
        )
        for row in task.rows
    ]
    answers = collect_answers(endpoint, prompts, concurrency, should_stop)
    outcomes = []
    with CheckRunner(task.path.parent) as runner:
        for row, answer in zip(task.rows, answers, strict=True):
            if should_stop is not None and should_stop():
                raise MeasurementStopped("the quality gate was stopped")
            outcomes.append(runner.run(row, answer.text))
    return tuple(outcomes)


def compare_tasks(
    task: LoadedTask, baseline: Sequence[CheckOutcome], candidate: Sequence[CheckOutcome]
) -> TaskFigures:
    """Compare two servers on one task, question by question."""
    pairs = [(b.is_solved, c.is_solved) for b, c in zip(baseline, candidate, strict=True)]
    only_baseline, only_candidate = pairs.count((True, False)), pairs.count((False, True))
    reasons = Counter(o.reason for o in (*baseline, *candidate) if o.reason is not None)
    return TaskFigures(
        file=task.path.name,
        num_rows=len(pairs),
        num_solved_baseline=sum(b for b, _ in pairs),
        num_solved_candidate=sum(c for _, c in pairs),
        num_only_baseline=only_baseline,
        num_only_candidate=only_candidate,
        p_value=mcnemar_exact(only_baseline, only_candidate),
        unusable=dict(reasons),
    )
