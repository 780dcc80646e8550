"""A small exact Gaussian process: few measurements, each with its own noise, over a fixed list of points.

Written out because five measurements cannot say how long a length scale is: the hyperparameters need priors.
scikit-learn's process maximises the bare likelihood, which then runs to one of its bounds, and takes one
noise for all points unless each is fixed in advance. Formulae: Rasmussen and Williams, Gaussian Processes for
Machine Learning (2006), chapters 2, 4.2 and 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from autotune.search.surrogate import FloatArray

NOISE_FLOOR = 0.005
"""Standard error below which no measurement is believed, in log units: 0.5 %."""
LENGTH_MEDIAN = 0.8
"""Prior median of a length scale; features run from 0 to 1, so most of the range is one neighbourhood."""
LENGTH_SPREAD = 0.7
AMPLITUDE_SPREAD = 0.7
JITTER = 1e-9
_MAX_STEPS = 40


@dataclass(frozen=True)
class GpPrior:
    """What is believed before any measurement."""

    amplitude: float
    """Median of the standard deviation of the function around its mean, log units."""
    offset: float
    """Standard deviation of the constant that the function is around."""


class GaussianProcess:
    """Matern 5/2 with one length scale for each feature, around an unknown constant."""

    def __init__(self, prior: GpPrior) -> None:
        self._prior = prior
        self._x = np.empty((0, 0))

    def fit(self, x: FloatArray, y: FloatArray, errors: FloatArray) -> None:
        """Learn from points.

        Args:
            x: features, shape (n, d), scaled to about 0..1.
            y: values, shape (n,).
            errors: standard error of each value, shape (n,).
        """
        self._x = x
        self._noise = np.maximum(errors, NOISE_FLOOR) ** 2
        self._gaps2 = (x[:, None, :] - x[None, :, :]) ** 2
        self._y = y
        start = np.concatenate(
            [[np.log(self._prior.amplitude)], np.full(x.shape[1], np.log(LENGTH_MEDIAN))]
        )
        self._centre = start
        self._spread = np.concatenate([[AMPLITUDE_SPREAD], np.full(x.shape[1], LENGTH_SPREAD)])
        found = minimize(
            self._objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(start - 3 * self._spread, start + 3 * self._spread, strict=True)),
            options={"maxiter": _MAX_STEPS},
        )
        self._log_amplitude, self._log_lengths = found.x[0], found.x[1:]
        covariance = self._covariance(found.x)[0]
        self._factor = cho_factor(covariance, lower=True)
        self._weights = cho_solve(self._factor, y)

    def predict(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the function at points of shape (m, d)."""
        scale = np.exp(-self._log_lengths)
        a, b = x * scale, self._x * scale
        gaps2 = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
        cross = np.exp(2 * self._log_amplitude) * _matern(np.maximum(gaps2, 0.0))[0]
        cross += self._prior.offset**2
        mean = cross @ self._weights
        half = solve_triangular(self._factor[0], cross.T, lower=True, check_finite=False)
        total = np.exp(2 * self._log_amplitude) + self._prior.offset**2
        return mean, np.sqrt(np.maximum(total - (half**2).sum(axis=0), 1e-12))

    def leave_one_out(self) -> FloatArray:
        """Return each point's residual when it is predicted from all the others, shape (n,).

        In closed form (Rasmussen and Williams, equation 5.12), hyperparameters as they are.
        """
        inverse = cho_solve(self._factor, np.eye(len(self._y)))
        left: FloatArray = self._weights / np.diag(inverse)
        return left

    def leave_groups_out(self, groups: npt.NDArray[np.intp]) -> FloatArray:
        """Return each point's residual when all points of its own group are left out, shape (n,).

        The same identity for blocks: residuals of a group are (block of the inverse)^-1 times its weights.

        Args:
            groups: a number for each point.
        """
        inverse = cho_solve(self._factor, np.eye(len(self._y)))
        left = np.empty(len(self._y))
        for group in np.unique(groups):
            (own,) = np.nonzero(groups == group)
            left[own] = np.linalg.solve(inverse[np.ix_(own, own)], self._weights[own])
        return left

    def _covariance(self, parameters: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        scale = np.exp(-2 * parameters[1:])
        correlation, slope = _matern(self._gaps2 @ scale)
        smooth = np.exp(2 * parameters[0]) * correlation
        noise = np.diag(self._noise + JITTER)
        return smooth + self._prior.offset**2 + noise, smooth, slope

    def _objective(self, parameters: FloatArray) -> tuple[float, FloatArray]:
        """Negative log posterior of the hyperparameters, and its gradient."""
        covariance, smooth, slope = self._covariance(parameters)
        factor = cho_factor(covariance, lower=True)
        weights = cho_solve(factor, self._y)
        inner = cho_solve(factor, np.eye(len(self._y))) - np.outer(weights, weights)
        away = (parameters - self._centre) / self._spread
        value = 0.5 * self._y @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * away @ away
        amplitude2 = np.exp(2 * parameters[0])
        by_gap = inner * slope * amplitude2
        # d k / d log l_j = k'(r2) * (-2) * gap_j^2 / l_j^2, and half the trace of inner times that.
        lengths = -np.einsum("ij,ijk->k", by_gap, self._gaps2) * np.exp(-2 * parameters[1:])
        gradient = np.concatenate([[(inner * smooth).sum()], lengths]) + away / self._spread
        return float(value), gradient


def _matern(r2: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the Matern 5/2 correlation at squared distances, and its derivative by them."""
    root = np.sqrt(5.0 * r2)
    decay = np.exp(-root)
    return (1.0 + root + root**2 / 3.0) * decay, -(5.0 / 6.0) * (1.0 + root) * decay
