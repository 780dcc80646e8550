"""Questions to a running vLLM: greedy answers with token ids, and log-probabilities of given tokens.

The load client is not used: it streams and keeps times, and here only the tokens matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import orjson

from autotune.errors import AutotuneError
from autotune.measure.client import MeasurementStopped, ShouldStop
from autotune.measure.quality.prompts import QualityPrompt
from autotune.measure.server_errors import told

EndpointKind = Literal["chat", "completions"]

REQUEST_TIMEOUT_S = 300.0
"""Of one request. vLLM compiles a kernel at the first request for prompt log-probabilities, which
took 21 s on two CPU cores."""
SCORING_CONCURRENCY = 4
"""Requests for log-probabilities in flight: each holds a row of the whole vocabulary per token."""
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
STOP_POLL_S = 0.5
MAX_ERROR_BYTES = 8192

GREEDY = {
    "temperature": 0,
    "seed": 0,
    "n": 1,
    "stream": False,
    # A model's generation_config.json may set penalties, which vLLM takes as defaults. They change
    # which token is chosen, but not the log-probabilities that it is judged by.
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointFailed(AutotuneError):
    """A server did not answer a question of the gate: it died, refused, or speaks otherwise."""


@dataclass(frozen=True)
class Endpoint:
    """A running OpenAI-compatible vLLM server."""

    base_url: str
    """Such as ``http://127.0.0.1:8000``."""
    model: str
    """The name under which the server serves the model."""
    kind: EndpointKind = "chat"
    request_timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and the tokens after it, which are to be scored."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """One greedy answer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The end-of-sequence token included, where the answer ends with one."""
    text: str
    finish_reason: str

    @property
    def sequence(self) -> TokenSequence:
        return TokenSequence(self.prompt_token_ids, self.token_ids)


@dataclass(frozen=True)
class ScoredToken:
    """What the model thinks of one given token, after everything before it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The model's own best tokens with their log-probabilities (nats), the best one first."""

    @property
    def gap_nats(self) -> float:
        """How far the token is below the best one; 0 for the best one itself, or an exact tie.

        Not its rank: vLLM counts the tokens that are at least as probable, so both of two tied best
        tokens have rank 2, and ties are common where logits are bf16. Such logits lie 1/8 or 1/16
        apart, so gaps fall right on round limits; the rounding takes off what fp32 adds to them.
        """
        return round(max(0.0, self.top[0][1] - self.logprob), 4)


def collect_answers(
    endpoint: Endpoint,
    prompts: Sequence[QualityPrompt],
    concurrency: int,
    should_stop: ShouldStop | None = None,
) -> list[Answer]:
    """Ask every prompt once, greedily, and return the answers in the order of the prompts.

    Never asks for log-probabilities: that alone can change which of two tied tokens is chosen
    (vLLM issue #42960).

    Args:
        concurrency: requests in flight at once.
        should_stop: asked every half second; True gives up.

    Raises:
        EndpointFailed: the server did not answer one of them.
        MeasurementStopped: `should_stop` said so.
    """
    path = "/v1/chat/completions" if endpoint.kind == "chat" else "/v1/completions"

    async def ask(ask_server: _Ask, prompt: QualityPrompt) -> Answer:
        body = {
            **prompt.body,
            **GREEDY,
            "max_tokens": prompt.max_tokens,
            "return_token_ids": True,
        }
        return _answer(await ask_server(path, body))

    return _run(endpoint, prompts, ask, concurrency, should_stop)


def score(
    endpoint: Endpoint,
    sequences: Sequence[TokenSequence],
    num_top: int,
    should_stop: ShouldStop | None = None,
) -> list[tuple[ScoredToken, ...]]:
    """Ask what the model thinks of given tokens, each after all before it (teacher forcing).

    The server's target model reads prompt and tokens in one pass; speculation takes no part in it,
    whether the server is set up for it or not.

    Args:
        num_top: how many of the best tokens to return for each position, 1 to the server's
            `--max-logprobs` (20 by default).
        should_stop: asked every half second; True gives up.

    Returns:
        For each sequence one entry per token after the prompt.

    Raises:
        EndpointFailed: the server did not answer one of them.
        MeasurementStopped: `should_stop` said so.
    """

    async def ask(ask_server: _Ask, sequence: TokenSequence) -> tuple[ScoredToken, ...]:
        body = {
            "prompt": [*sequence.prompt_token_ids, *sequence.token_ids],
            "temperature": 0,
            "max_tokens": 1,  # the least that is allowed; it is thrown away
            "prompt_logprobs": num_top,
        }
        return _scored(await ask_server("/v1/completions", body), sequence, num_top)

    return _run(endpoint, sequences, ask, SCORING_CONCURRENCY, should_stop)


_Ask = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


def _run(
    endpoint: Endpoint,
    items: Sequence[Item],
    ask: Callable[[_Ask, Item], Awaitable[Result]],
    concurrency: int,
    should_stop: ShouldStop | None,
) -> list[Result]:
    """Ask about all items, so many at once; the first failure ends it all."""
    try:
        return asyncio.run(_ask_all(endpoint, items, ask, concurrency, should_stop))
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group; the others are of questions asked at the same time."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


async def _ask_all(
    endpoint: Endpoint,
    items: Sequence[Item],
    ask: Callable[[_Ask, Item], Awaitable[Result]],
    concurrency: int,
    should_stop: ShouldStop | None,
) -> list[Result]:
    results: dict[int, Result] = {}
    waiting = iter(enumerate(items))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask_server(path: str, body: Mapping[str, Any]) -> Any:
            return await _post(session, endpoint, path, body)

        async def worker() -> None:
            for number, item in waiting:
                results[number] = await ask(ask_server, item)

        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(worker()) for _ in range(min(max(1, concurrency), len(items)))
            ]
            if should_stop is not None:
                group.create_task(_watch(workers, should_stop))
    return [results[number] for number in range(len(items))]


async def _watch(workers: Sequence[asyncio.Task[None]], should_stop: ShouldStop) -> None:
    """End everything when `should_stop` says so, and itself when the work is done."""
    while not all(task.done() for task in workers):
        if should_stop():
            raise MeasurementStopped("the quality gate was stopped")
        await asyncio.wait(workers, timeout=STOP_POLL_S)


async def _post(
    session: aiohttp.ClientSession, endpoint: Endpoint, path: str, body: Mapping[str, Any]
) -> Any:
    payload = orjson.dumps({**body, "model": endpoint.model})
    headers = {"Content-Type": "application/json"}
    began_s = time.monotonic()
    try:
        async with session.post(
            endpoint.base_url + path, data=payload, headers=headers
        ) as response:
            data = await _read(response)
            status = response.status
    except TimeoutError as err:
        raise EndpointFailed(f"{path}: no answer within {endpoint.request_timeout_s:g} s") from err
    except (aiohttp.ClientError, OSError, ValueError) as err:
        waited_s = time.monotonic() - began_s
        raise EndpointFailed(
            f"{path}: the server cannot be reached or broke off after {waited_s:.1f} s "
            f"({type(err).__name__})"
        ) from err
    if status != 200:
        text = told(data[:MAX_ERROR_BYTES].decode("utf-8", "replace"))
        raise EndpointFailed(f"{path}: the server refused a request: HTTP {status}: {text}")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as err:
        raise EndpointFailed(f"{path}: the server's answer is not JSON") from err


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read a body of bounded size.

    Raises:
        ValueError: it is larger than `MAX_RESPONSE_BYTES`.
    """
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise ValueError("the answer is too large")
        parts.append(part)
    return b"".join(parts)


_WRONG_SHAPE = (LookupError, TypeError, ValueError, AttributeError)
"""What reading JSON of an unexpected shape raises."""


def _answer(data: Any) -> Answer:
    try:
        choice = data["choices"][0]
        prompt_ids = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
        return Answer(
            prompt_token_ids=tuple(map(int, prompt_ids)),
            token_ids=tuple(map(int, choice["token_ids"])),
            text=_text(choice),
            finish_reason=str(choice["finish_reason"]),
        )
    except _WRONG_SHAPE as err:
        raise EndpointFailed(
            "the server's answer has no token ids: the gate needs vLLM's `return_token_ids` "
            "(0.10.2 or newer)"
        ) from err


def _text(choice: Mapping[str, Any]) -> str:
    """Return the whole text of an answer, what a reasoning parser has split off included."""
    message = choice.get("message")
    if message is None:
        return str(choice["text"] or "")
    return "".join(
        str(message.get(part) or "") for part in ("reasoning", "reasoning_content", "content")
    )


def _scored(data: Any, sequence: TokenSequence, num_top: int) -> tuple[ScoredToken, ...]:
    try:
        rows = data["choices"][0]["prompt_logprobs"][len(sequence.prompt_token_ids) :]
        return tuple(
            _scored_token(row, token_id, num_top)
            for row, token_id in zip(rows, sequence.token_ids, strict=True)
        )
    except _WRONG_SHAPE as err:
        raise EndpointFailed(
            "the server's answer has no log-probabilities for every token of the prompt"
        ) from err


def _scored_token(row: Mapping[str, Any], token_id: int, num_top: int) -> ScoredToken:
    """Read one position: {token id: {"logprob", "rank"}}, the given token included.

    The given token stands there whether it is among the best or not, so what is above the rank
    asked for is not one of the best. The one among the best bears its rank there.
    """
    best = [(int(i), float(e["logprob"])) for i, e in row.items() if int(e["rank"]) <= num_top]
    best.sort(key=lambda pair: (-pair[1], pair[0]))
    if not best:
        raise ValueError("a position without best tokens")
    return ScoredToken(token_id, float(row[str(token_id)]["logprob"]), tuple(best))
