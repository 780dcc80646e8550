"""Finding the study to go on with in both ledgers, or beginning one."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler

from autotune.errors import StudyChangedError
from autotune.search.definition import differences
from autotune.search.ledger import optuna_storage
from autotune.search.setup import SearchSetup
from autotune.store.records import StudyRecord
from autotune.store.repository import Store


def open_study(setup: SearchSetup, store: Store) -> StudyRecord:
    """Find the study to go on with, or begin one.

    Raises:
        StudyChangedError: it exists and was defined otherwise.
    """
    name = setup.study_name
    existing = store.find_study(name)
    if existing is not None and setup.settings.is_fresh:
        store.take_hold(existing)  # refuses to delete under a running search
        # Ours goes last: cut off in between, it is still there to say that both are to be deleted.
        _delete_optuna_study(setup)
        store.delete_study(existing)
        existing = None
    if existing is None:
        _refuse_foreign_study(setup)
        return store.add_study(
            name,
            setup.definition,
            setup.environment,
            time.time(),
            is_simulated=setup.info.is_simulated,
        )
    changed = differences(existing.definition, json.loads(json.dumps(setup.definition)))
    if changed:
        raise StudyChangedError(
            f"{setup.settings.storage}: study {name!r} exists and was defined otherwise:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change to go on with it, give another name with --study, or start over "
            "with --fresh, which deletes it."
        )
    # A price changes no measurement, so a study goes on under another one.
    return store.update_environment(existing, {"cost": setup.environment["cost"]})


def open_optuna_study(setup: SearchSetup, sampler: BaseSampler) -> optuna.Study:
    """Open Optuna's side of the study, which is made where it does not exist yet."""
    with _quiet_optuna():
        study = optuna.create_study(
            storage=optuna_storage(setup.settings.storage),
            study_name=setup.study_name,
            sampler=sampler,
            direction="maximize" if setup.goal.is_maximized else "minimize",
            load_if_exists=True,
        )
    study.set_metric_names([setup.goal.objective])
    return study


def _refuse_foreign_study(setup: SearchSetup) -> None:
    """A study of this name that is only in Optuna's tables was made by another program."""
    with _quiet_optuna():
        names = optuna.get_all_study_names(optuna_storage(setup.settings.storage))
    if setup.study_name in names:
        raise StudyChangedError(
            f"{setup.settings.storage}: an Optuna study called {setup.study_name!r} exists that is "
            "not Autotune's. Give another name with --study, or another database with --storage."
        )


def _delete_optuna_study(setup: SearchSetup) -> None:
    with _quiet_optuna():
        storage = optuna_storage(setup.settings.storage)
        if setup.study_name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=setup.study_name, storage=storage)


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Keep Optuna's own log lines out of the progress display, in this process, for good."""
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.simplefilter("ignore", ExperimentalWarning)
    yield
