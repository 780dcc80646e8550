"""A model that knows nothing of serving: what was measured, and which configs look alike.

It is the hedge against a cost model that is wrong: worse where the physics holds, unmoved where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autotune.search.costmodel.gp import GpPrior
from autotune.search.costmodel.residual import ResidualModel, has_outputs
from autotune.search.costmodel.table import plain_features
from autotune.search.decision import Goal
from autotune.search.surrogate import OBJECTIVE, FloatArray, Observation, Predictions, Surrogate
from autotune.serving.config import ServingConfig
from autotune.serving.sizes import ServingSizes

PLAIN_NUM_SEQS, PLAIN_NUM_BATCHED_TOKENS = 256, 8192
"""What vLLM takes by default on common devices; only for the place of "default" among other limits."""
THROUGHPUT_PRIOR = GpPrior(amplitude=0.4, offset=1.0)
"""Throughputs of a space differ by a factor of two or three from end to end; the level is unknown."""
LATENCY_PRIOR = GpPrior(amplitude=0.7, offset=1.5)


class PhysicsFree(Surrogate):
    """A Gaussian process for each output over plain features of the configs."""

    name = "physics-free"

    def __init__(
        self, configs: Sequence[ServingConfig], goal: Goal, sizes: ServingSizes | None = None
    ) -> None:
        """Take the candidates.

        Args:
            configs: all of them.
            goal: says which outputs are latencies, which vary more.
            sizes: say what the engine takes by default; common values when omitted.
        """
        num_seqs = sizes.device.max_num_seqs if sizes else PLAIN_NUM_SEQS
        budget = sizes.device.max_num_batched_tokens if sizes else PLAIN_NUM_BATCHED_TOKENS
        self._residual = ResidualModel(
            configs,
            plain_features(configs, num_seqs, budget),
            lambda name: (
                THROUGHPUT_PRIOR if name == OBJECTIVE and goal.is_maximized else LATENCY_PRIOR
            ),
        )
        self._levels: dict[str, float] = {}

    def fit(self, observations: Sequence[Observation]) -> None:
        useful = [seen for seen in observations if has_outputs(seen)]
        names = dict.fromkeys(name for seen in useful for name in seen.outputs)
        self._levels = {
            name: float(np.mean([o.outputs[name] for o in useful if name in o.outputs]))
            for name in names
        }
        means: dict[str, FloatArray] = {
            name: np.full(len(useful), level) for name, level in self._levels.items()
        }
        self._residual.fit(useful, means)

    def predict(self, indices: npt.NDArray[np.intp] | None = None) -> Predictions:
        if not self._residual.names:
            raise RuntimeError("nothing was learnt yet")
        found = {name: self._residual.predict(name, indices) for name in self._residual.names}
        return Predictions(
            {name: mean + self._levels[name] for name, (mean, _) in found.items()},
            {name: sd for name, (_, sd) in found.items()},
        )

    def leave_one_out(self) -> Mapping[str, float]:
        return self._residual.leave_one_out()
