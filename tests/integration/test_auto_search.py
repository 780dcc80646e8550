"""Whole studies with the default sampler on the simulated engine: what it saves, survives and refuses."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from study_helpers import (
    BEST_K,
    PEAK_AT_5,
    make_profile,
    make_setup,
    make_space,
    simulated,
    with_limits,
)

from autotune.errors import NothingFeasibleError
from autotune.search.auto import PROPOSED_BY_ATTR
from autotune.search.listener import SilentListener
from autotune.search.setup import SearchSetup
from autotune.search.study import StopReason, run_search
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext, Server
from autotune.serving.models import DrafterInfo
from autotune.serving.simulated import SimulatedEngine, SimulatedServer
from autotune.serving.sizes import ServingSizes
from autotune.store.records import LaunchRecord, LaunchState, Phase
from autotune.store.repository import Store

FORK = multiprocessing.get_context("fork")
FINISHED = {LaunchState.MEASURED, LaunchState.FAILED}
FEW = {"num_speculative_tokens": [0, 2, 3, 5, 8]}


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are not what is tested here, and resampling would be most of the run time."""
    monkeypatch.setattr("autotune.measure.stats.NUM_RESAMPLES", 60)


@pytest.fixture
def connect() -> Iterator[Callable[[SearchSetup], Store]]:
    with contextlib.ExitStack() as stack:

        def open_store(setup: SearchSetup) -> Store:
            store = Store(setup.settings.storage, create=True)
            stack.callback(store.close)
            return store

        yield open_store


class Unsized(SimulatedEngine):
    """An engine that cannot say how large anything is, like one of another package."""

    def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes | None:
        return None


def auto_setup(folder: Path, **changes: Any) -> SearchSetup:
    profile = make_profile(folder, measure={"min_requests": 24, "warmup": 1})
    return make_setup(
        folder, **{"sampler": "auto", "profile": profile, "num_repeats": 2, **changes}
    )


def launches_of(store: Store, setup: SearchSetup) -> list[LaunchRecord]:
    return store.launches(store.get_study(setup.study_name))


def depths(launches: Sequence[LaunchRecord], phase: Phase) -> list[int]:
    return [
        x.config.num_speculative_tokens
        for x in launches
        if x.phase is phase and x.state in FINISHED
    ]


def trials_of(setup: SearchSetup) -> list[optuna.trial.FrozenTrial]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(
        study_name=setup.study_name, storage=f"sqlite:///{setup.settings.storage}"
    )
    return study.get_trials()


# --- what it finds ---


def test_it_finds_the_best_k_with_fewer_launches_than_there_are_configs(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """The world of `study_helpers`: 294 tokens/s at K = 5, then 280 at 6 and 266 at 7; margin 2 %."""
    setup = auto_setup(tmp_path)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    assert outcome.decision.winner_label == f"K={BEST_K}"
    searched = depths(launches_of(store, setup), Phase.SEARCH)
    # Anchors: no speculation, the default (the trained depth, within reach of the deepest), and K near 3.
    assert searched[:3] == [0, 8, 3]
    assert len(searched) < len(setup.candidates.items) == 11
    proposed = [t.user_attrs.get(PROPOSED_BY_ATTR) for t in trials_of(setup)]
    assert proposed[:3] == [None] * 3
    assert None not in proposed[3:]
    assert "physics-free" in proposed[3:]


@pytest.mark.parametrize(("has_torch", "sampler"), [(True, "gp"), (False, "tpe")])
def test_without_sizes_it_falls_back_to_optunas_samplers(
    tmp_path: Path,
    connect: Callable[[SearchSetup], Store],
    monkeypatch: pytest.MonkeyPatch,
    has_torch: bool,
    sampler: str,
) -> None:
    monkeypatch.setattr(
        "autotune.search.samplers.find_spec", lambda name: object() if has_torch else None
    )
    engine = Unsized(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.2}))
    setup = auto_setup(tmp_path, engine=engine)
    assert setup.sizes is None
    assert setup.sampler == setup.environment["sampler"] == sampler
    if has_torch:
        pytest.importorskip("torch")

    outcome = run_search(setup, connect(setup))

    assert outcome.decision is not None
    assert outcome.decision.winner_label == f"K={BEST_K}"
    assert {t.user_attrs.get(PROPOSED_BY_ATTR) for t in trials_of(setup)} == {None}


def test_the_listener_is_told_what_would_be_recommended(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    class Told(SilentListener):
        def __init__(self) -> None:
            self.all: list[ServingConfig | None] = []

        def on_recommendation(self, config: ServingConfig | None) -> None:
            self.all.append(config)

    setup = auto_setup(tmp_path, space=make_space(FEW))
    store, told = connect(setup), Told()
    outcome = run_search(setup, store, told)
    assert outcome.decision is not None
    # Once for every launch of search and race, and in the end it is the decision.
    assert len(told.all) == len(launches_of(store, setup))
    assert told.all[0] is not None
    assert told.all[0].num_speculative_tokens == 0
    assert told.all[-1] is not None
    assert told.all[-1].digest == outcome.decision.winner


# --- limits ---

# Without speculation at concurrency 16: n at a time take 10 + n ms a token (see test_study.py).
SEQS = {"num_speculative_tokens": [0], "max_num_seqs": [1, 2, 4, 8]}


def seqs_setup(folder: Path, limit_ms: float, **changes: Any) -> SearchSetup:
    profile = make_profile(
        folder,
        load={"kind": "concurrency", "concurrency": 16},
        measure={"min_requests": 64, "warmup": 1, "max_duration_s": 1e5, "request_timeout_s": 1e5},
        classes=with_limits({"tpot_p95_ms": limit_ms}),
    )
    return auto_setup(
        folder, profile=profile, drafters=[],
        **{"engine": simulated(noise=0.0), "space": make_space(SEQS), **changes},
    )  # fmt: skip


def test_where_nothing_keeps_a_limit_it_says_how_near_it_came(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """One request at a time takes 11 ms; 10 are allowed."""
    setup = seqs_setup(tmp_path, limit_ms=10)
    store = connect(setup)
    with pytest.raises(NothingFeasibleError) as caught:
        run_search(setup, store)
    text = str(caught.value)
    assert "none of 5 launches is feasible" in text
    assert "Nearest miss: K=0 seqs=1, default.tpot_p95_ms is 10.0% above its limit" in text
    assert depths(launches_of(store, setup), Phase.CONFIRM) == []  # nobody to race


def test_a_trial_that_was_cut_off_is_kept_with_its_reason_and_never_wins(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Two at a time take 12 ms, of 12.5 allowed. 4 and 8 break that before the end of a screen, and one
    at a time is slower by so much that it cannot win.
    """
    setup = seqs_setup(tmp_path, limit_ms=12.5)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=0 seqs=2"
    cut = [x for x in launches_of(store, setup)
           if x.measurements and x.measurements[0].stopped_early is not None]  # fmt: skip
    assert cut
    for launch in cut:
        assert launch.phase is Phase.SEARCH
        assert launch.state is LaunchState.MEASURED
        is_slow = launch.config.max_num_seqs == 1
        why = "longer than with the best" if is_slow else "default.tpot_p95_ms"
        assert why in (launch.measurements[0].stopped_early or "")
        assert len(launch.measurements[0].records) < len(setup.screen_schedule.requests)
    told = {t.user_attrs["config_digest"]: t for t in trials_of(setup)}
    for launch in cut:
        trial = told[launch.config.digest]
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert trial.user_attrs["stopped_early"] == launch.measurements[0].stopped_early
        assert trial.constraints["whole_run"] > 0
    finalists = {f.digest for f in outcome.decision.finalists}
    assert finalists.isdisjoint(x.config.digest for x in cut)


def test_when_finalists_break_a_limit_in_the_race_alone_the_search_goes_on(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Eight at a time keep 19 ms in the search (18), and take a third longer from the race on.

    Seven take 17 ms and are 7.5 % slower, which is too near to be cut off.
    """

    class Worse(SimulatedEngine):
        seen: Counter[int | None] = Counter()  # one engine in this test

        def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
            server = super().launch(config, context)
            assert isinstance(server, SimulatedServer)
            self.seen[config.max_num_seqs] += 1
            if config.max_num_seqs == 8 and self.seen[8] > 1:
                server._speed = 4 / 3
            return server

    engine = Worse(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.0}))
    space = make_space({"num_speculative_tokens": [0], "max_num_seqs": [6, 7, 8]})
    setup = seqs_setup(tmp_path, limit_ms=19, engine=engine, num_finalists=1, space=space)
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    assert outcome.decision.winner_label == "K=0 seqs=7"
    raced = {x.config.max_num_seqs for x in launches_of(store, setup) if x.phase is Phase.CONFIRM}
    assert {8, 7} <= raced


# --- refinement ---


@pytest.mark.parametrize(("duration_ratio", "is_won"), [(0.7, True), (1.0, False)])
def test_switching_off_by_batch_is_recommended_only_if_it_wins(
    tmp_path: Path, connect: Callable[[SearchSetup], Store], duration_ratio: float, is_won: bool
) -> None:
    """An engine on which every step is 30 % shorter with the switch at 8, and one where it is not."""

    class Switching(SimulatedEngine):
        def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
            server = super().launch(config, context)
            assert isinstance(server, SimulatedServer)
            if config.speculation_off_above == 8:
                server._speed = duration_ratio
            return server

    engine = Switching(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.0}))
    profile = make_profile(
        tmp_path,
        load={"kind": "rate", "rps": 0.5, "max_concurrency": 16},
        measure={"min_requests": 24, "warmup": 1, "max_duration_s": 1e5, "request_timeout_s": 1e5},
        objective={"minimize": "e2el_mean_ms"},
    )
    setup = auto_setup(
        tmp_path, engine=engine, profile=profile, is_refined_by_batch=True,
        space=make_space({"num_speculative_tokens": [0, 3, 5]}),
    )  # fmt: skip
    store = connect(setup)

    outcome = run_search(setup, store)

    assert outcome.stop_reason is StopReason.COMPLETE
    assert outcome.decision is not None
    launches = launches_of(store, setup)
    switched = [x for x in launches if x.config.speculation_off_above is not None]
    # A quarter and a half of 16, in the race alone: they are no candidates.
    assert {x.config.speculation_off_above for x in switched} == {4, 8}
    assert {x.phase for x in switched} == {Phase.CONFIRM}
    winner = next(x.config for x in launches if x.config.digest == outcome.decision.winner)
    assert winner.speculation_off_above == (8 if is_won else None)
    assert winner.num_speculative_tokens == 5


# --- kill -9 ---


def killed_instead_of(limit: int | None) -> Callable[[], int]:
    """Count the transactions of this process; it is killed instead of the n-th one."""
    count = 0

    def on_commit(connection: object) -> None:
        nonlocal count
        count += 1
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", on_commit)
    return lambda: count


def test_a_killed_search_goes_on_to_the_same_end(
    tmp_path: Path, connect: Callable[[SearchSetup], Store]
) -> None:
    """Proposals follow from what was measured alone, so a cut changes nothing but what it cut off.

    Every 150th transaction. What an engine without noise measures does not depend on which launch it is.
    """
    space = make_space(FEW)

    def setup_in(folder: Path) -> SearchSetup:
        folder.mkdir(exist_ok=True)
        return auto_setup(folder, space=space, engine=simulated(noise=0.0))

    receive, send = FORK.Pipe(duplex=False)

    def search(folder: Path, limit: int | None) -> None:
        count = killed_instead_of(limit)
        setup = setup_in(folder)
        run_search(setup, Store(setup.settings.storage, create=True))
        send.send(count())

    whole = FORK.Process(target=search, args=(tmp_path / "whole", None))
    whole.start()
    assert receive.poll(60)
    num_commits = receive.recv()
    whole.join()
    setup = setup_in(tmp_path / "whole")
    expected = launches_of(connect(setup), setup)
    order = [(x.config.digest, x.phase, x.repeat) for x in expected if x.state in FINISHED]

    for limit in range(40, num_commits, 150):
        folder = tmp_path / f"killed-{limit}"
        process = FORK.Process(target=search, args=(folder, limit))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        setup = setup_in(folder)
        store = connect(setup)

        outcome = run_search(setup, store)

        assert outcome.decision is not None
        done = [x for x in launches_of(store, setup) if x.state in FINISHED]
        assert [(x.config.digest, x.phase, x.repeat) for x in done] == order
