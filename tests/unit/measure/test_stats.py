"""Intervals: do they hold the truth as often as they say, and does pairing pay?"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autotune.measure import stats
from autotune.measure.launch_spread import LaunchSpread, estimate_launch_spread
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.measure.stats import Interval, metric_interval, ratio_interval


def measurement(
    ttfts_ms: Iterable[float], prompt_ids: Sequence[str] | None = None, error: str | None = None
) -> Measurement:
    """Make one user's measurement, request after request, of 10 tokens each."""
    records, now_s = [], 0.0
    for number, ttft_ms in enumerate(ttfts_ms):
        first_s = now_s + ttft_ms / 1e3
        records.append(
            RequestRecord(
                request_id=number,
                class_name="default",
                prompt_id=prompt_ids[number] if prompt_ids else f"p{number}",
                scheduled_s=None,
                sent_s=now_s,
                chunk_times_s=(first_s,),
                chunk_tokens=(10,),
                finished_s=first_s,
                num_prompt_tokens=5,
                num_completion_tokens=10,
                finish_reason="length",
                error=error,
            )
        )
        now_s = first_s + 1e-6
    return Measurement("digest", 1, 0.0, now_s, tuple(records), ServerCounters())


def width(interval: Interval) -> float:
    return interval.high - interval.low


def holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


@pytest.mark.parametrize("num_repeats", [1, 4])
def test_interval_holds_the_truth_about_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, num_repeats: int
) -> None:
    # Each prompt has its own mean, normal around 100 ms with sd 20; each request adds noise with
    # sd 5. The truth is 100 ms. Repeats of a prompt share its mean: an interval that took them for
    # independent would be half as wide (the square root of 4) and hold the truth in 67% of the
    # cases (0.98 standard errors), not in 95%.
    monkeypatch.setattr(stats, "NUM_RESAMPLES", 200)  # 1000 would only take longer
    rng = np.random.default_rng(20_26)
    num_prompts, num_trials = 40 // num_repeats * 2, 200
    hits = 0
    for trial in range(num_trials):
        means = np.repeat(rng.normal(100, 20, num_prompts), num_repeats)
        names = [f"p{i // num_repeats}" for i in range(len(means))]
        simulated = measurement(means + rng.normal(0, 5, len(means)), names)
        hits += holds(metric_interval("ttft_mean_ms", [simulated], seed=trial), 100.0)
    assert 0.90 <= hits / num_trials <= 0.99


def test_interval_is_around_the_estimate_and_says_what_it_is_made_of() -> None:
    # Four prompts of 90, 100, 110 and 120 ms, the same in both launches. Their sd is 12.91, the
    # standard error 12.91 / sqrt(4) = 6.455, 6.1 % of 105; t(0.975, 3) = 3.182: a factor of
    # exp(3.182 x 0.061) = 1.216. With this few prompts the bootstrap of the logarithm itself is off by
    # a few per cent of that width.
    interval = metric_interval("ttft_mean_ms", [measurement([90, 100, 110, 120])] * 2)
    assert interval.estimate == pytest.approx(105)
    assert interval.low == pytest.approx(105 / 1.216, rel=0.015)
    assert interval.high == pytest.approx(105 * 1.216, rel=0.015)
    assert (interval.num_requests, interval.num_launches) == (8, 2)
    assert interval.confidence == 0.95


def test_equal_requests_leave_no_width() -> None:
    interval = metric_interval("ttft_p95_ms", [measurement([100.0] * 100)])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((100, 100, 100))
    interval = metric_interval("ttft_mean_ms", [measurement([100.0] * 10)])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((100, 100, 100))


def test_a_percentile_of_few_requests_has_no_upper_bound() -> None:
    rng = np.random.default_rng(0)
    few, enough = ([measurement(rng.uniform(80, 120, n))] for n in (58, 59))
    assert not metric_interval("ttft_p95_ms", few).has_upper_bound
    assert metric_interval("ttft_p95_ms", few).high == pytest.approx(
        1e9 * metric_interval("ttft_p95_ms", few).estimate
    )
    assert metric_interval("ttft_p95_ms", enough).has_upper_bound
    assert metric_interval("ttft_p95_ms", enough).high <= 120


# --- launches ---


def test_two_launches_alone_know_their_spread_badly() -> None:
    # No noise within a launch, but 100 ms in one and 120 in the other: logarithms 0.1823 apart, sd
    # 0.1289, standard error 0.0912; t(0.975, 1) = 12.706: a factor of exp(1.158) = 3.18.
    interval = metric_interval(
        "ttft_mean_ms", [measurement([100.0] * 9), measurement([120.0] * 9)]
    )
    assert interval.estimate == pytest.approx(110)
    assert interval.low == pytest.approx(110 / 3.18, rel=2e-3)
    assert interval.high == pytest.approx(110 * 3.18, rel=2e-3)
    assert interval.includes_launch_spread


def test_a_pooled_spread_replaces_their_own() -> None:
    # sd 0.02 known with 8 degrees of freedom: 2.306 x 0.02 / sqrt(2) = 0.0326.
    spread = LaunchSpread("ttft_mean_ms", 0.02**2, 0.0, 8, 12)
    interval = metric_interval(
        "ttft_mean_ms",
        [measurement([100.0] * 9), measurement([120.0] * 9)],
        launch_spread=spread,
    )
    assert math.log(interval.high / 110) == pytest.approx(0.0326, rel=2e-3)


def test_one_launch_speaks_for_itself_unless_a_spread_is_given() -> None:
    launch = [measurement([100.0] * 9)]
    alone = metric_interval("ttft_mean_ms", launch)
    assert not alone.includes_launch_spread
    assert width(alone) == pytest.approx(0)
    spread = LaunchSpread("ttft_mean_ms", 0.02**2, 0.0, 8, 12)
    informed = metric_interval("ttft_mean_ms", launch, launch_spread=spread)
    assert informed.includes_launch_spread
    assert math.log(informed.high / 100) == pytest.approx(2.306 * 0.02, rel=2e-3)


def test_a_spread_of_another_metric_is_refused() -> None:
    spread = LaunchSpread("tpot_mean_ms", 0.02**2, 0.0, 8, 12)
    arm = [measurement([100.0] * 9)]
    with pytest.raises(ValueError, match="of tpot_mean_ms, not of ttft_mean_ms"):
        metric_interval("ttft_mean_ms", arm, launch_spread=spread)
    with pytest.raises(ValueError, match="of tpot_mean_ms, not of ttft_mean_ms"):
        ratio_interval("ttft_mean_ms", arm, arm, launch_spread=spread)


def test_a_ratio_of_launches_has_the_spread_of_both() -> None:
    # 2.306 x 0.02 x sqrt(1/2 + 1/3) = 0.0421.
    spread = LaunchSpread("ttft_mean_ms", 0.02**2, 0.0, 8, 12)
    launch = measurement([100.0] * 9)
    interval = ratio_interval("ttft_mean_ms", [launch] * 2, [launch] * 3, launch_spread=spread)
    assert math.log(interval.high) == pytest.approx(0.0421, rel=2e-3)
    assert interval.includes_launch_spread


def test_noise_of_requests_counts_once() -> None:
    """Prompts alike, requests that differ, launches that do not: all spread is the requests'.

    The ratio of two launches a side has a standard error of sd / sqrt(40) per launch, twice; adding the
    spread between launches to that of the prompts would count it again and be sqrt(2) wider.
    """
    rng = np.random.default_rng(8)
    groups = [[measurement(rng.normal(100, 10, 40)) for _ in range(3)] for _ in range(6)]
    spread = estimate_launch_spread("ttft_mean_ms", groups)
    # Of the mean of 40 with sd 10 %: 0.1 / sqrt(40) = 1.58 %, all of it the requests'.
    assert math.sqrt(spread.variance) == pytest.approx(0.0158, rel=0.3)
    assert math.sqrt(spread.request_variance) == pytest.approx(0.0158, rel=0.1)
    interval = ratio_interval("ttft_mean_ms", groups[0], groups[1], launch_spread=spread)
    honest = 2.179 * math.sqrt(spread.variance * 2 / 3)  # t(0.975, 12)
    assert math.log(interval.high / interval.estimate) == pytest.approx(honest, rel=0.1)


# --- throughputs and goodputs ---


def test_a_throughput_is_around_what_was_shown() -> None:
    # One user, 10 tokens in 80 to 120 ms each: about 100 tokens/s, never beyond 10 / 0.08 = 125.
    rng = np.random.default_rng(3)
    interval = metric_interval("output_throughput_tps", [measurement(rng.uniform(80, 120, 60))])
    assert interval.estimate == pytest.approx(100, rel=0.06)
    assert 80 < interval.low < interval.estimate < interval.high < 125


def test_a_goodput_without_a_miss_may_still_be_lower() -> None:
    # 40 good answers of 40, all of 100 ms: the throughput has no spread, but up to 8.8 % of such
    # requests may miss the limit (Wilson's lower bound of 40 of 40, 0.912).
    limits = {"default": {"ttft_p95_ms": 110.0}}
    interval = metric_interval("goodput_tps", [measurement([100.0] * 40)], limits)
    assert interval.estimate == pytest.approx(100, rel=1e-3)
    assert interval.low == pytest.approx(91.2, rel=2e-3)
    assert interval.high == pytest.approx(interval.estimate)


def test_a_goodput_of_which_nothing_was_seen_has_an_upper_bound() -> None:
    # 0 of 40: up to 8.8 % may keep the limit, of 100 tokens/s.
    limits = {"default": {"ttft_p95_ms": 50.0}}
    interval = metric_interval("goodput_tps", [measurement([100.0] * 40)], limits)
    assert (interval.estimate, interval.low) == (0, 0)
    assert interval.high == pytest.approx(8.8, rel=5e-3)
    to_full = ratio_interval(
        "goodput_tps", [measurement([100.0] * 40)], [measurement([40.0] * 40)], limits
    )
    assert (to_full.estimate, to_full.low) == (0, 0)
    assert to_full.high == pytest.approx(8.8 / 250, rel=5e-3)


def test_an_attainment_has_wilsons_interval() -> None:
    # 36 of 40: Wilson 0.769 to 0.960.
    limits = {"default": {"ttft_p95_ms": 110.0}}
    interval = metric_interval(
        "slo_attainment_ratio", [measurement([100.0] * 36 + [150.0] * 4)], limits
    )
    assert interval.estimate == pytest.approx(0.9)
    assert (interval.low, interval.high) == pytest.approx((0.769, 0.960), abs=1e-3)


@pytest.mark.parametrize(("ttft_ms", "bound"), [(100.0, "high"), (150.0, "low")])
def test_an_attainment_of_all_or_none_has_one_open_side(ttft_ms: float, bound: str) -> None:
    limits = {"default": {"ttft_p95_ms": 110.0}}
    arm = [measurement([ttft_ms] * 40), measurement([ttft_ms] * 40)]
    interval = metric_interval("slo_attainment_ratio", arm, limits)
    assert getattr(interval, bound) == interval.estimate
    assert 0 <= interval.low < interval.high <= 1


# --- ratios ---


def test_ratio_of_identical_arms_holds_one() -> None:
    rng = np.random.default_rng(4)
    arm = [measurement(rng.lognormal(4.6, 1.0, 30)) for _ in range(2)]
    interval = ratio_interval("ttft_mean_ms", arm, arm)
    assert interval.estimate == pytest.approx(1.0)
    assert holds(interval, 1.0)
    assert (interval.num_requests, interval.num_launches) == (120, 4)


def test_ratio_of_arms_of_one_truth_mostly_holds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Same prompts, same means, 10% noise of its own in each arm; 100 trials, 95% expected.
    monkeypatch.setattr(stats, "NUM_RESAMPLES", 200)
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(100):
        means = rng.lognormal(4.6, 0.5, 40)
        one, other = ([measurement(means * rng.normal(1, 0.1, 40))] for _ in range(2))
        hits += holds(ratio_interval("ttft_mean_ms", one, other, seed=trial), 1.0)
    assert 86 <= hits <= 100


def test_pairing_by_prompt_makes_the_ratio_sharp() -> None:
    # Prompts differ by a factor of e (sigma 1); the treated arm takes 0.8 of the time, with 1%
    # noise. Paired, the prompts cancel: width about 2 * 1.96 * 0.8 * 0.014 / sqrt(40) = 0.7%.
    # Unpaired, each mean alone wavers by about 1.3 / sqrt(40) = 20%.
    rng = np.random.default_rng(6)
    means = rng.lognormal(4.6, 1.0, 40)
    reference = [measurement(means * rng.normal(1, 0.01, 40))]
    treated_ms = 0.8 * means * rng.normal(1, 0.01, 40)
    paired = ratio_interval("ttft_mean_ms", [measurement(treated_ms)], reference)
    others = [measurement(treated_ms, [f"other{i}" for i in range(40)])]
    unpaired = ratio_interval("ttft_mean_ms", others, reference)

    assert holds(paired, 0.8)
    assert width(paired) < 0.02
    assert width(unpaired) > 10 * width(paired)


def test_one_seed_gives_one_interval() -> None:
    rng = np.random.default_rng(7)
    arm, other = [measurement(rng.uniform(80, 120, 30))], [measurement(rng.uniform(80, 120, 30))]
    for name in ("ttft_mean_ms", "output_throughput_tps"):
        assert metric_interval(name, arm, seed=1) == metric_interval(name, arm, seed=1)
        assert metric_interval(name, arm, seed=1) != metric_interval(name, arm, seed=2)
        assert ratio_interval(name, arm, other, seed=1) == ratio_interval(name, arm, other, seed=1)


def test_limits_reach_the_goodput() -> None:
    # Half of the requests take 50 ms and half 150; the limit of 110 ms lets the first half count.
    mixed = measurement([50.0, 150.0] * 20)
    limits = {"default": {"ttft_p95_ms": 110.0}}
    interval = ratio_interval("goodput_tps", [mixed], [measurement([100.0] * 40)], limits)
    # 20 x 10 tokens in 20 x 0.05 + 20 x 0.15 = 4 busy seconds, against 400 tokens in 4.
    assert interval.estimate == pytest.approx(0.5)
    assert holds(interval, 0.5)


def test_a_reference_without_any_goodput_has_no_ratio() -> None:
    # The config without speculation may well keep no limit at all, while another keeps them.
    limits = {"default": {"ttft_p95_ms": 100.0}}
    quick, slow = measurement([50.0] * 10), measurement([150.0] * 10)
    assert ratio_interval("goodput_tps", [quick], [slow], limits) is None


def test_a_figure_that_no_request_has_has_no_interval() -> None:
    # One chunk each: there is no time per token.
    assert metric_interval("tpot_mean_ms", [measurement([100.0] * 5)]) is None


# --- how requests hang together ---


def test_prompts_are_drawn_within_their_class() -> None:
    """A schedule keeps each class's share, so that classes differ is no doubt about the mean."""
    quick, slow = [100.0 + i % 3 for i in range(20)], [900.0 + i % 3 for i in range(20)]
    mixed = measurement(quick + slow)
    by_class = replace(
        mixed,
        records=tuple(
            replace(r, class_name="quick" if i < 20 else "slow")
            for i, r in enumerate(mixed.records)
        ),
    )
    assert width(metric_interval("ttft_mean_ms", [by_class])) < 2
    assert width(metric_interval("ttft_mean_ms", [mixed])) > 200


def test_turns_of_one_conversation_are_one_draw() -> None:
    rng = np.random.default_rng(9)
    means = np.repeat(rng.normal(100, 20, 30), 4)
    apart = measurement(means)
    together = replace(
        apart,
        records=tuple(
            replace(r, conversation_id=i // 4, turn=i % 4) for i, r in enumerate(apart.records)
        ),
    )
    # A quarter of the draws: twice the width.
    ratio = width(metric_interval("ttft_mean_ms", [together])) / width(
        metric_interval("ttft_mean_ms", [apart])
    )
    assert ratio == pytest.approx(2, rel=0.15)


def test_neighbours_in_open_loop_share_a_queue() -> None:
    """Slow phases of many requests: all different prompts, but far fewer things to learn from."""
    phases = np.repeat([100.0, 200.0] * 3, 40)
    closed = measurement(phases)
    opened = replace(
        closed,
        concurrency=None,
        records=tuple(replace(r, scheduled_s=r.sent_s) for r in closed.records),
    )
    assert width(metric_interval("ttft_mean_ms", [opened])) > 2.5 * width(
        metric_interval("ttft_mean_ms", [closed])
    )


def test_a_single_prompt_has_an_interval_of_its_own() -> None:
    # 20 requests of one prompt: what other prompts would do, nobody knows; the requests still vary.
    rng = np.random.default_rng(10)
    interval = metric_interval("ttft_mean_ms", [measurement(rng.normal(100, 10, 20), ["p"] * 20)])
    # t(0.975, 19) x 10 / sqrt(20) = 4.7.
    assert width(interval) / 2 == pytest.approx(4.7, rel=0.4)


def test_a_single_request_bounds_nothing() -> None:
    interval = metric_interval("ttft_mean_ms", [measurement([100.0])])
    assert interval.estimate == pytest.approx(100)
    assert interval.low < 1e-3
    assert not interval.has_upper_bound
    assert math.isfinite(interval.high)


def test_a_decision_of_four_configs_is_quick() -> None:
    """4 configs of 3 launches of 200 requests: every interval a decision asks for, under a second."""
    rng = np.random.default_rng(11)
    groups = [[measurement(rng.lognormal(4, 0.5, 200)) for _ in range(3)] for _ in range(4)]
    began = time.process_time()
    spread = estimate_launch_spread("ttft_p95_ms", groups)
    for group in groups:
        metric_interval("ttft_p95_ms", group, launch_spread=spread)
        for reference in groups[:2]:
            ratio_interval("ttft_p95_ms", group, reference, launch_spread=spread)
    assert time.process_time() - began < 1
