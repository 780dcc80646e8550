"""Quantiles that intervals need, under the names that people call them by."""

from __future__ import annotations

from statistics import NormalDist

from scipy.special import betainc, chdtri, stdtrit


def normal_quantile(probability: float) -> float:
    """Return the value that a standard normal variable stays below with `probability`."""
    return NormalDist().inv_cdf(probability)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return P(X <= x) of a beta variable with shapes `a` and `b`, both above 0."""
    return float(betainc(a, b, min(1.0, max(0.0, x))))


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return Student's t value that is not exceeded with `probability`.

    `degrees_of_freedom` need not be whole.
    """
    return float(stdtrit(degrees_of_freedom, probability))


def chi_square_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the chi-square value that is not exceeded with `probability`."""
    return float(chdtri(degrees_of_freedom, 1 - probability))
