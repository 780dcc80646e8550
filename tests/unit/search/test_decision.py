"""From hand-made measurements to a recommendation; the arithmetic stands beside each number."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from study_helpers import TOKENS, at_tps, config, measurement

from autotune.measure.records import ClientAudit, Measurement
from autotune.report.study import decision_from_dict
from autotune.search.decision import Decision, Finalist, Goal, decide
from autotune.serving.config import ServingConfig


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here depends on the third digit of an interval."""
    monkeypatch.setattr("autotune.measure.stats.NUM_RESAMPLES", 200)


def goal(margin_ratio: float = 0.02, **limits: float) -> Goal:
    return Goal(
        objective="output_throughput_tps",
        is_maximized=True,
        limits={"default": limits} if limits else {},
        margin_ratio=margin_ratio,
    )


MINIMIZE_TPOT = Goal("tpot_mean_ms", False, {}, 0.02)


def finalist(
    of: ServingConfig | int, *measurements: Measurement, roles: tuple[str, ...] = ()
) -> Finalist:
    chosen = of if isinstance(of, ServingConfig) else config(of)
    return Finalist(chosen, roles, measurements, chosen.label())


def baseline(*measurements: Measurement) -> Finalist:
    return finalist(0, *measurements, roles=("no speculation",))


def steady(of: ServingConfig | int, tps: float, **kwargs: Any) -> Finalist:
    """Two launches without any noise."""
    roles = kwargs.pop("roles", ())
    return finalist(of, at_tps(tps, **kwargs), at_tps(tps, **kwargs), roles=roles)


def decided(finalists: Sequence[Finalist], of_goal: Goal, **kwargs: Any) -> Decision:
    decision = decide(finalists, of_goal, **kwargs)
    assert decision is not None
    return decision


# --- who wins ---


def test_a_config_that_fails_once_in_a_while_cannot_win() -> None:
    plain, fast = steady(0, 100, roles=("no speculation",)), steady(4, 200)
    flaky = dataclasses.replace(fast, num_failed=1)

    assert decided([plain, fast], goal()).winner == fast.config.digest
    decision = decided([plain, flaky], goal())

    assert decision.winner == plain.config.digest
    assert not decision.of(flaky.config.digest).is_feasible


def test_a_clear_winner() -> None:
    plain, default, best = (
        steady(0, 100, roles=("no speculation",)),
        steady(8, 160, roles=("default",)),
        steady(4, 200),
    )

    decision = decided([plain, default, best], goal())

    assert decision.winner == best.config.digest
    assert decision.winner_label == "K=4"
    assert decision.reason == (
        "highest output_throughput_tps among the finalists, beyond noise and margin"
    )
    assert decision.gain_over_baseline is not None
    assert decision.gain_over_default is not None
    assert decision.gain_over_baseline.estimate == pytest.approx(200 / 100)
    assert decision.gain_over_default.estimate == pytest.approx(200 / 160)
    assert (decision.gain_over_baseline.low, decision.gain_over_baseline.high) == pytest.approx(
        (2.0, 2.0)
    )  # there is no noise
    # 2 launches of 10 requests on each side.
    assert decision.gain_over_baseline.num_launches == 4
    assert decision.gain_over_baseline.num_requests == 40


def test_the_evidence_of_every_finalist_is_kept() -> None:
    plain = steady(0, 100, roles=("no speculation",))
    best = steady(4, 200, acceptance_length=2.5)

    decision = decided([plain, best], goal())

    kept = decision.of(plain.config.digest)
    assert (kept.label, kept.roles, kept.num_launches) == ("K=0", ("no speculation",), 2)
    assert kept.objective.estimate == pytest.approx(100)
    assert kept.ratio_to_best.estimate == pytest.approx(0.5)
    assert kept.ratio_to_baseline is None
    assert kept.acceptance_length is None
    assert not kept.is_tied_with_best
    kept = decision.of(best.config.digest)
    assert kept.ratio_to_best.estimate == pytest.approx(1)
    assert kept.acceptance_length == pytest.approx(2.5)
    assert kept.is_tied_with_best
    assert (kept.worst_limit, kept.worst_violation, kept.is_feasible) == (None, None, True)
    assert decision.schedule_digest == "0123456789abcdef"
    assert decision.confidence == 0.95


@pytest.mark.parametrize(
    ("tps_of_simpler", "winner"),
    [
        (197, "K=2"),  # 1.5 % below 200: less than the margin of 2 %
        (195, "K=4"),  # 2.5 % below
    ],
)
def test_within_the_margin_the_simpler_config_wins(tps_of_simpler: float, winner: str) -> None:
    decision = decided([steady(0, 100), steady(4, 200), steady(2, tps_of_simpler)], goal(0.02))

    assert decision.winner_label == winner


def test_a_tie_is_told() -> None:
    plain = steady(0, 100, roles=("no speculation",))
    decision = decided([plain, steady(4, 200), steady(2, 197)], goal(0.02))

    assert decision.reason == (
        "tied with K=4, which has the highest output_throughput_tps but not beyond noise and "
        "margin; the simpler config is preferred"
    )
    assert decision.gain_over_baseline is not None
    assert decision.gain_over_baseline.estimate == pytest.approx(1.97)


def test_the_best_says_what_it_is_simpler_than() -> None:
    decision = decided([steady(0, 100), steady(2, 200), steady(4, 198)], goal(0.02))

    assert decision.winner_label == "K=2"
    assert decision.reason == (
        "highest output_throughput_tps, and simpler than what is tied with it: K=4"
    )


def test_without_a_margin_any_difference_beyond_noise_counts() -> None:
    decision = decided([steady(0, 100), steady(4, 200), steady(2, 199.9)], goal(0.0))

    assert decision.winner_label == "K=4"


SHAKY = [0.1, 2.3] * 5
"""Ten requests of 1.2 s on average, each far from it: 12 s and 100 tokens, 8.33 tok/s."""


def test_a_difference_within_noise_is_a_tie() -> None:
    """K = 4 is 4 % better on average, but which requests are drawn decides that.

    K = 2 takes 1.25 s for each request, 8.0 tok/s, against 8.33.
    """
    steadier = finalist(2, measurement([1.25] * 10), measurement([1.25] * 10))
    shaky = finalist(4, measurement(SHAKY), measurement(SHAKY))

    decision = decided([steadier, shaky], goal(0.0))

    assert decision.of(shaky.config.digest).ratio_to_best.estimate == 1
    assert decision.of(steadier.config.digest).ratio_to_best.estimate == pytest.approx(1.2 / 1.25)
    assert decision.winner_label == "K=2"


def test_speculation_is_not_recommended_when_nothing_beats_k_0_beyond_noise() -> None:
    plain = baseline(measurement([1.25] * 10), measurement([1.25] * 10))
    shaky = finalist(4, measurement(SHAKY), measurement(SHAKY))

    decision = decided([plain, shaky], goal(0.0))

    assert decision.winner_label == "K=0"
    assert decision.gain_over_baseline is None  # it is the baseline


def test_k_0_wins_when_speculation_is_slower() -> None:
    decision = decided([steady(0, 100), steady(2, 80), steady(8, 40)], goal())

    assert decision.winner_label == "K=0"


def test_spread_between_launches_counts_as_noise() -> None:
    """Every request of a launch is 30 % off together: launches are resampled, not only requests.

    The launches of K = 4 run at 260 and 160, mean 210, against a steady 200.
    """
    wild = finalist(4, at_tps(260), at_tps(160))

    decision = decided([steady(2, 200), wild], goal(0.0))

    assert decision.winner_label == "K=2"
    assert decision.of(wild.config.digest).ratio_to_best.estimate == 1


def test_prompts_that_are_slow_for_everyone_do_not_blur_the_comparison() -> None:
    """Requests differ tenfold, but K = 4 takes 0.97 of the time for each of them: paired by prompt."""
    slow = [0.2, 2.0] * 5
    faster = [0.97 * took_s for took_s in slow]

    decision = decided(
        [
            finalist(2, measurement(slow), measurement(slow)),
            finalist(4, measurement(faster), measurement(faster)),
        ],
        goal(0.02),
    )

    assert decision.winner_label == "K=4"  # 1 / 0.97 is 3.1 % more


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (config(0), config(1)),
        (config(3), config(4)),
        (config(4), config(4, kv_cache_dtype="fp8")),
        (config(4), config(4, weights="fp8")),
        (config(4, weights="fp8"), config(4, weights="fp8", kv_cache_dtype="fp8")),
        (config(4), config(4, max_num_seqs=64)),
        (config(4), config(4, tree_width=2)),
    ],
)
def test_what_counts_as_simpler(one: ServingConfig, other: ServingConfig) -> None:
    for order in ([one, other], [other, one]):
        decision = decided([steady(of, 100) for of in order], goal())

        assert decision.winner == one.digest


# --- limits ---


def test_the_best_is_not_recommended_when_it_breaks_a_limit() -> None:
    plain, fast = steady(0, 100, ttft_s=0.05), steady(4, 200, ttft_s=0.2)

    decision = decided([plain, fast], goal(ttft_p95_ms=100))

    assert decision.winner_label == "K=0"
    broken = decision.of(fast.config.digest)
    assert not broken.is_feasible
    assert broken.worst_limit == "default.ttft_p95_ms"
    assert broken.worst_violation == pytest.approx(1.0)  # 200 ms are 100 % above 100 ms
    assert broken.ratio_to_best.estimate == pytest.approx(2.0)


def test_an_infeasible_config_cannot_win_by_being_simpler() -> None:
    plain, fast = steady(0, 199, ttft_s=0.04), steady(4, 200, ttft_s=0.01)

    decision = decided([plain, fast], goal(ttft_p95_ms=20))

    assert decision.winner_label == "K=4"


def test_a_limit_is_judged_over_all_launches() -> None:
    # 90 ms and 106 ms: 98 ms on average, 2 % below the limit.
    mixed = finalist(4, at_tps(20, ttft_s=0.09), at_tps(20, ttft_s=0.106))

    decision = decided([steady(0, 10, ttft_s=0.05), mixed], goal(ttft_p95_ms=100))

    assert decision.winner_label == "K=4"
    assert decision.of(mixed.config.digest).worst_violation == pytest.approx(-0.02)


def test_the_limit_that_is_violated_most_is_named() -> None:
    # TTFT 150 ms against 100 is +50 %; TPOT is (0.5 - 0.15) s / 9 = 38.9 ms against 20: +94 %.
    broken = steady(4, 20, ttft_s=0.15)
    good = steady(0, 100, ttft_s=0.01)  # TPOT (0.1 - 0.01) s / 9 = 10 ms

    decision = decided([good, broken], goal(ttft_p95_ms=100, tpot_p95_ms=20))

    assert decision.of(broken.config.digest).worst_limit == "default.tpot_p95_ms"
    assert decision.of(broken.config.digest).worst_violation == pytest.approx(0.35 / 9 / 0.02 - 1)


def test_a_config_that_drops_requests_does_not_keep_its_limits() -> None:
    dropping = steady(4, 200, ttft_s=0.01, num_failed=1)

    decision = decided([steady(0, 100, ttft_s=0.01), dropping], goal(ttft_p95_ms=100))

    assert not decision.of(dropping.config.digest).is_feasible
    assert decision.winner_label == "K=0"


def test_nothing_is_recommended_when_nothing_is_feasible() -> None:
    assert decide([steady(0, 100), steady(4, 200)], goal(ttft_p95_ms=1)) is None


# --- enough launches ---


def test_one_launch_is_not_enough() -> None:
    assert decide([finalist(0, at_tps(100)), finalist(4, at_tps(200))], goal()) is None
    assert decide([], goal()) is None


def test_a_finalist_with_one_launch_is_left_out() -> None:
    decision = decided([steady(0, 100), steady(2, 150), finalist(4, at_tps(500))], goal())

    assert decision.winner_label == "K=2"
    assert [result.label for result in decision.finalists] == ["K=0", "K=2"]


def test_without_a_baseline_there_is_no_gain_over_it() -> None:
    decision = decided([steady(2, 150), steady(4, 300)], goal())

    assert decision.winner_label == "K=4"
    assert decision.gain_over_baseline is None
    assert decision.gain_over_default is None


# --- objectives to be minimised ---


def tpot(of: int, tpot_ms: float) -> Finalist:
    """Two launches without noise: TTFT 10 ms, then 9 more tokens."""
    seconds = [0.01 + (TOKENS - 1) * tpot_ms / 1e3] * 10
    return finalist(of, *[measurement(seconds, ttft_s=0.01)] * 2)


def test_a_latency_is_minimised() -> None:
    plain = dataclasses.replace(tpot(0, 10), roles=("no speculation",))
    decision = decided([plain, tpot(2, 8), tpot(4, 5)], MINIMIZE_TPOT)

    assert decision.winner_label == "K=4"
    assert decision.reason.startswith("lowest tpot_mean_ms")
    assert decision.gain_over_baseline is not None
    assert decision.gain_over_baseline.estimate == pytest.approx(0.5)
    middle = decision.of(config(2).digest).objective
    assert middle is not None
    assert middle.estimate == pytest.approx(8)


@pytest.mark.parametrize(
    ("simpler_ms", "winner"),
    [
        (5.09, "K=2"),  # 1.8 % more
        (5.11, "K=4"),  # 2.2 % more
    ],
)
def test_a_latency_within_the_margin_is_a_tie(simpler_ms: float, winner: str) -> None:
    decision = decided([tpot(0, 10), tpot(4, 5), tpot(2, simpler_ms)], MINIMIZE_TPOT)

    assert decision.winner_label == winner


# --- warnings ---


@pytest.mark.parametrize(
    ("ttft_s", "warning"),
    [
        (0.096, ["default.ttft_p95_ms is only 4.0% below its limit"]),
        (0.094, []),  # 6 % below
        (0.1, ["borderline: the 90 % upper bound of default.ttft_p95_ms is above the limit"]),
    ],
)
def test_a_winner_near_its_limit_is_warned_about(ttft_s: float, warning: list[str]) -> None:
    close = steady(4, 20, ttft_s=ttft_s)

    decision = decided([steady(0, 10, ttft_s=0.01), close], goal(ttft_p95_ms=100.00001))

    assert decision.winner_label == "K=4"
    assert list(decision.warnings) == warning


@pytest.mark.parametrize(
    ("k", "trained_depth", "is_warned"),
    [(8, 8, False), (9, 8, True), (9, None, False), (0, 8, False)],
)
def test_a_winner_beyond_the_trained_depth_is_warned_about(
    k: int, trained_depth: int | None, is_warned: bool
) -> None:
    decision = decided([steady(k, 100)], goal(), trained_depth=trained_depth)

    warnings = ["K = 9 is beyond the drafter's trained depth of 8"] if is_warned else []
    assert list(decision.warnings) == warnings


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [({}, False), ({"weights": "fp8"}, True), ({"kv_cache_dtype": "fp8"}, True)],
)
def test_fp8_is_warned_about(changes: Mapping[str, Any], is_warned: bool) -> None:
    decision = decided([steady(config(4, **changes), 100)], goal())

    assert (
        any("FP8 changes what the model says" in text for text in decision.warnings) is is_warned
    )


def test_only_the_winner_is_warned_about() -> None:
    decision = decided([steady(0, 200), steady(config(4, weights="fp8"), 100)], goal())

    assert decision.warnings == ()


@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_simulated_figure_is_marked(is_simulated: bool) -> None:
    decision = decided([steady(4, 100, is_simulated=is_simulated)], goal())

    assert decision.is_simulated is is_simulated
    assert ("simulated: no real server was measured" in decision.warnings) is is_simulated


# --- keeping it ---


def test_a_decision_survives_the_trip_through_json() -> None:
    decision = decided(
        [
            steady(0, 100, ttft_s=0.01, roles=("no speculation",)),
            steady(config(8, flags=(("a", 1),)), 150, ttft_s=0.01, roles=("default",)),
            steady(4, 200, ttft_s=0.048, acceptance_length=2.0),
        ],
        goal(ttft_p95_ms=50),
    )

    again = decision_from_dict(json.loads(json.dumps(decision.as_dict())))

    assert again == decision
    assert again.of(config(4).digest).objective.estimate == pytest.approx(200)


def test_the_same_measurements_give_the_same_decision() -> None:
    finalists = [
        finalist(0, measurement(SHAKY), measurement(SHAKY[::-1])),
        finalist(4, measurement([1.0, 1.3] * 5), measurement([1.2, 0.9] * 5)),
    ]

    assert decided(finalists, goal()) == decided(finalists, goal())


@pytest.mark.parametrize(
    ("cpu_ratio", "word"),
    [(0.9, "was late in 1 of 2"), (0.5, "was nearly late in 1 of 2"), (0.1, None)],
)
def test_a_load_generator_that_was_late_is_told(cpu_ratio: float, word: str | None) -> None:
    late = dataclasses.replace(at_tps(200), audit=ClientAudit(cpu_ratio=cpu_ratio))

    decision = decided(
        [finalist(4, late, at_tps(200)), baseline(at_tps(100), at_tps(100))], goal()
    )

    told = [w for w in decision.warnings if w.startswith("client-limited")]
    assert [word in w for w in told if word] == ([True] if word else [])
    assert len(told) == (word is not None)


@pytest.mark.parametrize(
    ("objective", "concurrency", "is_told"),
    [("e2el_mean_ms", None, True), ("e2el_mean_ms", 1, False), ("e2el_p95_ms", None, False)],
)
def test_intervals_that_are_too_narrow_in_open_loop_are_told(
    objective: str, concurrency: int | None, is_told: bool
) -> None:
    of_goal = dataclasses.replace(goal(), objective=objective, is_maximized=False)
    launches = [dataclasses.replace(at_tps(200), concurrency=concurrency)] * 2

    decision = decided([finalist(4, *launches)], of_goal)

    assert any(w.startswith("open loop: ") for w in decision.warnings) is is_told


# --- what it rests on ---


@dataclasses.dataclass(frozen=True)
class Race:
    probability: float
    is_decided: bool
    num_launches: int = 4


def test_the_tied_the_runner_up_and_the_evidence_are_kept() -> None:
    """197 is within 2 % of 200, so it is tied and simpler; 200 is the best of the others."""
    failed = dataclasses.replace(finalist(6), num_failed=1)
    finalists = [steady(4, 200), steady(2, 197), steady(0, 100), failed]
    decision = decided(finalists, goal(0.02), race=Race(0.97, True), is_heldout=True)

    assert decision.tied == (config(2).digest, config(4).digest)
    assert decision.runner_up == config(4).digest
    assert decision.evidence is not None
    assert decision.evidence.num_launches == 7  # three times two, and a failed one
    assert decision.evidence.num_requests == 60
    assert decision.evidence.leader_probability == 0.97
    assert decision.evidence.is_decided
    assert decision.evidence.is_heldout
    assert decision.warnings == ()


def test_alone_there_is_no_runner_up_and_without_a_race_no_probability() -> None:
    decision = decided([steady(2, 100)], goal())

    assert decision.runner_up is None
    assert decision.evidence is not None
    assert decision.evidence.leader_probability is None


def test_a_race_that_ended_with_the_budget_is_told() -> None:
    decision = decided([steady(2, 100)], goal(), race=Race(0.8, False))

    assert any("ended with the budget: with 80 %" in w or "80%" in w for w in decision.warnings)


def test_a_borderline_config_does_not_win_by_being_simpler() -> None:
    """1 % below the limit with 4 % / sqrt(2) of error is in doubt; 20 % below is not."""
    near, far = steady(2, 198, ttft_s=0.0099), steady(4, 200, ttft_s=0.008)
    decision = decided([near, far], goal(0.02, ttft_p95_ms=10.0))
    assert (decision.winner_label, decision.borderline) == ("K=4", ())

    alone = decided([near], goal(0.02, ttft_p95_ms=10.0))
    assert alone.borderline == ("default.ttft_p95_ms",)
    assert any(w.startswith("borderline: the 90 % upper bound") for w in alone.warnings)


def test_failed_requests_are_told() -> None:
    decision = decided([steady(2, 100, num_failed=1)], goal())

    assert any(
        w.startswith("requests failed: 2 ") and w.endswith("of 20") for w in decision.warnings
    )


def test_a_head_of_which_nothing_is_accepted_is_told() -> None:
    decision = decided([steady(2, 100, acceptance_length=1.0)], goal())

    assert "nothing that was drafted was accepted; check the head" in decision.warnings
