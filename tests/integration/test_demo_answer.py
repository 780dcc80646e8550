"""The demo must come to the right answer at every load, on launches of real vLLM that were recorded.

The right answer is worked out here from the recorded requests by plain division, without the code
that measures and decides.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from autotune.search.build import EngineChoice, build_search
from autotune.search.decision import Decision
from autotune.search.setup import SearchSettings
from autotune.search.study import run_search
from autotune.serving.replay import read_recording
from autotune.store.repository import Store
from autotune.traffic.profile import load_profile

RECORDING = Path(__file__).parent.parent / "data" / "demo_grid.jsonl.gz"
DEPTHS_OF_THE_DEMO = (0, 1, 2, 3, 4, 6, 8)


def speeds(concurrency: int) -> dict[int, float]:
    """Mean tokens per second of a slot by K: tokens over the time that requests were in flight."""
    tokens, seconds = defaultdict[int, int](int), defaultdict[int, float](float)
    for row in read_recording(RECORDING).rows:
        if row.concurrency == concurrency:
            k = row.config.num_speculative_tokens
            tokens[k] += sum(r.num_completion_tokens for r in row.measurement.records)
            seconds[k] += sum(r.finished_s - r.sent_s for r in row.measurement.records)
    return {k: tokens[k] / seconds[k] for k in tokens}


def decide(concurrency: int, tmp_path: Path, num_finalists: int = 2) -> Decision:
    profile = load_profile(Path("demo")).with_concurrency(concurrency)
    settings = SearchSettings(
        storage=str(tmp_path / "autotune.db"),
        out_dir=tmp_path,
        sampler="grid",
        max_trials=len(DEPTHS_OF_THE_DEMO),
        num_finalists=num_finalists,
        num_repeats=2,
    )
    engine = EngineChoice("replay", options={"recording": str(RECORDING)})
    setup = build_search(profile, "demo-cpu", engine, settings)
    store = Store(settings.storage, create=True)
    try:
        decision = run_search(setup, store).decision
    finally:
        store.close()
    assert decision is not None
    return decision


def test_the_recording_is_complete() -> None:
    """K = 0, 1, 2, 3, 4, 6, 8, 10 at concurrency 1, 4 and 16, three launches each: 72 measurements."""
    rows = read_recording(RECORDING).rows
    cells = {(r.config.num_speculative_tokens, r.concurrency, r.launch) for r in rows}
    assert len(rows) == len(cells) == 8 * 3 * 3
    assert all(record.is_ok for row in rows for record in row.measurement.records)


def test_one_user_at_a_time_gains_from_a_small_k(tmp_path: Path) -> None:
    by_k = speeds(1)
    best = max(DEPTHS_OF_THE_DEMO, key=lambda k: by_k[k])
    assert best in (1, 2, 3, 4)

    decision = decide(1, tmp_path)

    chosen = decision.of(decision.winner).config["num_speculative_tokens"]
    assert chosen > 0
    assert by_k[chosen] > 0.95 * by_k[best]
    assert decision.gain_over_baseline is not None
    assert decision.gain_over_baseline.low > 1
    assert decision.gain_over_baseline.estimate == pytest.approx(by_k[chosen] / by_k[0], rel=0.05)


@pytest.mark.parametrize("concurrency", [4, 16])
def test_many_users_at_once_are_served_best_without_speculation(
    concurrency: int, tmp_path: Path
) -> None:
    by_k = speeds(concurrency)
    # Nothing beats no speculation by more than the demo's practical margin of 3 %.
    assert max(by_k[k] for k in DEPTHS_OF_THE_DEMO) < 1.03 * by_k[0]

    decision = decide(concurrency, tmp_path)

    assert decision.of(decision.winner).config["num_speculative_tokens"] == 0


def test_a_large_k_halves_the_throughput_of_a_full_batch() -> None:
    by_k = speeds(16)
    assert by_k[8] < 0.5 * by_k[0]
