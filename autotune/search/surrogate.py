"""What a model of the measurements is told and what it answers: the contract between proposer and models.

Everything is in natural logarithms: noise that is a share of the figure then has the same size everywhere,
and a ratio is a difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autotune.measure.records import ServerCounters
from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind

FloatArray = npt.NDArray[np.float64]

OBJECTIVE = "objective"
"""Key of the objective among the outputs; every limit has its own key, ``<class>.<limit>``."""


@dataclass(frozen=True)
class Observation:
    """One measurement of one launch, or the failure of a launch."""

    config: ServingConfig
    concurrency: int | None
    """Users in flight of this measurement, closed loop; None in open loop."""
    is_target_load: bool
    """Whether it was made under the study's own load. Rungs of the calibration ladder are not: they tell
    of step times and acceptance alone, and their `outputs` are empty."""
    outputs: Mapping[str, float] = field(default_factory=dict)
    """log(objective in its own unit), and for every limit log(observed / limit): above 0 is violated.
    What is not finite is left out."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard error of each output, the spread between launches included."""
    counters: ServerCounters = field(default_factory=ServerCounters)
    """Over this measurement."""
    duration_s: float = 0.0
    mean_running: float = 0.0
    """Requests in flight, mean over the steady window."""
    mean_prompt_tokens: float = 0.0
    mean_completion_tokens: float = 0.0
    mean_tpot_s: float | None = None
    """Mean over requests of (t_last - t_first) / (n_last - n_first)."""
    mean_ttft_s: float | None = None
    output_throughput_tps: float | None = None
    kv_tokens: int | None = None
    """Size of the KV cache that the launch reported."""
    launch_s: float | None = None
    failure: FailureKind | None = None
    """Why there is no measurement; every other figure is then empty."""
    is_stopped_early: bool = False
    """A hopeless run that was cut off: its outputs are those of the requests that ended in time."""
    repeat: int = 0
    """Number among the launches of its config."""


@dataclass(frozen=True)
class Predictions:
    """What a model believes of some configs; arrays run along them."""

    means: Mapping[str, FloatArray]
    """By output, as in `Observation.outputs`."""
    sds: Mapping[str, FloatArray]
    """Standard deviation of the belief about the true figure; the noise of a new measurement is not in it."""


class Surrogate(ABC):
    """A model of the outputs over all candidates.

    Everything is deterministic: equal observations give equal predictions.
    """

    name: str

    @abstractmethod
    def fit(self, observations: Sequence[Observation]) -> None:
        """Learn from all observations so far, failures and ladder rungs included; replaces what was learnt.

        At least one observation has outputs.
        """

    @abstractmethod
    def predict(self, indices: npt.NDArray[np.intp] | None = None) -> Predictions:
        """Return the beliefs about the candidates the surrogate was made with; all, or those at `indices`.

        Raises:
            RuntimeError: nothing was learnt yet.
        """

    @abstractmethod
    def leave_one_out(self) -> Mapping[str, float]:
        """Return by output the root-mean-square error of predicting each config from the other ones.

        Over the configs measured under the study's load; empty with fewer than three.
        """
