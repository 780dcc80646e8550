"""Intervals: do they hold the truth as often as they say, and does pairing pay?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from autotune.measure import stats
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
    assert 0.88 <= hits / num_trials <= 0.99


def test_interval_is_around_the_estimate_and_says_what_it_is_made_of() -> None:
    # The mean of 90, 100, 110, 120 is 105; no resample can leave 90 to 120.
    interval = metric_interval("ttft_mean_ms", [measurement([90, 100, 110, 120])] * 2)
    assert interval.estimate == pytest.approx(105)
    assert 90 <= interval.low < 105 < interval.high <= 120
    assert (interval.num_requests, interval.num_launches) == (8, 2)
    assert interval.confidence == 0.95


def test_equal_requests_leave_no_width() -> None:
    interval = metric_interval("ttft_p95_ms", [measurement([100.0] * 10)])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((100, 100, 100))


def test_launches_that_differ_widen_the_interval() -> None:
    # No noise within a launch, but 100 ms in one and 120 in the other. Of two launches drawn with
    # repeats, a quarter are both the first and a quarter both the second: beyond the 2.5% tails.
    interval = metric_interval(
        "ttft_mean_ms", [measurement([100.0] * 9), measurement([120.0] * 9)]
    )
    assert interval.estimate == pytest.approx(110)
    assert (interval.low, interval.high) == pytest.approx((100, 120))


def test_a_throughput_is_around_what_was_shown() -> None:
    # One user, 10 tokens in 80 to 120 ms each: about 100 tokens/s, never beyond 10 / 0.08 = 125.
    rng = np.random.default_rng(3)
    interval = metric_interval("output_throughput_tps", [measurement(rng.uniform(80, 120, 60))])
    assert interval.estimate == pytest.approx(100, rel=0.06)
    assert 80 < interval.low < interval.estimate < interval.high < 125


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
    for name in ("ttft_p95_ms", "output_throughput_tps"):
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
