"""The load generator's process: reads jobs on stdin, sends requests, writes records on stdout.

It lives in a process of its own so that nothing the tuner does (statistics, database, display)
delays a send or a time stamp. One JSON object a line, both ways:

in   {"base_url", "path", "model", "concurrency", "max_duration_s", "request_timeout_s", "keeps_outputs",
      "requests": [...]}
out  {"type": "record", ...} for every request as it finishes, then {"type": "done", "audit": {...}}

It ends when stdin closes, so it cannot outlive the tuner.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import aiohttp
import orjson

from autotune.measure.loops import is_looping
from autotune.measure.server_errors import told
from autotune.measure.stream import Answer, AnswerError, ErrorKind

ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
"""How a request can fail: no answer in time (timeout), refused by status (http_...), an error object
inside a stream that began well (stream_error), no connection (refused) or a lost one (reset), an answer
that ends in the middle (truncated) or brings no token (empty), something that is not OpenAI's protocol
(protocol), or a turn that was not sent because the one before it failed (previous_turn)."""

READ_BUFFER_BYTES = 4 * 1024 * 1024
"""With aiohttp's 64 KiB, reading stops and starts again within one large answer (vLLM issue #39963)."""
KEEP_ALIVE_S = 4.0
"""vLLM closes a connection that was idle for 5 s; a request sent into the closing would be lost."""
LAG_PROBE_S = 0.005
TIMER_S = 0.001
"""epoll's timeouts are whole milliseconds, rounded up."""
MAX_JOB_BYTES = 2**31
MAX_ERROR_CHARS = 500
MAX_ERROR_BYTES = 8192
HEADERS = {
    "Content-Type": "application/json",
    # A proxy that compresses holds chunks back until its buffer is full.
    "Accept-Encoding": "identity",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a job."""

    request_id: int
    arrival_s: float | None
    conversation_id: int | None
    number: int
    think_s: float
    is_live: bool
    body: dict[str, Any]
    payload: bytes | None
    """The body as it is sent, made beforehand; None where it depends on earlier answers, or cannot be
    encoded."""

    @classmethod
    def of(cls, row: dict[str, Any], model: str) -> Turn:
        body = {
            **row["body"],
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return cls(
            request_id=row["request_id"],
            arrival_s=row["arrival_s"],
            conversation_id=row["conversation_id"],
            number=row["turn"],
            think_s=row["think_s"],
            is_live=row["is_live"],
            body=body,
            payload=None if row["is_live"] else _encoded(body),
        )

    def payload_after(self, dialogue: Dialogue) -> bytes | None:
        """Return the body to send after what was said before; None where it cannot be encoded."""
        return _encoded(dialogue.before(self.body)) if self.is_live else self.payload


class Dialogue:
    """What was said so far in a live conversation: the prompts' own messages and the answers."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def before(self, body: dict[str, Any]) -> dict[str, Any]:
        """Put what was said before the messages, or before the text, of `body`."""
        if "messages" in body:
            return {**body, "messages": [*self._messages, *body["messages"]]}
        return {**body, "prompt": "\n\n".join([*self._texts, body["prompt"]])}

    def add(self, body: dict[str, Any], answer: str) -> None:
        self._messages += [*body.get("messages", ()), {"role": "assistant", "content": answer}]
        self._texts += [body.get("prompt", ""), answer]


class Run:
    """One job: a list of requests, sent in closed or open loop."""

    def __init__(
        self, job: dict[str, Any], session: aiohttp.ClientSession, out: asyncio.WriteTransport
    ) -> None:
        self._session = session
        self._out = out
        self._url: str = job["base_url"] + job["path"]
        self._concurrency: int | None = job["concurrency"]
        self._max_duration_s: float = job["max_duration_s"]
        self._timeout_s: float = job["request_timeout_s"]
        self._keeps_outputs: bool = job["keeps_outputs"]
        self._conversations = _conversations([Turn.of(r, job["model"]) for r in job["requests"]])
        self._lags_s: list[float] = []
        self._lateness_s: list[float] = []
        self._num_chunks = self._num_reads = 0
        self._began_s = 0.0

    async def go(self) -> dict[str, float]:
        """Send everything and return the client's self-audit."""
        self._began_s = time.perf_counter()
        probe = asyncio.create_task(self._probe_lag())
        cpu_before_s = _cpu_s()
        if self._concurrency is None:
            await self._open_loop()
        else:
            await self._closed_loop(self._concurrency)
        elapsed_s = max(self._now_s(), 1e-9)
        probe.cancel()
        return {
            "send_lateness_p99_ms": _p99(self._lateness_s) * 1e3,
            "cpu_ratio": (_cpu_s() - cpu_before_s) / elapsed_s,
            "loop_lag_p99_ms": _p99(self._lags_s) * 1e3,
            "num_chunks": self._num_chunks,
            "chunks_per_read": self._num_chunks / self._num_reads if self._num_reads else 0.0,
        }

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _closed_loop(self, concurrency: int) -> None:
        waiting = iter(self._conversations)
        await asyncio.gather(*(self._user(waiting) for _ in range(concurrency)))

    async def _user(self, waiting: Iterator[Sequence[Turn]]) -> None:
        for turns in waiting:
            if not await self._converse(turns, None):
                return

    async def _open_loop(self) -> None:
        tasks = []
        for arrival_s, turns in sorted(
            ((turns[0].arrival_s or 0.0, turns) for turns in self._conversations),
            key=lambda pair: pair[0],
        ):
            if arrival_s > self._max_duration_s:
                break
            await self._until(arrival_s)
            tasks.append(asyncio.create_task(self._converse(turns, arrival_s)))
        await asyncio.gather(*tasks)

    async def _converse(self, turns: Sequence[Turn], arrival_s: float | None) -> bool:
        """Send the turns of one conversation, each after the answer to the one before.

        Args:
            turns: in order; a lone request is a conversation of one turn.
            arrival_s: when the first one is due, in open loop; None in closed loop.

        Returns:
            Whether there was time to send them.
        """
        dialogue, ended_s = Dialogue(), self._now_s()
        for index, turn in enumerate(turns):
            payload = turn.payload_after(dialogue)
            due_s = ended_s + turn.think_s
            if index == 0 and arrival_s is not None:
                due_s = arrival_s
            if due_s > self._max_duration_s:
                return False
            await self._until(due_s)
            answer = await self._send(turn, payload, due_s if arrival_s is not None else None)
            if answer is None:
                for later in turns[index + 1 :]:
                    self._give_up(later, is_open_loop=arrival_s is not None)
                return True
            ended_s = self._now_s()
            dialogue.add(turn.body, "".join(answer.content))
        return True

    async def _until(self, due_s: float) -> None:
        """Wait until a moment, to a few hundredths of a millisecond where the loop is free.

        The last part of the wait only yields: a sleep there would end up to 1 ms late.
        """
        left_s = due_s - self._now_s()
        if left_s > TIMER_S:
            await asyncio.sleep(left_s - TIMER_S)
        while self._now_s() < due_s:
            await asyncio.sleep(0)

    async def _send(self, turn: Turn, payload: bytes | None, due_s: float | None) -> Answer | None:
        """Send one request, read its answer, write its record; return the answer if it is whole."""
        answer, failure = Answer(), None
        sent_s = self._now_s()
        if due_s is not None:
            self._lateness_s.append(sent_s - due_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream_into(answer, payload)
        except TimeoutError:
            failure = AnswerError("timeout", f"timeout after {self._timeout_s} s")
        except AnswerError as err:
            failure = err
        except (aiohttp.ClientError, OSError, ValueError) as err:
            failure = AnswerError(_kind_of(err), f"{type(err).__name__}: {err}")
        self._write_record(turn, due_s, sent_s, answer, failure)
        return answer if failure is None else None

    async def _stream_into(self, answer: Answer, payload: bytes | None) -> None:
        if payload is None:
            raise AnswerError("protocol", "the prompt cannot be encoded as UTF-8")
        async with self._session.post(
            self._url, data=payload, headers=HEADERS, allow_redirects=False
        ) as response:
            if response.status != 200:
                said = told(
                    (await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                )
                kind = _kind_of_status(response.status)
                raise AnswerError(kind, f"HTTP {response.status}: {said}")
            async for data in response.content.iter_any():
                answer.feed(data, self._now_s())
        answer.end(self._now_s())

    def _write_record(
        self,
        turn: Turn,
        due_s: float | None,
        sent_s: float,
        answer: Answer,
        failure: AnswerError | None,
    ) -> None:
        finished_s = self._now_s()
        self._num_chunks += len(answer.times_s)
        self._num_reads += answer.num_reads
        content = "".join(answer.content)
        write(
            self._out,
            {
                "type": "record",
                "request_id": turn.request_id,
                "scheduled_s": due_s,
                "sent_s": sent_s,
                "chunk_times_s": answer.times_s,
                "chunk_tokens": answer.chunk_tokens,
                "finished_s": finished_s,
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_completion_tokens": answer.num_tokens,
                "finish_reason": answer.finish_reason,
                "error": str(failure)[:MAX_ERROR_CHARS] if failure else None,
                "error_kind": failure.kind if failure else None,
                "is_looping": is_looping(content) or is_looping("".join(answer.thoughts)),
                "output_text": content if self._keeps_outputs else None,
            },
        )

    def _give_up(self, turn: Turn, *, is_open_loop: bool) -> None:
        now_s = self._now_s()
        failure = AnswerError("previous_turn", "the turn before it failed")
        self._write_record(turn, now_s if is_open_loop else None, now_s, Answer(), failure)

    async def _probe_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PROBE_S)
            self._lags_s.append(time.perf_counter() - before - LAG_PROBE_S)


def write(out: asyncio.WriteTransport, message: dict[str, Any]) -> None:
    """Write one line; what the tuner is too busy to read waits in memory and blocks nothing."""
    out.write(orjson.dumps(message) + b"\n")


def _encoded(body: dict[str, Any]) -> bytes | None:
    try:
        return orjson.dumps(body)
    except TypeError:  # half of a surrogate pair, which JSON can escape but UTF-8 cannot hold
        return None


def _conversations(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Group the turns of each conversation, in order; a lone request stands alone."""
    groups: dict[tuple[bool, int], list[Turn]] = {}
    for turn in turns:
        is_alone = turn.conversation_id is None
        key = turn.request_id if turn.conversation_id is None else turn.conversation_id
        groups.setdefault((is_alone, key), []).append(turn)
    return [sorted(group, key=lambda turn: turn.number) for group in groups.values()]


def _kind_of(error: Exception) -> ErrorKind:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "refused"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return "reset"
    return "protocol"


def _kind_of_status(status: int) -> ErrorKind:
    if status in {429, 503}:
        return "http_429" if status == 429 else "http_503"
    if 400 <= status < 500:
        return "http_4xx"
    return "http_5xx" if status >= 500 else "protocol"


def _p99(values: list[float]) -> float:
    """Return the value that 99 % lie at or below; in short runs all but the highest do."""
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1,024, to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    jobs = asyncio.StreamReader(limit=MAX_JOB_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(jobs), sys.stdin)
    out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout.buffer)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        read_bufsize=READ_BUFFER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        write(out, {"type": "ready"})
        next_line = asyncio.create_task(jobs.readline())
        while line := await next_line:
            next_line = asyncio.create_task(jobs.readline())
            run = Run(json.loads(line), session, out)
            # The job's objects stay for the whole run: no collection has to look at them.
            gc.collect()
            gc.freeze()
            running = asyncio.create_task(run.go())
            done, _ = await asyncio.wait({running, next_line}, return_when=asyncio.FIRST_COMPLETED)
            if running not in done:  # stdin closed in the middle of a job
                running.cancel()
                return
            write(out, {"type": "done", "audit": running.result()})


def main() -> None:
    """Run until stdin closes."""
    _allow_many_connections()
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
