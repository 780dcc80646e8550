"""What a search tells whoever shows it."""

from __future__ import annotations

from typing import Protocol

from autotune.measure.records import RequestRecord
from autotune.search.setup import SearchSetup
from autotune.search.trial import TrialResult
from autotune.serving.config import ServingConfig
from autotune.store.records import Phase


class SearchListener(Protocol):
    """Is told what a search does, to show it."""

    def on_start(self, setup: SearchSetup, num_done: int) -> None: ...

    def on_phase(self, phase: Phase, num_launches: int) -> None: ...

    def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None: ...

    def on_record(self, record: RequestRecord) -> None: ...

    def on_result(self, config: ServingConfig, phase: Phase, result: TrialResult) -> None: ...

    def on_recommendation(self, config: ServingConfig | None) -> None:
        """Take what would be recommended if the search ended now; None while nothing is feasible."""


class SilentListener:
    """Shows nothing."""

    def on_start(self, setup: SearchSetup, num_done: int) -> None: ...

    def on_phase(self, phase: Phase, num_launches: int) -> None: ...

    def on_launch(self, config: ServingConfig, phase: Phase, roles: tuple[str, ...]) -> None: ...

    def on_record(self, record: RequestRecord) -> None: ...

    def on_result(self, config: ServingConfig, phase: Phase, result: TrialResult) -> None: ...

    def on_recommendation(self, config: ServingConfig | None) -> None: ...
