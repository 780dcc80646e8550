"""Counting tokens, and the request that needs the most room."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest
from autotune.traffic.tokens import (
    TEMPLATE_TOKENS,
    TEMPLATE_TOKENS_PER_MESSAGE,
    EstimatedTokens,
    TokenCounter,
    longest_request,
    token_counter,
)


def request(number: int, text: str, max_tokens: int, **fields: object) -> ScheduledRequest:
    values = {
        "request_id": number,
        "class_name": f"class-{number}",
        "prompt": Prompt(f"p{number}", (("user", text),)),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "ignore_eos": False,
        "sampling_seed": number,
        "arrival_s": None,
        **fields,
    }
    return ScheduledRequest(**values)  # type: ignore[arg-type]  # fields by name


def schedule(*requests: ScheduledRequest, warmup: tuple[ScheduledRequest, ...] = ()) -> Schedule:
    return Schedule("chat", 1, requests, warmup, 60.0, 30.0)


def test_an_estimated_token_is_four_characters() -> None:
    counter = EstimatedTokens()
    assert [counter.count(text) for text in ("", "a", "abcd", "abcde")] == [0, 1, 1, 2]
    assert counter.cut("abcdefghij", 2) == "abcdefgh"


def test_the_longest_request_holds_prompt_and_answer(words: TokenCounter) -> None:
    found = longest_request(
        schedule(request(0, "a b c", 10), request(1, "a", 11), request(2, "a b", 9)), words
    )
    assert (found.class_name, found.min_tokens, found.is_exact) == ("class-0", 13, True)
    assert found.max_tokens == 13 + TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE


def test_the_warm_up_counts_as_well(words: TokenCounter) -> None:
    found = longest_request(schedule(request(0, "a", 5), warmup=(request(1, "a b", 5),)), words)
    assert found.class_name == "class-1"


def test_live_turns_bring_all_that_was_said_before(words: TokenCounter) -> None:
    # 3 + 10, then 2 + 10 on top of them, then 1 + 10: 13, 25, 36 tokens.
    turns = [
        request(number, text, 10, conversation_id=7, turn=number, is_live=number > 0)
        for number, text in enumerate(["a b c", "a b", "a"])
    ]
    found = longest_request(schedule(*turns), words)
    assert (found.class_name, found.min_tokens) == ("class-2", 36)


def test_recorded_turns_hold_their_history_already(words: TokenCounter) -> None:
    turns = [
        request(number, "a " * size, 10, conversation_id=7, turn=number)
        for number, size in enumerate([3, 20, 40])
    ]
    assert longest_request(schedule(*turns), words).min_tokens == 50


def test_without_the_tokenizer_a_byte_is_a_token() -> None:
    # "ä" is two bytes.
    found = longest_request(schedule(request(0, "äa", 10)), EstimatedTokens())
    assert (found.min_tokens, found.is_exact) == (13, False)


# --- the model's own tokenizer ---


def test_without_a_model_tokens_are_estimated(tmp_path: Path) -> None:
    assert not token_counter(None).is_exact
    assert not token_counter(tmp_path).is_exact


def test_a_tokenizer_counts_and_cuts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    counter = token_counter(tmp_path)
    assert counter.is_exact
    assert counter.count("one two  three") == 3
    assert counter.cut("one two  three", 2) == "one two"
    assert counter.cut("one two", 5) == "one two"
    assert counter.cut("one two", 0) == ""


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: is no tokenizer that can be read"):
        token_counter(tmp_path)
