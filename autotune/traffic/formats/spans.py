"""OpenTelemetry spans of calls to a model, as OTLP JSON lines.

Attributes as in the GenAI semantic conventions, which are still in development: the current names,
and those of version 1.36 and before where instrumentations go on sending them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.traffic.formats.chat import content_text, messages_of
from autotune.traffic.formats.requests import sampling_of
from autotune.traffic.formats.values import (
    Record,
    RowError,
    list_of,
    mapping_of,
    name_of,
    time_of,
    tokens_of,
)
from autotune.traffic.rows import BadRow, Message, Row

_SIGNALS = ("resourceSpans", "resourceMetrics", "resourceLogs")
_TEXT_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})
_OLD_MESSAGE_EVENTS = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_NS = 1e-9
_MAX_DEPTH = 20


def is_otlp(record: Record) -> bool:
    return any(isinstance(record.get(signal), list) for signal in _SIGNALS)


def span_rows(number: int, record: Record) -> Iterator[Row | BadRow | None]:
    """Read the calls to a model out of one batch of spans; None stands for a span that is none."""
    if not is_otlp(record):
        raise RowError("each line must have `resourceSpans`")
    for span in _spans(record):
        attributes = _attributes(span)
        if not _asks_for_text(attributes):
            yield None
            continue
        try:
            yield _row(number, span, attributes)
        except RowError as err:
            yield BadRow(number, str(err))


def _spans(record: Record) -> Iterator[Record]:
    for resource in list_of(record, "resourceSpans"):
        for scope in _objects(resource, "scopeSpans"):
            yield from _objects(scope, "spans")


def _objects(parent: object, key: str) -> Iterator[Record]:
    if isinstance(parent, Mapping):
        yield from (child for child in list_of(parent, key) if isinstance(child, Mapping))


def _asks_for_text(attributes: Record) -> bool:
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return isinstance(operation, str) and operation in _TEXT_OPERATIONS
    return "gen_ai.request.model" in attributes


def _row(number: int, span: Record, attributes: Record) -> Row:
    start_s = time_of(span, "startTimeUnixNano", seconds_per_unit=_NS)
    end_s = time_of(span, "endTimeUnixNano", seconds_per_unit=_NS)
    messages = _messages(span, attributes)
    usage = "gen_ai.usage"
    row = Row(
        number,
        time_s=start_s,
        duration_s=_time_between(start_s, end_s),
        conversation=name_of(attributes, "gen_ai.conversation.id"),
        class_name=name_of(attributes, "gen_ai.request.model"),
        messages=messages,
        num_input_tokens=tokens_of(attributes, f"{usage}.input_tokens", f"{usage}.prompt_tokens"),
        num_output_tokens=tokens_of(
            attributes, f"{usage}.output_tokens", f"{usage}.completion_tokens"
        ),
        max_tokens=tokens_of(attributes, "gen_ai.request.max_tokens") or None,
        sampling=sampling_of(_without_prefix(attributes, "gen_ai.request.")),
    )
    if messages is None and not row.num_input_tokens:
        raise RowError("the span has neither messages nor a number of input tokens")
    return row


def _time_between(start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None or end_s < start_s:
        return None  # a span that never ended, or two clocks
    return end_s - start_s


def _messages(span: Record, attributes: Record) -> tuple[Message, ...] | None:
    instructions = content_text(_parsed(attributes.get("gen_ai.system_instructions")))
    system: tuple[Message, ...] = (("system", instructions),) if instructions else ()
    given = _parsed(attributes.get("gen_ai.input.messages"))
    if given is None:
        given = _old_messages(span, attributes)
    if given is None:
        return None
    return (*system, *messages_of(given))


def _old_messages(span: Record, attributes: Record) -> object:
    """Find messages where older conventions put them: in an attribute, or in events."""
    if "gen_ai.prompt" in attributes:
        return _prompt_messages(attributes["gen_ai.prompt"])
    found = []
    for event in _objects(span, "events"):
        own = _attributes(event)
        if event.get("name") == "gen_ai.content.prompt" and "gen_ai.prompt" in own:
            return _prompt_messages(own["gen_ai.prompt"])
        role = _OLD_MESSAGE_EVENTS.get(str(event.get("name")))
        if role is not None and own.get("content") is not None:
            found.append({"role": role, "content": own["content"]})
    return found or None


def _prompt_messages(prompt: object) -> object:
    parsed = _parsed(prompt)
    return [{"role": "user", "content": parsed}] if isinstance(parsed, str) else parsed


def _without_prefix(attributes: Record, prefix: str) -> Record:
    return {
        key.removeprefix(prefix): value
        for key, value in attributes.items()
        if key.startswith(prefix)
    }


def _parsed(value: object) -> object:
    """Return what an attribute holds; structures are often sent as JSON in text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _attributes(span: Record) -> dict[str, Any]:
    return {
        pair["key"]: _any_value(mapping_of(pair, "value"))
        for pair in _objects(span, "attributes")
        if isinstance(pair.get("key"), str)
    }


def _any_value(value: Record, depth: int = 0) -> Any:
    """Unwrap OTLP's AnyValue, whose whole numbers stand as text."""
    if depth > _MAX_DEPTH:
        raise RowError("an attribute is nested too deeply")
    for kind in ("stringValue", "intValue", "doubleValue", "boolValue"):
        if kind in value:
            return value[kind]
    if "arrayValue" in value:
        items: Sequence[Any] = list_of(mapping_of(value, "arrayValue"), "values")
        return [_any_value(item, depth + 1) for item in items if isinstance(item, Mapping)]
    if "kvlistValue" in value:
        pairs = _objects(mapping_of(value, "kvlistValue"), "values")
        return {
            pair["key"]: _any_value(mapping_of(pair, "value"), depth + 1)
            for pair in pairs
            if isinstance(pair.get("key"), str)
        }
    return None
