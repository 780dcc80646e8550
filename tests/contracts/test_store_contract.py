"""What every study database must do: one suite, a subclass per database.

A database of another kind joins with a subclass whose `storage` names an empty database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from study_helpers import at_tps, config, measurement

from autotune.errors import StorageError, StudyError, UnknownStudyError
from autotune.measure.metrics import summarize
from autotune.measure.records import ClientAudit, Measurement, RequestRecord, ServerCounters
from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchReport
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.store import repository
from autotune.store.records import LaunchState, Phase, StudyRecord
from autotune.store.repository import Store

DEFINITION = {"model": "m", "traffic": {"load": {"kind": "concurrency", "concurrency": 4}}}
ENVIRONMENT = {"engine": {"hardware": "GPU é ☃"}, "command_line": ["autotune", "search"]}
CONFIG = ServingConfig(
    model="/models/target",
    drafter="/models/head",
    num_speculative_tokens=4,
    parallel_drafting=True,
    kv_cache_dtype="fp8",
    max_num_seqs=64,
    flags=(("block-size", 16), ("enforce-eager", True), ("ratio", 0.9), ("unset", None)),
)
REPORT = LaunchReport(
    launch_s=12.5,
    argv=("vllm", "serve"),
    options={"speculative-config": {"method": "eagle3", "num_speculative_tokens": 4}},
    environment={"VLLM_NO_USAGE_STATS": "1"},
    log_path="/logs/1.log",
    resolved={"max_num_seqs": 64},
)

FORK = multiprocessing.get_context("fork")


def full_measurement() -> Measurement:
    """A measurement in which every field is set, with numbers that JSON must not round."""
    return Measurement(
        schedule_digest="0123456789abcdef",
        concurrency=None,
        started_at_s=1_700_000_000.123456,
        duration_s=1 / 3,
        records=(
            RequestRecord(
                request_id=0,
                class_name="chat",
                prompt_id="é☃",
                scheduled_s=0.1,
                sent_s=0.1 + 0.2,
                chunk_times_s=(0.4, 1e-9 + 0.5),
                chunk_tokens=(1, 7),
                finished_s=0.6,
                num_prompt_tokens=11,
                num_completion_tokens=7,
                finish_reason="stop",
            ),
            RequestRecord(1, "chat", "b", None, 0.5, (), (), 0.9, 0, 0, None, "HTTP 500: x\n\0y"),
        ),
        counters=ServerCounters(10, 40, 17, (9, 5, 3, 0), 1, 100, 200, 30, 20, True),
        audit=ClientAudit(1.5, 0.25, 0.75),
        is_simulated=True,
    )


class StoreContract:
    """Every test begins with an empty database."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> str:
        """Name an empty database."""
        raise NotImplementedError

    @pytest.fixture
    def connect(self, storage: str) -> Callable[[], Store]:
        """Give a function that opens a further connection to the database."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, connect: Callable[[], Store]) -> Store:
        return connect()

    @pytest.fixture
    def study(self, store: Store) -> StudyRecord:
        return store.add_study("demo", DEFINITION, ENVIRONMENT, 1_700_000_000.5, is_simulated=True)

    # --- studies ---

    def test_a_study_comes_back_as_it_was_written(
        self, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        found = connect().get_study("demo")

        assert found == study
        assert (found.name, found.definition, found.environment, found.created_at_s) == (
            "demo",
            DEFINITION,
            ENVIRONMENT,
            1_700_000_000.5,
        )
        assert found.is_simulated is True
        assert found.timings_s == {}

    def test_studies_are_named_oldest_first(self, store: Store) -> None:
        for name in ("z", "a", "m"):
            store.add_study(name, {}, {}, 0.0, is_simulated=False)

        assert store.study_names() == ["z", "a", "m"]

    def test_without_a_name_the_newest_study_is_meant(self, store: Store) -> None:
        for name in ("z", "a"):
            store.add_study(name, {}, {}, 0.0, is_simulated=False)

        assert store.get_study(None).name == "a"

    def test_a_study_that_is_not_there_is_not_found(
        self, store: Store, study: StudyRecord
    ) -> None:
        assert store.find_study("other") is None

    def test_an_unknown_study_is_answered_with_those_that_there_are(self, store: Store) -> None:
        for name in ("support-chat", "batch"):
            store.add_study(name, {}, {}, 0.0, is_simulated=False)

        with pytest.raises(UnknownStudyError) as caught:
            store.get_study("suport-chat")
        text = str(caught.value)
        assert "no study is called 'suport-chat'" in text
        assert "Did you mean 'support-chat'?" in text
        assert "Known: support-chat, batch." in text

    @pytest.mark.parametrize("name", ["demo", None])
    def test_an_empty_database_says_what_to_do(self, store: Store, name: str | None) -> None:
        with pytest.raises(UnknownStudyError, match="holds no study yet. Run `autotune search`"):
            store.get_study(name)

    def test_a_name_can_be_given_once(self, store: Store, study: StudyRecord) -> None:
        with pytest.raises(StorageError):
            store.add_study("demo", {}, {}, 0.0, is_simulated=False)

        assert store.study_names() == ["demo"]

    def test_deleting_takes_all_that_belongs_to_a_study_and_nothing_else(
        self, store: Store, study: StudyRecord
    ) -> None:
        other = store.add_study("other", {}, {}, 0.0, is_simulated=False)
        for owner in (study, other):
            launch_id = store.begin_launch(owner, CONFIG, Phase.SEARCH, 0, 0, 1.0)
            store.end_measured(launch_id, REPORT, [(at_tps(100), {})], 2.0)
            store.add_decision(owner, {"winner": owner.name}, 3.0)

        store.delete_study(study)

        assert store.study_names() == ["other"]
        assert store.launches(study) == []
        assert store.latest_decision(study) is None
        assert [x.measurements for x in store.launches(other)] == [(at_tps(100),)]
        assert store.latest_decision(other) == {"winner": "other"}

    def test_a_deleted_name_can_be_given_again(self, store: Store, study: StudyRecord) -> None:
        store.delete_study(study)

        again = store.add_study("demo", {}, {}, 0.0, is_simulated=False)

        assert store.launches(again) == []

    # --- launches ---

    def test_a_measured_launch_comes_back_as_it_was_written(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        kept = full_measurement()
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 7, 100.25)
        store.end_measured(launch_id, REPORT, [(kept, summarize(kept))], 200.75)

        (found,) = connect().launches(study)

        assert found.measurements == (kept,)
        assert found.config == CONFIG
        assert found.config.digest == CONFIG.digest
        assert (found.launch_id, found.trial_number, found.phase, found.repeat) == (
            launch_id,
            7,
            Phase.SEARCH,
            0,
        )
        assert found.state is LaunchState.MEASURED
        assert (found.started_at_s, found.ended_at_s) == (100.25, 200.75)
        assert found.failure is None
        assert found.report["launch_s"] == 12.5
        assert found.report["options"] == REPORT.options
        assert found.report["argv"] == ["vllm", "serve"]
        assert found.log_path == "/logs/1.log"

    def test_several_measurements_of_one_launch_keep_their_order(
        self, store: Store, study: StudyRecord
    ) -> None:
        kept = [at_tps(100), at_tps(50), at_tps(75)]
        launch_id = store.begin_launch(study, CONFIG, Phase.CONFIRM, 2, None, 1.0)
        store.end_measured(launch_id, REPORT, [(m, {}) for m in kept], 2.0)

        (found,) = store.launches(study)

        assert found.measurements == tuple(kept)
        assert (found.phase, found.repeat, found.trial_number) == (Phase.CONFIRM, 2, None)

    def test_a_long_measurement_comes_back_whole(self, store: Store, study: StudyRecord) -> None:
        kept = measurement([0.1 + number / 7 for number in range(2000)])
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(launch_id, REPORT, [(kept, {})], 2.0)

        assert store.launches(study)[0].measurements == (kept,)

    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_a_failed_launch_comes_back_with_its_failure(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord, kind: FailureKind
    ) -> None:
        failure = TrialFailure(
            kind, "torch.OutOfMemoryError: CUDA é\nout of memory", "/logs/1.log"
        )
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 3, 1.0)
        store.end_failed(launch_id, failure, 2.0)

        (found,) = connect().launches(study)

        assert found.failure == failure
        assert found.state is LaunchState.FAILED
        assert found.measurements == ()
        assert (found.log_path, found.ended_at_s) == ("/logs/1.log", 2.0)

    def test_a_launch_is_written_down_before_it_ends(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)

        (found,) = connect().launches(study)

        assert found.state is LaunchState.RUNNING
        assert (found.ended_at_s, found.failure, found.measurements, found.log_path) == (
            None,
            None,
            (),
            None,
        )

    def test_launches_are_listed_in_the_order_they_began(
        self, store: Store, study: StudyRecord
    ) -> None:
        began = [store.begin_launch(study, config(k), Phase.SEARCH, 0, k, 9 - k) for k in range(5)]
        for launch_id in reversed(began):
            store.abandon_launch(launch_id, 10.0)

        found = store.launches(study)

        assert [x.launch_id for x in found] == began
        assert [x.config for x in found] == [config(k) for k in range(5)]

    def test_only_launches_that_still_run_are_abandoned(
        self, store: Store, study: StudyRecord
    ) -> None:
        other = store.add_study("other", {}, {}, 0.0, is_simulated=False)
        measured, failed, cut, running, more = (
            store.begin_launch(study, config(k), Phase.SEARCH, 0, k, 1.0) for k in range(5)
        )
        of_other = store.begin_launch(other, config(0), Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(measured, REPORT, [(at_tps(100), {})], 2.0)
        store.end_failed(failed, TrialFailure(FailureKind.UNSTABLE, "x"), 2.0)
        store.abandon_launch(cut, 2.0)

        assert store.abandon_running(study) == 2
        assert store.abandon_running(study) == 0

        states = {x.launch_id: x.state for x in store.launches(study)}
        assert states == {
            measured: LaunchState.MEASURED,
            failed: LaunchState.FAILED,
            cut: LaunchState.ABANDONED,
            running: LaunchState.ABANDONED,
            more: LaunchState.ABANDONED,
        }
        (found,) = store.launches(other)
        assert (found.launch_id, found.state) == (of_other, LaunchState.RUNNING)

    def test_what_was_measured_under_another_schedule_is_the_ladder(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        main, again = at_tps(100), at_tps(101)
        rungs = tuple(
            dataclasses.replace(at_tps(tps), schedule_digest=f"{tps:016d}", concurrency=rung)
            for rung, tps in ((1, 20), (4, 60))
        )
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(launch_id, REPORT, [(m, {}) for m in (main, again, *rungs)], 2.0)

        (found,) = connect().launches(study)

        assert found.measurements == (main, again)
        assert found.ladder == rungs

    def test_a_launch_without_a_ladder_has_none(self, store: Store, study: StudyRecord) -> None:
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(launch_id, REPORT, [(at_tps(100), {})], 2.0)
        assert store.launches(study)[0].ladder == ()

    def test_why_a_measurement_was_stopped_comes_back(
        self, store: Store, study: StudyRecord
    ) -> None:
        kept = dataclasses.replace(at_tps(100), stopped_early="too slow é")
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(launch_id, REPORT, [(kept, {})], 2.0)
        assert store.launches(study)[0].measurements == (kept,)

    def test_only_the_launches_that_are_asked_for_are_read(
        self, store: Store, study: StudyRecord
    ) -> None:
        other = store.add_study("other", {}, {}, 0.0, is_simulated=False)
        ids = []
        for owner, tps in ((study, 100), (study, 110), (other, 120), (study, 130)):
            ids.append(store.begin_launch(owner, config(3), Phase.SEARCH, 0, 0, 1.0))
            store.end_measured(ids[-1], REPORT, [(at_tps(tps), {})], 2.0)

        # In the order they began, and never another study's.
        found = store.launches(study, launch_ids=[ids[3], ids[0], ids[2], 10_000])

        assert [x.launch_id for x in found] == [ids[0], ids[3]]
        assert [x.measurements for x in found] == [(at_tps(100),), (at_tps(130),)]
        assert store.launches(study, launch_ids=[]) == []
        assert [x.launch_id for x in store.launches(study)] == [ids[0], ids[1], ids[3]]

    # --- the environment ---

    def test_a_part_of_the_environment_is_replaced_and_the_rest_stays(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        other = store.add_study("other", {}, {"cost": 1}, 0.0, is_simulated=False)
        changed = store.update_environment(study, {"cost": {"per_gpu_hour": 2.5}, "models": ["é"]})

        expected = {**ENVIRONMENT, "cost": {"per_gpu_hour": 2.5}, "models": ["é"]}
        assert changed.environment == expected
        assert changed.study_id == study.study_id
        assert connect().get_study("demo").environment == expected
        assert connect().get_study("demo").definition == DEFINITION

        store.update_environment(study, {"cost": None})  # an old record changes nothing else
        assert connect().get_study("demo").environment == {**expected, "cost": None}
        assert connect().get_study(other.name).environment == {"cost": 1}

    # --- timings and decisions ---

    def test_timings_add_up(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        store.add_timings(study, {"launch": 10.0, "total": 12.0})
        connect().add_timings(study, {"launch": 5.5, "traffic": 1.0})
        store.add_timings(study, {})

        found = store.get_study("demo").timings_s
        assert found == {"launch": 15.5, "traffic": 1.0, "total": 12.0}

    def test_the_newest_decision_counts(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        assert store.latest_decision(study) is None
        first = {"winner": "a", "gain": {"estimate": 1.25}, "warnings": ["é"]}
        store.add_decision(study, first, 20.0)
        assert connect().latest_decision(study) == first

        store.add_decision(study, {"winner": "b"}, 10.0)  # later, whatever a clock said
        assert connect().latest_decision(study) == {"winner": "b"}

    def test_the_newest_verdict_of_each_config_counts(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        assert store.verdicts(study) == {}
        store.add_verdict(study, "a", {"level": "failed", "reasons": ["é"]}, 20.0)
        store.add_verdict(study, "b", {"level": "passed"}, 21.0)
        store.add_verdict(study, "a", {"level": "passed"}, 10.0)  # later, whatever a clock said

        assert connect().verdicts(study) == {"a": {"level": "passed"}, "b": {"level": "passed"}}

        store.delete_study(study)
        again = store.add_study("demo", {}, {}, 1.0, is_simulated=False)
        assert store.verdicts(again) == {}

    # --- one tuner at a time ---

    def test_a_study_is_held_by_one_living_process(
        self,
        store: Store,
        connect: Callable[[], Store],
        study: StudyRecord,
        storage: str,
        children: Children,
    ) -> None:
        holder = children.start(hold_until_told, storage)
        assert holder.says() == "held"

        with pytest.raises(StudyError) as caught:
            store.take_hold(study)
        text = str(caught.value)
        assert f"study 'demo' is being run by process {holder.pid} on " in text
        assert "--study" in text

        holder.tell("release")
        assert holder.says() == "released"
        store.take_hold(study)

    def test_a_killed_holder_holds_nothing(
        self, store: Store, study: StudyRecord, storage: str, children: Children
    ) -> None:
        holder = children.start(hold_until_told, storage)
        assert holder.says() == "held"

        holder.kill()
        holder.join()

        store.take_hold(study)

    def test_a_holder_that_is_dead_but_not_yet_reaped_holds_nothing(
        self, store: Store, study: StudyRecord, storage: str, children: Children
    ) -> None:
        """In a container nobody may ever reap it: it stays a zombie, and its number stays taken."""
        holder = children.start(hold_until_told, storage)
        assert holder.says() == "held"

        holder.kill()
        deadline = time.monotonic() + 5
        while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)

        store.take_hold(study)

    def test_a_later_process_with_the_number_of_the_holder_holds_nothing(
        self,
        store: Store,
        study: StudyRecord,
        storage: str,
        children: Children,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        holder = children.start(hold_until_told, storage)
        assert holder.says() == "held"
        started_s = psutil.Process(holder.pid).create_time()
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: started_s + 100)

        store.take_hold(study)

    def test_a_holder_on_another_host_cannot_be_asked_and_is_believed(
        self,
        store: Store,
        study: StudyRecord,
        storage: str,
        children: Children,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        holder = children.start(hold_until_told, storage)
        assert holder.says() == "held"
        holder.kill()
        holder.join()
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")

        with pytest.raises(StudyError, match=f"process {holder.pid} on "):
            store.take_hold(study)

    def test_of_two_that_start_at_the_same_moment_only_one_takes_hold(
        self,
        store: Store,
        study: StudyRecord,
        storage: str,
        children: Children,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The other one comes between the look at the holder and the writing down of the new one."""
        others: list[Child] = []
        this_process = repository.this_process

        def while_the_other_one_tries() -> dict[str, Any]:
            # Before the other one is forked, which must not start a third one.
            monkeypatch.setattr(repository, "this_process", this_process)
            others.append(children.start(try_to_hold, storage))
            others[0].has_said(0.5)  # or it waits for this one's transaction, which is as good
            return this_process()

        monkeypatch.setattr(repository, "this_process", while_the_other_one_tries)
        try:
            store.take_hold(study)
            has_taken = True
        except (StudyError, StorageError):  # it is held, or written to at this moment
            has_taken = False

        assert [has_taken, others[0].says() == "held"].count(True) == 1

    def test_one_process_may_take_hold_again(self, store: Store, study: StudyRecord) -> None:
        store.take_hold(study)
        store.take_hold(study)
        store.release(study)
        store.release(study)

    # --- everything is kept at once ---

    def test_what_a_call_wrote_is_there_for_everybody_when_it_returns(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        reader = connect()
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        assert [x.state for x in reader.launches(study)] == [LaunchState.RUNNING]
        store.end_measured(launch_id, REPORT, [(at_tps(100), {})], 2.0)
        assert [len(x.measurements) for x in reader.launches(study)] == [1]
        store.add_timings(study, {"total": 1.0})
        assert reader.get_study("demo").timings_s == {"total": 1.0}
        store.add_decision(study, {"winner": "a"}, 3.0)
        assert reader.latest_decision(study) == {"winner": "a"}

    def test_a_failed_write_leaves_nothing_behind(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        summaries: list[dict[str, Any]] = [{}, {"not JSON": object()}]

        with pytest.raises(TypeError):
            store.end_measured(launch_id, REPORT, [(at_tps(100), s) for s in summaries], 2.0)

        (found,) = connect().launches(study)
        assert (found.state, found.measurements) == (LaunchState.RUNNING, ())

    def test_a_reader_does_not_stop_the_writer(
        self, store: Store, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        reader = connect()
        with reader._sessions.begin() as session:  # a dashboard in the middle of reading
            session.connection().exec_driver_sql("SELECT name FROM autotune_studies").fetchall()
            store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)

    def test_what_was_stored_survives_kill_9_at_any_moment(
        self, storage: str, connect: Callable[[], Store], children: Children
    ) -> None:
        """A writer is killed 20 times. Each time all that it said was stored must be there."""
        rng = random.Random(0)
        connect().add_study("demo", DEFINITION, ENVIRONMENT, 0.0, is_simulated=True)
        said: dict[int, str] = {}
        num_finished = 0

        for _ in range(20):
            writer = children.start(write_launches, storage)
            assert writer.says() == "ready"
            time.sleep(rng.uniform(0.0, 0.08))
            writer.kill()
            writer.join()
            for line in writer.rest():
                number, state = line.split()
                said[int(number)] = state

            store = connect()
            found = {x.launch_id: x for x in store.launches(store.get_study("demo"))}
            assert said.keys() <= found.keys()
            for launch_id, state in said.items():
                assert state == "running" or found[launch_id].state == state
            for launch in found.values():
                is_measured = launch.state is LaunchState.MEASURED
                assert launch.measurements == ((at_tps(100),) if is_measured else ())
                assert (launch.failure is not None) is (launch.state is LaunchState.FAILED)
            num_finished = sum(x.state is not LaunchState.RUNNING for x in found.values())

        assert num_finished > 5  # the writers were not all killed before they wrote anything


class TestSqlite(StoreContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> str:
        return str(tmp_path / "autotune.db")

    @pytest.fixture
    def connect(self, storage: str) -> Iterator[Callable[[], Store]]:
        with contextlib.ExitStack() as stack:

            def open_store() -> Store:
                store = Store(storage, create=True)
                stack.callback(store.close)
                return store

            yield open_store

    def test_the_database_is_sound_after_a_kill(
        self, storage: str, connect: Callable[[], Store], children: Children
    ) -> None:
        connect().add_study("demo", {}, {}, 0.0, is_simulated=True)
        writer = children.start(write_launches, storage)
        assert writer.says() == "ready"
        time.sleep(0.05)
        writer.kill()
        writer.join()

        with contextlib.closing(sqlite3.connect(storage)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []

    def test_a_url_and_a_path_are_the_same_database(
        self, storage: str, connect: Callable[[], Store], study: StudyRecord
    ) -> None:
        by_url = Store(f"sqlite:///{storage}")
        try:
            assert by_url.study_names() == ["demo"]
        finally:
            by_url.close()

    def test_another_program_can_read_the_summaries(
        self, storage: str, store: Store, study: StudyRecord
    ) -> None:
        kept = at_tps(100)
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, 0, 1.0)
        store.end_measured(launch_id, REPORT, [(kept, summarize(kept))], 2.0)

        with contextlib.closing(sqlite3.connect(storage)) as connection:
            ((text,),) = connection.execute("SELECT summary_json FROM autotune_measurements")
        assert json.loads(text)["output_throughput_tps"] == pytest.approx(100)

    def test_a_process_of_its_own_sees_what_was_written(
        self, storage: str, study: StudyRecord
    ) -> None:
        """Not a fork of this one: another interpreter that opens the file by its path."""
        code = (
            "import sys; from autotune.store.repository import Store; "
            "print(Store(sys.argv[1]).get_study(None).environment['engine']['hardware'])"
        )

        done = subprocess.run(
            [sys.executable, "-c", code, storage],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )

        assert done.stdout.strip() == "GPU é ☃"


# --- processes beside the test's own ---


class Child:
    """A process that talks in lines, as a program does on its standard output."""

    def __init__(self, target: Callable[[str, Any], None], storage: str) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process: BaseProcess = FORK.Process(target=target, args=(storage, theirs))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def says(self, timeout_s: float = 20.0) -> str:
        assert self._pipe.poll(timeout_s), "the other process said nothing"
        return str(self._pipe.recv())

    def has_said(self, timeout_s: float) -> bool:
        return self._pipe.poll(timeout_s)

    def rest(self) -> list[str]:
        """Everything that it still said before it ended."""
        lines = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self._pipe.poll(0):
                lines.append(str(self._pipe.recv()))
        return lines

    def tell(self, word: str) -> None:
        self._pipe.send(word)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        self._process.join(20)
        assert self._process.exitcode is not None

    def close(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        self._pipe.close()


class Children:
    """Starts processes, and ends them all with the test."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, target: Callable[[str, Any], None], storage: str) -> Child:
        child = Child(target, storage)
        self._all.append(child)
        return child

    def close(self) -> None:
        for child in self._all:
            child.close()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


def hold_until_told(storage: str, pipe: Any) -> None:
    store = Store(storage)
    study = store.get_study("demo")
    store.take_hold(study)
    pipe.send("held")
    pipe.recv()
    store.release(study)
    pipe.send("released")
    pipe.recv()


def try_to_hold(storage: str, pipe: Any) -> None:
    store = Store(storage)
    try:
        store.take_hold(store.get_study("demo"))
    except (StudyError, StorageError):
        pipe.send("refused")
    else:
        pipe.send("held")
    pipe.recv()


def write_launches(storage: str, pipe: Any) -> None:
    """Write one launch after the other, and say each thing only when it is stored."""
    store = Store(storage)
    study = store.get_study("demo")
    pipe.send("ready")
    for number in range(100_000):
        launch_id = store.begin_launch(study, CONFIG, Phase.SEARCH, 0, number, 1.0)
        pipe.send(f"{launch_id} running")
        if number % 2:
            store.end_failed(launch_id, TrialFailure(FailureKind.UNSTABLE, "x"), 2.0)
            pipe.send(f"{launch_id} failed")
        else:
            store.end_measured(launch_id, REPORT, [(at_tps(100), {})], 2.0)
            pipe.send(f"{launch_id} measured")
