"""Optuna's side of a study database: opening it, and its errors in words."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.store.schema import connect_args, database_errors, storage_url


class DashboardStorage(RDBStorage):
    """Shows constraints where optuna-dashboard looks for them.

    optuna-dashboard 0.21 reads the list that Optuna 4 wrote, not what `set_constraint` of Optuna 5
    writes, and would draw trials that break a limit as feasible. Writing both into the database
    would make samplers see every constraint twice, so the list is added on reading only.
    """

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        trials = super().get_all_trials(study_id, deepcopy=True, states=states)
        for trial in trials:
            constraints = list(trial.constraints.values())
            if constraints:
                trial.system_attrs = {**trial.system_attrs, "constraints": constraints}
        return trials


def optuna_storage(storage: str, kind: type[RDBStorage] = RDBStorage) -> RDBStorage:
    """Open Optuna's tables in a study database."""
    url = storage_url(storage)
    return kind(url, engine_kwargs={"connect_args": connect_args(url)})


@contextmanager
def storage_errors(storage: str) -> Iterator[None]:
    """Turn what Optuna raises about the database into a `StorageError`.

    Raises:
        StorageError: the database could not be read or written.
    """
    with database_errors(storage):
        try:
            yield
        except StorageInternalError as err:
            raise err.__cause__ or err from err
