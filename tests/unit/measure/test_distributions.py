"""Quantiles, against printed tables and closed forms."""

from __future__ import annotations

import math

import pytest

from autotune.measure.distributions import (
    beta_cdf,
    chi_square_quantile,
    normal_quantile,
    t_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "at_975", "at_80"),
    [
        # Fisher and Yates' table of t.
        (1, 12.706, 1.376),
        (2, 4.303, 1.061),
        (3, 3.182, 0.978),
        (8, 2.306, 0.889),
        (30, 2.042, 0.854),
        (1e7, 1.960, 0.842),
    ],
)
def test_students_t_is_the_tables(degrees: float, at_975: float, at_80: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(at_975, abs=5e-4)
    assert t_quantile(0.8, degrees) == pytest.approx(at_80, abs=5e-4)
    assert t_quantile(0.025, degrees) == pytest.approx(-at_975, abs=5e-4)


def test_students_t_has_closed_forms_for_one_and_two_degrees() -> None:
    # One degree is Cauchy's: tan(pi (p - 1/2)). Two: (2p - 1) sqrt(2 / (4p (1 - p))).
    for p in (0.6, 0.9, 0.99, 0.999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        two = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
        assert t_quantile(p, 2) == pytest.approx(two, rel=1e-9)
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("degrees", "low", "high"),
    [(1, 0.000982, 5.024), (2, 0.0506, 7.378), (10, 3.247, 20.483), (100, 74.222, 129.561)],
)
def test_chi_square_is_the_tables(degrees: int, low: float, high: float) -> None:
    assert chi_square_quantile(0.025, degrees) == pytest.approx(low, rel=1e-3)
    assert chi_square_quantile(0.975, degrees) == pytest.approx(high, rel=1e-4)


@pytest.mark.parametrize("n", [1, 7, 40, 300])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_the_beta_function_is_a_sum_of_binomial_terms(n: int, p: float) -> None:
    # P(at least k of n) = I_p(k, n + 1 - k).
    for k in {1, (n + 1) // 2, n}:
        at_least = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        assert beta_cdf(p, k, n + 1 - k) == pytest.approx(at_least, rel=1e-9, abs=1e-12)


def test_the_beta_function_takes_shapes_that_are_not_whole() -> None:
    # I_x(1/2, 1/2) = 2 / pi asin(sqrt(x)); I_x(a, 1) = x^a.
    for x in (0.01, 0.3, 0.77):
        assert beta_cdf(x, 0.5, 0.5) == pytest.approx(2 / math.pi * math.asin(math.sqrt(x)))
        assert beta_cdf(x, 2.7, 1) == pytest.approx(x**2.7)
    assert (beta_cdf(0.0, 2, 3), beta_cdf(1.0, 2, 3)) == (0, 1)


def test_the_normal_quantile() -> None:
    assert normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-6)
