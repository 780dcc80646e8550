"""The quality gate's findings in a few words."""

from __future__ import annotations

from autotune.measure.cost import cost_per_solved_task_usd
from autotune.measure.quality.verdict import QualityFigures, QualityVerdict
from autotune.measure.stats import Interval
from autotune.traffic.profile import Cost


def answers_text(verdict: QualityVerdict) -> str:
    """Sum a verdict up: its level, and the figures that a reader can judge it by."""
    level = str(verdict.level).replace("_", " ")
    if verdict.figures is None:
        return level
    return f"{level}; {'; '.join(_figures(verdict.figures))}"


def _figures(figures: QualityFigures) -> list[str]:
    match, forced = figures.match_serial, figures.forced
    judge = "its own model" if figures.is_lossy else "the model"
    found = [
        f"{match.num_exact} of {match.num_pairs} equal to those without speculation",
        f"{forced.num_near} of {forced.num_positions} tokens are {judge}'s best or a near-tie, "
        f"the worst {forced.largest_gap_nats:.2f} nat below it",
    ]
    distances = figures.distributions
    if distances is not None:
        found.append(
            f"KL to the unquantised model {distances.mean_kl_nats:.4f} nat (mean, lower bound), same "
            f"best token at {distances.agreement_ratio:.1%} of {distances.num_positions} positions"
        )
    for task in figures.tasks:
        found.append(
            f"{task.file}: {task.num_solved_candidate} of {task.num_rows} solved, "
            f"{task.num_solved_baseline} without speculation"
        )
    return found


def solved_task_costs(
    verdict: QualityVerdict, request_throughput_rps: Interval, cost: Cost
) -> dict[str, Interval]:
    """Return the cost of a solved task in US dollars, by the name of the task's file."""
    if verdict.figures is None:
        return {}
    costs = {
        task.file: cost_per_solved_task_usd(
            request_throughput_rps,
            task.num_solved_candidate / task.num_rows,
            cost.gpu_hourly_usd,
            cost.gpus,
        )
        for task in verdict.figures.tasks
        if task.num_rows
    }
    return {file: usd for file, usd in costs.items() if usd is not None}
