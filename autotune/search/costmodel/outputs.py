"""From the steady state to the named figures that a study ranks by and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autotune.measure.metrics import ATTAINMENT, latency_of
from autotune.search.costmodel.queueing import Latency, LoadState
from autotune.search.costmodel.workload import ClassLoad, Workload
from autotune.search.decision import Goal
from autotune.search.surrogate import OBJECTIVE, FloatArray

PROMPT_SPREAD = 0.15
"""Spread of the TTFT of requests of one length in a steady state, log units: the place within a step."""
CONTENT_SPREAD = 0.08
"""Spread of the acceptance length between answers, beyond chance: some texts are easier; log units."""
PLAIN_TPOT_SPREAD = 0.03
"""Spread of TPOT between requests of equal length without speculation."""
WAIT_CV2 = 1.0
"""Squared coefficient of variation of waits in open loop: an exponential's."""
_TINY = 1e-9


@dataclass(frozen=True)
class ClassState:
    """What requests of one class see."""

    load: ClassLoad
    ttft: Latency
    tpot: Latency
    e2el: Latency


def class_states(
    state: LoadState,
    workload: Workload,
    ttft: Callable[[LoadState, ClassLoad], Latency],
    tokens_cv: FloatArray,
) -> tuple[ClassState, ...]:
    """Return the latencies of each class.

    Args:
        state: the steady state of all classes together.
        workload: says the classes.
        ttft: the formula for TTFT.
        tokens_cv: coefficient of variation of a step's tokens, of each config.
    """
    return tuple(
        ClassState(c, first, *_decode_latencies(state, workload, c, first, tokens_cv))
        for c in workload.classes
        for first in (ttft(state, c),)
    )


def ttft_latency(
    state: LoadState, load: ClassLoad, workload: Workload, computed_ratio: float, request_s: FloatArray
) -> Latency:  # fmt: skip
    """Return the TTFT: wait for a slot, own prefill, and in closed loop the burst at the beginning.

    Args:
        state: the steady state.
        load: the class.
        workload: all classes.
        computed_ratio: share of the prompts' tokens that is computed and not cached.
        request_s: fixed time of a request outside of steps.
    """
    ratio = load.prompt.mean_tokens / max(workload.prompt_tokens, _TINY)
    own = np.maximum(load.prompt.mean_tokens * computed_ratio / state.budget_left, 1.0)
    base = np.maximum(workload.prompt_tokens * computed_ratio / state.budget_left, 1.0)
    # Of a short prompt in a shared chunk the whole chunk's time counts, of a long one all its chunks.
    prefill_s = state.prefill_s * np.maximum(own / base, min(ratio, 1.0))
    mean = request_s + prefill_s + state.wait_s
    wait_cv2 = WAIT_CV2 if workload.is_open_loop else 0.1
    variance = (prefill_s**2 * (load.prompt.cv**2 + PROMPT_SPREAD**2)) + state.wait_s**2 * wait_cv2
    if workload.is_open_loop:
        # A request meets other prefills at random.
        variance = variance + (state.prefill_step_share * state.prefill_step_s) ** 2
    tokens = workload.prompt_tokens * computed_ratio
    at_once = np.minimum(state.slots, _users(workload))
    per_step = np.maximum(state.budget_left + state.batch, tokens)
    # While the burst lasts, steps are full of prompts: their time grows from the chunk's by the tokens.
    slope = (state.prefill_step_s - state.plain_step_s) / np.maximum(state.chunk_tokens, 1.0)
    full_s = state.plain_step_s + slope * np.minimum(per_step, at_once * tokens)
    num_steps = np.maximum(at_once * tokens / per_step, 1.0)
    burst_s = request_s + num_steps * full_s + state.wait_s
    sigma = np.sqrt(np.log1p(variance / mean**2))
    return Latency(mean, sigma, burst_s, state.burst_share)


def _users(workload: Workload) -> float:
    return float(workload.users) if workload.users is not None else 1.0


def _decode_latencies(
    state: LoadState,
    workload: Workload,
    load: ClassLoad,
    ttft: Latency,
    tokens_cv: FloatArray,
) -> tuple[Latency, Latency]:
    mean_tokens = max(load.completion.mean_tokens, 2.0)
    per_token_s = state.decode_s / max(workload.completion_tokens - 1, 1.0)
    steps = state.steps_per_request * mean_tokens / max(workload.completion_tokens, _TINY)
    # By chance from step to step, by the text, and in open loop by how full the batch was.
    by_chance = tokens_cv**2 / np.maximum(steps, 1.0)
    by_text = np.where(tokens_cv > 0, CONTENT_SPREAD, 0.0) ** 2
    spread2 = by_chance + by_text + PLAIN_TPOT_SPREAD**2
    if workload.is_open_loop:
        slowed = np.maximum(state.step_s - state.plain_step_s, 0.0) / state.step_s
        spread2 = spread2 + 0.25 * slowed**2
    none = np.zeros_like(state.decode_s)
    tpot = Latency(per_token_s, np.sqrt(spread2), none, none)
    decode_s = per_token_s * (mean_tokens - 1)
    mean = ttft.overall_mean_s + decode_s
    variance = decode_s**2 * (load.completion.cv**2 + spread2) + ttft.mean_s**2 * ttft.sigma**2
    e2el = Latency(mean, np.sqrt(np.log1p(variance / mean**2)), none, none)
    return tpot, e2el


def log_outputs(
    state: LoadState, classes: tuple[ClassState, ...], workload: Workload, goal: Goal
) -> dict[str, FloatArray]:
    """Return the outputs as in `Observation.outputs`, each of shape (m, n)."""
    found = {OBJECTIVE: _objective(state, classes, workload, goal)}
    for class_state in classes:
        name = class_state.load.name
        for limit, value in goal.limits.get(name, {}).items():
            found[f"{name}.{limit}"] = _latency_ms(limit, class_state, state) / value
    return {name: np.log(np.maximum(values, _TINY)) for name, values in found.items()}


def _objective(
    state: LoadState, classes: tuple[ClassState, ...], workload: Workload, goal: Goal
) -> FloatArray:
    name = goal.objective
    if latency_of(name) is not None:
        # A quantile of a mixture lies between those of its parts; their mean is near enough to rank.
        parts = [c.load.share * _latency_ms(name, c, state) for c in classes]
        return _total(parts)
    per_request = [
        c.load.share * (c.load.completion.mean_tokens if name.endswith("_tps") else 1.0)
        for c in classes
    ]
    if not name.startswith("goodput") and name != ATTAINMENT:
        return state.request_rps * sum(per_request)
    good = [_good_share(c, goal.limits.get(c.load.name, {}), state) for c in classes]
    kept = _total([amount * share for amount, share in zip(per_request, good, strict=True)])
    return kept if name == ATTAINMENT else state.request_rps * kept


def _total(parts: list[FloatArray]) -> FloatArray:
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _good_share(
    class_state: ClassState, limits: Mapping[str, float], state: LoadState
) -> FloatArray:
    """Return the share of requests that keep every limit, the limits taken as independent."""
    share = np.ones_like(state.step_s)
    for name, limit_ms in limits.items():
        latency = latency_of(name)
        if latency is None or latency.metric == "icl":
            continue
        of_class: Latency = getattr(class_state, latency.metric)
        share = share * of_class.share_below(limit_ms / 1e3)
    return share


def _latency_ms(name: str, class_state: ClassState, state: LoadState) -> FloatArray:
    latency = latency_of(name)
    assert latency is not None  # the profile allows no other limits
    if latency.metric == "icl":
        quantile = _probability(latency.statistic)
        return 1e3 * np.where(
            state.prefill_step_share > 1 - quantile, state.prefill_step_s, state.plain_step_s
        )
    of_class: Latency = getattr(class_state, latency.metric)
    if latency.statistic == "mean":
        return of_class.overall_mean_s * 1e3
    return of_class.quantile_s(_probability(latency.statistic)) * 1e3


def _probability(statistic: str) -> float:
    return 0.999 if statistic == "max" else float(statistic[1:]) / 100
