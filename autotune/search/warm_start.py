"""Beginning with what an earlier study learnt: the cost model's unknowns, never measured values.

A study keeps what its cost model learnt under ``learnt`` in its environment, and where its own priors came
from under ``warm_start``. A resumed study goes on with the priors that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.search.costmodel.physics import CostModel
from autotune.search.surrogate import Surrogate
from autotune.store.records import StudyRecord
from autotune.store.repository import Store

LEARNT, WARM_START = "learnt", "warm_start"

Unknowns = Mapping[str, tuple[float, float]]
"""Logarithm and its standard deviation, by unknown."""


def choose_warm_start(store: Store, study: StudyRecord) -> StudyRecord:
    """Find the newest earlier study that can lend what it learnt, and write it down with the study.

    Returns:
        The study anew; as it is when it has chosen before, or there is none to choose.
    """
    if WARM_START in study.environment:
        return study
    lenders = [
        other
        for name in store.study_names()
        if (other := store.find_study(name)) is not None
        and other.study_id != study.study_id
        and other.environment.get(LEARNT)
        and _lends(other, study)
    ]
    newest = max(lenders, key=lambda other: other.created_at_s, default=None)
    chosen = (
        {"study": newest.name, "unknowns": newest.environment[LEARNT]}
        if newest is not None
        else None
    )
    return store.update_environment(study, {WARM_START: chosen})


def warm_unknowns(study: StudyRecord) -> Unknowns | None:
    """Return what the study begins with; None without an earlier study."""
    chosen: Mapping[str, Any] | None = study.environment.get(WARM_START)
    return _read(chosen["unknowns"]) if chosen else None


def keep_learnt(store: Store, study: StudyRecord, models: tuple[Surrogate, ...]) -> None:
    """Keep what the cost model learnt, for later studies."""
    for model in models:
        if isinstance(model, CostModel):
            store.update_environment(study, {LEARNT: model.learnt()})


def _lends(other: StudyRecord, study: StudyRecord) -> bool:
    """Whether two studies served the same model with the same heads on the same kind of hardware.

    The version may differ: that is what the priors are widened for.
    """
    mine, theirs = study.definition, other.definition
    same_parts = all(mine[part] == theirs[part] for part in ("model", "drafters"))
    same_engine = all(mine["engine"][k] == theirs["engine"][k] for k in ("engine", "hardware"))
    return same_parts and same_engine


def _read(stored: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (float(value), float(sd)) for name, (value, sd) in stored.items()}
