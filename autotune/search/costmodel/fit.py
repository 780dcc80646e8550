"""Fit the physical unknowns to all measurements: the most probable values, and how sure they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from autotune.search.surrogate import FloatArray

DIFFERENCE = 1e-3
"""Step of the finite differences, in log units."""
MAX_EVALUATIONS = 25

Residuals = Callable[[FloatArray], FloatArray]
"""Takes sets of unknowns, shape (m, p); returns scaled residuals of the data, shape (m, r)."""


@dataclass(frozen=True)
class Fit:
    """The fitted unknowns, in log units."""

    theta: FloatArray
    """Shape (p,)."""
    covariance: FloatArray
    """Shape (p, p), Gauss-Newton; widened where the data are off by more than their errors."""
    misfit: float
    """Root-mean-square scaled residual; 1 where the model is as good as the measurements."""


def fit_unknowns(
    residuals: Residuals, medians: FloatArray, spreads: FloatArray, start: FloatArray
) -> Fit:
    """Find the unknowns of the highest posterior density.

    Residuals of the data count by the soft L1 loss, so that one measurement that the model has no words for
    (a preempted batch, a starved drafter) does not bend all unknowns.

    Args:
        residuals: of the data, divided by their errors.
        medians: of the priors, in log units.
        spreads: of the priors, in log units.
        start: where to begin, such as the latest fit.
    """

    def all_residuals(theta: FloatArray) -> FloatArray:
        scaled = _soft(residuals(theta[None, :])[0])
        return np.concatenate([scaled, (theta - medians) / spreads])

    def jacobian(theta: FloatArray) -> FloatArray:
        sets = np.vstack([theta, theta + DIFFERENCE * np.eye(len(theta))])
        found = _soft(residuals(sets))
        slopes = (found[1:] - found[0]).T / DIFFERENCE
        return np.vstack([slopes, np.diag(1 / spreads)])

    result = least_squares(
        all_residuals, start, jac=jacobian, method="trf",
        bounds=(medians - 5 * spreads, medians + 5 * spreads),
        max_nfev=MAX_EVALUATIONS, xtol=1e-4, ftol=1e-4,
    )  # fmt: skip
    slopes = jacobian(result.x)
    data = result.fun[: -len(medians)]
    misfit = float(np.sqrt(np.mean(data**2))) if len(data) else 1.0
    widened = slopes.copy()
    widened[: len(data)] /= max(misfit, 1.0)
    covariance = np.linalg.inv(widened.T @ widened)
    return Fit(result.x, np.asarray(covariance, dtype=np.float64), misfit)


def _soft(residuals: FloatArray) -> FloatArray:
    """Return residuals whose squares are the soft L1 loss, 2 (sqrt(1 + (r/c)^2) - 1) c^2, c = 2."""
    cut = 2.0
    loss = 2 * cut**2 * (np.sqrt(1 + (residuals / cut) ** 2) - 1)
    softened: FloatArray = np.sign(residuals) * np.sqrt(loss)
    return softened
