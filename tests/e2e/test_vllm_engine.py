"""The vLLM engine against real vLLM: what it launches, measures, refuses and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.measure.metrics import summarize
from autotune.measure.records import Measurement
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import FailureKind, TrialFailed
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_options import Needs
from autotune.traffic.drawing import build_schedule
from tests.e2e.helpers import MEASURED_REQUESTS, profile, serving_config, vllm_processes

NEEDS = Needs(
    concurrency=2, longest_request_tokens=400, max_num_speculative_tokens=8, model_max_len=8192
)


@pytest.fixture
def engine(cache_dir: Path) -> VllmEngine:
    return VllmEngine(EngineSettings(env={"VLLM_CPU_KVCACHE_SPACE": "1"}, cache_dir=cache_dir))


def context(tmp_path: Path, timeout_s: float = 300) -> LaunchContext:
    return LaunchContext(tmp_path, "launch", NEEDS, timeout_s)


def test_speculation_is_on_and_counted_and_nothing_is_left_behind(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    config = serving_config(target, head, 4, kv_cache_dtype="fp8")
    schedule = build_schedule(profile())
    with engine.launch(config, context(tmp_path)) as server:
        assert server.report.resolved["num_speculative_tokens"] == 4
        assert server.report.resolved["parallel_drafting"] is True
        assert server.report.resolved["method"] == "eagle3"
        assert server.report.resolved["cache_dtype"].startswith("fp8")
        assert server.report.resolved["max_num_seqs"] == 16
        # 400 tokens + K 8 + 1, rounded up to a multiple of 256
        assert server.report.resolved["max_model_len"] == 512
        server.warm_up(schedule)
        first = server.measure(schedule)
        again = server.measure(schedule)
    assert vllm_processes() == []

    for measurement in (first, again):
        assert len(measurement.records) == MEASURED_REQUESTS
        assert measurement.num_errors == 0
        counters = measurement.counters
        assert counters.num_draft_tokens == 4 * counters.num_drafts
        rates = counters.per_position_acceptance_rates
        assert len(rates) == 4
        assert list(rates) == sorted(rates, reverse=True)
        assert 0 < rates[0] < 1
        # The head was trained on maths answers: far above a random head's 1.0, far below the limit 5.
        assert 1.2 < summarize(measurement)["acceptance_length"] < 3  # type: ignore[operator]
        # Every token comes from the prompt's own pass or from a step: tokens - requests is what the
        # steps emitted, at most acceptance length x drafts (the last step may run past the limit).
        emitted = sum(r.num_completion_tokens for r in measurement.records) - MEASURED_REQUESTS
        assert emitted <= counters.num_drafts + counters.num_accepted_tokens
        assert emitted > 0.8 * (counters.num_drafts + counters.num_accepted_tokens)
        assert counters.num_generation_tokens == sum(
            r.num_completion_tokens for r in measurement.records
        )
    # Greedy decoding of the same requests: the prefix cache is reset in between, so the same lengths.
    lengths = [[r.num_completion_tokens for r in sorted(m.records, key=lambda r: r.request_id)]
               for m in (first, again)]  # fmt: skip
    assert lengths[0] == lengths[1]


def test_speculation_is_switched_off_above_a_batch_size(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    """With one user every step drafts; with four, only steps in which one of them is left."""
    config = serving_config(target, head, 4, speculation_off_above=1)
    alone = build_schedule(profile().with_concurrency(1))
    together = build_schedule(profile().with_concurrency(4))
    with engine.launch(config, context(tmp_path)) as server:
        server.warm_up(alone)
        of_one = server.measure(alone)
        of_four = server.measure(together)
    assert vllm_processes() == []

    def drafts_per_token(measurement: Measurement) -> float:
        tokens = sum(r.num_completion_tokens for r in measurement.records)
        return measurement.counters.num_drafts / tokens

    assert of_one.num_errors == of_four.num_errors == 0
    # One draft a step, and a step brings between one token and the five of K + 1.
    assert drafts_per_token(of_one) > 1 / 5 - 0.05
    assert drafts_per_token(of_four) < drafts_per_token(of_one) / 2


def test_conversations_users_and_open_loop_reach_a_real_server(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    lines = [
        {"system": "Be short.", "turns": [f"Name {n} fruits.", "Which is the sweetest?"]}
        for n in range(2, 10)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    talks = {
        "prompts": {"file": str(tmp_path / "talks.jsonl")},
        "turns": {"max": 2, "replay": "live"},
        "output": {"max_tokens": 16},
    }
    users = {"kind": "users", "users": 2, "think_time": {"dist": "constant", "s": 0.2}}
    rate = {"kind": "rate", "rps": 2.0, "arrival": "gamma", "burstiness": 0.5}
    live = build_schedule(profile(load=users, classes=[talks], privacy={"store_outputs": True}))
    arriving = build_schedule(profile(load=rate))
    with engine.launch(serving_config(target, head, 0), context(tmp_path)) as server:
        server.warm_up(live)
        spoken = server.measure(live)
        arrived = server.measure(arriving)
    assert vllm_processes() == []

    assert spoken.num_errors == arrived.num_errors == 0
    turns = {(r.conversation_id, r.turn): r for r in spoken.records}
    assert len(turns) == 2 * MEASURED_REQUESTS
    for (conversation, turn), second in turns.items():
        if turn == 1:
            first = turns[conversation, 0]
            assert second.sent_s >= first.finished_s + 0.2
            # The second prompt holds the first one and its answer, which the server has given itself.
            assert second.num_prompt_tokens > first.num_prompt_tokens + first.num_completion_tokens
    assert all(r.output_text for r in spoken.records)

    due = {r.request_id: r.arrival_s for r in arriving.requests}
    for record in arrived.records:
        assert record.output_text is None  # this profile does not ask for it
        assert record.scheduled_s == due[record.request_id]
        assert 0 <= record.sent_s - record.scheduled_s < 0.5
    log = Path(str(server.report.log_path)).read_text()
    assert "fruits" not in log
    assert arriving.requests[0].prompt.text[:30] not in log


def test_fp8_weights_on_a_cpu_are_a_typed_failure_with_the_root_cause(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    config = serving_config(target, head, 0, weights="fp8")
    with pytest.raises(TrialFailed) as caught:
        engine.launch(config, context(tmp_path))
    failure = caught.value.failure
    assert failure.kind is FailureKind.INVALID_CONFIG
    assert "static_scaled_fp8_quant() expected at most 0 argument(s)" in failure.detail
    assert failure.log_path is not None
    assert "Engine core initialization failed" in Path(failure.log_path).read_text()
    assert vllm_processes() == []


def test_an_unknown_flag_is_named(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    config = serving_config(target, head, 0, flags=(("no-such-flag", 1),))
    with pytest.raises(TrialFailed) as caught:
        engine.launch(config, context(tmp_path))
    assert caught.value.failure.kind is FailureKind.INVALID_CONFIG
    assert "no-such-flag" in caught.value.failure.detail


def test_a_launch_that_takes_too_long_is_given_up_and_cleaned_up(
    engine: VllmEngine, target: Path, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrialFailed) as caught:
        engine.launch(serving_config(target, head, 0), context(tmp_path, timeout_s=5))
    assert caught.value.failure.kind is FailureKind.LAUNCH_TIMEOUT
    assert vllm_processes() == []
