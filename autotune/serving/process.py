"""A server process under a supervisor: started, watched, and ended with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError

GRACE_S = 4.0
"""How long a server may take to end by itself before it is killed."""
START_TIMEOUT_S = 30.0


class ServerProcess:
    """One supervised server; `stop` ends it and everything it started."""

    def __init__(self, command: Sequence[str], log_path: Path, env: Mapping[str, str]) -> None:
        """Start `command`.

        Raises:
            AutotuneError: the command cannot be started at all.
        """
        self.log_path = log_path
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "autotune.serving.supervisor", str(log_path), str(GRACE_S), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        started = self._next(START_TIMEOUT_S)
        if not started or not started.get("started"):
            self.stop()
            reason = started.get("error") if started else "the supervisor did not answer"
            raise AutotuneError(f"the server could not be started: {reason}")
        self.pid = int(started["pid"])
        self._ended: dict[str, Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the server still runs."""
        if self._ended is None:
            with contextlib.suppress(queue.Empty):
                self._ended = self._messages.get_nowait() or {}
        return self._ended is None

    def stop(self) -> int:
        """End the server and its children; safe to call twice.

        Returns:
            How many processes would not end (0 in every case known).
        """
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()
        try:
            self._supervisor.wait(timeout=GRACE_S + 30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()
        last = getattr(self, "_ended", None) or self._next(1.0) or {}
        return int(last.get("num_left", 0))

    def log_tail(self, max_bytes: int = 400_000) -> str:
        """Return the end of the server's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - max_bytes))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _read(self) -> None:
        assert self._supervisor.stdout is not None  # opened as a pipe in __init__
        with self._supervisor.stdout as lines:
            for line in lines:
                self._messages.put(json.loads(line))
        self._messages.put(None)


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
