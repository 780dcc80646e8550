"""What is kept of a server's errors, and what is not."""

from __future__ import annotations

import json

import pytest

from autotune.measure.server_errors import MAX_CHARS, told

DETAILS = [
    {"type": "string_type", "loc": ["body", "prompt"], "msg": "not text", "input": "my secret"}
]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"error": DETAILS}),
        # As vLLM sends it: the repr of pydantic's list inside of a JSON string.
        json.dumps({"error": {"message": str(DETAILS), "code": 400}}),
        json.dumps({"error": {"message": json.dumps(DETAILS), "code": 400}}),
    ],
)
def test_what_is_quoted_of_the_request_is_left_out(body: str) -> None:
    kept = told(body)

    assert "secret" not in kept
    assert "not text" in kept


def test_other_errors_stay_as_they_are() -> None:
    text = '{"message": "maximum context length is 512 tokens, your input has 600"}'

    assert told(text) == text


def test_an_error_of_any_length_becomes_short() -> None:
    assert len(told("x" * 10_000)) == MAX_CHARS
