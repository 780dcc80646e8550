"""The one exception tree. Only the CLI turns these into text and an exit code.

A trial that failed is not an exception: see `autotune.serving.failures.TrialFailure`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Anything Autotune can explain; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(AutotuneError):
    """The user gave something that cannot be used: a file, a key, an option."""

    exit_code = 2


class PrerequisiteError(AutotuneError):
    """Something that has to be installed or downloaded first is missing."""


class StorageError(AutotuneError):
    """The study database cannot be opened, read or written."""


class StudyError(AutotuneError):
    """A study cannot go on, or ended without anything to recommend."""


class NothingFeasibleError(StudyError):
    """Everything was tried, and nothing keeps the limits or even launches."""


class UnknownStudyError(InputError):
    """No study of that name is in the database."""


class StudyChangedError(InputError):
    """A study of that name exists, but with another definition."""


def invalid(
    rule: str,
    *,
    where: object,
    key_path: str = "",
    got: object = None,
    next_step: str = "",
) -> InputError:
    """Build the one shape of input error: `<where>: <key path>: <rule>, but got <value>. <next step>`.

    Args:
        rule: what must hold, without a full stop, such as ``"must be above 0"``.
        where: the file or option that holds the bad value.
        key_path: dotted path of the key inside the file; empty when the whole file is meant.
        got: the value found; ``None`` when there is no value to show.
        next_step: one sentence that says what to do.
    """
    parts = [f"{where}: "]
    if key_path:
        parts.append(f"{key_path}: ")
    parts.append(rule)
    if got is not None:
        parts.append(f", but got {_short(got)}")
    text = "".join(parts).rstrip(".") + "."
    return InputError(f"{text} {next_step}".strip())


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Say which choice was probably meant, or list the valid ones."""
    known = sorted(set(choices))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Valid: {', '.join(known)}." if known else ""


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
