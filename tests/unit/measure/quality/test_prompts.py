"""Which of the schedule's prompts the gate asks, and how."""

from __future__ import annotations

from typing import Any

from autotune.measure.quality.prompts import QualityPrompt, quality_prompts
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest


def request(number: int, text: str, **changes: Any) -> ScheduledRequest:
    values: dict[str, Any] = {
        "request_id": number,
        "class_name": "chat",
        "prompt": Prompt(text, (("user", text),)),
        "max_tokens": 256,
        "temperature": 0.7,
        "top_p": 0.9,
        "ignore_eos": True,
        "sampling_seed": 5,
        "arrival_s": None,
    }
    return ScheduledRequest(**{**values, **changes})


def schedule(*requests: ScheduledRequest, endpoint: str = "chat") -> Schedule:
    return Schedule(endpoint, 1, requests, (request(99, "warm-up"),), 60, 60)


def test_the_first_distinct_prompts_are_taken_without_their_sampling() -> None:
    requests = [request(i, text) for i, text in enumerate(["a", "b", "a", "c", "d"])]
    prompts = quality_prompts(schedule(*requests), 3, 128)
    assert prompts == tuple(
        QualityPrompt({"messages": [{"role": "user", "content": text}]}, 128)
        for text in ("a", "b", "c")
    )
    assert len(quality_prompts(schedule(*requests), 64, 128)) == 4


def test_a_request_keeps_its_own_lower_limit_and_what_shapes_its_prompt() -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "response_format": {}}
    (prompt,) = quality_prompts(schedule(request(0, "a", max_tokens=8, extra_body=fields)), 4, 128)
    assert prompt.max_tokens == 8
    assert prompt.body.keys() == {"messages", "chat_template_kwargs"}


def test_turns_that_need_the_servers_own_answers_are_left_out() -> None:
    turns = [
        request(0, "first", conversation_id=1, is_live=True),
        request(1, "second", conversation_id=1, turn=1, is_live=True),
        request(2, "recorded", conversation_id=2, turn=1),
    ]
    prompts = quality_prompts(schedule(*turns), 4, 128)
    assert [p.body["messages"][0]["content"] for p in prompts] == ["first", "recorded"]


def test_completions_are_asked_as_completions() -> None:
    (prompt,) = quality_prompts(schedule(request(0, "a"), endpoint="completions"), 4, 128)
    assert prompt.body == {"prompt": "a"}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert QualityPrompt.of_messages(messages, "completions", 5).body == {"prompt": "s\n\nu"}
    assert QualityPrompt.of_messages(messages, "chat", 5).body == {"messages": messages}
