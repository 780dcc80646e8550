"""The traffic profile: what users send, what they must be given, and what to optimise for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from autotune.errors import invalid
from autotune.paths import user_path
from autotune.shipped import shipped_files
from autotune.strict import StrictModel, load_yaml, validate

_SLO_KEY = re.compile(r"(ttft|tpot|e2el)_(mean|p50|p90|p95|p99)_ms")

Positive = Annotated[float, Field(gt=0)]


class ConcurrencyLoad(StrictModel):
    """Closed loop: a fixed number of users, each sending its next request when one is answered."""

    kind: Literal["concurrency"]
    concurrency: int = Field(ge=1, le=4096)


class RateLoad(StrictModel):
    """Open loop: requests arrive at their own times, however slowly the server answers."""

    kind: Literal["rate"]
    rps: Positive = Field(description="mean arrival rate, requests per second")
    arrival: Literal["poisson", "constant"] = "poisson"
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="most requests in flight at once, for sizing; no cap on sends",
    )


Load = Annotated[ConcurrencyLoad | RateLoad, Field(discriminator="kind")]


class MeasureSettings(StrictModel):
    """How long one measurement is."""

    min_requests: int = Field(default=64, ge=1, le=1_000_000)
    warmup_requests: int | None = Field(
        default=None, ge=0, description="None: twice the concurrency, at least 2"
    )
    max_duration_s: Positive = 180.0
    request_timeout_s: Positive = 120.0


class PromptSource(StrictModel):
    """Where a class's prompts come from: exactly one of a file and a built-in set."""

    file: Path | None = None
    builtin: str | None = Field(
        default=None, description="a set that ships with Autotune: demo/maths"
    )
    format: Literal["auto", "jsonl", "text"] = "auto"

    @model_validator(mode="after")
    def _exactly_one_source(self) -> PromptSource:
        if (self.file is None) == (self.builtin is None):
            raise ValueError("exactly one of `file` and `builtin` must be given")
        return self


class OutputLength(StrictModel):
    """How many tokens a request may generate."""

    max_tokens: int = Field(default=256, ge=1, le=1_000_000)
    ignore_eos: bool = Field(
        default=False, description="going past the model's own stop distorts acceptance: leave off"
    )


class Sampling(StrictModel):
    """Sampling as the users' requests ask for it; it changes acceptance, so it must be theirs."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)


class TrafficClass(StrictModel):
    """One kind of request, with its share of the traffic and its own limits."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    weight: Positive = 1.0
    prompts: PromptSource
    output: OutputLength = OutputLength()
    sampling: Sampling = Sampling()
    slo: dict[str, Positive] = Field(
        default_factory=dict, description="limits such as ttft_p95_ms: 500"
    )

    @field_validator("slo")
    @classmethod
    def _known_limits(cls, slo: dict[str, float]) -> dict[str, float]:
        for key in slo:
            if not _SLO_KEY.fullmatch(key):
                raise ValueError(
                    f"a limit must be named (ttft|tpot|e2el)_(mean|p50|p90|p95|p99)_ms, not {key!r}"
                )
        return slo


class Objective(StrictModel):
    """What makes one config better than another, among those that keep every limit."""

    maximize: (
        Literal["output_throughput_tps", "request_throughput_rps", "goodput_tps", "goodput_rps"]
        | None
    ) = None
    minimize: (
        Literal[
            "tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms",
            "ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms",
            "e2el_mean_ms", "e2el_p50_ms", "e2el_p95_ms",
        ]
        | None
    ) = None  # fmt: skip
    practical_margin_ratio: float = Field(
        default=0.02, ge=0, lt=1, description="differences smaller than this do not matter"
    )

    @model_validator(mode="after")
    def _one_direction(self) -> Objective:
        if self.maximize is not None and self.minimize is not None:
            raise ValueError("only one of `maximize` and `minimize` may be given")
        return self


class ServeSettings(StrictModel):
    """How vLLM is started, where it is not simply the one in this environment."""

    python: Path | None = Field(
        default=None, description="interpreter of the environment with vLLM"
    )
    command: list[str] | None = Field(
        default=None, description="starts the server instead; the flags are appended"
    )
    launch_timeout_s: Positive = 900.0
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way_to_start(self) -> ServeSettings:
        if self.python is not None and self.command is not None:
            raise ValueError("only one of `python` and `command` may be given")
        if self.command is not None and not self.command:
            raise ValueError("`command` must not be empty")
        return self


class TrafficProfile(StrictModel):
    """A whole `traffic.yaml`."""

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    model: str | None = None
    drafter: str | tuple[str, ...] | None = None
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    endpoint: Literal["chat", "completions"] = "chat"
    load: Load
    measure: MeasureSettings = MeasureSettings()
    classes: tuple[TrafficClass, ...] = Field(min_length=1)
    objective: Objective = Objective()
    serve: ServeSettings = ServeSettings()

    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="before")
    @classmethod
    def _exactly_one_kind_of_load(cls, data: Any) -> Any:
        load = data.get("load") if isinstance(data, dict) else None
        if isinstance(load, list):
            raise ValueError("load: exactly one kind of load must be given, not a list of them")
        if isinstance(load, dict) and "concurrency" in load and "rps" in load:
            raise ValueError(
                "load: exactly one kind of load must be given, but got both "
                f"concurrency={load['concurrency']} and rps={load['rps']}; keep one of them"
            )
        return data

    @model_validator(mode="after")
    def _distinct_class_names(self) -> TrafficProfile:
        names = [traffic_class.name for traffic_class in self.classes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"classes: every name must be unique, but {twice[0]!r} stands twice")
        return self

    @property
    def folder(self) -> Path:
        """The folder that relative prompt paths start from: where the profile's file is."""
        return self._folder

    @property
    def is_closed_loop(self) -> bool:
        return isinstance(self.load, ConcurrencyLoad)

    @property
    def offered_concurrency(self) -> int | None:
        """The most requests in flight that the profile speaks of; None when it does not say."""
        if isinstance(self.load, ConcurrencyLoad):
            return self.load.concurrency
        return self.load.max_concurrency

    @property
    def objective_name(self) -> str:
        """The metric that ranks configs.

        Throughput where the load follows the server (closed loop). At a fixed arrival rate every
        config that keeps up has the same throughput, so there the mean latency ranks.
        """
        if self.objective.maximize or self.objective.minimize:
            return str(self.objective.maximize or self.objective.minimize)
        return "output_throughput_tps" if self.is_closed_loop else "e2el_mean_ms"

    @property
    def is_maximized(self) -> bool:
        if self.objective.minimize is not None:
            return False
        return self.objective.maximize is not None or self.is_closed_loop

    @property
    def drafters(self) -> tuple[str, ...]:
        if self.drafter is None:
            return ()
        return (self.drafter,) if isinstance(self.drafter, str) else self.drafter

    def with_concurrency(self, concurrency: int) -> TrafficProfile:
        """Return the profile at another concurrency, named after it, with requests enough for it.

        A measurement needs a few requests per slot, or filling and draining the slots is most of it.
        """
        if self.offered_concurrency == concurrency:
            return self
        load = ConcurrencyLoad(kind="concurrency", concurrency=concurrency)
        num_requests = max(self.measure.min_requests, 2 * concurrency, 16)
        update = {
            "name": f"{self.name}-c{concurrency}",
            "load": load,
            "measure": self.measure.model_copy(
                update={"min_requests": num_requests, "warmup_requests": max(2, concurrency)}
            ),
        }
        return self.model_copy(update=update)


def load_profile(path: Path) -> TrafficProfile:
    """Read and check a `traffic.yaml`, or one of the shipped profiles by its name.

    Raises:
        InputError: the file is missing, is not YAML, or breaks a rule; the message says which.
    """
    path = user_path(path, "--profile")
    if not path.exists() and str(path) in shipped_files("profiles"):
        path = shipped_files("profiles")[str(path)]
    data = load_yaml(path, "traffic profile")
    if "version" not in data:
        raise invalid("the key is required", where=path, key_path="version",
                      next_step="Write `version: 1`.")  # fmt: skip
    profile = validate(TrafficProfile, data, path)
    profile._folder = path.resolve().parent
    return profile
