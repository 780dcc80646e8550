"""The one shape of error messages, and the exit codes that the command line returns."""

from __future__ import annotations

import pytest

from autotune.errors import (
    AutotuneError,
    InputError,
    PrerequisiteError,
    StorageError,
    StudyChangedError,
    StudyError,
    UnknownStudyError,
    invalid,
    suggestion,
)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (AutotuneError, 1),
        (PrerequisiteError, 1),
        (StorageError, 1),
        (StudyError, 1),
        (InputError, 2),
        (UnknownStudyError, 2),
        (StudyChangedError, 2),
    ],
)
def test_exit_codes(kind: type[AutotuneError], exit_code: int) -> None:
    assert kind("x").exit_code == exit_code
    assert isinstance(kind("x"), AutotuneError)


def test_a_full_message_names_place_rule_value_and_next_step() -> None:
    error = invalid(
        "must be above 0",
        where="traffic.yaml",
        key_path="load.rps",
        got=-2.5,
        next_step="Give a rate in requests per second.",
    )
    assert isinstance(error, InputError)
    assert str(error) == (
        "traffic.yaml: load.rps: must be above 0, but got -2.5. Give a rate in requests per second."
    )


def test_parts_that_do_not_apply_are_left_out() -> None:
    assert str(invalid("must exist", where="a.yaml")) == "a.yaml: must exist."


@pytest.mark.parametrize("got", [0, "", False, []])
def test_a_value_that_is_empty_is_still_shown(got: object) -> None:
    assert str(invalid("must be more", where="x", got=got)) == f"x: must be more, but got {got!r}."


def test_a_rule_that_ends_with_a_full_stop_gets_no_second_one() -> None:
    assert str(invalid("must exist.", where="x")) == "x: must exist."


def test_a_long_value_is_cut() -> None:
    message = str(invalid("must be short", where="x", got="y" * 10_000))
    assert len(message) < 200
    assert message.endswith("y….")


def test_a_near_word_is_suggested() -> None:
    assert suggestion("acceptence", ["acceptance", "rate"]) == "Did you mean 'acceptance'?"


def test_without_a_near_word_all_are_listed_once_in_order() -> None:
    assert suggestion("zzz", ["b", "a", "b"]) == "Valid: a, b."


def test_without_any_choice_nothing_is_suggested() -> None:
    assert suggestion("zzz", []) == ""
