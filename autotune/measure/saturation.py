"""Open loop: does the server keep up with the arrivals, or do requests pile up?

At a rate above capacity there is no steady state: every figure is one of how long the measurement was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.measure.distributions import t_quantile
from autotune.measure.metrics import FloatArray
from autotune.measure.records import Measurement
from autotune.measure.windows import Window, start_s, steady_window

NUM_BATCHES = 10
"""Parts of the window. Means of long parts forget each other, which single moments do not."""
MIN_REQUESTS = 100
"""Arrivals in the window. With fewer, a server that is still filling up looks like one that is full."""
MIN_UNANSWERED_RATIO = 0.1
"""A server that answers all but this share of what arrives counts as keeping up."""
MIN_GROWTH_RATIO = 0.5
"""Growth over the window, as a share of the mean in flight, below which it counts as fluctuation.

Both thresholds were set on a simulated processor-sharing server (4 or 16 requests reach its capacity, 200
requests a measurement): called saturated in 4 % of measurements or fewer at 0.8 of its capacity, in up to
10 % at 0.9, in about 55 % at 1.1, 75 % or more at 1.2 and 90 % or more from 1.3 on."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Saturation:
    """Growth of the number of requests in flight over the steady window."""

    slope_rps: float
    """Requests per second that arrive and are not answered."""
    low_rps: float
    high_rps: float
    """The slope's 95 % interval."""
    arrival_rps: float
    growth_ratio: float
    """Growth over the window, as a share of the mean number in flight."""

    @property
    def is_saturated(self) -> bool:
        """Whether requests pile up beyond doubt, and by so much that it matters."""
        return (
            self.low_rps > 0
            and self.slope_rps > MIN_UNANSWERED_RATIO * self.arrival_rps
            and self.growth_ratio > MIN_GROWTH_RATIO
        )


def saturation(measurement: Measurement) -> Saturation | None:
    """Test whether the requests in flight grow over the steady window.

    The slope is the least-squares line's through the means of `NUM_BATCHES` equal parts of the window
    (batch means; Law 2015, section 9.5.3). Its standard error allows for correlation between
    neighbouring parts (Newey and West 1987, one lag), its quantile is Student's with `NUM_BATCHES` - 2
    degrees of freedom.

    Returns:
        None in closed loop, where requests cannot pile up, and with fewer than `MIN_REQUESTS` arrivals.
    """
    if measurement.concurrency is not None:
        return None
    window = _arrivals_window(measurement)
    starts = np.sort([start_s(r) for r in measurement.records])
    num_arrivals = int(((starts >= window.start_s) & (starts <= window.end_s)).sum())
    if num_arrivals < MIN_REQUESTS or window.duration_s <= 0:
        return None
    edges = np.linspace(window.start_s, window.end_s, NUM_BATCHES + 1)
    ends = np.array([r.finished_s for r in measurement.records])
    began = np.array([start_s(r) for r in measurement.records])
    overlap = np.minimum(ends[:, None], edges[1:]) - np.maximum(began[:, None], edges[:-1])
    in_flight = np.clip(overlap, 0.0, None).sum(axis=0) / np.diff(edges)
    slope, error = _trend((edges[1:] + edges[:-1]) / 2, in_flight)
    half = t_quantile((1 + CONFIDENCE) / 2, NUM_BATCHES - 2) * error
    return Saturation(
        slope_rps=slope,
        low_rps=slope - half,
        high_rps=slope + half,
        arrival_rps=num_arrivals / window.duration_s,
        growth_ratio=slope * window.duration_s / float(in_flight.mean()),
    )


def _arrivals_window(measurement: Measurement) -> Window:
    """Return the steady window; all arrivals where it holds the drain, which would hide a pile."""
    steady = steady_window(measurement)
    arrivals = [start_s(r) for r in measurement.records]
    last_s = max(arrivals, default=0.0)
    return steady if steady.end_s <= last_s else Window(min(arrivals, default=0.0), last_s)


def _trend(times_s: FloatArray, values: FloatArray) -> tuple[float, float]:
    """Return the slope of the least-squares line and its standard error."""
    x = times_s - times_s.mean()
    scale = float((x**2).sum())
    slope = float((x * values).sum()) / scale
    scores = x * (values - values.mean() - slope * x)
    neighbours = max(0.0, float((scores[1:] * scores[:-1]).sum()))
    # Half the weight for one lag (Bartlett), counted for both directions.
    variance = (float((scores**2).sum()) + neighbours) * len(x) / (len(x) - 2)
    return slope, math.sqrt(variance) / scale
