"""The cost model: physics for the mean, a Gaussian process for what physics leaves over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.search.costmodel.acceptance import (
    PLAIN_STEP,
    Acceptance,
    AcceptanceFinding,
    StepTokens,
    acceptance_findings,
    fit_acceptances,
)
from autotune.search.costmodel.fit import Fit, fit_unknowns
from autotune.search.costmodel.gp import GpPrior
from autotune.search.costmodel.outputs import class_states, log_outputs, ttft_latency
from autotune.search.costmodel.queueing import Demand, Latency, LoadState, solve
from autotune.search.costmodel.residual import EARLY_ERROR_FACTOR, ResidualModel, has_outputs
from autotune.search.costmodel.steps import StepTimes, unknowns
from autotune.search.costmodel.table import KvForecast, Table, plain_features
from autotune.search.costmodel.workload import ClassLoad, Workload
from autotune.search.decision import Goal
from autotune.search.surrogate import FloatArray, Observation, Predictions, Surrogate
from autotune.serving.config import ServingConfig
from autotune.serving.sizes import ServingSizes

TPOT_ERROR, THROUGHPUT_ERROR = 0.02, 0.03
"""What the formulae are trusted with when the unknowns are fitted: their own error, and that of a launch."""
TTFT_ERROR = 0.30
RUNG_FACTOR = 1.5
"""On the errors of a rung: it is short."""
MIN_RUNG_REQUESTS = 6
MIN_DRAFTS = 30
"""Below it a measurement's own acceptance length says less than the pooled one."""
THROUGHPUT_PRIOR = GpPrior(amplitude=0.05, offset=0.05)
LATENCY_PRIOR = GpPrior(amplitude=0.15, offset=0.20)
"""How far physics may be off: by about 5 % in throughput (9 % for latency simulators such as Vidur), tails of
latencies by more."""
CHUNK_ROWS = 2000
"""Candidates at once where every unknown is varied, so that the arrays stay in the cache."""
ACCEPTANCE_STEP = 0.01
MAX_PHYSICS_SD = 1.0
"""Of a log output, by the unknowns and the acceptance. Next to saturation an output moves by so much that a
straight line says nothing of how far; a factor of 3 either way is as good as not knowing."""
WARM_WIDENING = 2.0
WARM_SPREAD = 0.1
"""In log units: 10 %, what rates of one GPU may differ by from driver to driver. Judgement."""
MIN_PROMPT_RATIO = 0.02
"""Share of a prompt that is computed at least, whatever the prefix cache holds."""


@dataclass(frozen=True)
class _Tokens:
    """What a step brings, by config; arrays of shape (n,)."""

    mean: FloatArray
    sd_ratio: FloatArray
    cv: FloatArray


class CostModel(Surrogate):
    """Predicts every candidate from sizes, and corrects itself by what was measured."""

    name = "cost model"

    def __init__(
        self,
        configs: Sequence[ServingConfig],
        sizes: ServingSizes,
        workload: Workload,
        goal: Goal,
        memory: KvForecast,
        trained_depths: Mapping[str, int | None] | None = None,
    ) -> None:
        """Take the candidates and what is known before anything runs.

        Args:
            configs: all candidates.
            sizes: of target, drafters and device.
            workload: the study's load.
            goal: objective and limits.
            memory: forecasts the KV cache; whoever owns it teaches it.
            trained_depths: of the drafters, where known.
        """
        self._configs = list(configs)
        self._sizes = sizes
        self._planned = self._workload = workload
        self._goal = goal
        self._memory = memory
        self._trained_depths = trained_depths or {}
        self._table = Table.of(self._configs, sizes, workload.users)
        estimates = [memory.estimate(config) for config in self._configs]
        self._kv_bytes = np.array([e.kv_bytes for e in estimates])
        self._kv_bytes_per_token = np.array([e.kv_bytes_per_token for e in estimates])
        self._kv_offset_bytes = 0.0
        self._computed_ratio = 1.0
        known = unknowns(sizes)
        self._medians = np.log([u.median for u in known])
        self._spreads = np.array([u.spread for u in known])
        self._fit = Fit(self._medians, np.diag(self._spreads**2), 1.0)
        self._drafters = sorted({c.drafter for c in self._configs if c.drafter is not None})
        self._acceptances = fit_acceptances(self._drafters, (), self._trained_depths)
        features = plain_features(
            self._configs, sizes.device.max_num_seqs, sizes.device.max_num_batched_tokens
        )
        is_throughput = goal.is_maximized
        self._residual = ResidualModel(
            self._configs,
            features,
            lambda name: THROUGHPUT_PRIOR if is_throughput and "." not in name else LATENCY_PRIOR,
        )
        self._is_fitted = False
        self._tokens = self._tokens_of(self._configs)
        self.findings: tuple[AcceptanceFinding, ...] = ()
        """What is wrong with the speculation counters seen so far."""

    # Warm start

    def learnt(self) -> dict[str, tuple[float, float]]:
        """Return the fitted unknowns for later studies: the logarithm of each, and its standard deviation."""
        names = [u.name for u in unknowns(self._sizes)]
        deviations = np.sqrt(np.diag(self._fit.covariance))
        return {
            name: (float(value), float(sd))
            for name, value, sd in zip(names, self._fit.theta, deviations, strict=True)
        }

    def start_from(self, learnt: Mapping[str, tuple[float, float]]) -> None:
        """Take an earlier study's unknowns as priors, `WARM_WIDENING` times as wide as it knew them.

        Another load, driver or version may move them, so a prior is never narrower than `WARM_SPREAD`, and
        never wider than the one without any study. Unknowns of other names are left as they are.
        """
        for i, unknown in enumerate(unknowns(self._sizes)):
            if unknown.name not in learnt:
                continue
            value, deviation = learnt[unknown.name]
            self._medians[i] = value
            self._spreads[i] = min(
                unknown.spread, max(WARM_WIDENING * float(deviation), WARM_SPREAD)
            )
        self._fit = Fit(self._medians, np.diag(self._spreads**2), 1.0)

    # What is assumed of serving; each can be overridden on its own

    def kv_tokens(self, kv_bytes: FloatArray, kv_bytes_per_token: FloatArray) -> FloatArray:
        """Return how many tokens each config's KV cache holds."""
        return np.maximum(kv_bytes, 0.0) / kv_bytes_per_token

    def prefill_tokens(self, prompt_tokens: FloatArray) -> FloatArray:
        """Return how many of the prompts' tokens are computed: what is not cached."""
        return np.maximum(prompt_tokens * self._computed_ratio, 1.0)

    def ttft(
        self, state: LoadState, load: ClassLoad, workload: Workload, request_s: FloatArray
    ) -> Latency:
        """Return the time to the first token of one class."""
        return ttft_latency(state, load, workload, self._computed_ratio, request_s)

    # Learning

    def fit(self, observations: Sequence[Observation]) -> None:
        useful = [o for o in observations if o.failure is None and o.duration_s > 0]
        self.findings = acceptance_findings(useful)
        self._learn_load(useful)
        self._acceptances = fit_acceptances(self._drafters, useful, self._trained_depths)
        self._tokens = self._tokens_of(self._configs)
        self._learn_kv(useful)
        timed = [o for o in useful if o.mean_tpot_s or o.output_throughput_tps]
        self._fit_unknowns([o for o in timed if o.concurrency or o.is_target_load])
        with_outputs = [o for o in observations if has_outputs(o)]
        self._residual.fit(with_outputs, self._means_of(with_outputs))
        self._is_fitted = True

    def _learn_load(self, useful: Sequence[Observation]) -> None:
        whole = [o for o in useful if o.is_target_load and not o.is_stopped_early] or useful
        prompts = [o.mean_prompt_tokens for o in whole if o.mean_prompt_tokens > 0]
        answers = [o.mean_completion_tokens for o in whole if o.mean_completion_tokens > 0]
        self._workload = self._planned.learnt(
            float(np.mean(prompts)) if prompts else None,
            float(np.mean(answers)) if answers else None,
        )
        queries = sum(o.counters.num_prefix_cache_queries for o in whole)
        hits = sum(o.counters.num_prefix_cache_hits for o in whole)
        self._computed_ratio = max(1 - hits / queries, MIN_PROMPT_RATIO) if queries else 1.0

    def _learn_kv(self, useful: Sequence[Observation]) -> None:
        """Take over what the memory model has learnt since: one number of bytes for all."""
        seen = [o.config for o in useful if o.config in self._residual.index][:1]
        for config in seen:
            before = self._kv_bytes[self._residual.index[config]]
            self._kv_offset_bytes = self._memory.estimate(config).kv_bytes - float(before)

    def _fit_unknowns(self, timed: Sequence[Observation]) -> None:
        if not timed:
            return
        configs = [o.config for o in timed]
        table = Table.of(configs, self._sizes, self._planned.users)
        tokens = self._observed_tokens(timed)
        kv_tokens = self._observed_kv(timed)
        demand = self._observed_demand(timed)
        factor = np.array(
            [
                (1.0 if o.is_target_load else RUNG_FACTOR)
                * (EARLY_ERROR_FACTOR if o.is_stopped_early else 1.0)
                for o in timed
            ]
        )
        tpot = _logs([o.mean_tpot_s for o in timed])
        closed = [o.output_throughput_tps if o.concurrency else None for o in timed]
        throughput = _logs(closed)
        ttft = _logs([o.mean_ttft_s if o.is_target_load else None for o in timed])

        def residuals(theta: FloatArray) -> FloatArray:
            times = StepTimes(self._sizes, table, theta)
            state = solve(table, times, demand, tokens, kv_tokens)
            # Not a class's but everybody's: one class with the mean lengths.
            per_token = np.log(state.decode_s / np.maximum(demand.completion_tokens - 1, 1.0))
            rate = np.log(state.request_rps * demand.completion_tokens)
            load = self._workload.classes[0]
            first = np.log(self.ttft(state, load, self._workload, times.request_s).overall_mean_s)
            return np.concatenate(
                [
                    np.nan_to_num((per_token - tpot) / (TPOT_ERROR * factor)),
                    np.nan_to_num((rate - throughput) / (THROUGHPUT_ERROR * factor)),
                    np.nan_to_num((first - ttft) / (TTFT_ERROR * factor)),
                ],
                axis=1,
            )

        self._fit = fit_unknowns(residuals, self._medians, self._spreads, self._fit.theta)

    def _observed_tokens(self, timed: Sequence[Observation]) -> FloatArray:
        """Return tokens per step as each measurement counted them, which leaves the speed alone to fit."""
        pooled = self._tokens_of([o.config for o in timed]).mean
        return np.array(
            [
                o.counters.acceptance_length
                if o.counters.num_drafts >= MIN_DRAFTS and o.config.speculation_off_above is None
                else pooled[i]
                for i, o in enumerate(timed)
            ],
            dtype=np.float64,
        )

    def _observed_kv(self, timed: Sequence[Observation]) -> FloatArray:
        estimates = [self._memory.estimate(o.config) for o in timed]
        forecast = self.kv_tokens(
            np.array([e.kv_bytes for e in estimates]),
            np.array([e.kv_bytes_per_token for e in estimates]),
        )
        reported = [o.kv_tokens for o in timed]
        return np.array([forecast[i] if kv is None else kv for i, kv in enumerate(reported)])

    def _observed_demand(self, timed: Sequence[Observation]) -> Demand:
        """Return the load that each measurement was made under."""
        target, planned = self._demand(self._workload), self._workload
        is_target = np.array([o.is_target_load for o in timed])
        rung_users = np.array([float(o.concurrency or 1) for o in timed])
        prompts = np.array([o.mean_prompt_tokens or planned.prompt_tokens for o in timed])
        answers = np.array([o.mean_completion_tokens or planned.completion_tokens for o in timed])
        return Demand(
            users=np.where(is_target, target.users, rung_users),
            rate_rps=np.where(is_target, target.rate_rps, 0.0),
            think_s=np.where(is_target, target.think_s, 0.0),
            arrival_cv2=np.where(is_target, target.arrival_cv2, 1.0),
            num_requests=np.where(
                is_target, target.num_requests, np.maximum(MIN_RUNG_REQUESTS, 2 * rung_users)
            ),
            prompt_tokens=self.prefill_tokens(prompts),
            context_prompt_tokens=prompts,
            completion_tokens=answers,
            completion_cv2=target.completion_cv2 + 0 * answers,
        )

    # Predicting

    def predict(self, indices: npt.NDArray[np.intp] | None = None) -> Predictions:
        if not self._is_fitted:
            raise RuntimeError("nothing was learnt yet")
        chosen = np.arange(len(self._configs)) if indices is None else np.asarray(indices)
        means: dict[str, list[FloatArray]] = {}
        variances: dict[str, list[FloatArray]] = {}
        for start in range(0, max(len(chosen), 1), CHUNK_ROWS):
            rows = chosen[start : start + CHUNK_ROWS]
            for name, (mean, variance) in self._physics(rows).items():
                means.setdefault(name, []).append(mean)
                variances.setdefault(name, []).append(variance)
        found_means, found_sds = {}, {}
        for name in means:
            mean, variance = np.concatenate(means[name]), np.concatenate(variances[name])
            if name in self._residual.names:
                left, left_sd = self._residual.predict(name, indices)
                mean, variance = mean + left, variance + left_sd**2
            found_means[name], found_sds[name] = mean, np.sqrt(variance)
        return Predictions(found_means, found_sds)

    def leave_one_out(self) -> Mapping[str, float]:
        """As in `Surrogate`; the unknowns and the acceptance stay as all measurements have them.

        A single config moves them little once there are a few. The residual is taken out in closed form.
        """
        return self._residual.leave_one_out()

    def prediction_of(self, config: ServingConfig) -> dict[str, float]:
        """Return what physics says of one config, without the residual, for reports."""
        table = Table.of([config], self._sizes, self._planned.users)
        estimate = self._memory.estimate(config)
        kv_tokens = self.kv_tokens(
            np.array([estimate.kv_bytes]), np.array([estimate.kv_bytes_per_token])
        )
        tokens = self._tokens_of([config])
        theta = self._fit.theta[None, :]
        times = StepTimes(self._sizes, table, theta)
        state = solve(table, times, self._demand(self._workload), tokens.mean, kv_tokens)
        load = self._workload.classes[0]
        first = self.ttft(state, load, self._workload, times.request_s)
        named = {
            "acceptance_length": tokens.mean,
            "batch": state.batch,
            "plain_step_ms": state.plain_step_s * 1e3,
            "prefill_step_ms": state.prefill_step_s * 1e3,
            "step_ms": state.step_s * 1e3,
            "tpot_mean_ms": state.decode_s * 1e3 / max(self._workload.completion_tokens - 1, 1.0),
            "ttft_mean_ms": first.overall_mean_s * 1e3,
            "wait_mean_ms": state.wait_s * 1e3,
            "request_throughput_rps": state.request_rps,
            "output_throughput_tps": state.request_rps * self._workload.completion_tokens,
            "kv_tokens": kv_tokens,
            "utilization_ratio": state.utilization,
        }
        return {name: float(np.ravel(value)[0]) for name, value in named.items()}

    def _physics(self, rows: npt.NDArray[np.intp]) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Return mean and variance of each output, the residual left out."""
        theta, tokens = self._fit.theta, self._tokens
        of_rows = _Tokens(tokens.mean[rows], tokens.sd_ratio[rows], tokens.cv[rows])
        base, state = self._outputs(rows, theta[None, :], of_rows, None)
        # Directions that the data leave open move the outputs most; each is a step of one deviation.
        values, vectors = np.linalg.eigh(self._fit.covariance)
        directions = (vectors * np.sqrt(np.maximum(values, 0.0))).T
        shrink = np.minimum(1.0, 0.3 / np.maximum(np.abs(directions).max(axis=1), 1e-12))
        moved, _ = self._outputs(
            rows, theta + directions * shrink[:, None], of_rows, state.decoding
        )
        more = _Tokens(
            1 + (of_rows.mean - 1) * (1 + ACCEPTANCE_STEP), of_rows.sd_ratio, of_rows.cv
        )
        accepted, _ = self._outputs(rows, theta[None, :], more, state.decoding)
        gain = np.maximum(np.log(more.mean / of_rows.mean), 1e-9)
        found = {}
        for name, value in base.items():
            slopes = (moved[name] - value) / shrink[:, None]
            by_acceptance = (accepted[name] - value)[0] / gain * of_rows.sd_ratio
            by_acceptance = np.where(of_rows.sd_ratio > 0, by_acceptance, 0.0)
            variance = (slopes**2).sum(axis=0) + by_acceptance**2
            found[name] = (value[0], np.minimum(variance, MAX_PHYSICS_SD**2))
        return found

    def _outputs(
        self,
        rows: npt.NDArray[np.intp],
        theta: FloatArray,
        tokens: _Tokens,
        start: FloatArray | None,
    ) -> tuple[dict[str, FloatArray], LoadState]:
        table = self._table.take(rows)
        kv_tokens = self.kv_tokens(
            self._kv_bytes[rows] + self._kv_offset_bytes, self._kv_bytes_per_token[rows]
        )
        times = StepTimes(self._sizes, table, theta)
        state = solve(table, times, self._demand(self._workload), tokens.mean, kv_tokens, start)
        classes = class_states(
            state,
            self._workload,
            lambda s, load: self.ttft(s, load, self._workload, times.request_s),
            tokens.cv,
        )
        return log_outputs(state, classes, self._workload, self._goal), state

    def _means_of(self, observations: Sequence[Observation]) -> dict[str, FloatArray]:
        """Return what physics predicts for each observation; NaN-free only for candidates."""
        places = [self._residual.index.get(o.config, 0) for o in observations]
        if not places:
            return {}
        rows = np.array(places, dtype=np.intp)
        of_rows = _Tokens(
            self._tokens.mean[rows], self._tokens.sd_ratio[rows], self._tokens.cv[rows]
        )
        found, _ = self._outputs(rows, self._fit.theta[None, :], of_rows, None)
        return {name: value[0] for name, value in found.items()}

    def _tokens_of(self, configs: Sequence[ServingConfig]) -> _Tokens:
        found = [self._step_tokens(config) for config in configs]
        return _Tokens(
            np.array([t.mean for t in found]),
            np.array([t.sd_ratio for t in found]),
            np.array([t.cv for t in found]),
        )

    def _step_tokens(self, config: ServingConfig) -> StepTokens:
        if config.drafter is None:
            return PLAIN_STEP
        if config.drafter not in self._acceptances:
            self._acceptances[config.drafter] = Acceptance()
        return self._acceptances[config.drafter].tokens(config)

    def _demand(self, workload: Workload) -> Demand:
        def number(value: float) -> FloatArray:
            return np.asarray(value, dtype=np.float64)

        prompt_tokens = number(workload.prompt_tokens)
        return Demand(
            users=number(np.inf if workload.users is None else workload.users),
            rate_rps=number(workload.rate_rps or 0.0),
            think_s=number(workload.think_s),
            arrival_cv2=number(workload.arrival_cv2),
            num_requests=number(workload.num_requests),
            prompt_tokens=self.prefill_tokens(prompt_tokens),
            context_prompt_tokens=prompt_tokens,
            completion_tokens=number(workload.completion_tokens),
            completion_cv2=number(workload.completion_cv2),
        )


def _logs(values: Sequence[float | None]) -> FloatArray:
    """Return logarithms, NaN where there is nothing to take one of."""
    return np.log([v if v else np.nan for v in values])
