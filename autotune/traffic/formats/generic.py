"""Rows without a format of anybody's: JSON lines with a prompt somewhere, or plain lines."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.traffic.formats.chat import messages_of, single_prompt
from autotune.traffic.formats.question_sets import turns_of
from autotune.traffic.formats.records import TEXT_KEY
from autotune.traffic.formats.requests import (
    CLASS_NAMES,
    CONVERSATION_NAMES,
    DURATION_NAMES,
    INPUT_TOKENS_NAMES,
    MAX_TOKENS_NAMES,
    OUTPUT_TOKENS_NAMES,
    TIME_NAMES,
    sampling_of,
)
from autotune.traffic.formats.values import (
    Record,
    RowError,
    asked_text,
    duration_of,
    name_of,
    shown_keys,
    text_of,
    time_of,
    tokens_of,
)
from autotune.traffic.rows import Message, Row

PROMPT_NAMES = ("messages", "turns", "prompt", "question")


def is_generic(record: Record) -> bool:
    return any(name in record for name in PROMPT_NAMES)


def generic_rows(number: int, record: Record) -> Iterator[Row]:
    """Read a row with messages, turns, a prompt or a question, and whatever else it says."""
    system = text_of(record, "system", "system_prompt")
    messages: tuple[Message, ...] | None = None
    turns: tuple[str, ...] = ()
    if "messages" in record:
        messages = messages_of(record["messages"])
    elif "turns" in record:
        turns = turns_of(record["turns"])
    elif is_generic(record):
        messages = single_prompt(asked_text(record, "prompt", "question"))
    else:
        raise RowError(
            'each row must have "prompt", "messages", "turns" or "question", '
            f"but got {shown_keys(record)}"
        )
    if messages is not None and system:
        messages = (("system", system), *messages)
    yield Row(
        number,
        time_s=time_of(record, *TIME_NAMES),
        duration_s=duration_of(record, *DURATION_NAMES),
        conversation=name_of(record, *CONVERSATION_NAMES),
        turn=tokens_of(record, "turn") or 0,
        class_name=name_of(record, *CLASS_NAMES),
        messages=messages,
        turns=turns,
        system=system if turns else None,
        num_input_tokens=tokens_of(record, *INPUT_TOKENS_NAMES),
        num_output_tokens=tokens_of(record, *OUTPUT_TOKENS_NAMES),
        max_tokens=tokens_of(record, *MAX_TOKENS_NAMES) or None,
        sampling=sampling_of(record),
    )


def text_rows(number: int, record: Record) -> Iterator[Row]:
    """Read a plain line: a prompt."""
    yield Row(number, messages=single_prompt(asked_text(record, TEXT_KEY)))
