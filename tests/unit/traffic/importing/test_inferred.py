"""Quantiles from samples, and the most common value."""

from __future__ import annotations

import pytest

from autotune.traffic.importing.inferred import (
    MAX_DISTINCT_VALUES,
    Inferred,
    MostCommon,
    Quantiles,
    Reservoir,
    ValueCounter,
)


def test_quantiles_are_values_that_occurred() -> None:
    reservoir = Reservoir(seed=1)
    for value in range(1, 201):  # nearest rank: the smallest value that q of all do not exceed
        reservoir.add(value)
    assert reservoir.quantiles() == Inferred(Quantiles(100, 180, 190, 198, 200, 200), 200)
    few = Reservoir(seed=1)
    for value in range(1, 12):  # 11 q is 5.5, 9.9, 10.45 and 10.89, rounded up
        few.add(value)
    assert few.quantiles() == Inferred(Quantiles(6, 10, 11, 11, 11, 11), 11)
    single = Reservoir(seed=1)
    single.add(7)
    assert single.quantiles() == Inferred(Quantiles(7, 7, 7, 7, 7, 1), 1)
    assert Reservoir(seed=1).quantiles() is None


def test_a_sample_stands_for_the_stream_and_the_maximum_is_exact() -> None:
    reservoir = Reservoir(seed=1, size=2000)
    for value in range(100_000):
        reservoir.add(value)
    reservoir.add(10**9)
    found = reservoir.quantiles()
    assert found is not None
    assert (found.num_rows, found.value.num_sampled, found.value.max) == (100_001, 2000, 10**9)
    # Rank of a quantile q of m sampled values: standard error sqrt(q (1 - q) / m), here 1.1 % and 0.5 %.
    assert found.value.p50 == pytest.approx(50_000, abs=4 * 1_118)
    assert found.value.p95 == pytest.approx(95_000, abs=4 * 487)


def test_the_same_stream_gives_the_same_sample() -> None:
    def quantiles(seed: int) -> Inferred[Quantiles] | None:
        reservoir = Reservoir(seed, size=50)
        for value in range(10_000):
            reservoir.add(value)
        return reservoir.quantiles()

    assert quantiles(1) == quantiles(1)
    assert quantiles(1) != quantiles(2)


def test_the_most_common_value() -> None:
    counter = ValueCounter()
    for value in (0.7, 1.0, 0.7, 0.2):
        counter.add(value)
    assert counter.most_common() == Inferred(MostCommon(0.7, 0.5), 4)
    assert ValueCounter().most_common() is None


def test_values_without_end_take_no_memory_without_end() -> None:
    counter = ValueCounter()
    for value in range(3 * MAX_DISTINCT_VALUES):
        counter.add(value)
    counter.add(0)
    found = counter.most_common()
    assert found is not None
    assert (found.value.value, found.num_rows) == (0, 3 * MAX_DISTINCT_VALUES + 1)
