"""A cost model that is wrong on purpose: it shows what a search loses where its physics does not hold.

The model itself is the real one, and is told what is not so: that the KV cache is never full, and that
prompts are one token long. So it knows no KV limit and no prefill. Of its TTFT waiting for a slot alone is
left, and its formula has no bursts. The proposer's own forecast of which configs fit is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.search.costmodel.physics import CostModel
from autotune.search.costmodel.queueing import Latency, LoadState
from autotune.search.costmodel.workload import ClassLoad, Workload
from autotune.search.decision import Goal
from autotune.search.surrogate import FloatArray, Observation
from autotune.serving.config import ServingConfig
from autotune.serving.memory import MemoryModel
from autotune.serving.sizes import ServingSizes

ENDLESS_BYTES = 1e18


@dataclass(frozen=True)
class _EndlessKv:
    kv_bytes_per_token: float
    kv_bytes: float = ENDLESS_BYTES


class _EndlessMemory:
    """Forecasts a KV cache that is never full."""

    def __init__(self, memory: MemoryModel) -> None:
        self._memory = memory

    def estimate(self, config: ServingConfig) -> _EndlessKv:
        return _EndlessKv(self._memory.estimate(config).kv_bytes_per_token)


class WrongCostModel(CostModel):
    """The cost model, misinformed about memory and prompts."""

    def __init__(
        self,
        configs: Sequence[ServingConfig],
        sizes: ServingSizes,
        workload: Workload,
        goal: Goal,
        memory: MemoryModel,
        trained_depths: Mapping[str, int | None] | None = None,
    ) -> None:
        """Take what a cost model takes."""
        one_token = tuple(
            replace(c, prompt=c.prompt.scaled(1 / max(c.prompt.mean_tokens, 1.0)))
            for c in workload.classes
        )
        super().__init__(
            configs,
            sizes,
            replace(workload, classes=one_token),
            goal,
            _EndlessMemory(memory),
            trained_depths,
        )

    def ttft(
        self, state: LoadState, load: ClassLoad, workload: Workload, request_s: FloatArray
    ) -> Latency:
        """Return a time to the first token without the burst that users who begin at once make."""
        found = super().ttft(state, load, workload, request_s)
        return replace(found, burst_share=np.zeros_like(found.burst_share))

    def fit(self, observations: Sequence[Observation]) -> None:
        """Learn from the observations, without what they say of the KV cache and of prompts."""
        super().fit([replace(o, kv_tokens=None, mean_prompt_tokens=1.0) for o in observations])
