"""Files as they come: packed, marked, cut off, binary, monstrous."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.traffic.formats import csv_records, read_rows
from autotune.traffic.formats.source import MAX_RECORD_BYTES
from autotune.traffic.rows import BadRow, Row


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path: Path, **options: str) -> list[str]:
    """Return the prompts of a file, failing on a broken row."""
    found = []
    for row in read_rows(path, **options):
        assert isinstance(row, Row), row
        assert row.messages is not None
        found.append(row.messages[-1][1])
    return found


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        list(read_rows(path, **options))
    return str(caught.value)


ROWS = '{"prompt": "one"}\n{"prompt": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", ROWS),
        ("p.jsonl", ROWS.rstrip("\n")),  # no newline at the end
        ("p.jsonl", "\ufeff" + ROWS),  # a byte order mark
        ("p.jsonl", ROWS.replace("\n", "\r\n")),
        ("p.jsonl", "\n \n" + ROWS + "\n\n"),
        ("p.jsonl.gz", gzip.compress(ROWS.encode())),
        ("p.jsonl", gzip.compress(ROWS.encode())),  # packed, whatever it is called
        ("p.gz", gzip.compress(("\ufeff" + ROWS).encode())),
        ("p.jsonl.gz", gzip.compress(ROWS[:18].encode()) + gzip.compress(ROWS[18:].encode())),
        ("p.log", ROWS),
        ("p", ROWS),
        ("p.json", ROWS),
        ("p.json", '[{"prompt": "one"}, {"prompt": "two"}]'),
        ("p.json", '\ufeff  [\r\n{"prompt":\n"one"},{"prompt": "two"}]\n'),
        ("p.json", '{\n  "prompt": "one"\n}\n{\n  "prompt": "two"\n}\n'),
        ("p.csv", "prompt\none\ntwo\n"),
        ("p.csv", "id;prompt\r\n1;one\r\n2;two"),
        ("p.tsv", "id\tprompt\n1\tone\n2\ttwo\n"),
        ("p.txt", "one\r\n\r\n  two  "),
        ("P.TXT", "one\ntwo\n"),
    ],
)
def test_a_file_is_read_however_it_was_written(
    tmp_path: Path, name: str, content: str | bytes
) -> None:
    assert texts(written(tmp_path, name, content)) == ["one", "two"]


def test_rows_have_the_numbers_that_an_editor_shows(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "a"}\n\nbroken\n{"prompt": "b"}\n')
    assert [row.number for row in read_rows(path)] == [1, 3, 4]
    # A quoted field goes over lines 2 and 3.
    path = written(tmp_path, "p.csv", 'prompt,n\n"a\nb",1\nc,2\n')
    assert [row.number for row in read_rows(path)] == [2, 4]
    path = written(tmp_path, "p.json", '[{"prompt": "a"},\n\n7, {"prompt": "b"}]')
    reader = read_rows(path)
    assert [row.number for row in reader] == [1, 2, 3]
    assert reader.unit == "element"


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0bfour"
    assert texts(written(tmp_path, "p.txt", f"{text}\n")) == [text]
    rows = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    assert texts(written(tmp_path, "p.jsonl", rows)) == ["one\u2028two"]


def test_a_file_can_be_gone_through_twice(tmp_path: Path) -> None:
    reader = read_rows(written(tmp_path, "p.jsonl", ROWS))
    assert list(reader) == list(reader) != []


# --- what is refused as a whole ---


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", b"", "must hold at least one record, but is empty"),
        ("p.jsonl", b"\n \r\n\t\n", "must hold at least one record, but is empty"),
        ("p.jsonl", b"\xef\xbb\xbf", "must hold at least one record, but is empty"),
        ("p.jsonl.gz", gzip.compress(b""), "must hold at least one record, but is empty"),
        ("p.jsonl", b"\x7fELF\x02\x00\x00\x01", "must be text, but is binary"),
        ("p.jsonl", '{"prompt": "a"}'.encode("utf-16"), "must be UTF-8 text, but is UTF-16"),
        ("p.zip", b"PK\x03\x04rest", "is a zip archive"),
        ("p.parquet", b"PAR1rest", "is a Parquet file"),
        ("p.jsonl", b"\x28\xb5\x2f\xfdrest", "is a zstd archive"),
        ("p.db", b"SQLite format 3\x00", "is an SQLite database"),
        ("p.jsonl.gz", b"\x1f\x8b\x08\x00rest", "gzip data is damaged or cut off"),
        ("p.csv", b"prompt\n", "at least one record below its header"),
        ("p.csv", b",,\n1,2,3\n", "the first line must be a header"),
        ("p.txt", "café\n".encode("latin1"), "iconv -f latin1"),
    ],
)
def test_a_file_that_holds_no_records_is_refused(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    message = refusal(written(tmp_path, name, content), format="auto")
    assert message.startswith(f"{tmp_path / name}:")
    assert said in message


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nope.jsonl") == (
        f"{tmp_path / 'nope.jsonl'}: the file must exist. Check the path."
    )
    assert "must be a file" in refusal(tmp_path)
    assert "is no usable path" in refusal(Path("~nobody-has-this-name/log.csv"))
    with pytest.raises(InputError, match="the prompt file must exist"):
        read_rows(tmp_path / "nope.jsonl", what="prompt file")


# --- what costs single records ---


def test_packed_data_that_breaks_off_costs_only_the_rest(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{n} {n**40}"}) + "\n" for n in range(3_000))
    packed = gzip.compress(rows.encode())
    path = written(tmp_path, "p.jsonl.gz", packed[: len(packed) // 2])
    *good, last = read_rows(path)
    assert isinstance(last, BadRow)
    assert (
        last.reason == "cannot be read, nor can what follows: its gzip data is damaged or cut off"
    )
    # Half of the packed bytes hold about half of the rows; the last one read is cut.
    assert 1_000 < len(good) < 2_000
    assert all(isinstance(row, Row) for row in good)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "b"', "each line must be one JSON object"),
        (b"[1, 2]", "each line must be one JSON object"),
        (b'"text"', "each line must be one JSON object"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "a number has too many digits"),
        (b"[" * 100_000, "each line must be one JSON object (it is nested too deeply)"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        (b'{"prompt": "\x01"}', "each line must be one JSON object"),
    ],
)
def test_a_broken_line_costs_only_itself(tmp_path: Path, line: bytes, reason: str) -> None:
    path = written(tmp_path, "p.jsonl", b'{"prompt": "a"}\n' + line + b'\n{"prompt": "c"}\n')
    first, broken, third = read_rows(path)
    assert isinstance(first, Row)
    assert isinstance(broken, BadRow)
    assert isinstance(third, Row)
    assert broken.number == 2
    assert reason in broken.reason


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv", "p.txt", "p.jsonl.gz"])
def test_a_monstrous_record_is_passed_over(tmp_path: Path, name: str) -> None:
    monster = "x" * (MAX_RECORD_BYTES + 10)
    if name == "p.json":
        content = f'[{{"prompt": "a"}}, {{"prompt": "{monster}"}}, {{"prompt": "c"}}]'
    elif name == "p.csv":
        content = f"prompt\na\n{monster}\nc\n"
    elif name == "p.txt":
        content = f"a\n{monster}\nc\n"
    else:
        content = f'{{"prompt": "a"}}\n{{"prompt": "{monster}"}}\n{{"prompt": "c"}}\n'
    packed = gzip.compress(content.encode()) if name.endswith(".gz") else content
    rows = list(read_rows(written(tmp_path, name, packed)))
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert isinstance(rows[1], BadRow)
    assert rows[1].reason == "is larger than 16 MiB"


def test_a_quote_that_never_closes_costs_one_record_which_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_records, "MAX_RECORD_BYTES", 40)
    lines = [
        "n,prompt",
        "0,fine",
        '1,"open',
        *(f"{n},text" for n in range(2, 9)),
        '9,"open',
        "10,x",
    ]
    path = written(tmp_path, "p.csv", "\n".join(lines))
    # From `1,"open` on: 8 bytes, then 7 a line; the 6th line makes 43.
    assert [
        row.number if isinstance(row, Row) else (row.number, row.reason) for row in read_rows(path)
    ] == [
        2,
        (3, "is larger than 16 MiB (up to line 8: a quote may not be closed)"),
        9,
        10,
        (11, "is not CSV (up to line 12: a quote may not be closed)"),
    ]


def test_a_csv_row_of_another_width_is_broken(tmp_path: Path) -> None:
    path = written(tmp_path, "p.csv", "n,prompt\n1,a\n2\n3,b,c\n4,d\n")
    assert [row for row in read_rows(path) if isinstance(row, BadRow)] == [
        BadRow(3, "has 1 columns, but the header has 2"),
        BadRow(4, "has 3 columns, but the header has 2"),
    ]


def test_reasons_hold_no_text_of_the_file(tmp_path: Path) -> None:
    secret = "the-password-is-hunter2"
    lines = [
        '{"prompt": "fine"}',
        f'{{"prompt": "{secret}',
        f'{{"prompt": {{"a": "{secret}"}}}}',
        f'{{"messages": "{secret}"}}',
        f'{{"messages": [{{"role": "{secret}", "content": "{secret}"}}]}}',
        f'{{"turns": ["{secret}", 3]}}',
        f'{{"prompt": "x", "timestamp": "{secret}"}}',
        f'{{"prompt": "x", "category": {{"{secret}": 1}}}}',
    ]
    rows = list(read_rows(written(tmp_path, "p.jsonl", "\n".join(lines)), "jsonl"))
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert len(bad) == len(lines) - 1
    assert secret not in str(bad)
