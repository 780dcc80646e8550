"""One JSON text is cut where a JSON parser would cut it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.traffic.formats import json_values
from autotune.traffic.formats.json_values import numbered_values

json_texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ['"', "\\", '\\"', "],[", "{}", "\\\\"]
)
any_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | json_texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(json_texts, inner, max_size=4),
    max_leaves=12,
)


class SmallReads(io.BytesIO):
    """A stream that hands out a few bytes at a time, so that everything is cut anywhere."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._size)


def cut(text: str, size: int = 1000) -> list[Any]:
    parts = [part for _, part in numbered_values(SmallReads(text.encode(), size))]
    return [json.loads(part or b"") for part in parts]


@given(
    values=st.lists(any_json, max_size=6),
    size=st.integers(1, 9),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
)
def test_an_array_is_cut_into_its_elements(
    values: list[Any], size: int, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii)
    assert cut(text, size) == values


@given(
    values=st.lists(st.dictionaries(json_texts, any_json, max_size=3), max_size=4),
    size=st.integers(1, 9),
)
def test_objects_one_after_the_other_are_cut(values: list[Any], size: int) -> None:
    assert cut("\n".join(json.dumps(value, indent=1) for value in values), size) == values


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[1, 2", [b"1", b"2"]),  # cut off: the last is told, and whoever parses it decides
        ('[{"a": 1}, {"b": ', [b'{"a": 1}', b'{"b": ']),
        ("[1,,2,]", [b"1", b"", b"2"]),
        ("[]", []),
        ("  [ ]  ", []),
        ("[1] 2 x", [b"1", b"2 x"]),
        ('["\\', [b'"\\']),
        ("", []),
        (" \n ", []),
    ],
)
def test_broken_arrays(text: str, parts: list[bytes]) -> None:
    assert [part for _, part in numbered_values(io.BytesIO(text.encode()))] == parts


def test_elements_are_numbered_and_the_large_ones_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_values, "MAX_RECORD_BYTES", 5)
    stream = SmallReads(b'["abc", "abcd", ["\\"", "]"], 1]', 2)
    assert list(numbered_values(stream)) == [(1, b'"abc"'), (2, None), (3, None), (4, b"1")]
