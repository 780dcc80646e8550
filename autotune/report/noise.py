"""The noise floor as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from autotune.measure.noise import NoiseReport, Spread
from autotune.report.table import unit_of

SHOWN_METRICS = (
    "output_throughput_tps",
    "structured_throughput_tps",
    "tpot_mean_ms",
    "ttft_mean_ms",
    "e2el_mean_ms",
)


def noise_table(reports: Sequence[NoiseReport], title: str) -> Table:
    """Draw one row a metric."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("metric")
    for name in ("mean", "CV between launches", "CV within a launch"):
        table.add_column(name, justify="right")
    for count in reports[0].detectable_gain_ratio:
        table.add_column(f"gain by {count}", justify="right")
    table.add_column("A/A cover 1", justify="right")
    for report in reports:
        table.add_row(
            report.metric,
            f"{report.mean:.4g} {unit_of(report.metric)}",
            _spread(report.between_launches),
            _spread(report.within_launches),
            *(f"{gain:.1%}" for gain in report.detectable_gain_ratio.values()),
            _null_check(report),
        )
    return table


def explanation(report: NoiseReport) -> str:
    """Say what the table's figures are of."""
    return (
        f"{report.num_launches} launches, {report.num_measurements} measurements, "
        f"{report.num_requests} requests; CV [95 % interval]; gain by n: the smallest gain that n "
        "launches a side show with 80 % probability at 95 % confidence; A/A cover 1: ratios of one "
        "launch to another whose 95 % interval holds the truth (from four launches on)"
    )


def _null_check(report: NoiseReport) -> str:
    """Say how many A/A ratios cover 1; with fewer than four launches nothing is left to judge by."""
    ratios = report.null_ratios
    if not ratios or not all(interval.includes_launch_spread for interval in ratios):
        return "–"
    return f"{report.num_null_covered} of {len(ratios)}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{spread.cv_ratio:.1%} [{spread.low:.1%}, {spread.high:.1%}]"
