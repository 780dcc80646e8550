"""What an earlier study of the same GPU and model lends: unknowns as priors, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from study_helpers import make_profile, make_setup, simulated

from autotune.report.models import models_text
from autotune.search.costmodel.physics import WARM_SPREAD, WARM_WIDENING, CostModel
from autotune.search.modelling import create_proposer
from autotune.search.setup import SearchSetup
from autotune.search.study import run_search
from autotune.search.warm_start import LEARNT, WARM_START, warm_unknowns
from autotune.store.records import StudyRecord
from autotune.store.repository import Store


def searched(setup: SearchSetup) -> StudyRecord:
    store = Store(setup.settings.storage, create=True)
    try:
        return run_search(setup, store).study
    finally:
        store.close()


def setup_of(
    folder: Path,
    study: str,
    *,
    world: str = "h100-8b",
    seed: int = 0,
    is_warm_started: bool = True,
) -> SearchSetup:
    return make_setup(
        folder,
        profile=make_profile(folder),
        engine=simulated(world, seed=seed),
        sampler="auto",
        study=study,
        num_finalists=1,
        num_repeats=2,
        is_warm_started=is_warm_started,
    )


def test_a_study_keeps_what_it_learnt_and_the_next_one_begins_with_it(tmp_path: Path) -> None:
    first = searched(setup_of(tmp_path, "first"))
    assert first.environment[WARM_START] is None, "there was nobody to borrow from"
    store = Store(str(tmp_path / "autotune.db"))
    learnt = store.get_study("first").environment[LEARNT]
    store.close()
    assert {"bandwidth", "overhead_s", "draft_overhead_s"} <= set(learnt)

    second = searched(setup_of(tmp_path, "second", seed=1))
    assert second.environment[WARM_START]["study"] == "first"
    assert second.environment[WARM_START]["unknowns"] == learnt


@pytest.mark.parametrize("case", ["other world", "cold"])
def test_nothing_is_borrowed_from_another_gpu_or_against_the_users_will(
    tmp_path: Path, case: str
) -> None:
    searched(setup_of(tmp_path, "first"))
    other = setup_of(
        tmp_path,
        "second",
        world="l40s-8b" if case == "other world" else "h100-8b",
        is_warm_started=case != "cold",
    )
    assert warm_unknowns(searched(other)) is None


def test_a_borrowed_prior_is_wider_than_what_was_learnt(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "study")
    model = create_proposer(setup).models[0]
    assert isinstance(model, CostModel)
    before = model.learnt()

    model.start_from(
        {
            "bandwidth": (math.log(2e12), 0.08),
            "overhead_s": (math.log(1e-3), 0.001),
            "gone": (0.0, 1.0),
        }
    )

    after = model.learnt()
    assert after["bandwidth"] == pytest.approx((math.log(2e12), WARM_WIDENING * 0.08))
    assert after["overhead_s"] == pytest.approx((math.log(1e-3), WARM_SPREAD))
    assert after["compute"] == before["compute"]


def test_a_borrowed_prior_is_never_wider_than_none(tmp_path: Path) -> None:
    model = create_proposer(setup_of(tmp_path, "study")).models[0]
    assert isinstance(model, CostModel)
    before = model.learnt()["bandwidth"][1]
    model.start_from({"bandwidth": (math.log(2e12), 50.0)})
    assert model.learnt()["bandwidth"][1] == pytest.approx(before)


def test_the_report_says_which_model_was_right(tmp_path: Path) -> None:
    study = searched(setup_of(tmp_path, "study"))
    (line, *_) = models_text(study.environment)
    errors = {
        name: of_model["objective"]
        for name, of_model in study.environment["models"]["leave_one_out"].items()
    }
    better = min(errors, key=lambda name: errors[name])
    assert line.endswith(f"{better} predicted better")
    for name, error in errors.items():
        assert f"{name} {math.expm1(error):.1%}" in line
