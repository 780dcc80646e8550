"""Which candidate to launch next, and when launching more is not worth its time.

Two models hold a belief about every candidate: the cost model, which knows how serving works, and one that
knows nothing but what was measured. The first is far better where it is right and far worse where it is
wrong, and a handful of measurements cannot say which. So they take turns, and each learns from both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from autotune.search.candidates import Candidates
from autotune.search.costmodel.physics import CostModel
from autotune.search.decision import Goal
from autotune.search.launch_costs import LaunchCosts
from autotune.search.surrogate import OBJECTIVE, FloatArray, Observation, Predictions, Surrogate
from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind
from autotune.serving.memory import MemoryModel

STOP_RATIO = 0.25
"""Of the practical margin: an expected improvement below it is not worth a launch. The expected improvement
averages over the chance that there is none, so a quarter of the margin is a real chance of a whole one."""
MIN_FAILED_FREE = 2
"""Proposals of the physics-free model that must have brought nothing before the search may end: a cost model
that is wrong about where the best is would otherwise end it, sure of itself."""
MAX_WITHOUT_GAIN = 12
"""Proposals in a row without an improvement after which the search ends in any case: with twenty thousand
candidates the physics-free model never stops hoping."""
REACH = 0.08
"""How far behind the best, in log units, a config may be and still be raced: a screen is some percent off."""
MIN_FEASIBLE_PROBABILITY = 0.5
"""For a measured config to be held as the best so far."""
FREE_TURN = 3
"""Every third proposal is the physics-free model's while the cost model predicts better, every second one
where that is not so."""
LAUNCH_PRIOR = 0.97
"""Chance that a candidate launches, before any launch like it was seen."""
LAUNCH_WIDTH = 0.12
"""How far a failed launch casts doubt, as a share of each knob's range."""
MIN_FAILED_VALUE = 2
"""Failures, and no success, after which a knob's value is held to be the cause."""
_BLAMELESS = frozenset(
    {FailureKind.LAUNCH_TIMEOUT, FailureKind.CLIENT_OVERLOADED, FailureKind.CANCELLED}
)


@dataclass(frozen=True)
class Proposal:
    """A candidate to launch, and why."""

    index: int
    """Among the candidates."""
    model: str
    """Name of the model that proposed it."""
    expected_gain_ratio: float
    """Expected improvement over the best so far, as a share of it, weighted by the chance that the
    candidate launches and keeps every limit; without a feasible config so far, that chance alone."""
    feasible_probability: float
    predicted: float
    """The objective, in its own unit."""
    seconds: float
    """What the screen is expected to take."""


@dataclass(frozen=True)
class Standing:
    """The best config so far, by a model's belief about what was measured."""

    config: ServingConfig
    log_objective: float
    feasible_probability: float


@dataclass
class _View:
    """One model's belief after the latest fit, over all candidates."""

    name: str
    gain: FloatArray
    """Mean of the log objective, turned so that more is better."""
    sd: FloatArray
    feasible: FloatArray
    """Probability that all limits are kept, given that it launches."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Leave-one-out errors by output."""


class Proposer:
    """Proposes over the list of candidates. Deterministic: equal observations give equal proposals."""

    def __init__(
        self,
        candidates: Candidates,
        goal: Goal,
        models: Sequence[Surrogate],
        memory: MemoryModel | None = None,
        *,
        is_closed_loop: bool = True,
    ) -> None:
        """Take the models in order of trust: the cost model first where there is one, then the free one.

        Args:
            memory: forecasts which candidates do not fit; learns from every launch.
        """
        self._candidates = candidates
        self._configs = [c.config for c in candidates.items]
        self._index = {config: i for i, config in enumerate(self._configs)}
        self._goal = goal
        self._models = models
        self._memory = memory
        self._costs = LaunchCosts(self._configs)
        self._is_timed_by_throughput = is_closed_loop and goal.is_maximized
        self._observations: tuple[Observation, ...] = ()
        self._views: list[_View] = []
        self._launches = np.ones(len(self._configs))
        self._num_learnt = 0

    # Learning

    def learn(self, observations: Sequence[Observation]) -> None:
        """Take all observations so far into account."""
        if self._views and len(observations) == len(self._observations):
            return
        self._observations = tuple(observations)
        self._learn_memory()
        self._launches = self._launch_probabilities()
        if not any(o.outputs.get(OBJECTIVE) is not None for o in observations):
            self._views = []
            return
        self._views = [self._view(model) for model in self._models]

    def _learn_memory(self) -> None:
        if self._memory is None:
            return
        for seen in self._observations[self._num_learnt :]:
            if not seen.is_target_load or seen.config not in self._index:
                continue
            if seen.failure is not None:
                self._memory.learn_failure(seen.config, seen.failure)
            elif seen.kv_tokens is not None:
                self._memory.learn(seen.config, seen.kv_tokens)
        self._num_learnt = len(self._observations)

    def _view(self, model: Surrogate) -> _View:
        model.fit(self._observations)
        beliefs = model.predict()
        sign = 1.0 if self._goal.is_maximized else -1.0
        return _View(
            model.name,
            sign * beliefs.means[OBJECTIVE],
            np.maximum(beliefs.sds[OBJECTIVE], 1e-9),
            _feasible(beliefs),
            model.leave_one_out(),
        )

    # What is known

    @property
    def trusted(self) -> _View | None:
        """The view that predicts what was measured best; the first where that cannot be told."""
        if not self._views:
            return None
        errors = [view.errors.get(OBJECTIVE, math.inf) for view in self._views]
        best = min(range(len(errors)), key=lambda i: errors[i])
        return self._views[best]

    @property
    def models(self) -> tuple[Surrogate, ...]:
        """All models, the most trusted in advance first."""
        return tuple(self._models)

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Leave-one-out error by model and output."""
        return {view.name: dict(view.errors) for view in self._views}

    @property
    def num_measured(self) -> int:
        """How many configs were measured under the study's load."""
        return len(self._measured())

    @property
    def findings(self) -> list[str]:
        """What is wrong with the speculation counters seen so far."""
        found: dict[str, None] = {}
        for model in self._models:
            if isinstance(model, CostModel):
                found |= dict.fromkeys(
                    f"{finding.digest}: {finding.detail}" for finding in model.findings
                )
        return list(found)

    def ranking(self) -> list[Standing]:
        """Return the measured configs that probably keep every limit, best first.

        The belief is the model's, not the measurement itself: a lucky launch is pulled towards what its
        neighbours and the model say, so it does not win by luck.
        """
        view = self.trusted
        if view is None:
            return []
        ranked = [
            Standing(self._configs[i], view.gain[i], view.feasible[i])
            for i in self._measured()
            if view.feasible[i] >= MIN_FEASIBLE_PROBABILITY
        ]
        return sorted(ranked, key=lambda s: s.log_objective, reverse=True)

    def contenders(self) -> list[ServingConfig]:
        """Return those of the ranking that may yet be the best: the others are not worth a fresh launch."""
        ranked = self.ranking()
        return [s.config for s in ranked if s.log_objective >= ranked[0].log_objective - REACH]

    def _measured(self) -> list[int]:
        found = {
            self._index[o.config]: None
            for o in self._observations
            if o.is_target_load
            and OBJECTIVE in o.outputs
            and o.config in self._index
            # One that was cut off for being slow alone may yet be the best that keeps every limit.
            and not (o.is_stopped_early and _breaks_limit(o))
        }
        return list(found)

    def _launch_probabilities(self) -> FloatArray:
        """Return the chance that each candidate launches and lasts.

        Memory is arithmetic. What else fails is a matter of neighbours: a kernel average over the
        launches so far, with the prior's weight of one launch. And where a value of some knob has failed
        again and again and never launched, it is the value.
        """
        places = self._places
        weights = np.ones(len(self._configs))
        successes = np.full(len(self._configs), LAUNCH_PRIOR)
        for seen in self._observations:
            i = self._index.get(seen.config)
            if i is None or not seen.is_target_load or seen.failure in _BLAMELESS:
                continue
            distance = ((places - places[i]) ** 2).sum(axis=1)
            near = np.exp(-0.5 * distance / LAUNCH_WIDTH**2)
            weights += near
            successes += near * (seen.failure is None)
        chance: FloatArray = successes / weights * self._value_chances()
        if self._memory is not None and self._observations:
            fits = np.array([self._memory.why_not(config) is None for config in self._configs])
            chance = chance * fits
        return chance

    def _value_chances(self) -> FloatArray:
        chance = np.ones(len(self._configs))
        places = self._places
        seen = [
            (self._index[o.config], o.failure is None)
            for o in self._observations
            if o.is_target_load and o.config in self._index and o.failure not in _BLAMELESS
        ]
        if all(is_ok for _, is_ok in seen):
            return chance
        rows = np.array([i for i, _ in seen], dtype=np.intp)
        is_ok = np.array([ok for _, ok in seen])
        for column in places.T:
            for value in np.unique(column[rows]):
                of_value = is_ok[column[rows] == value]
                if len(of_value) >= MIN_FAILED_VALUE and not of_value.any():
                    odds = LAUNCH_PRIOR / (1 + len(of_value))
                    chance[column == value] = np.minimum(chance[column == value], odds)
        return chance

    @cached_property
    def _places(self) -> FloatArray:
        """Where each candidate stands along each knob, from 0 to 1."""
        columns = []
        for dimension in self._candidates.dimensions:
            span = max(len(dimension.values) - 1, 1)
            place = {(type(v), v): i / span for i, v in enumerate(dimension.values)}
            columns.append(
                [
                    place[type(v), v]
                    for v in (c.params[dimension.name] for c in self._candidates.items)
                ]
            )
        return np.array(columns, dtype=np.float64).T.reshape(len(self._configs), -1)

    # What to launch

    def propose(self, tried: set[ServingConfig], num_proposed: int) -> Proposal | None:
        """Choose the candidate with the largest expected improvement per second.

        Args:
            tried: what was launched before.
            num_proposed: proposals made before, which says whose turn it is.

        Returns:
            None when nothing is left, or nothing was measured that could be learnt from.
        """
        is_open = self._is_open(tried)
        if not self._views or not is_open.any():
            return None
        view, worth = self._whose_turn(num_proposed, is_open)
        seconds = self._seconds(view)
        score = np.where(is_open, worth / seconds, -1.0)
        if score.max() <= 0:
            # Nothing launches by this model's belief: the least unlikely, best by its objective.
            score = np.where(is_open, self._launches * np.exp(view.gain - view.gain.max()), -1.0)
        i = int(score.argmax())
        sign = 1.0 if self._goal.is_maximized else -1.0
        return Proposal(
            index=i,
            model=view.name,
            expected_gain_ratio=float(worth[i]),
            feasible_probability=float(view.feasible[i] * self._launches[i]),
            predicted=math.exp(sign * view.gain[i]),
            seconds=float(seconds[i]),
        )

    def expected_gain_ratio(self, tried: set[ServingConfig]) -> float:
        """Return the largest expected improvement that any model sees in any candidate not launched yet.

        Infinite while no config that keeps every limit is known.
        """
        is_open = self._is_open(tried)
        if not self._views or not is_open.any():
            return 0.0
        if not self.ranking():
            return math.inf
        return max(float(self._worth(view)[is_open].max()) for view in self._views)

    def _is_open(self, tried: set[ServingConfig]) -> npt.NDArray[np.bool_]:
        is_open = np.ones(len(self._configs), dtype=bool)
        is_open[[self._index[c] for c in tried if c in self._index]] = False
        return is_open

    def _whose_turn(
        self, num_proposed: int, is_open: npt.NDArray[np.bool_]
    ) -> tuple[_View, FloatArray]:
        """Return the view that proposes, and what each candidate is worth by it.

        A model that expects nothing of any candidate gives its turn to the physics-free one: once the cost
        model is content, what is left to find is what it does not know of.
        """
        turn = FREE_TURN if self.trusted is self._views[0] else 2
        view = self._views[-1 if num_proposed % turn == turn - 1 else 0]
        worth = self._worth(view)
        if worth[is_open].max() <= STOP_RATIO * self._goal.margin_ratio:
            view = self._views[-1]
            worth = self._worth(view)
        return view, worth

    def _worth(self, view: _View) -> FloatArray:
        chance: FloatArray = view.feasible * self._launches
        best = self._best_gain(view)
        if best is None:
            # Any feasible config is an improvement: the chance leads, the objective breaks near ties.
            preferred: FloatArray = np.exp(np.clip(view.gain - view.gain.max(), -2.0, 0.0))
            return chance * preferred
        z: FloatArray = (view.gain - best) / view.sd
        below: FloatArray = ndtr(z)
        density: FloatArray = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        worth: FloatArray = view.sd * (z * below + density) * chance
        return worth

    def _best_gain(self, view: _View) -> float | None:
        known = [
            view.gain[i] for i in self._measured() if view.feasible[i] >= MIN_FEASIBLE_PROBABILITY
        ]
        return float(max(known)) if known else None

    def _seconds(self, view: _View) -> FloatArray:
        log_speed = np.zeros(len(self._configs))
        measured = self._measured()
        if self._is_timed_by_throughput and measured:
            log_speed = view.gain - float(np.mean(view.gain[measured]))
        return self._costs.seconds(self._observations, log_speed)


def _breaks_limit(seen: Observation) -> bool:
    return any(value > 0 for name, value in seen.outputs.items() if name != OBJECTIVE)


def _feasible(beliefs: Predictions) -> FloatArray:
    """Return the probability that every limit is kept, the limits taken as independent."""
    chance = np.ones_like(beliefs.means[OBJECTIVE])
    for name, mean in beliefs.means.items():
        if name != OBJECTIVE:
            chance = chance * ndtr(-mean / np.maximum(beliefs.sds[name], 1e-9))
    return chance
