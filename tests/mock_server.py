"""A mock of vLLM's OpenAI server whose every delay and token count is known beforehand.

Tests measure it and compare what comes out with what was put in. It answers as vLLM 0.32 does:
the same endpoints, the same stream of server-sent events, the same `/metrics` text. Two uses:

* in the test's own process: ``with MockServer(Truth(step_s=0.02)) as server: ... server.base_url``
* as a process that stands in for vLLM: ``python tests/mock_server.py --port 8000 --model m
  --served-model-name m``. It takes vLLM's options (those it does not know are ignored), and options
  of its own that begin with ``--mock-``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

Script = list[tuple[int, bytes, int]]
"""The events of one answer: the step each is sent at, its bytes, and the tokens it brings."""

VERSION = "0.32.0"
MOCK_COMMAND = (sys.executable, str(Path(__file__).resolve()))
"""Starts the mock as a process; vLLM's options and the mock's own may follow."""
EVERY = -1
"""Key of `Truth.faults` that stands for every request."""

HTTP_FAULTS = {
    "http_400": (400, "BadRequestError", "This model's maximum context length is 8192 tokens."),
    "http_429": (429, "RateLimitError", "Too many requests"),
    "http_500": (500, "InternalServerError", "EngineCore encountered an issue."),
    "http_503": (503, "ServiceUnavailableError", "The model is overloaded"),
}
STREAM_FAULTS = {
    "error_in_stream": "an error object inside a stream that began with status 200",
    "not_json": "an event that is no JSON",
    "not_an_object": "an event that is JSON, but no object",
    "not_a_stream": "a whole answer in place of a stream",
    "wrong_shape": "an event whose choices are no list",
    "huge_event": "an event of 17 MiB, in pieces of 64 KiB",
    "aborted": "the server gives the answer up, with finish_reason abort",
    "reset": "the connection is reset in the middle of the answer",
    "truncated": "the answer ends in the middle, without finish_reason and [DONE]",
    "empty": "an answer without any token",
    "hang": "no answer, ever",
}
NUM_CHUNKS_BEFORE_FAULT = 2
"""How many chunks with tokens come before a fault in the middle of a stream."""


@dataclass(frozen=True)
class Truth:
    """What the server does, exactly."""

    first_token_s: float = 0.02
    """From the request's turn until its first chunk with tokens."""
    step_s: float = 0.005
    """From one chunk with tokens to the next."""
    is_in_step: bool = False
    """Send the chunks of all answers at the same moments, multiples of `step_s`, as an engine does
    that computes them together; a first chunk then waits for the next such moment. Faults within a
    stream, cuts and keep-alive comments do not happen then."""
    first_chunk_tokens: int = 1
    tokens_per_step: tuple[int, ...] = (1,)
    """Tokens of the chunks after the first one, repeated in a cycle."""
    num_output_tokens: int | None = None
    """Tokens of every answer; None: as many as the request allows."""
    num_prompt_tokens: int = 7
    num_speculative_tokens: int = 0
    """K: with it, each chunk but the first counts as one draft with tokens - 1 accepted."""
    num_slots: int | None = None
    """Requests worked on at once, the others wait in line; None: no limit."""
    word: str | None = None
    """Text of every token; None: a different word each, " w0", " w1", ..."""
    text_key: str = "content"
    """Where a chat's text is: content, reasoning, reasoning_content or tool_calls."""
    has_continuous_usage: bool = True
    """Whether chunks tell the token count so far when asked to, as vLLM's do."""
    has_final_usage: bool = True
    """Whether the count comes at the end when asked for."""
    final_usage_falls_short: int = 0
    """Tokens by which the count at the end is less than the counts before it."""
    has_done: bool = True
    """Whether the stream ends with [DONE]."""
    sends_role_at_once: bool = False
    """Send the role-only chunk at once, not together with the first token."""
    has_keep_alive: bool = False
    """Put a keep-alive comment before every chunk."""
    cuts_events: bool = False
    """Send each event in two pieces, cut in the middle."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """What goes wrong, by the request's number in order of arrival, from 0; `EVERY` for all."""

    def chunk_sizes(self, max_tokens: int) -> list[int]:
        """Return the tokens of each chunk of one answer."""
        left = max_tokens if self.num_output_tokens is None else self.num_output_tokens
        sizes: list[int] = []
        for size in itertools.chain(
            [self.first_chunk_tokens], itertools.cycle(self.tokens_per_step)
        ):
            if left <= 0:
                return sizes
            sizes.append(min(size, left))
            left -= size
        return sizes

    def fault_of(self, number: int) -> str | None:
        return self.faults.get(number, self.faults.get(EVERY))


@dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    number: int
    at_s: float
    """`time.perf_counter()` of the arrival, the same clock in every process of a machine."""
    path: str
    body: Mapping[str, Any]


@dataclass
class Sent:
    """When the server really sent one answer's chunks with tokens, on the clock of `Seen.at_s`."""

    number: int
    at_s: float
    first_sent_s: float = 0.0
    last_sent_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0
    num_chunks: int = 0

    def note(self, now_s: float, num_tokens: int) -> None:
        """Take note of a chunk that is about to be sent."""
        if not self.num_chunks:
            self.first_sent_s, self.num_first_tokens = now_s, num_tokens
        self.last_sent_s = now_s
        self.num_tokens += num_tokens
        self.num_chunks += 1


@dataclass(frozen=True)
class Options:
    """How the server was started: what `/v1/models` and `/server_info` tell."""

    model: str = "mock"
    served_model_name: str = "mock"
    speculative_config: Mapping[str, Any] | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    has_spec_counters: bool = True
    is_dev_mode: bool = True
    """Whether `/server_info` and `/reset_prefix_cache` exist (VLLM_SERVER_DEV_MODE=1)."""
    dies_at_request: int | None = None
    """Number of the request that ends the process; 0 is the first."""
    log: str = ""
    """What is written to standard output before the process ends."""


class StepsOfAnswer:
    """An answer of which one step's chunks are sent at a time."""

    def __init__(
        self,
        response: web.StreamResponse,
        script: Script,
        sent: Sent,
        count: Callable[[int, int], None],
    ) -> None:
        self._response = response
        self._sent = sent
        self._count = count
        self._steps = iter([list(g) for _, g in itertools.groupby(script, key=lambda row: row[0])])
        self._next = next(self._steps, None)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send_step(self) -> bool:
        """Send the next step's chunks; return whether there are more steps."""
        for step, data, num_tokens in self._next or ():
            if num_tokens:
                self._sent.note(time.perf_counter(), num_tokens)
                self._count(step, num_tokens)
            await self._response.write(data)
        self._next = next(self._steps, None)
        return self._next is not None


class Stepper:
    """Sends the chunks of all answers together, in one task.

    With a timer and a task switch for each chunk, the server would be busy for milliseconds at every
    step, and requests that arrive meanwhile would wait for it.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._answers: set[StepsOfAnswer] = set()
        self._task: asyncio.Task[None] | None = None

    async def send(self, answer: StepsOfAnswer) -> None:
        """Send the whole answer and return when its last step is sent."""
        self._answers.add(answer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            await answer.done
        finally:
            self._answers.discard(answer)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._answers:
            due_s = (clock() // self._step_s + 1) * self._step_s
            await asyncio.sleep(due_s - clock())
            for answer in list(self._answers):
                try:
                    if not await answer.send_step():
                        answer.done.set_result(None)
                        self._answers.discard(answer)
                except ConnectionError:  # its client has gone, and with it the handler that waits
                    self._answers.discard(answer)


class MockApp:
    """The server's handlers and counters."""

    def __init__(self, truth: Truth, options: Options) -> None:
        self.truth = truth
        self.options = options
        self.seen: list[Seen] = []
        self.sent: list[Sent] = []
        self._scripts: dict[tuple[Any, ...], Script] = {}
        self._stepper = Stepper(truth.step_s)
        self.num_cache_resets = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self._slots = asyncio.Semaphore(truth.num_slots or 10_000)
        self._registry = CollectorRegistry()
        self._counters = self._make_counters()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/mock/sent", self.tell_sent)
        if self.options.is_dev_mode:
            app.router.add_get("/server_info", self.server_info)
            app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.options.served_model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.options.model,
            "parent": None,
            "max_model_len": self.options.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def server_info(self, request: web.Request) -> web.Response:
        options = self.options
        config = {
            "model_config": {
                "model": options.model,
                "max_model_len": options.max_model_len,
                "dtype": "torch.bfloat16",
                "quantization": options.quantization,
                "enforce_eager": False,
            },
            "cache_config": {
                "cache_dtype": options.kv_cache_dtype,
                "num_gpu_blocks": 1000,
                "enable_prefix_caching": True,
            },
            "scheduler_config": {
                "max_num_seqs": options.max_num_seqs,
                "max_num_batched_tokens": options.max_num_batched_tokens,
            },
            "speculative_config": options.speculative_config,
        }
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        self.num_cache_resets += 1
        return web.json_response({"success": True})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Count one token per word."""
        body = await request.json()
        texts = [m["content"] for m in body.get("messages", ())] or [body["prompt"]]
        tokens = list(range(len(" ".join(texts).split())))
        answer = {
            "count": len(tokens),
            "max_model_len": self.options.max_model_len,
            "tokens": tokens,
        }
        return web.json_response(answer)

    async def tell_sent(self, request: web.Request) -> web.Response:
        """Tell when every answer was really sent."""
        return web.json_response([asdict(sent) for sent in self.sent])

    async def generate(self, request: web.Request) -> web.StreamResponse:
        number, at_s = len(self.seen), time.perf_counter()
        self.sent.append(Sent(number, at_s))
        body = await request.json()
        self.seen.append(Seen(number, at_s, request.path, body))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            return await self._answer(request, body, number)
        finally:
            self.in_flight -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], number: int
    ) -> web.StreamResponse:
        if number == self.options.dies_at_request:
            die(self.options.log)
        fault = self.truth.fault_of(number)
        if body["model"] != self.options.served_model_name:
            return _refusal(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        if fault in HTTP_FAULTS:
            return _refusal(*HTTP_FAULTS[fault])
        if fault == "hang":
            await asyncio.sleep(3600)
        async with self._slots:
            if body.get("stream") and fault != "not_a_stream":
                return await self._stream(request, body, fault, self.sent[number])
            return await self._whole(request.path, body)

    async def _whole(self, path: str, body: dict[str, Any]) -> web.Response:
        sizes = self.truth.chunk_sizes(_max_tokens(body))
        await asyncio.sleep(self.truth.first_token_s + self.truth.step_s * (len(sizes) - 1))
        for index, size in enumerate(sizes):
            self._count_step(index, size)
        text = self._text(0, sum(sizes))
        is_chat = path.endswith("chat/completions")
        choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        answer = {
            **self._head(path, is_stream=False),
            "choices": [{"index": 0, **choice, "finish_reason": "length"}],
            "usage": self._usage(sum(sizes)),
        }
        return web.json_response(answer)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str | None, sent: Sent
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        script = self._script(request.path, body, fault)
        if self.truth.is_in_step:
            await asyncio.sleep(self.truth.first_token_s)
            await self._stepper.send(StepsOfAnswer(response, script, sent, self._count_step))
            return response
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for step, data, num_tokens in script:
            due_s = began_s + self.truth.first_token_s + step * self.truth.step_s
            if step >= 0 and (left_s := due_s - clock()) > 0:
                await asyncio.sleep(left_s)
            if step == NUM_CHUNKS_BEFORE_FAULT and fault in STREAM_FAULTS:
                for piece in _fault_pieces(fault):
                    await response.write(piece)
                if fault == "reset" and request.transport is not None:
                    request.transport.abort()
                return response
            if num_tokens:
                sent.note(time.perf_counter(), num_tokens)
            await self._write(response, data)
            if num_tokens:
                self._count_step(step, num_tokens)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if self.truth.has_keep_alive:
            await response.write(b": keep-alive\n\n")
        if self.truth.cuts_events:
            middle = len(data) // 2
            await response.write(data[:middle])
            await asyncio.sleep(0)
            data = data[middle:]
        await response.write(data)

    def _script(self, path: str, body: Mapping[str, Any], fault: str | None) -> Script:
        """Return the events of one answer, made once for all requests that ask for the same."""
        options = body.get("stream_options") or {}
        is_asked = [bool(options.get(n)) for n in ("include_usage", "continuous_usage_stats")]
        key = (path, *is_asked, _max_tokens(body), fault == "empty")
        if key not in self._scripts:
            self._scripts[key] = self._new_script(path, options, body, is_empty=fault == "empty")
        return self._scripts[key]

    def _new_script(
        self, path: str, options: Mapping[str, Any], body: Mapping[str, Any], *, is_empty: bool
    ) -> Script:
        sizes = [] if is_empty else self.truth.chunk_sizes(_max_tokens(body))
        script: Script = []
        if path.endswith("chat/completions"):
            role = self._chunk(path, options, {"role": "assistant", "content": ""}, 0)
            script.append((-1 if self.truth.sends_role_at_once else 0, role, 0))
        total = 0
        for step, size in enumerate(sizes or [0]):
            text = self._text(total, size)
            total += size
            finish = None if step < len(sizes) - 1 else "length"
            chunk = self._chunk(path, options, self._delta(text), total, finish)
            script.append((step, chunk, size))
        last = max(len(sizes) - 1, 0)
        if options.get("include_usage") and self.truth.has_final_usage:
            usage = self._usage(total - self.truth.final_usage_falls_short)
            script.append((last, _event({**self._head(path), "choices": [], "usage": usage}), 0))
        if self.truth.has_done:
            script.append((last, b"data: [DONE]\n\n", 0))
        return script

    def _text(self, first: int, count: int) -> str:
        if self.truth.word is not None:
            return self.truth.word * count
        return "".join(f" w{number}" for number in range(first, first + count))

    def _delta(self, text: str) -> dict[str, Any]:
        if self.truth.text_key == "tool_calls":
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return {self.truth.text_key: text}

    def _chunk(
        self,
        path: str,
        options: Mapping[str, Any],
        delta: Mapping[str, Any],
        total: int,
        finish_reason: str | None = None,
    ) -> bytes:
        is_chat = path.endswith("chat/completions")
        content = {"delta": delta} if is_chat else {"text": delta["content"]}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        chunk: dict[str, Any] = {**self._head(path), "choices": [choice]}
        if options.get("continuous_usage_stats") and self.truth.has_continuous_usage:
            chunk["usage"] = self._usage(total)
        return _event(chunk)

    def _head(self, path: str, *, is_stream: bool = True) -> dict[str, Any]:
        is_chat = path.endswith("chat/completions")
        kind = ("chat.completion" + ".chunk" * is_stream) if is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-0123456789abcdef",
            "object": kind,
            "created": int(time.time()),
            "model": self.options.served_model_name,
        }

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = self.truth.num_prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def _make_counters(self) -> dict[str, Any]:
        """Make vLLM's counters with the library that vLLM makes them with; look each up once."""
        names = ["prompt_tokens", "generation_tokens", "num_preemptions"]
        names += ["prefix_cache_queries", "prefix_cache_hits"]
        if self.truth.num_speculative_tokens and self.options.has_spec_counters:
            names += [
                f"spec_decode_num_{what}"
                for what in (
                    "drafts",
                    "draft_tokens",
                    "accepted_tokens",
                    "accepted_tokens_per_pos",
                )
            ]
        counters: dict[str, Any] = {}
        for name in names:
            labels = ["model_name", "engine"]
            of_this = (self.options.served_model_name, "0")
            if not name.endswith("per_pos"):
                counter = Counter(
                    f"vllm:{name}", f"Mocked {name}.", labels, registry=self._registry
                )
                counters[name] = counter.labels(*of_this)
                continue
            counter = Counter(
                f"vllm:{name}",
                f"Mocked {name}.",
                [*labels, "position"],
                registry=self._registry,
            )
            for position in range(self.truth.num_speculative_tokens):
                counters[f"{name} {position}"] = counter.labels(*of_this, str(position))
        gauge = Gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            ["model_name", "engine"],
            registry=self._registry,
        )
        gauge.labels(self.options.served_model_name, "0").set_function(lambda: self.in_flight)
        return counters

    def _count_step(self, index: int, size: int) -> None:
        self._counters["generation_tokens"].inc(size)
        if index == 0:
            self._counters["prompt_tokens"].inc(self.truth.num_prompt_tokens)
            self._counters["prefix_cache_queries"].inc(self.truth.num_prompt_tokens)
            return
        if "spec_decode_num_drafts" in self._counters:
            self._counters["spec_decode_num_drafts"].inc(1)
            self._counters["spec_decode_num_draft_tokens"].inc(self.truth.num_speculative_tokens)
            self._counters["spec_decode_num_accepted_tokens"].inc(size - 1)
            for position in range(size - 1):
                self._counters[f"spec_decode_num_accepted_tokens_per_pos {position}"].inc(1)


def _max_tokens(body: Mapping[str, Any]) -> int:
    return int(body.get("max_tokens") or body["max_completion_tokens"])


def _event(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def _error(code: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(code: int, kind: str, message: str) -> web.Response:
    return web.json_response(_error(code, kind, message), status=code)


def _fault_pieces(fault: str) -> list[bytes]:
    """Return what is sent in place of the answer's next chunk, before the answer ends."""
    if fault == "error_in_stream":
        return [_event(_error(*HTTP_FAULTS["http_500"])), b"data: [DONE]\n\n"]
    if fault == "huge_event":
        return [b"data: ", *[b"x" * 2**16] * (17 * 16)]
    if fault == "aborted":
        choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "abort"}
        return [_event({"choices": [choice]}), b"data: [DONE]\n\n"]
    one = {
        "not_json": b"data: {oops\n\n",
        "not_an_object": b"data: 5\n\n",
        "wrong_shape": b'data: {"choices":"none"}\n\n',
    }
    return [one[fault]] if fault in one else []


def die(log: str) -> None:
    """End the process at once, after writing `log`, as a server does whose engine died."""
    sys.stdout.write(log)
    sys.stdout.flush()
    os._exit(1)


class MockServer:
    """The mock in a thread of this process; use it as a context manager."""

    def __init__(self, truth: Truth | None = None, options: Options | None = None) -> None:
        self._truth = truth or Truth()
        self._options = options or Options()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_ready.wait(timeout=20):
            raise TimeoutError("the mock server did not start within 20 s")
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
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return self._options.served_model_name

    @property
    def seen(self) -> list[Seen]:
        """All requests so far, in order of arrival."""
        return self.app.seen

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.app = MockApp(self._truth, self._options)
        runner = await _start(self.app, "127.0.0.1", 0)
        self.port = int(runner.addresses[0][1])
        self._is_ready.set()
        await self._stop.wait()
        await runner.cleanup()


async def _start(app: MockApp, host: str, port: int) -> web.AppRunner:
    runner = web.AppRunner(
        app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="mock")
    parser.add_argument("--served-model-name")
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization")
    mock = parser.add_argument_group("what the mock does")
    mock.add_argument("--mock-first-token-s", type=float, default=Truth.first_token_s)
    mock.add_argument("--mock-step-s", type=float, default=Truth.step_s)
    mock.add_argument("--mock-in-step", action="store_true", help="all answers step together")
    mock.add_argument("--mock-tokens-per-step", default="1", help="a cycle such as 3,1,2")
    mock.add_argument("--mock-output-tokens", type=int)
    faults = ", ".join([*HTTP_FAULTS, *STREAM_FAULTS])
    mock.add_argument(
        "--mock-fault",
        action="append",
        default=[],
        metavar="NUMBER=FAULT",
        help=f"NUMBER may be `all`; FAULT: {faults}",
    )
    mock.add_argument("--mock-no-spec-counters", action="store_true")
    mock.add_argument(
        "--mock-reports",
        type=json.loads,
        default={},
        metavar="JSON",
        help="speculative settings that /server_info tells in place of those asked for",
    )
    mock.add_argument("--mock-never-healthy", action="store_true")
    mock.add_argument("--mock-launch-s", type=float, default=0.0, help="seconds until it answers")
    mock.add_argument("--mock-dies-at-launch", action="store_true")
    mock.add_argument("--mock-dies-at-request", type=int, metavar="NUMBER")
    mock.add_argument("--mock-log", type=Path, help="file whose text is written before it dies")
    return parser


def _truth(args: argparse.Namespace) -> Truth:
    pairs = [fault.split("=") for fault in args.mock_fault]
    return Truth(
        first_token_s=args.mock_first_token_s,
        step_s=args.mock_step_s,
        is_in_step=args.mock_in_step,
        tokens_per_step=tuple(int(part) for part in args.mock_tokens_per_step.split(",")),
        num_output_tokens=args.mock_output_tokens,
        num_speculative_tokens=(args.speculative_config or {}).get("num_speculative_tokens", 0),
        faults={EVERY if number == "all" else int(number): fault for number, fault in pairs},
    )


def _options(args: argparse.Namespace) -> Options:
    spec = args.speculative_config
    return Options(
        model=args.model,
        served_model_name=args.served_model_name or args.model,
        speculative_config={**spec, **args.mock_reports} if spec else None,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        has_spec_counters=not args.mock_no_spec_counters,
        is_dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        dies_at_request=args.mock_dies_at_request,
        log=args.mock_log.read_text(encoding="utf-8") if args.mock_log else "",
    )


async def _run(args: argparse.Namespace) -> None:
    options = _options(args)
    gc.freeze()
    await asyncio.sleep(args.mock_launch_s)
    if args.mock_dies_at_launch:
        die(options.log)
    if not args.mock_never_healthy:
        await _start(MockApp(_truth(args), options), args.host, args.port)
        print(f"INFO:     Application startup complete on port {args.port}.", flush=True)
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    """Serve until a signal ends the process."""
    args, _ = _parser().parse_known_args(argv)
    asyncio.run(_run(args))


if __name__ == "__main__":
    main(sys.argv[1:])
