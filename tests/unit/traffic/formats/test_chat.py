"""Chat messages as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.traffic.formats.chat import messages_of
from autotune.traffic.formats.values import RowError


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("hi")], [("user", "hi")]),
        ([{"role": "developer", "content": "be kind"}, user("hi")],
         [("system", "be kind"), ("user", "hi")]),
        # what the assistant said last is not part of what it is asked
        ([user("a"), {"role": "assistant", "content": "b"}], [("user", "a")]),
        ([user("a"), {"role": "assistant", "content": "b"}, user("c")],
         [("user", "a"), ("assistant", "b"), ("user", "c")]),
        # a list of parts
        ([user([{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"])],
         [("user", "one\ntwo\nthree")]),
        # OpenTelemetry's way
        ([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}], [("user", "hi")]),
        ([{"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"},
                                          {"type": "text", "content": "a"}]}, user("b")],
         [("assistant", "a"), ("user", "b")]),
        # tools: calls stand as JSON, results stay
        ([user("weather?"),
          {"role": "assistant", "content": None, "tool_calls": [
              {"id": "1", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}]},
          {"role": "tool", "tool_call_id": "1", "content": "rain"}],
         [("user", "weather?"),
          ("assistant", '{"name": "get", "arguments": {"city": "Rome"}}'),
          ("tool", "rain")]),
        ([user("x"), {"role": "tool", "content": ""}], [("user", "x"), ("tool", "")]),
        ([{"role": "assistant", "parts": [
              {"type": "tool_call", "id": "1", "name": "get", "arguments": {"city": "Rome"}}]},
          {"role": "tool", "parts": [{"type": "tool_call_response", "response": {"sky": "rain"}}]}],
         [("assistant", '{"name": "get", "arguments": {"city": "Rome"}}'),
          ("tool", '{"sky": "rain"}')]),
    ],
)  # fmt: skip
def test_messages(messages: list[Any], expected: list[tuple[str, str]]) -> None:
    assert list(messages_of(messages)) == expected


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "must be a list"),
        ([], "the prompt must not be empty"),
        ([user("  ")], "the prompt must not be empty"),
        ([user(None)], "the prompt must not be empty"),
        ([{"role": "system", "content": "be kind"}], "the prompt must not be empty"),
        (["hi"], "must be an object"),
        ([{"content": "hi"}], "known `role`"),
        ([{"role": "martian", "content": "hi"}], "known `role`"),
        ([{"role": ["user"], "content": "hi"}], "known `role`"),
        ([{"role": "user"}], "must have `content`"),
        ([user(3)], "must be text or a list of parts"),
        ([user([3])], "must be text or an object"),
        ([user([{"type": "image_url", "image_url": {"url": "data:..."}}])], "not text"),
        ([user([{"type": "text", "text": "what is it?"}, {"type": "input_audio"}])], "not text"),
        ([user([{"image": "x.png"}])], "not text"),
        ([{"role": "user", "parts": [{"type": "blob", "content": "AAAA"}]}], "not text"),
        ([user([{"type": "telepathy"}])], "not text: a message holds a part of an unknown kind"),
        ([user("\ud83d")], "half of a character"),
    ],
)
def test_messages_that_cannot_be_used(messages: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        messages_of(messages)
