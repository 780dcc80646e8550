"""Requests to an OpenAI-style server, as clients, gateways and batch files write them down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.traffic.formats.chat import content_text, messages_of, single_prompt
from autotune.traffic.formats.values import (
    Record,
    RowError,
    asked_text,
    checked_text,
    duration_of,
    list_of,
    mapping_of,
    name_of,
    number_of,
    time_of,
    tokens_of,
)
from autotune.traffic.rows import Message, Row

SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "max_output_tokens")
TIME_NAMES = ("timestamp", "time", "created", "created_at", "start_time", "ts")
CONVERSATION_NAMES = ("conversation_id", "session_id", "thread_id", "chat_id")
CLASS_NAMES = ("category", "class", "class_name")
INPUT_TOKENS_NAMES = (
    "input_tokens", "prompt_tokens", "num_input_tokens", "input_length",
    "input_tokens_count", "prompt_tokens_count",
)  # fmt: skip
OUTPUT_TOKENS_NAMES = (
    "output_tokens", "completion_tokens", "num_output_tokens", "output_length",
    "output_tokens_count", "completion_tokens_count",
)  # fmt: skip
DURATION_NAMES = ("duration_s", "latency_s", "elapsed_s")

_BODY_SIGNS = frozenset(
    {"model", "usage", "stream", *MAX_TOKENS_NAMES, *SAMPLING_NAMES, "created", "response"}
)


def is_logged(record: Record) -> bool:
    """Whether a record looks like a request body, wrapped or not."""
    for key in ("request", "body"):
        value = record.get(key)
        if isinstance(value, Mapping) or (isinstance(value, str) and value.startswith("{")):
            return True
    asks = any(key in record for key in ("messages", "prompt", "input"))
    return asks and not _BODY_SIGNS.isdisjoint(record)


def is_batch(record: Record) -> bool:
    """Whether a record is a line of a batch file: an id of the user's own, and a body."""
    return "custom_id" in record and isinstance(record.get("body"), Mapping)


def logged_rows(number: int, record: Record) -> Iterator[Row]:
    """Read one logged request: a body, or a wrapper around the body and perhaps the answer."""
    request = _object_of(record, "request")
    body = _object_of(request or record, "body") or request or record
    response = _object_of(record, "response")
    answer = _object_of(response, "body") or response
    usage = mapping_of(answer, "usage") or mapping_of(record, "usage")
    time_s = None
    for place in (record, request, answer):
        time_s = time_s if time_s is not None else time_of(place, *TIME_NAMES)
    yield Row(
        number,
        time_s=time_s,
        duration_s=duration_of(record, *DURATION_NAMES),
        conversation=name_of(record, *CONVERSATION_NAMES) or name_of(body, *CONVERSATION_NAMES),
        class_name=name_of(record, *CLASS_NAMES) or name_of(body, "model"),
        num_input_tokens=tokens_of(usage or record, *INPUT_TOKENS_NAMES),
        num_output_tokens=tokens_of(usage or record, *OUTPUT_TOKENS_NAMES),
        **body_fields(body),
    )


def batch_rows(number: int, record: Record) -> Iterator[Row]:
    """Read one line of a batch file."""
    url = record.get("url")
    if isinstance(url, str) and not url.rstrip("/").endswith(("completions", "responses")):
        raise RowError("not a request for text: its `url` is another endpoint")
    body = mapping_of(record, "body")
    yield Row(number, class_name=name_of(body, "model"), **body_fields(body))


def body_fields(body: Record) -> dict[str, Any]:
    """Return what a request body says, as fields of a `Row`.

    Raises:
        RowError: it asks nothing, or not by text alone.
    """
    messages, is_completion = _messages(body)
    return {
        "messages": messages,
        "is_completion": is_completion,
        "max_tokens": tokens_of(body, *MAX_TOKENS_NAMES) or None,
        "sampling": sampling_of(body),
    }


def sampling_of(body: Record) -> dict[str, float]:
    """Return the sampling parameters that a request gave."""
    given = {name: number_of(body, name) for name in SAMPLING_NAMES}
    return {name: value for name, value in given.items() if value is not None}


def _messages(body: Record) -> tuple[tuple[Message, ...], bool]:
    if "messages" in body:
        return messages_of(body["messages"]), False
    if "prompt" in body:
        return single_prompt(_prompt_text(body["prompt"])), True
    if "input" in body:
        return _responses_messages(body), False
    raise RowError('a request must have "messages", "prompt" or "input"')


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, list):
        if any(not isinstance(item, str) for item in prompt):
            raise RowError("not text: the prompt is given as token ids")
        if len(prompt) != 1:
            raise RowError("the request holds several prompts at once")
        prompt = prompt[0]
    return asked_text({"prompt": prompt}, "prompt")


def _responses_messages(body: Record) -> tuple[Message, ...]:
    """Read the input of the responses endpoint: text, or messages among other items."""
    if "embed" in str(body.get("model")).lower():
        raise RowError("not a request for text: it asks for embeddings")
    instructions = content_text(body.get("instructions"))
    system = (("system", instructions),) if instructions else ()
    if isinstance(body["input"], str):
        return (*system, *single_prompt(asked_text(body, "input")))
    items = [i for i in list_of(body, "input") if not isinstance(i, Mapping) or "role" in i]
    return (*system, *messages_of(items))


def _object_of(record: Record, key: str) -> Record:
    """Return the object under a key, also where a log holds it as JSON in text."""
    value = record.get(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(checked_text(value))
        except (ValueError, RecursionError) as err:
            raise RowError(f"`{key}` is no JSON object") from err
    return value if isinstance(value, Mapping) else {}
