"""Chat messages as clients send them, made plain: a role and its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.traffic.formats.values import Record, RowError, checked_text
from autotune.traffic.rows import Message

_ROLES = {
    "system": "system",
    "developer": "system",  # the newer name; chat templates know the older one
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
}
_ASKING = frozenset({"user", "tool"})
_NOT_TEXT = frozenset(
    {
        "image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video",
        "video_url", "input_video", "file", "input_file", "document", "blob", "uri",
    }
)  # fmt: skip
_NOT_SENT = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Parts that a chat template does not hand to the model again."""


def messages_of(value: object) -> tuple[Message, ...]:
    """Read a list of messages up to the last one that the model is to answer.

    A list of parts becomes their texts, line by line. Calls of tools stand as JSON where the text
    would be, since they are part of what the model reads. What the assistant said last is left out.

    Raises:
        RowError: it is no list of messages, asks nothing, or holds what is not text.
    """
    if not isinstance(value, list):
        raise RowError("`messages` must be a list")
    messages = [_message(item) for item in value]
    asking = [number for number, (role, _) in enumerate(messages) if role in _ASKING]
    last = messages[asking[-1]] if asking else ("user", "")
    if last[0] == "user" and not last[1].strip():  # a tool may well have returned nothing
        raise RowError("the prompt must not be empty")
    return tuple(messages[: asking[-1] + 1])


def role_of(name: object) -> str | None:
    """Return the role behind one of its names, None if it is unknown."""
    return _ROLES.get(name.lower()) if isinstance(name, str) else None


def content_text(content: object) -> str:
    """Return the text of a message's content: text, or a list of parts.

    Raises:
        RowError: a part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return checked_text(content)
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        raise RowError("`content` must be text or a list of parts")
    texts = [_part_text(part) for part in content]
    return "\n".join(text for text in texts if text is not None)


def _message(item: object) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("each of `messages` must be an object")
    role = role_of(item.get("role"))
    if role is None:
        raise RowError("each of `messages` must have a known `role`")
    if "content" not in item and "parts" not in item and "tool_calls" not in item:
        raise RowError("each of `messages` must have `content`")
    texts = [content_text(item.get("content")), content_text(item.get("parts"))]
    calls = item.get("tool_calls")
    if isinstance(calls, list):
        texts += [_call_text(call) for call in calls]
    return role, "\n".join(text for text in texts if text)


def _part_text(part: object) -> str | None:
    if isinstance(part, str):
        return checked_text(part)
    if not isinstance(part, Mapping):
        raise RowError("each part of `content` must be text or an object")
    kind = part.get("type")
    if kind in _NOT_SENT:
        return None
    for key in ("text", "content", "refusal"):
        if isinstance(part.get(key), str) and kind not in _NOT_TEXT:
            return checked_text(part[key])
    if kind in {"tool_call", "tool_use", "function_call"}:
        return _call_text(part)
    if kind in {"tool_call_response", "tool_result"}:
        return _result_text(part)
    if kind in _NOT_TEXT or any(key in _NOT_TEXT for key in part):
        raise RowError("not text: a message holds an image, audio, video or file")
    raise RowError("not text: a message holds a part of an unknown kind")


def _call_text(call: object) -> str:
    """Write a call of a tool the way most templates show it: its name and arguments as JSON."""
    outer: Record = call if isinstance(call, Mapping) else {}
    function = outer.get("function")
    inner: Record = function if isinstance(function, Mapping) else outer
    arguments = _parsed(inner.get("arguments", inner.get("input")))
    return _as_json({"name": inner.get("name"), "arguments": arguments})


def _result_text(part: Record) -> str:
    for key in ("response", "result", "content"):
        value = part.get(key)
        if value is not None:
            return checked_text(value) if isinstance(value, str) else _as_json(value)
    return ""


def _parsed(arguments: object) -> object:
    """Return arguments that were sent as JSON in text; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _as_json(value: Any) -> str:
    try:
        return checked_text(json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError) as err:
        raise RowError("a call of a tool is nested too deeply") from err


def single_prompt(text: str) -> tuple[Message, ...]:
    """Return the messages of a lone prompt."""
    return (("user", text),)


def joined(texts: Iterable[str]) -> str:
    """Join the parts of one prompt, line by line."""
    return "\n".join(texts)
