"""Files of questions with checkable answers: what a "solved task" is for this user."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autotune.errors import invalid
from autotune.measure.quality.check_worker import last_number
from autotune.paths import user_path
from autotune.strict import read_text
from autotune.traffic.quality import (
    Check,
    ExactCheck,
    NumberCheck,
    PythonCheck,
    QualityTask,
)

MAX_CHECK_FILE_BYTES = 64 * 1024 * 1024
_CHECK: TypeAdapter[Check] = TypeAdapter(Check)
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class CheckRow:
    """One question and the check of its answer."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, the last one by the user."""
    check: Check
    where: str
    """File and line, for messages."""

    @property
    def text(self) -> str:
        """The prompt without roles."""
        return "\n\n".join(content for _, content in self.messages)


def load_task(task: QualityTask, folder: Path) -> tuple[CheckRow, ...]:
    """Read the first rows of a task's file: JSON lines with a prompt and a check each.

    A row holds `prompt`, `question` or `messages`, and `check` unless the task has one for all.

    Args:
        folder: where a relative path starts.

    Raises:
        InputError: the file is missing or empty, or a row cannot be used; the message says which.
    """
    path = folder / user_path(task.file, "quality.tasks.file")
    text = read_text(path, "file of checks", MAX_CHECK_FILE_BYTES)
    # Not splitlines(): it also breaks at U+2028 and others, which may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = tuple(_row(line, f"{path}:{number}", task) for number, line in lines[: task.max_rows])
    if not rows:
        raise invalid(
            "the file of checks must hold at least one row, but is empty",
            where=path,
            next_step='Write one JSON object a line: {"prompt": "...", "check": {"kind": "exact", '
            '"expected": "..."}}.',
        )
    return rows


def _row(line: str, where: str, task: QualityTask) -> CheckRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:  # ValueError: also numbers of thousands of digits
        raise invalid("each line must be one JSON object", where=where) from err
    if not isinstance(row, dict):
        raise invalid("each line must be one JSON object", where=where, got=type(row).__name__)
    if _HALF_CHARACTER.search(json.dumps(row, ensure_ascii=False)):
        raise invalid("the text must be valid Unicode, but has half a character", where=where)
    check = _resolved(_check(row, where, task), row, where)
    if isinstance(check, PythonCheck) and not task.allow_python:
        raise invalid(
            "a check of the kind `python` runs code, which the task must allow",
            where=where,
            got=check.function,
            next_step="Set `allow_python: true` beside `file` in the profile if the code is yours.",
        )
    return CheckRow(_messages(row, where), check, where)


def _check(row: Mapping[str, Any], where: str, task: QualityTask) -> Check:
    if "check" not in row:
        if task.check is None:
            raise invalid(
                "the row must have a `check`, because its task has none for all rows", where=where
            )
        return task.check
    try:
        return _CHECK.validate_python(row["check"])
    except ValidationError as err:
        detail = err.errors(include_url=False)[0]
        # The first part of the location is the kind, which stands in no file as a key.
        key_path = ".".join(map(str, ("check", *detail["loc"][1:])))
        message = detail["msg"].removeprefix("Value error, ")
        raise invalid(message, where=where, key_path=key_path) from err


def _resolved(check: Check, row: Mapping[str, Any], where: str) -> Check:
    """Put the row's own value in the place of `expected_field`."""
    if not isinstance(check, ExactCheck | NumberCheck) or check.expected_field is None:
        return check
    value = row.get(check.expected_field)
    is_usable = isinstance(value, str | int | float) and not isinstance(value, bool)
    if isinstance(check, ExactCheck):
        if is_usable:
            return ExactCheck(kind="exact", expected=str(value))
    elif is_usable and (number := last_number(str(value))) is not None:
        return NumberCheck(kind="number", expected=float(number))
    raise invalid(
        f"the key named by `expected_field` must hold the right {check.kind} answer",
        where=where,
        key_path=check.expected_field,
        next_step=f"Keys of this row: {', '.join(sorted(map(str, row))[:8])}.",
    )


def _messages(row: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    messages = row.get("messages")
    if isinstance(messages, list):
        pairs = [(m.get("role"), m.get("content")) for m in messages if isinstance(m, dict)]
        whole = [(r, c) for r, c in pairs if isinstance(r, str) and isinstance(c, str)]
        if len(whole) == len(messages) and whole and whole[-1][0] == "user" and whole[-1][1]:
            return tuple(whole)
        raise invalid(
            "`messages` must be a list of objects with `role` and `content`, the last one by the user",
            where=where,
        )
    for key in ("prompt", "question"):
        if isinstance(row.get(key), str) and row[key].strip():
            return (("user", row[key]),)
    raise invalid(
        "each row must have a `prompt`, a `question` or `messages`",
        where=where,
        got=sorted(map(str, row))[:8],
    )
