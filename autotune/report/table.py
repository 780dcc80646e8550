"""The table that a search ends with and `autotune show` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
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


MIN_REMARK_COLUMNS = 14
WIDE_COLUMNS = 112
"""Narrower terminals get the table without its secondary columns."""


def study_table(
    rows: Sequence[ConfigRow], objective: str, title: str, *, mark: str, width: int
) -> Table:
    """Lay out a study's rows.

    Args:
        rows: from `config_rows`.
        objective: the metric that ranks.
        title: goes above the table.
        mark: ``simulated`` or ``replayed`` where no server was measured for it, else empty.
        width: columns of the terminal.
    """
    caption, mark = _caption(rows, mark), f"{mark} " if mark else ""
    table = Table(
        title=f"{title}\n{mark}{objective}, {unit_of(objective)} [95 % interval]",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
    )
    is_wide = width >= WIDE_COLUMNS
    table.add_column("config", no_wrap=is_wide, overflow="fold")
    table.add_column(f"{mark}{unit_of(objective)}", justify="right", no_wrap=True)
    table.add_column("against K=0", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("tok/step", justify="right", no_wrap=True)
        table.add_column("TTFT p95 ms", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("remarks", min_width=MIN_REMARK_COLUMNS, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row, is_wide), style="bold" if "winner" in row.roles else None)
    return table


def _cells(row: ConfigRow, is_wide: bool) -> list[Text]:
    ttft = f"{row.ttft_p95_ms:.0f}" if row.ttft_p95_ms is not None else "–"
    accepted = f"{row.acceptance_length:.2f}" if row.acceptance_length is not None else "–"
    cells = [
        row.label,
        figure(row.objective),
        ratio(row.ratio_to_baseline),
        *([accepted, ttft] if is_wide else []),
        str(row.num_launches),
        _remarks(row),
    ]
    return [Text(cell) for cell in cells]


def _remarks(row: ConfigRow) -> str:
    parts = [role.upper() if role == "winner" else role for role in reversed(row.roles)]
    if row.failure is not None:
        parts.append(f"{row.num_failed} failed: {row.failure[:160]}")
    elif row.num_failed:
        parts.append(f"{row.num_failed} more failed")
    if row.is_feasible is False:
        parts.append(f"breaks {row.worst_limit} by {row.worst_violation:.0%}")
    elif row.objective is not None and not row.is_confirmed:
        parts.append("not confirmed")
    return "; ".join(parts)


def _caption(rows: Sequence[ConfigRow], mark: str) -> str:
    counts = [row.objective.num_requests for row in rows if row.objective is not None]
    if not counts:
        return ""
    requests = (
        f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    )
    said = (
        f"n: launches; {requests} requests a config; intervals: bootstrap over launches and prompts; "
        "tok/step: accepted tokens a step, bonus token included"
    )
    return f"{said}; {mark}: no server was measured for this" if mark else said
