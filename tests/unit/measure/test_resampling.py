"""Draws of prompts: weights, and metrics under them, against plain repetition of requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from record_helpers import measurement, record

from autotune.measure import resampling
from autotune.measure.metrics import Samples, samples_of
from autotune.measure.records import Measurement
from autotune.measure.resampling import designs_of, draws_of


def one_user(
    ttfts_s: list[float], prompts: list[str], classes: list[str] | None = None
) -> Samples:
    """One request after another, each with one chunk of 10 tokens."""
    return samples_of(_measured(ttfts_s, prompts, classes))


def _measured(
    ttfts_s: list[float], prompts: list[str], classes: list[str] | None = None
) -> Measurement:
    records, now_s = [], 0.0
    for i, (ttft_s, prompt) in enumerate(zip(ttfts_s, prompts, strict=True)):
        class_name = classes[i] if classes else "chat"
        end_s = now_s + ttft_s
        records.append(
            record(i, now_s, [(end_s, 10)], end_s, prompt_id=prompt, class_name=class_name)
        )
        now_s = end_s
    return measurement(*records, concurrency=1)


def test_each_draw_keeps_the_number_of_prompts_of_each_class() -> None:
    prompts = [f"p{i}" for i in range(10)]
    (design,) = designs_of([one_user([1.0] * 10, prompts, ["a"] * 7 + ["b"] * 3)])
    weights = design.weights(0, 500)
    a, b = (stratum for stratum in design.strata if len(stratum) in (7, 3))
    if len(a) == 3:
        a, b = b, a
    assert (weights[:, a].sum(axis=1) == 7).all()
    assert (weights[:, b].sum(axis=1) == 3).all()
    assert design.num_degrees_of_freedom == 10 - 2
    # Each count is binomial with mean 1.
    assert weights.mean(axis=0) == pytest.approx(1, abs=0.2)
    assert weights.std() > 0.7


def test_a_class_of_one_prompt_is_drawn_with_another_class() -> None:
    prompts = [f"p{i}" for i in range(5)]
    (design,) = designs_of([one_user([1.0] * 5, prompts, ["a", "b", "b", "b", "b"])])
    assert sorted(len(stratum) for stratum in design.strata) == [5]


def test_a_draw_is_the_metric_of_repeated_requests() -> None:
    """Three prompts, one of them twice: drawing p0 twice and p2 once is as if they had been sent so."""
    ttfts, prompts = [0.1, 0.4, 0.2, 0.3], ["p0", "p1", "p2", "p0"]
    (design,) = designs_of([one_user(ttfts, prompts)])
    names = sorted(set(prompts))
    weights = np.array([[{"p0": 2.0, "p1": 0.0, "p2": 1.0}[name] for name in names]])
    repeated = np.array([0.1, 0.3, 0.1, 0.3, 0.2])
    expected = {
        "ttft_mean_ms": 1e3 * repeated.mean(),
        "ttft_p90_ms": 1e3 * np.percentile(repeated, 90),
        "output_throughput_tps": 10 * 5 / repeated.sum(),
    }
    for name, value in expected.items():
        assert np.exp(draws_of(name, design, weights).values[0, 0]) == pytest.approx(value)


def test_draws_hold_for_all_arms_and_match_prompts_by_name() -> None:
    one = one_user([0.1, 0.2, 0.3], ["x", "y", "z"])
    other = one_user([0.6, 0.2, 0.4], ["z", "x", "y"])  # twice as long for each prompt
    (design,) = designs_of([one, other])
    assert design.num_clusters == 3
    draws = draws_of("ttft_mean_ms", design, design.weights(1, 50))
    assert draws.values[:, 1] - draws.values[:, 0] == pytest.approx(np.log(2))
    assert draws.variance_of(np.array([-1.0, 1.0])) == pytest.approx(0)


def test_an_attainment_of_all_has_finite_log_odds() -> None:
    (design,) = designs_of([one_user([0.1, 0.2], ["x", "y"])])
    draws = draws_of("slo_attainment_ratio", design, np.ones((1, 2)))
    assert draws.values[0, 0] == pytest.approx(np.log(2.5 / 0.5))


def test_draws_without_a_value_do_not_count() -> None:
    failed = _measured([0.1, 0.2, 0.3], ["x", "y", "z"])
    broken = replace(failed.records[0], error="reset", chunk_times_s=(), chunk_tokens=())
    (design,) = designs_of([samples_of(replace(failed, records=(broken, *failed.records[1:])))])
    only_x = np.array([[3.0, 0.0, 0.0], [0.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    draws = draws_of("ttft_mean_ms", design, only_x)
    assert draws.is_usable.tolist() == [False, True, True]
    assert np.isfinite(draws.variance_of(np.ones(1)))


def test_percentiles_of_many_values_are_drawn_on_a_fine_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    ttfts = rng.lognormal(0, 1, 3000).tolist()
    (design,) = designs_of([one_user(ttfts, [f"p{i % 100}" for i in range(3000)])])
    weights = design.weights(0, 20)
    coarse = draws_of("ttft_p95_ms", design, weights).values
    monkeypatch.setattr(resampling, "MAX_EXACT_VALUES", 10**6)
    exact = draws_of("ttft_p95_ms", design, weights).values
    assert coarse == pytest.approx(exact, abs=0.01)
    assert exact.std() > 0.03


def test_open_loop_also_draws_blocks_of_neighbours() -> None:
    closed = _measured([0.1] * 40, [f"p{i}" for i in range(40)])
    opened = replace(
        closed,
        concurrency=None,
        records=tuple(replace(r, scheduled_s=r.sent_s) for r in closed.records),
    )
    assert [d.num_clusters for d in designs_of([samples_of(closed)])] == [40]
    by_prompt, by_block = designs_of([samples_of(opened)])
    assert (by_prompt.num_clusters, by_block.num_clusters) == (40, 6)
    assert by_block.owners[0].tolist() == [6 * i // 40 for i in range(40)]
