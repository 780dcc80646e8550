"""Traces: when requests came and how long they were, without what they said."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.traffic.formats.values import (
    Record,
    RowError,
    duration_of,
    name_of,
    number_of,
    some_tokens_of,
    time_of,
)
from autotune.traffic.rows import Row

MOONCAKE_BLOCK_TOKENS = 512
"""Mooncake, "A KVCache-centric Disaggregated Architecture for LLM Serving": a hash id is 512 tokens."""

TIMED_BLOCK_TOKENS = 16
"""What `vllm bench serve` takes a hash id of a timed trace for, unless told otherwise."""

AZURE_KEYS = frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})
BURSTGPT_KEYS = frozenset({"Timestamp", "Request tokens", "Response tokens"})


def is_azure(record: Record) -> bool:
    return record.keys() >= AZURE_KEYS


def azure_rows(number: int, record: Record) -> Iterator[Row]:
    """Azure LLM inference traces of 2023 and 2024; those of 2025 with a column of images, too."""
    if number_of(record, "NumImages"):
        raise RowError("not text: the request holds images")
    yield Row(
        number,
        time_s=_time(time_of(record, "TIMESTAMP"), "TIMESTAMP"),
        num_input_tokens=some_tokens_of(record, "ContextTokens"),
        num_output_tokens=some_tokens_of(record, "GeneratedTokens"),
    )


def is_burstgpt(record: Record) -> bool:
    return record.keys() >= BURSTGPT_KEYS


def burstgpt_rows(number: int, record: Record) -> Iterator[Row]:
    """BurstGPT: its rows without response tokens are requests that failed."""
    yield Row(
        number,
        time_s=_time(time_of(record, "Timestamp", seconds_per_unit=1.0), "Timestamp"),
        duration_s=duration_of(record, "Elapsed time"),
        conversation=name_of(record, "Session ID"),
        class_name=name_of(record, "Log Type"),
        num_input_tokens=some_tokens_of(record, "Request tokens"),
        num_output_tokens=some_tokens_of(record, "Response tokens"),
    )


def is_mooncake(record: Record) -> bool:
    # `chat_id` stands in Alibaba's traces, which count seconds and blocks of 16 tokens.
    return (
        record.keys() >= {"timestamp", "input_length", "output_length", "hash_ids"}
        and "chat_id" not in record
    )


def mooncake_rows(number: int, record: Record) -> Iterator[Row]:
    """Mooncake: milliseconds, and ids of the prompt's blocks of 512 tokens."""
    yield _timed_row(number, record, 0.001, MOONCAKE_BLOCK_TOKENS)


def is_timed_trace(record: Record) -> bool:
    return record.keys() >= {"input_length", "output_length"}


def timed_rows(number: int, record: Record) -> Iterator[Row]:
    """A timed trace as `vllm bench serve` reads it: seconds, and ids of blocks of 16 tokens."""
    yield _timed_row(number, record, None, TIMED_BLOCK_TOKENS)


def prefix_ids_of(record: Record) -> tuple[int, ...]:
    """Return the ids of a prompt's blocks.

    Raises:
        RowError: they are no list of whole numbers.
    """
    ids = record.get("hash_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise RowError("`hash_ids` must be a list of whole numbers")
    return tuple(ids)


def _timed_row(number: int, record: Record, unit_s: float | None, block_tokens: int) -> Row:
    return Row(
        number,
        time_s=time_of(record, "timestamp", seconds_per_unit=unit_s),
        class_name=name_of(record, "type", "category"),
        num_input_tokens=some_tokens_of(record, "input_length"),
        num_output_tokens=some_tokens_of(record, "output_length"),
        prefix_ids=prefix_ids_of(record),
        prefix_block_tokens=block_tokens,
    )


def _time(time_s: float | None, name: str) -> float:
    if time_s is None:
        raise RowError(f"`{name}` is missing")
    return time_s
