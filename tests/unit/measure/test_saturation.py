"""Does a server keep up? On queues whose answer is known."""

from __future__ import annotations

import random

import pytest
from record_helpers import measurement, record

from autotune.measure.records import Measurement
from autotune.measure.saturation import saturation


def single_server(load_ratio: float, num_requests: int, seed: int) -> Measurement:
    """Poisson arrivals at 1 a second at one server; service takes exactly `load_ratio` s."""
    rng = random.Random(seed)
    due_s = free_s = 0.0
    records = []
    for number in range(num_requests):
        due_s += rng.expovariate(1.0)
        free_s = max(free_s, due_s) + load_ratio
        records.append(record(number, due_s, [(free_s, 1)], free_s, scheduled_s=due_s))
    return measurement(*records, concurrency=None)


def test_a_pile_that_grows_steadily_has_its_slope() -> None:
    # Two arrivals a second from 0 on, one answer a second: one more in flight each second.
    records = [record(i, i / 2, [(i + 1.0, 1)], i + 1.0, scheduled_s=i / 2) for i in range(240)]
    found = saturation(measurement(*records, concurrency=None))
    assert found is not None
    assert found.slope_rps == pytest.approx(1, rel=0.02)
    assert found.low_rps <= found.slope_rps <= found.high_rps
    assert found.arrival_rps == pytest.approx(2, rel=0.02)
    assert found.is_saturated


def test_a_steady_server_has_no_slope() -> None:
    records = [
        record(i, i / 2, [(i / 2 + 3, 1)], i / 2 + 3, scheduled_s=i / 2) for i in range(240)
    ]
    found = saturation(measurement(*records, concurrency=None))
    assert found is not None
    assert found.slope_rps == pytest.approx(0, abs=1e-9)
    assert not found.is_saturated


@pytest.mark.parametrize(
    ("load_ratio", "at_least", "at_most"), [(0.5, 0, 0), (0.8, 0, 3), (1.3, 54, 60), (2.0, 60, 60)]
)
def test_verdicts_are_rarely_wrong(load_ratio: float, at_least: int, at_most: int) -> None:
    """60 measurements of 200 requests: below capacity hardly ever saturated, far above always."""
    verdicts = [saturation(single_server(load_ratio, 200, seed)) for seed in range(60)]
    num_saturated = sum(v is not None and v.is_saturated for v in verdicts)
    assert at_least <= num_saturated <= at_most


def test_closed_loops_and_short_ones_have_no_verdict() -> None:
    steady = [record(i, i, [(i + 1.0, 1)], i + 1.0) for i in range(200)]
    assert saturation(measurement(*steady, concurrency=1)) is None
    assert saturation(single_server(0.5, 90, 0)) is None
    assert saturation(measurement(concurrency=None)) is None
