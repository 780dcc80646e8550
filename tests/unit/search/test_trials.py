"""Optuna's side of the search: what is told, what counts as history, whose trials are left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import TrialState
from study_helpers import at_tps, config, launch, make_setup, make_space, measurement

from autotune.search.auto import PROPOSED_BY_ATTR
from autotune.search.decision import Goal
from autotune.search.samplers import DIGEST_ATTR, create_sampler
from autotune.search.setup import SearchSetup
from autotune.search.trials import LEASE_ATTR, Trials
from autotune.search.worth import Tried
from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.store.holders import this_process

LIMITS = {"default": {"tpot_p95_ms": 20.0}}
FAILURE = TrialFailure(FailureKind.LAUNCH_ERROR, "no")


@pytest.fixture
def setup(tmp_path: Path) -> SearchSetup:
    return make_setup(tmp_path, space=make_space({"num_speculative_tokens": [0, 3, 5, 8]}))


def trials_of(setup: SearchSetup, goal: Goal | None = None) -> tuple[Trials, optuna.Study]:
    chosen = goal or setup.goal
    study = optuna.create_study(
        direction="maximize" if chosen.is_maximized else "minimize",
        sampler=create_sampler("grid", setup.candidates, 0),
    )
    return Trials(study, setup.candidates, chosen), study


def label(of: ServingConfig) -> str:
    return f"K={of.num_speculative_tokens}"


@pytest.fixture
def another_process() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lease_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {
        **this_process(),
        "pid": process.pid,
        "started_at_s": psutil.Process(process.pid).create_time(),
    }


# --- asking ---


def test_what_was_enqueued_is_asked_for_next(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trials.enqueue(setup.candidates.items[2])
    _, chosen = trials.ask(label)
    assert chosen == setup.candidates.items[2].config
    assert trials.tried() == {chosen.digest}
    (kept,) = study.trials
    assert kept.user_attrs["label"] == "K=5"
    assert kept.user_attrs[DIGEST_ATTR] == chosen.digest
    assert kept.user_attrs[LEASE_ATTR] == this_process()


def test_a_candidate_is_not_enqueued_on_top_of_a_waiting_one(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trials.enqueue(setup.candidates.items[2])
    trials.enqueue(setup.candidates.items[2])
    assert [t.state for t in study.trials] == [TrialState.WAITING]


# --- telling ---


def test_a_whole_measurement_is_told_with_all_constraints(setup: SearchSetup) -> None:
    """10 tokens in 0.2 s: 20 ms each, of 20 allowed."""
    trials, study = trials_of(setup, replace(setup.goal, limits=LIMITS))
    trial, _ = trials.ask(label)
    trials.tell(trial, (at_tps(50),), None)
    (kept,) = study.trials
    assert kept.state is TrialState.COMPLETE
    assert kept.value == pytest.approx(50)
    assert kept.constraints["launch"] == kept.constraints["whole_run"] == -1
    assert kept.constraints["default.tpot_p95_ms"] == pytest.approx(0, abs=1e-9)


def test_every_trial_has_the_same_constraints(setup: SearchSetup) -> None:
    trials, study = trials_of(setup, replace(setup.goal, limits=LIMITS))
    cut = replace(at_tps(40), stopped_early="too slow")
    for measured, failure in [((at_tps(50),), None), ((cut,), None), ((), FAILURE)]:
        trial, _ = trials.ask(label)
        trials.tell(trial, measured, failure)
    names = [set(t.constraints) for t in study.trials]
    assert names == [{"launch", "whole_run", "default.tpot_p95_ms"}] * 3


def test_a_run_that_was_cut_off_is_a_complete_trial_that_broke_something(
    setup: SearchSetup,
) -> None:
    trials, study = trials_of(setup)
    trial, _ = trials.ask(label)
    trials.tell(trial, (replace(at_tps(100), stopped_early="requests take longer"),), None)
    (kept,) = study.trials
    assert kept.state is TrialState.COMPLETE
    assert kept.constraints["launch"] < 0 < kept.constraints["whole_run"]
    assert kept.user_attrs["stopped_early"] == "requests take longer"
    assert trials.history() == [Tried(None, None)]


@pytest.mark.parametrize(("is_maximized", "worst"), [(True, 50.0), (False, 100.0)])
def test_a_failure_has_the_worst_value_known(
    setup: SearchSetup, is_maximized: bool, worst: float
) -> None:
    trials, study = trials_of(setup, replace(setup.goal, is_maximized=is_maximized))
    for tps in (50, 100):
        trial, _ = trials.ask(label)
        trials.tell(trial, (at_tps(tps),), None)
    trial, _ = trials.ask(label)
    trials.tell(trial, (), FAILURE)
    kept = study.trials[-1]
    assert kept.state is TrialState.COMPLETE
    assert kept.value == pytest.approx(worst)
    assert kept.constraints["launch"] > 0
    assert "no" in kept.user_attrs["failure"]


def test_an_objective_that_is_not_a_number_becomes_the_worst_known(setup: SearchSetup) -> None:
    """No request was answered, so there is no mean latency."""
    goal = Goal("e2el_mean_ms", is_maximized=False, limits={}, margin_ratio=0.02)
    trials, study = trials_of(setup, goal)
    for kept in (measurement([1.0] * 4), measurement([1.0] * 4, num_failed=4)):
        trial, _ = trials.ask(label)
        trials.tell(trial, (kept,), None)
    assert [t.value for t in study.trials] == pytest.approx([1000.0, 1000.0])


# --- history ---


def test_history_has_values_only_of_what_keeps_every_limit(setup: SearchSetup) -> None:
    trials, study = trials_of(setup, replace(setup.goal, limits=LIMITS))
    # 10 ms and 100 ms a token, of 20 allowed; a failure; and one that still runs.
    for measured, failure in [((at_tps(100),), None), ((at_tps(10),), None), ((), FAILURE)]:
        trial, _ = trials.ask(label)
        trials.tell(trial, measured, failure)
    trials.ask(label)
    assert [(t.value, t.proposed_by) for t in trials.history()] == [
        (pytest.approx(100), None),
        (None, None),
        (None, None),
    ]


def test_history_says_who_proposed(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trial, _ = trials.ask(label)
    trial.set_user_attr(PROPOSED_BY_ATTR, "physics-free")
    trials.tell(trial, (at_tps(100),), None)
    assert [t.proposed_by for t in trials.history()] == ["physics-free"]


# --- going on after a cut ---


def test_a_trial_of_a_living_process_is_left_alone(
    setup: SearchSetup, another_process: Callable[[], subprocess.Popen[bytes]]
) -> None:
    trials, study = trials_of(setup)
    trial, chosen = trials.ask(label)
    trial.set_user_attr(LEASE_ATTR, lease_of(another_process()))

    trials.recover({})

    assert [t.state for t in study.trials] == [TrialState.RUNNING]
    assert trials.tried() == {chosen.digest}


def test_a_trial_of_a_dead_process_is_dropped_and_its_config_free_again(
    setup: SearchSetup, another_process: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = another_process()
    trials, study = trials_of(setup)
    trial, _ = trials.ask(label)
    trial.set_user_attr(LEASE_ATTR, lease_of(process))
    process.kill()
    process.wait()

    trials.recover({})

    assert [t.state for t in study.trials] == [TrialState.FAIL]
    assert trials.tried() == set()
    assert trials.history() == []


def test_a_process_that_got_the_number_of_a_dead_one_does_not_hold_its_trial(
    setup: SearchSetup, another_process: Callable[[], subprocess.Popen[bytes]]
) -> None:
    trials, study = trials_of(setup)
    trial, _ = trials.ask(label)
    lease = lease_of(another_process())
    trial.set_user_attr(LEASE_ATTR, {**lease, "started_at_s": lease["started_at_s"] - 100})
    trials.recover({})
    assert [t.state for t in study.trials] == [TrialState.FAIL]


def test_a_trial_on_another_host_is_left_alone(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trial, _ = trials.ask(label)
    trial.set_user_attr(LEASE_ATTR, {**this_process(), "host": "elsewhere.example"})
    trials.recover({})
    assert [t.state for t in study.trials] == [TrialState.RUNNING]


def test_ones_own_trial_of_an_earlier_session_is_taken_up(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trials.ask(label)
    trials.recover({})
    assert [t.state for t in study.trials] == [TrialState.FAIL]


def test_a_trial_without_a_lease_is_of_an_older_version_and_taken_up(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    study.ask()
    trials.recover({})
    assert [t.state for t in study.trials] == [TrialState.FAIL]


@pytest.mark.parametrize("is_failure", [False, True])
def test_a_launch_that_ended_is_told_now(setup: SearchSetup, is_failure: bool) -> None:
    """Cut off between the launch's own record and Optuna's."""
    trials, study = trials_of(setup)
    trial, chosen = trials.ask(label)
    ended = launch(7, chosen, FAILURE if is_failure else at_tps(80), trial_number=trial.number)

    trials.recover({trial.number: ended})

    (kept,) = study.trials
    assert kept.state is TrialState.COMPLETE
    assert (kept.constraints["launch"] > 0) is is_failure
    if not is_failure:
        assert kept.value == pytest.approx(80)


def test_constraints_set_before_the_cut_stay(setup: SearchSetup) -> None:
    trials, study = trials_of(setup)
    trial, chosen = trials.ask(label)
    trial.set_constraint("launch", -1.0)
    trials.recover({trial.number: launch(7, chosen, at_tps(80), trial_number=trial.number)})
    (kept,) = study.trials
    assert kept.constraints == {"launch": -1.0, "whole_run": -1.0}


def test_a_config_that_was_never_asked_for_was_not_tried(setup: SearchSetup) -> None:
    trials, _ = trials_of(setup)
    assert config(3).digest not in trials.tried()
    assert trials.tried() == set()
