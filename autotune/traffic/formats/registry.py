"""Every format by name: how to know it, and how a record of it becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autotune.errors import InputError, invalid, suggestion
from autotune.traffic.formats import generic, question_sets, requests, spans, tools, traces
from autotune.traffic.formats.records import Record
from autotune.traffic.rows import BadRow, Row


@dataclass(frozen=True)
class Format:
    """One way in which people write down requests."""

    name: str
    holds: str
    """For people: whose format it is, and what stands in it."""
    fits: Callable[[Record], bool]
    """Whether a record looks like one of this format, by its keys."""
    rows: Callable[[int, Record], Iterator[Row | BadRow | None]]
    """Reads one record with its number; None stands for a part that is no request. May raise
    `RowError`."""


_FORMATS = (
    Format("otel", "OpenTelemetry GenAI spans, OTLP JSON lines", spans.is_otlp, spans.span_rows),
    Format("openai_batch", "OpenAI batch file: custom_id, url, body",
           requests.is_batch, requests.batch_rows),
    Format("azure", "Azure LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens",
           traces.is_azure, traces.azure_rows),
    Format("burstgpt", "BurstGPT: Timestamp, Request tokens, Response tokens",
           traces.is_burstgpt, traces.burstgpt_rows),
    Format("mooncake", "Mooncake trace: timestamp (ms), input_length, output_length, hash_ids",
           traces.is_mooncake, traces.mooncake_rows),
    Format("sharegpt", "ShareGPT conversations: from, value",
           question_sets.is_sharegpt, question_sets.sharegpt_rows),
    Format("mt_bench", "MT-Bench and Spec-Bench questions: question_id, category, turns",
           question_sets.is_mt_bench, question_sets.mt_bench_rows),
    Format("humaneval", "HumanEval-style tasks: task_id, prompt",
           question_sets.is_humaneval, question_sets.humaneval_rows),
    Format("aiperf", "aiperf: single_turn, multi_turn, raw_payload, Mooncake with text",
           tools.is_aiperf, tools.aiperf_rows),
    Format("timed_trace", "vLLM timed trace: timestamp (s), input_length, output_length, hash_ids",
           traces.is_timed_trace, traces.timed_rows),
    Format("guidellm", "guidellm: a text column, prompt_tokens_count, output_tokens_count",
           tools.is_guidellm, tools.guidellm_rows),
    Format("gsm8k", "GSM8K-style questions: question, answer",
           question_sets.is_gsm8k, question_sets.gsm8k_rows),
    Format("openai", "requests to an OpenAI-style server: a body a line, bare or wrapped",
           requests.is_logged, requests.logged_rows),
    Format("vllm", "custom data set of vllm bench serve: prompt, output_tokens",
           tools.is_vllm, tools.vllm_rows),
    Format("jsonl", "anything else with prompt, messages, turns or question",
           generic.is_generic, generic.generic_rows),
    Format("text", "plain text, one prompt a line", lambda record: False, generic.text_rows),
)  # fmt: skip
"""In the order in which they are tried: what is told by more, or rarer, keys comes first."""

_BY_NAME = {known.name: known for known in _FORMATS}

FORMATS: tuple[str, ...] = tuple(_BY_NAME)
"""Names of the formats."""


def format_named(name: str, where: object) -> Format:
    """Return the format of this name.

    Raises:
        InputError: there is none.
    """
    if name not in _BY_NAME:
        raise invalid(
            "no format has this name", where=where, got=name, next_step=suggestion(name, FORMATS)
        )
    return _BY_NAME[name]


def describe_formats() -> Mapping[str, str]:
    """Return what each format holds, by name."""
    return {known.name: known.holds for known in _FORMATS}


def fitting(record: Record, *, is_csv: bool) -> Format | None:
    """Return the first format that a record looks like, None if none is known."""
    for known in _FORMATS:
        if known.fits(record):
            return known
    # A table of texts without counts is what guidellm takes, too.
    return _BY_NAME["guidellm"] if is_csv and tools.has_text_column(record) else None


def unknown_format(where: object, found: str) -> InputError:
    """Build the error for a file in no known format."""
    return invalid(
        f"the format is not known: {found}",
        where=where,
        next_step=(
            "Name it (--format, or `format:` in a profile), and say with --column NAME=FIELD what "
            f"the file calls its fields. Known formats: {', '.join(FORMATS)}."
        ),
    )
