"""The noise floor, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
from study_helpers import at_tps

from autotune.measure.noise import detectable_gain_ratio, noise_report, spread_of
from autotune.measure.structure import STRUCTURED_THROUGHPUT

TPS = "output_throughput_tps"


def test_the_spread_between_launches_is_that_of_their_means() -> None:
    report = noise_report(TPS, [[at_tps(90)], [at_tps(100)], [at_tps(110)]])

    assert report is not None
    # Logarithms 4.49981, 4.60517, 4.70048; mean 4.60182; squares 0.010405 + 0.000011 + 0.009734.
    assert report.between_launches.cv_ratio == pytest.approx(math.sqrt(0.020150 / 2), rel=1e-3)
    assert report.between_launches.num_degrees_of_freedom == 2
    assert report.within_launches is None
    assert report.mean == pytest.approx(100)
    assert (report.num_launches, report.num_measurements) == (3, 3)


def test_what_differs_within_a_launch_is_told_apart() -> None:
    launch = [at_tps(100), at_tps(110)]

    report = noise_report(TPS, [launch, launch])

    assert report is not None
    assert report.between_launches.cv_ratio == pytest.approx(0, abs=1e-9)
    assert report.within_launches is not None
    # In each launch (ln 1.1)^2 / 2 with one degree of freedom; the same twice.
    assert report.within_launches.cv_ratio == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert report.within_launches.num_degrees_of_freedom == 2


def test_the_interval_of_a_spread_is_the_textbooks() -> None:
    # Snedecor and Cochran's table: chi-square with 10 degrees of freedom, 3.247 and 20.483.
    spread = spread_of(10.0, 10)

    assert spread.cv_ratio == pytest.approx(1)
    assert spread.low == pytest.approx(math.sqrt(10 / 20.483), rel=1e-3)
    assert spread.high == pytest.approx(math.sqrt(10 / 3.247), rel=1e-3)


@pytest.mark.parametrize(
    ("num_launches", "t"),
    [
        (2, 4.303 + 1.061),  # t(0.975, 2) + t(0.8, 2)
        (3, 2.776 + 0.941),  # 4 degrees of freedom
        (5, 2.306 + 0.889),  # 8
    ],
)
def test_the_smallest_gain_follows_from_spread_and_launches(num_launches: int, t: float) -> None:
    expected = math.exp(t * 0.02 * math.sqrt(2 / num_launches)) - 1

    assert detectable_gain_ratio(0.02, num_launches) == pytest.approx(expected, rel=1e-3)


def test_equal_launches_cover_one() -> None:
    report = noise_report(TPS, [[at_tps(100)]] * 4)

    assert report is not None
    assert (len(report.null_ratios), report.num_null_covered) == (6, 6)  # 4 x 3 / 2 pairs


def test_launches_are_compared_by_the_spread_of_the_others() -> None:
    """Two pairs of launches 5 % apart: what the others show covers it (one degree of freedom)."""
    report = noise_report(TPS, [[at_tps(rate)] for rate in (95, 100, 95, 100)])

    assert report is not None
    assert all(interval.includes_launch_spread for interval in report.null_ratios)
    # 95 against 100 leaves 95 and 100: covered, four times. 95 against 95 and 100 against 100 are
    # equal to each other.
    assert report.num_null_covered == 6


def test_a_launch_that_is_another_world_is_not_covered() -> None:
    rates = (99.9, 100, 100.1, 99.9, 100.1, 150)
    report = noise_report(TPS, [[at_tps(rate)] for rate in rates])

    assert report is not None
    assert report.num_null_covered == 15 - 5  # all but its own five comparisons


def test_with_few_launches_the_check_shows_what_requests_do_not_explain() -> None:
    # No request differs from another, but the launches do.
    report = noise_report(TPS, [[at_tps(95)], [at_tps(100)], [at_tps(105)]])

    assert report is not None
    assert not any(interval.includes_launch_spread for interval in report.null_ratios)
    assert report.num_null_covered == 0


def test_the_structured_throughput_has_noise_but_no_ratios() -> None:
    raw = noise_report(TPS, [[at_tps(90)], [at_tps(100)]])
    structured = noise_report(STRUCTURED_THROUGHPUT, [[at_tps(90)], [at_tps(100)]])

    assert raw is not None
    assert structured is not None
    # Without drafts a step brings its one token: nothing to pool.
    assert structured.between_launches.cv_ratio == pytest.approx(raw.between_launches.cv_ratio)
    assert structured.null_ratios == ()


def test_a_metric_that_nothing_defines_has_no_noise() -> None:
    assert (
        noise_report("goodput_tps", [[at_tps(100)]] * 2, {"default": {"ttft_p95_ms": 1e-9}})
        is None
    )
