"""The server side of the comparison: the mock as a process of its own, and what it really did."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.serving.process import free_port

MOCK = Path(__file__).parents[2] / "tests" / "mock_server.py"
MODEL = "mock"


@dataclass(frozen=True)
class Answer:
    """What every answer is, as intended."""

    first_token_s: float = 0.2
    """At the earliest: the first chunk waits for the next step that all answers share."""
    step_s: float = 0.01
    tokens_per_step: tuple[int, ...] = (3, 1, 2, 2)
    """Tokens of the chunks after the first one, which has one, in a cycle."""
    num_chunks: int = 100

    @property
    def num_tokens(self) -> int:
        return 1 + sum(islice(cycle(self.tokens_per_step), self.num_chunks - 1))

    @property
    def ttft_ms(self) -> float:
        """On average half a step after the earliest moment."""
        return (self.first_token_s + self.step_s / 2) * 1e3

    @property
    def tpot_ms(self) -> float:
        """All steps over all tokens after the first chunk's."""
        return (self.num_chunks - 1) * self.step_s / (self.num_tokens - 1) * 1e3


@dataclass(frozen=True)
class Truth:
    """What the server did for one run's requests, by its own clock."""

    ttft_ms: float
    """Mean over requests, from the arrival at the server's handler to the first chunk's send."""
    tpot_ms: float
    began_s: float
    ended_s: float
    """First arrival and last send, on `time.perf_counter()`."""
    chunks_per_s: float
    """Sent from the end of the first answer to the beginning of the last one."""


class Server:
    """The mock on one core; use it as a context manager."""

    def __init__(self, answer: Answer, core: int) -> None:
        self._answer = answer
        self._num_seen = 0
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        options = {
            "--port": port,
            "--model": MODEL,
            "--mock-first-token-s": answer.first_token_s,
            "--mock-step-s": answer.step_s,
            "--mock-tokens-per-step": ",".join(map(str, answer.tokens_per_step)),
            "--mock-output-tokens": answer.num_tokens,
        }
        flat = [str(part) for pair in options.items() for part in pair]
        command = ["taskset", "-c", str(core), sys.executable, str(MOCK), "--mock-in-step", *flat]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        assert self._process.stdout is not None  # opened as a pipe above
        self._process.stdout.readline()  # its first line says that it serves
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def truth(self, num_requests: int) -> Truth:
        """Return what was done for the requests since the last call, which must be so many."""
        with urllib.request.urlopen(f"{self.base_url}/mock/sent") as reply:
            rows: list[dict[str, Any]] = json.load(reply)[self._num_seen :]
        self._num_seen += len(rows)
        num_whole = sum(row["num_tokens"] == self._answer.num_tokens for row in rows)
        if not len(rows) == num_whole == num_requests:
            raise RuntimeError(
                f"{num_requests} answers asked for, {num_whole} of {len(rows)} given"
            )
        return Truth(
            ttft_ms=statistics.mean(r["first_sent_s"] - r["at_s"] for r in rows) * 1e3,
            tpot_ms=statistics.mean(_tpot_ms(r) for r in rows),
            began_s=min(r["at_s"] for r in rows),
            ended_s=max(r["last_sent_s"] for r in rows),
            chunks_per_s=_chunks_per_s(rows),
        )


def _tpot_ms(row: dict[str, Any]) -> float:
    num_tokens = row["num_tokens"] - row["num_first_tokens"]
    return float(row["last_sent_s"] - row["first_sent_s"]) / num_tokens * 1e3


def _chunks_per_s(rows: Sequence[dict[str, Any]]) -> float:
    start_s = min(r["last_sent_s"] for r in rows)
    end_s = max(r["first_sent_s"] for r in rows)
    sent = 0.0
    for row in rows:
        inside_s = min(row["last_sent_s"], end_s) - max(row["first_sent_s"], start_s)
        span_s = row["last_sent_s"] - row["first_sent_s"]
        sent += row["num_chunks"] * max(0.0, inside_s) / span_s
    return sent / (end_s - start_s)
