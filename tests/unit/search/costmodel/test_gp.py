"""The Gaussian process against its textbook formulae, computed the long way."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from autotune.search.costmodel.gp import GaussianProcess, GpPrior

PRIOR = GpPrior(amplitude=0.5, offset=1.0)


def fitted(n: int = 12, noise: float = 0.02) -> tuple[GaussianProcess, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.random((n, 3))
    y = np.sin(3 * x[:, 0]) + 0.2 * x[:, 1] + noise * rng.standard_normal(n)
    process = GaussianProcess(PRIOR)
    process.fit(x, y, np.full(n, noise))
    return process, x, y


def test_it_interpolates_and_knows_what_it_does_not_know() -> None:
    process, x, y = fitted()
    mean, sd = process.predict(x)
    assert mean == pytest.approx(y, abs=0.06)
    assert (sd < 0.03).all()
    assert process.predict(np.full((1, 3), 9.0))[1][0] > 0.3, "far away nothing is known"


def test_the_gradient_is_that_of_the_objective() -> None:
    process, _, _ = fitted()
    at = np.array([-0.3, 0.1, -0.4, 0.2])
    wanted = approx_fprime(at, lambda p: process._objective(p)[0], 1e-6)
    assert process._objective(at)[1] == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_leaving_a_group_out_is_what_fitting_without_it_gives() -> None:
    process, x, y = fitted(noise=0.05)
    groups = np.array([0, 0, *range(1, 11)])
    left = process.leave_groups_out(groups)
    # The same hyperparameters without the first two points, by the formula of the conditional mean.
    parameters = np.concatenate([[process._log_amplitude], process._log_lengths])
    whole = process._covariance(parameters)[0]
    predicted = whole[:2, 2:] @ np.linalg.solve(whole[2:, 2:], y[2:])
    assert left[:2] == pytest.approx(y[:2] - predicted, rel=1e-6)
    assert process.leave_one_out()[5] == pytest.approx(left[5])


def test_a_noisy_point_counts_less_than_an_exact_one() -> None:
    process = GaussianProcess(GpPrior(amplitude=0.1, offset=1.0))
    process.fit(np.array([[0.5], [0.5]]), np.array([0.0, 1.0]), np.array([0.01, 0.3]))
    mean, _ = process.predict(np.array([[0.5]]))
    # Weights by inverse variance: 1 / (1 + 900) of the way to the noisy one.
    assert mean[0] == pytest.approx(1 / 901, abs=0.002)
