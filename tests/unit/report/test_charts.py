"""Small charts of characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.report.charts import Bin, bar, columns, doubling_bins, rates


def test_columns_are_as_high_as_their_values() -> None:
    # Two lines are 16 eighths: 4 is 16 of them, 2 is 8, 1 is 4, 3 is 12.
    assert columns([4, 2, 1, 3, 0], 2) == ["█  ▄ ", "██▄█ "]


def test_a_small_value_is_not_invisible() -> None:
    assert columns([1000, 1], 1) == ["█▁"]
    assert bar(0.0001, 10) == "▏"


def test_nothing_is_drawn_as_nothing() -> None:
    assert columns([0, 0], 2) == ["  ", "  "]
    assert columns([], 2) == ["", ""]
    assert bar(0, 10) == ""


@pytest.mark.parametrize(
    ("share", "drawn"), [(1, "████"), (0.5, "██"), (0.25, "█"), (0.28125, "█▏"), (0.46875, "█▉")]
)
def test_a_bar_fills_its_share(share: float, drawn: str) -> None:
    # Of 4 characters, 32 eighths: 0.28125 is 9 of them, 0.46875 is 15.
    assert bar(share, 4) == drawn


def test_ranges_double() -> None:
    assert doubling_bins([1, 2, 3, 4, 9, 9]) == [
        Bin(1, 1, 1),
        Bin(2, 3, 2),
        Bin(4, 7, 1),
        Bin(8, 15, 2),
    ]


def test_ranges_begin_and_end_where_values_are() -> None:
    assert doubling_bins([100, 600]) == [
        Bin(64, 127, 1),
        Bin(128, 255, 0),
        Bin(256, 511, 0),
        Bin(512, 1023, 1),
    ]
    assert doubling_bins([]) == []


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_every_value_is_in_one_range(values: list[int]) -> None:
    bins = doubling_bins(values)
    assert sum(b.count for b in bins) == len(values)
    for b in bins:
        assert b.count == sum(b.low <= value <= b.high for value in values)
        assert b.high + 1 == 2 * b.low


def test_rates_are_events_per_second() -> None:
    # Parts of 2 s each: three events in the first, none, one at the very end.
    assert rates([0, 0.5, 1.9, 6.0], 6.0, 3) == [1.5, 0.0, 0.5]
