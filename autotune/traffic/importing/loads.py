"""Which load a log's times call for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from autotune.traffic.fields import WEEK_S
from autotune.traffic.importing.arrivals import Arrivals
from autotune.traffic.importing.fit import LogFit

MIN_GAPS = 30
"""From 30 gaps the CV has a standard error of about 13 % (1 / sqrt(2n)); from fewer it says little."""

MAX_FITTED_CV = 2.0
"""A gamma process with a larger CV (a shape below 0.25) is a few long pauses: there the recorded order
of bursts and pauses is the load, and a fit would only invent others."""

POISSON_CV = (0.9, 1.1)
MAX_CONSTANT_CV = 0.05
MAX_RATE_SWING = 0.25
MAX_OUT_OF_ORDER_RATIO = 0.01
MIN_HIT_RATIO = 0.05

MAX_RPS = 100_000
MIN_BURSTINESS = 0.001
"""What a profile takes at most and at least."""

WINDOW_S = 300.0
MAX_WINDOW_REQUESTS = 5000
MIN_REQUESTS = 200
MAX_DURATION_S = 180

GUESSED_CONCURRENCY = 8


@dataclass(frozen=True)
class RateChoice:
    """A fitted arrival process."""

    rps: float
    arrival: Literal["constant", "poisson", "gamma"]
    burstiness: float | None
    arrivals: Arrivals
    doubt: str | None = None
    """What the fit loses."""

    @property
    def num_requests(self) -> int:
        """Requests of one measurement: `MIN_REQUESTS`, or as many as come in a week."""
        return max(1, min(MIN_REQUESTS, int(WEEK_S * self.rps)))

    @property
    def duration_s(self) -> int:
        """Time that they take at this rate, with a fifth to spare."""
        return min(WEEK_S, max(MAX_DURATION_S, math.ceil(1.2 * self.num_requests / self.rps)))


@dataclass(frozen=True)
class TraceChoice:
    """The recorded times themselves."""

    reason: str
    window_s: int
    num_in_window: int
    """Requests in the window, about: as far as `Arrivals.counts` tells."""
    jitter_s: float
    fitted: RateChoice
    """What would be sent instead of the recorded times."""

    @property
    def duration_s(self) -> int:
        return min(WEEK_S, max(MAX_DURATION_S, math.ceil(self.window_s + self.jitter_s)))


def choose_load(fit: LogFit, *, by_session: bool) -> RateChoice | TraceChoice | None:
    """Return the load that fits the log's times; None if it has none.

    Args:
        fit: what the log shows.
        by_session: whether conversations are sent whole, so that the rate is that of their first
            requests. A replay sends rows: it would lose the later turns of those that are one row.
    """
    if fit.arrivals is None:
        return None
    arrivals = fit.session_arrivals if by_session and fit.session_arrivals else fit.arrivals
    rate = fitted_rate(arrivals)
    reason = _reason_to_replay(fit, arrivals)
    if reason is None:
        return rate
    if by_session and fit.sessions is not None and not fit.sessions.is_by_rows:
        return replace(rate, doubt=reason)
    window_s, num_in_window = _window(fit.arrivals)
    return TraceChoice(
        reason=reason,
        window_s=window_s,
        num_in_window=num_in_window,
        jitter_s=_jitter_s(fit.arrivals),
        fitted=rate,
    )


def fitted_rate(arrivals: Arrivals) -> RateChoice:
    """Fit a constant, Poisson or gamma process: its rate, and its shape from the gaps' CV."""
    cv = arrivals.true_gap_cv
    rps = min(MAX_RPS, _rounded(arrivals.rate_rps))
    if cv <= MAX_CONSTANT_CV:
        return RateChoice(rps, "constant", None, arrivals)
    if POISSON_CV[0] <= cv <= POISSON_CV[1]:
        return RateChoice(rps, "poisson", None, arrivals)
    shape = max(MIN_BURSTINESS, _rounded(arrivals.gamma_shape))
    return RateChoice(rps, "gamma", shape, arrivals)


def _reason_to_replay(fit: LogFit, arrivals: Arrivals) -> str | None:
    """Say what a fitted rate would lose, None if it would do."""
    if arrivals.num_gaps < MIN_GAPS:
        return f"{arrivals.num_gaps} gaps are too few to fit a process to"
    if arrivals.num_out_of_order > MAX_OUT_OF_ORDER_RATIO * arrivals.num_times:
        return f"{arrivals.num_out_of_order:,} times are out of order, so gaps cannot be trusted"
    if arrivals.true_gap_cv > MAX_FITTED_CV:
        return f"gap CV {arrivals.true_gap_cv:.3g}: bursts and pauses that no fitted rate has"
    if arrivals.rate_swing is not None and arrivals.rate_swing > MAX_RATE_SWING:
        return f"the rate itself moves by {arrivals.rate_swing:.0%} over the log"
    if fit.blocks is not None and fit.blocks.value.hit_ratio > MIN_HIT_RATIO:
        return (
            f"{fit.blocks.value.hit_ratio:.0%} of the prompts' blocks are shared, as the rows say"
        )
    return None


def _window(arrivals: Arrivals) -> tuple[int, int]:
    """Return the first stretch that is `WINDOW_S` long and has `MIN_REQUESTS`, and its requests."""
    end_s, num_requests = 0.0, 0
    for count in arrivals.counts:
        if end_s >= WINDOW_S and num_requests >= MIN_REQUESTS:
            break
        if num_requests + count > MAX_WINDOW_REQUESTS:
            end_s += arrivals.count_s * (MAX_WINDOW_REQUESTS - num_requests) / count
            num_requests = MAX_WINDOW_REQUESTS
            break
        end_s += arrivals.count_s
        num_requests += count
    # A window ends before its end, so the last request of a log needs a moment more than its span.
    end_s = min(end_s, arrivals.span_s + 0.001, WEEK_S - _jitter_s(arrivals))
    return max(1, math.ceil(end_s)), num_requests


def _jitter_s(arrivals: Arrivals) -> float:
    if not arrivals.is_clock_coarse:
        return 0.0
    return min(_rounded(arrivals.resolution_s), WEEK_S / 2)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
