"""What the gate found, as plain data without any text or token of a prompt or an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from autotune.measure.quality.divergence import DistributionFigures
from autotune.measure.quality.forcing import ForcedFigures, WorstPosition
from autotune.measure.quality.matching import MatchFigures


class QualityLevel(StrEnum):
    """The gate's word on a config."""

    PASSED = "passed"
    WARNED = "warned"
    """Tolerable, but worth a look: the reasons say why."""
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True)
class LoopFigures:
    """Prompts whose answers end in a loop, at any of the concurrencies asked."""

    num_prompts: int
    num_baseline: int
    num_candidate: int
    num_new: int
    """Prompts that only the candidate answers with a loop."""

    @property
    def num_gone(self) -> int:
        """Prompts that only the baseline answers with a loop."""
        return self.num_baseline - (self.num_candidate - self.num_new)


@dataclass(frozen=True)
class TaskFigures:
    """Solved tasks of one file of checks, both servers on the same questions."""

    file: str
    """The file's name, without its folder."""
    num_rows: int
    num_solved_baseline: int
    num_solved_candidate: int
    num_only_baseline: int
    num_only_candidate: int
    p_value: float
    """McNemar's exact test, two-sided."""
    unusable: Mapping[str, int]
    """How often a check could not be applied, by reason, both servers together."""


@dataclass(frozen=True)
class QualityFigures:
    """Everything the verdict rests on; None where it was not measured."""

    is_lossy: bool
    """Whether the candidate changes weights or KV cache, and so may differ from the baseline."""
    num_prompts: int
    num_unscored: int
    """Answers, the baseline's counted once, that were too long or too empty to be scored."""
    concurrency: int
    """The higher of the two concurrencies asked; the other one is 1."""
    floor: MatchFigures
    """The baseline at one concurrency against itself at the other: the A/A floor."""
    match_serial: MatchFigures
    """The candidate against the baseline, one request at a time."""
    match_concurrent: MatchFigures
    """The same at `concurrency`."""
    num_cut_short: int
    """Answers of the candidate that end without a stop token or a reached limit."""
    forced: ForcedFigures
    """The candidate's answers under teacher forcing: by the baseline, or by the candidate itself
    where it is lossy."""
    forced_baseline: ForcedFigures
    """The baseline's own answers, by itself: what rounding alone does."""
    distributions: DistributionFigures | None
    """The candidate against the baseline on the baseline's answers; only where it is lossy."""
    loops: LoopFigures
    tasks: tuple[TaskFigures, ...] = ()


@dataclass(frozen=True)
class QualityVerdict:
    """The gate's verdict on one config."""

    level: QualityLevel
    reasons: tuple[str, ...] = ()
    """One sentence for each finding that made the level worse."""
    figures: QualityFigures | None = None

    @property
    def is_feasible(self) -> bool:
        return self.level is not QualityLevel.FAILED

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that `verdict_from_dict` turns back into an equal verdict."""
        return asdict(self)


def verdict_from_dict(data: Mapping[str, Any]) -> QualityVerdict:
    """Rebuild a verdict from `QualityVerdict.as_dict`, also after a trip through JSON."""
    figures = data["figures"]
    return QualityVerdict(
        level=QualityLevel(data["level"]),
        reasons=tuple(data["reasons"]),
        figures=None if figures is None else _figures_from_dict(figures),
    )


def _figures_from_dict(data: Mapping[str, Any]) -> QualityFigures:
    distributions = data["distributions"]
    return QualityFigures(
        **{
            **data,
            "floor": MatchFigures(**data["floor"]),
            "match_serial": MatchFigures(**data["match_serial"]),
            "match_concurrent": MatchFigures(**data["match_concurrent"]),
            "forced": _forced_from_dict(data["forced"]),
            "forced_baseline": _forced_from_dict(data["forced_baseline"]),
            "distributions": distributions and DistributionFigures(**distributions),
            "loops": LoopFigures(**data["loops"]),
            "tasks": tuple(TaskFigures(**row) for row in data["tasks"]),
        }
    )


def _forced_from_dict(data: Mapping[str, Any]) -> ForcedFigures:
    return ForcedFigures(**{**data, "worst": tuple(WorstPosition(**row) for row in data["worst"])})
