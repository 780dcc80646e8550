"""When a running screen cannot come out well any more, and its time is better spent elsewhere.

Four rules, each with its rate of wrong alarms. A wrong alarm is a run cut off that would have kept every
limit, or that serves at least `WORTHWHILE_RATIO` as well as the best config so far.

* *certain limit*: so many requests are above a limit (or their sum is so large) that the rest cannot save it,
  however fast. Never wrong about the measurement at hand.
* *certain errors*: more requests failed than a measurement may have. Never wrong either.
* *probable limit*: if the run were to keep its limit, that many of the first requests above it would be seen
  with a chance of less than `ALPHA`, over all looks together. Closed loop alone: arrivals come in bursts.
* *hopeless objective*: paired by request with the best config so far, the run is slower beyond doubt.

Limits on gaps between chunks have no rule. A measurement with fewer than two turns of all slots has no look.
Whether an open loop is saturated cannot be judged early: a queue that builds up and one that is just forming
look the same at first (`autotune.measure.saturation` needs the whole measurement).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
from scipy.stats import hypergeom

from autotune.measure.distributions import t_quantile
from autotune.measure.metrics import FloatArray, Latency, e2el_ms, latency_of, tpot_ms, ttft_ms
from autotune.measure.records import Measurement, RequestRecord
from autotune.search.decision import Goal
from autotune.serving.failures import MAX_ERROR_RATIO
from autotune.traffic.schedule import Schedule

ALPHA = 0.01
"""Rate of wrong alarms of each probable rule over a whole run."""
WORTHWHILE_RATIO = 0.95
"""A config this near to the best so far is worth a whole measurement: it may yet come out ahead."""
LAUNCH_SPREAD = 0.02
"""Standard deviation of the ratio of two launches of one config: 1.4 % each. Judgement, as in `race`."""
MIN_LOOK_REQUESTS = 5
MIN_PAIRS = 10

_OF_RECORD: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft_ms,
    "tpot": tpot_ms,
    "e2el": e2el_ms,
}


class HopelessRule:
    """Watches one measurement. Give it every record as its request ends, then ask for the reason."""

    def __init__(
        self,
        goal: Goal,
        schedule: Schedule,
        incumbent: Measurement | None,
        *,
        alpha: float = ALPHA,
    ) -> None:
        """Prepare for one measurement.

        Args:
            goal: objective and limits.
            schedule: what is being sent.
            incumbent: the best config's measurement with the same schedule; None without one.
            alpha: rate of wrong alarms of each probable rule; 0 leaves the certain rules alone.
        """
        self.reason: str | None = None
        self._num_planned = len(schedule.requests)
        self._num_failed = 0
        self._seen = 0
        self._is_closed_loop = schedule.concurrency is not None
        # Looks are spread evenly; the requests that fill the slots say nothing of the steady load.
        self._ramp = schedule.concurrency or 0
        self._step = max(MIN_LOOK_REQUESTS, schedule.concurrency or 1)
        self._num_looks = max(1, (self._num_planned - self._ramp) // self._step)
        planned = Counter(schedule.num_requests_of_class)
        self._limits = [
            _Limit(class_name, name, latency, limit, planned[class_name])
            for class_name, limits in goal.limits.items()
            for name, limit in limits.items()
            if (latency := latency_of(name)) is not None and latency.metric in _OF_RECORD
        ]
        self._limit_alpha = alpha / self._num_looks / max(1, len(self._limits))
        self._pairs = _pairs(goal, incumbent, is_closed_loop=schedule.concurrency is not None)
        self._pair_alpha = alpha / self._num_looks

    def observe(self, record: RequestRecord) -> None:
        """Take a request that has ended into account; from the first reason on nothing is looked at."""
        if self.reason is not None:
            return
        self._seen += 1
        self._num_failed += not record.is_ok
        is_steady = self._seen > self._ramp
        for limit in self._limits:
            if limit.class_name == record.class_name:
                limit.observe(record, is_steady=is_steady)
        if self._pairs is not None and is_steady:
            self._pairs.observe(record)
        self.reason = self._certain()
        if self.reason is None and is_steady and (self._seen - self._ramp) % self._step == 0:
            self.reason = self._probable()

    def _certain(self) -> str | None:
        allowed = MAX_ERROR_RATIO * self._num_planned
        if self._num_failed > allowed:
            return (
                f"{self._num_failed} requests failed, {allowed:.0f} of {self._num_planned} "
                "may fail in a measurement"
            )
        return next((why for limit in self._limits if (why := limit.certain()) is not None), None)

    def _probable(self) -> str | None:
        for limit in self._limits if self._is_closed_loop else ():
            why = limit.probable(self._limit_alpha)
            if why is not None:
                return why
        return self._pairs.slower(self._pair_alpha) if self._pairs is not None else None


class _Limit:
    """One limit of one class, and the requests of the class so far."""

    def __init__(
        self, class_name: str, name: str, latency: Latency, limit: float, num_planned: int
    ) -> None:
        self.class_name = class_name
        self._name = f"{class_name}.{name}"
        self._value = _OF_RECORD[latency.metric]
        self._is_mean = latency.statistic == "mean"
        share = 1.0 if latency.statistic == "max" else (latency.percentile or 0.0) / 100
        self._limit = limit
        self._num_planned = num_planned
        # A percentile lies between two values in order (numpy's linear rule): with so many above the limit,
        # both of them are. With fewer requests in the end it takes no more than that.
        self._num_too_many = num_planned - math.floor((num_planned - 1) * share)
        self._num_above = 0
        self._sum = 0.0
        self._steady: list[bool] = []
        """Whether each request of the steady load was above, in their order."""

    def observe(self, record: RequestRecord, *, is_steady: bool) -> None:
        value = self._value(record) if record.is_ok else math.inf
        if value is None:
            return
        is_above = value > self._limit
        self._num_above += is_above
        self._sum += value
        if is_steady:
            self._steady.append(is_above)

    def certain(self) -> str | None:
        if self._is_mean:
            if self._sum > self._limit * self._num_planned and math.isfinite(self._sum):
                return f"{self._name} must come out above its limit of {self._limit:g}, however fast the rest"
            return None
        if self._num_above >= self._num_too_many:
            return (
                f"{self._num_above} requests are above {self._name} = {self._limit:g}, "
                f"{self._num_too_many - 1} of {self._num_planned} may be"
            )
        return None

    def probable(self, alpha: float) -> str | None:
        """Test whether the limit can still be kept, given that requests come in no particular order.

        If at most m of the N requests may be above it, the number above among the first n is at most
        hypergeometric with m of N; its upper tail is the chance of what was seen. Slow requests come in
        clusters, though: both counts are shrunk to as many as if they were independent.
        """
        num_above = sum(self._steady)
        if self._is_mean or not num_above:
            return None
        allowed = self._num_too_many - 1
        share = _independent_share(np.array(self._steady, dtype=np.float64))
        num_effective = math.floor(share * len(self._steady))
        chance = hypergeom.sf(
            math.floor(share * num_above) - 1, self._num_planned, allowed, num_effective
        )
        if chance >= alpha:
            return None
        return (
            f"{num_above} of {len(self._steady)} requests are above {self._name} = "
            f"{self._limit:g}, {allowed} of {self._num_planned} may be in the end"
        )


def _independent_share(values: FloatArray) -> float:
    """Return how many independent values tell as much as one of a row, as of a first-order autoregression.

    A correlation of n values is known within 1 / sqrt(n); it is taken for as large as it may be.
    """
    away = values - values.mean()
    lagged = float((away[1:] * away[:-1]).sum() / max((away**2).sum(), 1e-12))
    correlation = min(max(lagged, 0.0) + 1 / math.sqrt(len(values)), 0.9)
    return (1 - correlation) / (1 + correlation)


class _Pairs:
    """Log ratios of this run's requests to the best config's, request by request."""

    def __init__(
        self, incumbent: dict[int, float], value: Callable[[RequestRecord], float | None]
    ):
        self._incumbent = incumbent
        self._value = value
        self._ratios: list[float] = []

    def observe(self, record: RequestRecord) -> None:
        value = self._value(record) if record.is_ok else None
        reference = self._incumbent.get(record.request_id)
        if value and reference:
            self._ratios.append(math.log(value / reference))

    def slower(self, alpha: float) -> str | None:
        """Test whether the run is slower than is worthwhile, at level `alpha`.

        The error allows for correlation between neighbours, as of a first-order autoregression, and for two
        launches that differ by chance.
        """
        if len(self._ratios) < MIN_PAIRS:
            return None
        ratios = np.array(self._ratios)
        variance = float(ratios.var(ddof=1))
        num_effective = len(ratios) * _independent_share(ratios)
        total = math.hypot(math.sqrt(variance / num_effective), LAUNCH_SPREAD)
        bound = t_quantile(1 - alpha, max(num_effective - 1, 1.0)) if alpha else math.inf
        if ratios.mean() - bound * total <= -math.log(WORTHWHILE_RATIO):
            return None
        return (
            f"requests take {math.expm1(ratios.mean()):.0%} longer than with the best config so far "
            f"({len(ratios)} pairs)"
        )


def _pairs(goal: Goal, incumbent: Measurement | None, *, is_closed_loop: bool) -> _Pairs | None:
    """Return the per-request figure that the objective is made of, for both sides; None where there is none.

    In closed loop the users are always busy, so by Little's law throughput is users over mean latency: the
    ratio of latencies, request by request, is the inverse ratio of throughputs. In open loop the arrivals
    set the throughput and there is nothing to compare. Goodput counts requests by their limits, which
    have rules of their own. Requests weigh equally here, where throughput weighs them by their tokens: a
    config that is slower on short answers alone is judged too badly; `WORTHWHILE_RATIO` leaves room for it.
    """
    if incumbent is None:
        return None
    latency = latency_of(goal.objective)
    if goal.objective in {"output_throughput_tps", "request_throughput_rps"} and is_closed_loop:
        value: Callable[[RequestRecord], float | None] = _ms_per_token
        if goal.objective == "request_throughput_rps":
            value = e2el_ms
    elif latency is not None and latency.metric in _OF_RECORD and latency.statistic == "mean":
        value = _OF_RECORD[latency.metric]
    else:
        return None
    known = {r.request_id: v for r in incumbent.records if r.is_ok and (v := value(r)) is not None}
    return _Pairs(known, value)


def _ms_per_token(record: RequestRecord) -> float | None:
    """Latency over tokens: answers may end at other places under another config."""
    whole_ms = e2el_ms(record)
    return whole_ms / record.num_completion_tokens if whole_ms is not None else None
