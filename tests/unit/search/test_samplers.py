"""Samplers over the candidate list: every proposal is new and can be launched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from study_helpers import head, make_space

from autotune.errors import PrerequisiteError
from autotune.search.candidates import Candidate, Candidates, enumerate_candidates
from autotune.search.samplers import (
    DIGEST_ATTR,
    SAMPLER_NAMES,
    create_sampler,
    distributions,
    tried_digests,
)
from autotune.serving.capabilities import Capabilities

HAS_GP = importlib.util.find_spec("torch") is not None
NEEDS_GP = pytest.mark.skipif(not HAS_GP, reason="the GP sampler needs torch")
EVERY_SAMPLER: list[Any] = ["tpe", "random", "grid", pytest.param("gp", marks=NEEDS_GP)]

Judge = Callable[[Candidate], tuple[float, Mapping[str, float]]]
"""Gives a candidate's objective (to be maximised) and its constraints, above 0 where violated."""


@pytest.fixture(autouse=True)
def _quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def listed(
    parameters: Mapping[str, Any], concurrency: int | None = None, num_heads: int = 1
) -> Candidates:
    return enumerate_candidates(
        make_space(parameters),
        Capabilities(32, {}),
        "model",
        [head(f"head-{n}") for n in range(num_heads)],
        concurrency=concurrency,
    )


def rough() -> Candidates:
    """A small list full of holes: 2 drafters, trees that do not fit, budgets that starve.

    K = 0 takes 8 tokens, so all 3 budgets do. K = 2 (4 tokens x 8 requests = 32) and K = 3 (48)
    only have the default one. Widths: 1 and 2 for K = 2, 1 for K = 3. So there are
    3 + 2 drafters x (2 + 1) = 9.
    """
    return listed(
        {
            "num_speculative_tokens": [0, 2, 3],
            "tree_width": [1, 2],
            "max_num_batched_tokens": [16, 24],
        },
        concurrency=8,
        num_heads=2,
    )


def of(candidates: Candidates, params: Mapping[str, Any]) -> Candidate:
    """The candidate that a trial's parameters stand for, by plain comparison."""
    searched = {d.name for d in candidates.dimensions if len(d.values) > 1}
    found = [c for c in candidates.items if {n: c.params[n] for n in searched} == dict(params)]
    assert len(found) == 1, f"{params} is no candidate"
    return found[0]


def run(
    sampler_name: str,
    candidates: Candidates,
    num_trials: int,
    judge: Judge = lambda candidate: (float(candidate.config.num_speculative_tokens), {}),
    seed: int = 0,
) -> list[Candidate]:
    """Ask and tell as a search does, and return what was proposed, in order."""
    study = optuna.create_study(
        direction="maximize", sampler=create_sampler(sampler_name, candidates, seed)
    )
    proposed = []
    for _ in range(num_trials):
        trial = study.ask(distributions(candidates))
        candidate = of(candidates, trial.params)
        proposed.append(candidate)
        trial.set_user_attr(DIGEST_ATTR, candidate.config.digest)
        value, constraints = judge(candidate)
        for name, violation in constraints.items():
            trial.set_constraint(name, violation)
        study.tell(trial, value)
    return proposed


def labels(proposed: list[Candidate]) -> list[tuple[str | None, str]]:
    return [(c.config.drafter, c.config.label()) for c in proposed]


# --- the promises that every sampler keeps ---


def test_the_rough_list_is_what_its_docstring_says() -> None:
    assert len(rough().items) == 9


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_every_proposal_is_new_and_launchable_until_all_are_known(name: str) -> None:
    candidates = rough()

    proposed = run(name, candidates, len(candidates.items))  # `of` fails for what is no candidate

    assert {c.config.digest for c in proposed} == set(candidates.by_digest())


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_when_all_are_known_nothing_is_proposed_any_more(name: str) -> None:
    candidates = listed({"num_speculative_tokens": [0, 1, 2]})

    with pytest.raises(RuntimeError, match="every candidate was tried"):
        run(name, candidates, 4)


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_the_same_seed_gives_the_same_proposals(name: str) -> None:
    candidates = listed({"num_speculative_tokens": {"range": [0, 11]}})

    def judge(candidate: Candidate) -> tuple[float, Mapping[str, float]]:
        return -abs(candidate.config.num_speculative_tokens - 5.0), {}

    num_trials = 6 if name == "gp" else 12
    one = labels(run(name, candidates, num_trials, judge, seed=1))
    again = labels(run(name, candidates, num_trials, judge, seed=1))
    other = labels(run(name, candidates, num_trials, judge, seed=2))

    assert one == again
    assert one != other


@pytest.mark.parametrize("name", ["tpe", "random", "grid"])
def test_a_waiting_trial_of_another_session_is_not_proposed_again(name: str) -> None:
    candidates = listed({"num_speculative_tokens": [0, 1, 2]})
    study = optuna.create_study(sampler=create_sampler(name, candidates, 0))
    first = study.ask(distributions(candidates))
    taken = of(candidates, first.params)
    first.set_user_attr(DIGEST_ATTR, taken.config.digest)  # it runs, and is not told

    second = of(candidates, study.ask(distributions(candidates)).params)

    assert second is not taken
    assert tried_digests(study) == {taken.config.digest}


def test_a_trial_that_was_dropped_may_be_proposed_again() -> None:
    candidates = listed({"num_speculative_tokens": [0, 1]})
    study = optuna.create_study(sampler=create_sampler("grid", candidates, 0))
    first = study.ask(distributions(candidates))
    taken = of(candidates, first.params)
    first.set_user_attr(DIGEST_ATTR, taken.config.digest)
    study.tell(first, state=TrialState.FAIL)

    assert tried_digests(study) == set()
    assert of(candidates, study.ask(distributions(candidates)).params) is taken


# --- the grid ---


def test_the_grid_visits_each_candidate_once_in_shuffled_order() -> None:
    candidates = listed({"num_speculative_tokens": {"range": [0, 11]}})

    visited = [c.config.num_speculative_tokens for c in run("grid", candidates, 12)]

    assert sorted(visited) == list(range(12))
    assert visited != list(range(12))


def test_the_grid_does_not_care_what_comes_out() -> None:
    candidates = listed({"num_speculative_tokens": {"range": [0, 11]}})

    up = run("grid", candidates, 12)
    down = run("grid", candidates, 12, lambda c: (-c.config.num_speculative_tokens * 1.0, {}))

    assert labels(up) == labels(down)


# --- the models learn ---


def peak_at_20(candidate: Candidate) -> tuple[float, Mapping[str, float]]:
    return 100.0 - abs(candidate.config.num_speculative_tokens - 20), {}


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=NEEDS_GP)])
def test_a_model_goes_where_the_objective_is_good(name: str) -> None:
    candidates = listed({"num_speculative_tokens": {"range": [0, 32]}})
    seeds = range(1) if name == "gp" else range(20)  # the GP is far surer, and far slower

    gaps = []
    for seed in seeds:
        proposed = run(name, candidates, 14, peak_at_20, seed)
        # 33 candidates give 33 // 5 = 6 random trials first; the model counts from then on.
        gaps += [abs(c.config.num_speculative_tokens - 20) for c in proposed[7:]]

    # Random proposals lie (1 + ... + 20 + 1 + ... + 12) / 33 = 288 / 33 = 8.7 away on average.
    assert sum(gaps) / len(gaps) < 6.5


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=NEEDS_GP)])
def test_a_model_keeps_away_from_violated_constraints(name: str) -> None:
    """The objective rises with K, and every K above 12 breaks a limit."""
    candidates = listed({"num_speculative_tokens": {"range": [0, 32]}})
    seeds = range(1) if name == "gp" else range(5)

    def judge(candidate: Candidate) -> tuple[float, Mapping[str, float]]:
        k = candidate.config.num_speculative_tokens
        return float(k), {"launch": -1.0, "chat.ttft_p95_ms": (k - 12.5) / 12.5}

    def num_infeasible(of_judge: Judge) -> int:
        tried = [
            candidate
            for seed in seeds
            for candidate in run(name, candidates, 14, of_judge, seed)[7:]
        ]
        return sum(c.config.num_speculative_tokens > 12 for c in tried)

    num_later = 7 * len(seeds)
    with_limit = num_infeasible(judge)
    without = num_infeasible(lambda candidate: (judge(candidate)[0], {}))
    assert without > num_later * 0.8  # told nothing of the limit, it goes for the largest K
    assert with_limit < num_later * 0.5  # 20 of 33 candidates break it, so chance is 61 %
    assert with_limit < without / 2


# --- what Optuna is told ---


def test_a_line_of_whole_numbers_is_a_line_to_the_sampler() -> None:
    candidates = listed(
        {"num_speculative_tokens": {"range": [0, 4]}, "max_num_seqs": [8, 16], "flag": [True]}
    )

    assert distributions(candidates) == {
        "num_speculative_tokens": IntDistribution(0, 4),
        "max_num_seqs": CategoricalDistribution((None, 8, 16)),
    }


@pytest.mark.parametrize("depths", [[0, 2, 4], [0, 1, 3], [4, 0, 2]])
def test_numbers_with_gaps_are_choices(depths: list[int]) -> None:
    found = distributions(listed({"num_speculative_tokens": depths}))

    # No speculation always comes first.
    values = (0, *(k for k in depths if k))
    assert found == {"num_speculative_tokens": CategoricalDistribution(values)}


def test_yes_and_no_are_choices() -> None:
    found = distributions(listed({"num_speculative_tokens": [0], "flag": [False, True]}))

    assert found == {"flag": CategoricalDistribution((False, True))}


def test_the_gp_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed

    with pytest.raises(PrerequisiteError, match=r'pip install "autotune\[gp\]".*--sampler tpe'):
        create_sampler("gp", rough(), 0)


def test_every_sampler_that_is_named_is_tested_here() -> None:
    tested = {str(p if isinstance(p, str) else p.values[0]) for p in EVERY_SAMPLER}

    # The default has its own tests: test_auto.py.
    assert {"auto", *tested} == set(SAMPLER_NAMES)
