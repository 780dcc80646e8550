"""How long a screen of each candidate will take, learnt from the launches so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.search.surrogate import FloatArray, Observation
from autotune.serving.config import ServingConfig

GUESSED_LAUNCH_S = 120.0
"""Before any launch was seen; only the ratios between candidates matter, and they start out equal."""
MAX_SCALE = 4.0
"""How far a predicted throughput may stretch or shrink the expected time of a measurement."""


class LaunchCosts:
    """Predicts GPU-seconds.

    Launches of one kind (weights, KV cache dtype and K) share what is slow about a launch: the file cache,
    and compiled code where the engine keeps it by K. So a kind that was launched before is predicted by its
    own launches, which gives what shares a cache its bonus; a new one by those with the same weights.
    """

    def __init__(self, configs: Sequence[ServingConfig]) -> None:
        self._kinds, self._kind_of = _numbered([_kind(c) for c in configs])
        self._weights, self._weights_of = _numbered([c.weights for c in configs])

    def seconds(self, observations: Sequence[Observation], log_speed: FloatArray) -> FloatArray:
        """Return the seconds of one screen of each candidate.

        Args:
            observations: all so far.
            log_speed: log of the predicted throughput of each candidate, relative to that of the mean
                observed one; zeros where time does not follow the throughput (open loop).
        """
        launched = [o for o in observations if o.is_target_load and o.launch_s is not None]
        return self._launch_s(launched) + self._traffic_s(launched, log_speed)

    def _launch_s(self, launched: Sequence[Observation]) -> FloatArray:
        if not launched:
            return np.full(len(self._kind_of), GUESSED_LAUNCH_S)
        overall = float(np.mean([o.launch_s for o in launched]))
        by_weights = np.array(
            [
                _mean([o.launch_s for o in launched if o.config.weights == w], overall)
                for w in self._weights
            ]
        )
        seconds = by_weights[self._weights_of]
        for number, kind in enumerate(self._kinds):
            own = [o.launch_s for o in launched if _kind(o.config) == kind]
            if own:
                seconds[self._kind_of == number] = _mean(own, overall)
        return seconds

    def _traffic_s(self, launched: Sequence[Observation], log_speed: FloatArray) -> FloatArray:
        whole = [o.duration_s for o in launched if not o.is_stopped_early]
        if not whole:
            return np.zeros(len(self._kind_of))
        scale: FloatArray = np.clip(np.exp(-log_speed), 1 / MAX_SCALE, MAX_SCALE)
        return float(np.mean(whole)) * scale


def _kind(config: ServingConfig) -> tuple[object, ...]:
    return config.weights, config.kv_cache_dtype, config.num_speculative_tokens


def _numbered(keys: Sequence[object]) -> tuple[list[object], npt.NDArray[np.intp]]:
    numbers: dict[object, int] = {}
    of = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)
    return list(numbers), of


def _mean(values: Sequence[float | None], otherwise: float) -> float:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else otherwise
