"""Chance in the simulated engine: noise on times, and draws of how many drafts are accepted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.serving.config import ServingConfig
from autotune.serving.flights import Flight
from autotune.serving.step_cost import FloatArray, step_time_s
from autotune.serving.worlds import World, survival

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def named_rng(*parts: object) -> np.random.Generator:
    """Make a generator from names; `hash` would differ from process to process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def noise_factor(rng: np.random.Generator, sigma: float) -> float:
    """Draw a factor around 1; without a spread it is 1, and nothing is drawn."""
    return float(rng.lognormal(0.0, sigma)) if sigma else 1.0


@dataclass
class StepSampler:
    """Draws how long the steps of one launch take, and how many drafts they accept."""

    world: World
    config: ServingConfig
    speed: float
    """Factor on every step's time."""
    sigma: float
    """Spread of single steps; 0 turns all randomness off."""
    rng: np.random.Generator

    def __post_init__(self) -> None:
        # Ascending, as searchsorted wants it.
        self._survival = np.array(survival(self.world, self.config.num_speculative_tokens)[::-1])
        self.mean_tokens = 1.0 + float(self._survival.sum())

    def steps_s(self, batch: int, context_tokens: FloatArray, prefill_tokens: int) -> FloatArray:
        """Return the time of each of a row of steps."""
        exact = step_time_s(self.world, self.config, batch, context_tokens, prefill_tokens)
        if not self.sigma:
            return exact * self.speed
        return exact * self.speed * self.rng.lognormal(0.0, self.sigma, len(exact))

    def accepted(self, num_steps: int, flights: Sequence[Flight]) -> npt.NDArray[np.intp]:
        """Draw how many drafts are accepted, shape (num_steps, number of flights)."""
        k = self.config.num_speculative_tokens
        if k == 0:
            return np.zeros((num_steps, len(flights)), dtype=np.intp)
        if self.sigma:
            level = self.rng.random((num_steps, len(flights)))
        else:
            level = _even_levels(num_steps, flights)
        # As many as there are positions whose prefixes survive more often than the drawn level.
        return k - np.searchsorted(self._survival, level, side="right")


def _even_levels(num_steps: int, flights: Sequence[Flight]) -> FloatArray:
    """Spread levels evenly over (0, 1): their averages come out exact where random ones scatter.

    The fractional parts of multiples of the golden ratio are such a sequence (Weyl 1916).
    """
    first = np.array([flight.request.request_id * 7919 + flight.num_steps for flight in flights])
    levels: FloatArray = ((first + np.arange(num_steps)[:, None] + 0.5) * _GOLDEN_RATIO) % 1.0
    return levels
