"""Values of a record: numbers of tokens, times and names, checked, under any of several names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Record = Mapping[str, Any]

MAX_TOKENS = 100_000_000
"""More than any request has: such a number is another quantity, or a mistake."""

MAX_TIME_S = 1e12
"""30,000 years: no clock says so."""

_MAX_DIGITS = 40
_MAX_NAME_CHARS = 200
_MAX_KEYS_SHOWN = 8
_MAX_SHOWN_CHARS = 40


class RowError(Exception):
    """A record that cannot be used. The message is the reason and never holds any of its text."""


def number_of(record: Record, *names: str) -> float | None:
    """Return the number under the first of these names that has a value.

    Raises:
        RowError: the value is no finite number.
    """
    name, value = _first(record, names)
    if value is None:
        return None
    number = _as_number(value)
    if number is None:
        raise RowError(f"`{name}` must be a number")
    return float(number)


def tokens_of(record: Record, *names: str) -> int | None:
    """Return the number of tokens under the first of these names that has a value.

    Raises:
        RowError: the value is no whole number, is negative, or is absurdly large.
    """
    name, value = _first(record, names)
    if value is None:
        return None
    number = _as_number(value)
    if number is None or number != int(number):
        raise RowError(f"`{name}` must be a whole number")
    if number < 0:
        raise RowError(f"`{name}` must not be negative")
    if number > MAX_TOKENS:
        raise RowError(f"`{name}` is too large for a number of tokens")
    return int(number)


def some_tokens_of(record: Record, *names: str) -> int:
    """Return a number of tokens that must be there and above 0, as it is in every request served.

    Raises:
        RowError: it is not.
    """
    number = tokens_of(record, *names)
    if number is None:
        raise RowError(f"`{names[0]}` is missing")
    if number == 0:
        raise RowError(f"`{names[0]}` is 0: a request that failed")
    return number


def time_of(record: Record, *names: str, seconds_per_unit: float | None = None) -> float | None:
    """Return the time under the first of these names that has a value, in seconds.

    Args:
        record: the record.
        names: where the time may stand.
        seconds_per_unit: what one unit of a number is. None: seconds, milliseconds, microseconds or
            nanoseconds since 1970, whichever lies between the years 1973 and 5138, and small numbers
            are seconds. Text is ISO 8601; without an offset it is taken as UTC, since only
            differences matter.

    Raises:
        RowError: the value is no time, or lies before the clock's start.
    """
    name, value = _first(record, names)
    if value is None:
        return None
    number = _as_number(value)
    if number is None:
        return _iso_time_s(name, value)
    if number < 0:
        raise RowError(f"`{name}` must not be negative")
    time_s = number * (seconds_per_unit or _seconds_per_unit(number))
    if time_s > MAX_TIME_S:
        raise RowError(f"`{name}` is too large for a time")
    return time_s


def duration_of(record: Record, *names: str) -> float | None:
    """Return a number of seconds, not negative, under the first of these names that has a value.

    Raises:
        RowError: the value is none.
    """
    return time_of(record, *names, seconds_per_unit=1.0)


def name_of(record: Record, *names: str) -> str | None:
    """Return the name or id under the first of these names that has a value, as text.

    Raises:
        RowError: the value is neither text nor a whole number, or is too long for a name.
    """
    name, value = _first(record, names)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"`{name}` must be a name or a whole number")
    text = checked_text(str(value)).strip()
    if len(text) > _MAX_NAME_CHARS:
        raise RowError(f"`{name}` must have at most {_MAX_NAME_CHARS} characters")
    return text or None


def text_of(record: Record, *names: str) -> str | None:
    """Return the text under the first of these names that has a value.

    Raises:
        RowError: the value is no text.
    """
    name, value = _first(record, names)
    if value is None:
        return None
    if not isinstance(value, str):
        raise RowError(f"`{name}` must be text")
    return checked_text(value)


def asked_text(record: Record, *names: str) -> str:
    """Return a prompt, which must be there and not be blank.

    Raises:
        RowError: it is not.
    """
    text = text_of(record, *names)
    if text is None or not text.strip():
        raise RowError("the prompt must not be empty")
    return text


def checked_text(text: str) -> str:
    """Return the text, if it can be sent.

    Raises:
        RowError: it holds half of a surrogate pair, which no encoding can express.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise RowError("holds half of a character (a lone surrogate)") from err
    return text


def mapping_of(record: Record, name: str) -> Record:
    """Return the object under this name, empty if there is none."""
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def list_of(record: Record, name: str) -> Sequence[Any]:
    """Return the list under this name, empty if there is none."""
    value = record.get(name)
    return value if isinstance(value, list) else []


def shown_keys(record: Record) -> list[str]:
    """Return the names of some of a record's fields, short enough for a message."""
    return [key[:_MAX_SHOWN_CHARS] for key in sorted(record)[:_MAX_KEYS_SHOWN]]


def _first(record: Record, names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        value = record.get(name)
        if value is not None and value != "":
            return name, value
    return names[0], None


def _as_number(value: object) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = int(value) if value.isdecimal() else float(value)
        except ValueError:
            return None
    if isinstance(value, int):
        return value if abs(value) < 10**_MAX_DIGITS else None
    if isinstance(value, float) and math.isfinite(value):
        return value
    return None


def _seconds_per_unit(number: float) -> float:
    for limit, unit_s in ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3)):
        if number >= limit:
            return unit_s
    return 1.0


def _iso_time_s(name: str, value: object) -> float:
    text = value.strip() if isinstance(value, str) else ""
    if text.endswith(" UTC"):
        text = f"{text[:-4]}+00:00"
    try:
        time = datetime.fromisoformat(
            text
        )  # which cuts the 7 digits that Azure's seconds have to 6
        time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as err:
        raise RowError(f"`{name}` must be a time: seconds, or ISO 8601") from err
    if time_s < 0:
        raise RowError(f"`{name}` must not be before 1970")
    return time_s
