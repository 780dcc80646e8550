"""Whatever a file holds, a reader gives rows, broken rows, or one message; never another exception."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.traffic.formats import FORMATS, read_rows
from autotune.traffic.rows import BadRow, Row

NAMES = [
    "TIMESTAMP", "ContextTokens", "GeneratedTokens", "NumImages", "Timestamp", "Session ID",
    "Elapsed time", "Request tokens", "Response tokens", "Log Type", "timestamp", "input_length",
    "output_length", "hash_ids", "conversations", "from", "value", "role", "content", "parts",
    "question_id", "category", "turns", "task_id", "prompt", "question", "answer", "text", "texts",
    "contents", "delay", "payload", "text_input", "messages", "session_id", "extra", "output_tokens",
    "prompt_tokens_count", "instruction", "system", "model", "request", "response", "body", "input",
    "instructions", "usage", "created", "prompt_tokens", "max_tokens", "temperature", "custom_id",
    "url", "type", "tool_calls", "function", "arguments", "name", "resourceSpans", "scopeSpans",
    "spans", "attributes", "key", "stringValue", "intValue", "doubleValue", "arrayValue", "values",
    "kvlistValue", "startTimeUnixNano", "endTimeUnixNano", "events", "conversation_id", "turn",
    "duration_s", "chat_id", "image",
]  # fmt: skip
TEXTS = [
    "", " ", "hi", "user", "assistant", "tool", "human", "gpt", "text", "image_url", "tool_call", "-1",
    "nan", "1e400", "12", "2023-11-16 18:17:03.9799600", "99999999-01-01", "chat", "\ud800", "\u2028",
    "[1]", "{", '{"role": "user"}', '[{"role": "user", "content": "x"}]', "/v1/embeddings",
    "gen_ai.request.model", "gen_ai.input.messages", "gen_ai.operation.name", "gen_ai.usage.input_tokens",
    "gen_ai.user.message", "gen_ai.prompt", "gen_ai.system_instructions",
]  # fmt: skip
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS) | st.text(max_size=5)
    | st.sampled_from([10**30, -(10**400), 1e308, 2**63])
)  # fmt: skip
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=15,
)
records = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
json_files = st.lists(values | records, max_size=4).map(
    lambda rows: "\n".join(json.dumps(row) for row in rows).encode()
)
array_files = st.lists(values | records, max_size=4).map(lambda rows: json.dumps(rows).encode())
fields = st.sampled_from(TEXTS) | st.integers().map(str) | st.text(max_size=5)
csv_files = st.tuples(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=5),
    st.lists(st.lists(fields, max_size=5), max_size=4),
).map(
    lambda parts: "\n".join(",".join(row) for row in [parts[0], *parts[1]]).encode(
        "utf-8", "surrogatepass"
    )
)
damaged = st.tuples(
    json_files | csv_files | array_files, st.integers(0, 200), st.binary(max_size=4)
).map(lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :])
packed = st.tuples(json_files, st.integers(0, 200)).map(
    lambda parts: gzip.compress(parts[0])[: 12 + parts[1]]
)
contents = st.one_of(
    st.binary(max_size=80),
    json_files,
    array_files,
    csv_files,
    damaged,
    packed,
    st.just(b"\x1f\x8b"),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_all(path: Path, name: str) -> None:
    try:
        rows = list(read_rows(path, name))
    except InputError as err:
        message = str(err)
        assert message.startswith(str(path))
        assert "\n" not in message
        return
    for row in rows:
        assert isinstance(row, Row | BadRow)
        assert row.number >= 1
        if isinstance(row, BadRow):
            assert row.reason
            assert "\n" not in row.reason
            continue
        assert row.has_text or row.num_input_tokens
        assert row.time_s is None or row.time_s >= 0
        assert (row.num_input_tokens or 0) >= 0
        texts = [content for _, content in row.messages or ()] + list(row.turns)
        "".join([*texts, row.class_name or "", row.conversation or ""]).encode()  # can be sent
        if row.messages is not None:
            assert row.messages[-1][0] in {"user", "tool"}


@pytest.mark.parametrize("name", ["auto", *FORMATS])
@given(content=contents, suffix=st.sampled_from(["jsonl", "json", "csv", "txt", "log"]))
@settings(
    max_examples=40, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(content=b'{"prompt": 1' + b"0" * 5000 + b"}", suffix="jsonl")
@example(content=b'{"prompt":' + b"[" * 50_000, suffix="json")
@example(content=b'{"a": NaN, "prompt": "x", "timestamp": Infinity}', suffix="jsonl")
@example(content=b'prompt,b\n"a', suffix="csv")
@example(content=b"\xff" * 100, suffix="txt")
def test_any_file_is_read_or_refused(
    name: str, content: bytes, suffix: str, scratch: Path
) -> None:
    path = scratch / f"log.{suffix}"
    path.write_bytes(content)
    read_all(path, name)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "text"])
@given(record=records)
@settings(max_examples=60, deadline=2000)
def test_any_record_is_a_row_or_a_reason(name: str, record: dict[str, Any], scratch: Path) -> None:
    path = scratch / "log.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    read_all(path, name)
