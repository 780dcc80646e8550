"""What requests say: fitted lengths, shared prefixes, and how real all of it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.traffic import content as content_module
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import PromptRealism
from autotune.traffic.tokens import TokenCounter

ProfileOf = Callable[..., TrafficProfile]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _prompts(write_rows: Write) -> None:
    write_rows({"prompt": f"question{n} with four words"} for n in range(40))


# --- lengths ---


def test_fitted_prompts_have_the_wanted_lengths(
    profile_of: ProfileOf, words: TokenCounter
) -> None:
    lengths = {
        "input": {"dist": "lognormal", "p50": 60, "p95": 400, "max": 500},
        "output": {"dist": "fixed", "tokens": 12},
    }
    measure = {"min_requests": 400}
    schedule = build_schedule(
        profile_of(extra={"lengths": lengths}, measure=measure), counter=words
    )
    found = [words.count(request.prompt.text) for request in schedule.requests]
    assert sorted(found)[200] == pytest.approx(60, rel=0.25)
    assert max(found) == 500
    assert {request.max_tokens for request in schedule.requests} == {12}
    assert schedule.prompt_realism is PromptRealism.PROXY
    # No two begin alike, though each prompt is asked about a dozen times; short ones are questions
    # alone and cannot differ.
    long = [r.prompt.text for r in schedule.requests if words.count(r.prompt.text) > 8]
    assert len({tuple(text.split()[:2]) for text in long}) == len(long)


def test_lengths_of_the_prompt_alone_leave_the_answer_to_the_class(
    profile_of: ProfileOf, words: TokenCounter
) -> None:
    extra = {"lengths": {"input": {"dist": "fixed", "tokens": 30}}, "output": {"max_tokens": 77}}
    schedule = build_schedule(profile_of(extra=extra), counter=words)
    assert {words.count(r.prompt.text) for r in (*schedule.warmup, *schedule.requests)} == {30}
    assert {request.max_tokens for request in schedule.requests} == {77}


def test_a_fitted_prompt_keeps_its_id(profile_of: ProfileOf, words: TokenCounter) -> None:
    plain = build_schedule(profile_of())
    lengths = {"input": {"dist": "fixed", "tokens": 30}}
    fitted = build_schedule(profile_of(extra={"lengths": lengths}), counter=words)
    assert [r.prompt.prompt_id for r in fitted.requests] == [
        r.prompt.prompt_id for r in plain.requests
    ]


def test_more_text_than_memory_is_refused(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "MAX_CHARS", 10_000)
    profile = profile_of(extra={"lengths": {"input": {"dist": "fixed", "tokens": 100}}})
    with pytest.raises(InputError) as caught:
        build_schedule(profile)
    assert str(caught.value) == (
        f"{profile.where}: the prompts of one measurement must hold at most 10,000 characters in "
        "all. Ask for fewer requests, or shorter ones."
    )


# --- shared prefixes ---


def system_of(request: Any) -> str:
    role, text = request.prompt.messages[0]
    assert role == "system"
    return str(text)


def test_groups_share_exactly_their_prefix(profile_of: ProfileOf, words: TokenCounter) -> None:
    extra = {"shared_prefix": {"tokens": 80, "groups": 3}}
    schedule = build_schedule(profile_of(extra=extra, measure={"min_requests": 30}), counter=words)
    counts = Counter(system_of(request) for request in schedule.requests)
    assert sorted(counts.values()) == [10, 10, 10]
    assert [words.count(prefix) for prefix in counts] == [80, 80, 80]
    # Different groups differ at once: no two share their first block.
    assert len({tuple(prefix.split()[:2]) for prefix in counts}) == 3
    # What follows the prefix is the user's own message, unchanged.
    assert all(r.prompt.messages[1][1].startswith("question") for r in schedule.requests)
    assert {len(r.prompt.messages) for r in schedule.requests} == {2}


def test_the_warm_up_knows_the_prefixes_as_users_would(
    profile_of: ProfileOf, words: TokenCounter
) -> None:
    extra = {"shared_prefix": {"tokens": 80, "groups": 2}}
    schedule = build_schedule(profile_of(extra=extra, measure={"warmup": 8}), counter=words)
    warm = {system_of(request) for request in schedule.warmup}
    assert warm == {system_of(request) for request in schedule.requests}


def test_a_stand_in_is_made_of_prompts_that_are_not_measured(
    profile_of: ProfileOf, words: TokenCounter
) -> None:
    extra = {"shared_prefix": {"tokens": 300, "groups": 4}}
    schedule = build_schedule(profile_of(extra=extra), counter=words)
    asked = {r.prompt.messages[1][1].split()[0] for r in schedule.requests}
    said = {word for r in schedule.requests for word in system_of(r).split()}
    assert not asked & said
    assert any("stand-in" in note for note in schedule.notes)
    assert schedule.prompt_realism is PromptRealism.USER


def test_a_prefix_goes_before_a_system_prompt_of_the_row(
    profile_of: ProfileOf, write_rows: Write, tmp_path: Path
) -> None:
    said = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    write_rows([{"messages": said}, {"prompt": "hello"}, {"prompt": "welcome"}])
    (tmp_path / "system.txt").write_text("be brief\n", encoding="utf-8")
    schedule = build_schedule(profile_of(extra={"shared_prefix": {"file": "system.txt"}}))
    found = {r.prompt.messages for r in (*schedule.warmup, *schedule.requests)}
    assert found == {
        (("system", "be brief\n\nown"), ("user", "hi")),
        (("system", "be brief"), ("user", "hello")),
        (("system", "be brief"), ("user", "welcome")),
    }
    assert schedule.notes == ()


def test_all_turns_of_a_conversation_have_one_prefix(
    profile_of: ProfileOf, write_rows: Write, words: TokenCounter
) -> None:
    said = [{"from": ("human", "gpt")[n % 2], "value": f"m{n}"} for n in range(5)]
    rows = []
    for number in range(12):
        opening = {"from": "human", "value": f"opening {number}"}
        rows.append({"conversations": [opening, *said[1:]]})
    write_rows(rows)
    extra = {"turns": {"replay": "recorded"}, "shared_prefix": {"tokens": 20, "groups": 3}}
    schedule = build_schedule(profile_of(extra=extra, measure={"min_requests": 6}), counter=words)
    prefixes: dict[int | None, set[str]] = {}
    for request in schedule.requests:
        prefixes.setdefault(request.conversation_id, set()).add(system_of(request))
    assert len(schedule.requests) == 18
    assert {len(found) for found in prefixes.values()} == {1}
    # Live turns get it with the history, not again.
    extra["turns"] = {"replay": "live"}
    live = build_schedule(profile_of(extra=extra, measure={"min_requests": 6}), counter=words)
    assert [r.prompt.messages[0][0] for r in live.requests[:3]] == ["system", "user", "user"]


@pytest.mark.parametrize(
    ("text", "told"),
    [(" \n", "the shared prefix must not be empty"), (None, "the shared prefix must exist")],
)
def test_a_prefix_that_cannot_be_used_is_refused(
    profile_of: ProfileOf, tmp_path: Path, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / "system.txt").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        build_schedule(profile_of(extra={"shared_prefix": {"file": "system.txt"}}))
    assert str(caught.value).startswith(f"{tmp_path / 'system.txt'}: {told}")


def test_a_stand_in_needs_prompts(profile_of: ProfileOf, write_rows: Write) -> None:
    row = {"timestamp": 1, "model": "m", "messages": [{"role": "user", "content": "hi"}]}
    write_rows([row], "trace.jsonl")
    classes = [{"shared_prefix": {"tokens": 9}}]
    profile = profile_of({"kind": "trace", "file": "trace.jsonl"}, classes=classes)
    with pytest.raises(InputError) as caught:
        build_schedule(profile)
    assert str(caught.value) == (
        f"{profile.where}: classes[0].shared_prefix: a stand-in for the shared prefix is made of "
        "the class's prompts, and it has none. Give `file`, or `prompts`."
    )


# --- how real it is ---


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([{"file": "prompts.jsonl"}], PromptRealism.USER),
        ([{"builtin": "demo/chat"}], PromptRealism.PROXY),
        ([{"file": "prompts.jsonl"}, {"builtin": "demo/chat"}], PromptRealism.PROXY),
        ([{"file": "prompts.jsonl"}, {"random": {"tokens": 9, "force": True}}],
         PromptRealism.RANDOM),
        ([{"builtin": "demo/chat"}, {"random": {"tokens": 9, "force": True}}],
         PromptRealism.RANDOM),
    ],
)  # fmt: skip
def test_the_least_real_prompts_mark_the_whole(
    profile_of: ProfileOf, sources: list[dict[str, Any]], expected: PromptRealism
) -> None:
    classes = [{"name": f"c{n}", "prompts": source} for n, source in enumerate(sources)]
    assert build_schedule(profile_of(classes=classes)).prompt_realism is expected
