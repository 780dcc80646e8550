"""Texts of a wanted length, made of real documents."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.traffic.fitting import (
    MAX_RECOUNTED_TOKENS,
    TextFitter,
    behind_context,
    random_words,
)
from autotune.traffic.tokens import EstimatedTokens, TokenCounter

DOCUMENTS = [f"doc{d} " + " ".join(f"word{d}.{i}" for i in range(3 + 5 * d)) for d in range(6)]
QUESTION = "what is asked at the very end ?"  # 8 words


@pytest.fixture
def fitter(words: TokenCounter) -> TextFitter:
    return TextFitter(DOCUMENTS, words, "seed")


@pytest.mark.parametrize("length", [9, 10, 40, 500, MAX_RECOUNTED_TOKENS + 1, 20_000])
def test_a_fitted_prompt_has_the_wanted_length_and_ends_with_its_question(
    fitter: TextFitter, words: TokenCounter, length: int
) -> None:
    text = fitter.around(QUESTION, length, "1")
    assert words.count(text) == length
    assert text.endswith(f"\n\n{QUESTION}")


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_length_below_the_question_cuts_it(fitter: TextFitter, length: int) -> None:
    assert fitter.around(QUESTION, length, "1") == " ".join(QUESTION.split()[:length])


def test_the_context_is_made_of_the_documents(fitter: TextFitter) -> None:
    known = {word for document in DOCUMENTS for word in document.split()}
    text = fitter.passage(400, "7")
    assert text.split()[0] == "(7)"
    assert set(text.split()[1:]) <= known


def test_different_keys_begin_differently() -> None:
    # Also with very few and very short documents, and far more keys than those.
    few = TextFitter(["a b", "c"], EstimatedTokens(), "seed")
    beginnings = {few.passage(100, f"{key}")[:16] for key in range(2000)}
    assert len(beginnings) == 2000


def test_different_keys_begin_with_different_documents(fitter: TextFitter) -> None:
    firsts = {fitter.passage(20, f"{key}").split()[1] for key in range(100)}
    assert firsts == {f"doc{d}" for d in range(6)}


def test_equal_keys_begin_alike_at_every_length(fitter: TextFitter) -> None:
    shorter, longer = fitter.passage(50, "3"), fitter.passage(200, "3")
    assert longer.startswith(shorter)


def test_the_seed_decides_what_follows_what(words: TokenCounter) -> None:
    texts = {TextFitter(DOCUMENTS, words, seed).passage(60, "3") for seed in "abcdef"}
    assert len(texts) > 1
    again = [TextFitter(DOCUMENTS, words, "a").passage(60, "3") for _ in range(2)]
    assert again[0] == again[1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(1, 300),
    st.text(max_size=40),
)
def test_estimated_lengths_are_met_as_well_as_they_can_be(
    documents: list[str], length: int, question: str
) -> None:
    counter = EstimatedTokens()
    text = TextFitter(documents, counter, "s").around(question, length, "1")
    # The blank line before the question is half a token, so a token may be missing or too many.
    if length >= counter.count(question) + 2:
        assert abs(counter.count(text) - length) <= 1
    else:
        assert counter.count(text) <= length


def test_a_whole_with_more_tokens_than_its_parts_is_made_to_fit() -> None:
    class Sticky(EstimatedTokens):
        """Every blank line costs three tokens more than its two characters say."""

        def count(self, text: str) -> int:
            return super().count(text) + 3 * text.count("\n\n")

    counter = Sticky()
    text = behind_context("q" * 40, 60, counter, lambda room: "c" * 4 * room)
    assert counter.count(text) == 60


def test_random_words_have_the_wanted_length(words: TokenCounter) -> None:
    assert words.count(random_words(25, words, random.Random(1))) == 25
