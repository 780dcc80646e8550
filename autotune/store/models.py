"""Tables. They live in the same database as Optuna's, so a study is one file.

Raw measurements are kept as compressed JSON: they are read as a whole, by one measurement at a
time, and their shape grows with the client. What is queried is a column.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of Autotune's tables; all names start with ``autotune_``."""


class StudyRow(Base):
    """One study: what was asked, of what, where."""

    __tablename__ = "autotune_studies"

    study_id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    definition_json: Mapped[str] = mapped_column(Text)
    """Everything that makes two runs the same study; compared on resume."""
    environment_json: Mapped[str] = mapped_column(Text)
    """Versions, hardware, command line."""
    is_simulated: Mapped[bool]
    created_at_s: Mapped[float]
    holder_json: Mapped[str | None] = mapped_column(Text)
    """Process that runs the study now: host, pid and the process's start time."""
    timings_json: Mapped[str] = mapped_column(Text, default="{}")
    """Seconds spent by activity, added up over all sessions."""


class LaunchRow(Base):
    """One launch of one config, whatever came of it."""

    __tablename__ = "autotune_launches"

    launch_id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_studies.study_id"), index=True)
    trial_number: Mapped[int | None]
    """Optuna's trial number, for launches of the search; None for repeats of finalists."""
    phase: Mapped[str] = mapped_column(String(16))
    """A value of `autotune.store.records.Phase`."""
    repeat: Mapped[int]
    """Number of the round of repeats, from 0; 0 in the search."""
    config_digest: Mapped[str] = mapped_column(String(16), index=True)
    config_json: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    """``running``, ``measured``, ``failed`` or ``abandoned`` (cut off, to be repeated)."""
    started_at_s: Mapped[float]
    ended_at_s: Mapped[float | None]
    report_json: Mapped[str | None] = mapped_column(Text)
    failure_kind: Mapped[str | None] = mapped_column(String(32))
    failure_detail: Mapped[str | None] = mapped_column(Text)
    log_path: Mapped[str | None] = mapped_column(Text)


class MeasurementRow(Base):
    """One measurement of one launch, raw."""

    __tablename__ = "autotune_measurements"

    measurement_id: Mapped[int] = mapped_column(primary_key=True)
    launch_id: Mapped[int] = mapped_column(ForeignKey("autotune_launches.launch_id"), index=True)
    schedule_digest: Mapped[str] = mapped_column(String(16))
    summary_json: Mapped[str] = mapped_column(Text)
    """Derived figures at the time of writing, for people who look into the database."""
    raw: Mapped[bytes] = mapped_column(LargeBinary)
    """zlib-compressed JSON of `Measurement.as_dict`."""


class DecisionRow(Base):
    """What the study concluded; the newest row counts, earlier ones stay."""

    __tablename__ = "autotune_decisions"
    __table_args__ = (UniqueConstraint("study_id", "decided_at_s"),)

    decision_id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_studies.study_id"), index=True)
    decided_at_s: Mapped[float]
    decision_json: Mapped[str] = mapped_column(Text)


class QualityRow(Base):
    """What the quality gate said about one config; the newest row of a config counts."""

    __tablename__ = "autotune_quality"

    verdict_id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_studies.study_id"), index=True)
    config_digest: Mapped[str] = mapped_column(String(16))
    judged_at_s: Mapped[float]
    verdict_json: Mapped[str] = mapped_column(Text)
    """Figures and reasons; no prompt, no answer."""
