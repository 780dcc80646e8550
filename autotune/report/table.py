"""The table that a search ends with and `autotune show` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from autotune.measure.stats import Interval
from autotune.report.rows import ConfigRow

UNITS = {"_tps": "tok/s", "_rps": "req/s", "_ms": "ms"}


def unit_of(metric: str) -> str:
    """Return the unit that a metric's name ends with, as people write it."""
    return next((unit for suffix, unit in UNITS.items() if metric.endswith(suffix)), "")


def figure(interval: Interval | None, unit: str = "") -> str:
    """Write an estimate with its interval: ``45.2 [43.9, 46.8] tok/s``."""
    if interval is None:
        return "–"
    digits = 2 if abs(interval.estimate) < 10 else 1
    text = (
        f"{interval.estimate:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    )
    return f"{text} {unit}".strip()


def ratio(interval: Interval | None) -> str:
    """Write a ratio with its interval: ``1.52 [1.44, 1.61]x``."""
    if interval is None:
        return "–"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]x"


def study_table(
    rows: Sequence[ConfigRow], objective: str, title: str, *, is_simulated: bool
) -> Table:
    """Lay out a study's rows.

    Args:
        rows: from `config_rows`.
        objective: the metric that ranks.
        title: goes above the table.
        is_simulated: marks every table of a study that no real server took part in.
    """
    mark = " (simulated)" if is_simulated else ""
    table = Table(title=title + mark, title_justify="left", caption=_caption(rows, is_simulated),
                  caption_justify="left")  # fmt: skip
    table.add_column("config", no_wrap=True)
    table.add_column(f"{objective}{mark}\n{unit_of(objective)} [95 % interval]", justify="right")
    table.add_column("vs K=0\n[95 % interval]", justify="right")
    table.add_column("accepted\nper step", justify="right")
    table.add_column("TTFT p95\nms", justify="right")
    table.add_column("launches", justify="right")
    table.add_column("remarks")
    for row in rows:
        table.add_row(*_cells(row), style="bold" if "winner" in row.roles else None)
    return table


def _cells(row: ConfigRow) -> tuple[str | Text, ...]:
    return (
        row.label,
        figure(row.objective),
        ratio(row.ratio_to_baseline),
        f"{row.acceptance_length:.2f}" if row.acceptance_length is not None else "–",
        f"{row.ttft_p95_ms:.0f}" if row.ttft_p95_ms is not None else "–",
        f"{row.num_launches}" + (f" + {row.num_failed} failed" if row.num_failed else ""),
        Text(_remarks(row)),
    )


def _remarks(row: ConfigRow) -> str:
    parts = [role.upper() if role == "winner" else role for role in reversed(row.roles)]
    if row.failure is not None:
        parts.append(row.failure[:160])
    elif row.is_feasible is False:
        parts.append(f"breaks {row.worst_limit} by {row.worst_violation:.0%}")
    elif not row.is_confirmed:
        parts.append("measured once, not confirmed")
    return "; ".join(parts)


def _caption(rows: Sequence[ConfigRow], is_simulated: bool) -> str:
    counts = [row.objective.num_requests for row in rows if row.objective is not None]
    if not counts:
        return ""
    requests = (
        f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    )
    said = f"{requests} requests a config; intervals by bootstrap over launches and prompts"
    return f"{said}; simulated, no real server was measured" if is_simulated else said
