"""Strict reading of files that people write by hand: YAML in, checked pydantic models out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from autotune.errors import InputError, invalid, suggestion
from autotune.paths import user_path

MAX_YAML_BYTES = 1_048_576
MAX_ERRORS_SHOWN = 5
MAX_YAML_DEPTH = 50


class StrictModel(BaseModel):
    """A record whose unknown keys are errors and whose values cannot change afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


ModelT = TypeVar("ModelT", bound=BaseModel)

_TAG_KEYS = ("kind", "dist")
"""Keys that say which model of a union is meant."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys, aliases and absurd nesting.

    Aliases are refused because a few hundred bytes of them expand to gigabytes, and because no
    file that Autotune reads needs them.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it untyped
            raise yaml.MarkedYAMLError(
                problem="aliases are not allowed", problem_mark=event.start_mark
            )
        self.depth += 1
        if self.depth > MAX_YAML_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # as above
            raise yaml.MarkedYAMLError(
                problem=f"nesting deeper than {MAX_YAML_DEPTH} levels", problem_mark=mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_text(path: Path, what: str, max_bytes: int = MAX_YAML_BYTES) -> str:
    """Read a UTF-8 text file, with one clear message for everything that can be wrong with it."""
    path = user_path(path, f"the {what}")
    if not path.exists():
        raise invalid(f"the {what} must exist", where=path, next_step="Check the path.")
    if not path.is_file():
        raise invalid(f"the {what} must be a file", where=path, next_step="Check the path.")
    try:
        if path.stat().st_size > max_bytes:
            raise invalid(
                f"the {what} must be at most {max_bytes:,} bytes",
                where=path,
                got=path.stat().st_size,
            )
        return path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as err:
        raise invalid(
            f"the {what} must be UTF-8 text, but byte {err.start} is not",
            where=path,
            next_step="Convert it, for example: iconv -f latin1 -t utf-8.",
        ) from err
    except OSError as err:
        raise invalid(f"the {what} cannot be read ({err.strerror})", where=path) from err


def load_yaml(path: Path, what: str) -> dict[str, Any]:
    """Load a YAML mapping from `path`; `what` names the file's role in messages."""
    text = read_text(path, what)
    try:
        # _StrictLoader derives from SafeLoader: no tag can build anything but plain data.
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise invalid(
            f"the {what} is not valid YAML: {err.problem or err.context}", where=place
        ) from err
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as err:
        # The last two: PyYAML's constructors on an explicit tag whose value does not fit it.
        raise invalid(f"the {what} is not valid YAML: {_first_line(err)}", where=path) from err
    if not isinstance(data, dict):
        raise invalid(
            f"the {what} must be a mapping of keys to values", where=path, got=type(data).__name__
        )
    bad_key = next((key for key in data if not isinstance(key, str)), None)
    if bad_key is not None:
        raise invalid("every key must be text", where=path, got=bad_key)
    return data


def validate(model: type[ModelT], data: object, where: object) -> ModelT:
    """Check `data` against `model`; every problem is told with its key path and value."""
    try:
        return model.model_validate(data)
    except ValidationError as err:
        details = _without_echoes(err.errors(include_url=False))
        lines = [_describe(model, detail, where) for detail in details[:MAX_ERRORS_SHOWN]]
        if len(details) > MAX_ERRORS_SHOWN:
            lines.append(f"... and {len(details) - MAX_ERRORS_SHOWN} more problems of this kind.")
        raise InputError("\n".join(lines)) from err


def _without_echoes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop "too few items" where the items are missing only because each has a problem of its own."""
    locations = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(loc[: len(detail["loc"])] == detail["loc"] != loc for loc in locations)
    ]


def _describe(model: type[BaseModel], detail: ErrorDetails, where: object) -> str:
    key_path = _dotted(_without_tags(model, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        hint = suggestion(name, _sibling_keys(model, detail["loc"]))
        return str(
            invalid(f"unknown key {name!r}", where=where, key_path=key_path, next_step=hint)
        )
    if detail["type"] == "missing":
        return str(invalid("the key is required", where=where, key_path=key_path))
    if detail["type"] == "union_tag_not_found":
        tag_key = detail["ctx"]["discriminator"].strip("'")
        return str(invalid(f"the key `{tag_key}` is required", where=where, key_path=key_path))
    message = detail["msg"].removeprefix("Value error, ")
    message = (message[0].lower() + message[1:]).replace("input should be", "must be")
    got = None if detail["type"] == "value_error" else detail["input"]
    return str(invalid(message, where=where, key_path=key_path, got=got))


def _without_tags(
    model: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[int | str, ...]:
    """Take out the parts that name a kind of a union, which stand in no file: `load.rate.rps`."""
    kept: list[int | str] = []
    current: list[Any] = [model]
    for part in location:
        tagged = [c for c in current if isinstance(part, str) and _has_tag(c, part)]
        if tagged and len(current) > 1:  # pydantic names the kind right after the union's key
            current = tagged
            continue
        kept.append(part)
        if isinstance(part, str):
            current = [
                found
                for candidate in current
                if part in candidate.model_fields
                for found in _models_in(candidate.model_fields[part].annotation)
            ]
    return tuple(kept)


def _dotted(location: tuple[int | str, ...]) -> str:
    """Write a pydantic location the way a person would: `classes[0].prompts.file`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def _sibling_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Find the keys that were allowed where an unknown one was found."""
    current: list[Any] = [model]
    for part in location[:-1]:
        following: list[Any] = []
        for candidate in current:
            fields = getattr(candidate, "model_fields", {})
            if part in fields:
                following.extend(_models_in(fields[part].annotation))
        if following:
            current = following
    keys = [name for candidate in current for name in getattr(candidate, "model_fields", {})]
    tag = location[-2] if len(location) > 1 else None
    tagged = [c for c in current if isinstance(tag, str) and _has_tag(c, tag)]
    if tagged:
        keys = [name for candidate in tagged for name in candidate.model_fields]
    return keys


def _models_in(annotation: Any) -> list[Any]:
    """Collect the pydantic models inside an annotation such as `list[A | B] | None`."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models_in(part)]


def _has_tag(model: Any, tag: str) -> bool:
    fields = [model.model_fields[key] for key in _TAG_KEYS if key in model.model_fields]
    return any(tag in get_args(field.annotation) for field in fields)


def _first_line(err: BaseException) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__
