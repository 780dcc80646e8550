"""The demo's prompts: readable, distinct, and of the kinds that the drafter was trained on."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

import autotune.demo

PROMPTS_DIR = Path(autotune.demo.__file__).parent / "prompts"
KINDS = ("chat", "code", "maths", "summarise")


def read_rows(kind: str) -> list[dict[str, str]]:
    text = (PROMPTS_DIR / f"{kind}.jsonl").read_bytes().decode("utf-8", errors="strict")
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


@pytest.fixture(scope="module")
def all_rows() -> list[dict[str, str]]:
    return [row for kind in KINDS for row in read_rows(kind)]


def test_there_is_one_file_for_each_kind() -> None:
    assert sorted(path.stem for path in PROMPTS_DIR.glob("*.jsonl")) == sorted(KINDS)


def test_there_are_enough_prompts_to_fill_a_measurement(all_rows: list[dict[str, str]]) -> None:
    assert len(all_rows) >= 60


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_has_an_id_of_its_kind_and_a_prompt(kind: str) -> None:
    for row in read_rows(kind):
        assert row.keys() == {"id", "prompt"}
        assert re.fullmatch(rf"{kind}-\d{{3}}", row["id"])


def test_ids_are_unique_across_files(all_rows: list[dict[str, str]]) -> None:
    assert len({row["id"] for row in all_rows}) == len(all_rows)


def test_no_prompt_is_another_one_in_disguise(all_rows: list[dict[str, str]]) -> None:
    # Repeated prompts would hit the prefix cache and be measured as if they were cheap.
    words = {row["id"]: set(re.findall(r"\w+", row["prompt"].lower())) for row in all_rows}
    for (id_a, a), (id_b, b) in itertools.combinations(words.items(), 2):
        assert len(a & b) / len(a | b) < 0.7, (id_a, id_b)


def test_prompts_are_neither_empty_nor_long(all_rows: list[dict[str, str]]) -> None:
    for row in all_rows:
        assert row["prompt"] == row["prompt"].strip()
        assert 20 <= len(row["prompt"]) < 1200, row["id"]


def test_summaries_ask_for_a_passage_of_60_to_150_words() -> None:
    for row in read_rows("summarise"):
        request, passage = row["prompt"].split("\n\n")
        assert request.startswith("Summarize the following passage")
        assert 60 <= len(passage.split()) <= 150, row["id"]
