"""Applies checks in a process that is ended when one of them takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.closing import Closing
from autotune.errors import AutotuneError, invalid
from autotune.measure.quality.checks import CheckRow

CHECK_TIMEOUT_S = 10.0
"""Of one check on one answer."""
READ_BYTES = 65536
_EXPLAINED = {
    "timeout": "the check must be ready to use within seconds, but is not",
    "died": "the check must not end its process, but does",
}


@dataclass(frozen=True)
class CheckOutcome:
    """Whether one answer solves its task."""

    is_solved: bool
    reason: str | None = None
    """Why the check could not be applied: "timeout", "died", or the name of an exception."""


class CheckRunner(Closing):
    """A process that applies checks, started anew when one has hung; use it as a context manager."""

    def __init__(self, folder: Path, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """
        Args:
            folder: where modules of `python` checks are looked up first: that of the file of checks.
            timeout_s: of one check.
        """
        self._folder = folder
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, rows: Iterable[CheckRow]) -> None:
        """Make sure that every check can be applied at all, before any server is asked.

        Raises:
            InputError: a pattern, a schema or a function is no good; the message says where.
        """
        seen = set()
        for row in rows:
            job = {"check": row.check.model_dump()}
            key = json.dumps(job, sort_keys=True)
            if key in seen:
                continue
            seen.add(key)
            reason = self._ask(job).reason
            if reason is not None:
                raise invalid(_EXPLAINED.get(reason, reason), where=row.where, key_path="check")

    def run(self, row: CheckRow, answer: str) -> CheckOutcome:
        """Apply a row's check to an answer; what goes wrong counts as unsolved, with the reason."""
        return self._ask({"check": row.check.model_dump(), "prompt": row.text, "answer": answer})

    def close(self) -> None:
        """End the process and what it started; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, job: dict[str, Any]) -> CheckOutcome:
        process = self._process or self._start()
        assert process.stdin is not None  # opened as a pipe in _start
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self.close()
            return CheckOutcome(False, "died")
        line = self._read_line(process)
        if line is None or not line.endswith(b"\n"):
            self.close()
            return CheckOutcome(False, "timeout" if line is None else "died")
        reply = json.loads(line)
        return CheckOutcome(reply["is_solved"], reply["reason"])

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """Return the reply's line, cut short where the process ended; None when time is up."""
        assert process.stdout is not None  # opened as a pipe in _start
        deadline, line = time.monotonic() + self._timeout_s, b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                return None
            part = os.read(process.stdout.fileno(), READ_BYTES)
            if not part:
                return line
            line += part
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.measure.quality.check_worker", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What a check prints can quote an answer.
                stderr=subprocess.DEVNULL,
                # So that everything a check starts can be ended with it.
                start_new_session=True,
            )
        except OSError as err:
            raise AutotuneError(f"the process for checks cannot be started: {err}") from err
        return self._process
