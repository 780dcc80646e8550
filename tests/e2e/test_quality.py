"""The quality gate on real vLLM: speculation changes nothing, an FP8 KV cache does, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.measure.quality.endpoint import Endpoint, ScoredToken, TokenSequence, score
from autotune.measure.quality.gate import Gate
from autotune.measure.quality.verdict import QualityFigures, QualityLevel, QualityVerdict
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_options import Needs
from autotune.traffic.quality import QualitySettings
from tests.e2e.helpers import serving_config, vllm_processes
from tests.quality_fakes import demo_prompts

NUM_PROMPTS, NUM_TOKENS, CONCURRENCY = 12, 32, 4
NEEDS = Needs(
    concurrency=CONCURRENCY, longest_request_tokens=600, max_num_speculative_tokens=8,
    model_max_len=8192,
)  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """What three launches brought."""

    speculative: QualityVerdict
    quantised: QualityVerdict
    scores: dict[int, list[tuple[ScoredToken, ...]]]
    """Log-probabilities of the same tokens by the servers with K = 0 and K = 8."""


@pytest.fixture(scope="module")
def findings(
    target: Path, head: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Findings:
    folder = tmp_path_factory.mktemp("logs")
    engine = VllmEngine(EngineSettings(env={"VLLM_CPU_KVCACHE_SPACE": "1"}, cache_dir=cache_dir))

    @contextmanager
    def launched(k: int, **changes: object) -> Iterator[Endpoint]:
        context = LaunchContext(folder, f"k{k}{len(changes)}", NEEDS, 300)
        with engine.launch(serving_config(target, head, k, **changes), context) as server:
            yield Endpoint(server.base_url, server.served_name)

    prompts = demo_prompts(NUM_PROMPTS, NUM_TOKENS)
    settings = QualitySettings(max_tokens=NUM_TOKENS)
    speculative = Gate(settings, prompts, CONCURRENCY, is_lossy=False)
    # Any tokens serve to compare log-probabilities, those of a prompt of nobody too.
    shown = [TokenSequence(tuple(range(100, 140)), tuple(range(200, 240)))]
    scores = {}
    with launched(8) as endpoint:
        speculative.visit_candidate(endpoint)
        scores[8] = score(endpoint, shown, 20)
    with launched(0) as endpoint:
        speculative.visit_baseline(endpoint)
        scores[0] = score(endpoint, shown, 20)
    quantised = Gate(settings, prompts, CONCURRENCY, is_lossy=True, baseline=speculative.baseline)
    with launched(0, kv_cache_dtype="fp8") as endpoint:
        quantised.visit_candidate(endpoint)
    assert vllm_processes() == []
    return Findings(speculative.verdict(), quantised.verdict(), scores)


def figures_of(verdict: QualityVerdict) -> QualityFigures:
    assert verdict.figures is not None
    return verdict.figures


def test_speculation_says_what_the_model_says(findings: Findings) -> None:
    assert findings.speculative.reasons == ()
    assert findings.speculative.level is QualityLevel.PASSED
    figures = figures_of(findings.speculative)
    assert figures.forced.num_near == figures.forced.num_positions
    assert figures.forced.num_positions > 0.8 * 2 * NUM_PROMPTS * NUM_TOKENS
    # Equal bytes are not demanded: at one request at a time the baseline alone decodes single tokens,
    # by another kernel, and parts from itself as well. In batches they are, but for the last steps.
    assert figures.match_concurrent.num_exact >= figures.floor.num_exact
    assert figures.match_concurrent.num_exact >= NUM_PROMPTS - 2


def test_an_fp8_cache_changes_the_answers_and_the_gate_shows_by_how_much(
    findings: Findings,
) -> None:
    figures = figures_of(findings.quantised)
    assert figures.match_serial.num_exact < NUM_PROMPTS
    assert figures.forced.is_good  # its tokens are its own model's all the same
    assert figures.distributions is not None
    assert 0.001 < figures.distributions.mean_kl_nats < 0.1
    assert 0.8 < figures.distributions.agreement_ratio < 1
    assert figures.distributions.mean_rest_ratio < 0.2
    assert findings.quantised.level in {QualityLevel.WARNED, QualityLevel.FAILED}
    assert any("quantisation" in reason for reason in findings.quantised.reasons)


def test_a_speculative_server_scores_with_its_target_alone(findings: Findings) -> None:
    """What lets a quantised config that speculates judge its own tokens."""
    ((plain,), (speculative,)) = findings.scores[0], findings.scores[8]
    assert len(plain) == len(speculative) == 40
    assert [t.logprob for t in plain] == pytest.approx([t.logprob for t in speculative], abs=1e-4)
    assert [t.top[0][0] for t in plain] == [t.top[0][0] for t in speculative]
