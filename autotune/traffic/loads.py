"""When requests are sent: the kinds of load that a profile may ask for."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from autotune.strict import StrictModel
from autotune.traffic.fields import (
    MAX_REQUESTS,
    Columns,
    Concurrency,
    FormatName,
    Seconds,
    SecondsOrZero,
)

Arrival = Literal["poisson", "constant", "gamma"]


class ConcurrencyLoad(StrictModel):
    """Closed loop: a fixed number of users, each sending its next request when one is answered."""

    kind: Literal["concurrency"] = Field(description="closed loop at full load")
    concurrency: Concurrency = Field(description="users, each with one request in flight")


class _Arrivals(StrictModel):
    """A stretch of time with one mean rate of arrivals."""

    rps: float = Field(
        gt=0,
        le=100_000,
        description="mean arrival rate, requests (or conversations) per second",
    )
    arrival: Arrival = Field(
        default="poisson",
        description="how the gaps vary: exponentially, not at all, or as a gamma",
    )
    burstiness: float | None = Field(
        default=None,
        ge=0.001,
        le=1e9,
        description="shape of the gamma distribution of the gaps, 1 / CV^2: 1 is poisson, below 1 burstier",
    )

    @model_validator(mode="after")
    def _burstiness_is_of_gamma(self) -> _Arrivals:
        if self.arrival == "gamma" and self.burstiness is None:
            raise ValueError("`burstiness` is required with `arrival: gamma`, such as 0.6")
        if self.arrival != "gamma" and self.burstiness is not None:
            raise ValueError("`burstiness` goes with `arrival: gamma` only")
        return self


class _OpenLoop(StrictModel):
    """What all loads share whose requests come at their own times."""

    max_concurrency: Concurrency | None = Field(
        default=None,
        description="most requests in flight at once, for sizing; no cap on sends",
    )


class RateLoad(_Arrivals, _OpenLoop):
    """Open loop: requests arrive at their own times, however slowly the server answers."""

    kind: Literal["rate"] = Field(description="open loop at one mean rate")


class Stage(_Arrivals):
    """One stretch of a load that changes over time."""

    duration_s: Seconds = Field(description="how long it lasts")


class StagesLoad(_OpenLoop):
    """Open loop with a rate that changes: one stretch of time after another."""

    kind: Literal["stages"] = Field(description="open loop at a rate that changes")
    stages: tuple[Stage, ...] = Field(
        min_length=1, max_length=1000, description="stretches of time, one after another"
    )

    @model_validator(mode="after")
    def _some_arrivals(self) -> StagesLoad:
        if not 1 <= self.num_arrivals <= MAX_REQUESTS:
            raise ValueError(
                f"`stages` must have 1 to {MAX_REQUESTS:,} arrivals in all (rps x duration_s), "
                f"but they have {self.num_arrivals:,}"
            )
        return self

    @property
    def duration_s(self) -> float:
        return sum(stage.duration_s for stage in self.stages)

    @property
    def arrivals_of_stages(self) -> tuple[int, ...]:
        """Arrivals of each stage: rps x duration_s; what rounding takes, a later stage gets."""
        totals = accumulate(stage.rps * stage.duration_s for stage in self.stages)
        rounded = [0, *(math.floor(total + 0.5) for total in totals)]
        return tuple(after - before for before, after in pairwise(rounded))

    @property
    def num_arrivals(self) -> int:
        return sum(self.arrivals_of_stages)


class ConstantThinkTime(StrictModel):
    """Every wait is the same."""

    dist: Literal["constant"] = Field(description="every wait is the same")
    s: SecondsOrZero = Field(description="the wait, in seconds")

    @property
    def mean_wait_s(self) -> float:
        return self.s


class ExponentialThinkTime(StrictModel):
    """Waits without memory."""

    dist: Literal["exponential"] = Field(description="waits without memory")
    mean_s: Seconds = Field(description="mean wait, in seconds")

    @property
    def mean_wait_s(self) -> float:
        return self.mean_s


class LognormalThinkTime(StrictModel):
    """Waits around a median with a long tail."""

    dist: Literal["lognormal"] = Field(description="waits around a median with a long tail")
    median_s: Seconds = Field(description="median wait, in seconds")
    sigma: float = Field(gt=0, le=5, description="standard deviation of the wait's logarithm")

    @property
    def mean_wait_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2)


ThinkTime = Annotated[
    ConstantThinkTime | ExponentialThinkTime | LognormalThinkTime, Field(discriminator="dist")
]
"""How long a user waits between an answer and the next request."""


class UsersLoad(StrictModel):
    """Closed loop of people: each thinks between an answer and the next request."""

    kind: Literal["users"] = Field(description="closed loop of people who think between requests")
    users: Concurrency = Field(description="people, each with at most one request in flight")
    think_time: ThinkTime = Field(description="wait between an answer and the next request")


class TraceWindow(StrictModel):
    """The part of a trace that is replayed, in seconds of the trace's own clock from its start."""

    start_s: float = Field(
        default=0.0, ge=0, description="seconds after the trace's first request"
    )
    duration_s: Seconds = Field(description="how much of the trace is replayed")


class TraceLoad(_OpenLoop):
    """Open loop: requests at the times, and of the lengths, of a recorded trace."""

    kind: Literal["trace"] = Field(description="open loop at recorded times")
    file: Path = Field(description="the trace; a relative path starts at the profile's folder")
    format: FormatName = Field(
        default="auto", description="a format of `autotune profile import`; auto: by its keys"
    )
    columns: Columns = Field(
        default_factory=dict,
        description="what the file calls its columns, where that is free: {timestamp: ts}",
    )
    window: TraceWindow | None = Field(default=None, description="default: the whole trace")
    time_scale: float = Field(
        default=1.0,
        ge=0.001,
        le=1000,
        description="2 sends twice as slowly as recorded, 0.5 twice as fast",
    )
    jitter_s: SecondsOrZero = Field(
        default=0.0, description="spreads times that were recorded with a coarse clock"
    )


Load = Annotated[
    ConcurrencyLoad | RateLoad | UsersLoad | StagesLoad | TraceLoad, Field(discriminator="kind")
]

_OWN_KEYS = ("concurrency", "rps", "users", "stages")
"""Keys that one kind of load has and no other."""


def refuse_several_loads(load: Any) -> None:
    """Say plainly what is wrong with a load that speaks of several kinds at once.

    Raises:
        ValueError: it does.
    """
    rule = "exactly one kind of load must be given"
    if isinstance(load, list):
        raise ValueError(f"{rule}, not a list of them")
    found = [key for key in _OWN_KEYS if key in load] if isinstance(load, dict) else []
    if len(found) > 1:
        shown = [f"{k}={load[k]}" if isinstance(load[k], int | float) else k for k in found]
        raise ValueError(f"{rule}, but got {' and '.join(shown)}; keep one of them")
