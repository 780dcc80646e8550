"""What is asked of a server, how its answers are read, and what becomes of every failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from autotune.measure.client import MeasurementStopped
from autotune.measure.quality import endpoint as endpoint_module
from autotune.measure.quality.endpoint import (
    Endpoint,
    EndpointFailed,
    TokenSequence,
    collect_answers,
    score,
)
from autotune.measure.quality.prompts import QualityPrompt
from tests.quality_fakes import FakeEndpoint

PROMPT = QualityPrompt({"messages": [{"role": "user", "content": "Hello"}]}, 16)
SEQUENCE = TokenSequence((1, 2), (7, 8))


def says(data: Any, status: int = 200) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        text = data if isinstance(data, str) else json.dumps(data)
        return web.Response(text=text, status=status, content_type="application/json")

    return handle


def chat(text: str | None = "Hi", **message: Any) -> dict[str, Any]:
    choice = {
        "message": {"content": text, **message},
        "token_ids": [5, 6],
        "finish_reason": "stop",
    }
    return {"choices": [choice], "prompt_token_ids": [1, 2]}


# --- Answers ---


def test_an_answer_is_asked_for_greedily_and_without_logprobs() -> None:
    with FakeEndpoint(says(chat())) as fake:
        (answer,) = collect_answers(fake.endpoint, [PROMPT], 1)
    assert answer.prompt_token_ids == (1, 2)
    assert answer.token_ids == (5, 6)
    assert (answer.text, answer.finish_reason) == ("Hi", "stop")
    (body,) = fake.bodies
    assert body["path"] == "/v1/chat/completions"
    assert body["messages"] == PROMPT.body["messages"]
    assert (body["temperature"], body["max_tokens"], body["return_token_ids"]) == (0, 16, True)
    # What a model's generation_config.json would set otherwise.
    assert (body["repetition_penalty"], body["presence_penalty"]) == (1.0, 0.0)
    assert not any("logprobs" in key for key in body)


def test_completions_are_asked_and_read_in_their_own_way() -> None:
    choice = {
        "text": "Hi",
        "token_ids": [5],
        "prompt_token_ids": [1],
        "finish_reason": "length",
    }
    with FakeEndpoint(says({"choices": [choice]})) as fake:
        endpoint = Endpoint(fake.endpoint.base_url, "fake", "completions")
        (answer,) = collect_answers(endpoint, [QualityPrompt({"prompt": "Hello"}, 8)], 1)
    assert (answer.prompt_token_ids, answer.token_ids, answer.text) == ((1,), (5,), "Hi")
    assert fake.bodies[0]["path"] == "/v1/completions"
    assert fake.bodies[0]["prompt"] == "Hello"


def test_what_a_reasoning_parser_split_off_belongs_to_the_text() -> None:
    with FakeEndpoint(says(chat("4", reasoning="2 and 2 are "))) as fake:
        assert collect_answers(fake.endpoint, [PROMPT], 1)[0].text == "2 and 2 are 4"
    with FakeEndpoint(says(chat(None, reasoning_content="hm"))) as fake:
        assert collect_answers(fake.endpoint, [PROMPT], 1)[0].text == "hm"


def test_answers_keep_the_order_of_the_prompts_at_the_concurrency_asked() -> None:
    async def slower_first(request: web.Request) -> web.Response:
        number = int((await request.json())["messages"][0]["content"])
        await asyncio.sleep(0.2 - 0.02 * number)
        return web.json_response(chat(str(number)))

    prompts = [
        QualityPrompt({"messages": [{"role": "user", "content": str(n)}]}, 4) for n in range(8)
    ]
    with FakeEndpoint(slower_first) as fake:
        answers = collect_answers(fake.endpoint, prompts, 4)
        assert [answer.text for answer in answers] == [str(n) for n in range(8)]
        assert fake.peak_in_flight == 4
        assert collect_answers(fake.endpoint, [], 4) == []


# --- Scores ---


def test_scores_are_read_as_vllm_writes_them() -> None:
    # Taken from vLLM 0.32: the first position is null; the given token comes first with its own rank
    # where it is not one of the best (8), and with its place where it is (7).
    positions = [
        None,
        {"2": {"logprob": -9.0, "rank": 300}, "4": {"logprob": -0.1, "rank": 1}},
        {"7": {"logprob": -0.5, "rank": 1}, "4": {"logprob": -1.5, "rank": 2}},
        {
            "8": {"logprob": -6.0, "rank": 41},
            "5": {"logprob": -0.25, "rank": 1},
            "9": {"logprob": -2.0, "rank": 2},
        },
    ]
    with FakeEndpoint(says({"choices": [{"prompt_logprobs": positions}]})) as fake:
        ((first, second),) = score(fake.endpoint, [SEQUENCE], 2)
    assert (first.token_id, first.logprob) == (7, -0.5)
    assert first.top == ((7, -0.5), (4, -1.5))
    assert first.gap_nats == 0
    assert (second.token_id, second.logprob) == (8, -6.0)
    assert second.top == ((5, -0.25), (9, -2.0))
    assert second.gap_nats == 5.75
    (body,) = fake.bodies
    assert body["path"] == "/v1/completions"
    assert body["prompt"] == [1, 2, 7, 8]
    assert (body["prompt_logprobs"], body["max_tokens"]) == (2, 1)


# --- Failures ---


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        ({"error": {"message": "too long"}}, 400, "HTTP 400.*too long"),
        ("EngineCore encountered an issue", 500, "HTTP 500.*EngineCore"),
        ("<html>", 200, "not JSON"),
        ([], 200, "return_token_ids"),
        ({"choices": []}, 200, "return_token_ids"),
        ({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}, 200, "token ids"),
        ({"choices": [{"token_ids": ["x"]}], "prompt_token_ids": [1]}, 200, "token ids"),
    ],
)
def test_a_bad_answer_is_one_clear_failure(data: Any, status: int, said: str) -> None:
    with FakeEndpoint(says(data, status)) as fake, pytest.raises(EndpointFailed, match=said):
        collect_answers(fake.endpoint, [PROMPT] * 3, 2)


@pytest.mark.parametrize(
    "positions",
    [
        None,
        [],
        [None, None, {"7": {"logprob": -1.0, "rank": 1}}],  # one position too few
        [None, None, None, None],
        [None, None, *[{"3": {"logprob": -1.0, "rank": 1}}] * 2],  # not the tokens given
        [None, None, *[{"7": {"logprob": "x", "rank": 1}}] * 2],
        [
            None,
            None,
            *[{"7": {"logprob": -1.0, "rank": 9}, "8": {"logprob": -1.0, "rank": 9}}] * 2,
        ],
    ],
)
def test_scores_of_another_shape_are_one_clear_failure(positions: Any) -> None:
    data = {"choices": [{"prompt_logprobs": positions}]}
    with FakeEndpoint(says(data)) as fake, pytest.raises(EndpointFailed, match="every token"):
        score(fake.endpoint, [SEQUENCE], 2)


def test_a_server_that_is_gone_or_breaks_off() -> None:
    async def break_off(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with FakeEndpoint(break_off) as fake, pytest.raises(EndpointFailed, match="broke off"):
        collect_answers(fake.endpoint, [PROMPT] * 4, 4)
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        collect_answers(fake.endpoint, [PROMPT], 1)  # it has stopped


async def _hang(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


def test_a_server_that_hangs_is_given_up() -> None:
    with FakeEndpoint(_hang) as fake:
        endpoint = Endpoint(fake.endpoint.base_url, "fake", request_timeout_s=0.3)
        began = time.monotonic()
        with pytest.raises(EndpointFailed, match="no answer within 0.3 s"):
            collect_answers(endpoint, [PROMPT] * 8, 4)
        assert time.monotonic() - began < 5


def test_a_stop_from_outside_ends_it_at_once() -> None:
    with FakeEndpoint(_hang) as fake:
        began = time.monotonic()
        with pytest.raises(MeasurementStopped):
            collect_answers(
                fake.endpoint, [PROMPT], 1, should_stop=lambda: time.monotonic() - began > 0.2
            )
        assert time.monotonic() - began < 5


def test_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_RESPONSE_BYTES", 1000)
    with FakeEndpoint(says("x" * 5000)) as fake, pytest.raises(EndpointFailed, match="ValueError"):
        collect_answers(fake.endpoint, [PROMPT], 1)
