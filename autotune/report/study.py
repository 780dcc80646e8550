"""Read a study back from the store, in the form that tables, exports and the dashboard share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autotune.measure.quality.verdict import QualityVerdict, verdict_from_dict
from autotune.measure.stats import Interval
from autotune.report.rows import ConfigRow, config_rows
from autotune.search.decision import Decision, Evidence, FinalistResult, Goal
from autotune.store.records import LaunchRecord, StudyRecord
from autotune.store.repository import Store
from autotune.traffic.profile import Cost, TrafficProfile


@dataclass(frozen=True)
class StudyView:
    """A study with everything derived from it."""

    record: StudyRecord
    goal: Goal
    launches: tuple[LaunchRecord, ...]
    decision: Decision | None
    rows: tuple[ConfigRow, ...]
    cost: Cost | None = None

    @property
    def winner(self) -> ConfigRow | None:
        """The row of the recommended config."""
        return next((row for row in self.rows if "winner" in row.roles), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the study as plain data, for scripts."""
        return {
            "format": "autotune-study",
            "version": 1,
            "study": self.record.name,
            "is_simulated": self.record.is_simulated,
            "objective": self.goal.objective,
            "is_maximized": self.goal.is_maximized,
            "definition": dict(self.record.definition),
            "environment": dict(self.record.environment),
            "timings_s": dict(self.record.timings_s),
            "configs": [row.as_dict() for row in self.rows],
            "decision": self.decision.as_dict() if self.decision is not None else None,
        }


def load_study(store: Store, name: str | None) -> StudyView:
    """Load a study by name, or the newest one.

    Raises:
        UnknownStudyError: there is no such study.
    """
    record = store.get_study(name)
    goal = stored_goal(record)
    launches = tuple(store.launches(record))
    stored = store.latest_decision(record)
    decision = decision_from_dict(stored) if stored is not None else None
    anchors = record.environment.get("anchors", {})
    cost = _cost(record)
    rows = config_rows(
        launches,
        goal,
        anchors.get("baseline", ""),
        anchors.get("default", ""),
        decision,
        record.environment.get("standing_knobs", ()),
        record.environment.get("named_knobs", ()),
        {digest: verdict_from_dict(row) for digest, row in store.verdicts(record).items()},
        cost,
    )
    return StudyView(record, goal, launches, decision, tuple(rows), cost)


def _cost(record: StudyRecord) -> Cost | None:
    stored = record.environment.get("cost")
    return Cost.model_validate(stored) if stored is not None else None


def stored_goal(record: StudyRecord) -> Goal:
    """Rebuild a study's goal from its stored definition.

    How it was measured is left out: it has no part in the goal, and its keys change with versions.
    """
    from autotune.search.setup import goal_of

    traffic = {k: v for k, v in record.definition["traffic"].items() if k != "measure"}
    profile = TrafficProfile.model_validate({**traffic, "name": "stored"})
    return goal_of(profile)


def decision_from_dict(data: Mapping[str, Any]) -> Decision:
    """Rebuild a decision that went through JSON; keys that other versions added are left out."""
    finalists = tuple(
        FinalistResult(
            **{
                **row,
                "roles": tuple(row["roles"]),
                "objective": _interval(row["objective"]),
                "ratio_to_best": _interval(row["ratio_to_best"]),
                "ratio_to_baseline": _interval(row["ratio_to_baseline"]),
                "quality": _verdict(row.get("quality")),
            }
        )
        for row in data["finalists"]
    )
    known = {field.name for field in fields(Decision)}
    return Decision(
        **{
            **{name: value for name, value in data.items() if name in known},
            "finalists": finalists,
            "gain_over_baseline": _interval(data["gain_over_baseline"]),
            "gain_over_default": _interval(data["gain_over_default"]),
            "warnings": tuple(data["warnings"]),
            "tied": tuple(data.get("tied", ())),
            "borderline": tuple(data.get("borderline", ())),
            "evidence": Evidence(**data["evidence"]) if data.get("evidence") else None,
        }
    )


def _verdict(data: Mapping[str, Any] | None) -> QualityVerdict | None:
    return verdict_from_dict(data) if data is not None else None


def _interval(data: Mapping[str, Any] | None) -> Interval | None:
    return Interval(**data) if data is not None else None
