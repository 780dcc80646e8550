"""Sets of questions and of conversations that people benchmark with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.traffic.formats.chat import content_text, role_of, single_prompt
from autotune.traffic.formats.values import Record, RowError, asked_text, checked_text, name_of
from autotune.traffic.rows import Row


def is_mt_bench(record: Record) -> bool:
    return "question_id" in record and isinstance(record.get("turns"), list)


def is_humaneval(record: Record) -> bool:
    return record.keys() >= {"task_id", "prompt"}


def is_gsm8k(record: Record) -> bool:
    return record.keys() >= {"question", "answer"} and "prompt" not in record


def is_sharegpt(record: Record) -> bool:
    return isinstance(record.get("conversations", record.get("conversation")), list)


def mt_bench_rows(number: int, record: Record) -> Iterator[Row]:
    """MT-Bench and Spec-Bench: what the user says turn by turn, in categories, without answers."""
    yield Row(number, turns=turns_of(record.get("turns")), class_name=name_of(record, "category"))


def humaneval_rows(number: int, record: Record) -> Iterator[Row]:
    """HumanEval: the beginning of a program."""
    yield Row(number, messages=single_prompt(asked_text(record, "prompt")))


def gsm8k_rows(number: int, record: Record) -> Iterator[Row]:
    """GSM8K: a question; its worked answer is no answer of a model."""
    yield Row(number, messages=single_prompt(asked_text(record, "question")))


def sharegpt_rows(number: int, record: Record) -> Iterator[Row]:
    """ShareGPT: a whole conversation. What the model says before the user's first turn is left out."""
    turns: list[str] = []
    answers: list[str | None] = []
    system = None
    said = record.get("conversations", record.get("conversation"))
    if not isinstance(said, list):
        raise RowError("`conversations` must be a list")
    for message in said:
        role, text = _said(message)
        if role == "user":
            if not text.strip():
                raise RowError("the prompt must not be empty")
            turns.append(text)
            answers.append(None)
        elif role == "assistant" and turns:
            answers[-1] = text if answers[-1] is None else f"{answers[-1]}\n{text}"
        elif role == "system":
            system = text
    if not turns:
        raise RowError("the user says nothing in it")
    yield Row(number, turns=tuple(turns), answers=tuple(answers), system=system or None)


def turns_of(value: object) -> tuple[str, ...]:
    """Read a list of what the user says, turn by turn.

    Raises:
        RowError: it is none, or a turn is empty.
    """
    if not isinstance(value, list) or not all(isinstance(turn, str) for turn in value):
        raise RowError("`turns` must be a list of texts")
    if not value or not all(turn.strip() for turn in value):
        raise RowError("the prompt must not be empty")
    return tuple(checked_text(turn) for turn in value)


def _said(message: object) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise RowError("each message of a conversation must be an object")
    role = role_of(message.get("from", message.get("role")))
    if role is None or role == "tool":
        raise RowError("a speaker is neither the user, the assistant nor the system")
    return role, content_text(message.get("value", message.get("content")))
