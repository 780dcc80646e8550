"""The two clients that are compared, behind one interface: send a load, tell mean TTFT and TPOT."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from server_side import MODEL, Truth

from autotune.measure.audit import audit_verdict
from autotune.measure.client import LoadClient
from autotune.measure.metrics import tpot_ms, ttft_ms
from autotune.measure.records import Measurement, ServerCounters
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

SAMPLE_S = 0.05
VLLM_CHILD = Path(__file__).with_name("vllm_child.py")
PROMPT = "Describe the way from the station to the harbour, street by street, for a visitor. "


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of so many requests, rescaled to the exact rate, as both clients do."""

    num_requests: int
    rps: float
    seed: int


@dataclass(frozen=True)
class Told:
    """What a client says that it measured: means over the requests."""

    ttft_ms: float
    tpot_ms: float
    audit: str


class Client(ABC):
    """A client in a process of its own, on one core; use it as a context manager."""

    name: str
    process: psutil.Process

    def __enter__(self) -> Self:
        self._samples: list[tuple[float, float]] = []
        threading.Thread(target=self._sample_cpu, daemon=True).start()
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""

    @abstractmethod
    def drive(self, load: Load, base_url: str) -> Told:
        """Send the load and wait for its end."""

    def cpu_ratio(self, truth: Truth) -> float:
        """CPU seconds of the process per second while the server was at work, 1.0 = one core."""
        times_s = [time_s for time_s, _ in self._samples]
        first = bisect_left(times_s, truth.began_s)
        last = min(bisect_left(times_s, truth.ended_s), len(times_s) - 1)
        (start_s, before_s), (end_s, after_s) = self._samples[first], self._samples[last]
        return (after_s - before_s) / (end_s - start_s)

    def _sample_cpu(self) -> None:
        try:
            while True:
                used = self.process.cpu_times()
                self._samples.append((time.perf_counter(), used.user + used.system))
                time.sleep(SAMPLE_S)
        except psutil.Error:
            pass  # the process has ended


class AutotuneClient(Client):
    """Autotune's own load generator."""

    name = "autotune"

    def __init__(self, core: int) -> None:
        before = {process.pid for process in psutil.Process().children()}
        self._client = LoadClient()
        (self.process,) = [p for p in psutil.Process().children() if p.pid not in before]
        self.process.cpu_affinity([core])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def drive(self, load: Load, base_url: str) -> Told:
        schedule = _schedule(load)
        drive = self._client.run(schedule, schedule.requests, base_url, MODEL)
        measurement = Measurement(
            schedule_digest=schedule.digest,
            concurrency=None,
            started_at_s=0.0,
            duration_s=drive.duration_s,
            records=drive.records,
            counters=ServerCounters(),
            audit=drive.audit,
        )
        return Told(
            # From the schedule: what a late send costs is in it.
            ttft_ms=statistics.mean(v for r in drive.records if (v := ttft_ms(r)) is not None),
            tpot_ms=statistics.mean(v for r in drive.records if (v := tpot_ms(r)) is not None),
            audit=str(audit_verdict(measurement).level),
        )


class VllmClient(Client):
    """`vllm bench serve`, through the functions that the command itself calls."""

    name = "vllm bench serve"

    def __init__(self, core: int, tokenizer: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._tokenizer = tokenizer
        self._log = Path(self._folder.name) / "log.txt"
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, str(VLLM_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        self.process = psutil.Process(self._popen.pid)
        self._wait_for("ready")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._popen.kill()
        self._popen.communicate()
        self._folder.cleanup()

    def drive(self, load: Load, base_url: str) -> Told:
        folder = Path(self._folder.name)
        prompts, result = folder / "prompts.json", folder / "result.json"
        prompts.write_text(json.dumps(_sharegpt(load)), encoding="utf-8")
        options = {
            "--backend": "openai-chat",
            "--base-url": base_url,
            "--endpoint": "/v1/chat/completions",
            "--model": MODEL,
            "--tokenizer": self._tokenizer,
            "--dataset-name": "sharegpt",
            "--dataset-path": prompts,
            "--sharegpt-output-len": 1,  # the mock answers as long as it was told to
            "--num-prompts": load.num_requests,
            "--request-rate": load.rps,
            "--seed": load.seed,
            "--temperature": 0,
            "--ready-check-timeout-sec": 0,
            "--result-dir": folder,
            "--result-filename": result.name,
        }
        argv = [str(part) for pair in options.items() for part in pair]
        assert self._popen.stdin is not None  # opened as a pipe above
        self._popen.stdin.write(json.dumps([*argv, "--disable-tqdm", "--save-result"]) + "\n")
        self._popen.stdin.flush()
        self._wait_for("done")
        told = json.loads(result.read_text(encoding="utf-8"))
        return Told(told["mean_ttft_ms"], told["mean_tpot_ms"], "none")

    def _wait_for(self, word: str) -> None:
        assert self._popen.stdout is not None  # opened as a pipe above
        if self._popen.stdout.readline().strip() != word:
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"vllm bench serve ended:\n{said[-2000:]}")


def _prompt(number: int) -> str:
    return f"{number}: {PROMPT * 4}"


def _schedule(load: Load) -> Schedule:
    rng = random.Random(load.seed)
    gaps = [rng.expovariate(1.0) for _ in range(load.num_requests)]
    scale = load.num_requests / load.rps / sum(gaps)
    requests, arrival_s = [], 0.0
    for number, gap in enumerate(gaps):
        request = ScheduledRequest(
            request_id=number,
            class_name="all",
            prompt=Prompt(str(number), (("user", _prompt(number)),)),
            max_tokens=1,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=False,
            sampling_seed=number,
            arrival_s=arrival_s,
        )
        requests.append(request)
        arrival_s += gap * scale
    return Schedule("chat", None, tuple(requests), (), 2 * arrival_s, 60.0)


def _sharegpt(load: Load) -> list[dict[str, object]]:
    return [
        {
            "conversations": [
                {"from": "human", "value": _prompt(number)},
                {"from": "gpt", "value": ""},
            ]
        }
        for number in range(load.num_requests)
    ]


def warm_up(client: Client, base_url: str, load: Load) -> None:
    """Run once, unmeasured: the first run of a process is the slowest of all."""
    client.drive(dataclasses.replace(load, seed=load.seed + 1000), base_url)
