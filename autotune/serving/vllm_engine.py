"""Real vLLM: launch it, make sure it runs what was asked, measure it, leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, InputError
from autotune.measure.audit import AuditLevel, audit_verdict
from autotune.measure.client import (
    ClientFailed,
    Drive,
    LoadClient,
    MeasurementStopped,
    OnRecord,
    ShouldStop,
)
from autotune.measure.counters import parse_counters
from autotune.measure.quality.endpoint import Endpoint, EndpointKind
from autotune.measure.records import Measurement, ServerCounters
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import RealClock
from autotune.serving.config import ServingConfig
from autotune.serving.device_sizes import cpu_sizes, gpu_sizes
from autotune.serving.engine import Engine, EngineSettings, LaunchContext, LaunchReport, Server
from autotune.serving.failures import (
    MAX_ERROR_RATIO,
    FailureKind,
    TrialFailed,
    TrialFailure,
    classify_log,
)
from autotune.serving.gpu import list_gpus, wait_for_memory
from autotune.serving.http import request
from autotune.serving.model_sizes import drafter_sizes, target_sizes
from autotune.serving.models import DrafterInfo
from autotune.serving.process import ServerProcess, free_port
from autotune.serving.sizes import DeviceSizes, ServingSizes
from autotune.serving.vllm_install import VllmInstall, find_vllm
from autotune.serving.vllm_options import VllmOptions, to_argv, vllm_options
from autotune.traffic.schedule import Schedule, ScheduledRequest

HEALTH_POLL_S = 0.25
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class VllmEngine(Engine):
    """Launches vLLM as a child process on a free loopback port."""

    can_be_asked = True

    def __init__(self, settings: EngineSettings) -> None:
        self.clock = RealClock()
        self._settings = settings
        self._install: VllmInstall | None = None

    @property
    def install(self) -> VllmInstall:
        if self._install is None:
            self._install = find_vllm(self._settings.python, self._settings.command)
        return self._install

    def describe(self) -> EngineInfo:
        return self.install.info

    def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes | None:
        """Read files and the device; None where any of them does not say."""
        folder = Path(model)
        try:
            target = target_sizes(folder) if folder.is_dir() else None
            heads = {head.serve_as: drafter_sizes(head) for head in drafters}
        except InputError:
            return None  # an odd layout may still be served: that is for vLLM to say
        known = {name: head for name, head in heads.items() if head is not None}
        device = self._device_sizes()
        if target is None or device is None or len(known) < len(heads):
            return None
        return ServingSizes(target, known, device)

    def _device_sizes(self) -> DeviceSizes | None:
        info = self.install.info
        if info.device == "cpu":
            return cpu_sizes(info.hardware, {**os.environ, **self._settings.env})
        gpus = list_gpus()
        # vLLM takes the first one unless a fixed option says more.
        return gpu_sizes(gpus[0]) if gpus else None

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        port, served_name = free_port(), f"autotune-{secrets.token_hex(8)}"
        options = vllm_options(config, context.needs, self.install.info.device)
        argv = self._command(options, port, served_name)
        environment = self._environment(config)
        log_path = context.work_dir / f"{context.name}.log"
        gpus = list_gpus() if self.install.info.device == "cuda" else []
        began = self.clock.now_s()
        client = LoadClient()
        try:
            process = ServerProcess(argv, log_path, environment)
        except AutotuneError as err:
            client.close()
            failure = TrialFailure(FailureKind.LAUNCH_ERROR, str(err), str(log_path))
            raise TrialFailed(failure) from err
        server = VllmServer(
            process, client, f"http://127.0.0.1:{port}", served_name, config, gpus, self
        )
        try:
            server.wait_healthy(context)
            resolved = server.verify()
        except BaseException:
            server.close()
            raise
        server.report = LaunchReport(
            launch_s=self.clock.now_s() - began,
            argv=tuple(argv),
            options=options,
            environment=masked(environment),
            log_path=str(log_path),
            resolved=resolved,
        )
        return server

    def _command(self, options: VllmOptions, port: int, served_name: str) -> list[str]:
        # The unguessable name proves later that it is this server which answers on the port.
        local = {"host": "127.0.0.1", "port": port, "served-model-name": served_name}
        arguments = to_argv(
            {**options, **local}, has_positional_model=self.install.has_positional_model
        )
        return [*self.install.start, *arguments]

    def _environment(self, config: ServingConfig) -> dict[str, str]:
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # Opens /server_info and /reset_prefix_cache; the server listens on loopback only.
            "VLLM_SERVER_DEV_MODE": "1",
            **self._settings.env,
        }
        if Path(config.model).is_dir():
            environment.setdefault("HF_HUB_OFFLINE", "1")
        if self._settings.cache_dir is not None:
            root = _compile_cache(self._settings.cache_dir, config.num_speculative_tokens)
            environment.setdefault("VLLM_CACHE_ROOT", str(root))
        return environment


def _compile_cache(cache_dir: Path, num_speculative_tokens: int) -> Path:
    """Return vLLM's cache folder for one K.

    vLLM's compile cache does not tell values of K apart, so a sweep that shares it crashes
    (vLLM issue #53366). What it knows of model classes does not depend on K and is shared: looking
    it up anew costs several seconds of every first launch.
    """
    root = cache_dir / "vllm" / f"k{num_speculative_tokens}"
    shared = cache_dir / "vllm" / "modelinfos"
    shared.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    link = root / "modelinfos"
    if not link.exists():
        try:
            link.symlink_to(shared, target_is_directory=True)
        except OSError:
            pass  # no symlinks here: vLLM makes a folder of its own
    return root


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """Hide the values of variables that hold secrets."""
    return {
        name: "***" if _SECRET_NAME.search(name) else value for name, value in environment.items()
    }


class VllmServer(Server):
    """One launched vLLM."""

    def __init__(
        self,
        process: ServerProcess,
        client: LoadClient,
        base_url: str,
        served_name: str,
        config: ServingConfig,
        gpus_before: list[Any],
        engine: VllmEngine,
    ) -> None:
        self.report = LaunchReport(launch_s=0.0)
        self.base_url = base_url
        self.served_name = served_name
        self._process = process
        self._client = client
        self._config = config
        self._gpus_before = gpus_before
        self._engine = engine

    @property
    def pid(self) -> int:
        """The server's process id, which is also its process group."""
        return self._process.pid

    def wait_healthy(self, context: LaunchContext) -> None:
        """Wait until the server answers.

        Raises:
            TrialFailed: it ended, or took longer than `context.timeout_s`.
            MeasurementStopped: `context.should_stop` said so.
        """
        deadline = time.monotonic() + context.timeout_s
        while request(f"{self.base_url}/health", timeout_s=5.0)[0] != 200:
            if not self._process.is_alive:
                raise self._failed(is_under_load=False)
            if context.should_stop is not None and context.should_stop():
                raise MeasurementStopped("the launch was stopped")
            if time.monotonic() > deadline:
                detail = f"not healthy after {context.timeout_s:.0f} s"
                raise self._failure(FailureKind.LAUNCH_TIMEOUT, detail)
            time.sleep(HEALTH_POLL_S)

    def verify(self) -> dict[str, Any]:
        """Make sure that the right server answers and that it runs what was asked.

        Returns:
            The server's own configuration, or what little of it could be learned.
        """
        _, models = request(f"{self.base_url}/v1/models")
        if self.served_name not in models:
            raise self._failure(
                FailureKind.LAUNCH_ERROR, "another process answers on the server's port"
            )
        if self._config.is_speculative and not self.counters().has_speculation:
            raise self._failure(
                FailureKind.SPECULATION_INACTIVE,
                f"K = {self._config.num_speculative_tokens} was asked for, but the server exports "
                "no speculation counters",
            )
        status, text = request(f"{self.base_url}/server_info?config_format=json", timeout_s=30.0)
        if status != 200:
            return {}
        resolved = _resolved(json.loads(text))
        self._compare(resolved)
        return resolved

    def _compare(self, resolved: Mapping[str, Any]) -> None:
        config = self._config
        asked: dict[str, Any] = {
            "num_speculative_tokens": config.num_speculative_tokens or None,
            "parallel_drafting": config.parallel_drafting if config.is_speculative else None,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        }
        for name, value in asked.items():
            got = resolved.get(name)
            is_free = value is None and name.startswith("max_")
            if not is_free and got != value:
                kind = (
                    FailureKind.SPECULATION_INACTIVE
                    if name in {"num_speculative_tokens", "parallel_drafting"}
                    else FailureKind.LAUNCH_ERROR
                )
                raise self._failure(kind, f"{name} = {value} was asked for, the server runs {got}")
        dtype = resolved.get("cache_dtype")
        if config.kv_cache_dtype != "auto" and not str(dtype).startswith(config.kv_cache_dtype):
            detail = (
                f"kv_cache_dtype = {config.kv_cache_dtype} was asked for, the server runs {dtype}"
            )
            raise self._failure(FailureKind.LAUNCH_ERROR, detail)

    def warm_up(self, schedule: Schedule, should_stop: ShouldStop | None = None) -> None:
        drive = self._drive(schedule, schedule.warmup, None, should_stop)
        if drive.records and not any(record.is_ok for record in drive.records):
            raise self._refused(drive)

    def measure(
        self,
        schedule: Schedule,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Measurement:
        request(f"{self.base_url}/reset_prefix_cache", method="POST")
        before, started = self.counters(), self._engine.clock.now_s()
        drive = self._drive(schedule, schedule.requests, on_record, should_stop)
        measurement = Measurement(
            schedule_digest=schedule.digest,
            concurrency=schedule.concurrency,
            started_at_s=started,
            duration_s=drive.duration_s,
            records=drive.records,
            counters=self.counters().minus(before),
            audit=drive.audit,
        )
        if measurement.num_errors > MAX_ERROR_RATIO * len(measurement.records):
            raise self._refused(drive)
        # After the errors: a server that refuses at once keeps the client busy as well.
        audit = audit_verdict(measurement)
        if audit.level is AuditLevel.INVALID and not schedule.allows_late_client:
            raise self._failure(FailureKind.CLIENT_OVERLOADED, "; ".join(audit.reasons))
        # With speculation switched by batch it may be right that nothing was drafted.
        is_always_on = self._config.is_speculative and self._config.speculation_off_above is None
        if is_always_on and measurement.counters.num_drafts == 0:
            detail = "the server drafted nothing during the measurement"
            raise self._failure(FailureKind.SPECULATION_INACTIVE, detail)
        return measurement

    def counters(self) -> ServerCounters:
        status, text = request(f"{self.base_url}/metrics", timeout_s=30.0)
        if status != 200:
            raise self._failed(is_under_load=True)
        return parse_counters(text)

    def endpoint(self, kind: EndpointKind) -> Endpoint:
        return Endpoint(self.base_url, self.served_name, kind)

    def close(self) -> None:
        self._client.close()
        num_left = self._process.stop()
        held = wait_for_memory(self._gpus_before) if self._gpus_before else []
        if num_left or held:
            raise AutotuneError(
                f"the server did not leave the machine as it was: {num_left} processes left, "
                f"GPU memory still held: {'; '.join(held) or 'none'}. See {self._process.log_path}."
            )

    def _drive(
        self,
        schedule: Schedule,
        requests: tuple[ScheduledRequest, ...],
        on_record: OnRecord | None,
        should_stop: ShouldStop | None,
    ) -> Drive:
        def stop() -> bool:
            return not self._process.is_alive or (should_stop is not None and should_stop())

        try:
            drive = self._client.run(
                schedule, requests, self.base_url, self.served_name, on_record, stop
            )
        except MeasurementStopped:
            if not self._process.is_alive:
                raise self._failed(is_under_load=True) from None
            raise
        except ClientFailed as err:
            raise self._failure(FailureKind.CLIENT_OVERLOADED, str(err)) from err
        if not self._process.is_alive or request(f"{self.base_url}/health")[0] != 200:
            raise self._failed(is_under_load=True)
        return drive

    def _refused(self, drive: Drive) -> TrialFailed:
        errors = [record.error for record in drive.records if record.error]
        detail = (
            f"{len(errors)} of {len(drive.records)} requests failed: {errors[0] if errors else ''}"
        )
        return self._failure(FailureKind.REQUEST_ERRORS, detail)

    def _failed(self, *, is_under_load: bool) -> TrialFailed:
        # The engine's workers write their last words a moment after the API server notices.
        time.sleep(0.5)
        kind, cause = classify_log(self._process.log_tail(), is_under_load=is_under_load)
        return self._failure(kind, cause)

    def _failure(self, kind: FailureKind, detail: str) -> TrialFailed:
        return TrialFailed(TrialFailure(kind, detail, str(self._process.log_path)))


def _resolved(info: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what matters out of `/server_info`, which is tens of kilobytes."""
    config = info.get("vllm_config") or {}
    model, cache, scheduler = (
        config.get(f"{n}_config") or {} for n in ("model", "cache", "scheduler")
    )
    speculative = config.get("speculative_config") or {}
    return {
        "num_speculative_tokens": speculative.get("num_speculative_tokens"),
        "parallel_drafting": speculative.get("parallel_drafting"),
        "method": speculative.get("method"),
        "max_num_seqs": scheduler.get("max_num_seqs"),
        "max_num_batched_tokens": scheduler.get("max_num_batched_tokens"),
        "max_model_len": model.get("max_model_len"),
        "dtype": model.get("dtype"),
        "quantization": model.get("quantization"),
        "cache_dtype": cache.get("cache_dtype"),
        "kv_cache_size_tokens": cache.get("kv_cache_size_tokens"),
        "num_gpu_blocks": cache.get("num_gpu_blocks"),
        "enable_prefix_caching": cache.get("enable_prefix_caching"),
        "enforce_eager": model.get("enforce_eager"),
    }
