"""Acceptance across K, against published tables, and the checks of counters."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.measure.records import ServerCounters
from autotune.search.costmodel.acceptance import (
    Acceptance,
    AcceptanceProblem,
    acceptance_findings,
)
from autotune.search.surrogate import Observation
from autotune.serving.config import ServingConfig

DRAFTS = 100_000.0
# vLLM PR #32628, EAGLE-3 on HumanEval: prefix survivals at K = 8 in per cent, and by how much their
# sums miss the acceptance length that each smaller K had.
AT_8 = (0.71, 0.49, 0.32, 0.21, 0.14, 0.09, 0.05, 0.03)
MISSED = {3: -0.034, 4: -0.028, 5: -0.020, 6: -0.013, 7: -0.013}
PUBLISHED = {k: (1 + sum(AT_8[:k])) / (1 + missed) for k, missed in MISSED.items()}


def config(k: int, **knobs: Any) -> ServingConfig:
    return ServingConfig("model", "head" if k else None, k, parallel_drafting=k > 0, **knobs)


def seen(survivals: tuple[float, ...], **knobs: Any) -> Observation:
    counted = ServerCounters(
        num_drafts=DRAFTS,
        num_accepted_tokens=DRAFTS * sum(survivals),
        num_accepted_tokens_per_pos=tuple(DRAFTS * s for s in survivals),
        has_speculation=True,
    )
    return Observation(config(len(survivals), **knobs), 1, True, counters=counted)


def test_a_launch_with_k_8_predicts_every_smaller_k_as_published() -> None:
    acceptance = Acceptance()
    acceptance.fit([seen(AT_8)])
    for k, length in PUBLISHED.items():
        assert acceptance.tokens(config(k)).mean == pytest.approx(length, rel=0.036)
    assert acceptance.tokens(config(3)).mean < PUBLISHED[3], "K = 8 alone says too little"


def test_with_a_launch_of_k_3_beside_it_every_k_is_within_one_per_cent() -> None:
    # The table gives the length at K = 3 alone: its survivals are those at K = 8, raised alike.
    raised = (PUBLISHED[3] - 1) / sum(AT_8[:3])
    acceptance = Acceptance()
    acceptance.fit([seen(AT_8), seen(tuple(s * raised for s in AT_8[:3]))])
    for k, length in PUBLISHED.items():
        assert acceptance.tokens(config(k)).mean == pytest.approx(length, rel=0.0105)


def test_a_precision_that_was_never_measured_borrows_the_other_one_and_is_less_sure() -> None:
    acceptance = Acceptance()
    acceptance.fit([seen(AT_8)])
    plain, fp8 = acceptance.tokens(config(8)), acceptance.tokens(config(8, weights="fp8"))
    assert fp8.mean == pytest.approx(plain.mean, rel=1e-6)
    assert fp8.sd_ratio > 3 * plain.sd_ratio


def test_deeper_than_measured_continues_geometrically_and_ever_less_surely() -> None:
    chain = tuple(0.6 * 0.7**i for i in range(4))
    acceptance = Acceptance()
    acceptance.fit([seen(chain)])
    deep = acceptance.survivals(config(8))
    # 0.6 x 0.7^i goes on, but for the prior's decline of 1.5 % a position.
    assert deep[7] == pytest.approx(0.6 * 0.7**7, rel=0.2)
    errors = [acceptance.tokens(config(k)).sd_ratio for k in (4, 6, 8)]
    assert errors == sorted(errors)


def test_past_the_trained_depth_the_prior_falls_off_a_cliff() -> None:
    survivals = Acceptance(trained_depth=4).survivals(config(6))
    # 0.4 for each position past the depth, 0.72 or so before it.
    assert survivals[4] / survivals[3] == pytest.approx(0.4, rel=0.01)
    assert survivals[3] / survivals[2] == pytest.approx(0.72, rel=0.05)


def test_width_helps_the_first_level_alone_and_costs_depth() -> None:
    acceptance = Acceptance()
    acceptance.fit([seen((0.5, 0.3, 0.2, 0.1))])
    tree = acceptance.survivals(config(4, tree_width=2))
    chain = acceptance.survivals(config(2))
    # 1 - (1 - 0.5)^2 = 0.75, and 0.3 / 0.5 of it at the second level.
    assert len(tree) == 2
    assert tree[0] == pytest.approx(1 - (1 - chain[0]) ** 2, rel=1e-6)
    assert tree[1] / tree[0] == pytest.approx(0.6, rel=0.02)


@pytest.mark.parametrize(
    ("counters", "problem"),
    [
        (ServerCounters(), AcceptanceProblem.NO_COUNTERS),
        (
            ServerCounters(
                num_drafts=100, num_accepted_tokens_per_pos=(0, 0), has_speculation=True
            ),
            AcceptanceProblem.NOTHING_ACCEPTED,
        ),
        (
            ServerCounters(
                num_drafts=100, num_accepted_tokens_per_pos=(20, 30), has_speculation=True
            ),
            AcceptanceProblem.NOT_MONOTONE,
        ),
    ],
)
def test_counters_that_cannot_be_right_are_found(
    counters: ServerCounters, problem: AcceptanceProblem
) -> None:
    found = acceptance_findings([Observation(config(2), 1, True, counters=counters)])
    assert [f.problem for f in found] == [problem]


def test_sound_counters_and_no_speculation_are_no_finding() -> None:
    assert acceptance_findings([seen(AT_8), Observation(config(0), 1, True)]) == ()
