"""One row per config: which launches count, against what, and in which order."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from study_helpers import at_tps, config, launch, measurement

from autotune.report.rows import ConfigRow, config_rows
from autotune.search.decision import Decision, Finalist, Goal, decide
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.store.records import LaunchRecord, Phase

NO_ROOM = TrialFailure(FailureKind.INSUFFICIENT_MEMORY, "no room", "/logs/no-room.log")
K0, K2, K4, K8 = config(0), config(2), config(4), config(8)


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.measure.stats.NUM_RESAMPLES", 50)


def goal(**limits: float) -> Goal:
    return Goal("output_throughput_tps", True, {"default": limits} if limits else {}, 0.02)


MINIMIZE = Goal("e2el_mean_ms", False, {}, 0.02)


def rows_of(
    launches: Sequence[LaunchRecord],
    of_goal: Goal | None = None,
    decision: Decision | None = None,
    **kwargs: Any,
) -> list[ConfigRow]:
    return config_rows(launches, of_goal or goal(), K0.digest, K8.digest, decision, **kwargs)


def by_label(rows: Sequence[ConfigRow]) -> dict[str, ConfigRow]:
    return {row.label: row for row in rows}


def tps(row: ConfigRow) -> float:
    assert row.objective is not None
    return row.objective.estimate


# --- which launches count ---


def test_a_run_that_was_cut_off_has_a_reason_and_no_figures() -> None:
    """A part of a measurement is no measurement: its throughput misses what was still in flight."""
    cut_off = replace(at_tps(90), stopped_early="requests take 80% longer")
    rows = by_label(rows_of([launch(1, K0, at_tps(100)), launch(2, K4, cut_off)]))
    assert rows["K=4"].objective is None
    assert rows["K=4"].ratio_to_baseline is None
    assert rows["K=4"].is_feasible is None
    assert rows["K=4"].failure == "given up: requests take 80% longer"
    assert rows["K=0"].failure is None


def test_a_config_that_was_confirmed_shows_its_fresh_launches_alone() -> None:
    rows = rows_of(
        [
            launch(1, K4, at_tps(500), trial_number=0),  # what made it look good
            launch(2, K4, at_tps(200), Phase.CONFIRM),
            launch(3, K4, at_tps(220), Phase.CONFIRM, repeat=1),
        ]
    )

    (row,) = rows
    assert tps(row) == pytest.approx(210)
    assert row.objective is not None
    # Of two launches by themselves: ln 220 - ln 200 = 0.0953, sd 0.0674, over sqrt(2) 0.0477, times
    # t(0.975, 1) = 12.71: 210 * exp(-0.606) = 114.6 and 210 * exp(0.606) = 384.9. With the lucky one
    # the mean would be 307.
    assert row.objective.low == pytest.approx(114.6, abs=0.3)
    assert row.objective.high == pytest.approx(384.9, abs=1)
    assert row.objective.num_launches == row.num_launches == 2
    assert row.objective.num_requests == 20
    assert row.is_confirmed
    assert row.trial_number == 0


def test_a_config_that_was_only_searched_shows_that() -> None:
    (row,) = rows_of([launch(1, K4, at_tps(500), trial_number=3)])

    assert tps(row) == pytest.approx(500)
    assert (row.num_launches, row.is_confirmed, row.trial_number) == (1, False, 3)


def test_a_config_whose_confirmation_failed_shows_its_search() -> None:
    (row,) = rows_of(
        [launch(1, K4, at_tps(500), trial_number=0), launch(2, K4, NO_ROOM, Phase.CONFIRM)]
    )

    assert tps(row) == pytest.approx(500)
    assert (row.num_launches, row.num_failed, row.is_confirmed) == (1, 1, False)
    assert row.failure is None  # there are figures


def test_launches_that_were_cut_off_do_not_count() -> None:
    rows = rows_of([launch(1, K2, None), launch(2, K4, at_tps(100)), launch(3, K4, None)])

    assert [row.label for row in rows] == ["K=4"]
    assert rows[0].num_launches == 1


def test_a_failure_is_shown_with_its_log() -> None:
    (row,) = rows_of([launch(1, K4, NO_ROOM, trial_number=5)])

    assert row.objective is None
    assert row.is_feasible is None
    assert row.failure == "insufficient_memory: no room (log: /logs/no-room.log)"
    assert row.log_path == "/logs/no-room.log"
    assert (row.num_launches, row.num_failed, row.trial_number) == (0, 1, 5)


# --- against the baseline ---


def test_the_ratio_is_of_fresh_launches_on_both_sides() -> None:
    rows = by_label(
        rows_of(
            [
                launch(1, K0, at_tps(50)),
                launch(2, K4, at_tps(900)),
                launch(3, K0, at_tps(100), Phase.CONFIRM),
                launch(4, K4, at_tps(160), Phase.CONFIRM),
            ]
        )
    )

    ratio = rows["K=4"].ratio_to_baseline
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.6)
    assert ratio.num_launches == 2
    assert rows["K=0"].ratio_to_baseline is None


def test_a_config_of_the_search_is_compared_with_the_baseline_of_the_search() -> None:
    """Like with like: the machine may have been another one, so to say, by the confirmation."""
    rows = by_label(
        rows_of(
            [
                launch(1, K0, at_tps(100)),
                launch(2, K2, at_tps(120)),
                launch(3, K0, at_tps(80), Phase.CONFIRM),
                launch(4, K0, at_tps(80), Phase.CONFIRM, repeat=1),
            ]
        )
    )

    ratio = rows["K=2"].ratio_to_baseline
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.2)  # and not 120 / 80


def test_without_a_baseline_there_is_no_ratio() -> None:
    rows = by_label(rows_of([launch(1, K0, NO_ROOM), launch(2, K4, at_tps(100))]))

    assert rows["K=4"].ratio_to_baseline is None


def test_a_ratio_to_nothing_is_no_ratio() -> None:
    """No request of the baseline keeps its limit, so its goodput is 0: there is no factor to show."""
    of_goal = Goal("goodput_tps", True, {"default": {"e2el_p95_ms": 100.0}}, 0.02)
    # 10 tokens take 1 s at 10 tok/s, and 50 ms at 200 tok/s.
    rows = by_label(rows_of([launch(1, K0, at_tps(10)), launch(2, K4, at_tps(200))], of_goal))

    assert tps(rows["K=0"]) == 0
    assert tps(rows["K=4"]) == pytest.approx(200)
    text = json.dumps([row.as_dict() for row in rows.values()])
    assert "NaN" not in text  # which is no JSON


# --- order ---


def test_the_best_comes_first_and_failures_come_last() -> None:
    rows = rows_of(
        [
            launch(1, K0, NO_ROOM),
            launch(2, K2, at_tps(100)),
            launch(3, K4, at_tps(300)),
            launch(4, K8, at_tps(200)),
        ]
    )

    assert [row.label for row in rows] == ["K=4", "K=8", "K=2", "K=0"]


def test_what_keeps_its_limits_comes_before_what_breaks_them() -> None:
    rows = rows_of(
        [
            launch(1, K0, at_tps(100, ttft_s=0.01)),
            launch(2, K2, at_tps(150, ttft_s=0.015)),
            launch(3, K4, at_tps(200, ttft_s=0.05)),  # 50 ms against 20 ms
            launch(4, K8, NO_ROOM),
        ],
        goal(ttft_p95_ms=20),
    )

    assert [(row.label, row.is_feasible) for row in rows] == [
        ("K=2", True), ("K=0", True), ("K=4", False), ("K=8", None),
    ]  # fmt: skip
    assert rows[2].worst_limit == "default.ttft_p95_ms"
    assert rows[2].worst_violation == pytest.approx(1.5)
    assert rows[1].worst_violation == pytest.approx(-0.5)


def test_where_less_is_better_the_least_comes_first() -> None:
    rows = rows_of(
        [launch(1, K0, at_tps(100)), launch(2, K4, at_tps(200)), launch(3, K8, NO_ROOM)], MINIMIZE
    )

    assert [row.label for row in rows] == ["K=4", "K=0", "K=8"]
    assert tps(rows[0]) == pytest.approx(50)  # ms for 10 tokens at 200 tok/s


# --- figures ---


def test_figures_are_means_over_launches() -> None:
    (row,) = rows_of(
        [
            launch(1, K4, at_tps(20, ttft_s=0.05, acceptance_length=2.0), Phase.CONFIRM),
            launch(2, K4, at_tps(20, ttft_s=0.14, acceptance_length=3.0), Phase.CONFIRM),
        ]
    )

    assert row.acceptance_length == pytest.approx(2.5)
    assert row.ttft_p95_ms == pytest.approx((50 + 140) / 2)
    # 0.5 s a request: (0.5 - 0.05) / 9 = 50 ms and (0.5 - 0.14) / 9 = 40 ms for each further token.
    assert row.tpot_mean_ms == pytest.approx(45)


def test_without_speculation_there_is_no_acceptance() -> None:
    (row,) = rows_of([launch(1, K0, at_tps(100))])

    assert row.acceptance_length is None


def test_an_interval_covers_the_spread_of_the_launches() -> None:
    (row,) = rows_of(
        [launch(n, K4, at_tps(rate), Phase.CONFIRM) for n, rate in enumerate((90, 100, 110))]
    )

    assert row.objective is not None
    # Logarithms 4.4998, 4.6052, 4.7005: sd 0.1004, over sqrt(3) 0.0580, times t(0.975, 2) = 4.303.
    assert row.objective.low == pytest.approx(100 * math.exp(-0.2494), abs=0.2)
    assert row.objective.high == pytest.approx(100 * math.exp(0.2494), abs=0.2)


# --- names and roles ---


def test_roles_are_named() -> None:
    launches = [
        launch(n, of, at_tps(rate), Phase.CONFIRM, repeat=n % 2)
        for n, (of, rate) in enumerate([(K0, 100), (K0, 100), (K4, 200), (K4, 200), (K8, 150)])
    ]
    finalists = [
        Finalist(of, (), tuple(m for x in launches if x.config == of for m in x.measurements),
                 of.label())
        for of in (K0, K4)
    ]  # fmt: skip
    decision = decide(finalists, goal())

    rows = by_label(rows_of(launches, decision=decision))

    assert {label: row.roles for label, row in rows.items()} == {
        "K=4": ("winner",), "K=0": ("no speculation",), "K=8": ("default",),
    }  # fmt: skip


def test_one_config_may_have_several_roles() -> None:
    launches = [launch(n, K0, at_tps(100), Phase.CONFIRM, repeat=n) for n in range(2)]
    measured = tuple(m for x in launches for m in x.measurements)
    decision = decide([Finalist(K0, (), measured, "K=0")], goal())

    (row,) = config_rows(launches, goal(), K0.digest, K0.digest, decision)

    assert row.roles == ("no speculation", "default", "winner")


def test_knobs_that_stand_still_are_not_mentioned() -> None:
    launches = [launch(1, config(4, max_num_seqs=32, kv_cache_dtype="fp8"), at_tps(100))]

    assert rows_of(launches)[0].label == "K=4 fp8-kv seqs=32"
    assert rows_of(launches, standing_knobs=("max_num_seqs",))[0].label == "K=4 fp8-kv"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"drafter": "/heads/small"}, {"drafter": "/heads/large"}),
        ({"flags": (("block-size", 16),)}, {"flags": (("block-size", 32),)}),
    ],
    ids=["drafters", "vLLM options"],
)
def test_configs_that_differ_are_named_differently(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Both are searched like any knob, so a table must say which row is which."""
    rows = rows_of(
        [launch(1, config(4, **one), at_tps(100)), launch(2, config(4, **other), at_tps(90))],
        standing_knobs=("weights", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens"),
        named_knobs=("drafter", "block-size"),
    )

    assert len({row.label for row in rows}) == 2


def test_a_row_is_plain_data() -> None:
    (row,) = rows_of([launch(1, K4, measurement([0.1, 0.2]), trial_number=1)])

    plain = json.loads(json.dumps(row.as_dict()))
    assert plain["label"] == "K=4"
    assert plain["objective"]["estimate"] == pytest.approx(20 / 0.3)
