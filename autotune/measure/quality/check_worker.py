"""The process that applies checks: patterns, schemas and code of the user's, each of which can hang.

It is a process of its own, because Python can neither interrupt a regular expression that backtracks
without end nor a function of somebody else's; a process can be ended. One JSON object a line:

in   {"check": {...}, "prompt": "...", "answer": "..."}   or   {"check": {...}} to prepare only
out  {"is_solved": bool, "reason": null | "..."}

`reason` says why a check could not be applied and never holds text of a prompt or an answer. The
folder given as argument is where `module:function` is looked up first.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")
_FENCE = re.compile(r"^ *```[\w-]*[ \t]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MAX_NUMBER_CHARS = 400


class CheckUnusable(Exception):
    """A check that cannot be applied; the message is for the user."""


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, such as 1234.5 in "in all $1,234.50."; None without any."""
    number = None
    for found in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        number = found.group()
    if number is None or len(number) > MAX_NUMBER_CHARS:
        return None
    return Decimal(number.replace(",", ""))


def prepare(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    """Turn a check into a function of prompt and answer.

    Raises:
        CheckUnusable: the pattern, the schema or the function is no good.
    """
    return _PREPARE[check["kind"]](check)


def _exact(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    expected = check["expected"].split()
    return lambda prompt, answer: answer.split() == expected


def _number(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    expected = Decimal(str(check["expected"]))

    def is_solved(prompt: str, answer: str) -> bool:
        number = last_number(answer)
        return number is not None and number == expected

    return is_solved


def _regex(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    try:
        pattern = re.compile(check["pattern"])
    except (re.error, OverflowError, RecursionError) as err:
        raise CheckUnusable(f"the pattern is not valid ({err})") from err
    return lambda prompt, answer: pattern.search(answer) is not None


def _json_schema(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    try:
        import jsonschema  # type: ignore[import-untyped]  # it has no type information
        from referencing import Registry
    except ImportError as err:
        raise CheckUnusable(
            "checks of the kind `json_schema` need the package jsonschema: pip install jsonschema"
        ) from err
    schema = check["json_schema"]
    validator_class = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    try:
        validator_class.check_schema(schema)
    except jsonschema.SchemaError as err:
        raise CheckUnusable(f"the schema is not valid ({err.message[:200]})") from err
    # With an empty registry a $ref to some address is an error; the default would download it.
    validator = validator_class(schema, registry=Registry())

    def is_solved(prompt: str, answer: str) -> bool:
        try:
            data = _json_in(answer)
        except (ValueError, RecursionError):
            return False  # no JSON at all
        return bool(validator.is_valid(data))

    return is_solved


def _python(check: Mapping[str, Any]) -> Callable[[str, str], bool]:
    module_name, _, name = check["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as err:  # a module of the user's can raise anything
        raise CheckUnusable(f"{check['function']} cannot be imported ({_named(err)})") from err
    if not callable(function):
        raise CheckUnusable(f"{check['function']} is no function")

    def is_solved(prompt: str, answer: str) -> bool:
        found = function(prompt, answer)
        if not isinstance(found, bool):
            raise TypeError(f"the check must return True or False, not {type(found).__name__}")
        return found

    return is_solved


_PREPARE: dict[str, Callable[[Mapping[str, Any]], Callable[[str, str], bool]]] = {
    "exact": _exact,
    "number": _number,
    "regex": _regex,
    "json_schema": _json_schema,
    "python": _python,
}


def _json_in(answer: str) -> Any:
    """Parse the answer, or the one fenced block in it, as strict JSON."""
    blocks = _FENCE.findall(answer)
    text = blocks[0] if len(blocks) == 1 else answer
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _named(err: BaseException) -> str:
    return f"{type(err).__name__}: {err}"[:300]


def _reply(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        is_solved = prepare(job["check"])
    except CheckUnusable as err:
        return {"is_solved": False, "reason": str(err)}
    if "answer" not in job:
        return {"is_solved": False, "reason": None}
    try:
        return {"is_solved": is_solved(job["prompt"], job["answer"]), "reason": None}
    except Exception as err:  # noqa: BLE001 - a function of the user's can raise anything
        # The type alone: the message may quote the answer.
        return {"is_solved": False, "reason": type(err).__name__}


def main() -> None:
    """Serve until standard input closes."""
    # What the user's code prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, sys.argv[1])
    for line in sys.stdin.buffer:
        replies.write(json.dumps(_reply(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
