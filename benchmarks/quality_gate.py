"""Show what the quality gate finds on the demo model with real vLLM, as a table for docs/quality.md.

    python benchmarks/quality_gate.py

Four launches: K = 8, the baseline (K = 0, bf16), FP8 KV cache, and FP8 KV cache with K = 8. The baseline
is also judged against itself, which is the floor under the other figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.demo.target import demo_cache_dir, ensure_target, head_dir
from autotune.measure.quality.endpoint import Endpoint
from autotune.measure.quality.gate import Gate
from autotune.measure.quality.prompts import QualityPrompt
from autotune.measure.quality.verdict import QualityFigures, QualityVerdict
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_options import Needs
from autotune.traffic.quality import QualitySettings

CONCURRENCY = 4
K = 8
CLASSES = ("maths", "code", "chat", "summarise")
HEADER = (
    "config", "verdict", "equal answers, c = 1", f"c = {CONCURRENCY}", "matched prefix, c = 1",
    "best token", "near-tie or better", "largest gap", "mean KL", "p99 KL", "same best token",
)  # fmt: skip


def main() -> None:
    """Ask the four servers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32, help="spread over four classes")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args()
    prompts = demo_prompts(arguments.prompts, arguments.tokens)
    settings = QualitySettings(num_prompts=len(prompts), max_tokens=arguments.tokens)
    speculative = Gate(settings, prompts, CONCURRENCY, is_lossy=False)
    with launched(K) as endpoint:
        speculative.visit_candidate(endpoint)
    with launched(0) as endpoint:
        speculative.visit_baseline(endpoint)
        itself = Gate(
            settings, prompts, CONCURRENCY, is_lossy=False, baseline=speculative.baseline
        )
        itself.visit_candidate(endpoint)
        itself.visit_baseline(endpoint)
    quantised = {}
    for k in (0, K):
        gate = Gate(settings, prompts, CONCURRENCY, is_lossy=True, baseline=speculative.baseline)
        with launched(k, kv_cache_dtype="fp8") as endpoint:
            gate.visit_candidate(endpoint)
        quantised[k] = gate
    floor = figures_of(itself.verdict()).floor
    print(
        f"{len(prompts)} prompts, {arguments.tokens} tokens each. The floor: the baseline's answers at "
        f"c = 1 equal its own at c = {CONCURRENCY} in {floor.num_exact} of {floor.num_pairs} cases; "
        f"matched prefix {floor.median_matched_prefix_tokens:g} tokens.\n"
    )
    print(row(HEADER))
    print(row(["---"] * len(HEADER)))
    for name, gate in {
        "K = 0 against itself": itself,
        f"K = {K}": speculative,
        "FP8 KV": quantised[0],
        f"FP8 KV, K = {K}": quantised[K],
    }.items():
        print(row([name, *cells(gate.verdict())]))
    for gate in quantised.values():
        print("\n".join(f"- {reason}" for reason in gate.verdict().reasons))


def demo_prompts(count: int, max_tokens: int) -> list[QualityPrompt]:
    """Take the first prompts of each of the demo's classes, in turn."""
    folder = head_dir().parent / "prompts"
    columns = [(folder / f"{name}.jsonl").read_text().splitlines() for name in CLASSES]
    lines = [line for lines in zip(*columns, strict=True) for line in lines][:count]
    return [
        QualityPrompt.of_messages(
            [{"role": "user", "content": json.loads(line)["prompt"]}], "chat", max_tokens
        )
        for line in lines
    ]


@contextmanager
def launched(k: int, **changes: object) -> Iterator[Endpoint]:
    """Serve the demo's target, with K draft tokens."""
    config = ServingConfig(
        model=str(ensure_target()),
        drafter=str(head_dir()) if k else None,
        num_speculative_tokens=k,
        parallel_drafting=k > 0,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        flags=(("enforce-eager", True),),
        **changes,  # type: ignore[arg-type]  # checked by the class
    )
    settings = EngineSettings(env={"VLLM_CPU_KVCACHE_SPACE": "1"}, cache_dir=demo_cache_dir())
    with tempfile.TemporaryDirectory() as logs:
        context = LaunchContext(Path(logs), "quality", Needs(CONCURRENCY, 700, K, 8192))
        with VllmEngine(settings).launch(config, context) as server:
            yield Endpoint(server.base_url, server.served_name)


def cells(verdict: QualityVerdict) -> list[str]:
    """Write a verdict's figures."""
    figures = figures_of(verdict)
    serial, concurrent, forced = figures.match_serial, figures.match_concurrent, figures.forced
    if figures.distributions is None:
        distances = ["-", "-", "-"]
    else:
        distances = [
            f"{figures.distributions.mean_kl_nats:.4f}",
            f"{figures.distributions.p99_kl_nats:.3f}",
            f"{figures.distributions.agreement_ratio:.1%}",
        ]
    return [
        str(verdict.level),
        f"{serial.num_exact} of {serial.num_pairs}",
        f"{concurrent.num_exact} of {concurrent.num_pairs}",
        f"{serial.median_matched_prefix_tokens:g}",
        f"{forced.num_best / forced.num_positions:.2%}",
        f"{forced.near.ratio:.2%}",
        f"{forced.largest_gap_nats:.3f}",
        *distances,
    ]


def figures_of(verdict: QualityVerdict) -> QualityFigures:
    assert verdict.figures is not None  # every server has been asked
    return verdict.figures


def row(texts: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    main()
