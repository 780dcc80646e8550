"""The traffic profile: what users send, what they must be given, and what to optimise for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from autotune.errors import invalid
from autotune.paths import user_path
from autotune.shipped import shipped_files
from autotune.strict import StrictModel, load_yaml, validate
from autotune.traffic.arithmetic import Pace, counts_by_weight, thin_limits
from autotune.traffic.classes import TrafficClass
from autotune.traffic.fields import MAX_REQUESTS, WEEK_S, Positive, Seconds, one_message
from autotune.traffic.loads import (
    ConcurrencyLoad,
    Load,
    RateLoad,
    StagesLoad,
    TraceLoad,
    UsersLoad,
    refuse_several_loads,
)
from autotune.traffic.quality import QualitySettings


class MeasureSettings(StrictModel):
    """How long one measurement is."""

    min_requests: int = Field(
        default=64,
        ge=1,
        le=MAX_REQUESTS,
        description="requests (or conversations) of one measurement; stages and traces say it themselves",
    )
    warmup: Annotated[
        Annotated[int, Field(ge=0, le=MAX_REQUESTS)] | Literal["auto"],
        one_message(f"must be a number of requests from 0 to {MAX_REQUESTS:,}, or auto"),
    ] = Field(
        default="auto",
        description="requests sent first and thrown away; auto: twice the concurrency, at least 2",
    )
    max_duration_s: Seconds = Field(default=180.0, description="nothing is sent later than this")
    request_timeout_s: Seconds = Field(
        default=120.0, description="a request that takes longer has failed"
    )
    late_client: Literal["fail", "warn"] = Field(
        default="fail",
        description="fail: a load generator that was late is no measurement; warn: it counts, marked",
    )


_ONE_SPELLING = {
    "goodput_tokens_per_s": "goodput_tps",
    "output_tokens_per_s": "output_throughput_tps",
    "requests_per_s": "request_throughput_rps",
    "goodput_requests_per_s": "goodput_rps",
}


class Objective(StrictModel):
    """What makes one config better than another, among those that keep every limit."""

    maximize: (
        Literal[
            "output_throughput_tps", "request_throughput_rps", "goodput_tps", "goodput_rps",
            "output_tokens_per_s", "requests_per_s", "goodput_tokens_per_s", "goodput_requests_per_s",
        ]
        | None
    ) = Field(default=None, description="a throughput; each has a short and a spelt-out name")  # fmt: skip
    minimize: (
        Literal[
            "tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms",
            "ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms",
            "e2el_mean_ms", "e2el_p50_ms", "e2el_p95_ms",
        ]
        | None
    ) = Field(default=None, description="a latency")  # fmt: skip
    practical_margin_ratio: float = Field(
        default=0.02, ge=0, lt=1, description="differences smaller than this do not matter"
    )

    @field_validator("maximize")
    @classmethod
    def _one_spelling(cls, name: str | None) -> str | None:
        return _ONE_SPELLING.get(name, name) if name is not None else None

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
    launch_timeout_s: Seconds = Field(
        default=900.0, description="a server that is not ready by then has failed"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="variables that the server starts with"
    )

    @model_validator(mode="after")
    def _one_way_to_start(self) -> ServeSettings:
        if self.python is not None and self.command is not None:
            raise ValueError("only one of `python` and `command` may be given")
        if self.command is not None and not self.command:
            raise ValueError("`command` must not be empty")
        return self


class Cost(StrictModel):
    """What the hardware costs, for figures per million tokens; Autotune knows no prices."""

    gpu_hourly_usd: Positive = Field(description="price of one GPU for an hour, US dollars")
    gpus: int = Field(default=1, ge=1, le=1024, description="GPUs that one server takes")


class Privacy(StrictModel):
    """What may be kept of prompts and answers; by default their hashes and lengths alone."""

    store_outputs: bool = Field(default=False, description="keep the answers' texts")


class TrafficProfile(StrictModel):
    """What your users send, what they must be given, and what to optimise for."""

    version: Literal[1] = Field(description="of this schema")
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="names the study, too"
    )
    model: str | None = Field(default=None, description="the target; or --model")
    drafter: Annotated[
        str | tuple[str, ...] | None, one_message("must be a name, or a list of names")
    ] = Field(default=None, description="the draft head; a list is searched over; or --drafter")
    seed: int = Field(
        default=0, ge=0, le=2**32 - 1, description="decides everything that is drawn"
    )
    endpoint: Literal["chat", "completions"] = Field(
        default="chat", description="chat puts the model's template around each prompt"
    )
    load: Load = Field(description="when requests are sent: exactly one kind")
    measure: MeasureSettings = Field(
        default=MeasureSettings(), description="how long one measurement is"
    )
    classes: tuple[TrafficClass, ...] = Field(min_length=1, description="kinds of request")
    objective: Objective = Field(
        default=Objective(),
        description="default: output throughput in closed loop, mean latency in open loop",
    )
    cost: Cost | None = Field(default=None, description="for figures per million tokens")
    quality: QualitySettings = Field(
        default=QualitySettings(), description="how the answers are checked"
    )
    privacy: Privacy = Field(default=Privacy(), description="what is kept of prompts and answers")
    serve: ServeSettings = Field(
        default=ServeSettings(), description="how vLLM is started, if not from this environment"
    )

    _path: Path | None = PrivateAttr(default=None)

    @field_validator("load", mode="before")
    @classmethod
    def _exactly_one_kind_of_load(cls, load: Any) -> Any:
        refuse_several_loads(load)
        return load

    @field_validator("classes")
    @classmethod
    def _distinct_class_names(cls, classes: tuple[TrafficClass, ...]) -> tuple[TrafficClass, ...]:
        names = [traffic_class.name for traffic_class in classes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"every name must be unique, but {twice[0]!r} stands twice")
        return classes

    @model_validator(mode="after")
    def _every_class_has_prompts(self) -> TrafficProfile:
        if not isinstance(self.load, TraceLoad):
            for number, traffic_class in enumerate(self.classes):
                if traffic_class.prompts is None:
                    raise ValueError(f"classes[{number}].prompts: the key is required")
        return self

    @model_validator(mode="after")
    def _time_enough(self) -> TrafficProfile:
        """Requests that cannot be sent in time would be missing without a word."""
        load, limit_s, count = self.load, self.measure.max_duration_s, self.measure.min_requests
        if isinstance(load, StagesLoad):
            if load.duration_s > limit_s:
                raise ValueError(
                    f"measure: the stages take {load.duration_s:g} s, but max_duration_s is "
                    f"{limit_s:g}; raise it to {math.ceil(load.duration_s)}"
                )
            return self
        if isinstance(load, RateLoad):
            pace, rps, num_at_once = f"at {load.rps:g} rps", load.rps, 1
        elif isinstance(load, UsersLoad) and load.think_time.mean_wait_s > 0:
            # Answers take time as well, but how much is not known yet. A user's first wait counts.
            wait_s = load.think_time.mean_wait_s
            pace = f"of {load.users} users who think {wait_s:.3g} s on average"
            rps, num_at_once = load.users / wait_s, 0
        else:
            return self
        needed_s = (count - num_at_once) / rps
        if needed_s <= limit_s * (1 + 1e-9):
            return self
        most = int(limit_s * rps) + num_at_once
        advice = [f"raise it to {math.ceil(needed_s)}"] if needed_s < WEEK_S else []
        advice += [f"lower min_requests to {most}"] if most else []
        raise ValueError(
            f"measure: {count} requests {pace} take {needed_s:.0f} s, but max_duration_s is "
            f"{limit_s:g}; {', or '.join(advice or ['let the users think less'])}"
        )

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from: where the profile's file is."""
        return self._path.resolve().parent if self._path is not None else Path()

    @property
    def where(self) -> str:
        """What messages call the profile."""
        return str(self._path) if self._path is not None else f"profile {self.name}"

    @property
    def is_closed_loop(self) -> bool:
        return isinstance(self.load, ConcurrencyLoad | UsersLoad)

    @property
    def num_users(self) -> int | None:
        """Users with at most one request in flight each, in closed loop; None in open loop."""
        if isinstance(self.load, ConcurrencyLoad):
            return self.load.concurrency
        return self.load.users if isinstance(self.load, UsersLoad) else None

    @property
    def offered_concurrency(self) -> int | None:
        """The most requests in flight that the profile speaks of; None when it does not say."""
        if isinstance(self.load, ConcurrencyLoad | UsersLoad):
            return self.num_users
        return self.load.max_concurrency

    @property
    def num_requests(self) -> int | None:
        """Requests of one measurement (conversations, where classes have turns).

        None where only the trace's file knows.
        """
        if isinstance(self.load, StagesLoad):
            return self.load.num_arrivals
        return None if isinstance(self.load, TraceLoad) else self.measure.min_requests

    def thin_limits(self, counts: Mapping[str, int] | None = None) -> list[str]:
        """Name the limits on percentiles that one measurement has too few requests to judge.

        Args:
            counts: requests of each class in one measurement, where a schedule knows them; when
                omitted they follow from the weights, and nothing is said of traces.
        """
        if counts is None:
            counts = self._planned_counts()
        if counts is None:
            return []
        total = sum(counts.values())
        weights = sum(c.weight for c in self.classes)
        rps = self._rate_of_requests()
        found = []
        for number, c in enumerate(self.classes):
            pace = Pace(c.weight / weights, rps, total) if rps is not None else None
            thin = thin_limits(c.slo, c.name, counts.get(c.name, 0), pace)
            found += [f"classes[{number}].slo.{line}" for line in thin]
        return found

    def _planned_counts(self) -> dict[str, int] | None:
        if self.num_requests is None:
            return None
        counts = counts_by_weight([c.weight for c in self.classes], self.num_requests)
        return {c.name: count for c, count in zip(self.classes, counts, strict=True)}

    def _rate_of_requests(self) -> float | None:
        """Requests per second, where the profile says it: of conversations only the first turns."""
        if any(c.turns is not None for c in self.classes):
            return None
        if isinstance(self.load, RateLoad):
            return self.load.rps
        if isinstance(self.load, StagesLoad):
            return self.load.num_arrivals / self.load.duration_s
        return None

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
        load = ConcurrencyLoad(kind="concurrency", concurrency=concurrency)
        if self.load == load:
            return self
        num_requests = max(self.measure.min_requests, 2 * concurrency, 16)
        update = {
            "name": f"{self.name}-c{concurrency}",
            "load": load,
            "measure": self.measure.model_copy(
                update={"min_requests": num_requests, "warmup": max(2, concurrency)}
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
    profile._path = path
    return profile
