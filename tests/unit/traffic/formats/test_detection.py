"""The format is told by extension, then by keys, unless it is named; and fields can be named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.traffic.formats import COLUMN_NAMES, FORMATS, describe_formats, detect, read_rows
from autotune.traffic.rows import BadRow, Row

ROOT = Path(__file__).parents[4]


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


PROMPT = '{"prompt": "hi"}\n'


def test_a_named_format_goes_before_what_the_file_looks_like(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", PROMPT)
    assert detect(path) == "jsonl"
    assert list(read_rows(path, "text")) == [Row(1, messages=(("user", PROMPT.strip()),))]
    path = written(tmp_path, "p.txt", PROMPT)
    assert detect(path) == "text"
    assert list(read_rows(path, "jsonl")) == [Row(1, messages=(("user", "hi"),))]


def test_the_keys_of_most_of_the_first_records_decide(tmp_path: Path) -> None:
    odd = '{"prompt": "x", "task_id": 1}\n'
    assert detect(written(tmp_path, "p.jsonl", odd + PROMPT * 2)) == "jsonl"
    assert detect(written(tmp_path, "p.jsonl", "broken\n" * 30 + PROMPT)) == "jsonl"
    # More records than are looked at do not matter.
    assert detect(written(tmp_path, "p.jsonl", odd * 20 + PROMPT * 50)) == "humaneval"


def test_an_unknown_format_is_told_with_what_is_known(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"b": 1, "a": 2}\n')
    with pytest.raises(InputError) as caught:
        detect(path)
    message = str(caught.value)
    assert message.startswith(
        f"{path}: the format is not known: the first record has the keys ['a', 'b']."
    )
    assert "--format" in message
    assert "--column NAME=FIELD" in message
    assert ", ".join(FORMATS) in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "notes.log",
            "just some words\nand more\n",
            "neither its name nor its first lines say so",
        ),
        ("a.csv", "red,green\n1,2\n", "no column has a name that a format knows"),
        ("a.log", "red,green\n1,2\n", "no column has a name that a format knows"),
    ],
)
def test_files_in_no_format(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        detect(written(tmp_path, name, content))
    assert "words" not in str(caught.value)


def test_an_unreadable_file_is_told_by_its_first_record(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", "one\ntwo\n")
    with pytest.raises(InputError) as caught:
        detect(path)
    assert str(caught.value).startswith(f"{path}:1: each line must be one JSON object")
    assert "no record among the first can be read" in str(caught.value)


def test_a_name_that_is_no_format_gets_a_suggestion(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", PROMPT)
    with pytest.raises(InputError, match=r"no format has this name, but got 'asure'.*'azure'"):
        read_rows(path, "asure")


def test_every_format_says_what_it_holds() -> None:
    assert list(describe_formats()) == list(FORMATS)
    assert all(len(holds) > 10 for holds in describe_formats().values())


def test_the_page_names_every_format() -> None:
    page = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} == set(FORMATS)


# --- the file's own names ---


def test_fields_can_be_named(tmp_path: Path) -> None:
    columns = {"timestamp": "arrived", "input_length": "n_in", "output_length": "n_out"}
    path = written(tmp_path, "t.csv", "arrived,n_in,n_out\n1.5,10,20\n")
    with pytest.raises(InputError, match="the format is not known"):
        detect(path)
    reader = read_rows(path, columns=columns)
    assert reader.format == "timed_trace"
    (row,) = reader
    assert row == Row(
        2, time_s=1.5, num_input_tokens=10, num_output_tokens=20, prefix_block_tokens=16
    )


@pytest.mark.parametrize(
    ("field", "value", "time_s"),
    [
        ("ts", 1500, 1500.0),
        ("ts[ms]", 1500, 1.5),
        ("ts[ms]", "1500", 1.5),
        ("ts[us]", 1500, 0.0015),
        ("ts[s]", 1500, 1500.0),
    ],
)
def test_a_time_can_have_a_unit(tmp_path: Path, field: str, value: object, time_s: float) -> None:
    record = {"prompt": "hi", "ts": value}
    path = written(tmp_path, "t.jsonl", json.dumps(record))
    (row,) = read_rows(path, columns={"timestamp": field})
    assert isinstance(row, Row)
    assert row.time_s == pytest.approx(time_s)


def test_a_field_may_lie_inside_others(tmp_path: Path) -> None:
    record = {"log": {"data": {"text": "hi"}}, "a.b": "chat", "prompt": "not this"}
    path = written(tmp_path, "t.jsonl", json.dumps(record))
    columns = {"prompt": "log.data.text", "category": "a.b"}
    assert list(read_rows(path, columns=columns)) == [
        Row(1, messages=(("user", "hi"),), class_name="chat")
    ]


def test_a_named_field_that_is_missing_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", '{"text": "a", "prompt": "x"}\n{"prompt": "y"}\n')
    first, second = read_rows(path, "jsonl", {"prompt": "text"})
    assert isinstance(first, Row)
    assert second == BadRow(2, "the prompt must not be empty")


def test_a_name_that_no_format_knows_gets_a_suggestion(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", PROMPT)
    with pytest.raises(InputError, match=r"--column: .*but got 'promt'\. Did you mean 'prompt'\?"):
        read_rows(path, columns={"promt": "x"})
    assert "timestamp" in COLUMN_NAMES
