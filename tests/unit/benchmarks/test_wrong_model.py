"""The cost model that is wrong on purpose really is misinformed, and about nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.search.costmodel.physics import CostModel
from autotune.search.costmodel.workload import Workload
from autotune.search.surrogate import Observation
from autotune.serving.memory import MemoryModel
from benchmarks.search.scenarios import Scenario, Traffic, make_setup
from benchmarks.search.wrong_model import WrongCostModel


def test_it_is_told_of_endless_memory_and_prompts_of_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def init(
        self: CostModel,
        configs: Any,
        sizes: Any,
        workload: Any,
        goal: Any,
        memory: Any,
        trained_depths: Any,
    ) -> None:
        told.update(workload=workload, memory=memory)

    monkeypatch.setattr(CostModel, "__init__", init)
    monkeypatch.setattr(CostModel, "fit", lambda self, seen: told.update(seen=seen))
    setup = make_setup(
        Scenario(0, "h100-8b", Traffic(2, 400, 16, 8), 1.0), {}, 0, "auto", tmp_path
    )
    assert setup.sizes is not None
    config = setup.candidates.baseline.config
    right = Workload.of(setup.profile, setup.schedule)
    memory = MemoryModel(setup.sizes, setup.needs)

    model = WrongCostModel([config], setup.sizes, right, setup.goal, memory)
    model.fit(
        [Observation(config, 2, True, kv_tokens=1000, mean_prompt_tokens=400.0, launch_s=9.0)]
    )

    assert right.prompt_tokens > 100
    assert told["workload"].prompt_tokens == pytest.approx(1.0)
    assert told["workload"].completion_tokens == right.completion_tokens
    kv = told["memory"].estimate(config)
    assert kv.kv_bytes / kv.kv_bytes_per_token > 1e9
    assert memory.estimate(config).kv_tokens < 1e7, "the real forecast is finite"
    (seen,) = told["seen"]
    assert (seen.kv_tokens, seen.mean_prompt_tokens, seen.launch_s) == (None, 1.0, 9.0)
