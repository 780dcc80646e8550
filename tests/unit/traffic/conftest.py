"""What tests of traffic share: an exact counter of tokens, and profiles built from plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from autotune.traffic.profile import TrafficProfile, load_profile
from autotune.traffic.tokens import TokenCounter

ProfileOf = Callable[..., TrafficProfile]


class WordCounter:
    """A token is a word: easy to count by hand, and the sum of parts is the whole."""

    is_exact = True

    def count(self, text: str) -> int:
        return len(text.split())

    def cut(self, text: str, num_tokens: int) -> str:
        ends = [found.end() for found in re.finditer(r"\S+", text)]
        return text[: ends[num_tokens - 1]] if 0 < num_tokens <= len(ends) else text


@pytest.fixture
def words() -> TokenCounter:
    return WordCounter()


@pytest.fixture
def profile_of(tmp_path: Path) -> ProfileOf:
    """Give a function that writes a profile into the test's folder and loads it.

    Its only class has the prompts of `prompts.jsonl`, which `write_rows` makes, unless `classes`
    says otherwise; `extra` goes into that class.
    """

    def build(
        load: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **rest: Any
    ) -> TrafficProfile:
        data = {
            "version": 1,
            "name": "test",
            "load": load or {"kind": "concurrency", "concurrency": 2},
            "classes": [{"prompts": {"file": "prompts.jsonl"}, **(extra or {})}],
            **rest,
        }
        path = tmp_path / "traffic.yaml"
        path.write_text(json.dumps(data), encoding="utf-8")  # JSON is YAML, too
        return load_profile(path)

    return build


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Give a function that writes JSON lines into the test's folder."""

    def write(rows: Iterable[dict[str, Any]], name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
