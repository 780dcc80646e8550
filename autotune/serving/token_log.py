"""Which step of a simulated server brought whom how many tokens: one table for a whole run.

A row a step and a column a place in the batch; what one request received is a slice of a column, so handing
out tokens costs no more for 256 requests than for one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.serving.step_sampler import IntArray

_FIRST_STEPS = 1024


class TokenLog:
    """Steps with their times, and the tokens that each place in the batch got in them."""

    def __init__(self, num_places: int) -> None:
        self.num_steps = 0
        self._ends_s = np.zeros(_FIRST_STEPS)
        self._tokens: npt.NDArray[np.int16] = np.zeros((_FIRST_STEPS, num_places), dtype=np.int16)
        self._free = list(range(num_places))

    def take_place(self) -> int:
        """Give a request a place of its own; the lowest that is free."""
        return heapq.heappop(self._free)

    def leave(self, place: int) -> None:
        heapq.heappush(self._free, place)

    def add(self, ends_s: npt.NDArray[np.float64], places: IntArray, tokens: IntArray) -> None:
        """Write steps down.

        Args:
            ends_s: when each step ended.
            places: who got tokens.
            tokens: how many, shape (steps, places).
        """
        first, last = self.num_steps, self.num_steps + len(ends_s)
        while last > len(self._ends_s):
            self._ends_s = np.concatenate([self._ends_s, np.zeros_like(self._ends_s)])
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._ends_s[first:last] = ends_s
        self._tokens[first:last, places] = tokens
        self.num_steps = last

    def add_to_last(self, places: Sequence[int]) -> None:
        """Give one token each to requests whose prompts the last step finished."""
        self._tokens[self.num_steps - 1, places] = 1

    def chunks(self, place: int, first_step: int) -> tuple[list[float], list[int]]:
        """Return when a place got tokens since `first_step`, and how many it had by then."""
        column = self._tokens[first_step : self.num_steps, place]
        steps = column.nonzero()[0]
        times_s: list[float] = self._ends_s[first_step + steps].tolist()
        totals: list[int] = column[steps].cumsum(dtype=np.int64).tolist()
        return times_s, totals
