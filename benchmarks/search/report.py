"""The benchmark's table in Markdown and its plot in SVG."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean

from benchmarks.search.timeline import HOURS, Run, median

NUM_RESAMPLES = 1000
CONFIDENCE_Z = 1.96


def proportion_interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z2 = CONFIDENCE_Z**2
    share = hits / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = (
        CONFIDENCE_Z
        * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
        / (1 + z2 / count)
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def median_interval(runs: Sequence[Run], value: Callable[[Run], float]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median, resampling scenarios: seeds of one are alike."""
    by_scenario: dict[str, list[float]] = {}
    for run in runs:
        by_scenario.setdefault(run.scenario, []).append(value(run))
    groups = list(by_scenario.values())
    rng = random.Random(0)
    medians = sorted(
        median([v for group in rng.choices(groups, k=len(groups)) for v in group])
        for _ in range(NUM_RESAMPLES)
    )
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


def quantile_90(values: Sequence[float]) -> float:
    """Return the smallest value that at least 90 % do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def table(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """Return the two tables: how soon methods are right, and what they lose and spend."""
    hours = " / ".join(f"{h:g}" for h in HOURS)
    lines = [
        f"| method | runs | GPU-hours until it stays within 2 %, median [95 %] "
        f"| share within 2 % at {hours} h [95 % at the end] |",
        "|---|---|---|---|",
    ]
    costs = [
        f"| method | regret at {hours} h, median | p90 | infeasible at the end | no answer | launches "
        "| crashed | stops itself at, h | CPU s per proposal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        of = [run for run in runs if run.method == method]
        if not of:
            continue
        low, high = median_interval(of, Run.stays_from_h)
        shares = [fmean(run.is_within(h) for run in of) for h in HOURS]
        at_end = proportion_interval(sum(run.is_within(HOURS[-1]) for run in of), len(of))
        lines.append(
            f"| {method} | {len(of)} | {_hours(median([r.stays_from_h() for r in of]))} "
            f"[{_hours(low)}, {_hours(high)}] | {' / '.join(f'{s:.2f}' for s in shares)} "
            f"[{at_end[0]:.2f}, {at_end[1]:.2f}] |"
        )
        regrets = [[run.regret_at(h) for run in of] for h in HOURS]
        infeasible = sum(run.is_infeasible for run in of)
        silent = sum(not run.has_recommendation for run in of)
        costs.append(
            f"| {method} | {' / '.join(_percent(median(r)) for r in regrets)} "
            f"| {' / '.join(_percent(quantile_90(r)) for r in regrets)} "
            f"| {infeasible} of {len(of)} | {silent} | {fmean(r.num_launches for r in of):.1f} "
            f"| {fmean(r.num_crashed for r in of):.1f} | {median([r.ended_h for r in of]):.2f} "
            f"| {fmean(r.cpu_s_per_proposal for r in of):.3f} |"
        )
    return "\n".join([*lines, "", *costs])


def _hours(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "–" if math.isinf(value) else f"{100 * value:.1f} %"


COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
    "#8b4513", "#6a3d9a",
)  # fmt: skip
"""Okabe and Ito's, which most colour-blind readers can tell apart, and two more."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 20, 170, 45
NUM_STEPS = 180


def plot(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """Return the share of runs within 2 % over hours, one line a method."""
    end_h = HOURS[-1]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(hour: float) -> float:
        return LEFT + wide * hour / end_h

    def y(share: float) -> float:
        return TOP + high * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in range(6):
        share = tick / 5
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y(share):.1f}" y2="{y(share):.1f}" '
            f'stroke="#dddddd"/><text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">'
            f"{share:.1f}</text>"
        )
    for tick in range(7):
        hour = end_h * tick / 6
        parts.append(
            f'<text x="{x(hour):.1f}" y="{TOP + high + 18}" text-anchor="middle">{hour:g}</text>'
        )
    parts.append(
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        "simulated GPU-hours</text>"
        f'<text x="16" y="{TOP + high / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + high / 2})">share of runs within 2 % of the best</text>'
    )
    shown = [m for m in methods if any(run.method == m for run in runs)]
    for number, method in enumerate(shown):
        of = [run for run in runs if run.method == method]
        times = [end_h * i / NUM_STEPS for i in range(NUM_STEPS + 1)]
        points = " ".join(f"{x(t):.1f},{y(fmean(r.is_within(t) for r in of)):.1f}" for t in times)
        colour, at = COLOURS[number % len(COLOURS)], TOP + 14 + 20 * number
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<line x1="{LEFT + wide + 12}" x2="{LEFT + wide + 34}" y1="{at - 4}" y2="{at - 4}" '
            f'stroke="{colour}" stroke-width="2"/>'
            f'<text x="{LEFT + wide + 40}" y="{at}">{escape(method)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
