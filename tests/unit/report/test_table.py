"""The table: what stands in it, on wide and narrow terminals, and how it is marked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from autotune.measure.quality.verdict import QualityLevel, QualityVerdict
from autotune.measure.stats import Interval
from autotune.report.rows import ConfigRow
from autotune.report.table import WIDE_COLUMNS, figure, ratio, study_table, unit_of

WIDE = 140
NARROW = 100


def interval(estimate: float, low: float, high: float, num_requests: int = 60) -> Interval:
    return Interval(estimate, low, high, num_requests, 3)


def row(
    label: str,
    objective: Interval | None = None,
    *,
    roles: tuple[str, ...] = (),
    ratio_to_baseline: Interval | None = None,
    num_failed: int = 0,
    violation: float | None = None,
    is_confirmed: bool = True,
    failure: str | None = None,
    cost: Interval | None = None,
    quality: QualityVerdict | None = None,
) -> ConfigRow:
    return ConfigRow(
        trial_number=0,
        label=label,
        digest=label,
        roles=roles,
        num_launches=0 if objective is None else 3,
        num_failed=num_failed,
        objective=objective,
        ratio_to_baseline=ratio_to_baseline,
        acceptance_length=None if objective is None else 2.3456,
        ttft_p95_ms=None if objective is None else 123.4,
        tpot_mean_ms=None,
        worst_limit=None if violation is None else "chat.ttft_p95_ms",
        worst_violation=violation,
        usd_per_million_output_tokens=cost,
        request_throughput_rps=None,
        quality=quality,
        is_confirmed=is_confirmed,
        failure=failure,
        log_path=None,
    )


BASELINE = row("K=0", interval(100.0, 98.76, 101.24), roles=("no speculation",))
WINNER = row(
    "K=4",
    interval(152.0, 150.0, 154.0),
    roles=("winner",),
    ratio_to_baseline=interval(1.52, 1.4949, 1.55),
)
ROWS = [
    WINNER,
    BASELINE,
    row("K=8", interval(140.0, 139.0, 141.0), violation=0.253),
    row("K=9", None, num_failed=2, failure="insufficient_memory: no room"),
]


def printed(
    rows: Sequence[ConfigRow],
    *,
    width: int = WIDE,
    mark: str = "",
    prompt_mark: str = "",
    objective: str = "output_throughput_tps",
) -> str:
    table = study_table(
        rows, objective, "study demo: H100", mark=mark, prompt_mark=prompt_mark, width=width
    )
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def line_of(label: str, text: str) -> str:
    (found,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return found


# --- figures ---


@pytest.mark.parametrize(
    ("shown", "unit", "text"),
    [
        (None, "", "–"),
        (interval(45.234, 43.91, 46.78), "", "45.2 [43.9, 46.8]"),
        (interval(45.234, 43.91, 46.78), "tok/s", "45.2 [43.9, 46.8] tok/s"),
        (interval(1.234, 1.1, 1.555), "req/s", "1.23 [1.10, 1.55] req/s"),
        (interval(12345.67, 12000.0, 12999.99), "ms", "12345.7 [12000.0, 13000.0] ms"),
        (interval(0.0, 0.0, 0.0), "", "0.00 [0.00, 0.00]"),
        (interval(20.0, 15.0, 20.0 * 2e9), "ms", "20.0 [15.0, ?] ms"),  # no upper bound is known
    ],
)
def test_a_figure_has_its_interval(shown: Interval | None, unit: str, text: str) -> None:
    assert figure(shown, unit) == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [(None, "–"), (interval(1.52, 1.4449, 1.61), "1.52 [1.44, 1.61]x")],
)
def test_a_ratio_has_its_interval(shown: Interval | None, text: str) -> None:
    assert ratio(shown) == text


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("output_throughput_tps", "tok/s"),
        ("goodput_rps", "req/s"),
        ("ttft_p95_ms", "ms"),
        ("acceptance_length", ""),
    ],
)
def test_units(metric: str, unit: str) -> None:
    assert unit_of(metric) == unit


# --- what stands in it ---


def test_prompts_that_are_not_the_users_are_said_so() -> None:
    text = " ".join(printed(ROWS, prompt_mark="proxy prompts").split())

    assert "[95 % interval] (proxy prompts)" in text
    assert "proxy prompts: not your users' own" in text
    assert "no server was measured" not in text


def test_costs_stand_in_the_table_where_a_price_is_known() -> None:
    priced = row("K=3", interval(100.0, 98.0, 102.0), cost=interval(0.25, 0.24, 0.26))

    assert "0.25 [0.24, 0.26]" in line_of("K=3", printed([priced, BASELINE]))
    assert "$ per 1M tok" in printed([priced, BASELINE])
    assert "$ per 1M tok" not in printed(ROWS)


def test_a_verdict_on_the_answers_that_is_no_plain_pass_is_told() -> None:
    failed = QualityVerdict(QualityLevel.FAILED, ("one token of 96 is 3.1 nats off",))
    bad = row("K=3", interval(200.0, 198.0, 202.0), quality=failed)
    good = row("K=5", interval(200.0, 198.0, 202.0), quality=QualityVerdict(QualityLevel.PASSED))

    text = printed([bad, good])

    assert bad.is_feasible is False
    assert good.is_feasible is True
    assert "answers failed: one token" in " ".join(text.split())
    assert "answers" not in line_of("K=5", text)


def test_a_row_tells_what_is_known_of_a_config() -> None:
    text = printed(ROWS)

    for part in ("152.0 [150.0, 154.0]", "1.52 [1.49, 1.55]x", "2.35", "123", " 3 ", "WINNER"):
        assert part in line_of("K=4", text)
    for part in ("100.0 [98.8, 101.2]", "–", "no speculation"):
        assert part in line_of("K=0", text)


def test_rows_keep_their_order() -> None:
    lines = printed(ROWS).splitlines()

    assert [line.split()[0] for line in lines if line.strip().startswith("K=")] == [
        "K=4", "K=0", "K=8", "K=9",
    ]  # fmt: skip


def test_a_failure_says_why_and_how_often() -> None:
    text = line_of("K=9", printed(ROWS))

    assert "2 failed: insufficient_memory: no room" in text
    assert text.count("–") == 4  # no throughput, no ratio, no tokens a step, no TTFT


def test_a_broken_limit_is_named_with_its_excess() -> None:
    assert "breaks chat.ttft_p95_ms by 25%" in line_of("K=8", printed(ROWS))


def test_a_kept_limit_is_not_mentioned() -> None:
    text = printed([row("K=8", interval(140.0, 139.0, 141.0), violation=-0.2)])

    assert "breaks" not in text


def test_what_was_only_searched_is_marked() -> None:
    rows = [WINNER, row("K=2", interval(120.0, 119.0, 121.0), is_confirmed=False)]

    text = printed(rows)

    assert "not confirmed" in line_of("K=2", text)
    assert "not confirmed" not in line_of("K=4", text)


def test_several_roles_stand_together() -> None:
    rows = [row("K=0", interval(1.0, 1.0, 1.0), roles=("no speculation", "default", "winner"))]

    assert "WINNER; default; no speculation" in line_of("K=0", printed(rows))


def test_brackets_in_a_message_are_text_and_not_style() -> None:
    text = printed([row("K=9", None, failure="launch_error: [bold]x[/bold] [/] list[int]")])

    assert "[bold]x[/bold] [/] list[int]" in text


def test_a_study_without_any_row_has_a_table_all_the_same() -> None:
    assert "study demo: H100" in printed([])


@pytest.mark.parametrize(
    ("objective", "unit"),
    [("output_throughput_tps", "tok/s"), ("tpot_mean_ms", "ms"), ("goodput_rps", "req/s")],
)
def test_the_objective_is_named_with_its_unit(objective: str, unit: str) -> None:
    text = printed(ROWS, objective=objective)

    assert f"{objective}, {unit} [95 % interval]" in text


def test_sample_sizes_are_told() -> None:
    assert "60 requests a config" in printed(ROWS)
    few = [row("K=0", interval(1.0, 1.0, 1.0, 20)), row("K=4", interval(2.0, 2.0, 2.0, 60))]
    assert "20 to 60 requests a config" in printed(few)


# --- width ---


def header(text: str) -> str:
    return next(line for line in text.splitlines() if "against K=0" in line)


def test_a_wide_terminal_shows_every_column() -> None:
    for column in ("config", "tok/s", "against K=0", "tok/step", "TTFT p95 ms", "n", "remarks"):
        assert column in header(printed(ROWS, width=WIDE_COLUMNS))


def test_a_narrow_terminal_drops_the_secondary_columns() -> None:
    text = printed(ROWS, width=WIDE_COLUMNS - 1)

    assert "TTFT" not in header(text)
    assert "123" not in line_of("K=4", text)


@pytest.mark.parametrize("width", [80, NARROW, WIDE_COLUMNS, WIDE])
@pytest.mark.parametrize("mark", ["", "simulated"])
def test_figures_are_whole_at_every_width(width: int, mark: str) -> None:
    text = printed(ROWS, width=width, mark=mark)

    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for label in ("K=4", "K=0", "K=8", "K=9"):
        assert [line for line in text.splitlines() if line.split()[:1] == [label]], text
    for part in ("152.0 [150.0, 154.0]", "1.52 [1.49, 1.55]x"):
        assert part in line_of("K=4", text)


# --- simulated ---


@pytest.mark.parametrize("mark", ["simulated", "replayed"])
def test_what_no_server_was_measured_for_is_marked_at_every_figure(mark: str) -> None:
    text = printed(ROWS, mark=mark)

    assert f"{mark} output_throughput_tps, tok/s [95 % interval]" in text
    assert f"{mark} tok/s" in header(text)
    assert f"{mark}: no server was measured for this" in " ".join(text.split())


def test_a_measured_study_is_not_marked() -> None:
    text = printed(ROWS)

    assert "simulated" not in text
    assert "replayed" not in text
