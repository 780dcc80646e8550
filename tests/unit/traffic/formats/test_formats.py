"""Every format: what is told from its records, and which of them cannot be used.

All records are made up here; none is a row of a public data set.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.traffic.formats import FORMATS, RowReader, detect, read_rows
from autotune.traffic.rows import BadRow, Row

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.1234567,100,20
2024-05-10 00:00:01.6234567,300,5
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
10.5,s1,2.5,ChatGPT,100,20,120,Conversation log
14,s1,1,ChatGPT,150,30,180,Conversation log
15,,0.5,GPT-4,40,0,40,API log
16,,0.5,GPT-4,40,8,48,API log
"""


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def reader_of(folder: Path, name: str, content: str, **options: Any) -> RowReader:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return read_rows(path, **options)


def rows_of(
    folder: Path, content: str, expected_format: str, name: str = "log.jsonl"
) -> list[Row]:
    """Read a file whose format is to be found out, failing on a broken row."""
    reader = reader_of(folder, name, content)
    assert reader.format == expected_format == detect(folder / name)
    found = list(reader)
    assert [row for row in found if isinstance(row, BadRow)] == []
    return [row for row in found if isinstance(row, Row)]


def reason_of(folder: Path, record: object, format_name: str) -> str:
    """Return why a record cannot be used."""
    (row,) = reader_of(folder, "log.jsonl", lines(record), format=format_name)
    assert isinstance(row, BadRow)
    return row.reason


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


USER = (("user", "hi"),)


# --- traces ---


def test_azure(tmp_path: Path) -> None:
    first, second = rows_of(tmp_path, AZURE, "azure", "AzureLLM.csv")
    assert (first.number, first.num_input_tokens, first.num_output_tokens) == (2, 100, 20)
    assert first.time_s is not None
    assert second.time_s is not None
    assert second.time_s - first.time_s == pytest.approx(1.5)
    assert not first.has_text
    assert rows_of(tmp_path, AZURE, "azure", "trace.log")  # by its header, whatever its name


def test_azure_rows_with_images_are_not_text(tmp_path: Path) -> None:
    content = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01,0,9,9\n2025-01-01,2,9,9\n"
    )
    _, bad = reader_of(tmp_path, "a.csv", content)
    assert bad == BadRow(3, "not text: the request holds images")


def test_burstgpt(tmp_path: Path) -> None:
    first, second, failed, last = reader_of(tmp_path, "BurstGPT_1.csv", BURSTGPT)
    assert first == Row(
        2, time_s=10.5, duration_s=2.5, conversation="s1", class_name="Conversation log",
        num_input_tokens=100, num_output_tokens=20,
    )  # fmt: skip
    assert isinstance(second, Row)
    assert (second.conversation, second.turn) == ("s1", 1)
    assert failed == BadRow(4, "`Response tokens` is 0: a request that failed")
    assert isinstance(last, Row)
    assert last.conversation is None


def test_burstgpt_without_the_later_columns(tmp_path: Path) -> None:
    content = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,A,4,1,5,API log\n"
    )
    (row,) = rows_of(tmp_path, content, "burstgpt", "b.csv")
    assert (row.time_s, row.duration_s, row.conversation) == (5.0, None, None)


def test_mooncake(tmp_path: Path) -> None:
    record = {"timestamp": 27000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]}
    assert rows_of(tmp_path, lines(record), "mooncake") == [
        Row(1, time_s=27.0, num_input_tokens=1100, num_output_tokens=7, prefix_ids=(4, 5, 9))
    ]
    assert Row(1).prefix_block_tokens == 512


def test_timed_traces_count_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    record = {"timestamp": 2.5, "input_length": 33, "output_length": 7, "hash_ids": [1, 2, 3]}
    bailian = {**record, "chat_id": 5, "parent_chat_id": -1, "type": "text", "turn": 1}
    (row,) = rows_of(tmp_path, lines(bailian), "timed_trace")
    assert (row.time_s, row.prefix_block_tokens, row.class_name) == (2.5, 16, "text")
    without_ids = {"timestamp": 2.5, "input_length": 33, "output_length": 7}
    assert rows_of(tmp_path, lines(without_ids), "timed_trace") == [
        Row(1, time_s=2.5, num_input_tokens=33, num_output_tokens=7, prefix_block_tokens=16)
    ]
    assert rows_of(tmp_path, "input_length,output_length\n3,4\n", "timed_trace", "t.csv")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_length": -5}, "`input_length` must not be negative"),
        ({"input_length": 0}, "`input_length` is 0: a request that failed"),
        ({"output_length": None}, "`output_length` is missing"),
        ({"timestamp": -1}, "`timestamp` must not be negative"),
        ({"timestamp": float("nan")}, "`timestamp` must be a time: seconds, or ISO 8601"),
        ({"hash_ids": "no"}, "`hash_ids` must be a list of whole numbers"),
        ({"hash_ids": [1, True]}, "`hash_ids` must be a list of whole numbers"),
    ],
)
def test_broken_trace_rows(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    record = {"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    assert reason_of(tmp_path, {**record, **change}, "mooncake") == reason


# --- question sets and conversations ---


def test_sharegpt(tmp_path: Path) -> None:
    said = [("system", "be kind"), ("gpt", "Hello!"), ("human", "a"), ("gpt", "b"), ("human", "c")]
    record = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]}
    content = json.dumps([record, {"conversations": [{"role": "user", "content": "q"}]}], indent=1)
    first, second = rows_of(tmp_path, content, "sharegpt", "ShareGPT.json")
    assert first == Row(1, turns=("a", "c"), answers=("b", None), system="be kind")
    assert second == Row(2, turns=("q",), answers=(None,))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([], "the user says nothing in it"),
        ([{"from": "gpt", "value": "b"}], "the user says nothing in it"),
        ([{"from": "human", "value": " "}], "the prompt must not be empty"),
        ([{"from": "tool", "value": "x"}], "a speaker is neither"),
        ([{"from": "human", "value": 3}], "must be text or a list of parts"),
        (["hi"], "must be an object"),
        ("hi", "must be a list"),
    ],
)
def test_broken_conversations(tmp_path: Path, said: object, reason: str) -> None:
    assert reason in reason_of(tmp_path, {"conversations": said}, "sharegpt")


def test_mt_bench(tmp_path: Path) -> None:
    record = {
        "question_id": 1,
        "category": "writing",
        "turns": ["a", "b"],
        "reference": ["x", "y"],
    }
    assert rows_of(tmp_path, lines(record), "mt_bench") == [
        Row(1, turns=("a", "b"), class_name="writing")
    ]
    assert reason_of(tmp_path, {"question_id": 1, "turns": []}, "mt_bench") == (
        "the prompt must not be empty"
    )
    assert reason_of(tmp_path, {"question_id": 1, "turns": [1]}, "mt_bench") == (
        "`turns` must be a list of texts"
    )


def test_humaneval_and_gsm8k(tmp_path: Path) -> None:
    task = {"task_id": "T/0", "prompt": "def f():", "entry_point": "f", "test": "assert f()"}
    assert rows_of(tmp_path, lines(task), "humaneval") == [
        Row(1, messages=(("user", "def f():"),))
    ]
    question = {"question": "1 + 1?", "answer": "#### 2"}
    assert rows_of(tmp_path, lines(question), "gsm8k") == [Row(1, messages=(("user", "1 + 1?"),))]


# --- load generators ---


def test_vllm(tmp_path: Path) -> None:
    content = lines({"prompt": "hi", "output_tokens": 9}, {"prompt": "hi"})
    assert rows_of(tmp_path, content, "vllm") == [
        Row(1, messages=USER, num_output_tokens=9),
        Row(2, messages=USER),
    ]


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"text": "hi", "timestamp": 1500, "session_id": "s", "output_length": 9},
         Row(1, time_s=1.5, conversation="s", messages=USER, num_output_tokens=9)),
        ({"texts": ["one", {"name": "n", "contents": ["two"]}]},
         Row(1, messages=(("user", "one\ntwo"),))),
        ({"type": "multi_turn", "session_id": "s",
          "turns": [{"text": "a", "timestamp": 250, "output_length": 5}, {"text": "b", "delay": 500}]},
         Row(1, time_s=0.25, turns=("a", "b"), think_s=(None, 0.5), max_tokens=5)),
        ({"payload": {"messages": messages(*USER), "max_tokens": 9, "temperature": 0.5}, "timestamp": 10},
         Row(1, time_s=0.01, messages=USER, max_tokens=9, sampling={"temperature": 0.5})),
        ({"text_input": "hi", "output_length": 4}, Row(1, messages=USER, num_output_tokens=4)),
        ({"messages": messages(*USER), "output_length": 4, "timestamp": 2000},
         Row(1, time_s=2.0, messages=USER, num_output_tokens=4)),
        ({"input_length": 10, "hash_ids": [123]},
         Row(1, num_input_tokens=10, prefix_ids=(123,))),
        ({"text": "hi", "extra": {"temperature": 0.2}},
         Row(1, messages=USER, sampling={"temperature": 0.2})),
    ],
)  # fmt: skip
def test_aiperf(tmp_path: Path, record: object, row: Row) -> None:
    assert rows_of(tmp_path, lines(record), "aiperf") == [row]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "what is it?", "image": "x.png"}, "not text"),
        ({"texts": [3]}, "`texts` must be a list of texts"),
        ({"texts": "one"}, "`texts` must be a list"),
        ({"turns": [{"text": ""}]}, "the prompt must not be empty"),
        ({"turns": ["hi"]}, "`turns` must be a list of objects"),
        ({"turns": [{"text": "a", "timestamp": "soon"}]}, "must be a time"),
        ({"input_length": 0}, "`input_length` is 0"),
        ({}, "the prompt must not be empty"),
    ],
)
def test_broken_aiperf_rows(tmp_path: Path, record: object, reason: str) -> None:
    assert reason in reason_of(tmp_path, record, "aiperf")


def test_guidellm(tmp_path: Path) -> None:
    content = "instruction,system_prompt,prompt_tokens_count,output_tokens_count\nhi,be kind,7,9\n"
    assert rows_of(tmp_path, content, "guidellm", "data.csv") == [
        Row(
            2,
            messages=(("system", "be kind"), ("user", "hi")),
            num_input_tokens=7,
            num_output_tokens=9,
        )
    ]
    record = {"text": "hi", "input_tokens_count": 7, "completion_tokens_count": 9}
    assert rows_of(tmp_path, lines(record), "guidellm") == [
        Row(1, messages=USER, num_input_tokens=7, num_output_tokens=9)
    ]
    # A table with a text column, and nothing else that is known.
    assert rows_of(tmp_path, "id,context\n1,hi\n", "guidellm", "q.csv") == [Row(2, messages=USER)]


# --- requests to a server ---

BODY = {
    "model": "m", "messages": messages(*USER), "max_tokens": 64, "temperature": 0.7, "top_p": 0.9,
    "stream": True,
}  # fmt: skip
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
USAGE = {"prompt_tokens": 12, "completion_tokens": 34}


@pytest.mark.parametrize(
    "record",
    [
        {**BODY, "created": 1700000000, "usage": USAGE},
        {"request": BODY, "response": {"created": 1700000000, "usage": USAGE}},
        {"request": json.dumps(BODY), "response": json.dumps({"usage": USAGE}), "timestamp": 1700000000},
        {"body": BODY, "timestamp": "2023-11-14T22:13:20Z", "usage": USAGE},
        {"request": {"method": "POST", "body": BODY}, "response": {"status": 200, "body":
            {"created": 1700000000, "usage": USAGE}}},
        {"request": BODY, "response": {"usage": {"input_tokens": 12, "output_tokens": 34}},
         "created_at": 1700000000_000},
    ],
)  # fmt: skip
def test_openai_logs(tmp_path: Path, record: object) -> None:
    assert rows_of(tmp_path, lines(record), "openai") == [
        Row(1, time_s=1700000000.0, class_name="m", messages=USER, num_input_tokens=12,
            num_output_tokens=34, max_tokens=64, sampling=SAMPLING)
    ]  # fmt: skip


def test_openai_logs_of_the_other_endpoints(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, lines({"model": "m", "prompt": "hi", "max_tokens": 5}), "openai")
    assert row == Row(1, class_name="m", messages=USER, is_completion=True, max_tokens=5)
    responses = {
        "model": "m", "instructions": "be kind", "max_output_tokens": 5,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                  {"type": "item_reference", "id": "x"}],
    }  # fmt: skip
    (row,) = rows_of(tmp_path, lines(responses), "openai")
    assert row == Row(1, class_name="m", messages=(("system", "be kind"), *USER), max_tokens=5)


def test_openai_conversations(tmp_path: Path) -> None:
    content = lines(
        {**BODY, "conversation_id": "c", "duration_s": 2}, BODY, {**BODY, "conversation_id": "c"}
    )
    found = rows_of(tmp_path, content, "openai")
    assert [(row.conversation, row.turn) for row in found] == [("c", 0), (None, 0), ("c", 1)]
    assert found[0].duration_s == 2.0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"model": "m"}, 'must have "messages", "prompt" or "input"'),
        ({"model": "m", "prompt": [1, 2, 3]}, "token ids"),
        ({"model": "m", "prompt": ["a", "b"]}, "several prompts"),
        ({"model": "m", "prompt": ""}, "the prompt must not be empty"),
        ({"model": "text-embedding-x", "input": "a"}, "embeddings"),
        ({**BODY, "temperature": "hot"}, "`temperature` must be a number"),
        ({**BODY, "max_tokens": -1}, "`max_tokens` must not be negative"),
        ({"request": '{"model": '}, "`request` is no JSON object"),
        ({**BODY, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ],
)
def test_broken_requests(tmp_path: Path, record: object, reason: str) -> None:
    assert reason in reason_of(tmp_path, record, "openai")


def test_openai_batch(tmp_path: Path) -> None:
    record = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    assert rows_of(tmp_path, lines(record), "openai_batch") == [
        Row(1, class_name="m", messages=USER, max_tokens=64, sampling=SAMPLING)
    ]
    embeddings = {**record, "url": "/v1/embeddings", "body": {"model": "e", "input": "hi"}}
    assert reason_of(tmp_path, embeddings, "openai_batch") == (
        "not a request for text: its `url` is another endpoint"
    )


# --- OpenTelemetry ---


def attribute(key: str, value: object) -> dict[str, object]:
    kinds = {str: "stringValue", float: "doubleValue", bool: "boolValue"}
    if type(value) is int:
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {kinds[type(value)]: value}}


def span(attributes: dict[str, object], **more: object) -> dict[str, object]:
    pairs = [attribute(f"gen_ai.{key}", value) for key, value in attributes.items()]
    times = {"startTimeUnixNano": "1700000000500000000", "endTimeUnixNano": 1700000002000000000}
    return {"name": "chat m", "attributes": pairs, **times, **more}


def otlp(*spans: object) -> dict[str, object]:
    return {
        "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]
    }


CALL: dict[str, object] = {
    "operation.name": "chat", "request.model": "m", "request.temperature": 0.7,
    "request.max_tokens": 64, "usage.input_tokens": 12, "usage.output_tokens": 34,
    "conversation.id": "c",
}  # fmt: skip
SPAN_ROW = Row(
    1, time_s=1700000000.5, duration_s=1.5, conversation="c", class_name="m", num_input_tokens=12,
    num_output_tokens=34, max_tokens=64, sampling={"temperature": 0.7},
)  # fmt: skip


def test_spans_without_text(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, lines(otlp(span(CALL))), "otel")
    assert row == SPAN_ROW


INPUT = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]


@pytest.mark.parametrize(
    ("attributes", "more", "expected"),
    [
        ({"input.messages": json.dumps(INPUT)}, {}, USER),
        ({"input.messages": json.dumps(INPUT), "system_instructions":
            json.dumps([{"type": "text", "content": "be kind"}])}, {}, (("system", "be kind"), *USER)),
        ({"prompt": "hi"}, {}, USER),
        ({}, {"events": [{"name": "gen_ai.content.prompt", "attributes":
            [attribute("gen_ai.prompt", json.dumps(messages(*USER)))]}]}, USER),
        ({}, {"events": [{"name": "gen_ai.system.message", "attributes": [attribute("content", "be kind")]},
                         {"name": "gen_ai.user.message", "attributes": [attribute("content", "hi")]},
                         {"name": "gen_ai.choice", "attributes": []}]}, (("system", "be kind"), *USER)),
    ],
)  # fmt: skip
def test_spans_with_text(
    tmp_path: Path, attributes: dict[str, object], more: dict[str, object], expected: object
) -> None:
    (row,) = rows_of(tmp_path, lines(otlp(span({**CALL, **attributes}, **more))), "otel")
    assert row.messages == expected
    assert row.num_input_tokens == 12


def test_spans_with_structured_messages(tmp_path: Path) -> None:
    part = {"kvlistValue": {"values": [attribute("type", "text"), attribute("content", "hi")]}}
    parts = {"key": "parts", "value": {"arrayValue": {"values": [part]}}}
    message = {"kvlistValue": {"values": [attribute("role", "user"), parts]}}
    given = span(CALL)
    given["attributes"] = [
        *(attribute(f"gen_ai.{key}", value) for key, value in CALL.items()),
        {"key": "gen_ai.input.messages", "value": {"arrayValue": {"values": [message]}}},
    ]
    (row,) = rows_of(tmp_path, lines(otlp(given)), "otel")
    assert row.messages == USER


def test_older_names_of_attributes(tmp_path: Path) -> None:
    old = {"request.model": "m", "usage.prompt_tokens": 12, "usage.completion_tokens": 34}
    (row,) = rows_of(tmp_path, lines(otlp(span(old))), "otel")
    assert (row.num_input_tokens, row.num_output_tokens, row.class_name) == (12, 34, "m")


def test_spans_that_are_no_requests_are_counted(tmp_path: Path) -> None:
    others = [
        {"name": "GET /", "attributes": [attribute("http.method", "GET")]},
        span({**CALL, "operation.name": "embeddings"}),
        span(
            {**CALL, "operation.name": "invoke_agent"}
        ),  # its tokens are those of the calls inside
    ]
    content = lines(otlp(*others, span(CALL)), {"resourceMetrics": []}, otlp(span(CALL)))
    reader = reader_of(tmp_path, "otel.jsonl", content)
    assert [row.number for row in reader] == [1, 3]
    assert reader.num_other == 3


def test_a_broken_span_costs_only_itself(tmp_path: Path) -> None:
    wrong = span({**CALL, "usage.input_tokens": -3})
    empty = span({"request.model": "m"})
    first, second, third = reader_of(tmp_path, "o.jsonl", lines(otlp(wrong, empty, span(CALL))))
    assert first == BadRow(1, "`gen_ai.usage.input_tokens` must not be negative")
    assert second == BadRow(1, "the span has neither messages nor a number of input tokens")
    assert third == SPAN_ROW
    assert reason_of(tmp_path, {"spans": []}, "otel") == "each line must have `resourceSpans`"


def test_a_span_that_never_ended_has_no_duration(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, lines(otlp(span(CALL, endTimeUnixNano="0"))), "otel")
    assert row.duration_s is None


# --- anything else ---


def test_rows_of_no_format(tmp_path: Path) -> None:
    record = {
        "system": "be kind", "question": "hi", "category": "chat", "time": 3, "session_id": 7,
        "turn": 2, "num_input_tokens": 12, "output_length": 34,
    }  # fmt: skip
    assert rows_of(tmp_path, lines(record), "jsonl") == [
        Row(1, time_s=3.0, conversation="7", turn=2, class_name="chat",
            messages=(("system", "be kind"), *USER), num_input_tokens=12, num_output_tokens=34)
    ]  # fmt: skip
    assert rows_of(tmp_path, lines({"turns": ["a", "b"], "system": "s"}), "jsonl") == [
        Row(1, turns=("a", "b"), system="s")
    ]
    table = "time,prompt,category\n3,hi,chat\n"
    assert rows_of(tmp_path, table, "jsonl", "p.csv") == [
        Row(2, time_s=3.0, messages=USER, class_name="chat")
    ]
    assert rows_of(tmp_path, "  hi \n", "text", "p.txt") == [Row(1, messages=USER)]


def test_a_row_without_a_prompt_is_told_by_its_keys(tmp_path: Path) -> None:
    assert reason_of(tmp_path, {"b": 1, "a": 2}, "jsonl") == (
        'each row must have "prompt", "messages", "turns" or "question", but got [\'a\', \'b\']'
    )


def test_every_format_is_tested_here() -> None:
    """The formats that `rows_of` is called with in this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in FORMATS if f'"{name}"' not in source] == []
