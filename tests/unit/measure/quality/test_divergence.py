"""KL bounds and agreement, against sums made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from autotune.measure.quality.divergence import compare_distributions, kl_lower_bound
from autotune.measure.quality.endpoint import ScoredToken


def scored(emitted: int, probabilities: Mapping[int, float], num_top: int) -> ScoredToken:
    """A position whose distribution is known, as a server shows it: its best tokens and one given."""
    best = sorted(probabilities.items(), key=lambda pair: -pair[1])[:num_top]
    return ScoredToken(
        emitted,
        math.log(probabilities[emitted]),
        tuple((token, math.log(p)) for token, p in best),
    )


P = {1: 0.7, 2: 0.2, 3: 0.1}
Q = {1: 0.6, 2: 0.3, 3: 0.1}


def test_kl_of_two_known_distributions() -> None:
    # 0.7 ln(0.7/0.6) + 0.2 ln(0.2/0.3) + 0.1 ln(0.1/0.1) = 0.107905 - 0.081093 + 0 = 0.026812
    kl, rest = kl_lower_bound(scored(1, P, 3), scored(1, Q, 3))
    assert kl == pytest.approx(0.026812, abs=1e-6)
    assert rest == pytest.approx(0, abs=1e-12)


def test_unknown_tokens_become_one_rest() -> None:
    # Best two of P: 1, 2. Best two of R: 1, 3. Both know 1 only; the rest is 0.3 against 0.5:
    # 0.7 ln(0.7/0.5) + 0.3 ln(0.3/0.5) = 0.235531 - 0.153248 = 0.082283
    r = {1: 0.5, 3: 0.4, 2: 0.1}
    kl, rest = kl_lower_bound(scored(1, P, 2), scored(1, r, 2))
    assert kl == pytest.approx(0.082283, abs=1e-6)
    assert rest == pytest.approx(0.3)
    # The truth: 0.7 ln(0.7/0.5) + 0.2 ln(0.2/0.1) + 0.1 ln(0.1/0.4) = 0.235531 + 0.138629 - 0.138629
    truth, _ = kl_lower_bound(scored(1, P, 3), scored(1, r, 3))
    assert truth == pytest.approx(0.235531, abs=1e-6)


def test_the_given_token_is_known_even_when_it_is_not_among_the_best() -> None:
    # Token 2 is given, so both sides tell its probability: 0.7 ln(0.7/0.5) + 0.2 ln(0.2/0.1)
    # + 0.1 ln(0.1/0.4), all of it.
    r = {1: 0.5, 3: 0.4, 2: 0.1}
    kl, rest = kl_lower_bound(scored(2, P, 2), scored(2, r, 2))
    assert kl == pytest.approx(0.235531, abs=1e-6)
    assert rest == pytest.approx(0.1)


def test_the_bound_is_never_above_the_truth() -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        p, q = rng.dirichlet(np.full(12, 0.3), size=2) + 1e-6
        p, q = p / p.sum(), q / q.sum()
        truth = float(np.sum(p * np.log(p / q)))
        given = int(rng.integers(12))
        sides = [scored(given, dict(enumerate(map(float, side))), 4) for side in (p, q)]
        kl, _ = kl_lower_bound(*sides)
        assert 0 <= kl <= truth + 1e-9


def test_equal_distributions_have_no_distance() -> None:
    figures = compare_distributions([[scored(1, P, 2)] * 3], [[scored(1, P, 2)] * 3])
    assert figures.mean_kl_nats == 0
    assert figures.p99_kl_nats == 0
    assert figures.agreement_ratio == 1
    assert figures.mean_rest_ratio == pytest.approx(0.1)


def test_agreement_counts_positions_and_takes_ties_for_either() -> None:
    flipped = {1: 0.2, 2: 0.7, 3: 0.1}
    tied = {1: 0.45, 2: 0.45, 3: 0.1}
    left = [[scored(1, P, 3)] * 4]
    right = [[scored(1, P, 3), scored(1, Q, 3), scored(1, flipped, 3), scored(1, tied, 3)]]
    figures = compare_distributions(left, right)
    assert (figures.num_agreeing, figures.num_positions) == (3, 4)
    # Four bounds 0, 0.026812, 0.7 ln 3.5 - 0.2 ln 3.5 = 0.626381, 0.7 ln(7/4.5) + 0.2 ln(2/4.5)
    # = 0.309283 - 0.162186 = 0.147097; the mean is a quarter of the sum.
    assert figures.mean_kl_nats == pytest.approx((0.026812 + 0.626381 + 0.147097) / 4, abs=1e-5)
    # Linear between the two largest at 0.99 x 3 = 2.97: 0.147097 + 0.97 x (0.626381 - 0.147097)
    assert figures.p99_kl_nats == pytest.approx(0.612003, abs=1e-5)


def test_a_certain_model_leaves_no_rest() -> None:
    # Rounding can push a sum of probabilities over 1 or leave a rest of exactly 0.
    sure = ScoredToken(1, 1e-7, ((1, 1e-7),))
    kl, rest = kl_lower_bound(sure, sure)
    assert (kl, rest) == (0.0, 0.0)
    unsure = ScoredToken(1, math.log(0.5), ((1, math.log(0.5)),))
    # All of the rest, 0.5, lies where the other model sees nothing: large, but a number.
    kl, _ = kl_lower_bound(unsure, sure)
    assert 5 < kl < 15


def test_scores_of_different_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="same tokens"):
        compare_distributions([[scored(1, P, 3)]], [[scored(2, P, 3)]])
    with pytest.raises(ValueError, match="shorter|longer"):
        compare_distributions([[scored(1, P, 3)]], [[]])
