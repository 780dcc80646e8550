"""Whole studies on the simulated engine: what they find, keep, survive and refuse."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from study_helpers import (
    BEST_K,
    PEAK_AT_5,
    ROUND_HARDWARE,
    TRAINED_DEPTH,
    make_profile,
    make_setup,
    make_space,
    simulated,
    with_limits,
)

from autotune.errors import InputError, NothingFeasibleError, StudyChangedError, StudyError
from autotune.measure.records import Measurement, RequestRecord
from autotune.report.study import load_study
from autotune.search import opening
from autotune.search.ledger import DashboardStorage, optuna_storage
from autotune.search.listener import SearchListener, SilentListener
from autotune.search.setup import SearchSetup
from autotune.search.study import SearchOutcome, StopReason, run_search
from autotune.search.trial import TrialResult
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext, Server
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.serving.simulated import SimulatedEngine, SimulatedServer
from autotune.store.records import LaunchRecord, LaunchState, Phase
from autotune.store.repository import Store

FORK = multiprocessing.get_context("fork")
FINISHED = {LaunchState.MEASURED, LaunchState.FAILED}

TINY = {"num_speculative_tokens": [0, 3, 5]}
"""Three configs, all of them anchors: no speculation, 5 as the nearest to the trained depth, and 3."""
TINY_LAUNCHES = 3 + 3 * 2
"""Three to search, and three finalists twice each."""


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are not what is tested here, and resampling would be most of the run time."""
    monkeypatch.setattr("autotune.measure.stats.NUM_RESAMPLES", 60)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[SearchSetup], Store]]:
    with contextlib.ExitStack() as stack:

        def open_store(setup: SearchSetup) -> Store:
            store = Store(setup.settings.storage, create=True)
            stack.callback(store.close)
            return store

        yield open_store


def tiny_setup(folder: Path, **kwargs: Any) -> SearchSetup:
    profile = make_profile(folder, measure={"min_requests": 4, "warmup": 1})
    return make_setup(
        folder, **{"profile": profile, "space": make_space(TINY), "num_repeats": 2, **kwargs}
    )


def launches_of(store: Store, setup: SearchSetup) -> list[LaunchRecord]:
    return store.launches(store.get_study(setup.study_name))


def depths(launches: list[LaunchRecord], phase: Phase) -> list[int]:
    """K of every finished launch of a phase, in order."""
    return [
        x.config.num_speculative_tokens
        for x in launches
        if x.phase is phase and x.state in FINISHED
    ]


def optuna_trials(setup: SearchSetup) -> list[FrozenTrial]:
    """Read Optuna's side of the study, without any code of ours."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(
        study_name=setup.study_name, storage=f"sqlite:///{setup.settings.storage}"
    )
    return study.get_trials()


def throughput(measurement: Measurement) -> float:
    """Tokens per second of one user who never pauses: all tokens over all the time."""
    tokens = sum(r.num_completion_tokens for r in measurement.records)
    return tokens / max(r.finished_s for r in measurement.records)


def assert_whole(
    setup: SearchSetup, store: Store, earlier: Mapping[int, LaunchRecord] | None = None
) -> None:
    """Check that a finished study has done everything once, and that both ledgers agree.

    Args:
        setup: of the study.
        store: its database.
        earlier: launches that were finished before the study went on.
    """
    study = store.get_study(setup.study_name)
    launches = store.launches(study)
    by_id = {x.launch_id: x for x in launches}
    assert {x.state for x in launches} <= FINISHED | {LaunchState.ABANDONED}
    for launch_id, launch in (earlier or {}).items():
        assert by_id[launch_id] == launch, "a finished launch was lost or changed"
    finished = [x for x in launches if x.state in FINISHED]
    tried = Counter(x.config.digest for x in finished if x.phase is Phase.SEARCH)
    assert set(tried.values()) == {1}, "a config was measured twice"
    assert len(tried) == setup.max_trials
    confirmed = Counter((x.config.digest, x.repeat) for x in finished if x.phase is Phase.CONFIRM)
    assert set(confirmed.values()) == {1}, "a finalist was launched twice in one round"
    rounds = Counter(digest for digest, _ in confirmed)
    # Twice each, and further ones where they decide something: no more than so many whole rounds.
    assert min(rounds.values()) >= 2
    assert confirmed.total() <= len(rounds) * setup.settings.num_repeats
    for digest, count in rounds.items():
        assert {repeat for d, repeat in confirmed if d == digest} == set(range(count))

    trials = optuna_trials(setup)
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    complete = [t for t in trials if t.state is TrialState.COMPLETE]
    assert Counter(t.user_attrs["config_digest"] for t in complete) == tried
    by_trial = {x.trial_number: x for x in finished if x.phase is Phase.SEARCH}
    for trial in complete:
        launch = by_trial[trial.number]
        assert launch.config.digest == trial.user_attrs["config_digest"]
        if launch.measurements:
            assert trial.value == pytest.approx(throughput(launch.measurements[0]))

    decision = store.latest_decision(study)
    assert decision is not None
    assert {f["digest"] for f in decision["finalists"]} == set(rounds)
    with contextlib.closing(sqlite3.connect(setup.settings.storage)) as connection:
        (holders,) = connection.execute("SELECT holder_json FROM autotune_studies").fetchall()
    assert holders == (None,), "the study is still held"


# --- what it finds ---


def test_a_grid_finds_the_best_k(tmp_path: Path, connect: Callable[[SearchSetup], Store]) -> None:
    """K = 5 is best by 4.8 % in the world of `study_helpers`, with the arithmetic beside it."""
    profile = make_profile(tmp_path, measure={"min_requests": 24, "warmup": 1})
    setup = make_setup(tmp_path, profile=profile, sampler="grid")
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    assert outcome.decision.winner_label == f"K={BEST_K}"
    assert outcome.decision.is_simulated
    assert outcome.decision.gain_over_baseline is not None
    assert outcome.decision.gain_over_default is not None
    # The first token comes out of the prompt, in a step that drafts as well: 13 ms with a head. The
    # other 47 take steps of 18 ms that yield 1, 2, 3 or 4 tokens (5 % each) or 6 (80 %), 5.3 on average.
    # The last one yields more than is left, by E[n^2] / 2 E[n] - 1/2 = 30.3 / 10.6 - 1/2 = 2.36 tokens.
    # K = 8 yields 5.33 in 21 ms, and no speculation one in 11 ms.
    of_best = 13 + (47 + 2.36) / 5.3 * 18
    of_default = 13 + (47 + 2.38) / 5.33 * 21
    gain = outcome.decision.gain_over_baseline.estimate
    assert gain == pytest.approx(48 * 11 / of_best, rel=0.05)
    assert outcome.decision.gain_over_default.estimate == pytest.approx(
        of_default / of_best, rel=0.05
    )
    launches = launches_of(store, setup)
    assert sorted(depths(launches, Phase.SEARCH)) == list(range(11))
    assert_whole(setup, store)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tpe_finds_it_within_the_practical_margin(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], seed: int
) -> None:
    profile = make_profile(tmp_path, measure={"min_requests": 24, "warmup": 1})
    setup = make_setup(
        tmp_path, profile=profile, engine=simulated(seed=seed), sampler="tpe", seed=seed,
        max_trials=9, num_repeats=2,
    )  # fmt: skip
    store = connect(setup)

    outcome = run_search(setup, store)

    true_tps = [1 / 11, 1.95 / 14, 2.85 / 15, 3.7 / 16, 4.5 / 17, 5.3 / 18, 5.32 / 19, 5.325 / 20,
                5.326 / 21, 5.326 / 22, 5.326 / 23]  # fmt: skip
    assert outcome.decision is not None
    found = int(outcome.decision.winner_label.removeprefix("K="))
    assert true_tps[found] >= max(true_tps) * (1 - setup.goal.margin_ratio)
    assert_whole(setup, store)


def test_no_speculation_is_recommended_where_it_is_best(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """A head that guesses nothing right costs 2 ms a step, and a row each."""
    useless = replace(PEAK_AT_5, head=replace(PEAK_AT_5.head, survival=(0.02,) * 8))
    setup = make_setup(tmp_path, engine=simulated(useless), space=make_space(TINY))

    outcome = run_search(setup, connect(setup))

    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=0"
    assert outcome.decision.gain_over_baseline is None


def test_the_searchs_own_lucky_value_plays_no_part(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """K = 3 comes out twice as fast as it is in the search, and is not recommended for it."""

    class Lucky(SimulatedEngine):
        num_launches = 0

        def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
            server = super().launch(config, context)
            if config.num_speculative_tokens == 3:
                self.num_launches += 1
                if self.num_launches == 1:
                    assert isinstance(server, SimulatedServer)
                    server._speed = 0.5
            return server

    engine = Lucky(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.2}))
    setup = make_setup(tmp_path, engine=engine, space=make_space(TINY))
    store = connect(setup)

    outcome = run_search(setup, store)

    values = {t.user_attrs["label"]: t.value for t in optuna_trials(setup)}
    assert max(values, key=lambda label: values[label] or 0) == "K=3"
    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=5"
    lucky = next(f for f in outcome.decision.finalists if f.label == "K=3")
    fresh = [
        throughput(m)
        for x in launches_of(store, setup)
        if x.phase is Phase.CONFIRM and x.config.num_speculative_tokens == 3
        for m in x.measurements
    ]
    assert len(fresh) == lucky.num_launches >= 2
    assert lucky.objective.estimate == pytest.approx(sum(fresh) / len(fresh))
    assert lucky.objective.estimate < 0.7 * (values["K=3"] or 0)


def test_several_drafters_are_searched_like_any_knob(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path, drafters=["one", "two"])
    store = connect(setup)

    run_search(setup, store)

    tried = [
        (x.config.num_speculative_tokens, x.config.drafter)
        for x in launches_of(store, setup)
        if x.phase is Phase.SEARCH
    ]
    assert sorted(tried, key=str) == [
        (0, None), (3, "one"), (3, "two"), (5, "one"), (5, "two"),
    ]  # fmt: skip
    assert_whole(setup, store)


def test_without_a_drafter_there_is_one_config(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path, drafters=[])
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=0"
    assert depths(launches_of(store, setup), Phase.CONFIRM) == [0, 0]


# --- limits ---

# At concurrency 16 a step without speculation takes 10 ms and 1 ms for each of the requests in it.
# With at most n of them: n / (10 + n) tokens/ms, TPOT 10 + n ms:
#   n           1    2    4    8   16 (the default)
#   TPOT, ms   11   12   14   18   26
SEQS = {"num_speculative_tokens": [0], "max_num_seqs": [1, 2, 4, 8]}


def seqs_setup(folder: Path, limit_ms: float, noise: float = 0.2, **kwargs: Any) -> SearchSetup:
    profile = make_profile(
        folder,
        load={"kind": "concurrency", "concurrency": 16},
        measure={"min_requests": 64, "warmup": 1, "max_duration_s": 1e5,
                 "request_timeout_s": 1e5},
        classes=with_limits({"tpot_p95_ms": limit_ms}),
    )  # fmt: skip
    engine = simulated(noise=noise)
    return make_setup(
        folder, profile=profile, engine=engine, space=make_space(SEQS), drafters=[],
        **{"num_repeats": 2, **kwargs},
    )  # fmt: skip


def test_the_best_feasible_config_is_recommended(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """More requests at once give more throughput and a longer TPOT: 16 ms leave 4 of them."""
    setup = seqs_setup(tmp_path, limit_ms=16)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=0 seqs=4"
    # What breaks the limit is no finalist, but the point of comparison stays one.
    feasible = {f.label: f.is_feasible for f in outcome.decision.finalists}
    assert feasible == {"K=0": False, "K=0 seqs=4": True, "K=0 seqs=2": True}
    best_of_all = max(optuna_trials(setup), key=lambda t: t.value or 0)
    assert best_of_all.user_attrs["label"] == "K=0"


def test_optuna_and_its_dashboard_know_what_breaks_a_limit(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = seqs_setup(tmp_path, limit_ms=16, noise=0.0)
    run_search(setup, connect(setup))

    for trial in optuna_trials(setup):
        n = int(trial.user_attrs["label"].rpartition("=")[2]) or 16
        by_name = {
            key.removeprefix("constraints:"): value
            for key, value in trial.system_attrs.items()
            if key.startswith("constraints:")
        }
        assert by_name["launch"] < 0  # it came up
        assert by_name["default.tpot_p95_ms"] == pytest.approx((10 + n - 16) / 16, abs=0.02)
        assert set(trial.constraints) == {"launch", "whole_run", "default.tpot_p95_ms"}
        assert (by_name["default.tpot_p95_ms"] > 0) is (n > 6)
        # One or two at a time keep the limit, but are so much slower than 4 that they may be cut off.
        assert by_name["whole_run"] < 0 or n != 4
    # optuna-dashboard reads this list, and draws a trial as infeasible where one is above 0.
    shown = optuna_storage(setup.settings.storage, DashboardStorage).get_all_trials(1)
    is_infeasible = {
        t.user_attrs["label"]: any(value > 0 for value in t.system_attrs["constraints"])
        for t in shown
    }
    is_cut_off = {
        t.user_attrs["label"]: "stopped_early" in t.user_attrs for t in optuna_trials(setup)
    }
    for label, is_bad in is_infeasible.items():
        assert is_bad is (label in {"K=0", "K=0 seqs=8"} or is_cut_off[label])
    assert not is_infeasible["K=0 seqs=4"]


def test_without_any_feasible_trial_the_nearest_miss_is_told(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = seqs_setup(tmp_path, limit_ms=10, noise=0.0)

    with pytest.raises(NothingFeasibleError) as caught:
        run_search(setup, connect(setup))

    text = str(caught.value)
    assert "study 'study': none of 5 launches is feasible" in text
    # One at a time takes 11 ms.
    assert "Nearest miss: K=0 seqs=1, default.tpot_p95_ms is 10.0% above its limit" in text
    assert "Raise the limit, lower the load, or widen the search space" in text


def test_a_study_without_any_feasible_trial_can_be_looked_at(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = seqs_setup(tmp_path, limit_ms=10, noise=0.0)
    store = connect(setup)
    for _ in range(2):  # the second time everything is known already
        with pytest.raises(NothingFeasibleError):
            run_search(setup, store)

    view = load_study(store, "study")

    assert view.decision is None
    assert len(view.launches) == 5
    # One that was measured whole breaks the limit; the others were given up, with the reason, before.
    assert {row.is_feasible for row in view.rows} <= {False, None}
    assert any(row.is_feasible is False for row in view.rows)
    for row in view.rows:
        if row.is_feasible is None:
            assert row.failure is not None
            assert row.failure.startswith("given up: ")


# --- failures ---


@pytest.mark.parametrize(
    ("kind", "num_launches"),
    [
        ("insufficient_memory", 1),
        ("launch_error", 1),
        ("died_under_load", 1),
        ("launch_timeout", 2),
        ("unstable", 2),
    ],
)
def test_a_failure_is_kept_and_the_search_goes_on(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], kind: str, num_launches: int
) -> None:
    """Only a failure that the config is not to blame for is worth a second launch."""
    setup = make_setup(
        tmp_path, engine=simulated(k4=kind), space=make_space({"num_speculative_tokens": [0, 3, 4, 5]}),
        sampler="tpe", num_repeats=2,
    )  # fmt: skip
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=5"
    failed = [x for x in launches_of(store, setup) if x.state is LaunchState.FAILED]
    assert [x.config.num_speculative_tokens for x in failed] == [4] * num_launches
    assert {x.failure for x in failed} == {TrialFailure(FailureKind(kind), "injected fault")}
    assert len({x.trial_number for x in failed}) == 1
    (trial,) = [t for t in optuna_trials(setup) if t.user_attrs["label"] == "K=4"]
    assert trial.state is TrialState.COMPLETE  # samplers do not learn from what failed
    assert trial.system_attrs["constraints:launch"] > 0
    # Its value is no better than that of any trial that was known by then.
    known = [t.value or 0 for t in optuna_trials(setup) if t.number < trial.number]
    assert trial.value == min(known)


def test_a_second_launch_that_succeeds_counts(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    class Flaky(SimulatedEngine):
        has_failed = False

        def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
            if config.num_speculative_tokens == 3 and not self.has_failed:
                self.has_failed = True
                raise TrialFailed(TrialFailure(FailureKind.UNSTABLE, "a neighbour was loud"))
            return super().launch(config, context)

    engine = Flaky(EngineSettings(options={"world": PEAK_AT_5}))
    setup = tiny_setup(tmp_path, engine=engine)
    store = connect(setup)

    run_search(setup, store)

    of_3 = [
        x for x in launches_of(store, setup)
        if x.phase is Phase.SEARCH and x.config.num_speculative_tokens == 3
    ]  # fmt: skip
    assert [x.state for x in of_3] == [LaunchState.FAILED, LaunchState.MEASURED]
    assert of_3[0].trial_number == of_3[1].trial_number
    (trial,) = [t for t in optuna_trials(setup) if t.user_attrs["label"] == "K=3"]
    assert trial.value == pytest.approx(throughput(of_3[1].measurements[0]))
    assert trial.system_attrs["constraints:launch"] < 0


def test_a_study_whose_baseline_fails_still_decides(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path, engine=simulated(k0="launch_error"))

    outcome = run_search(setup, connect(setup))

    assert outcome.decision is not None
    best = max(
        outcome.decision.finalists, key=lambda f: f.objective.estimate if f.objective else 0
    )
    assert best.label == "K=5"  # four requests a launch do not tell it from simpler ones, though
    assert outcome.decision.of(outcome.decision.winner).is_tied_with_best
    assert outcome.decision.gain_over_baseline is None


def test_when_everything_fails_the_search_says_what_it_had_in_common(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    kinds = {f"k{k}": "insufficient_memory" for k in range(11)}
    setup = make_setup(tmp_path, engine=simulated(**kinds))
    store = connect(setup)

    with pytest.raises(NothingFeasibleError) as caught:
        run_search(setup, store)

    text = str(caught.value)
    assert "none of 11 launches is feasible" in text
    assert (
        "11 failed (insufficient_memory); the first: insufficient_memory: injected fault" in text
    )
    assert {x.state for x in launches_of(store, setup)} == {LaunchState.FAILED}
    assert len(optuna_trials(setup)) == 11


def test_what_fits_into_no_memory_is_refused_before_any_launch(tmp_path: Path) -> None:
    """10 GB of weights do not fit into 4 GB."""
    small = replace(PEAK_AT_5, hardware=replace(ROUND_HARDWARE, memory_bytes=4e9))
    with pytest.raises(InputError, match="leaves nothing to launch: memory: weights"):
        make_setup(tmp_path, engine=simulated(small))


# --- how much it does ---


@pytest.mark.parametrize(
    ("max_trials", "first"),
    [(1, [0]), (2, [0, TRAINED_DEPTH]), (5, [0, TRAINED_DEPTH, 3])],
)
def test_the_number_of_trials_is_kept(
    tmp_path: Path,
    connect: Callable[[SearchSetup], Store],
    max_trials: int,
    first: list[int],
) -> None:
    setup = make_setup(tmp_path, max_trials=max_trials, num_repeats=2)
    store = connect(setup)

    run_search(setup, store)

    tried = depths(launches_of(store, setup), Phase.SEARCH)
    assert tried[:3] == first
    assert len(tried) == max_trials
    assert_whole(setup, store)


def test_more_trials_can_be_asked_for_later(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    few = make_setup(tmp_path, max_trials=3, num_repeats=2)
    store = connect(few)
    run_search(few, store)
    earlier = {x.launch_id: x for x in launches_of(store, few)}

    more = make_setup(tmp_path, max_trials=11, num_repeats=2)
    outcome = run_search(more, store)

    assert outcome.decision is not None
    assert outcome.decision.winner_label == f"K={BEST_K}"
    launches = launches_of(store, more)
    assert {x.launch_id: x for x in launches[: len(earlier)]} == earlier
    assert sorted(depths(launches, Phase.SEARCH)) == list(range(11))


def test_a_budget_is_kept_with_room_for_the_confirmation(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """A launch takes 30 s and its traffic 1 to 5 s, so 600 s are about 18 launches.

    Of these (2 + 2) finalists x 3 = 12 are kept for the race, which may need fewer.
    """
    setup = make_setup(tmp_path, budget_s=600.0)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    launches = launches_of(store, setup)
    assert 4 <= len(depths(launches, Phase.SEARCH)) <= 7
    assert 8 <= len(depths(launches, Phase.CONFIRM)) <= 12  # four finalists, twice at least
    spent_s = max(x.ended_at_s or 0 for x in launches) - launches[0].started_at_s
    assert spent_s <= 600
    assert store.get_study("study").timings_s["total"] == pytest.approx(spent_s)


def test_a_budget_that_ends_early_can_be_raised(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """150 s are the three anchors and one launch of the confirmation."""
    setup = make_setup(tmp_path, budget_s=150.0)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.BUDGET
    assert outcome.decision is None
    assert store.get_study("study").timings_s["total"] <= 150
    earlier = {x.launch_id: x for x in launches_of(store, setup)}
    assert len(earlier) == 4

    raised = make_setup(tmp_path, budget_s=600.0)
    outcome = run_search(raised, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    launches = launches_of(store, raised)
    assert {x.launch_id: x for x in launches[:4]} == earlier
    assert store.get_study("study").timings_s["total"] <= 600  # both sessions together


def test_time_is_accounted_for(tmp_path: Path, connect: Callable[[SearchSetup], Store]) -> None:
    setup = make_setup(tmp_path, engine=simulated(k3="launch_error", k8="died_under_load"))
    store = connect(setup)

    run_search(setup, store)

    spent = store.get_study("study").timings_s
    # Virtual time passes in launches and traffic only.
    assert spent["total"] == pytest.approx(spent["launch"] + spent["traffic"])
    took_s = sum((x.ended_at_s or 0) - x.started_at_s for x in launches_of(store, setup))
    assert spent["total"] == pytest.approx(took_s)


# --- the confirmation ---


def test_finalists_are_first_launched_in_two_rounds_of_alternating_order(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = make_setup(tmp_path, num_repeats=4)
    store = connect(setup)

    run_search(setup, store)

    confirm = [x for x in launches_of(store, setup) if x.phase is Phase.CONFIRM]
    order = [x.config.num_speculative_tokens for x in confirm]
    first = order[:4]
    assert first[:2] == [0, TRAINED_DEPTH]  # the points of comparison
    assert len(set(first)) == 4
    assert BEST_K in first
    # Once forth and once back; from then on launches go where they decide something.
    assert order[:8] == [*first, *first[::-1]]
    assert [x.repeat for x in confirm][:8] == [0] * 4 + [1] * 4
    assert 8 <= len(order) <= 16
    assert {x.trial_number for x in confirm} == {None}


def test_a_steady_drift_of_the_machine_does_not_choose_the_winner(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Every launch is 1 % slower than the one before. Two configs that are equal stay equal."""

    class Drifting(SimulatedEngine):
        num_launches = 0

        def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
            server = super().launch(config, context)
            assert isinstance(server, SimulatedServer)
            self.num_launches += 1
            server._speed = 1.01**self.num_launches
            return server

    engine = Drifting(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.0}))
    setup = tiny_setup(tmp_path, engine=engine, num_repeats=2)
    outcome = run_search(setup, connect(setup))

    assert outcome.decision is not None
    # Three finalists: launches 4, 5, 6 and then 6, 5, 4 again in reverse: 7, 8, 9. Each has the mean
    # of 4 + 9 = 5 + 8 = 6 + 7, so the ratio is that of a still machine: without the drift K = 5
    # gains 5.3 x 11 / 18 over K = 0 (less a little for the first token), and with it just the same.
    still = tiny_setup(
        tmp_path, study="still", engine=simulated(noise=0.0), num_repeats=2
    )  # fmt: skip
    reference = run_search(still, connect(still)).decision
    assert reference is not None
    assert outcome.decision.gain_over_baseline is not None
    assert reference.gain_over_baseline is not None
    assert outcome.decision.gain_over_baseline.estimate == pytest.approx(
        reference.gain_over_baseline.estimate, rel=0.001
    )


# --- stopping and going on ---


class StopAt(SilentListener):
    """Asks to stop when something happens for the n-th time."""

    def __init__(self, event: str, number: int) -> None:
        self._left = {event: number}
        self.is_hit = False

    def _count(self, event: str) -> None:
        if event in self._left:
            self._left[event] -= 1
            self.is_hit |= self._left[event] == 0

    def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None:
        self._count("launch")

    def on_record(self, record: RequestRecord) -> None:
        self._count("record")

    def on_result(self, config: ServingConfig, phase: Phase, result: TrialResult) -> None:
        self._count("result")


STOPS = [
    # Between any two launches, and before the first one.
    *[("launch", number) for number in range(1, TINY_LAUNCHES + 1)],
    # When the last launch of the search, and the very last one, are done.
    *[("result", number) for number in (3, TINY_LAUNCHES)],
    # 4 requests a measurement: in the first trial, the second, and in both rounds.
    *[("record", number) for number in (1, 6, 15, 36)],
]


@pytest.mark.parametrize(("event", "number"), STOPS)
def test_a_search_that_was_stopped_goes_on(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], event: str, number: int
) -> None:
    setup = tiny_setup(tmp_path)
    store = connect(setup)
    stop = StopAt(event, number)

    outcome = run_search(setup, store, stop, lambda: stop.is_hit)

    if (event, number) == ("result", TINY_LAUNCHES):
        assert outcome.stop_reason is StopReason.COMPLETE  # there was nothing left to stop
    else:
        assert outcome.stop_reason is StopReason.INTERRUPTED
        assert outcome.decision is None
    launches = launches_of(store, setup)
    assert LaunchState.RUNNING not in {x.state for x in launches}
    earlier = {x.launch_id: x for x in launches if x.state in FINISHED}
    if event != "record":
        assert len(earlier) == (number if event == "result" else number - 1)

    again = tiny_setup(tmp_path)  # as a new process would
    outcome = run_search(again, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert_whole(again, store, earlier)
    assert outcome.decision is not None
    # One launch at most was cut off, and only one that had begun.
    assert len(launches_of(store, again)) <= TINY_LAUNCHES + 1


def test_a_search_can_be_stopped_again_and_again(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Each session is stopped in its second measurement: every one gets one launch further."""
    store = connect(tiny_setup(tmp_path))
    earlier: dict[int, LaunchRecord] = {}

    for _ in range(TINY_LAUNCHES - 1):
        setup = tiny_setup(tmp_path)
        stop = StopAt("record", 6)
        outcome = run_search(setup, store, stop, lambda stop=stop: stop.is_hit)  # type: ignore[misc]
        assert outcome.stop_reason is StopReason.INTERRUPTED
        finished = {x.launch_id: x for x in launches_of(store, setup) if x.state in FINISHED}
        assert len(finished) == len(earlier) + 1
        assert earlier.items() <= finished.items()
        earlier = finished

    setup = tiny_setup(tmp_path)
    run_search(setup, store)
    assert_whole(setup, store, earlier)


def test_a_finished_study_is_not_searched_again(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path)
    store = connect(setup)
    first = run_search(setup, store)
    launches = launches_of(store, setup)

    again = run_search(tiny_setup(tmp_path), store)

    assert again.stop_reason is StopReason.COMPLETE
    assert again.decision == first.decision
    assert launches_of(store, setup) == launches


def test_an_error_in_the_middle_leaves_a_study_that_goes_on(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    class Broken(SilentListener):
        def on_record(self, record: RequestRecord) -> None:
            raise ZeroDivisionError

    setup = tiny_setup(tmp_path)
    store = connect(setup)
    with pytest.raises(ZeroDivisionError):
        run_search(setup, store, Broken())
    assert [x.state for x in launches_of(store, setup)] == [LaunchState.ABANDONED]

    again = tiny_setup(tmp_path)
    run_search(again, store)
    assert_whole(again, store)


# --- kill -9 ---


class Slow(SilentListener):
    """Spends as much time in measurements as everything else takes, so that a kill hits them too."""

    def on_record(self, record: RequestRecord) -> None:
        time.sleep(0.01)


def start_search(
    folder: Path,
    listener: SearchListener | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> BaseProcess:
    """Search in a process of its own."""

    def search() -> None:
        prepare()
        setup = tiny_setup(folder)
        run_search(setup, Store(setup.settings.storage, create=True), listener)

    process = FORK.Process(target=search)
    process.start()
    return process


def finished_launches(setup: SearchSetup) -> dict[int, LaunchRecord]:
    """Read what is finished in a database that may not be there yet."""
    if not Path(setup.settings.storage).exists():
        return {}
    store = Store(setup.settings.storage, create=True)
    try:
        study = store.find_study(setup.study_name)
        launches = store.launches(study) if study is not None else []
        return {x.launch_id: x for x in launches if x.state in FINISHED}
    finally:
        store.close()


def test_a_search_survives_kill_9_at_random_moments(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    rng = random.Random(0)
    began = time.monotonic()
    folder = tmp_path / "whole"
    folder.mkdir()
    process = start_search(folder, Slow())
    process.join()
    assert process.exitcode == 0
    whole_s = time.monotonic() - began
    num_finished = []

    for number in range(10):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        process = start_search(folder, Slow())
        time.sleep(rng.uniform(0.05, 0.95) * whole_s)
        process.kill()
        process.join()
        setup = tiny_setup(folder)
        earlier = finished_launches(setup)
        num_finished.append(len(earlier))

        store = connect(setup)
        outcome = run_search(setup, store)

        assert outcome.decision is not None
        assert_whole(setup, store, earlier)
    assert max(num_finished) > 0  # they were not all killed before they did anything


def count_commits(limit: int | None = None) -> Callable[[], int]:
    """Count the transactions of this process; the process is killed instead of the n-th one."""
    count = 0

    def on_commit(connection: object) -> None:
        nonlocal count
        count += 1
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", on_commit)
    return lambda: count


def test_a_search_survives_kill_9_between_any_two_writes(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Random moments hit long phases. Here the kill goes through the transactions one by one.

    Every 17th is taken, which is another stage of a trial each time.
    """
    folder = tmp_path / "counted"
    folder.mkdir()
    receive, send = FORK.Pipe(duplex=False)

    def search_and_count() -> None:
        count = count_commits()
        setup = tiny_setup(folder)
        run_search(setup, Store(setup.settings.storage, create=True))
        send.send(count())

    counting = FORK.Process(target=search_and_count)
    counting.start()
    num_commits = receive.recv()
    counting.join()
    assert num_commits > 100

    for limit in range(3, num_commits, 17):
        folder = tmp_path / f"killed-{limit}"
        folder.mkdir()
        process = start_search(folder, prepare=partial(count_commits, limit))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        setup = tiny_setup(folder)
        earlier = finished_launches(setup)

        store = connect(setup)
        outcome = run_search(setup, store)

        assert outcome.decision is not None, f"killed instead of transaction {limit}"
        assert_whole(setup, store, earlier)
        store.close()


# --- what is refused ---


def test_a_changed_definition_is_refused_with_the_difference(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path)
    store = connect(setup)
    run_search(setup, store)
    launches = launches_of(store, setup)

    changed = make_setup(
        tmp_path,
        profile=make_profile(tmp_path, load={"kind": "concurrency", "concurrency": 4}),
        space=make_space(TINY),
    )
    with pytest.raises(StudyChangedError) as caught:
        run_search(changed, store)

    text = str(caught.value)
    assert "study 'study' exists and was defined otherwise" in text
    assert "traffic.load.concurrency: 1 -> 4" in text
    assert "--study" in text
    assert "--fresh" in text
    assert launches_of(store, setup) == launches


def test_fresh_starts_over(tmp_path: Path, connect: Callable[[SearchSetup], Store]) -> None:
    setup = tiny_setup(tmp_path)
    store = connect(setup)
    run_search(setup, store)

    fresh = make_setup(
        tmp_path,
        profile=make_profile(tmp_path, load={"kind": "concurrency", "concurrency": 2}),
        space=make_space({"num_speculative_tokens": [0, 5]}),
        num_repeats=2,
        is_fresh=True,
    )
    outcome = run_search(fresh, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert store.study_names() == ["study"]
    assert sorted(depths(launches_of(store, fresh), Phase.SEARCH)) == [0, 5]
    assert len(optuna_trials(fresh)) == 2


def test_fresh_begins_where_there_is_nothing(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    setup = tiny_setup(tmp_path, is_fresh=True)

    assert run_search(setup, connect(setup)).stop_reason is StopReason.COMPLETE


def test_fresh_that_was_cut_off_can_be_repeated(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again must get through, wherever the first one was killed."""
    setup = tiny_setup(tmp_path)
    store = connect(setup)
    run_search(setup, store)

    def killed(setup: SearchSetup) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_delete_optuna_study", killed)
        with pytest.raises(KeyboardInterrupt):
            run_search(tiny_setup(tmp_path, is_fresh=True), store)

    outcome = run_search(tiny_setup(tmp_path, is_fresh=True), store)
    assert outcome.stop_reason is StopReason.COMPLETE


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_study_of_another_program_is_left_alone(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], is_fresh: bool
) -> None:
    setup = tiny_setup(tmp_path, is_fresh=is_fresh)
    store = connect(setup)
    foreign = optuna.create_study(
        study_name="study", storage=f"sqlite:///{setup.settings.storage}"
    )
    foreign.tell(foreign.ask(), 1.0)

    with pytest.raises(StudyChangedError, match=r"not Autotune's.*--study.*--storage"):
        run_search(setup, store)

    assert len(optuna_trials(setup)) == 1
    assert store.study_names() == []


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_second_tuner_is_refused_while_the_first_one_runs(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], is_fresh: bool
) -> None:
    setup = tiny_setup(tmp_path, is_fresh=is_fresh)
    receive, send = FORK.Pipe()

    class Waiting(SilentListener):
        def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None:
            send.send("launching")
            send.recv()

    def search() -> None:
        mine = tiny_setup(tmp_path)
        run_search(mine, Store(mine.settings.storage, create=True), Waiting())

    process = FORK.Process(target=search)
    process.start()
    try:
        assert receive.poll(20)
        store = connect(setup)
        launches = launches_of(store, setup)

        with pytest.raises(StudyError, match=f"is being run by process {process.pid} on "):
            run_search(setup, store)

        assert store.study_names() == ["study"]
        assert launches_of(store, setup) == launches
        assert len(optuna_trials(setup)) == 1
    finally:
        process.kill()
        process.join()

    outcome = run_search(tiny_setup(tmp_path), store)  # the holder is dead now
    assert outcome.stop_reason is StopReason.COMPLETE


def test_studies_share_a_database(tmp_path: Path, connect: Callable[[SearchSetup], Store]) -> None:
    outcomes: dict[str, SearchOutcome] = {}
    for name in ("one", "two"):
        setup = tiny_setup(tmp_path, study=name)
        outcomes[name] = run_search(setup, connect(setup))

    store = connect(setup)
    assert store.study_names() == ["one", "two"]
    for name, outcome in outcomes.items():
        assert outcome.study.name == name
        assert len(store.launches(store.get_study(name))) == TINY_LAUNCHES
