"""The default sampler as Optuna sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.samplers import BaseSampler
from study_helpers import make_setup, make_space

from autotune.search.auto import PROPOSED_BY_ATTR, AutoSampler
from autotune.search.candidates import Candidates
from autotune.search.costmodel.free import PhysicsFree
from autotune.search.decision import Goal
from autotune.search.proposer import Proposer
from autotune.search.samplers import DIGEST_ATTR, distributions
from autotune.search.surrogate import OBJECTIVE, Observation
from autotune.serving.failures import FailureKind

GOAL = Goal("output_throughput_tps", is_maximized=True, limits={}, margin_ratio=0.02)
EXPLAINED = {
    PROPOSED_BY_ATTR,
    "expected_gain_ratio",
    "feasible_probability",
    "predicted_objective",
    "predicted_s",
}


@pytest.fixture
def candidates(tmp_path: Path) -> Candidates:
    return make_setup(
        tmp_path, space=make_space({"num_speculative_tokens": {"range": [0, 8]}})
    ).candidates


def sampler_of(candidates: Candidates, seen: Sequence[Observation]) -> AutoSampler:
    model = PhysicsFree([c.config for c in candidates.items], GOAL)
    return AutoSampler(Proposer(candidates, GOAL, [model]), candidates, lambda: seen)


def ask(study: optuna.Study, candidates: Candidates) -> optuna.trial.Trial:
    trial = study.ask(distributions(candidates))
    chosen = candidates.items[trial.params["num_speculative_tokens"]]
    trial.set_user_attr(DIGEST_ATTR, chosen.config.digest)
    return trial


def measured(candidates: Candidates, k: int) -> Observation:
    """A throughput that rises with K."""
    return Observation(
        candidates.items[k].config,
        1,
        True,
        outputs={OBJECTIVE: math.log(100 + 10 * k)},
        errors={OBJECTIVE: 0.01},
        launch_s=30.0,
        duration_s=5.0,
    )


def test_it_is_a_sampler_of_optunas(candidates: Candidates) -> None:
    assert isinstance(sampler_of(candidates, []), BaseSampler)


def test_it_works_in_optunas_own_loop(candidates: Candidates) -> None:
    """`study.optimize` as any user of Optuna calls it."""
    seen: list[Observation] = []
    sampler = sampler_of(candidates, seen)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        k = trial.suggest_int("num_speculative_tokens", 0, 8)
        trial.set_user_attr(DIGEST_ATTR, candidates.items[k].config.digest)
        seen.append(measured(candidates, k))
        return 100.0 + 10 * k

    study.optimize(objective, n_trials=len(candidates.items))

    tried = [t.params["num_speculative_tokens"] for t in study.trials]
    assert sorted(tried) == list(range(9))  # every config once
    assert tried.index(8) < 6  # the best is not left to the end


def test_before_anything_was_measured_the_next_untried_is_taken(candidates: Candidates) -> None:
    study = optuna.create_study(direction="maximize", sampler=sampler_of(candidates, []))
    trials = [ask(study, candidates) for _ in range(3)]
    assert [t.params["num_speculative_tokens"] for t in trials] == [0, 1, 2]
    # Nobody proposed them, so they count as nobody's turn.
    assert all(PROPOSED_BY_ATTR not in t.user_attrs for t in study.trials)


def test_after_failures_alone_the_next_untried_is_taken(candidates: Candidates) -> None:
    crash = Observation(candidates.items[0].config, None, True, failure=FailureKind.LAUNCH_ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler_of(candidates, [crash]))
    study.tell(ask(study, candidates), 0.0)
    assert ask(study, candidates).params == {"num_speculative_tokens": 1}


def test_a_proposal_says_who_made_it_and_what_it_expects(candidates: Candidates) -> None:
    seen = [measured(candidates, k) for k in (0, 2, 4)]
    study = optuna.create_study(direction="maximize", sampler=sampler_of(candidates, seen))
    for observation in seen:
        study.enqueue_trial({"num_speculative_tokens": observation.config.num_speculative_tokens})
        trial = ask(study, candidates)
        study.tell(trial, 1.0)
        # Asked for by us, proposed by nobody.
        assert PROPOSED_BY_ATTR not in study.trials[-1].user_attrs

    ask(study, candidates)

    trial = study.trials[-1]  # as it is kept
    assert set(trial.user_attrs) == EXPLAINED | {DIGEST_ATTR}
    assert trial.user_attrs[PROPOSED_BY_ATTR] == "physics-free"
    assert trial.params["num_speculative_tokens"] not in {0, 2, 4}
    assert 0 < trial.user_attrs["feasible_probability"] <= 1
    # Launches took 30 s and traffic 5 s, which a prediction within a factor of two does not change much.
    assert 30 + 5 / 2 < trial.user_attrs["predicted_s"] < 30 + 5 * 2
    assert 50 < trial.user_attrs["predicted_objective"] < 400
    assert np.isfinite(trial.user_attrs["expected_gain_ratio"])


def test_equal_histories_give_equal_proposals(candidates: Candidates) -> None:
    proposals = []
    for _ in range(2):
        seen = [measured(candidates, k) for k in (0, 3, 8)]
        study = optuna.create_study(direction="maximize", sampler=sampler_of(candidates, seen))
        for observation in seen:
            study.enqueue_trial(
                {"num_speculative_tokens": observation.config.num_speculative_tokens}
            )
            study.tell(ask(study, candidates), 1.0)
        ask(study, candidates)
        trial = study.trials[-1]
        proposals.append((trial.params, trial.user_attrs))
    assert proposals[0] == proposals[1]


def test_asked_once_more_than_there_are_candidates_it_refuses(candidates: Candidates) -> None:
    study = optuna.create_study(direction="maximize", sampler=sampler_of(candidates, []))
    for _ in candidates.items:
        study.tell(ask(study, candidates), 1.0)
    with pytest.raises(RuntimeError, match="every candidate was tried"):
        study.ask(distributions(candidates))
