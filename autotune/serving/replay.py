"""Answers from a recorded data set: real measurements, replayed on a virtual clock.

A recording is a JSON-lines file, optionally gzipped. Its first line says what was recorded, every
further line is one measurement of one launch. On it a search can be tried time and again against
what real hardware did, without the hardware. The engine's name is ``replay``; version and hardware
are those of the recording.

A measurement answers for the schedule that it was made with. So that a search can be tried with other
seeds too, those of a plain closed loop (no think times, no conversations) also answer for others at
their concurrency, if the recording knows any of the prompts. In every other kind of load the times
are part of the load, so only the same schedule will do.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from autotune.closing import Closing
from autotune.errors import AutotuneError, InputError, invalid, suggestion
from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.records import (
    Measurement,
    RequestRecord,
    ServerCounters,
    measurement_from_dict,
)
from autotune.paths import user_path
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import Clock, VirtualClock
from autotune.serving.config import ServingConfig, config_from_dict
from autotune.serving.engine import Engine, EngineSettings, LaunchContext, LaunchReport, Server
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.serving.models import DrafterInfo, ModelInfo
from autotune.serving.sizes import ServingSizes
from autotune.serving.virtual import added, pass_time, play
from autotune.traffic.schedule import Schedule, ScheduledRequest

FORMAT = "autotune-recording"
VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True)
class RecordedMeasurement:
    """One line of a recording."""

    config: ServingConfig
    concurrency: int | None
    launch: int
    """Number of the launch among those of its config; measurements of one launch share it."""
    launch_s: float
    measurement: Measurement


@dataclass(frozen=True)
class _Load:
    """What kind of load some requests are, as far as a recording tells."""

    concurrency: int | None
    has_conversations: bool
    has_think_times: bool

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Self:
        return cls._of(schedule.concurrency, schedule.requests)

    @classmethod
    def of_measurement(cls, measurement: Measurement) -> Self:
        return cls._of(measurement.concurrency, measurement.records)

    @classmethod
    def _of(
        cls, concurrency: int | None, requests: Sequence[ScheduledRequest | RequestRecord]
    ) -> Self:
        return cls(
            concurrency,
            has_conversations=any(r.conversation_id is not None for r in requests),
            has_think_times=any(r.think_s > 0 for r in requests),
        )

    @property
    def is_plain_closed_loop(self) -> bool:
        return self.concurrency is not None and not (
            self.has_conversations or self.has_think_times
        )

    def __str__(self) -> str:
        kind = "open loop" if self.concurrency is None else f"concurrency {self.concurrency}"
        conversations = " of conversations" if self.has_conversations else ""
        return f"{kind}{conversations}{' with think times' if self.has_think_times else ''}"


@dataclass(frozen=True)
class Recording:
    """A whole recording."""

    path: Path
    engine: EngineInfo
    """What was recorded, under the name ``replay``."""
    model: str
    notes: str
    trained_depth: int | None
    """Of the recorded drafter; None where the recording does not say."""
    sizes: ServingSizes | None
    """Of what was recorded; None where the recording does not say."""
    rows: tuple[RecordedMeasurement, ...]

    def launches_of(self, config: ServingConfig) -> list[list[RecordedMeasurement]]:
        """Return the recorded launches that answer for `config`, in recorded order."""
        rows = [row for row in self.rows if _answers(row.config, config)]
        exact = [row for row in rows if _limits(row.config) == _limits(config)]
        launches: dict[tuple[str, int], list[RecordedMeasurement]] = {}
        for row in exact or rows:
            launches.setdefault((row.config.digest, row.launch), []).append(row)
        return list(launches.values())

    @cached_property
    def prompt_ids(self) -> frozenset[str]:
        """All prompts that were sent while it was made."""
        return frozenset(r.prompt_id for row in self.rows for r in row.measurement.records)

    def labels(self) -> list[str]:
        """Name the recorded configs, simplest first."""
        configs = sorted({row.config for row in self.rows}, key=lambda config: config.simplicity)
        return list(dict.fromkeys(config.label() for config in configs))


def recording_header(
    engine: EngineInfo,
    model: str,
    notes: str = "",
    trained_depth: int | None = None,
    sizes: ServingSizes | None = None,
) -> dict[str, Any]:
    """Build the first line of a recording.

    Args:
        engine: what is recorded.
        model: the target's name.
        notes: anything a reader should know: hardware, date, command.
        trained_depth: of the drafter; None where it is not known.
        sizes: of target, drafters and device, the drafters by the names that the rows give them.
    """
    described = {**engine.as_dict(), "cpu_flags": sorted(engine.cpu_flags)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "engine": {**described, "has_trees": engine.has_trees},
        "model": model,
        "notes": notes,
        "trained_depth": trained_depth,
        **({"sizes": asdict(sizes)} if sizes is not None else {}),
    }


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        InputError: the file is missing, is no recording, or a line of it is malformed.
    """
    lines = _numbered_lines(path)
    number, header = next(lines, (0, None))
    if header is None:
        raise invalid("the recording must have a header line, but the file is empty", where=path)
    _check_header(header, f"{path}:{number}")
    header_where = f"{path}:{number}"
    engine = _parsed(_engine_info, header["engine"], header_where, "the header's engine")
    sizes = _sizes(header, header_where)
    rows = tuple(
        _parsed(_row, line, f"{path}:{number}", "a recorded measurement") for number, line in lines
    )
    if not rows:
        raise invalid("the recording must hold at least one measurement, but has none", where=path)
    return Recording(
        path=path,
        engine=engine,
        model=str(header.get("model")),
        notes=str(header.get("notes", "")),
        trained_depth=header.get("trained_depth"),
        sizes=sizes,
        rows=rows,
    )


class RecordingWriter(Closing):
    """Writes a recording line by line, so that a kill loses at most the line being written."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Start a recording, or go on with one that has the same header.

        Args:
            path: the file; with the suffix ``.gz`` every line becomes a gzip member of its own.
            header: see `recording_header`.

        Raises:
            InputError: the file holds something else.
        """
        self._path = path
        is_new = not path.exists() or path.stat().st_size == 0
        if not is_new:
            _cut_torn_line(path)
            is_new = path.stat().st_size == 0
        if not is_new:
            self._check_same(header)
        self._file = path.open("ab")
        if is_new:
            self._write(header)

    def add(
        self, config: ServingConfig, launch: int, launch_s: float, measurement: Measurement
    ) -> None:
        """Append one measurement; it is on the disk when this returns."""
        self._write(
            {
                "config": config.as_dict(),
                "concurrency": measurement.concurrency,
                "launch": launch,
                "launch_s": launch_s,
                "measurement": measurement.as_dict(),
            }
        )

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        self._file.write(gzip.compress(line, mtime=0) if _is_gzipped(self._path) else line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check_same(self, header: Mapping[str, Any]) -> None:
        _, found = next(_numbered_lines(self._path), (0, None))
        if found != json.loads(json.dumps(header)):
            raise invalid(
                "the recording must have the header of what is appended to it",
                where=self._path,
                got=found,
                next_step="Write to a new file.",
            )


def _is_gzipped(path: Path) -> bool:
    return path.suffix == ".gz"


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a kill cut off, or the next one would be glued to it."""
    if _is_gzipped(path):
        return  # reading finds a torn member and says so
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise invalid("the recording must be a file", where=path, next_step="Check the path.")
    number = 0
    try:
        with gzip.open(path) if _is_gzipped(path) else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _json_object(line, f"{path}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as err:
        raise invalid(
            f"the gzip data is broken or cut off ({err})",
            where=f"{path}:{number + 1}",
            next_step="Record it again, or keep the intact lines: zcat FILE > NEW.jsonl.",
        ) from err
    except OSError as err:
        raise invalid(f"the recording cannot be read ({err.strerror})", where=path) from err


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise invalid(
            f"the line must be JSON ({err})", where=where, next_step="Is the file cut off?"
        ) from err
    if not isinstance(data, dict):
        raise invalid("the line must be a JSON object", where=where, got=data)
    return data


def _check_header(header: Mapping[str, Any], where: str) -> None:
    if header.get("format") != FORMAT:
        raise invalid(
            f"the first line must be the header of a recording, with format {FORMAT!r}",
            where=where,
            got=header.get("format"),
        )
    if header.get("version") != VERSION:
        raise invalid(
            f"the recording's version must be {VERSION}", where=where, got=header.get("version")
        )
    if not isinstance(header.get("engine"), dict):
        raise invalid("the key is required", where=where, key_path="engine")
    depth = header.get("trained_depth")
    if depth is not None and not (isinstance(depth, int) and depth > 0):
        raise invalid("the depth must be a number above 0, or null", where=where,
                      key_path="trained_depth", got=depth)  # fmt: skip


_SIZES = TypeAdapter(ServingSizes)


def _sizes(header: Mapping[str, Any], where: str) -> ServingSizes | None:
    if header.get("sizes") is None:
        return None
    try:
        return _SIZES.validate_python(header["sizes"])
    except ValidationError as err:
        first = err.errors()[0]
        key_path = ".".join(map(str, ("sizes", *first["loc"])))
        raise invalid(f"the header's sizes are malformed: {first['msg']}", where=where,
                      key_path=key_path) from err  # fmt: skip


def _parsed(parse: Callable[[Mapping[str, Any]], T], data: Any, where: str, what: str) -> T:
    try:
        return parse(data)
    except KeyError as err:
        raise invalid(f"{what} must have the key {err}", where=where) from err
    except (TypeError, ValueError, AttributeError) as err:
        raise invalid(f"{what} is malformed: {err}", where=where) from err


def _row(line: Mapping[str, Any]) -> RecordedMeasurement:
    measurement = measurement_from_dict(line["measurement"])
    if line["concurrency"] != measurement.concurrency:
        own = measurement.concurrency
        raise ValueError(f"concurrency is {line['concurrency']}, the measurement's own {own}")
    for record in measurement.records:
        _check_record(record)
    launch_s = float(line["launch_s"])
    if not 0 <= launch_s < float("inf"):
        raise ValueError(f"launch_s must be at least 0, but got {launch_s}")
    return RecordedMeasurement(
        config=config_from_dict(line["config"]),
        concurrency=line["concurrency"],
        launch=int(line["launch"]),
        launch_s=launch_s,
        measurement=measurement,
    )


def _check_record(record: RequestRecord) -> None:
    if len(record.chunk_times_s) != len(record.chunk_tokens):
        raise ValueError(f"request {record.request_id} has more chunk times than tokens, or fewer")
    times_s = (record.sent_s, record.finished_s, record.think_s, *record.chunk_times_s)
    numbers = (*times_s, *record.chunk_tokens)
    if not all(isinstance(number, float | int) for number in numbers):
        raise ValueError(f"request {record.request_id} has a time or count that is no number")


def _engine_info(data: Mapping[str, Any]) -> EngineInfo:
    capability = data.get("compute_capability")
    return EngineInfo(
        engine="replay",
        version=data["version"],
        device=data["device"],
        hardware=data["hardware"],
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        cpu_flags=frozenset(data.get("cpu_flags", ())),
        packages=dict(data.get("packages", {})),
        is_simulated=bool(data.get("is_simulated", False)),
        has_trees=data.get("has_trees"),
    )


def _answers(recorded: ServingConfig, asked: ServingConfig) -> bool:
    """Whether the recording of one config stands for another, wherever the models lie."""
    limits = zip(_limits(recorded), _limits(asked), strict=True)
    is_within = all(a is None or b is None or a == b for a, b in limits)
    return is_within and _knobs(recorded) == _knobs(asked)


def _knobs(config: ServingConfig) -> tuple[int, int, str, str]:
    return (
        config.num_speculative_tokens,
        config.tree_width,
        config.weights,
        config.kv_cache_dtype,
    )


def _limits(config: ServingConfig) -> tuple[int | None, int | None]:
    return config.max_num_seqs, config.max_num_batched_tokens


class _RecordedHead(DrafterInfo):
    """A drafter of which only its results are known."""

    def describe(self) -> str:
        return f"as recorded, trained depth {self.trained_depth or 'unknown'}"


class ReplayEngine(Engine):
    """Serves what was recorded; repeated launches of a config see recorded launches in turn."""

    def __init__(self, settings: EngineSettings) -> None:
        self.clock: Clock = VirtualClock()
        self.recording = read_recording(_recording_path(settings.options))
        self._num_launches: dict[str, int] = {}

    def describe(self) -> EngineInfo:
        return self.recording.engine

    def inspect(
        self, model: str, drafters: Sequence[str], model_where: str, drafter_where: str
    ) -> tuple[ModelInfo | None, tuple[DrafterInfo, ...]]:
        """Describe the recorded drafter under every name given; no files are read."""
        drafting = [row.config for row in self.recording.rows if row.config.is_speculative]
        is_parallel = any(config.parallel_drafting for config in drafting)
        return None, tuple(
            _RecordedHead(
                name=name,
                folder=Path(),
                kind="p-eagle" if is_parallel else "eagle3",
                trained_depth=self.recording.trained_depth,
                num_layers=0,
                draft_vocab_size=0,
                target_hidden_size=0,
                vocab_size=0,
            )
            for name in drafters
        )

    def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes | None:
        """Return the recorded sizes, with those of the recorded drafter under every name given."""
        recorded = self.recording.sizes
        if recorded is None or (drafters and not recorded.drafters):
            return None
        first = next(iter(recorded.drafters.values()), None)
        known = {head.serve_as: recorded.drafters.get(head.serve_as, first) for head in drafters}
        return replace(recorded, drafters={n: d for n, d in known.items() if d is not None})

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        launches = self.recording.launches_of(config)
        if not launches:
            missing = f"{config.label()} is not in the recording"
            raise _not_recorded(missing, self.recording.labels())
        number = self._num_launches.get(config.digest, 0)
        self._num_launches[config.digest] = number + 1
        first = number % len(launches)
        in_turn = launches[first:] + launches[:first]
        launch_s = in_turn[0][0].launch_s
        if launch_s > context.timeout_s:
            pass_time(self.clock, context.timeout_s, context.should_stop, "launch")
            detail = f"not healthy after {context.timeout_s:.0f} s"
            raise TrialFailed(TrialFailure(FailureKind.LAUNCH_TIMEOUT, detail))
        pass_time(self.clock, launch_s, context.should_stop, "launch")
        return ReplayServer(in_turn, self.recording.prompt_ids, self.clock)


class ReplayServer(Server):
    """One recorded launch."""

    def __init__(
        self,
        launches: list[list[RecordedMeasurement]],
        prompt_ids: frozenset[str],
        clock: Clock,
    ) -> None:
        """Stand for the first of `launches`; the others help out where it lacks a load.

        Args:
            launches: of one config, each with at least one measurement.
            prompt_ids: the prompts that the recording knows.
            clock: passes the recorded time.
        """
        recorded = launches[0][0]
        self.report = LaunchReport(
            launch_s=recorded.launch_s, resolved={"recorded_launch": recorded.launch}
        )
        self._launches = launches
        self._prompt_ids = prompt_ids
        self._clock = clock
        self._is_open = True
        self._num_measured: dict[str, int] = {}
        has_speculation = recorded.measurement.counters.has_speculation
        self._counters = ServerCounters(has_speculation=has_speculation)

    def warm_up(self, schedule: Schedule, should_stop: ShouldStop | None = None) -> None:
        """Do nothing: recorded measurements were made after a warm-up that was not recorded."""

    def measure(
        self,
        schedule: Schedule,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Measurement:
        if not self._is_open:
            raise AutotuneError("the server is closed and cannot measure")
        choice = self._recorded(schedule)
        number = self._num_measured.get(schedule.digest, 0)
        self._num_measured[schedule.digest] = number + 1
        measurement = choice[number % len(choice)].measurement
        self._counters = added(self._counters, measurement.counters)
        play(measurement.records, measurement.duration_s, self._clock, on_record, should_stop)
        return measurement

    def counters(self) -> ServerCounters:
        return self._counters

    def close(self) -> None:
        self._is_open = False

    def _recorded(self, schedule: Schedule) -> list[RecordedMeasurement]:
        """Find what was recorded of the schedule, failing that of one that may stand for it."""
        load = _Load.of_schedule(schedule)
        for launch in self._launches:
            same = [row for row in launch if row.measurement.schedule_digest == schedule.digest]
            if same:
                return same
        is_known = any(r.prompt.prompt_id in self._prompt_ids for r in schedule.requests)
        if load.is_plain_closed_loop and is_known:
            for launch in self._launches:
                alike = [row for row in launch if _Load.of_measurement(row.measurement) == load]
                if alike:
                    return alike
        raise self._refusal(schedule, load)

    def _refusal(self, schedule: Schedule, load: _Load) -> TrialFailed:
        """Say what is missing: the kind of load, or these very requests."""
        digests: dict[_Load, dict[str, None]] = {}
        for row in (row for launch in self._launches for row in launch):
            of_load = digests.setdefault(_Load.of_measurement(row.measurement), {})
            of_load[row.measurement.schedule_digest] = None
        if load not in digests:
            recorded = sorted(digests, key=lambda load: (load.concurrency or 0, str(load)))
            return _not_recorded(f"{load} is not in the recording", map(str, recorded))
        what = f"schedule {schedule.digest} ({load}) is not in the recording"
        if load.is_plain_closed_loop:
            what += ", nor is any of its prompts (what is held out must be recorded as well)"
        return _not_recorded(what, (f"schedule {digest}" for digest in digests[load]))


def _not_recorded(what: str, recorded: Iterable[str]) -> TrialFailed:
    detail = f"{what}; recorded: {', '.join(recorded)}"
    return TrialFailed(TrialFailure(FailureKind.INVALID_CONFIG, detail))


def _recording_path(options: Mapping[str, Any]) -> Path:
    unknown = next((name for name in options if name != "recording"), None)
    if unknown is not None:
        hint = suggestion(unknown, ["recording"])
        raise invalid("the replay engine has no such option", where="engine options",
                      got=unknown, next_step=hint)  # fmt: skip
    path = options.get("recording")
    if not isinstance(path, str | Path) or not str(path):
        raise InputError(
            "engine options: recording: the path of a recording is required. "
            "Give one, or use the simulated engine, which needs none."
        )
    return user_path(path, "--engine-option recording")
