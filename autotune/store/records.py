"""Plain records that go into and come out of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.measure.records import Measurement
from autotune.serving.config import ServingConfig
from autotune.serving.failures import TrialFailure


class Phase(StrEnum):
    """What a launch was for."""

    SEARCH = "search"
    CONFIRM = "confirm"
    QUALITY = "quality"
    """To check answers; it has no measurement."""
    NOISE = "noise"
    """To learn how far launches of one config differ."""


class LaunchState(StrEnum):
    """What became of a launch."""

    RUNNING = "running"
    MEASURED = "measured"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """Cut off by the tuner's own end; it counts as never done."""


@dataclass(frozen=True)
class StudyRecord:
    """One study, as it was started."""

    study_id: int
    name: str
    definition: Mapping[str, Any]
    environment: Mapping[str, Any]
    is_simulated: bool
    created_at_s: float
    timings_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def source_mark(self) -> str:
        """The word for where figures come from when no server has just been measured for them."""
        if self.is_simulated:
            return "simulated"
        is_replayed = self.environment.get("engine", {}).get("engine") == "replay"
        return "replayed" if is_replayed else ""

    @property
    def mark(self) -> str:
        """The words that go with every figure of the study: its source, and whose prompts."""
        return ", ".join(word for word in (self.source_mark, self.prompt_mark) if word)

    @property
    def prompt_mark(self) -> str:
        """The words for prompts that are not the users' own."""
        realism = self.environment.get("prompt_realism", "user")
        return "" if realism == "user" else f"{realism} prompts"


@dataclass(frozen=True)
class LaunchRecord:
    """One launch with its measurements, or with its failure."""

    launch_id: int
    trial_number: int | None
    phase: Phase
    repeat: int
    config: ServingConfig
    state: LaunchState
    started_at_s: float
    ended_at_s: float | None
    report: Mapping[str, Any]
    failure: TrialFailure | None
    measurements: tuple[Measurement, ...] = ()
    """Under the load that the launch was made for."""
    ladder: tuple[Measurement, ...] = ()
    """Short ones under other concurrencies in the same launch, to calibrate the cost model."""

    @property
    def log_path(self) -> str | None:
        if self.failure is not None and self.failure.log_path:
            return self.failure.log_path
        return self.report.get("log_path")
