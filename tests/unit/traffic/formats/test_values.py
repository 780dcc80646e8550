"""Numbers, times and names, as they stand in logs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from autotune.traffic.formats.values import RowError, name_of, text_of, time_of, tokens_of

NOON_S = datetime(2023, 11, 16, 12, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        (" 17 ", 17),
        (17.0, 17),
        ("17.0", 17),
        (None, None),
        ("", None),
    ],
)
def test_tokens(value: object, tokens: int | None) -> None:
    assert tokens_of({"n": value}, "n") == tokens


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (-1, "must not be negative"),
        ("-1", "must not be negative"),
        (1.5, "must be a whole number"),
        ("many", "must be a whole number"),
        (True, "must be a whole number"),
        ([3], "must be a whole number"),
        ({}, "must be a whole number"),
        (float("nan"), "must be a whole number"),
        (float("inf"), "must be a whole number"),
        ("nan", "must be a whole number"),
        ("1e999", "must be a whole number"),
        ("9" * 5000, "must be a whole number"),
        (10**4000, "must be a whole number"),
        (10**9, "is too large"),
    ],
)
def test_what_is_no_number_of_tokens(value: object, rule: str) -> None:
    with pytest.raises(RowError, match=f"`n` {rule}"):
        tokens_of({"n": value}, "n")


def test_the_first_name_with_a_value_counts() -> None:
    assert tokens_of({"a": None, "b": "", "c": 3, "d": 4}, "a", "b", "c", "d") == 3
    assert tokens_of({}, "a", "b") is None


@pytest.mark.parametrize(
    ("value", "time_s"),
    [
        (12.5, 12.5),  # seconds of the file's own clock
        ("12.5", 12.5),
        (1700136000, 1700136000.0),
        (1700136000_000, 1700136000.0),
        (1700136000_000_000, 1700136000.0),
        (1700136000_000_000_000, 1700136000.0),
        (946_684_800_000_000_000, 946684800.0),  # the year 2000
        (10**11 - 1, 1e11 - 1),  # seconds of the year 5138, the last that are
        (10**11, 1e8),
        ("1700136000000000000", 1700136000.0),  # OTLP's way of writing 64 bits
        ("2023-11-16 12:00:00", NOON_S),
        ("2023-11-16T12:00:00Z", NOON_S),
        ("2023-11-16T13:00:00+01:00", NOON_S),
        ("2023-11-16 12:00:00 UTC", NOON_S),
        ("2023-11-16 12:00:00.5", NOON_S + 0.5),
        ("2023-11-16 12:00:00.1234567", NOON_S + 0.123456),  # Azure's seven digits
        ("2023-11-16T12:00:00.123456789Z", NOON_S + 0.123456),
        ("2023-11-16 12:00:00.000000+00:00", NOON_S),  # Azure's later traces
        (None, None),
    ],
)
def test_times(value: object, time_s: float | None) -> None:
    assert time_of({"t": value}, "t") == pytest.approx(time_s)


def test_a_unit_that_is_known_is_not_guessed() -> None:
    assert time_of({"t": 1500}, "t", seconds_per_unit=0.001) == 1.5
    assert time_of({"t": 2e11}, "t", seconds_per_unit=1.0) == 2e11


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (-1, "must not be negative"),
        ("yesterday", "must be a time"),
        ("2023-13-45 00:00:00", "must be a time"),
        ("0001-01-01T00:00:00", "must not be before 1970"),
        ([], "must be a time"),
        (True, "must be a time"),
        (float("nan"), "must be a time"),
        (1e39, "is too large for a time"),
    ],
)
def test_what_is_no_time(value: object, rule: str) -> None:
    with pytest.raises(RowError, match=rule):
        time_of({"t": value}, "t", seconds_per_unit=1.0)


def test_names() -> None:
    assert name_of({"c": " chat "}, "c") == "chat"
    assert name_of({"c": 12}, "c") == name_of({"c": 12.0}, "c") == "12"
    assert name_of({"c": "  "}, "c") is None
    wrong: list[Any] = [True, 1.5, [], {}, "x" * 201, "\ud800"]
    for value in wrong:
        with pytest.raises(RowError):
            name_of({"c": value}, "c")


def test_text_must_be_text() -> None:
    assert text_of({"p": "tëxt"}, "p") == "tëxt"
    with pytest.raises(RowError, match="`p` must be text"):
        text_of({"p": 3}, "p")
    with pytest.raises(RowError, match="half of a character"):
        text_of({"p": "a\udc00"}, "p")
