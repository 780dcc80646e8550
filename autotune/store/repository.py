"""Reads and writes studies. One process writes a study; any number may read it."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session, sessionmaker

from autotune.errors import StudyError, UnknownStudyError, suggestion
from autotune.measure.records import Measurement, measurement_from_dict
from autotune.serving.config import ServingConfig, config_from_dict
from autotune.serving.engine import LaunchReport
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.store.holders import is_alive, this_process
from autotune.store.models import DecisionRow, LaunchRow, MeasurementRow, QualityRow, StudyRow
from autotune.store.records import LaunchRecord, LaunchState, Phase, StudyRecord
from autotune.store.schema import database_errors, open_database, without_password


class Store:
    """One study database.

    Every method is one transaction: after it returns, what it wrote survives `kill -9`. Not thread
    safe; use one store per thread.
    """

    def __init__(self, storage: str, *, create: bool = False) -> None:
        """Open the database; see `open_database` for what can be wrong with it."""
        self.storage = without_password(storage)
        self._engine = open_database(storage, create=create)
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        with database_errors(self.storage), self._sessions.begin() as session:
            yield session

    # Studies

    def study_names(self) -> list[str]:
        """Name the studies, oldest first."""
        with self._session() as session:
            return list(session.scalars(select(StudyRow.name).order_by(StudyRow.study_id)))

    def find_study(self, name: str) -> StudyRecord | None:
        with self._session() as session:
            row = session.scalar(select(StudyRow).where(StudyRow.name == name))
            return _study(row) if row is not None else None

    def get_study(self, name: str | None) -> StudyRecord:
        """Return a study by name, or the newest one when no name is given.

        Raises:
            UnknownStudyError: there is no such study; the message lists those there are.
        """
        names = self.study_names()
        if name is None and names:
            name = names[-1]
        found = self.find_study(name) if name is not None else None
        if found is not None:
            return found
        if not names:
            raise UnknownStudyError(
                f"{self.storage}: holds no study yet. Run `autotune search` first."
            )
        close = [n for n in names if suggestion(str(name), [n]).startswith("Did you mean")]
        hint = f"{suggestion(str(name), close)} " if close else ""
        raise UnknownStudyError(
            f"{self.storage}: no study is called {name!r}. {hint}Known: {', '.join(names)}."
        )

    def add_study(
        self,
        name: str,
        definition: Mapping[str, Any],
        environment: Mapping[str, Any],
        created_at_s: float,
        *,
        is_simulated: bool,
    ) -> StudyRecord:
        """Write a new study down."""
        with self._session() as session:
            row = StudyRow(
                name=name,
                definition_json=_dumps(definition),
                environment_json=_dumps(environment),
                is_simulated=is_simulated,
                created_at_s=created_at_s,
                timings_json="{}",
            )
            session.add(row)
            session.flush()
            return _study(row)

    def update_environment(self, study: StudyRecord, changes: Mapping[str, Any]) -> StudyRecord:
        """Replace parts of what a study was run with, and return it anew."""
        with self._session() as session:
            row = session.get_one(StudyRow, study.study_id)
            row.environment_json = _dumps({**json.loads(row.environment_json), **changes})
            return _study(row)

    def delete_study(self, study: StudyRecord) -> None:
        """Remove a study and all that belongs to it."""
        with self._session() as session:
            launches = select(LaunchRow.launch_id).where(LaunchRow.study_id == study.study_id)
            session.query(MeasurementRow).filter(MeasurementRow.launch_id.in_(launches)).delete()
            session.query(LaunchRow).filter(LaunchRow.study_id == study.study_id).delete()
            session.query(DecisionRow).filter(DecisionRow.study_id == study.study_id).delete()
            session.query(QualityRow).filter(QualityRow.study_id == study.study_id).delete()
            session.query(StudyRow).filter(StudyRow.study_id == study.study_id).delete()

    def take_hold(self, study: StudyRecord) -> None:
        """Note that this process runs the study now.

        Raises:
            StudyError: another living process runs it.
        """
        with self._session() as session:
            row = session.get_one(StudyRow, study.study_id)
            holder = json.loads(row.holder_json) if row.holder_json else None
            if holder is not None and is_alive(holder):
                raise StudyError(
                    f"study {study.name!r} is being run by process {holder['pid']} on "
                    f"{holder['host']}. Wait for it, stop it, or give this run another --study."
                )
            row.holder_json = _dumps(this_process())

    def release(self, study: StudyRecord) -> None:
        with self._session() as session:
            session.get_one(StudyRow, study.study_id).holder_json = None

    def add_timings(self, study: StudyRecord, timings_s: Mapping[str, float]) -> None:
        """Add seconds to the study's account of where its time went."""
        with self._session() as session:
            row = session.get_one(StudyRow, study.study_id)
            total = json.loads(row.timings_json)
            for activity, seconds in timings_s.items():
                total[activity] = total.get(activity, 0.0) + seconds
            row.timings_json = _dumps(total)

    # Launches

    def begin_launch(
        self,
        study: StudyRecord,
        config: ServingConfig,
        phase: Phase,
        repeat: int,
        trial_number: int | None,
        started_at_s: float,
    ) -> int:
        """Write down that a launch has begun, before it begins."""
        with self._session() as session:
            row = LaunchRow(
                study_id=study.study_id,
                trial_number=trial_number,
                phase=phase.value,
                repeat=repeat,
                config_digest=config.digest,
                config_json=_dumps(config.as_dict()),
                state=LaunchState.RUNNING.value,
                started_at_s=started_at_s,
            )
            session.add(row)
            session.flush()
            return row.launch_id

    def end_measured(
        self,
        launch_id: int,
        report: LaunchReport,
        measurements: Sequence[tuple[Measurement, Mapping[str, Any]]],
        ended_at_s: float,
    ) -> None:
        """Keep a launch's measurements, each with its summary."""
        with self._session() as session:
            for measurement, summary in measurements:
                raw = zlib.compress(_dumps(measurement.as_dict()).encode(), 6)
                session.add(
                    MeasurementRow(
                        launch_id=launch_id,
                        schedule_digest=measurement.schedule_digest,
                        summary_json=_dumps(summary),
                        raw=raw,
                    )
                )
            row = session.get_one(LaunchRow, launch_id)
            row.state = LaunchState.MEASURED.value
            row.report_json = _dumps(asdict(report))
            row.log_path = report.log_path
            row.ended_at_s = ended_at_s

    def end_failed(self, launch_id: int, failure: TrialFailure, ended_at_s: float) -> None:
        """Keep a launch's failure."""
        with self._session() as session:
            row = session.get_one(LaunchRow, launch_id)
            row.state = LaunchState.FAILED.value
            row.failure_kind = failure.kind.value
            row.failure_detail = failure.detail
            row.log_path = failure.log_path
            row.ended_at_s = ended_at_s

    def abandon_launch(self, launch_id: int, ended_at_s: float) -> None:
        """Mark one launch as cut off."""
        with self._session() as session:
            row = session.get_one(LaunchRow, launch_id)
            row.state = LaunchState.ABANDONED.value
            row.ended_at_s = ended_at_s

    def abandon_running(self, study: StudyRecord) -> int:
        """Mark launches as cut off whose process ended without a word; return how many."""
        with self._session() as session:
            done = session.execute(
                update(LaunchRow)
                .where(LaunchRow.study_id == study.study_id)
                .where(LaunchRow.state == LaunchState.RUNNING.value)
                .values(state=LaunchState.ABANDONED.value)
            )
            return int(done.rowcount)  # type: ignore[attr-defined]  # a CursorResult for UPDATE

    def launches(
        self,
        study: StudyRecord,
        *,
        with_measurements: bool = True,
        launch_ids: Collection[int] | None = None,
    ) -> list[LaunchRecord]:
        """Return launches of a study in the order they began.

        Args:
            study: whose launches.
            with_measurements: read the raw measurements as well, which is most of the database;
                without them a launch tells its config, state and times.
            launch_ids: only these; all when None.
        """
        with self._session() as session:
            chosen = select(LaunchRow).where(LaunchRow.study_id == study.study_id)
            if launch_ids is not None:
                chosen = chosen.where(LaunchRow.launch_id.in_(launch_ids))
            rows = session.scalars(chosen.order_by(LaunchRow.launch_id)).all()
            measured: dict[int, list[Measurement]] = {}
            if not with_measurements:
                return [_launch(row, ()) for row in rows]
            wanted = select(MeasurementRow).where(
                MeasurementRow.launch_id.in_([row.launch_id for row in rows])
            )
            for found in session.scalars(wanted.order_by(MeasurementRow.measurement_id)):
                measured.setdefault(found.launch_id, []).append(_measurement(found.raw))
            return [_launch(row, tuple(measured.get(row.launch_id, ()))) for row in rows]

    # Decisions

    def add_decision(
        self, study: StudyRecord, decision: Mapping[str, Any], decided_at_s: float
    ) -> None:
        with self._session() as session:
            session.add(
                DecisionRow(
                    study_id=study.study_id,
                    decided_at_s=decided_at_s,
                    decision_json=_dumps(decision),
                )
            )

    def latest_decision(self, study: StudyRecord) -> dict[str, Any] | None:
        """Return the newest decision, or None where none was made."""
        with self._session() as session:
            row = session.scalar(
                select(DecisionRow)
                .where(DecisionRow.study_id == study.study_id)
                .order_by(DecisionRow.decision_id.desc())
                .limit(1)
            )
            return dict(json.loads(row.decision_json)) if row is not None else None

    # Quality

    def add_verdict(
        self,
        study: StudyRecord,
        config_digest: str,
        verdict: Mapping[str, Any],
        judged_at_s: float,
    ) -> None:
        """Keep what the quality gate said about one config."""
        with self._session() as session:
            session.add(
                QualityRow(
                    study_id=study.study_id,
                    config_digest=config_digest,
                    judged_at_s=judged_at_s,
                    verdict_json=_dumps(verdict),
                )
            )

    def verdicts(self, study: StudyRecord) -> dict[str, dict[str, Any]]:
        """Return the newest verdict of each config that was judged, by its digest."""
        with self._session() as session:
            rows = session.scalars(
                select(QualityRow)
                .where(QualityRow.study_id == study.study_id)
                .order_by(QualityRow.verdict_id)
            )
            return {row.config_digest: dict(json.loads(row.verdict_json)) for row in rows}


def _dumps(data: object) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False)


def _study(row: StudyRow) -> StudyRecord:
    return StudyRecord(
        study_id=row.study_id,
        name=row.name,
        definition=json.loads(row.definition_json),
        environment=json.loads(row.environment_json),
        is_simulated=row.is_simulated,
        created_at_s=row.created_at_s,
        timings_s=json.loads(row.timings_json),
    )


def _measurement(raw: bytes) -> Measurement:
    return measurement_from_dict(json.loads(zlib.decompress(raw)))


def _launch(row: LaunchRow, measurements: tuple[Measurement, ...]) -> LaunchRecord:
    failure = None
    if row.failure_kind is not None:
        kind = FailureKind(row.failure_kind)
        failure = TrialFailure(kind, row.failure_detail or "", row.log_path)
    # A launch is measured under its own load first; what was sent under another schedule is its ladder.
    first = measurements[0].schedule_digest if measurements else ""
    return LaunchRecord(
        launch_id=row.launch_id,
        trial_number=row.trial_number,
        phase=Phase(row.phase),
        repeat=row.repeat,
        config=config_from_dict(json.loads(row.config_json)),
        state=LaunchState(row.state),
        started_at_s=row.started_at_s,
        ended_at_s=row.ended_at_s,
        report=json.loads(row.report_json) if row.report_json else {},
        failure=failure,
        measurements=tuple(m for m in measurements if m.schedule_digest == first),
        ladder=tuple(m for m in measurements if m.schedule_digest != first),
    )
