"""The load generator's process: reads jobs on stdin, sends requests, writes records on stdout.

It lives in a process of its own so that nothing the tuner does (statistics, database, display)
delays a send or a time stamp. One JSON object a line, both ways:

in   {"base_url", "path", "model", "concurrency", "max_duration_s", "request_timeout_s", "requests": [...]}
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
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson

READ_BUFFER_BYTES = 4 * 1024 * 1024
LAG_PROBE_S = 0.005
MAX_JOB_BYTES = 2**31


class Stream:
    """What one streamed answer brought so far."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.is_done = False

    def feed(self, event: bytes, now_s: float) -> None:
        """Take one server-sent event.

        Raises:
            ValueError: the event is an error object, or not JSON.
        """
        data = b"".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data:
            return  # a keep-alive comment
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = orjson.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event that is no object: {data[:80]!r}")
        if "error" in chunk:
            raise ValueError(f"error in the stream: {_message(chunk['error'])}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._count(chunk, now_s)

    def _count(self, chunk: dict[str, Any], now_s: float) -> None:
        """Note the chunk's time if it brought tokens, by the server's count, never by chunks."""
        total = int((chunk.get("usage") or {}).get("completion_tokens") or 0)
        if chunk.get("choices") and total > (self.tokens[-1] if self.tokens else 0):
            self.times_s.append(now_s)
            self.tokens.append(total)


def _message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class Run:
    """One job: a list of requests, sent in closed or open loop."""

    def __init__(self, job: dict[str, Any], session: aiohttp.ClientSession) -> None:
        self.job = job
        self.session = session
        self.url = job["base_url"] + job["path"]
        self.began_s = time.perf_counter()
        self.lags_s: list[float] = []
        self.lateness_s: list[float] = []

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    async def go(self) -> dict[str, float]:
        """Send everything and return the client's self-audit."""
        probe = asyncio.create_task(self._probe_lag())
        cpu_before = _cpu_s()
        if self.job["concurrency"] is None:
            await self._open_loop()
        else:
            await self._closed_loop(self.job["concurrency"])
        elapsed_s = max(self.now_s(), 1e-9)
        probe.cancel()
        return {
            "send_lateness_p99_ms": _p99(self.lateness_s) * 1e3,
            "cpu_ratio": (_cpu_s() - cpu_before) / elapsed_s,
            "loop_lag_p99_ms": _p99(self.lags_s) * 1e3,
        }

    async def _closed_loop(self, concurrency: int) -> None:
        waiting = iter(self.job["requests"])
        await asyncio.gather(*(self._user(waiting) for _ in range(concurrency)))

    async def _user(self, waiting: Iterator[dict[str, Any]]) -> None:
        for request in waiting:
            if self.now_s() > self.job["max_duration_s"]:
                return
            await self._send(request, None)

    async def _open_loop(self) -> None:
        tasks = []
        for request in self.job["requests"]:
            due_s = request["arrival_s"]
            if due_s > self.job["max_duration_s"]:
                break
            await asyncio.sleep(max(0.0, due_s - self.now_s()))
            self.lateness_s.append(self.now_s() - due_s)
            tasks.append(asyncio.create_task(self._send(request, due_s)))
        await asyncio.gather(*tasks)

    async def _send(self, request: dict[str, Any], due_s: float | None) -> None:
        stream, error, sent_s = Stream(), None, self.now_s()
        try:
            async with asyncio.timeout(self.job["request_timeout_s"]):
                await self._stream_into(stream, request["body"])
            if not stream.tokens:
                error = "empty output"
        except TimeoutError:
            error = f"timeout after {self.job['request_timeout_s']} s"
        except (
            aiohttp.ClientError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as err:
            # The last four: an event of another shape than OpenAI's. One bad answer is one failed
            # request, never the end of the client.
            error = f"{type(err).__name__}: {err}"[:500]
        _write(
            {
                "type": "record",
                "request_id": request["request_id"],
                "scheduled_s": due_s,
                "sent_s": sent_s,
                "chunk_times_s": stream.times_s,
                "chunk_tokens": stream.tokens,
                "finished_s": self.now_s(),
                "num_prompt_tokens": int(stream.usage.get("prompt_tokens") or 0),
                "num_completion_tokens": stream.tokens[-1] if stream.tokens else 0,
                "finish_reason": stream.finish_reason,
                "error": error,
            }
        )

    async def _stream_into(self, stream: Stream, body: dict[str, Any]) -> None:
        payload = orjson.dumps(
            {
                **body,
                "model": self.job["model"],
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url, data=payload, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            pending = b""
            async for data in response.content.iter_any():
                now_s = self.now_s()  # before any parsing
                *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    stream.feed(event, now_s)
        if not stream.is_done and stream.finish_reason is None:
            raise ValueError("the stream ended in the middle of an answer")

    async def _probe_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PROBE_S)
            self.lags_s.append(time.perf_counter() - before - LAG_PROBE_S)


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


async def _serve() -> None:
    jobs = asyncio.StreamReader(limit=MAX_JOB_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(jobs), sys.stdin
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector,
        read_bufsize=READ_BUFFER_BYTES,
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        gc.freeze()
        _write({"type": "ready"})
        next_line = asyncio.create_task(jobs.readline())
        while line := await next_line:
            next_line = asyncio.create_task(jobs.readline())
            running = asyncio.create_task(Run(json.loads(line), session).go())
            done, _ = await asyncio.wait({running, next_line}, return_when=asyncio.FIRST_COMPLETED)
            if running not in done:  # stdin closed in the middle of a job
                running.cancel()
                return
            _write({"type": "done", "audit": running.result()})


def main() -> None:
    """Run until stdin closes."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
