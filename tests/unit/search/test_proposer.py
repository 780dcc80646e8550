"""Which candidate is launched next: the arithmetic, with models that are told what to believe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from study_helpers import make_profile, make_setup, make_space

from autotune.search.candidates import Candidates
from autotune.search.decision import Goal
from autotune.search.proposer import (
    LAUNCH_PRIOR,
    LAUNCH_WIDTH,
    MIN_FAILED_VALUE,
    Proposer,
)
from autotune.search.surrogate import OBJECTIVE, Observation, Predictions, Surrogate
from autotune.serving.failures import FailureKind

MAXIMIZED = Goal("output_throughput_tps", is_maximized=True, limits={}, margin_ratio=0.02)
MINIMIZED = Goal("e2el_mean_ms", is_maximized=False, limits={}, margin_ratio=0.02)
LIMIT = "default.tpot_p95_ms"
NUM = 11
"""Candidates: K from 0 to 10, in this order."""


class Believer(Surrogate):
    """Believes what it is told, whatever is measured."""

    def __init__(
        self,
        means: Sequence[float],
        sd: float = 0.1,
        limits: Mapping[str, tuple[Sequence[float], float]] | None = None,
        error: float | None = None,
        name: str = "believer",
    ) -> None:
        self.name = name
        self._means = {OBJECTIVE: np.array(means, dtype=np.float64)}
        self._sds = {OBJECTIVE: np.full(len(means), sd)}
        for limit, (mean, width) in (limits or {}).items():
            self._means[limit] = np.array(mean, dtype=np.float64)
            self._sds[limit] = np.full(len(means), width)
        self._error = error
        self.num_fits = 0

    def fit(self, observations: Sequence[Observation]) -> None:
        self.num_fits += 1

    def predict(self, indices: npt.NDArray[np.intp] | None = None) -> Predictions:
        return Predictions(self._means, self._sds)

    def leave_one_out(self) -> Mapping[str, float]:
        return {} if self._error is None else {OBJECTIVE: self._error}


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> Candidates:
    space = make_space(beyond_trained_depth=True)
    setup = make_setup(tmp_path_factory.mktemp("space"), space=space)
    ordered = sorted(setup.candidates.items, key=lambda c: c.config.num_speculative_tokens)
    assert ordered == list(setup.candidates.items)
    assert [c.config.num_speculative_tokens for c in ordered] == list(range(NUM))
    return setup.candidates


def measured(candidates: Candidates, k: int, value: float = 100.0, **more: float) -> Observation:
    fields = {"launch_s": 30.0, "duration_s": 10.0, **more}
    return Observation(
        candidates.items[k].config,
        1,
        True,
        outputs={OBJECTIVE: math.log(value)},
        errors={OBJECTIVE: 0.01},
        **fields,  # type: ignore[arg-type]  # figures of the launch, by name
    )


def two_knobs(
    folder: Path, depths: Sequence[int]
) -> tuple[Candidates, dict[tuple[int, int | None], int]]:
    """Candidates that differ in K and in the limit of running requests (2, 4, default), and where each is."""
    profile = make_profile(folder, load={"kind": "concurrency", "concurrency": 8})
    space = make_space({"num_speculative_tokens": list(depths), "max_num_seqs": [2, 4]})
    found = make_setup(folder, profile=profile, space=space).candidates
    return found, {
        (c.config.num_speculative_tokens, c.config.max_num_seqs): i
        for i, c in enumerate(found.items)
    }


def failed(
    candidates: Candidates, k: int, kind: FailureKind = FailureKind.LAUNCH_ERROR
) -> Observation:
    return Observation(candidates.items[k].config, None, True, failure=kind)


def proposer(
    candidates: Candidates, *models: Surrogate, goal: Goal = MAXIMIZED, closed: bool = False
) -> Proposer:
    """Open loop by default: the seconds of a measurement then do not depend on what is believed."""
    return Proposer(candidates, goal, models, is_closed_loop=closed)


def configs_of(candidates: Candidates, *depths: int) -> set:  # type: ignore[type-arg]
    return {candidates.items[k].config for k in depths}


def launch_chance(k: int, succeeded: Sequence[int] = (), crashed: Sequence[int] = ()) -> float:
    """Average of what became of the launches near K and of one launch's weight of the prior."""
    near = {j: math.exp(-0.5 * ((k - j) / 10 / LAUNCH_WIDTH) ** 2) for j in (*succeeded, *crashed)}
    return (LAUNCH_PRIOR + sum(near[j] for j in succeeded)) / (1 + sum(near.values()))


# --- the expected improvement ---


@pytest.mark.parametrize("sd", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("mean", [4.5, 5.0, 5.2])
def test_the_expected_improvement_is_the_integral_that_defines_it(
    candidates: Candidates, mean: float, sd: float
) -> None:
    """E[max(y - best, 0)] with y normal: by quadrature here, by Jones' closed form there."""
    best = 4.9
    means = [best] + [-50.0] * (NUM - 1)
    means[7] = mean
    mine = proposer(candidates, Believer(means, sd))
    mine.learn([measured(candidates, 0)])

    proposal = mine.propose(configs_of(candidates, 0), 0)

    low, high = best, max(best, mean) + 10 * sd
    expected, _ = quad(
        lambda y: (y - best) * norm.pdf(y, mean, sd), low, high, points=[max(mean, low)], limit=200
    )
    assert proposal is not None
    assert proposal.index == 7
    assert proposal.expected_gain_ratio == pytest.approx(
        expected * launch_chance(7, succeeded=[0]), rel=1e-6, abs=1e-12
    )
    assert proposal.predicted == pytest.approx(math.exp(mean))


def test_for_a_latency_the_improvement_is_downwards(candidates: Candidates) -> None:
    """The mirrored belief about a latency has the same expected improvement as a throughput's."""
    means = np.linspace(5.0, 5.3, NUM)
    up = proposer(candidates, Believer(list(means)))
    down = proposer(candidates, Believer(list(-means)), goal=MINIMIZED)
    for one in (up, down):
        one.learn([measured(candidates, 0)])
    tried = configs_of(candidates, 0)
    higher, lower = up.propose(tried, 0), down.propose(tried, 0)

    assert higher is not None
    assert lower is not None
    assert higher.index == lower.index == 10
    assert higher.expected_gain_ratio == pytest.approx(lower.expected_gain_ratio)
    assert lower.predicted == pytest.approx(math.exp(-5.3))


def test_the_chance_that_limits_are_kept_is_a_factor(candidates: Candidates) -> None:
    """A limit believed exactly at its bound is kept with 1/2, two of them, independent, with 1/4."""
    means = [5.0] + [-50.0] * (NUM - 1)
    means[6] = 5.4
    on_the_edge = [-9.0] * NUM
    on_the_edge[6] = 0.0
    limits = {LIMIT: (on_the_edge, 0.1), "default.ttft_p95_ms": (on_the_edge, 0.3)}
    free = proposer(candidates, Believer(means, 0.05))
    bound = proposer(candidates, Believer(means, 0.05, limits))
    for one in (free, bound):
        one.learn([measured(candidates, 0)])
    tried = configs_of(candidates, 0)

    without, within = free.propose(tried, 0), bound.propose(tried, 0)

    assert without is not None
    assert within is not None
    assert within.index == without.index == 6
    assert within.expected_gain_ratio == pytest.approx(without.expected_gain_ratio / 4)
    assert within.feasible_probability == pytest.approx(launch_chance(6, [0]) / 4)


def test_a_limit_that_one_standard_deviation_breaks_is_kept_in_a_sixth_of_cases(
    candidates: Candidates,
) -> None:
    means = [5.0] + [5.5] * (NUM - 1)
    model = Believer(means, 0.05, {LIMIT: ([-9.0] + [0.2] * (NUM - 1), 0.2)})
    mine = proposer(candidates, model)
    mine.learn([measured(candidates, 0)])
    proposal = mine.propose(configs_of(candidates, 0), 0)
    assert proposal is not None
    # P(Z < -1) = 0.158655 (any table of the normal distribution).
    launches = launch_chance(proposal.index, [0])
    assert proposal.feasible_probability == pytest.approx(0.158655 * launches, rel=1e-4)


# --- whether it launches ---


def test_a_failed_launch_casts_doubt_on_its_neighbours_most(candidates: Candidates) -> None:
    means = [5.0] + [5.5] * (NUM - 1)
    mine = proposer(candidates, Believer(means, 0.05))
    mine.learn([measured(candidates, 0), failed(candidates, 5)])

    proposal = mine.propose(configs_of(candidates, 0, 5), 0)

    # All are believed equally good, so their chances decide: K = 1 has the success next to it.
    chances = {k: launch_chance(k, [0], [5]) for k in range(1, NUM) if k != 5}
    assert min(chances, key=lambda k: chances[k]) in {4, 6}
    best = max(chances, key=lambda k: chances[k])
    assert proposal is not None
    assert proposal.index == best
    assert proposal.feasible_probability == pytest.approx(chances[best])


@pytest.mark.parametrize("kind", [FailureKind.LAUNCH_TIMEOUT, FailureKind.CLIENT_OVERLOADED])
def test_what_a_config_is_not_to_blame_for_casts_no_doubt(
    candidates: Candidates, kind: FailureKind
) -> None:
    means = [5.0] + [-50.0] * (NUM - 1)
    means[6] = 5.5
    mine = proposer(candidates, Believer(means, 0.05))
    mine.learn([measured(candidates, 0), failed(candidates, 5, kind)])
    proposal = mine.propose(configs_of(candidates, 0, 5), 0)
    assert proposal is not None
    assert proposal.index == 6
    assert proposal.feasible_probability == pytest.approx(launch_chance(6, [0]))


def test_a_value_that_only_ever_failed_is_held_to_be_the_cause(tmp_path: Path) -> None:
    """Two limits of running requests, K 0 to 3: all with one limit failed. Elsewhere nothing did."""
    found, at = two_knobs(tmp_path, [0, 1, 2, 3])
    crashed = [at[0, 4], at[1, 4]]
    assert len(crashed) == MIN_FAILED_VALUE
    seen = [
        measured(found, at[0, 2]),
        *(failed(found, i) for i in crashed),
        measured(found, at[1, 2]),
    ]
    means = [0.0] * len(found.items)
    means[at[3, 4]] = 5.0  # far the best, if only it came up
    mine = proposer(found, Believer(means, 0.01))
    mine.learn(seen)

    proposal = mine.propose({o.config for o in seen}, 0)

    assert proposal is not None
    assert proposal.index == at[3, 4]
    # Two failures and no success: the prior has the weight of one launch among three.
    assert proposal.feasible_probability <= LAUNCH_PRIOR / 3 + 1e-12


def test_when_nothing_is_expected_to_pay_the_best_by_belief_is_taken(
    candidates: Candidates,
) -> None:
    """So far below the best that the improvement underflows to nothing at all."""
    means = [100.0] + [float(k) for k in range(1, NUM)]
    mine = proposer(candidates, Believer(means, 1e-6))
    mine.learn([measured(candidates, 0)])
    proposal = mine.propose(configs_of(candidates, 0), 0)
    assert proposal is not None
    assert proposal.expected_gain_ratio == 0
    assert proposal.index == 10


# --- before anything feasible is known ---


def test_without_a_feasible_config_the_chance_leads(candidates: Candidates) -> None:
    """K = 9 is the fastest and hopeless; K = 2 is slow and probably keeps the limit."""
    means = [5.0] * NUM
    means[9], means[2] = 6.0, 4.8
    late = [0.5] * NUM
    late[2] = -0.3
    mine = proposer(candidates, Believer(means, 0.1, {LIMIT: (late, 0.1)}))
    mine.learn([measured(candidates, 0)])

    proposal = mine.propose(configs_of(candidates, 0), 0)

    assert mine.ranking() == []
    assert mine.expected_gain_ratio(configs_of(candidates, 0)) == math.inf
    assert proposal is not None
    assert proposal.index == 2


def test_of_equally_likely_ones_the_better_is_tried_first(candidates: Candidates) -> None:
    means = [5.0] * NUM
    means[7] = 5.4
    mine = proposer(candidates, Believer(means, 0.1, {LIMIT: ([0.05] * NUM, 0.1)}))
    mine.learn([measured(candidates, 0)])
    proposal = mine.propose(configs_of(candidates, 0), 0)
    assert proposal is not None
    assert proposal.index == 7


# --- when there is nothing to propose ---


def test_before_anything_was_measured_nothing_is_proposed(candidates: Candidates) -> None:
    model = Believer([5.0] * NUM)
    mine = proposer(candidates, model)
    assert mine.propose(set(), 0) is None

    mine.learn([failed(candidates, 0), failed(candidates, 8)])

    assert mine.propose(configs_of(candidates, 0, 8), 0) is None
    assert mine.ranking() == []
    assert mine.trusted is None
    assert mine.expected_gain_ratio(set()) == 0
    assert model.num_fits == 0  # at least one observation with outputs is promised to a model


def test_when_all_were_tried_nothing_is_proposed(candidates: Candidates) -> None:
    mine = proposer(candidates, Believer([5.0] * NUM))
    mine.learn([measured(candidates, k) for k in range(NUM)])
    everything = configs_of(candidates, *range(NUM))
    assert mine.propose(everything, 0) is None
    assert mine.expected_gain_ratio(everything) == 0


def test_what_was_tried_is_not_proposed_again(candidates: Candidates) -> None:
    mine = proposer(candidates, Believer([5.0] * 10 + [9.0]))
    mine.learn([measured(candidates, 0)])
    tried = configs_of(candidates, 0)
    order = []
    while (proposal := mine.propose(tried, 0)) is not None:
        order.append(proposal.index)
        tried |= configs_of(candidates, proposal.index)
    assert order[0] == 10
    assert sorted(order) == list(range(1, NUM))


# --- two models ---


@pytest.mark.parametrize(
    ("errors", "names"),
    [
        # The cost model predicts better: every third is the other one's.
        ((0.01, 0.05), "CCFCCFCCF"),
        # It does not: every second one.
        ((0.05, 0.01), "CFCFCFCFC"),
        # Nobody can tell yet: the first is trusted in advance.
        ((None, None), "CCFCCFCCF"),
    ],
)
def test_the_models_take_turns(
    candidates: Candidates, errors: tuple[float | None, float | None], names: str
) -> None:
    costs = Believer([5.0] * NUM, error=errors[0], name="C")
    free = Believer([5.0] * NUM, error=errors[1], name="F")
    mine = proposer(candidates, costs, free)
    mine.learn([measured(candidates, 0)])
    tried = configs_of(candidates, 0)
    proposals = [mine.propose(tried, n) for n in range(9)]
    assert "".join(p.model for p in proposals if p is not None) == names


def test_each_model_proposes_by_its_own_belief(candidates: Candidates) -> None:
    costs = Believer([5.0] * 8 + [6.0, 5.0, 5.0], name="C")
    free = Believer([5.0] * 3 + [6.0] + [5.0] * 7, name="F")
    mine = proposer(candidates, costs, free)
    mine.learn([measured(candidates, 0)])
    tried = configs_of(candidates, 0)
    assert [p.index for n in range(3) if (p := mine.propose(tried, n))] == [8, 8, 3]


def test_the_search_is_worth_what_the_most_hopeful_model_expects(candidates: Candidates) -> None:
    hopeful = [5.0] + [-50.0] * (NUM - 2) + [5.1]
    hopeless = Believer([5.0] + [-50.0] * (NUM - 1), 0.01)
    mine = proposer(candidates, hopeless, Believer(hopeful, 0.001, name="F"))
    mine.learn([measured(candidates, 0)])
    # 0.1 above the best by a hundred standard deviations, so the improvement is 0.1 itself.
    expected = 0.1 * launch_chance(10, [0])
    assert mine.expected_gain_ratio(configs_of(candidates, 0)) == pytest.approx(expected)
    assert mine.expected_gain_ratio(configs_of(candidates, 0, 10)) == pytest.approx(0, abs=1e-9)


# --- per second ---


def test_what_shares_a_kind_is_cheaper(tmp_path: Path) -> None:
    """Equal hopes for two configs: the one with the K that launched quickly is taken."""
    found, at = two_knobs(tmp_path, [0, 3, 5])
    means = [-50.0] * len(found.items)
    for key in [(0, 2), (3, 2), (5, 2)]:
        means[at[key]] = 5.0
    for key in [(3, 4), (5, 4)]:
        means[at[key]] = 5.2

    def choice(launch_s: Mapping[int, float]) -> int:
        seen = [measured(found, at[k, 2], launch_s=launch_s[k]) for k in (0, 3, 5)]
        mine = proposer(found, Believer(means, 0.05))
        mine.learn(seen)
        proposal = mine.propose({o.config for o in seen}, 0)
        assert proposal is not None
        # Launch and measurement of its kind.
        k = found.items[proposal.index].config.num_speculative_tokens
        assert proposal.seconds == pytest.approx(launch_s[k] + 10.0)
        return k

    assert choice({0: 30.0, 3: 20.0, 5: 200.0}) == 3
    assert choice({0: 30.0, 3: 200.0, 5: 20.0}) == 5


def test_in_closed_loop_what_is_faster_is_also_measured_faster(candidates: Candidates) -> None:
    """Twice the throughput of what was measured: half of its 10 s."""
    means = [5.0] + [-50.0] * 9 + [5.0 + math.log(2)]
    open_loop = proposer(candidates, Believer(means, 0.01))
    closed_loop = proposer(candidates, Believer(means, 0.01), closed=True)
    found = []
    for one in (open_loop, closed_loop):
        one.learn([measured(candidates, 0)])
        proposal = one.propose(configs_of(candidates, 0), 0)
        assert proposal is not None
        found.append(proposal.seconds)
    assert found == pytest.approx([40.0, 35.0])


# --- the ranking ---


def test_a_lucky_launch_does_not_lead_by_its_luck(candidates: Candidates) -> None:
    """K = 3 measured 130 and K = 5 100; the model believes that K = 5 is the better one."""
    means = [4.0] * NUM
    means[3], means[5] = math.log(95), math.log(100)
    mine = proposer(candidates, Believer(means, 0.02))
    mine.learn([measured(candidates, 0), measured(candidates, 3, 130.0), measured(candidates, 5)])
    ranked = [s.config.num_speculative_tokens for s in mine.ranking()]
    assert ranked == [5, 3, 0]


def test_the_best_of_a_latency_is_the_lowest(candidates: Candidates) -> None:
    mine = proposer(candidates, Believer([5.0 - k / 10 for k in range(NUM)]), goal=MINIMIZED)
    mine.learn([measured(candidates, 0), measured(candidates, 4), measured(candidates, 2)])
    assert [s.config.num_speculative_tokens for s in mine.ranking()] == [4, 2, 0]


def test_only_what_was_measured_whole_and_probably_keeps_limits_is_ranked(
    candidates: Candidates,
) -> None:
    late = [-0.2] * NUM
    late[2] = 0.01  # just more likely above than below
    mine = proposer(candidates, Believer([5.0] * NUM, 0.1, {LIMIT: (late, 0.1)}))
    stopped = Observation(
        candidates.items[4].config,
        1,
        True,
        outputs={OBJECTIVE: 9.0, LIMIT: 0.1},
        is_stopped_early=True,
    )
    rung = Observation(candidates.items[6].config, 1, is_target_load=False)
    mine.learn(
        [measured(candidates, 0), measured(candidates, 2), stopped, rung, failed(candidates, 8)]
    )
    assert [s.config.num_speculative_tokens for s in mine.ranking()] == [0]
    assert mine.num_measured == 2


def test_one_that_was_cut_off_for_being_slow_alone_is_ranked(candidates: Candidates) -> None:
    """When all that are faster turn out to break a limit, it is the best there is."""
    mine = proposer(candidates, Believer([5.0] * NUM, 0.1, {LIMIT: ([-0.2] * NUM, 0.1)}))
    slow = Observation(
        candidates.items[4].config,
        1,
        True,
        outputs={OBJECTIVE: 4.0, LIMIT: -0.1},
        is_stopped_early=True,
    )
    mine.learn([measured(candidates, 0), slow])
    assert {s.config.num_speculative_tokens for s in mine.ranking()} == {0, 4}


def test_the_model_that_predicts_better_is_asked_who_leads(candidates: Candidates) -> None:
    wrong = Believer([5.0 + k for k in range(NUM)], error=0.5, name="C")
    right = Believer([5.0 - k for k in range(NUM)], error=0.1, name="F")
    mine = proposer(candidates, wrong, right)
    mine.learn([measured(candidates, 1), measured(candidates, 9)])
    assert [s.config.num_speculative_tokens for s in mine.ranking()] == [1, 9]
    assert mine.errors == {"C": {OBJECTIVE: 0.5}, "F": {OBJECTIVE: 0.1}}


# --- the whole ---


def test_equal_observations_give_equal_proposals(candidates: Candidates) -> None:
    """One that learnt step by step, and one that is told everything at once, as after a cut."""
    rng = np.random.default_rng(0)
    means = list(5 + rng.normal(0, 0.2, NUM))
    seen = [measured(candidates, 0), measured(candidates, 8), failed(candidates, 9)]
    slowly = proposer(candidates, Believer(means))
    for n in range(len(seen)):
        slowly.learn(seen[: n + 1])
    at_once = proposer(candidates, Believer(means))
    at_once.learn(seen)
    tried = {o.config for o in seen}
    assert slowly.propose(tried, 4) == at_once.propose(tried, 4)


def test_nothing_new_is_not_learnt_again(candidates: Candidates) -> None:
    model = Believer([5.0] * NUM)
    mine = proposer(candidates, model)
    for _ in range(3):
        mine.learn([measured(candidates, 0)])
    assert model.num_fits == 1
