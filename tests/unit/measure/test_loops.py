"""Loops are seen, honest repetition is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.measure.loops import (
    MAX_UNIT_CHARS,
    MIN_LOOP_CHARS,
    MIN_REPEATS,
    MIN_WORDLESS_CHARS,
    is_looping,
)

PROMPTS = Path(__file__).parents[3] / "autotune" / "demo" / "prompts"
SENTENCE = "I hope that this answers your question about the harbour. "
VARIED = "".join(f"Line {number} of a text that goes on. " for number in range(60))

STUCK = {
    "a word": "again " * 40,
    "a letter": "a" * 200,
    "a sentence": SENTENCE * 5,
    "a sentence after an honest beginning": VARIED + SENTENCE * 5,
    "cut in the middle of the unit": (SENTENCE * 5)[:-23],
    "a paragraph": "".join(f"Point {n} is made here once. " for n in range(14))[:400] * 4,
    "a list of one thing": "* Drink enough water.\n" * 12,
    "code": "    total = total + value\n" * 10,
    "a unit with short repetitions inside": ("tick tock " * 18 + "and then it struck one. ") * 4,
    "a unit with a long repetition inside": (VARIED[:160] + "But first: " + VARIED[:160]) * 4,
    "line ends": "The end." + "\n" * 200,
    "spaces": "x = 1" + " " * 300,
    "no spaces between words": "\u91cd\u8907" * 100,
    "dashes without end": "-" * 1000,
    "zeros without end": "0, " * 400,
}
HONEST = {
    "nothing": "",
    "a word": "Yes.",
    "a varied text": VARIED,
    "laughter": "That is funny: " + "ha " * 20,
    "a rule": "Title\n" + "-" * 120,
    "a table's head": "| a | b | c |\n|" + "---|" * 12,
    "a row of zeros": "weights = [" + "0.0, " * 64,
    "a matrix of zeros": "[" + "[" + "0, " * 15 + "0],\n " * 16,
    "a chorus": (SENTENCE * 3),
    "unrolled code": "    sum += *p++;\n" * 8,
    "a loop that it left": SENTENCE * 20 + "But enough of that: the harbour lies to the west.",
    "a numbered list": "".join(f"{n}. Drink enough water.\n" for n in range(1, 40)),
    "a repeated unit that is very long": VARIED * 5,
    "a table with similar rows": "".join(f"| item {n} | 0 | 0 | 0 |\n" for n in range(40)),
    "similar code": "".join(f"    out[{n}] = left[{n}] + right[{n}]\n" for n in range(40)),
}


@pytest.mark.parametrize("text", STUCK.values(), ids=STUCK.keys())
def test_a_loop_is_seen(text: str) -> None:
    assert is_looping(text)


@pytest.mark.parametrize("text", HONEST.values(), ids=HONEST.keys())
def test_honest_repetition_is_not_a_loop(text: str) -> None:
    assert not is_looping(text)


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in strings_in(item)]


def test_no_prompt_of_the_demo_is_a_loop_wherever_it_is_cut() -> None:
    texts = [
        text
        for path in sorted(PROMPTS.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        for text in strings_in(json.loads(line))
    ]
    assert len(texts) >= 40
    looping = [
        text[:end] for text in texts for end in range(len(text) + 1) if is_looping(text[:end])
    ]
    assert looping == []


# --- the thresholds, from both sides ---


def test_the_loop_must_be_long_enough() -> None:
    unit = "go on now "  # 10 characters: 20 times are the 200 that are needed
    assert 20 * len(unit) == MIN_LOOP_CHARS
    assert is_looping("." + unit * 20)
    assert not is_looping("." + (unit * 20)[1:])


def test_a_long_unit_must_come_often_enough() -> None:
    unit = SENTENCE * 2 + "Is there anything else? "  # 140 characters: four times, not three
    assert MIN_REPEATS == 4
    assert is_looping("." + unit * 4)
    assert not is_looping("." + (unit * 4)[1:])


def test_the_longest_unit_is_found_and_none_longer() -> None:
    assert MAX_UNIT_CHARS == 400
    longest = VARIED[:400]
    assert is_looping(longest * 4)
    assert not is_looping((longest + "!") * 6)


def test_units_without_letters_need_more() -> None:
    assert MIN_WORDLESS_CHARS == 1000
    assert not is_looping("." + "-=" * 499)
    assert is_looping("." + "-=" * 500)


@settings(deadline=None)
@given(
    unit=st.text(min_size=1, max_size=40).filter(lambda text: any(c.isalpha() for c in text)),
    before=st.text(max_size=300),
)
def test_any_unit_with_a_letter_can_loop(unit: str, before: str) -> None:
    # 200 characters and 4 times hold for units of up to 40 characters with 200 repeats.
    assert is_looping(before + unit * 200)


def test_the_time_does_not_grow_with_the_text() -> None:
    # Near misses everywhere: long runs of one letter, broken just before the length that counts.
    text = ("a" * (MIN_LOOP_CHARS - 1) + "b") * 50_000
    began = time.process_time()
    for end in range(len(text) - 1000, len(text)):
        is_looping(text[end - 100_000 : end])
    assert time.process_time() - began < 1.0
