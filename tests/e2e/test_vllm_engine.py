"""The vLLM engine against real vLLM: what it launches, measures, refuses and leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.measure.metrics import summarize
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import FailureKind, TrialFailed
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_options import Needs
from autotune.traffic.schedule import build_schedule
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
