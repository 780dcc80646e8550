"""Throughput taken apart, against hand-made counters and against recorded runs of real vLLM."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pytest
from record_helpers import measurement, record

from autotune.measure.launch_spread import estimate_launch_spread
from autotune.measure.metrics import observed
from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.measure.stats import metric_interval
from autotune.measure.structure import (
    pooled_acceptance,
    structured_interval,
    structured_launch_spread,
    structured_throughputs_tps,
    tokens_per_step,
)
from autotune.serving.replay import read_recording

TPS = "output_throughput_tps"
GRID = Path(__file__).parents[2] / "data" / "demo_grid.jsonl.gz"


def drafted(num_drafts: float, per_position: tuple[float, ...]) -> Measurement:
    """A measurement of which only the counters matter."""
    return measurement(counters=counters(num_drafts, per_position))


def counters(num_drafts: float, per_position: tuple[float, ...]) -> ServerCounters:
    return ServerCounters(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(per_position),
        num_accepted_tokens=sum(per_position),
        num_accepted_tokens_per_pos=per_position,
        has_speculation=True,
    )


# --- the pooled acceptance ---


def test_launches_of_one_k_are_pooled_by_their_drafts() -> None:
    # Position 0: (60 + 120) / 400; position 1: (20 + 30) / 400.
    pool = [drafted(100, (60, 20)), drafted(300, (120, 30)), measurement()]
    assert pooled_acceptance(pool, 2) == pytest.approx((180 / 400, 50 / 400))


def test_launches_of_other_k_count_along_a_line_in_one_over_k() -> None:
    # Survival 0.5 + 0.1 / K of the first position: 0.6 at K = 1, 0.55 at K = 2, 0.525 at K = 4.
    # The second one is 0.2 at K = 2 and 0.3 at K = 4, so 0.2 + 0.1 (1/2 - 1/3) / (1/4) = 0.2667 at 3.
    pool = [
        drafted(100, (60,)),
        drafted(100, (55, 20)),
        drafted(100, (52.5, 30, 10, 5)),
    ]
    first, second, third = pooled_acceptance(pool, 3)
    assert first == pytest.approx(0.5 + 0.1 / 3)
    assert second == pytest.approx(0.2 + 0.1 * (1 / 2 - 1 / 3) / (1 / 2 - 1 / 4))
    assert third == pytest.approx(0.1)  # drafted at K = 4 alone


def test_positions_that_were_never_drafted_are_not_made_up() -> None:
    assert pooled_acceptance([drafted(100, (60,))], 3) == pytest.approx((0.6,))
    assert pooled_acceptance([], 3) == ()
    assert pooled_acceptance([measurement()], 3) == ()


# --- the estimate ---


def stepped(number: int, sent_s: float, per_step: list[int], step_s: float) -> RequestRecord:
    """A request whose prefill brings one token after a step, then one chunk for every step."""
    tokens, chunks = 1, [(sent_s + step_s, 1)]
    for i, brought in enumerate(per_step):
        tokens += brought
        chunks.append((sent_s + (i + 2) * step_s, tokens))
    return record(number, sent_s, chunks, chunks[-1][0], prompt_id=f"p{number}")


def launch(requests: list[list[int]], step_s: float, k: int) -> Measurement:
    """One user; `requests` are the tokens of each request's steps."""
    records, now_s = [], 0.0
    for number, per_step in enumerate(requests):
        records.append(stepped(number, now_s, per_step, step_s))
        now_s = records[-1].finished_s
    steps = [brought for request in requests for brought in request]
    accepted = tuple(float(sum(b > i + 1 for b in steps)) for i in range(k))
    return measurement(
        *records,
        concurrency=1,
        counters=counters(len(steps), accepted) if k else ServerCounters(),
    )


def test_a_step_brings_its_token_without_speculation() -> None:
    plain = launch([[1, 1, 1], [1, 1]], 0.1, 0)
    assert tokens_per_step([plain], [plain]).delivered == 1
    # 7 tokens in 7 steps of 0.1 s.
    assert structured_throughputs_tps([plain], [plain]) == pytest.approx([10])
    assert observed(TPS, plain) == pytest.approx(10)


def test_with_its_own_acceptance_a_measurement_gives_its_raw_throughput() -> None:
    lone = launch([[2, 1, 3], [3, 2]], 0.1, 2)
    # Prefills bring 2 tokens, five steps 11; 7 steps of 0.1 s in all.
    assert observed(TPS, lone) == pytest.approx(13 / 0.7)
    assert structured_throughputs_tps([lone], [lone]) == pytest.approx([13 / 0.7])


def test_pace_is_the_launchs_own_and_acceptance_the_pools() -> None:
    # 2 steps a request. Lucky: 3 tokens a step, unlucky: 1; pooled 2. Their paces are 0.1 and 0.2 s.
    lucky, unlucky = launch([[3, 3]] * 4, 0.1, 2), launch([[1, 1]] * 4, 0.2, 2)
    found = structured_throughputs_tps([lucky, unlucky], [lucky, unlucky])
    # Each request: 1 token from the prefill, 2 steps of 2 tokens, in 3 steps' time.
    assert found == pytest.approx([5 / 0.3, 5 / 0.6])


def test_tokens_drafted_past_the_end_are_not_delivered() -> None:
    # The server counted 2 accepted tokens for the last step, which brought one token: 10 drafted and
    # accepted (5 drafts, 5 accepted), 8 delivered.
    whole = launch([[2, 2, 1, 2, 1]], 0.1, 2)
    overrun = measurement(*whole.records, concurrency=1, counters=counters(5, (4.0, 1.0)))
    per_step = tokens_per_step([overrun], [overrun])
    assert per_step.accepted == pytest.approx(2.0)
    assert per_step.delivered_ratio == pytest.approx(8 / 10)
    assert structured_throughputs_tps([overrun], [overrun]) == pytest.approx([9 / 0.6])


def test_two_steps_read_as_one_chunk_still_count_as_two() -> None:
    # 4 drafts in 2 chunks of 4 tokens, a step 0.1 s; the prefill takes one more.
    chunks = [(0.1, 1), (0.3, 5), (0.5, 9)]
    merged = measurement(record(0, 0.0, chunks, 0.5), concurrency=1, counters=counters(4, (4.0,)))
    assert structured_throughputs_tps([merged], [merged]) == pytest.approx([9 / 0.5])


def random_launches(num_launches: int, seed: int) -> list[Measurement]:
    """Launches of one pace, whose drafts are accepted by chance: one draft token, half the time."""
    rng = random.Random(seed)
    return [
        launch([[rng.choice((1, 2)) for _ in range(20)] for _ in range(12)], 0.05, 1)
        for _ in range(num_launches)
    ]


def test_chance_in_acceptance_is_averaged_out() -> None:
    launches = random_launches(20, seed=4)
    raw = [observed(TPS, m) for m in launches]
    structured = structured_throughputs_tps(launches, launches)
    # 240 steps, each 1 or 2 tokens: sd 0.5 / sqrt(240) of 1.5 + 1 / 20 tokens is 2.1 %. Every launch has
    # the same steps in the same time, so the structured estimates are all alike.
    assert stdev(raw) / mean(raw) == pytest.approx(0.021, rel=0.4)
    assert stdev(structured) / mean(structured) < 1e-9
    assert mean(structured) == pytest.approx(mean(raw), rel=0.01)


def test_the_interval_shrinks_with_the_noise_between_launches() -> None:
    groups = [random_launches(3, seed) for seed in range(3)]
    pool = [m for group in groups for m in group]
    spread = structured_launch_spread(groups, pool)
    assert spread is not None
    assert spread.num_degrees_of_freedom == 6
    structured = structured_interval(groups[0], pool, launch_spread=spread)
    raw = metric_interval(TPS, groups[0], launch_spread=estimate_launch_spread(TPS, groups))
    assert structured is not None
    assert raw is not None
    assert structured.low <= raw.estimate <= structured.high
    assert structured.high - structured.low < raw.high - raw.low
    assert (structured.num_launches, structured.num_requests) == (3, 36)
    assert structured.includes_launch_spread


def test_nothing_answered_has_no_estimate() -> None:
    failed = measurement(record(0, 0.0, [], 1.0, error="HTTP 503"), concurrency=1)
    assert structured_interval([failed], [failed]) is None
    assert structured_interval([], []) is None


# --- real runs ---


def recorded() -> dict[int, dict[int, list[Measurement]]]:
    """24 launches of real vLLM on a CPU at three loads: by concurrency, then by K, 3 launches each."""
    by_load: dict[int, dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for row in read_recording(GRID).rows:
        assert row.concurrency is not None
        by_load[row.concurrency][row.config.num_speculative_tokens].append(row.measurement)
    assert sorted(by_load) == [1, 4, 16]
    return by_load


def test_on_real_runs_it_agrees_with_the_raw_throughput_within_its_interval() -> None:
    for by_k in recorded().values():
        groups = list(by_k.values())
        pool = [m for group in groups for m in group]
        spread = estimate_launch_spread(TPS, groups)
        for k, launches in by_k.items():
            raw = metric_interval(TPS, launches, launch_spread=spread)
            assert raw is not None
            assert raw.low < mean(structured_throughputs_tps(launches, pool)) < raw.high
            own = 1 + sum(launches[0].counters.per_position_acceptance_rates)
            assert tokens_per_step(launches, pool).accepted == pytest.approx(own, rel=0.006), k
