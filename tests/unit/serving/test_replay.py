"""Recordings: written, read back, replayed, and refused with the line that is wrong."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import AutotuneError, InputError
from autotune.measure.client import MeasurementStopped
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.serving.capabilities import EngineInfo, capabilities
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext, Server
from autotune.serving.failures import FailureKind, TrialFailed
from autotune.serving.replay import (
    RecordingWriter,
    ReplayEngine,
    read_recording,
    recording_header,
)
from autotune.serving.sizes import DeviceSizes, DrafterSizes, ServingSizes, TargetSizes
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

VLLM = EngineInfo(
    engine="vllm",
    version="0.32.0",
    device="cuda",
    hardware="NVIDIA H100",
    compute_capability=(9, 0),
    cpu_flags=frozenset({"avx512f"}),
    packages={"torch": "2.9.0"},
)
HEADER = recording_header(VLLM, "some/model", notes="made by hand", trained_depth=4)


def config(k: int = 0, **knobs: Any) -> ServingConfig:
    drafter = "recorded/drafter" if k else None
    return ServingConfig("recorded/model", drafter, k, parallel_drafting=k > 0, **knobs)


def measurement(
    duration_s: float = 2.0,
    concurrency: int | None = 1,
    k: int = 0,
    digest: str = "recorded",
    **of_request: Any,
) -> Measurement:
    """Two requests, one after the other, of 10 tokens each; `of_request` goes into each record."""
    records = tuple(
        RequestRecord(
            request_id=number,
            class_name="default",
            prompt_id=f"prompt-{number}",
            scheduled_s=None,
            sent_s=number * duration_s / 2,
            chunk_times_s=(number * duration_s / 2 + 0.1, (number + 1) * duration_s / 2),
            chunk_tokens=(1, 10),
            finished_s=(number + 1) * duration_s / 2,
            num_prompt_tokens=5,
            num_completion_tokens=10,
            finish_reason="length",
            **of_request,
        )
        for number in range(2)
    )
    counters = ServerCounters(
        num_drafts=10 if k else 0,
        num_draft_tokens=10 * k,
        num_accepted_tokens=8 if k else 0,
        num_accepted_tokens_per_pos=(8, *[0] * (k - 1)) if k else (),
        num_generation_tokens=20,
        has_speculation=k > 0,
    )
    return Measurement(digest, concurrency, 1_700_000_000.0, duration_s, records, counters)


def schedule(
    concurrency: int | None = 1,
    *,
    prompt_id: str = "prompt-0",
    sampling_seed: int = 1,
    **of_request: Any,
) -> Schedule:
    request = ScheduledRequest(
        request_id=0,
        class_name="default",
        prompt=Prompt(prompt_id, (("user", f"hello {prompt_id}"),)),
        max_tokens=10,
        temperature=0.0,
        top_p=1.0,
        ignore_eos=False,
        sampling_seed=sampling_seed,
        arrival_s=None if concurrency else 0.0,
        **of_request,
    )
    return Schedule("chat", concurrency, (request,), (), 60.0, 60.0)


Row = tuple[ServingConfig, int, float, Measurement]


def record(path: Path, *rows: Row) -> Path:
    with RecordingWriter(path, HEADER) as writer:
        for row in rows:
            writer.add(*row)
    return path


def engine_of(tmp_path: Path, *rows: Row) -> ReplayEngine:
    path = record(tmp_path / "recording.jsonl", *rows)
    return ReplayEngine(EngineSettings(options={"recording": str(path)}))


def launch(engine: ReplayEngine, served: ServingConfig, **context: Any) -> Server:
    return engine.launch(served, LaunchContext(Path(), "launch", **context))


class TestReplay:
    def test_it_is_the_recorded_engine_under_the_name_replay(self, tmp_path: Path) -> None:
        info = engine_of(tmp_path, (config(), 0, 30.0, measurement())).describe()

        assert info == replace(VLLM, engine="replay")

    def test_the_drafter_is_as_recorded(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(4), 0, 30.0, measurement(k=4)))
        target, heads = engine.inspect("any/model", ["any/drafter"], "--model", "--drafter")

        assert target is None
        assert heads[0].is_parallel
        assert heads[0].serve_as == "any/drafter"
        assert heads[0].describe() == "as recorded, trained depth 4"
        assert capabilities(engine.describe(), target, heads).max_num_speculative_tokens == 6

    def test_a_launch_takes_the_recorded_time(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(), 0, 34.5, measurement(duration_s=2.0)))
        before_s = engine.clock.now_s()

        with launch(engine, config()) as server:
            assert server.report.launch_s == 34.5
            assert engine.clock.now_s() - before_s == pytest.approx(34.5)
            server.measure(schedule())
        assert engine.clock.now_s() - before_s == pytest.approx(36.5)

    def test_the_measurement_is_the_recorded_one(self, tmp_path: Path) -> None:
        recorded = measurement(k=2)
        engine = engine_of(tmp_path, (config(2), 0, 30.0, recorded))

        with launch(engine, config(2)) as server:
            assert server.measure(schedule()) == recorded
        assert not recorded.is_simulated

    def test_repeated_launches_see_the_recorded_launches_in_turn(self, tmp_path: Path) -> None:
        launches = [(config(), n, 30.0 + n, measurement(duration_s=2.0 + n)) for n in range(3)]
        engine = engine_of(tmp_path, *launches)

        seen = []
        for _ in range(4):
            with launch(engine, config()) as server:
                seen.append((server.report.launch_s, server.measure(schedule()).duration_s))
        assert seen == [(30.0, 2.0), (31.0, 3.0), (32.0, 4.0), (30.0, 2.0)]

    def test_the_schedules_concurrency_picks_the_measurement(self, tmp_path: Path) -> None:
        engine = engine_of(
            tmp_path,
            (config(), 0, 30.0, measurement(2.0, concurrency=1)),
            (config(), 0, 30.0, measurement(4.0, concurrency=16)),
            (config(), 0, 30.0, measurement(6.0, None, digest=schedule(None).digest)),
        )

        with launch(engine, config()) as server:
            durations = [server.measure(schedule(c)).duration_s for c in (16, None, 1)]
        assert durations == [4.0, 6.0, 2.0]

    def test_a_launch_per_concurrency_works_too(self, tmp_path: Path) -> None:
        engine = engine_of(
            tmp_path,
            (config(), 0, 30.0, measurement(2.0, concurrency=1)),
            (config(), 1, 30.0, measurement(4.0, concurrency=16)),
        )

        with launch(engine, config()) as server:
            assert server.measure(schedule(16)).duration_s == 4.0

    def test_repeated_measurements_of_a_launch_come_in_turn(self, tmp_path: Path) -> None:
        rows = [(config(), 0, 30.0, measurement(duration)) for duration in (2.0, 3.0)]
        engine = engine_of(tmp_path, *rows)

        with launch(engine, config()) as server:
            durations = [server.measure(schedule()).duration_s for _ in range(3)]
        assert durations == [2.0, 3.0, 2.0]

    def test_what_was_recorded_with_this_very_schedule_goes_first(self, tmp_path: Path) -> None:
        same = measurement(3.0, digest=schedule().digest)
        engine = engine_of(tmp_path, (config(), 0, 30.0, measurement()), (config(), 0, 30.0, same))

        with launch(engine, config()) as server:
            assert server.measure(schedule()) == same

    def test_counters_add_up_over_a_launch(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(2), 0, 30.0, measurement(k=2)))

        with launch(engine, config(2)) as server:
            assert server.counters() == ServerCounters(has_speculation=True)
            server.measure(schedule())
            server.measure(schedule())
            # Twice 10 drafts of which 8 had their first token accepted.
            assert server.counters().num_drafts == 20
            assert server.counters().num_accepted_tokens_per_pos == (16, 0)

    def test_a_long_recorded_launch_times_out(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(), 0, 30.0, measurement()))
        before_s = engine.clock.now_s()

        with pytest.raises(TrialFailed) as caught:
            launch(engine, config(), timeout_s=20.0)
        assert caught.value.failure.kind is FailureKind.LAUNCH_TIMEOUT
        assert engine.clock.now_s() - before_s == pytest.approx(20.0)

    def test_a_launch_asks_whether_to_stop(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(), 0, 30.0, measurement()))
        deadline_s = engine.clock.now_s() + 10.5

        with pytest.raises(MeasurementStopped):
            launch(engine, config(), should_stop=lambda: engine.clock.now_s() > deadline_s)
        assert engine.clock.now_s() <= deadline_s + 1

    def test_a_closed_server_does_not_measure(self, tmp_path: Path) -> None:
        server = launch(engine_of(tmp_path, (config(), 0, 30.0, measurement())), config())
        server.close()

        with pytest.raises(AutotuneError, match="closed"):
            server.measure(schedule())


class TestMatching:
    def test_paths_and_flags_do_not_matter(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(2), 0, 30.0, measurement(k=2)))
        asked = ServingConfig(
            "/other/model", "/other/drafter", 2, flags=(("enforce-eager", True),)
        )

        launch(engine, asked).close()

    def test_limits_matter_only_where_both_sides_set_them(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(max_num_seqs=64), 0, 30.0, measurement()))

        launch(engine, config()).close()
        launch(engine, config(max_num_batched_tokens=2048)).close()
        with pytest.raises(TrialFailed):
            launch(engine, config(max_num_seqs=128))

    def test_the_same_limits_go_first(self, tmp_path: Path) -> None:
        engine = engine_of(
            tmp_path,
            (config(max_num_seqs=64), 0, 30.0, measurement()),
            (config(), 0, 31.0, measurement()),
        )

        assert [launch(engine, config()).report.launch_s for _ in range(2)] == [31.0, 31.0]
        limited = config(max_num_seqs=64)
        assert [launch(engine, limited).report.launch_s for _ in range(2)] == [30.0, 30.0]

    @pytest.mark.parametrize(
        "asked",
        [config(3), config(weights="fp8"), config(kv_cache_dtype="fp8"), config(2, tree_width=2)],
    )
    def test_what_was_never_recorded_is_an_invalid_config(
        self, asked: ServingConfig, tmp_path: Path
    ) -> None:
        engine = engine_of(
            tmp_path,
            (config(2), 0, 30.0, measurement(k=2)),
            (config(), 0, 30.0, measurement()),
        )

        with pytest.raises(TrialFailed) as caught:
            launch(engine, asked)
        failure = caught.value.failure
        assert failure.kind is FailureKind.INVALID_CONFIG
        assert failure.detail == f"{asked.label()} is not in the recording; recorded: K=0, K=2"


class TestSchedules:
    def test_another_seed_of_a_closed_loop_gets_what_was_recorded_at_its_concurrency(
        self, tmp_path: Path
    ) -> None:
        recorded = measurement(digest=schedule().digest)
        engine = engine_of(tmp_path, (config(), 0, 30.0, recorded))

        with launch(engine, config()) as server:
            assert server.measure(schedule(sampling_seed=2)) == recorded

    def test_a_schedules_own_measurement_goes_before_that_of_another_in_any_launch(
        self, tmp_path: Path
    ) -> None:
        own = measurement(3.0, digest=schedule().digest)
        engine = engine_of(tmp_path, (config(), 0, 30.0, measurement()), (config(), 1, 30.0, own))

        with launch(engine, config()) as server:
            assert server.report.resolved == {"recorded_launch": 0}
            assert server.measure(schedule()) == own

    def test_held_out_prompts_that_were_recorded_too_are_told_apart(self, tmp_path: Path) -> None:
        search, held_out = schedule(), schedule(prompt_id="held-out")
        rows = [
            (config(), 0, 30.0, measurement(duration_s, digest=sent.digest))
            for duration_s, sent in (
                (2.0, search),
                (3.0, search),
                (4.0, held_out),
                (5.0, held_out),
            )
        ]
        engine = engine_of(tmp_path, *rows)

        with launch(engine, config()) as server:
            sent = (search, held_out, search, held_out, search)
            assert [server.measure(s).duration_s for s in sent] == [2.0, 4.0, 3.0, 5.0, 2.0]

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (schedule(7), "concurrency 7 is not"),
            (schedule(None, conversation_id=0), "open loop of conversations is not"),
            (schedule(1, think_s=2.0), "concurrency 1 with think times is not"),
            (schedule(1, conversation_id=0), "concurrency 1 of conversations is not"),
            (
                schedule(1, conversation_id=0, think_s=2.0),
                "concurrency 1 of conversations with think times is not",
            ),
        ],
    )
    def test_a_kind_of_load_that_was_never_recorded_is_refused(
        self, asked: Schedule, expected: str, tmp_path: Path
    ) -> None:
        rows = [(config(), 0, 30.0, measurement(concurrency=c)) for c in (16, 1, None)]

        detail = self.refusal(engine_of(tmp_path, *rows), asked)
        assert detail == (
            f"{expected} in the recording; recorded: open loop, concurrency 1, concurrency 16"
        )

    def test_so_is_a_plain_load_where_users_thought(self, tmp_path: Path) -> None:
        engine = engine_of(tmp_path, (config(), 0, 30.0, measurement(think_s=2.0)))

        assert self.refusal(engine, schedule()) == (
            "concurrency 1 is not in the recording; recorded: concurrency 1 with think times"
        )

    @pytest.mark.parametrize(
        ("concurrency", "kind", "of_request"),
        [
            (None, "open loop", {}),
            (1, "concurrency 1 with think times", {"think_s": 2.0}),
            (1, "concurrency 1 of conversations", {"conversation_id": 0}),
        ],
    )
    def test_where_times_are_part_of_the_load_another_schedule_is_refused(
        self, concurrency: int | None, kind: str, of_request: dict[str, Any], tmp_path: Path
    ) -> None:
        recorded = measurement(concurrency=concurrency, **of_request)
        engine = engine_of(tmp_path, (config(), 0, 30.0, recorded))

        asked = schedule(concurrency, **of_request)
        assert self.refusal(engine, asked) == (
            f"schedule {asked.digest} ({kind}) is not in the recording; recorded: schedule recorded"
        )

    def test_so_are_prompts_that_were_never_recorded(self, tmp_path: Path) -> None:
        # As of a profile that holds prompts out, on a recording of its search alone.
        rows = [(config(), n, 30.0, measurement(digest=d)) for n, d in enumerate("aba")]

        asked = schedule(prompt_id="held-out")
        assert self.refusal(engine_of(tmp_path, *rows), asked) == (
            f"schedule {asked.digest} (concurrency 1) is not in the recording, nor is any of its "
            "prompts (what is held out must be recorded as well); recorded: schedule a, schedule b"
        )

    def test_a_prompt_recorded_under_another_load_is_known(self, tmp_path: Path) -> None:
        # The few prompts of a small measurement need not meet those of another seed.
        other = measurement(concurrency=16)
        prompts = tuple(replace(r, prompt_id="elsewhere") for r in other.records)
        engine = engine_of(
            tmp_path,
            (config(), 0, 30.0, measurement()),
            (config(), 0, 30.0, replace(other, records=prompts)),
        )

        with launch(engine, config()) as server:
            assert server.measure(schedule(prompt_id="elsewhere")) == measurement()

    def refusal(self, engine: ReplayEngine, asked: Schedule) -> str:
        with launch(engine, config()) as server, pytest.raises(TrialFailed) as caught:
            server.measure(asked)
        assert caught.value.failure.kind is FailureKind.INVALID_CONFIG
        return caught.value.failure.detail


class TestFiles:
    @pytest.mark.parametrize("name", ["recording.jsonl", "recording.jsonl.gz"])
    def test_what_is_written_is_read(self, name: str, tmp_path: Path) -> None:
        rows = [(config(k), 0, 30.0 + k, measurement(k=k)) for k in (0, 2)]
        recording = read_recording(record(tmp_path / name, *rows))

        assert recording.model == "some/model"
        assert recording.notes == "made by hand"
        assert recording.trained_depth == 4
        assert [(r.config, r.launch, r.launch_s, r.measurement) for r in recording.rows] == rows

    @pytest.mark.parametrize("name", ["recording.jsonl", "recording.jsonl.gz"])
    def test_a_second_writer_appends(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        record(path, (config(), 0, 30.0, measurement()))
        record(path, (config(2), 0, 31.0, measurement(k=2)))

        assert [row.launch_s for row in read_recording(path).rows] == [30.0, 31.0]

    def test_a_line_that_a_kill_cut_off_is_dropped(self, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl", (config(), 0, 30.0, measurement()))
        whole = path.read_bytes()
        record(path, (config(), 1, 31.0, measurement()))
        path.write_bytes(path.read_bytes()[: len(whole) + 50])

        record(path, (config(), 1, 32.0, measurement()))
        assert [row.launch_s for row in read_recording(path).rows] == [30.0, 32.0]

    def test_a_header_that_a_kill_cut_off_is_written_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "recording.jsonl"
        path.write_text('{"format": "autotune-rec')

        record(path, (config(), 0, 30.0, measurement()))
        assert len(read_recording(path).rows) == 1

    def test_another_header_is_not_appended_to(self, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl", (config(), 0, 30.0, measurement()))
        other = recording_header(replace(VLLM, version="0.33.0"), "some/model")

        with pytest.raises(InputError, match="Write to a new file"):
            RecordingWriter(path, other)

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        writer = RecordingWriter(tmp_path / "recording.jsonl", HEADER)
        writer.close()
        writer.close()


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "other"}, ":1: the first line must be the header of a recording"),
            ({"version": 2}, ":1: the recording's version must be 1, but got 2."),
            ({"engine": None}, ":1: engine: the key is required"),
            (
                {"engine": {"engine": "vllm"}},
                ":1: the header's engine must have the key 'version'",
            ),
            ({"trained_depth": "deep"}, ":1: trained_depth: the depth must be a number above 0"),
        ],
    )
    def test_a_bad_header(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        path = tmp_path / "recording.jsonl"
        path.write_text(json.dumps({**HEADER, **change}) + "\n")

        with pytest.raises(InputError) as caught:
            read_recording(path)
        assert f"{path}{message}" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"launch_s": -1},
                ":2: a recorded measurement is malformed: launch_s must be at least 0",
            ),
            ({"launch_s": "long"}, ":2: a recorded measurement is malformed"),
            ({"concurrency": 4}, ":2: a recorded measurement is malformed: concurrency is 4"),
            ({"config": {}}, ":2: a recorded measurement must have the key 'flags'"),
            ({"config": [1]}, ":2: a recorded measurement is malformed"),
            ({"measurement": {}}, ":2: a recorded measurement must have the key 'records'"),
        ],
    )
    def test_a_bad_measurement(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl", (config(), 0, 30.0, measurement()))
        header, row = path.read_text().splitlines()
        path.write_text(f"{header}\n{json.dumps({**json.loads(row), **change})}\n")

        with pytest.raises(InputError) as caught:
            read_recording(path)
        assert f"{path}{message}" in str(caught.value)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("chunk_tokens", [1], "request 0 has more chunk times than tokens, or fewer"),
            ("finished_s", "late", "request 0 has a time or count that is no number"),
            ("think_s", "long", "request 0 has a time or count that is no number"),
            ("surprise", 1, "unexpected keyword argument 'surprise'"),
        ],
    )
    def test_a_bad_record(self, field: str, value: object, message: str, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl", (config(), 0, 30.0, measurement()))
        header, row = map(json.loads, path.read_text().splitlines())
        row["measurement"]["records"][0][field] = value
        path.write_text(f"{json.dumps(header)}\n{json.dumps(row)}\n")

        with pytest.raises(InputError) as caught:
            read_recording(path)
        assert f"{path}:2: a recorded measurement is malformed" in str(caught.value)
        assert message in str(caught.value)

    @pytest.mark.parametrize("line", ["{", "[1]", "\x00", '{"config": '])
    def test_a_line_that_is_no_object(self, line: str, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl", (config(), 0, 30.0, measurement()))
        path.write_text(path.read_text() + "\n" + line)

        with pytest.raises(InputError) as caught:
            read_recording(path)
        assert str(caught.value).startswith(f"{path}:4: the line must be")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "recording.jsonl"
        path.write_text("")

        with pytest.raises(InputError, match="must have a header line"):
            read_recording(path)

    def test_a_file_without_measurements(self, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl")

        with pytest.raises(InputError, match="at least one measurement"):
            read_recording(path)

    @pytest.mark.parametrize("name", ["missing.jsonl", "."])
    def test_no_file(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="the recording must be a file"):
            read_recording(tmp_path / name)

    def test_gzip_that_is_cut_off(self, tmp_path: Path) -> None:
        path = record(tmp_path / "recording.jsonl.gz", (config(), 0, 30.0, measurement()))
        path.write_bytes(path.read_bytes()[:-20])

        with pytest.raises(InputError, match=r"recording.jsonl.gz:2: the gzip data is broken"):
            read_recording(path)

    def test_a_plain_file_with_the_wrong_suffix(self, tmp_path: Path) -> None:
        path = tmp_path / "recording.jsonl.gz"
        path.write_text("{}\n")

        with pytest.raises(InputError, match=r"recording.jsonl.gz:1: the gzip data is broken"):
            read_recording(path)

    def test_gzip_without_its_suffix(self, tmp_path: Path) -> None:
        path = tmp_path / "recording.jsonl"
        path.write_bytes(gzip.compress(b"{}\n"))

        with pytest.raises(InputError, match=r"recording.jsonl:1: the line must be JSON"):
            read_recording(path)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "recording: the path of a recording is required"),
            ({"recording": ""}, "recording: the path of a recording is required"),
            ({"recording": 3}, "recording: the path of a recording is required"),
            ({"recordin": "x.jsonl"}, "Did you mean 'recording'?"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError) as caught:
            ReplayEngine(EngineSettings(options=options))
        assert message in str(caught.value)


# --- sizes ---

SIZES = ServingSizes(
    TargetSizes(1e9, 1e9, 2e9, 30, 576, 49_152, 23_040.0),
    {"some/head": DrafterSizes(1e7, 2e7, 3, 2304.0, 4096)},
    DeviceSizes("CPU", None, 128, 2048, kv_bytes=2.0**30, has_graphs=False),
)


def recorded_with(path: Path, header: dict[str, Any]) -> ReplayEngine:
    with RecordingWriter(path, header) as writer:
        writer.add(config(), 0, 1.0, measurement())
    return ReplayEngine(EngineSettings(options={"recording": str(path)}))


def test_sizes_are_read_back_and_hold_for_every_drafters_name(tmp_path: Path) -> None:
    engine = recorded_with(
        tmp_path / "sized.jsonl", recording_header(VLLM, "some/model", sizes=SIZES)
    )
    _, heads = engine.inspect("m", ["demo:head"], "", "")

    assert engine.recording.sizes == SIZES
    assert engine.sizes("m", heads) == replace(
        SIZES, drafters={"demo:head": SIZES.drafters["some/head"]}
    )
    assert engine.sizes("m", []) == replace(SIZES, drafters={})


def test_a_recording_without_sizes_has_none(tmp_path: Path) -> None:
    engine = recorded_with(tmp_path / "bare.jsonl", HEADER)

    assert "sizes" not in HEADER
    assert engine.sizes("m", []) is None


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([], "sizes"),
        ({"target": {}}, "sizes.target.num_parameters"),
        ({"target": {"num_parameters": "many"}}, "sizes.target.num_parameters"),
    ],
)
def test_malformed_sizes_are_refused(tmp_path: Path, sizes: object, told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        recorded_with(tmp_path / "odd.jsonl", {**HEADER, "sizes": sizes})


def test_the_committed_recording_knows_the_demos_sizes() -> None:
    """Published: 134.5 million parameters in bf16, 30 layers of 3 KV heads x 64."""
    sizes = read_recording(Path(__file__).parents[2] / "data" / "demo_grid.jsonl.gz").sizes

    assert sizes is not None
    assert sizes.target.weight_bytes == pytest.approx(269e6, rel=0.001)
    assert sizes.target.kv_bytes_per_token == 30 * 3 * 64 * 2 * 2
    assert list(sizes.drafters) == ["demo:head"]
    assert sizes.device.kv_bytes == 2**30
