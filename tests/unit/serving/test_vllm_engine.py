"""The vLLM engine against a mock of vLLM as a process: launched, checked, measured, cleaned up."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from mock_server import MOCK_COMMAND, MockServer

from autotune.errors import PrerequisiteError
from autotune.measure import audit
from autotune.measure.client import Drive, LoadClient, MeasurementStopped
from autotune.measure.metrics import observed
from autotune.measure.records import RequestRecord
from autotune.serving import process as process_module
from autotune.serving import vllm_engine
from autotune.serving.capabilities import EngineInfo
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.serving.http import request
from autotune.serving.vllm_engine import VllmEngine, VllmServer, masked
from autotune.serving.vllm_options import Needs
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

pytestmark = pytest.mark.usefixtures("no_process_left")

QUICK = ("--mock-first-token-s", "0.002")

PLAIN = ServingConfig(model="target")
SPECULATIVE = ServingConfig("target", "head", 3, parallel_drafting=True)

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DEATH_LOG = """\
(EngineCore pid=7) ERROR 11-30 19:32:55 [core.py:1510] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-30 19:32:55 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 19:32:55 [core.py:1510]   File "/venv/vllm/v1/engine/core.py", line 9
(EngineCore pid=7) ERROR 11-30 19:32:55 [core.py:1510] {cause}
(APIServer pid=4) ERROR 11-30 19:32:55 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: \
EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "GRACE_S", 2.0)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests pass where other work delays the client; its audit has tests of its own."""
    monkeypatch.setattr(audit, "MAX_LAG_MS", 1000.0)


@pytest.fixture
def engine_with() -> Callable[..., VllmEngine]:
    """Give a function that makes an engine whose vLLM is the mock, with the mock's own options."""

    def make(*options: str) -> VllmEngine:
        return VllmEngine(EngineSettings(command=(*MOCK_COMMAND, *options)))

    return make


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    return LaunchContext(work_dir=tmp_path, name="trial-1", timeout_s=20.0)


EngineWith = Callable[..., VllmEngine]


def schedule(count: int = 4, *, max_tokens: int = 7, num_warmup: int = 2) -> Schedule:
    """One user; every request asks for `max_tokens` tokens."""
    requests = tuple(
        ScheduledRequest(
            request_id=number,
            class_name="default",
            prompt=Prompt(f"p{number}", (("user", f"tell me {number} things"),)),
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=False,
            sampling_seed=number,
            arrival_s=None,
        )
        for number in range(count + num_warmup)
    )
    return Schedule("chat", 1, requests[num_warmup:], requests[:num_warmup], 60.0, 10.0)


def failure_of(action: Callable[[], object]) -> TrialFailure:
    with pytest.raises(TrialFailed) as caught:
        action()
    return caught.value.failure


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


# --- a launch from its start to its end ---


def test_a_server_is_launched_measured_and_gone(
    engine_with: EngineWith, context: LaunchContext, is_running: Callable[[int], bool]
) -> None:
    # 7 tokens in chunks of 1, 3, 1, 2: the first is the prompt's own, each other one is a draft of
    # 3 tokens, of which 2, 0 and 1 were accepted.
    engine = engine_with("--mock-tokens-per-step", "3,1", "--mock-step-s", "0.01")
    reported: list[RequestRecord] = []
    with engine.launch(SPECULATIVE, context) as server:
        started = children()
        server.warm_up(schedule())
        measurement = server.measure(schedule(), reported.append)

    assert [len(measurement.records), measurement.num_errors] == [4, 0]
    assert measurement.records == tuple(reported)
    assert {record.chunk_tokens for record in measurement.records} == {(1, 4, 5, 7)}
    # Warm-up requests are not in the counters.
    assert measurement.counters.num_drafts == 4 * 3
    assert measurement.counters.num_draft_tokens == 4 * 3 * 3
    assert measurement.counters.num_accepted_tokens == 4 * 3
    assert measurement.counters.num_accepted_tokens_per_pos == (4 * 2, 4 * 1, 0)
    assert measurement.counters.num_generation_tokens == 4 * 7
    assert measurement.counters.acceptance_length == pytest.approx(2.0)  # 1 + 12 / 12
    assert measurement.schedule_digest == schedule().digest
    assert measurement.concurrency == 1
    assert not measurement.is_simulated
    # 7 tokens in 20 ms + 3 x 10 ms, one user: at most 140 tokens/s.
    assert 80 < observed("output_throughput_tps", measurement) <= 140

    assert len(started) >= 3  # supervisor, server, load generator
    assert not any(is_running(process.pid) for process in started)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One speculating server for the tests that leave it as it was."""
    env = {"HF_TOKEN": "hf_verysecret", "MY_API_KEY": "sk-verysecret", "PLAIN_SETTING": "seen"}
    engine = VllmEngine(EngineSettings(command=(*MOCK_COMMAND, "--mock-launch-s", "0.3"), env=env))
    config = replace(SPECULATIVE, max_num_seqs=16, max_num_batched_tokens=4096)
    needs = Needs(longest_request_tokens=600, max_num_speculative_tokens=3)
    work_dir = tmp_path_factory.mktemp("shared")
    with engine.launch(config, LaunchContext(work_dir, "trial-7", needs, 20.0)) as server:
        assert isinstance(server, VllmServer)
        yield server


def test_the_launch_is_reported(shared: VllmServer) -> None:
    report = shared.report
    assert 0.3 <= report.launch_s < 15
    assert report.log_path is not None
    assert Path(report.log_path).name == "trial-7.log"
    assert "Application startup complete" in Path(report.log_path).read_text(encoding="utf-8")
    argv = list(report.argv)
    assert argv[argv.index("--model") + 1] == "target"
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert argv[argv.index("--max-num-seqs") + 1] == "16"
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": "head",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert report.resolved["num_speculative_tokens"] == 3
    assert report.resolved["parallel_drafting"] is True
    assert report.resolved["max_num_seqs"] == 16
    assert report.resolved["max_num_batched_tokens"] == 4096
    assert report.resolved["max_model_len"] == 768  # 600 + 3 + 1, rounded up to 256s
    assert report.resolved["cache_dtype"] == "auto"


def test_secrets_reach_the_server_but_not_the_report(shared: VllmServer) -> None:
    assert psutil.Process(shared.pid).environ()["HF_TOKEN"] == "hf_verysecret"
    environment = shared.report.environment
    assert environment["HF_TOKEN"] == "***"
    assert environment["MY_API_KEY"] == "***"
    assert environment["PLAIN_SETTING"] == "seen"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert "verysecret" not in repr(shared.report)


def test_several_measurements_of_one_launch_count_apart(shared: VllmServer) -> None:
    before = shared.counters().num_drafts
    first, second = shared.measure(schedule(3)), shared.measure(schedule(2))
    # 7 tokens, one a step: 6 drafts a request.
    assert (first.counters.num_drafts, second.counters.num_drafts) == (18, 12)
    assert shared.counters().num_drafts - before == 30


@pytest.mark.parametrize(
    ("name", "is_masked"),
    [
        ("HF_TOKEN", True),
        ("aws_secret_access_key", True),
        ("DB_PASSWORD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("CUDA_VISIBLE_DEVICES", False),
        ("VLLM_CPU_KVCACHE_SPACE", False),
    ],
)
def test_what_is_masked(name: str, is_masked: bool) -> None:
    assert masked({name: "value"}) == {name: "***" if is_masked else "value"}


def test_without_speculation_nothing_is_drafted(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    with engine_with().launch(PLAIN, context) as server:
        measurement = server.measure(schedule(2))
    assert not measurement.counters.has_speculation
    assert measurement.counters.acceptance_length is None
    assert measurement.num_errors == 0


def test_close_may_be_called_twice(engine_with: EngineWith, context: LaunchContext) -> None:
    server = engine_with().launch(PLAIN, context)
    server.close()
    server.close()


# --- launches that fail ---


def test_a_server_that_never_becomes_healthy_is_given_up(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    began = time.monotonic()
    engine = engine_with("--mock-never-healthy")
    failure = failure_of(lambda: engine.launch(PLAIN, replace(context, timeout_s=1.0)))
    assert failure.kind is FailureKind.LAUNCH_TIMEOUT
    assert failure.detail == "not healthy after 1 s"
    assert failure.log_path == str(context.work_dir / "trial-1.log")
    assert time.monotonic() - began < 10


def test_a_launch_can_be_stopped(engine_with: EngineWith, context: LaunchContext) -> None:
    engine = engine_with("--mock-never-healthy")
    began = time.monotonic()
    with pytest.raises(MeasurementStopped):
        engine.launch(PLAIN, replace(context, should_stop=lambda: time.monotonic() - began > 0.5))
    assert time.monotonic() - began < 10


def test_a_server_that_dies_while_starting_is_told_with_its_cause(
    engine_with: EngineWith, context: LaunchContext, tmp_path: Path
) -> None:
    log = tmp_path / "death.txt"
    log.write_text(DEATH_LOG.format(cause=OUT_OF_MEMORY), encoding="utf-8")
    engine = engine_with("--mock-dies-at-launch", "--mock-log", str(log))
    failure = failure_of(lambda: engine.launch(PLAIN, context))
    assert failure.kind is FailureKind.INSUFFICIENT_MEMORY
    assert failure.detail == OUT_OF_MEMORY
    assert failure.log_path is not None
    assert OUT_OF_MEMORY in Path(failure.log_path).read_text(encoding="utf-8")


def test_an_option_that_the_server_refuses_is_an_invalid_config(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    config = replace(PLAIN, flags=(("max-model-len", "long"),))
    failure = failure_of(lambda: engine_with().launch(config, context))
    assert failure.kind is FailureKind.INVALID_CONFIG
    assert "invalid int value: 'long'" in failure.detail


def test_a_server_without_speculation_counters_is_not_speculating(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    engine = engine_with("--mock-no-spec-counters")
    failure = failure_of(lambda: engine.launch(SPECULATIVE, context))
    assert failure.kind is FailureKind.SPECULATION_INACTIVE
    assert "K = 3 was asked for" in failure.detail


@pytest.mark.parametrize(
    ("reported", "told"),
    [
        (
            '{"num_speculative_tokens": 2}',
            "num_speculative_tokens = 3 was asked for, the server runs 2",
        ),
        (
            '{"parallel_drafting": false}',
            "parallel_drafting = True was asked for, the server runs False",
        ),
    ],
)
def test_a_server_that_speculates_otherwise_is_found_out(
    engine_with: EngineWith, context: LaunchContext, reported: str, told: str
) -> None:
    engine = engine_with("--mock-reports", reported)
    failure = failure_of(lambda: engine.launch(SPECULATIVE, context))
    assert (failure.kind, failure.detail) == (FailureKind.SPECULATION_INACTIVE, told)


def test_another_server_on_the_port_is_found_out(
    engine_with: EngineWith, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody else took the port between the choice of it and the launch, and answers there.
    with MockServer() as other:
        monkeypatch.setattr(vllm_engine, "free_port", lambda: other.port)
        failure = failure_of(lambda: engine_with("--mock-never-healthy").launch(PLAIN, context))
    assert failure.kind is FailureKind.LAUNCH_ERROR
    assert failure.detail == "another process answers on the server's port"


def test_a_command_that_cannot_be_found_says_what_to_check() -> None:
    engine = VllmEngine(EngineSettings(command=("/no/such/vllm",)))
    with pytest.raises(
        PrerequisiteError, match=r"serve\.command: '/no/such/vllm' cannot be found"
    ):
        engine.describe()


def test_the_commands_own_version_counts(engine_with: EngineWith) -> None:
    info = engine_with().describe()
    assert (info.engine, info.version) == ("vllm", "0.32.0")


# --- failures under load ---


def test_a_server_that_dies_under_load_is_told_with_its_cause(
    engine_with: EngineWith, context: LaunchContext, tmp_path: Path
) -> None:
    log = tmp_path / "death.txt"
    cause = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    log.write_text(DEATH_LOG.format(cause=cause), encoding="utf-8")
    engine = engine_with("--mock-dies-at-request", "3", "--mock-log", str(log))
    with engine.launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.measure(schedule(50)))
    assert failure.kind is FailureKind.DIED_UNDER_LOAD
    assert failure.detail == cause


def test_memory_that_runs_out_under_load_has_its_own_kind(
    engine_with: EngineWith, context: LaunchContext, tmp_path: Path
) -> None:
    log = tmp_path / "death.txt"
    log.write_text(DEATH_LOG.format(cause=OUT_OF_MEMORY), encoding="utf-8")
    engine = engine_with("--mock-dies-at-request", "1", "--mock-log", str(log))
    with engine.launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.warm_up(schedule()))
    assert (failure.kind, failure.detail) == (FailureKind.OUT_OF_MEMORY_UNDER_LOAD, OUT_OF_MEMORY)


def test_too_many_failed_requests_are_no_measurement(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    # 1 of 40 requests is 2.5%, above the 2% that are let pass.
    engine = engine_with("--mock-fault", "7=http_500", *QUICK)
    with engine.launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.measure(schedule(40, max_tokens=1)))
    assert failure.kind is FailureKind.REQUEST_ERRORS
    assert failure.detail.startswith("1 of 40 requests failed: ")
    assert "HTTP 500" in failure.detail


def test_a_few_failed_requests_are_let_pass(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    # 1 of 50 requests is 2%, not above it.
    engine = engine_with("--mock-fault", "7=http_503", *QUICK)
    with engine.launch(PLAIN, context) as server:
        measurement = server.measure(schedule(50, max_tokens=1))
    assert measurement.num_errors == 1
    assert len(measurement.records) == 50


def test_a_warm_up_fails_only_when_every_request_does(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    with engine_with("--mock-fault", "0=http_503").launch(PLAIN, context) as server:
        server.warm_up(schedule(num_warmup=2))
    with engine_with("--mock-fault", "all=empty").launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.warm_up(schedule(num_warmup=2)))
    assert failure.kind is FailureKind.REQUEST_ERRORS
    assert failure.detail == "2 of 2 requests failed: empty output"


def test_a_server_that_drafts_nothing_is_not_speculating(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    # Answers of one token come from the prompt's own step: there is nothing to draft.
    with engine_with("--mock-output-tokens", "1").launch(SPECULATIVE, context) as server:
        failure = failure_of(lambda: server.measure(schedule(2)))
    assert failure.kind is FailureKind.SPECULATION_INACTIVE
    assert failure.detail == "the server drafted nothing during the measurement"


def _make_clients_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = LoadClient.run

    def overloaded(*args: Any, **kwargs: Any) -> Drive:
        drive = run(*args, **kwargs)
        return replace(drive, audit=replace(drive.audit, cpu_ratio=0.9))

    monkeypatch.setattr(LoadClient, "run", overloaded)


def test_a_client_that_could_not_keep_up_makes_no_measurement(
    engine_with: EngineWith, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_clients_overloaded(monkeypatch)
    with engine_with(*QUICK).launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.measure(schedule()))
    assert failure.kind is FailureKind.CLIENT_OVERLOADED
    assert "the client's CPU use of 0.90 cores is above its limit of 0.70 cores" in failure.detail


def test_a_late_client_may_be_allowed(
    engine_with: EngineWith, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_clients_overloaded(monkeypatch)
    with engine_with(*QUICK).launch(PLAIN, context) as server:
        measured = server.measure(replace(schedule(), allows_late_client=True))
    assert measured.audit.cpu_ratio == 0.9


def test_failed_requests_are_not_blamed_on_a_busy_client(
    engine_with: EngineWith, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_clients_overloaded(monkeypatch)
    with engine_with("--mock-fault", "all=http_503").launch(PLAIN, context) as server:
        failure = failure_of(lambda: server.measure(schedule()))
    assert failure.kind is FailureKind.REQUEST_ERRORS


def test_a_measurement_can_be_stopped(engine_with: EngineWith, context: LaunchContext) -> None:
    seen: list[RequestRecord] = []
    with (
        engine_with("--mock-first-token-s", "0.05").launch(PLAIN, context) as server,
        pytest.raises(MeasurementStopped),
    ):
        server.measure(schedule(500), seen.append, lambda: len(seen) >= 2)
    assert 2 <= len(seen) <= 3


def test_a_load_generator_that_died_does_not_keep_the_server_running(
    engine_with: EngineWith, context: LaunchContext
) -> None:
    before = {process.pid for process in children()}
    with engine_with().launch(PLAIN, context) as server:
        (worker,) = [
            process
            for process in children()
            if process.pid not in before and "autotune.measure.client_worker" in process.cmdline()
        ]
        server.warm_up(schedule())
        worker.kill()
        failures = [failure_of(lambda: server.measure(schedule())).kind for _ in range(2)]
    assert failures == [FailureKind.CLIENT_OVERLOADED] * 2


# --- short requests ---


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",  # another kind of server on the port
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ncut off by the end of the server",
    ],
)
def test_an_answer_that_is_no_whole_one_is_none(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        status, _ = request(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        thread.join()
    assert status == 0


# --- caches ---


def test_each_k_has_a_compile_cache_of_its_own(context: LaunchContext, tmp_path: Path) -> None:
    # vLLM's compile cache does not tell values of K apart and crashes where it is shared.
    engine = VllmEngine(EngineSettings(command=MOCK_COMMAND, cache_dir=tmp_path / "cache"))
    roots = {}
    for config in (PLAIN, SPECULATIVE):
        with engine.launch(config, context) as server:
            roots[config.num_speculative_tokens] = Path(
                server.report.environment["VLLM_CACHE_ROOT"]
            )
    assert roots[0] != roots[3]
    assert all(root.is_dir() for root in roots.values())
    # What is known of model classes does not depend on K.
    assert (roots[0] / "modelinfos").resolve() == (roots[3] / "modelinfos").resolve()


# --- sizes ---

SIZED_CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 500,
}


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    info = EngineInfo("vllm", "0.32.0", "cpu", "some CPU")
    monkeypatch.setattr(VllmEngine, "install", property(lambda _: SimpleNamespace(info=info)))
    return VllmEngine(EngineSettings(env={"VLLM_CPU_KVCACHE_SPACE": "2"}))


def test_sizes_come_from_files_and_from_the_environment_that_the_server_gets(
    cpu_engine: VllmEngine, write_model: Callable[..., Path]
) -> None:
    sizes = cpu_engine.sizes(str(write_model("target", SIZED_CONFIG, {"a": [10, 64]})), [])

    assert sizes is not None
    assert sizes.target.num_parameters == 640
    assert sizes.device.kv_bytes == 2 * 2**30
    assert sizes.device.bandwidth_bytes_per_s is None
    assert not sizes.device.has_graphs


def test_sizes_that_nobody_states_are_none(
    cpu_engine: VllmEngine, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    odd = {k: v for k, v in SIZED_CONFIG.items() if k != "num_hidden_layers"}

    assert cpu_engine.sizes(str(write_model("odd", odd, {"a": [10, 64]})), []) is None
    assert cpu_engine.sizes(str(write_model("no-weights", SIZED_CONFIG)), []) is None
    assert cpu_engine.sizes(str(tmp_path / "nowhere"), []) is None
