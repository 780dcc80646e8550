"""Request files of other load generators: aiperf, guidellm, and `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.traffic.formats.chat import joined, messages_of, single_prompt
from autotune.traffic.formats.requests import body_fields, sampling_of
from autotune.traffic.formats.traces import MOONCAKE_BLOCK_TOKENS, prefix_ids_of
from autotune.traffic.formats.values import (
    Record,
    RowError,
    asked_text,
    checked_text,
    list_of,
    mapping_of,
    name_of,
    number_of,
    some_tokens_of,
    time_of,
    tokens_of,
)
from autotune.traffic.rows import Message, Row

GUIDELLM_TEXT_NAMES = (
    "prompt", "instruction", "question", "input", "context", "content", "conversation", "turn",
    "text",
)  # fmt: skip
"""In the order in which guidellm looks for its text column."""

_GUIDELLM_INPUT_NAMES = ("prompt_tokens_count", "input_tokens_count")
_GUIDELLM_OUTPUT_NAMES = ("output_tokens_count", "completion_tokens_count")
_GUIDELLM_SYSTEM_NAMES = ("system_prompt", "system", "prefix")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def is_vllm(record: Record) -> bool:
    return record.keys() >= {"prompt", "output_tokens"}


def vllm_rows(number: int, record: Record) -> Iterator[Row]:
    """The custom data set of `vllm bench serve`."""
    yield Row(
        number,
        messages=single_prompt(asked_text(record, "prompt")),
        num_output_tokens=tokens_of(record, "output_tokens"),
    )


def is_guidellm(record: Record) -> bool:
    counts = (*_GUIDELLM_INPUT_NAMES, *_GUIDELLM_OUTPUT_NAMES)
    return has_text_column(record) and any(name in record for name in counts)


def has_text_column(record: Record) -> bool:
    return any(name in record for name in GUIDELLM_TEXT_NAMES)


def guidellm_rows(number: int, record: Record) -> Iterator[Row]:
    """guidellm: a text column that goes by one of many names, and columns of token counts."""
    system = asked_text(record, *_GUIDELLM_SYSTEM_NAMES) if _has_system(record) else None
    prompt = single_prompt(asked_text(record, *GUIDELLM_TEXT_NAMES))
    yield Row(
        number,
        time_s=time_of(record, "relative_timestamp", "timestamp"),
        messages=(("system", system), *prompt) if system else prompt,
        num_input_tokens=tokens_of(record, *_GUIDELLM_INPUT_NAMES),
        num_output_tokens=tokens_of(record, *_GUIDELLM_OUTPUT_NAMES),
    )


def _has_system(record: Record) -> bool:
    return any(record.get(name) for name in _GUIDELLM_SYSTEM_NAMES)


def is_aiperf(record: Record) -> bool:
    if any(key in record for key in ("text", "texts", "text_input")):
        return not is_guidellm(record)
    if isinstance(record.get("payload"), Mapping):
        return True
    turns = list_of(record, "turns")
    if turns and isinstance(turns[0], Mapping):
        return True
    if "input_length" in record and "hash_ids" in record:
        return "output_length" not in record
    own_keys = ("output_length", "message_mode", "delay")
    return "messages" in record and any(key in record for key in own_keys)


def aiperf_rows(number: int, record: Record) -> Iterator[Row]:
    """aiperf: single turns, conversations, request bodies, and its extended Mooncake traces."""
    if "turns" in record:
        yield _conversation(number, record)
        return
    if isinstance(record.get("payload"), Mapping):
        asked = body_fields(mapping_of(record, "payload"))
    else:
        asked = {
            "messages": _asked_messages(record),
            "sampling": sampling_of(mapping_of(record, "extra")),
        }
    yield Row(
        number,
        time_s=time_of(record, "timestamp", seconds_per_unit=0.001),
        conversation=name_of(record, "session_id"),
        num_input_tokens=tokens_of(record, "input_length"),
        num_output_tokens=tokens_of(record, "output_length") or None,
        prefix_ids=prefix_ids_of(record),
        prefix_block_tokens=MOONCAKE_BLOCK_TOKENS,
        **asked,
    )


def _asked_messages(record: Record) -> tuple[Message, ...] | None:
    if "messages" in record:
        return messages_of(record["messages"])
    if "text_input" in record:
        return single_prompt(asked_text(record, "text_input"))
    if "input_length" in record:
        some_tokens_of(record, "input_length")
        return None
    return single_prompt(_turn_text(record))


def _conversation(number: int, record: Record) -> Row:
    turns = list_of(record, "turns")
    if not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError("`turns` must be a list of objects")
    delays = [number_of(turn, "delay") for turn in turns]
    return Row(
        number,
        time_s=time_of(turns[0], "timestamp", seconds_per_unit=0.001),
        turns=tuple(_turn_text(turn) for turn in turns),
        think_s=tuple(None if d is None or d < 0 else d / 1000 for d in delays),
        max_tokens=tokens_of(turns[0], "output_length") or None,
        sampling=sampling_of(mapping_of(turns[0], "extra")),
    )


def _turn_text(turn: Record) -> str:
    if any(turn.get(name) for name in _MEDIA):
        raise RowError("not text: it holds an image, audio or video")
    texts = turn.get("texts")
    if texts is None:
        return asked_text(turn, "text")
    if not isinstance(texts, list):
        raise RowError("`texts` must be a list")
    return asked_text({"texts": joined(_flat_texts(texts))}, "texts")


def _flat_texts(texts: list[object]) -> Iterator[str]:
    """Texts are given as they are, or as objects with a name and a list of contents."""
    for text in texts:
        contents = list_of(text, "contents") if isinstance(text, Mapping) else [text]
        for content in contents:
            if not isinstance(content, str):
                raise RowError("`texts` must be a list of texts")
            yield checked_text(content)
