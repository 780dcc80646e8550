"""The table that a search ends with and `autotune show` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autotune.measure.quality.verdict import QualityLevel
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
    text = f"{interval.estimate:.{digits}f} [{interval.low:.{digits}f}, {_high(interval, digits)}]"
    return f"{text} {unit}".strip()


def ratio(interval: Interval | None) -> str:
    """Write a ratio with its interval: ``1.52 [1.44, 1.61]x``."""
    if interval is None:
        return "–"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {_high(interval, 2)}]x"


def dollars(interval: Interval) -> str:
    """Write a cost with its interval: ``$0.00123 [0.00111, 0.00140]``."""
    return f"${interval.estimate:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _high(interval: Interval, digits: int) -> str:
    return f"{interval.high:.{digits}f}" if interval.has_upper_bound else "?"


MIN_REMARK_COLUMNS = 14
WIDE_COLUMNS = 112
"""Narrower terminals get the table without its secondary columns."""


def study_table(
    rows: Sequence[ConfigRow],
    objective: str,
    title: str,
    *,
    mark: str,
    prompt_mark: str = "",
    width: int,
) -> Table:
    """Lay out a study's rows.

    Args:
        rows: from `config_rows`.
        objective: the metric that ranks.
        title: goes above the table.
        mark: ``simulated`` or ``replayed`` where no server was measured for it, else empty.
        prompt_mark: ``proxy prompts`` or ``random prompts`` where they are not the users', else empty.
        width: columns of the terminal.
    """
    caption = _caption(rows, mark, prompt_mark)
    marks = ", ".join(word for word in (mark, prompt_mark) if word)
    mark = f"{mark} " if mark else ""
    of_prompts = f" ({marks})" if prompt_mark else ""
    table = Table(
        title=f"{title}\n{mark}{objective}, {unit_of(objective)} [95 % interval]{of_prompts}",
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
    has_cost = is_wide and any(row.usd_per_million_output_tokens for row in rows)
    if has_cost:
        table.add_column("$ per 1M tok", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("remarks", min_width=MIN_REMARK_COLUMNS, overflow="fold")
    for row in rows:
        table.add_row(
            *_cells(row, is_wide, has_cost), style="bold" if "winner" in row.roles else None
        )
    return table


def _cells(row: ConfigRow, is_wide: bool, has_cost: bool) -> list[Text]:
    ttft = f"{row.ttft_p95_ms:.0f}" if row.ttft_p95_ms is not None else "–"
    accepted = f"{row.acceptance_length:.2f}" if row.acceptance_length is not None else "–"
    cells = [
        row.label,
        figure(row.objective),
        ratio(row.ratio_to_baseline),
        *([accepted, ttft] if is_wide else []),
        *([figure(row.usd_per_million_output_tokens)] if has_cost else []),
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
    if row.quality is not None and row.quality.level is not QualityLevel.PASSED:
        parts.append(f"answers {row.quality.level.replace('_', ' ')}: {row.quality.reasons[0]}")
    if row.worst_violation is not None and row.worst_violation > 0:
        parts.append(f"breaks {row.worst_limit} by {row.worst_violation:.0%}")
    elif row.objective is not None and not row.is_confirmed:
        parts.append("not confirmed")
    return "; ".join(parts)


def _caption(rows: Sequence[ConfigRow], mark: str, prompt_mark: str) -> str:
    counts = [row.objective.num_requests for row in rows if row.objective is not None]
    if not counts:
        return ""
    requests = (
        f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    )
    said = (
        f"n: launches; {requests} requests a config; intervals: over prompts and launches; "
        "tok/step: accepted tokens a step, bonus token included"
    )
    if mark:
        said += f"; {mark}: no server was measured for this"
    if prompt_mark:
        said += f"; {prompt_mark}: not your users' own, and acceptance depends on what is said"
    return said
