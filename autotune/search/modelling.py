"""Building the models that a study's proposer believes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autotune.search.costmodel.free import PhysicsFree
from autotune.search.costmodel.physics import CostModel
from autotune.search.costmodel.workload import Workload
from autotune.search.decision import Goal
from autotune.search.proposer import Proposer
from autotune.search.setup import SearchSetup
from autotune.search.surrogate import Surrogate
from autotune.serving.config import ServingConfig
from autotune.serving.memory import MemoryModel
from autotune.serving.sizes import ServingSizes

PhysicsFactory = Callable[
    [
        Sequence[ServingConfig],
        ServingSizes,
        Workload,
        Goal,
        MemoryModel,
        Mapping[str, int | None],
    ],
    Surrogate,
]
"""Takes what `CostModel` takes, in its order."""


def create_proposer(
    setup: SearchSetup,
    physics: PhysicsFactory | None = CostModel,
    warm: Mapping[str, tuple[float, float]] | None = None,
) -> Proposer:
    """Make the proposer of a study.

    Args:
        setup: the study.
        physics: makes the cost model; None, or a study whose sizes are not known, leaves it out.
        warm: what an earlier study learnt, see `autotune.search.warm_start`.
    """
    configs = [candidate.config for candidate in setup.candidates.items]
    models: list[Surrogate] = []
    memory = None
    if setup.sizes is not None:
        memory = MemoryModel(setup.sizes, setup.needs)
        if physics is not None:
            # Most of what the model learns from are screens, and a short measurement has more of a burst.
            workload = Workload.of(setup.profile, setup.screen_schedule)
            depths = {head.serve_as: head.trained_depth for head in setup.drafters}
            model = physics(configs, setup.sizes, workload, setup.goal, memory, depths)
            if warm is not None and isinstance(model, CostModel):
                model.start_from(warm)
            models.append(model)
    models.append(PhysicsFree(configs, setup.goal, setup.sizes))
    return Proposer(
        setup.candidates,
        setup.goal,
        models,
        memory,
        is_closed_loop=setup.profile.is_closed_loop,
    )
