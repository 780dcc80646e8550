"""Racing the finalists: which one is launched next, and when enough is known.

Everything is computed from the finalists' measurements, so a race that was cut off goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.measure.distributions import t_quantile
from autotune.measure.metrics import observed, violations
from autotune.search.decision import (
    BASELINE_ROLE,
    DEFAULT_ROLE,
    LIMIT_CONFIDENCE,
    PRIOR_FREEDOM,
    PRIOR_TAIL_SPREAD,
    Finalist,
    Goal,
)

FloatArray = npt.NDArray[np.float64]

CONFIDENCE = 0.95
"""That the leader is within the practical margin of the best, for the race to end."""
PRIOR_SPREAD = 0.015
"""Spread between launches of one config that is believed before any was repeated. Judgement: the CPU demo
shows 2 to 4 %, reports of GPUs 0.3 to 1.8 %."""
MAX_FAILED = 2
"""Failed launches of a point of comparison after which it is given up."""
NUM_DRAWS = 4000
MIN_GAP_RATIO = 0.5
"""Of the margin: differences below it are not told apart, however near two configs are."""


@dataclass(frozen=True)
class RaceStep:
    """What to launch next, or why nothing more is launched."""

    next_digest: str | None
    leader: str | None
    """Digest of the finalist that is ahead among those that keep every limit; None without any."""
    probability: float
    """That the leader is within the practical margin of the best of them."""
    reason: str
    is_decided: bool
    num_launches: int = 0
    """Of all finalists so far."""


@dataclass(frozen=True)
class _Runner:
    """One finalist as the race sees it."""

    finalist: Finalist
    num_launches: int
    gain: float
    """Mean log objective, turned so that more is better; minus infinity without any."""
    worst_limit: float
    """Mean log ratio to the limit that is nearest to broken; minus infinity without limits."""
    limit_error: float
    is_out: bool
    """Whether it cannot win any more."""
    last_s: float
    """When it was launched last."""

    @property
    def digest(self) -> str:
        return self.finalist.config.digest

    @property
    def is_feasible(self) -> bool:
        return not self.is_out and self.worst_limit <= 0 and math.isfinite(self.gain)


def race_step(
    finalists: Sequence[Finalist], goal: Goal, max_launches: int, min_launches: int = 2
) -> RaceStep:
    """Say which finalist is launched next.

    First every finalist is launched `min_launches` times, in rounds, every other one backwards, so that a
    steady drift of the machine cancels. From then on launches go where they decide most, by optimal computing
    budget allocation (Chen et al. 2000, Discrete Event Dynamic Systems 10): to each challenger in
    proportion to 1 / gap^2, to the leader the root of the sum of their squares. None is launched twice in
    a row while another one is wanted as well.

    The race is decided when, with 95 % probability, the leader is within the practical margin of the best
    finalist that keeps every limit, when the leader's own limits are kept beyond doubt, and when no simpler
    finalist is left that is behind by more than the margin and might yet be as good, since the decision
    would prefer it.

    Args:
        finalists: all of them, in the order in which a round launches them.
        goal: objective, limits and margin.
        max_launches: of the whole race; failed ones count.
        min_launches: of every finalist that can still win, and of the points of comparison.
    """
    spread, freedom = _spread(finalists, goal)
    runners = [_runner(f, goal) for f in finalists]
    total = sum(r.num_launches for r in runners)
    leader = max((r for r in runners if r.is_feasible), key=lambda r: r.gain, default=None)
    probability = _probability(runners, leader, goal, spread, freedom)

    def step(runner: _Runner | None, reason: str, *, is_decided: bool = False) -> RaceStep:
        return RaceStep(
            next_digest=runner.digest if runner is not None else None,
            leader=leader.digest if leader is not None else None,
            probability=probability,
            reason=reason,
            is_decided=is_decided,
            num_launches=total,
        )

    starter = _next_of_round(runners, min_launches)
    if starter is not None:
        return step(starter, f"the first {min_launches} launches of every finalist")
    open_runners = [r for r in runners if not r.is_out]
    if leader is None and not open_runners:
        return step(None, "no finalist keeps every limit", is_decided=True)
    doubts = _doubts(runners, leader, goal, spread, freedom)
    if leader is not None and probability >= CONFIDENCE and not doubts:
        return step(None, "decided", is_decided=True)
    if total >= max_launches:
        return step(None, "budget")
    if leader is None:
        nearest = min(open_runners, key=lambda r: (r.worst_limit, r.num_launches))
        return step(nearest, "the nearest to keeping every limit")
    if probability >= CONFIDENCE:
        return step(_alternated(doubts, runners), "what would be preferred is not ruled out yet")
    return step(
        _by_budget(open_runners, leader, runners, goal, spread), "told apart from the leader"
    )


def _next_of_round(runners: Sequence[_Runner], min_launches: int) -> _Runner | None:
    wanted = [r for r in runners if r.num_launches < min_launches and not _is_hopeless(r)]
    if not wanted:
        return None
    number = min(r.num_launches for r in wanted)
    of_round = [r for r in wanted if r.num_launches == number]
    return of_round[-1] if number % 2 else of_round[0]


def _is_hopeless(runner: _Runner) -> bool:
    """Whether more launches of it tell nothing: it is out, and no point of comparison."""
    is_reference = bool({BASELINE_ROLE, DEFAULT_ROLE} & set(runner.finalist.roles))
    return runner.is_out and not (is_reference and runner.finalist.num_failed < MAX_FAILED)


def _by_budget(
    open_runners: Sequence[_Runner],
    leader: _Runner,
    runners: Sequence[_Runner],
    goal: Goal,
    spread: float,
) -> _Runner:
    floor = MIN_GAP_RATIO * goal.margin_ratio
    shares = {
        r.digest: (spread / max(leader.gain - r.gain, floor)) ** 2
        for r in open_runners
        if r is not leader and math.isfinite(r.gain)
    }
    if not shares:
        return leader
    shares[leader.digest] = math.sqrt(sum(share**2 for share in shares.values()))
    whole = sum(shares.values())
    racing = [r for r in open_runners if r.digest in shares]
    total = sum(r.num_launches for r in racing) + 1
    lacking = {r.digest: total * shares[r.digest] / whole - r.num_launches for r in racing}
    ordered = sorted(racing, key=lambda r: lacking[r.digest], reverse=True)
    wanted = [r for r in ordered if lacking[r.digest] > 0] or ordered[:1]
    return _alternated(wanted, runners)


def _alternated(wanted: Sequence[_Runner], runners: Sequence[_Runner]) -> _Runner:
    """Return the first that was not the last one launched; that one when it stands alone."""
    last = max(runners, key=lambda r: r.last_s)
    return next((r for r in wanted if r is not last), wanted[0])


def _doubts(
    runners: Sequence[_Runner],
    leader: _Runner | None,
    goal: Goal,
    spread: float,
    freedom: int,
) -> list[_Runner]:
    """Return who has to be launched more although the leader is known to be good, first the least known."""
    if leader is None:
        return []
    found: list[_Runner] = []
    bound = _limit_quantile(leader.num_launches) * leader.limit_error
    if math.isfinite(leader.worst_limit) and leader.worst_limit + bound > 0:
        found.append(leader)
    margin = math.log1p(goal.margin_ratio)
    for r in runners:
        if r is leader or not r.is_feasible:
            continue
        if r.finalist.config.simplicity >= leader.finalist.config.simplicity:
            continue
        behind = leader.gain - r.gain
        error = spread * math.sqrt(1 / r.num_launches + 1 / leader.num_launches)
        if margin < behind < t_quantile((1 + CONFIDENCE) / 2, freedom) * error:
            found += [r, leader]
    return sorted(dict.fromkeys(found), key=lambda r: r.num_launches)


def _probability(
    runners: Sequence[_Runner],
    leader: _Runner | None,
    goal: Goal,
    spread: float,
    freedom: int,
) -> float:
    """Return the probability that the leader is within the margin of the best that keeps every limit.

    By draws from the posterior of the means under one unknown spread: normal means given the spread, the
    spread's square inverse chi-square (Gelman et al. 2013, section 3.2).
    """
    if leader is None:
        return 0.0
    racing = [r for r in runners if r.is_feasible]
    rng = np.random.default_rng(0)
    spreads = spread * np.sqrt(freedom / rng.chisquare(freedom, NUM_DRAWS))
    means = np.array([r.gain for r in racing])
    errors = np.array([1 / math.sqrt(r.num_launches) for r in racing])
    draws = means + rng.standard_normal((NUM_DRAWS, len(racing))) * errors * spreads[:, None]
    own = draws[:, racing.index(leader)]
    within: FloatArray = draws.max(axis=1) - own <= math.log1p(goal.margin_ratio)
    return float(np.mean(within))


def _spread(finalists: Sequence[Finalist], goal: Goal) -> tuple[float, int]:
    """Return the spread between launches of one config in log objective, and its degrees of freedom."""
    return _pooled([_gains(f, goal) for f in finalists], PRIOR_SPREAD)


def _pooled(groups: Sequence[FloatArray], prior: float) -> tuple[float, int]:
    squares, freedom = PRIOR_FREEDOM * prior**2, PRIOR_FREEDOM
    for group in groups:
        values = group[np.isfinite(group)]
        if len(values) > 1:
            squares += float(((values - values.mean()) ** 2).sum())
            freedom += len(values) - 1
    return math.sqrt(squares / freedom), freedom


def _gains(finalist: Finalist, goal: Goal) -> FloatArray:
    sign = 1.0 if goal.is_maximized else -1.0
    values = [observed(goal.objective, m, goal.limits) for m in finalist.measurements]
    return np.array([sign * math.log(v) if 0 < v < math.inf else -math.inf for v in values])


def _runner(finalist: Finalist, goal: Goal) -> _Runner:
    gains = _gains(finalist, goal)
    worst, error = _worst_limit(finalist, goal)
    is_bad = finalist.quality is not None and not finalist.quality.is_feasible
    is_broken = (
        len(finalist.measurements) >= 2
        and worst - _limit_quantile(len(finalist.measurements)) * error > 0
    )
    # Once it has counted nothing in a launch, its mean log objective stays minus infinity.
    is_empty = len(gains) >= 2 and not np.isfinite(gains).all()
    return _Runner(
        finalist=finalist,
        num_launches=len(finalist.measurements) + finalist.num_failed,
        gain=float(gains.mean()) if len(gains) else -math.inf,
        worst_limit=worst,
        limit_error=error,
        # One that fails once in a while cannot win, see `decide`.
        is_out=is_bad or is_broken or is_empty or finalist.num_failed > 0,
        last_s=max((m.started_at_s for m in finalist.measurements), default=0.0),
    )


def _limit_quantile(num_launches: int) -> float:
    """Return Student's quantile for a limit, whose spread comes from these launches and the prior alone."""
    return t_quantile(LIMIT_CONFIDENCE, num_launches - 1 + PRIOR_FREEDOM)


def _worst_limit(finalist: Finalist, goal: Goal) -> tuple[float, float]:
    """Return the mean log ratio to the limit nearest to broken, and its standard error."""
    if not finalist.measurements or not goal.limits:
        return -math.inf, 0.0
    rows = [violations(m, goal.limits) for m in finalist.measurements]
    found = []
    for name in rows[0]:
        ratios = [1 + row[name] for row in rows]
        if min(ratios) <= 0:
            continue  # no request was of this class
        values = np.log(np.array(ratios))
        if not np.isfinite(values).all():
            return math.inf, 0.0
        spread, _ = _pooled([values], PRIOR_TAIL_SPREAD)
        found.append((float(values.mean()), spread / math.sqrt(len(values))))
    return max(found, default=(-math.inf, 0.0))
