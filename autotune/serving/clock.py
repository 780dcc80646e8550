"""Time, real or virtual. Budgets, timeouts and time stamps go through it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """Gives the time and passes it.

    Thread safety: `now_s` may be called from any thread; `sleep` from the thread that owns the engine.
    """

    @abstractmethod
    def now_s(self) -> float:
        """Seconds since the Unix epoch; never goes backwards within one clock."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""


class RealClock(Clock):
    """Wall-clock time that a correction of the system's clock cannot move."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock(Clock):
    """Time that passes only when it is told to: a study of hours takes seconds."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(
                f"a clock cannot go back: seconds must be at least 0, but got {seconds}"
            )
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Go on from where an earlier session of a study ended; never goes back."""
        self._now_s = max(self._now_s, now_s)
