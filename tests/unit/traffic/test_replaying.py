"""Replayed traces: real text of the recorded lengths, at the recorded times."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.traffic.drawing import build_schedule
from autotune.traffic.loads import TraceLoad
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import PromptRealism, Schedule
from autotune.traffic.tokens import EstimatedTokens, TokenCounter
from autotune.traffic.trace import load_trace

ProfileOf = Callable[..., TrafficProfile]
Write = Callable[..., Path]

QUESTIONS = [{"prompt": f"question{i} a b c d"} for i in range(30)]  # 5 words each
TRACE = {"kind": "trace", "file": "trace.jsonl"}


def timed(*lengths: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
    """Make rows of a trace, one second apart, of these input and output lengths."""
    return [
        {"timestamp": number, "input_length": i, "output_length": o, **more}
        for number, (i, o) in enumerate(lengths)
    ]


def texts(schedule: Schedule) -> list[str]:
    return [request.prompt.text for request in schedule.requests]


# --- lengths without text ---


def test_real_text_is_fitted_to_the_recorded_lengths(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    write_rows(timed((40, 7), (6, 1), (5, 3), (3, 2), (900, 60)), "trace.jsonl")
    schedule = build_schedule(profile_of(TRACE), counter=words)
    assert [words.count(text) for text in texts(schedule)] == [40, 6, 5, 3, 900]
    assert [request.max_tokens for request in schedule.requests] == [7, 1, 3, 2, 60]
    assert [request.arrival_s for request in schedule.requests] == [0, 1, 2, 3, 4]
    assert schedule.prompt_realism is PromptRealism.PROXY
    assert schedule.concurrency is None
    # The question stands at the end, and each asks another one.
    assert [text.split()[-1] for text in texts(schedule)] == ["d", "d", "d", "b", "d"]
    assert len({request.prompt.prompt_id for request in schedule.requests}) == 5


def test_different_requests_begin_differently(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    write_rows(timed(*[(60, 5)] * 300), "trace.jsonl")
    profile = profile_of(TRACE, measure={"warmup": 40, "max_duration_s": 400})
    schedule = build_schedule(profile, counter=words)
    beginnings = {
        " ".join(r.prompt.text.split()[:2]) for r in (*schedule.warmup, *schedule.requests)
    }
    assert len(beginnings) == 340


def test_estimated_lengths_are_remarked_on(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows(QUESTIONS)
    write_rows(timed((40, 7)), "trace.jsonl")
    schedule = build_schedule(profile_of(TRACE))
    assert EstimatedTokens().count(texts(schedule)[0]) == 40
    assert "the model's tokenizer is not at hand, so prompt lengths are estimates" in (
        schedule.notes
    )


def test_the_warm_up_is_like_the_trace_and_shares_no_prompt(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    write_rows(timed(*[(50, 5)] * 10, *[(200, 9)] * 10), "trace.jsonl")
    schedule = build_schedule(profile_of(TRACE, measure={"warmup": 4}), counter=words)
    assert [words.count(r.prompt.text) for r in schedule.warmup] == [50, 50, 200, 200]
    assert [r.max_tokens for r in schedule.warmup] == [5, 5, 9, 9]
    assert {r.arrival_s for r in schedule.warmup} == {None}
    warm = {r.prompt.prompt_id for r in schedule.warmup}
    assert not warm & {r.prompt.prompt_id for r in schedule.requests}


def test_lengths_of_the_class_stand_in_where_the_trace_has_none(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    write_rows([{"timestamp": t, "prompt_tokens_count": 30, "text": ""} for t in range(3)], "x")
    rows = [{"session_id": f"{t}", "timestamp": 1000 * t, "input_length": 30} for t in range(3)]
    write_rows(rows, "trace.jsonl")
    lengths = {"input": {"dist": "fixed", "tokens": 99}, "output": {"dist": "fixed", "tokens": 8}}
    profile = profile_of({**TRACE, "format": "aiperf"}, {"lengths": lengths})
    schedule = build_schedule(profile, counter=words)
    assert [words.count(text) for text in texts(schedule)] == [30, 30, 30]  # the trace has these
    assert [r.max_tokens for r in schedule.requests] == [8, 8, 8]


def test_the_class_limits_answers_of_unknown_length(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    write_rows(QUESTIONS)
    write_rows([{"timestamp": 1000 * t, "input_length": 30} for t in range(3)], "trace.jsonl")
    for output, expected in (({"max_tokens": 77}, 77), ({"max_tokens": {"from": "data"}}, 512)):
        profile = profile_of({**TRACE, "format": "aiperf"}, {"output": output})
        assert {r.max_tokens for r in build_schedule(profile).requests} == {expected}


def test_absurd_lengths_are_cut(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows(QUESTIONS)
    write_rows(timed((30, 90_000_000)), "trace.jsonl")
    (request,) = build_schedule(profile_of(TRACE)).requests
    assert request.max_tokens == 1_000_000


# --- prefixes by ids ---


def shared(one: str, other: str) -> list[str]:
    """The words that two texts begin with in common."""
    pairs = zip(one.split(), other.split(), strict=False)
    found = []
    for a, b in pairs:
        if a != b:
            break
        found.append(a)
    return found


def test_prompts_share_text_as_far_as_their_ids_are_equal(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    # Mooncake's form: milliseconds, blocks of 512 tokens. 2,000 tokens are four blocks, the last
    # one in part; the question of 5 words takes the end.
    write_rows(QUESTIONS)
    ids = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 8, 4], [7, 2, 3, 4], [1, 2, 3, 4]]
    rows = [
        {"timestamp": 1000 * n, "input_length": 2000, "output_length": 5, "hash_ids": each}
        for n, each in enumerate(ids)
    ]
    write_rows(rows, "trace.jsonl")
    schedule = build_schedule(profile_of(TRACE), counter=words)
    first, *others = texts(schedule)
    assert {words.count(text) for text in texts(schedule)} == {2000}
    # Each block's text begins with words of its own: "(block 9)" and "(block 4)" have one in common.
    assert len(shared(first, others[0])) == 3 * 512 + 1
    assert len(shared(first, others[1])) == 2 * 512 + 1
    assert len(shared(first, others[2])) == 0 + 1
    assert len(shared(first, others[3])) == 2000 - 5  # all but the question


def test_equal_ids_are_equal_text_in_every_class(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    write_rows([{"prompt": f"other {i}"} for i in range(30)], "others.jsonl")
    rows = [
        {"timestamp": n, "input_length": 40, "output_length": 5, "hash_ids": [1, 2], "type": name}
        for n, name in enumerate("ab")
    ]
    write_rows(rows, "trace.jsonl")
    classes = [
        {"name": name, "prompts": {"file": file}}
        for name, file in (("a", "prompts.jsonl"), ("b", "others.jsonl"))
    ]
    schedule = build_schedule(
        profile_of({**TRACE, "format": "timed_trace"}, classes=classes), counter=words
    )
    assert [r.class_name for r in schedule.requests] == ["a", "b"]
    assert len(shared(*texts(schedule))) >= 32  # two blocks of 16


def test_a_row_with_too_few_ids_has_its_length_all_the_same(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    row = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1]}
    write_rows([row], "trace.jsonl")
    (request,) = build_schedule(profile_of(TRACE), counter=words).requests
    assert words.count(request.prompt.text) == 1500


# --- classes ---


def test_rows_go_to_the_class_of_their_name_and_the_others_by_weight(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    write_rows(QUESTIONS)
    # As an import names it: signs that a class may not have become dashes.
    named = [{**row, "type": "my code"} for row in timed(*[(9, 1)] * 10)]
    other = [
        {**row, "timestamp": 100 + row["timestamp"], "type": "unheard of"}
        for row in timed(*[(9, 1)] * 40)
    ]
    write_rows([*named, *other], "trace.jsonl")
    classes = [
        {"name": "chat", "weight": 3, "prompts": {"file": "prompts.jsonl"}},
        {"name": "my-code", "weight": 1, "prompts": {"file": "prompts.jsonl"}},
    ]
    schedule = build_schedule(profile_of(TRACE, classes=classes))
    assert all(request.class_name == "my-code" for request in schedule.requests[:10])
    # 40 others at 3 : 1.
    assert Counter(r.class_name for r in schedule.requests[10:]) == {"chat": 30, "my-code": 10}


# --- traces with text ---


def logged(time_s: float, text: str, **more: Any) -> dict[str, Any]:
    return {"timestamp": time_s, "model": "m", "messages": [{"role": "user", "content": text}],
            **more}  # fmt: skip


def test_a_trace_with_text_needs_no_prompts(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows(
        [logged(5.0, "one", max_tokens=9), logged(6.5, "two", usage={"completion_tokens": 4})],
        "trace.jsonl",
    )
    schedule = build_schedule(profile_of(TRACE, classes=[{"output": {"max_tokens": 33}}]))
    assert texts(schedule) == ["one", "two"]
    assert [r.arrival_s for r in schedule.requests] == [0.0, 1.5]
    assert [r.max_tokens for r in schedule.requests] == [9, 4]
    assert schedule.prompt_realism is PromptRealism.USER


def test_its_warm_up_begins_differently(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows([logged(float(i), f"text {i}") for i in range(3)], "trace.jsonl")
    profile = profile_of(TRACE, classes=[{}], measure={"warmup": 5})
    schedule = build_schedule(profile)
    warm = [request.prompt.text for request in schedule.warmup]
    assert len(set(warm)) == 5
    assert all(text.startswith("(warm-up ") for text in warm)
    warm_ids = {r.prompt.prompt_id for r in schedule.warmup}
    assert not warm_ids & {r.prompt.prompt_id for r in schedule.requests}


def test_a_trace_without_text_needs_prompts(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows(timed((9, 1)), "trace.jsonl")
    profile = profile_of(TRACE, classes=[{}])
    with pytest.raises(InputError) as caught:
        build_schedule(profile)
    assert str(caught.value) == (
        f"{profile.where}: classes[0].prompts: the key is required, since the trace has no text of "
        "its own. Give prompts of your own, or a built-in set."
    )


def test_one_row_without_text_is_enough_to_need_prompts(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    rows = [{"timestamp": 0, "text_input": "hi"}, {"timestamp": 1, "input_length": 9}]
    write_rows(rows, "trace.jsonl")
    load = {**TRACE, "format": "aiperf"}
    with pytest.raises(InputError, match="the trace has no text of its own"):
        build_schedule(profile_of(load, classes=[{}]))
    write_rows(QUESTIONS)
    schedule = build_schedule(profile_of(load))
    assert texts(schedule)[0] == "hi"
    assert schedule.prompt_realism is PromptRealism.PROXY


# --- conversations ---


def history(*said: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


CONVERSATION = [
    {"conversation_id": "x", "timestamp": 0.0, "model": "m", "messages": history("x1")},
    {"conversation_id": "y", "timestamp": 1.0, "model": "m", "messages": history("y1")},
    {"conversation_id": "x", "timestamp": 10.0, "model": "m", "duration_s": 3.0,
     "messages": history("x1", "ax", "x2")},
    {"conversation_id": "x", "timestamp": 30.0, "model": "m",
     "messages": history("x1", "ax", "x2", "bx", "x3")},
]  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_later_turns_wait_for_the_answer_before_them(
    profile_of: ProfileOf, write_rows: Write, scale: float
) -> None:
    # The second answer took 3 s: 30 - 10 - 3 = 17 s were waited after it. The first one's time is
    # not known, so the wait counts from its request.
    write_rows(CONVERSATION, "trace.jsonl")
    schedule = build_schedule(profile_of({**TRACE, "time_scale": scale}, classes=[{}]))
    found = [(r.conversation_id, r.turn, r.arrival_s, r.think_s) for r in schedule.requests]
    assert found == [
        (0, 0, 0.0, 0.0),
        (None, 0, 1.0 * scale, 0.0),
        (0, 1, None, 10.0 * scale),
        (0, 2, None, 17.0 * scale),
    ]
    assert [len(r.prompt.messages) for r in schedule.requests] == [1, 1, 3, 5]
    assert not any(r.is_live for r in schedule.requests)


def test_live_turns_of_a_trace_bring_their_own_words(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    write_rows(CONVERSATION, "trace.jsonl")
    schedule = build_schedule(profile_of(TRACE, classes=[{"turns": {"replay": "live"}}]))
    assert [r.is_live for r in schedule.requests] == [False, False, True, True]
    assert texts(schedule) == ["x1", "y1", "x2", "x3"]


def test_a_window_may_begin_within_a_conversation(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    write_rows(CONVERSATION, "trace.jsonl")
    load = {**TRACE, "window": {"start_s": 5, "duration_s": 60}}
    schedule = build_schedule(profile_of(load, classes=[{"turns": {"replay": "live"}}]))
    first, second = schedule.requests
    assert (first.turn, first.arrival_s, len(first.prompt.messages)) == (0, 5.0, 3)
    assert (second.turn, second.is_live, second.prompt.text) == (1, True, "x3")


def test_turns_without_text_begin_alike_and_are_of_one_class(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    write_rows(QUESTIONS)
    rows = [
        {"session_id": name, "timestamp": 1000 * t, "input_length": 20 + 30 * t}
        for t in range(4)
        for name in "abcdefgh"
    ]
    write_rows(rows, "trace.jsonl")
    classes = [{"name": name, "prompts": {"file": "prompts.jsonl"}} for name in ("one", "two")]
    schedule = build_schedule(
        profile_of({**TRACE, "format": "aiperf"}, classes=classes), counter=words
    )
    by_conversation: dict[int | None, list[Any]] = {}
    for request in schedule.requests:
        by_conversation.setdefault(request.conversation_id, []).append(request)
    assert len(by_conversation) == 8
    for turns in by_conversation.values():
        assert [turn.turn for turn in turns] == [0, 1, 2, 3]
        assert len({turn.class_name for turn in turns}) == 1
        for before, after in zip(turns, turns[1:], strict=False):
            context = words.count(before.prompt.text) - 5  # the question aside
            assert len(shared(before.prompt.text, after.prompt.text)) >= context
    firsts = Counter(turns[0].class_name for turns in by_conversation.values())
    assert firsts == {"one": 4, "two": 4}


def test_scripts_of_a_trace_are_sent_as_conversations(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    script = [{"text": "u1", "timestamp": 2000}, {"text": "u2", "delay": 4000}, {"text": "u3"}]
    write_rows([{"session_id": "s", "turns": script}], "trace.jsonl")
    load = {**TRACE, "format": "aiperf", "time_scale": 0.5}
    schedule = build_schedule(profile_of(load, classes=[{"turns": {"max": 2}}]))
    found = [(r.prompt.text, r.is_live, r.turn, r.arrival_s, r.think_s) for r in schedule.requests]
    assert found == [("u1", False, 0, 0.0, 0.0), ("u2", True, 1, None, 2.0)]
    assert len({r.conversation_id for r in schedule.requests} - {None}) == 1
    alone = build_schedule(profile_of(load, classes=[{}]))
    assert [(r.prompt.text, r.conversation_id) for r in alone.requests] == [("u1", None)]


def test_scripts_without_answers_are_not_recorded(
    profile_of: ProfileOf, write_rows: Write, tmp_path: Path
) -> None:
    script = [{"text": "u1", "timestamp": 2000}, {"text": "u2"}]
    write_rows([{"session_id": "s", "turns": script}], "trace.jsonl")
    classes = [{"turns": {"replay": "recorded"}}]
    with pytest.raises(InputError) as caught:
        build_schedule(profile_of({**TRACE, "format": "aiperf"}, classes=classes))
    assert str(caught.value) == (
        f"{tmp_path / 'trace.jsonl'}:1: `replay: recorded` needs an answer between two turns; "
        "use `replay: live`."
    )


# --- the rest ---


def test_a_trace_longer_than_a_measurement_is_refused(
    profile_of: ProfileOf, write_rows: Write
) -> None:
    write_rows(QUESTIONS)
    write_rows(timed(*[(9, 1)] * 200), "trace.jsonl")
    profile = profile_of(TRACE)
    with pytest.raises(InputError) as caught:
        build_schedule(profile)
    assert str(caught.value) == (
        f"{profile.where}: load.window: the replayed part of the trace takes 199 s, but "
        "measure.max_duration_s is 180. Give a shorter window, or raise max_duration_s."
    )


def test_one_trace_and_seed_give_one_schedule(profile_of: ProfileOf, write_rows: Write) -> None:
    write_rows(QUESTIONS)
    write_rows(timed(*[(30, 4)] * 20), "trace.jsonl")
    profile = profile_of({**TRACE, "jitter_s": 1}, {"prompts": {"file": "prompts.jsonl",
                                                               "holdout": 0.5}})  # fmt: skip
    digests = [build_schedule(profile, seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
    held = build_schedule(profile, 1, part=Part.HOLDOUT)
    assert held.digest != digests[0]
    assert [r.arrival_s for r in held.requests] == [
        r.arrival_s for r in build_schedule(profile, 1).requests
    ]


# --- public traces, where they are at hand ---


@pytest.fixture
def public_data() -> Path:
    root = Path(__file__).parents[3]
    folder = Path(os.environ.get("AUTOTUNE_SHARED_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the public traces are not here: set AUTOTUNE_SHARED_DATA to their folder")
    return folder


def test_a_public_trace_keeps_its_prefix_sharing(profile_of: ProfileOf, public_data: Path) -> None:
    """Blocks are repeated in the text exactly where their ids are; the ends hold the questions."""
    file = public_data / "mooncake_synthetic_trace.jsonl"
    load = {"kind": "trace", "file": str(file), "window": {"start_s": 600, "duration_s": 60}}
    profile = profile_of(load, {"prompts": {"builtin": "demo/chat"}})
    schedule = build_schedule(profile)
    assert isinstance(profile.load, TraceLoad)
    rows = [timed.row for timed in load_trace(profile.load, profile.folder, 0).rows]
    by_ids: list[bool] = []
    by_text: list[bool] = []
    seen: set[int | str] = set()
    for row, request in zip(rows, schedule.requests, strict=True):
        inner = row.prefix_ids[:-2]
        # 512 tokens at 4 characters, and a blank between two blocks.
        beginnings = [request.prompt.text[: 2049 * n - 1] for n in range(1, len(inner) + 1)]
        by_ids += [block in seen for block in inner]
        by_text += [beginning in seen for beginning in beginnings]
        seen.update(inner, beginnings)
    assert by_text == by_ids
    assert sum(by_ids) > 50
