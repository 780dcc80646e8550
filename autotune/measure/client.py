"""The tuner's side of the load generator: start the process, hand it jobs, collect records."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.closing import Closing
from autotune.errors import AutotuneError
from autotune.measure.records import ClientAudit, RequestRecord, record_from_dict
from autotune.traffic.schedule import Schedule, ScheduledRequest

START_TIMEOUT_S = 60.0
GRACE_S = 30.0

OnRecord = Callable[[RequestRecord], None]
ShouldStop = Callable[[], bool]


class MeasurementStopped(AutotuneError):
    """The measurement was stopped from outside before it was complete."""


class ClientFailed(AutotuneError):
    """The load generator itself ended or hung."""


@dataclass(frozen=True)
class Drive:
    """What one run of the load generator brought."""

    records: tuple[RequestRecord, ...]
    audit: ClientAudit
    duration_s: float


class LoadClient(Closing):
    """A load generator process that serves several runs; use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autotune.measure.client_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A ctrl-C in the terminal must reach the tuner alone, which then stops the client.
            start_new_session=True,
        )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._is_ready = False

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(
                    BrokenPipeError
                ):  # unsent bytes for a process that is gone
                    pipe.close()

    def run(
        self,
        schedule: Schedule,
        requests: Sequence[ScheduledRequest],
        base_url: str,
        model: str,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Drive:
        """Send `requests` to the server at `base_url` and return when the last one is answered.

        Open loop (the requests have arrival times): each conversation begins at its first turn's
        time, whatever the server does, and a later turn is due `think_s` after the answer to the one
        before; latency counts from these times. Closed loop: each user sends a conversation's turns,
        then takes the next conversation, and waits `think_s` before every request. A lone request is
        a conversation of one turn. Nothing is sent later than `schedule.max_duration_s`; a request
        that was not sent by then has no record. The turns after one that failed are not sent, and
        have records with the error kind `previous_turn`.

        Args:
            schedule: gives the endpoint, the kind of load and the limits on time.
            requests: the schedule's own requests, or its warm-up.
            base_url: such as ``http://127.0.0.1:8000``.
            model: the name under which the server serves the model.
            on_record: called with each record as it arrives.
            should_stop: asked between records, at least once a second; True ends the run.

        Raises:
            MeasurementStopped: `should_stop` said so.
            ClientFailed: the load generator died or went past every time limit.
            ValueError: in open loop, a conversation's first turn has no arrival time.
        """
        if not requests:
            return Drive((), ClientAudit(), 0.0)
        self._wait_ready()
        began = time.perf_counter()
        deadline = began + schedule.max_duration_s + schedule.request_timeout_s + GRACE_S
        self._send(_job(schedule, requests, base_url, model))
        by_id = {r.request_id: r for r in requests}
        records: list[RequestRecord] = []
        while True:
            message = self._next(deadline, should_stop)
            if message["type"] == "done":
                audit = ClientAudit(**message["audit"])
                return Drive(tuple(records), audit, time.perf_counter() - began)
            record = _record(message, by_id)
            records.append(record)
            if on_record is not None:
                on_record(record)

    def _next(self, deadline: float, should_stop: ShouldStop | None) -> dict[str, Any]:
        while True:
            if should_stop is not None and should_stop():
                self.close()
                raise MeasurementStopped("the measurement was stopped")
            try:
                message = self._messages.get(timeout=0.5)
            except queue.Empty:
                if time.perf_counter() > deadline:
                    self.close()
                    raise ClientFailed("the load generator went past every time limit") from None
                continue
            if message is None:
                raise ClientFailed(f"the load generator ended with code {self._process.wait()}")
            return message

    def _wait_ready(self) -> None:
        if not self._is_ready:
            self._next(time.perf_counter() + START_TIMEOUT_S, None)
            self._is_ready = True

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # opened as a pipe in __init__
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as err:  # ValueError: the pipe was closed by close()
            raise ClientFailed(f"the load generator has ended: {err}") from err

    def _read(self) -> None:
        assert self._process.stdout is not None  # opened as a pipe in __init__
        try:
            for line in self._process.stdout:
                self._messages.put(json.loads(line))
        except ValueError:
            pass  # closed by close(), or cut off in the middle of a line by the process's death
        self._messages.put(None)


def _job(
    schedule: Schedule, requests: Sequence[ScheduledRequest], base_url: str, model: str
) -> dict[str, Any]:
    path = "/v1/chat/completions" if schedule.endpoint == "chat" else "/v1/completions"
    # Warm-up requests have no arrival times, so they go in closed loop whatever the load is.
    is_open_loop = any(r.arrival_s is not None for r in requests)
    for request in requests if is_open_loop else ():
        if request.arrival_s is None and (request.conversation_id is None or request.turn == 0):
            raise ValueError(f"request {request.request_id} has no arrival time")
    return {
        "base_url": base_url,
        "path": path,
        "model": model,
        "concurrency": None if is_open_loop else schedule.concurrency or len(requests),
        "max_duration_s": schedule.max_duration_s,
        "request_timeout_s": schedule.request_timeout_s,
        "keeps_outputs": schedule.keeps_outputs,
        "requests": [
            {
                "request_id": r.request_id,
                "arrival_s": r.arrival_s,
                "conversation_id": r.conversation_id,
                "turn": r.turn,
                "think_s": r.think_s,
                "is_live": r.is_live,
                "body": r.body(schedule.endpoint),
            }
            for r in requests
        ],
    }


def _record(message: dict[str, Any], by_id: dict[int, ScheduledRequest]) -> RequestRecord:
    row = {key: value for key, value in message.items() if key != "type"}
    request = by_id[row["request_id"]]
    return record_from_dict(
        {
            **row,
            "class_name": request.class_name,
            "prompt_id": request.prompt.prompt_id,
            "conversation_id": request.conversation_id,
            "turn": request.turn,
            "think_s": request.think_s,
        }
    )
