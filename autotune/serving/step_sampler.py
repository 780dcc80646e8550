"""Chance in the simulated engine: noise on times, and draws of how many drafts are accepted."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.serving.config import ServingConfig
from autotune.serving.step_cost import FloatArray, step_time_s
from autotune.serving.worlds import World, acceptance

IntArray = npt.NDArray[np.int64]

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
    """Draws how long the steps of one run take, and how many drafts they accept."""

    world: World
    config: ServingConfig
    speed: float
    """Factor on every step's time."""
    sigma: float
    """Spread of single steps; 0 turns all randomness off."""
    rng: np.random.Generator

    def __post_init__(self) -> None:
        levels = acceptance(self.world, self.config)
        self._depth = len(levels)
        # Ascending, as searchsorted wants it.
        self._survival = np.array(levels[::-1])
        self._tokens_per_draft = 1.0 + float(self._survival.sum())

    def is_drafting(self, num_scheduled: int) -> bool:
        """Say whether a step with so many requests, prompts included, drafts."""
        off_above = self.config.speculation_off_above
        return self.config.is_speculative and (off_above is None or num_scheduled <= off_above)

    def mean_tokens(self, *, is_drafting: bool) -> float:
        return self._tokens_per_draft if is_drafting else 1.0

    def steps_s(
        self, batch: int, context_tokens: FloatArray, prefill_tokens: int, *, is_drafting: bool
    ) -> FloatArray:
        """Return the time of each of a row of steps."""
        exact = step_time_s(
            self.world,
            self.config,
            batch,
            context_tokens,
            prefill_tokens,
            is_drafting=is_drafting or not self.config.is_speculative,
        )
        if not self.sigma:
            return exact * self.speed
        return exact * self.speed * self.rng.lognormal(0.0, self.sigma, len(exact))

    def accepted(
        self, num_steps: int, request_ids: IntArray, steps_done: IntArray, *, is_drafting: bool
    ) -> IntArray:
        """Draw how many drafts are accepted, shape (num_steps, number of requests).

        Args:
            num_steps: how many steps follow each other.
            request_ids: who decodes.
            steps_done: how many steps each of them has had before.
            is_drafting: without, nothing is drafted or accepted.
        """
        shape = (num_steps, len(request_ids))
        if not is_drafting:
            return np.zeros(shape, dtype=np.int64)
        if self.sigma:
            level = self.rng.random(shape)
        else:
            level = _even_levels(num_steps, request_ids, steps_done)
        # As many as there are positions whose prefixes survive more often than the drawn level.
        survived: IntArray = self._depth - np.searchsorted(self._survival, level, side="right")
        return survived


def _even_levels(num_steps: int, request_ids: IntArray, steps_done: IntArray) -> FloatArray:
    """Spread levels evenly over (0, 1): their averages come out exact where random ones scatter.

    The fractional parts of multiples of the golden ratio are such a sequence (Weyl 1916).
    """
    first = request_ids * 7919 + steps_done
    levels: FloatArray = ((first + np.arange(num_steps)[:, None] + 0.5) * _GOLDEN_RATIO) % 1.0
    return levels
