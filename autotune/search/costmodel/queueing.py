"""From step times to what requests see under a load: batch, waits, latencies, throughput.

Mean-value arithmetic. A request takes a slot for its prefill and its decode steps; everybody's prefills
share the steps, which stretches them. What the slots hold on average follows from Little's law, closed loop:

    requests in slots = min(slots, users x R / (R + think))        open loop: min(slots, rate x R)

solved by iteration, since R, a request's time in its slot, depends on the batch. Slots are bound by the
users, `max_num_seqs` and the KV cache; decoding ones also by the token budget. The wait for a slot is by
Little's law in closed loop; in open loop by Sakasegawa's approximation of the G/G/c queue (1977), and where
the rate is more than can be served, by the backlog that grows until the measurement ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from autotune.search.costmodel.steps import StepTimes
from autotune.search.costmodel.table import BoolArray, Table
from autotune.search.surrogate import FloatArray

ITERATIONS = 12
REFINING_ITERATIONS = 5
"""From a solution close by."""
MAX_UTILIZATION = 0.98
"""Above it the approximations of waits in open loop are capped; the backlog says the rest."""
UNBOUNDED = 1e9
"""Users where there is no such bound."""


@dataclass(frozen=True)
class Demand:
    """What the load asks for; each a number, or an array of shape (n,) for the rows of a table."""

    users: FloatArray
    """Infinite in open loop."""
    rate_rps: FloatArray
    """0 in closed loop."""
    think_s: FloatArray
    arrival_cv2: FloatArray
    num_requests: FloatArray
    prompt_tokens: FloatArray
    """That are computed: cached prefixes left out."""
    context_prompt_tokens: FloatArray
    """That the KV cache holds."""
    completion_tokens: FloatArray
    completion_cv2: FloatArray


@dataclass(frozen=True)
class LoadState:
    """The steady state; arrays of shape (m, n) as in `StepTimes`."""

    slots: FloatArray
    """Most requests that can run at once."""
    batch: FloatArray
    """Requests that decode in a step, as a decoding request sees it: itself included."""
    decoding: FloatArray
    """Requests past their prefill, mean over time."""
    running: FloatArray
    """Requests in slots, mean over time."""
    plain_step_s: FloatArray
    """A step without prefill."""
    prefill_step_s: FloatArray
    """A step with a prefill chunk."""
    step_s: FloatArray
    """Mean over all steps."""
    prefill_step_share: FloatArray
    """Of all steps."""
    chunk_tokens: FloatArray
    """Prompt tokens of one prefill step."""
    budget_left: FloatArray
    """Prompt tokens that fit into a step beside the decoding requests."""
    steps_per_request: FloatArray
    """Decode steps."""
    decode_s: FloatArray
    """Of one request, from its first token to its last."""
    prefill_s: FloatArray
    """Of one request, from its slot to its first token."""
    wait_s: FloatArray
    """For a slot, mean over requests."""
    burst_share: FloatArray
    """Share of the requests that come all at once when a closed loop begins."""
    request_rps: FloatArray
    utilization: FloatArray
    """Load as a share of capacity, open loop; above 1 is saturated. 0 in closed loop."""


def solve(
    table: Table,
    times: StepTimes,
    demand: Demand,
    tokens_per_step: FloatArray,
    kv_tokens: FloatArray,
    start: FloatArray | None = None,
) -> LoadState:
    """Find the steady state of every config.

    Args:
        table: n configs.
        times: of their steps.
        demand: the load.
        tokens_per_step: mean of each config, drafts accepted and the bonus token, shape (n,).
        kv_tokens: size of each config's KV cache, shape (n,).
        start: requests decoding in a state close by, to begin from.
    """
    d = demand
    is_open = d.rate_rps > 0
    users = np.minimum(d.users, UNBOUNDED)
    # A running request holds its prompt and on average a bit more than half of its answer: longer
    # answers are there for longer.
    answer = d.completion_tokens * (1 + d.completion_cv2) / 2
    context = d.context_prompt_tokens + answer
    held = context + table.k
    slots = np.maximum(np.minimum(np.minimum(users, table.max_num_seqs), kv_tokens / held), 1.0)
    drafted = np.maximum(tokens_per_step, 1.0)
    decoding = np.minimum(slots, 32.0) if start is None else start
    count = ITERATIONS if start is None else REFINING_ITERATIONS
    for i in range(count + 1):
        off = times.off_share(decoding) if np.isfinite(table.off_above).any() else 0.0
        brought = drafted * (1 - off) + off
        # The last step brings on average half of its tokens past the end.
        steps = np.maximum((d.completion_tokens - 1 + (brought - 1) / 2) / brought, 0.05)
        seen = _seen(decoding, slots, is_open)
        # As many prompts must be computed as answers end: a step's budget holds b decoding requests and
        # b / steps new prompts, and no more of either.
        most = table.max_num_batched_tokens / (table.budget_per_request + d.prompt_tokens / steps)
        most = np.maximum(most, 1.0)
        batch = np.minimum(seen, most)
        left = np.maximum(table.max_num_batched_tokens - batch * table.budget_per_request, 16.0)
        plain_s = times.step_s(batch, context)
        # Decode steps while one request comes and goes. Several prefills share one where that is below 1.
        between = steps / np.maximum(np.minimum(decoding, most), 1e-6)
        chunk = np.minimum(d.prompt_tokens * np.maximum(1 / between, 1.0), left)
        prefill_s = times.step_s(batch, context, chunk)
        num_chunks = d.prompt_tokens / chunk
        total = np.maximum(between, num_chunks)
        period_s = total * plain_s + num_chunks * (prefill_s - plain_s)
        # An idle server waits: the mean step of a decoding request is that of a busy one.
        busy_period_s = np.where(is_open, 1 / np.maximum(d.rate_rps, 1e-9), period_s)
        load = np.minimum(num_chunks * prefill_s / np.maximum(busy_period_s, 1e-9), 0.95)
        own = np.maximum(d.prompt_tokens / left, 1.0) * prefill_s
        own_s = own + 0.5 * load / (1 - load) * num_chunks * prefill_s * is_open
        share = np.minimum(num_chunks / total, 1.0)
        open_share = np.minimum(d.rate_rps * num_chunks * plain_s, 1.0)
        share = np.where(is_open, np.minimum(open_share, 1.0), share)
        step_s = plain_s + share * (prefill_s - plain_s)
        decode_s = steps * step_s
        stay_s = own_s + decode_s
        asked = np.where(is_open, d.rate_rps * stay_s, users * stay_s / (stay_s + d.think_s))
        running = np.minimum(asked, slots)
        request_rps = np.minimum(running / stay_s, most / decode_s)
        found = np.maximum(request_rps * decode_s, 1e-6)
        if i < count:
            decoding = np.sqrt(decoding * found)
    own_s = np.where(is_open, own_s, np.maximum(own_s, running / request_rps - decode_s))
    stay_s = own_s + decode_s
    utilization = np.where(is_open, asked / slots, 0.0)
    wait_s = np.where(
        is_open,
        _open_wait_s(d, utilization, slots, stay_s, request_rps),
        np.maximum(users / request_rps - stay_s - d.think_s, 0.0),
    )
    return LoadState(
        slots=slots + 0 * decoding,
        batch=batch,
        decoding=decoding,
        running=running,
        plain_step_s=plain_s,
        prefill_step_s=prefill_s,
        step_s=step_s,
        prefill_step_share=share,
        chunk_tokens=chunk,
        budget_left=left,
        steps_per_request=steps + 0 * decoding,
        decode_s=decode_s,
        prefill_s=own_s,
        wait_s=wait_s,
        burst_share=np.where(
            is_open | (d.think_s > 0), 0.0, np.minimum(users / d.num_requests, 1.0)
        )
        + 0 * decoding,
        request_rps=request_rps,
        utilization=utilization,
    )


def _seen(decoding: FloatArray, slots: FloatArray, is_open: BoolArray) -> FloatArray:
    """Return the batch that a decoding request sees.

    In open loop the others come and go on their own, so it sees their mean, and itself beside them. In
    closed loop there is one user less to meet.
    """
    others = np.where(is_open, decoding, decoding * (1 - 1 / np.maximum(slots, 1.0)))
    return np.minimum(1.0 + others, slots)


def _open_wait_s(
    demand: Demand,
    utilization: FloatArray,
    slots: FloatArray,
    stay_s: FloatArray,
    request_rps: FloatArray,
) -> FloatArray:
    """Return the mean wait for a slot in open loop."""
    capped = np.minimum(utilization, MAX_UTILIZATION)
    variation = (demand.arrival_cv2 + demand.completion_cv2) / 2
    queue_s = variation * stay_s * capped ** (np.sqrt(2 * (slots + 1)) - 1) / (1 - capped) / slots
    lasts_s = demand.num_requests / np.maximum(demand.rate_rps, 1e-9)
    # Of arrivals spread evenly over the measurement the mean one waits for half of the final backlog.
    backlog_s = np.maximum(demand.rate_rps / request_rps - 1, 0.0) * lasts_s / 2
    total_s: FloatArray = queue_s + backlog_s
    return total_s


@dataclass(frozen=True)
class Latency:
    """A latency over the requests of one class: log-normal, or a share of it spread evenly over a burst."""

    mean_s: FloatArray
    """Of the requests outside of the burst."""
    sigma: FloatArray
    """Standard deviation of the logarithm."""
    burst_s: FloatArray
    """The last of the burst has it; the first has `mean_s`."""
    burst_share: FloatArray

    @property
    def overall_mean_s(self) -> FloatArray:
        """Mean over all requests."""
        in_burst = (self.mean_s + np.maximum(self.burst_s, self.mean_s)) / 2
        mean: FloatArray = self.mean_s * (1 - self.burst_share) + in_burst * self.burst_share
        return mean

    def quantile_s(self, probability: float) -> FloatArray:
        """Return the value that a share `probability` of the requests stay below.

        The larger of what either part alone puts above it: exact where one of them makes up the tail.
        """
        tail = 1 - probability
        outside = np.clip(1 - tail / np.maximum(1 - self.burst_share, 1e-9), 0.02, 1 - 1e-6)
        steady = self._median_s * np.exp(self.sigma * _normal_quantile(outside))
        inside = np.clip(1 - tail / np.maximum(self.burst_share, 1e-9), 0.0, 1.0)
        last = np.maximum(self.burst_s, self.mean_s)
        of_burst = (self.mean_s + inside * (last - self.mean_s)) * (inside > 0)
        found: FloatArray = np.maximum(steady, of_burst)
        return found

    def share_below(self, limit_s: float) -> FloatArray:
        """Return the share of the requests that are not above a limit."""
        z = (math.log(limit_s) - np.log(self._median_s)) / np.maximum(self.sigma, 1e-6)
        span = np.maximum(self.burst_s - self.mean_s, 1e-9)
        inside = np.clip((limit_s - self.mean_s) / span, 0.0, 1.0)
        share: FloatArray = _normal_cdf(z) * (1 - self.burst_share) + inside * self.burst_share
        return share

    @property
    def _median_s(self) -> FloatArray:
        median: FloatArray = self.mean_s * np.exp(-(self.sigma**2) / 2)
        return median


def _normal_quantile(probability: FloatArray) -> FloatArray:
    found: FloatArray = ndtri(probability)
    return found


def _normal_cdf(z: FloatArray) -> FloatArray:
    found: FloatArray = ndtr(z)
    return found
