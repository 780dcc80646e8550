"""One Gaussian process for each output, over the same features of the same candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autotune.search.costmodel.gp import GaussianProcess, GpPrior
from autotune.search.surrogate import FloatArray, Observation
from autotune.serving.config import ServingConfig

EARLY_ERROR_FACTOR = 3.0
"""On the errors of a measurement that was cut off: its requests are the quick ones."""
DEFAULT_ERROR = 0.05
"""Where an observation states none."""
MIN_CONFIGS = 3
"""For a leave-one-out error."""


def has_outputs(seen: Observation) -> bool:
    """Whether an observation tells of the study's own load; failures do not."""
    return seen.is_target_load and seen.failure is None and bool(seen.outputs)


class ResidualModel:
    """Learns what is left of each output after a mean that somebody else knows."""

    def __init__(
        self,
        configs: Sequence[ServingConfig],
        features: FloatArray,
        prior_of: Callable[[str], GpPrior],
    ) -> None:
        """Take the candidates.

        Args:
            configs: n of them.
            features: scaled to 0..1, shape (n, d).
            prior_of: gives the prior of an output by its name.
        """
        self.index = {config: i for i, config in enumerate(configs)}
        self._features = features
        self._prior_of = prior_of
        self._processes: dict[str, tuple[GaussianProcess, npt.NDArray[np.intp]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that were learnt."""
        return tuple(self._processes)

    def fit(
        self,
        observations: Sequence[Observation],
        means: Mapping[str, FloatArray],
    ) -> None:
        """Learn from observations of candidates; those of other configs are left out.

        Each repeat is a point of its own with its own noise, so launches of one config are averaged by
        their errors, and no further than the noise floor allows.

        Args:
            observations: with outputs.
            means: for each output what is known already, of each observation.
        """
        self._processes = {}
        for name in dict.fromkeys(name for seen in observations for name in seen.outputs):
            rows = [
                (self.index[seen.config], seen.outputs[name] - means[name][i], _error(seen, name))
                for i, seen in enumerate(observations)
                if name in seen.outputs and seen.config in self.index and name in means
            ]
            if not rows:
                continue
            places = np.array([row[0] for row in rows], dtype=np.intp)
            process = GaussianProcess(self._prior_of(name))
            process.fit(
                self._features[places],
                np.array([row[1] for row in rows]),
                np.array([row[2] for row in rows]),
            )
            self._processes[name] = (process, places)

    def predict(
        self, name: str, indices: npt.NDArray[np.intp] | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of one output's residual."""
        features = self._features if indices is None else self._features[indices]
        return self._processes[name][0].predict(features)

    def leave_one_out(self) -> dict[str, float]:
        """Return the root-mean-square residual of each output when a config is left out, all its repeats."""
        return {
            name: float(np.sqrt(np.mean(process.leave_groups_out(places) ** 2)))
            for name, (process, places) in self._processes.items()
            if len(np.unique(places)) >= MIN_CONFIGS
        }


def _error(seen: Observation, name: str) -> float:
    factor = EARLY_ERROR_FACTOR if seen.is_stopped_early else 1.0
    return factor * seen.errors.get(name, DEFAULT_ERROR)
