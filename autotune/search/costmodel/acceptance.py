"""How many tokens a step brings, from the counters of all launches together.

The server counts for every position how many drafts were accepted up to there: the prefix survival. With a
chain, position i does not look at later ones, so a launch with K = 8 also tells of K = 3. Survivals are
taken apart into what each position adds, log(S_i / S_{i-1}), because these are independent binomials:

    r_0 = a_0 + s / K + w [FP8 weights] + v [FP8 KV]        r_i = a_i + w [FP8 weights] + v [FP8 KV]

`s / K` is one slope for all positions: a longer K passes easy text in fewer steps, so a larger part of its
steps begins in hard text and each survival is lower by the same few per cent (`structure.pooled_acceptance`
has a line per position, which needs several K at each of them; on the tables of vLLM PR #32628 one
common slope is within 1 %). `w` and `v` start at nothing with a narrow prior, so a precision that was
never measured borrows the other one's survivals. Neighbouring `a_i` are tied by a random walk: what lies
deeper than any measurement continues as the deepest one did, ever less surely. All of it is linear and
Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from autotune.search.surrogate import FloatArray, Observation
from autotune.serving.config import MAX_NUM_SPECULATIVE_TOKENS, ServingConfig

FIRST_SURVIVAL = 0.70
KEEP = 0.72
"""Share of prefixes that each further position keeps, before any measurement: an EAGLE-3 or P-EAGLE head on
prose or code accepts 63 to 75 % at the first position and keeps 0.6 to 0.75 after it (vLLM PR #32628 and the
acceptance lengths of the published heads)."""
DECLINE = 0.985
"""Factor on KEEP from one position to the next: late positions of a parallel drafter are harder."""
KEEP_BEYOND = 0.40
"""Share kept by each position past the trained depth, where the head was never taught."""
FIRST_SPREAD = 0.30
WALK_SPREAD = 0.10
"""How far the log of what a position keeps may be from its neighbour's, standard deviation."""
CLIFF_SPREAD = 0.50
"""The same for the first position past the trained depth."""
SLOPE_SPREAD = 0.30
"""Of `s`. 0.28 fits the tables of vLLM PR #32628."""
PRECISION_SPREAD = 0.03
"""Of `w` and `v`: FP8 changes what is kept by a few per cent; judgement."""
OVERDISPERSION = 4.0
"""Factor on the binomial variance: drafts of one answer succeed together."""
FLOOR = 0.004
"""Error of one launch's log ratio at least: the prompts of a screen are a part of all."""
TREE_ERROR = 0.05
"""Added error of a tree's first level, whose formula is an idea and not a count."""
MAX_ROOT_SURVIVAL = 0.97
"""Cap on a tree's first level: the right token is not always among the candidates."""


class AcceptanceProblem(StrEnum):
    """What speculation counters must not look like."""

    NO_COUNTERS = "no speculation counters although K > 0"
    NOT_MONOTONE = "a later position is accepted more often than an earlier one"
    NOTHING_ACCEPTED = "the first position is never accepted"


@dataclass(frozen=True)
class AcceptanceFinding:
    """One reason not to believe a launch's speculation."""

    problem: AcceptanceProblem
    digest: str
    """Of the config."""
    detail: str


def acceptance_findings(observations: Iterable[Observation]) -> tuple[AcceptanceFinding, ...]:
    """Check the speculation counters of every measurement that has K > 0.

    Head and engine fail here without a word: a head that runs sequentially, stale draft caches, a server that
    ignores the drafter (vLLM issues #42004, #43010 and #52873).
    """
    found = []
    for seen in observations:
        if seen.failure is None and seen.config.is_speculative:
            problem = _problem(seen)
            if problem is not None:
                found.append(AcceptanceFinding(problem[0], seen.config.digest, problem[1]))
    return tuple(found)


def _problem(seen: Observation) -> tuple[AcceptanceProblem, str] | None:
    counters, label = seen.counters, seen.config.label()
    if seen.config.speculation_off_above is not None and not counters.num_drafts:
        return None  # the batch may never have been small enough to draft
    if not counters.has_speculation or not counters.num_drafts:
        detail = f"{label}: the server counted {counters.num_drafts:.0f} drafts"
        return AcceptanceProblem.NO_COUNTERS, detail
    rates = counters.per_position_acceptance_rates
    if not rates or rates[0] <= 0:
        return AcceptanceProblem.NOTHING_ACCEPTED, f"{label}: {counters.num_drafts:.0f} drafts"
    for i, (before, after) in enumerate(zip(rates, rates[1:], strict=False)):
        if after > before:
            detail = f"{label}: position {i + 1} {after:.1%}, position {i} {before:.1%}"
            return AcceptanceProblem.NOT_MONOTONE, detail
    return None


@dataclass(frozen=True)
class StepTokens:
    """What one decode step brings."""

    mean: float
    """Acceptance length: accepted drafts and the bonus token."""
    sd_ratio: float
    """Standard deviation of the belief about `mean`, as a share of it."""
    cv: float
    """Coefficient of variation of the tokens from step to step."""


PLAIN_STEP = StepTokens(1.0, 0.0, 0.0)


class Acceptance:
    """Survivals of one drafter, learnt from counters."""

    def __init__(self, trained_depth: int | None = None) -> None:
        """Start from the prior; a trained depth of None means that no cliff is known of."""
        depth = MAX_NUM_SPECULATIVE_TOKENS
        self._trained_depth = trained_depth or depth
        self._means, self._covariance = _prior(self._trained_depth)
        self._tokens: dict[tuple[int, int, bool, bool], StepTokens] = {}

    def fit(self, observations: Sequence[Observation]) -> None:
        """Learn from the counters of measurements with this drafter; replaces what was learnt."""
        self._tokens = {}
        prior_means, prior_covariance = _prior(self._trained_depth)
        rows, values, errors = [], [], []
        for seen in observations:
            for row, value, error in _ratios(seen):
                rows.append(row)
                values.append(value)
                errors.append(error)
        if not rows:
            self._means, self._covariance = prior_means, prior_covariance
            return
        design = np.array(rows) / np.array(errors)[:, None]
        wanted = np.array(values) / np.array(errors)
        precision = np.linalg.inv(prior_covariance)
        self._covariance = np.linalg.inv(precision + design.T @ design)
        self._means = self._covariance @ (precision @ prior_means + design.T @ wanted)

    def survivals(self, config: ServingConfig) -> FloatArray:
        """Return P(the first i + 1 levels are all accepted), for each level of the config's tree or chain."""
        means = _design(config) @ self._means
        logs = np.minimum(means, -1e-4).cumsum()
        chain: FloatArray = np.exp(logs)
        if config.tree_width == 1:
            return chain
        root = _widened(float(chain[0]), config.tree_width)
        widened: FloatArray = chain * (root / chain[0])
        return widened

    def tokens(self, config: ServingConfig) -> StepTokens:
        """Return what a step of the config brings while it drafts."""
        k = config.num_speculative_tokens
        if k == 0:
            return PLAIN_STEP
        key = (k, config.tree_width, config.weights == "fp8", config.kv_cache_dtype == "fp8")
        if key not in self._tokens:
            self._tokens[key] = self._step_tokens(config)
        return self._tokens[key]

    def _step_tokens(self, config: ServingConfig) -> StepTokens:
        survivals = self.survivals(config)
        mean = 1.0 + float(survivals.sum())
        # d mean / d ratio_j is the sum of the survivals from j on.
        slope = survivals[::-1].cumsum()[::-1] @ _design(config)
        sd = math.sqrt(max(float(slope @ self._covariance @ slope), 0.0))
        if config.tree_width > 1:
            sd = math.hypot(sd, TREE_ERROR * (mean - 1))
        # E[L^2] of L = 1 + accepted: the sum over i of (2 i + 3) P(accepted > i), and 1.
        levels = np.arange(len(survivals))
        variance = 1.0 + float(((2 * levels + 3) * survivals).sum()) - mean**2
        return StepTokens(mean, sd / mean, math.sqrt(max(variance, 0.0)) / mean)


def fit_acceptances(
    drafters: Iterable[str],
    observations: Sequence[Observation],
    trained_depths: Mapping[str, int | None],
) -> dict[str, Acceptance]:
    """Fit one model for each drafter from all measurements.

    Launches of one drafter share a model whatever their precisions are.

    Args:
        drafters: names as in `ServingConfig.drafter`.
        observations: all of a study.
        trained_depths: by drafter, where it is known.
    """
    models = {}
    for drafter in drafters:
        models[drafter] = Acceptance(trained_depths.get(drafter))
        models[drafter].fit([o for o in observations if o.config.drafter == drafter])
    return models


def _prior_keep(position: int, trained_depth: int) -> float:
    if position == 0:
        return math.log(FIRST_SURVIVAL)
    if position >= trained_depth:
        return math.log(KEEP_BEYOND)
    return math.log(KEEP * DECLINE ** (position - 1))


_SLOPE, _WEIGHTS, _KV = -3, -2, -1


@lru_cache(maxsize=64)
def _prior(trained_depth: int) -> tuple[FloatArray, FloatArray]:
    """Return mean and covariance of (a_0 .. a_31, s, w, v)."""
    depth = MAX_NUM_SPECULATIVE_TOKENS
    means = np.array([*(_prior_keep(i, trained_depth) for i in range(depth)), 0.0, 0.0, 0.0])
    steps = np.array(
        [
            FIRST_SPREAD if i == 0 else CLIFF_SPREAD if i == trained_depth else WALK_SPREAD
            for i in range(depth)
        ]
    )
    # Position 1 keeps what it keeps, however often the first one is right: it begins a walk of its own.
    walk = np.tril(np.ones((depth, depth)))
    walk[1:, 0] = 0.0
    steps[1] = FIRST_SPREAD
    covariance = np.zeros((depth + 3, depth + 3))
    covariance[:depth, :depth] = (walk * steps**2) @ walk.T
    covariance[_SLOPE, _SLOPE] = SLOPE_SPREAD**2
    covariance[_WEIGHTS, _WEIGHTS] = covariance[_KV, _KV] = PRECISION_SPREAD**2
    return means, covariance


def _depth(config: ServingConfig) -> int:
    return config.num_speculative_tokens // config.tree_width


def _design(config: ServingConfig) -> FloatArray:
    """Return the rows that turn the unknowns into the config's log ratios, shape (depth, unknowns)."""
    depth = _depth(config)
    rows = np.zeros((depth, MAX_NUM_SPECULATIVE_TOKENS + 3))
    rows[np.arange(depth), np.arange(depth)] = 1.0
    rows[0, _SLOPE] = 1 / depth
    rows[:, _WEIGHTS] = config.weights == "fp8"
    rows[:, _KV] = config.kv_cache_dtype == "fp8"
    return rows


def _ratios(seen: Observation) -> Iterable[tuple[FloatArray, float, float]]:
    """Return for each level what its survival was of the level before: design row, log, error."""
    counters, config = seen.counters, seen.config
    if not counters.num_drafts or not config.is_speculative:
        return
    survivors = [counters.num_drafts, *counters.num_accepted_tokens_per_pos[: _depth(config)]]
    design = _design(config)
    for level, (before, after) in enumerate(zip(survivors, survivors[1:], strict=False)):
        if before < 1:
            return
        kept = (after + 0.5) / (before + 1.0)
        error = math.hypot(math.sqrt(OVERDISPERSION * (1 - kept) / (before * kept)), FLOOR)
        if level == 0 and config.tree_width > 1:
            kept = 1 - (1 - min(kept, MAX_ROOT_SURVIVAL)) ** (1 / config.tree_width)
            error = math.hypot(error, TREE_ERROR)
        yield design[level], math.log(kept), error


def _widened(survival: float, width: int) -> float:
    """Chance that one of `width` first candidates is right, as if each were so on its own; capped."""
    return max(survival, min(1 - (1 - survival) ** width, MAX_ROOT_SURVIVAL))
