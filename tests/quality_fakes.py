"""Endpoints for tests of the quality gate: one that replays real vLLM, and one that misbehaves."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from autotune.demo.target import head_dir
from autotune.measure.quality.endpoint import Endpoint
from autotune.measure.quality.prompts import QualityPrompt

RECORDING = Path(__file__).parent / "data" / "quality_answers.json.gz"
CLASSES = ("maths", "code", "chat", "summarise")
NUM_PROMPTS = 16

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeEndpoint:
    """A server in a thread of this process that answers as `handle` says; a context manager."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.bodies: list[dict[str, Any]] = []
        """Every request's body, in order of arrival."""
        self.peak_in_flight = 0
        self._in_flight = 0

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_ready.wait(timeout=20):
            raise TimeoutError("the fake endpoint did not start within 20 s")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self._port}", "fake", request_timeout_s=10)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append({**await request.json(), "path": request.path})
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        try:
            return await self._handle(request)
        finally:
            self._in_flight -= 1

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._port = int(runner.addresses[0][1])
        self._is_ready.set()
        await self._stop.wait()
        await runner.cleanup()


@cache
def recording() -> dict[str, Any]:
    """What `tests/data/make_quality_answers.py` recorded."""
    return dict(json.loads(gzip.decompress(RECORDING.read_bytes())))


def demo_prompts(count: int, max_tokens: int) -> list[QualityPrompt]:
    """The first prompts of each of the demo's classes, in turn."""
    folder = head_dir().parent / "prompts"
    columns = [(folder / f"{name}.jsonl").read_text().splitlines() for name in CLASSES]
    lines = [line for lines in zip(*columns, strict=True) for line in lines][:count]
    contents = [json.loads(line)["prompt"] for line in lines]
    return [
        QualityPrompt({"messages": [{"role": "user", "content": content}]}, max_tokens)
        for content in contents
    ]


def recorded_prompts() -> list[QualityPrompt]:
    """The prompts that were recorded."""
    return demo_prompts(NUM_PROMPTS, recording()["num_tokens"])


class Replay(FakeEndpoint):
    """Answers with the recorded answers of one server, and scores with one server's log-probabilities.

    The first time that a prompt comes it gives the answer recorded at concurrency 1, after that the
    one at concurrency 4, which is the order in which the gate asks.
    """

    def __init__(self, answers: str, scores: str, fault: str | None = None) -> None:
        """
        Args:
            answers: whose answers: baseline, k8, fp8.
            scores: whose log-probabilities: baseline, fp8.
            fault: which broken engine's answers to give at concurrency 4, see the recording.
        """
        super().__init__(self._reply)
        data = recording()
        self._answers = [data["answers"][answers]["1"], data["answers"][answers]["4"]]
        if fault is not None:
            self._answers[1] = data["faults"][fault]
        self._scores = {
            (*row["prompt_token_ids"], *row["token_ids"]): row for row in data["scores"][scores]
        }
        self._numbers = {
            prompt.body["messages"][0]["content"]: number
            for number, prompt in enumerate(recorded_prompts())
        }
        self._times_asked: Counter[int] = Counter()

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path.endswith("/chat/completions"):
            number = self._numbers[body["messages"][0]["content"]]
            answers = self._answers[min(self._times_asked[number], 1)]
            self._times_asked[number] += 1
            return web.json_response(chat_answer(answers[number]))
        return web.json_response(scores_answer(self._row(tuple(body["prompt"])), body))

    def _row(self, token_ids: tuple[int, ...]) -> Mapping[str, Any]:
        """Find the scores of a sequence, or of one that goes on from it: no token sees later ones."""
        if token_ids in self._scores:
            return self._scores[token_ids]
        longer = next(s for s in self._scores if s[: len(token_ids)] == token_ids)
        row = self._scores[longer]
        num_tokens = len(token_ids) - len(row["prompt_token_ids"])
        return {
            **row,
            "token_ids": row["token_ids"][:num_tokens],
            "tokens": row["tokens"][:num_tokens],
        }

    def cut(self, prompt: int, num_tokens: int, finish_reason: str) -> None:
        """End the answer to a prompt early, at concurrency 4."""
        whole = self._answers[1][prompt]
        self._answers[1] = list(self._answers[1])
        self._answers[1][prompt] = {
            **whole,
            "token_ids": whole["token_ids"][:num_tokens],
            "finish_reason": finish_reason,
        }


def chat_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Write a recorded answer as vLLM 0.32 does."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer["text"], "reasoning": None},
        "finish_reason": answer["finish_reason"],
        "token_ids": answer["token_ids"],
    }
    return {"choices": [choice], "prompt_token_ids": answer["prompt_token_ids"]}


def scores_answer(row: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Write recorded log-probabilities as vLLM 0.32 does: nothing is known of the prompt's tokens."""
    positions: list[dict[str, Any] | None] = [None] * len(row["prompt_token_ids"])
    for token_id, (logprob, top) in zip(row["token_ids"], row["tokens"], strict=True):
        shown = top[: body["prompt_logprobs"]]
        assert len(shown) == body["prompt_logprobs"], "more was asked for than was recorded"
        # The given token first, with its own rank; where it is one of the best, that rank replaces it.
        position = {str(token_id): {"logprob": logprob, "rank": len(top) + 1}}
        position |= {str(i): {"logprob": x, "rank": n} for n, (i, x) in enumerate(shown, 1)}
        positions.append(position)
    return {"choices": [{"text": "", "prompt_logprobs": positions}]}
