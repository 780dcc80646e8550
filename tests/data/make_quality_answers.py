"""Makes `quality_answers.json.gz`: what real vLLM answered to 16 prompts, and what it thinks of them.

It holds the answers of K = 8, of the baseline (K = 0, bf16) and of an FP8 KV cache at two
concurrencies, and the log-probabilities that the gate asks for. It also holds the answers of broken
engines, made here from the real ones, with the baseline's real log-probabilities of them:

wrong_token  one token of one answer is replaced; the answer goes on from there as the model does
loop         one answer says the same eight tokens over and over
shift        every ninth token of every answer comes twice, as at a wrong border between drafts (K = 8)

    PYTHONPATH=. python tests/data/make_quality_answers.py tests/data/quality_answers.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.measure.quality.endpoint import (
    Answer,
    Endpoint,
    ScoredToken,
    collect_answers,
    score,
)
from autotune.measure.quality.prompts import QualityPrompt
from autotune.serving.http import request
from benchmarks.quality_gate import CONCURRENCY, K, demo_prompts, launched

NUM_PROMPTS, NUM_TOKENS, NUM_TOP = 16, 64, 20
BROKEN_PROMPT, BROKEN_TOKEN = 5, 20
LOOP_AT, LOOP_UNIT_TOKENS = 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    prompts = demo_prompts(NUM_PROMPTS, NUM_TOKENS)
    with launched(K) as endpoint:
        k8 = answers_of(endpoint, prompts)
    with launched(0) as endpoint:
        baseline = answers_of(endpoint, prompts)
        faults = broken(endpoint, k8["1"])
        shown = [*baseline["4"], *k8["1"], *k8["4"], *(a for f in faults.values() for a in f)]
        baseline_scores = scores_of(endpoint, baseline["1"], shown)
    with launched(0, kv_cache_dtype="fp8") as endpoint:
        fp8 = answers_of(endpoint, prompts)
        fp8_scores = scores_of(endpoint, baseline["1"], [*fp8["1"], *fp8["4"]])
    data = {
        "num_tokens": NUM_TOKENS,
        "answers": {
            name: {c: [vars(a) for a in answers] for c, answers in server.items()}
            for name, server in {"k8": k8, "baseline": baseline, "fp8": fp8}.items()
        },
        "faults": {name: [vars(a) for a in answers] for name, answers in faults.items()},
        "scores": {"baseline": baseline_scores, "fp8": fp8_scores},
    }
    # mtime=0: the same data makes the same file.
    out.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def answers_of(endpoint: Endpoint, prompts: Sequence[QualityPrompt]) -> dict[str, list[Answer]]:
    return {str(c): collect_answers(endpoint, prompts, c) for c in (1, CONCURRENCY)}


def broken(endpoint: Endpoint, honest: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Make the answers of the broken engines; all but the broken ones are the honest ones."""
    victim = honest[BROKEN_PROMPT]
    before = victim.token_ids[:BROKEN_TOKEN]
    # The token before once more, as when an engine reads the wrong row of its logits.
    wrong = (*before, before[-1])
    rest = NUM_TOKENS - len(wrong)
    wrong += _continued(endpoint, victim.prompt_token_ids + wrong, rest)
    unit = victim.token_ids[LOOP_AT - LOOP_UNIT_TOKENS : LOOP_AT]
    loop = (*victim.token_ids[:LOOP_AT], *unit * NUM_TOKENS)[:NUM_TOKENS]
    shifted = [
        _with_tokens(endpoint, a, _doubled(a.token_ids)[: len(a.token_ids)]) for a in honest
    ]
    return {
        "wrong_token": _replaced(honest, _with_tokens(endpoint, victim, wrong)),
        "loop": _replaced(honest, _with_tokens(endpoint, victim, loop)),
        "shift": shifted,
    }


def _doubled(token_ids: Sequence[int]) -> list[int]:
    return [t for i, t in enumerate(token_ids) for _ in range(2 if i % (K + 1) == K else 1)]


def _replaced(honest: Sequence[Answer], answer: Answer) -> list[Answer]:
    return [answer if i == BROKEN_PROMPT else a for i, a in enumerate(honest)]


def _with_tokens(endpoint: Endpoint, answer: Answer, token_ids: Iterable[int]) -> Answer:
    tokens = tuple(token_ids)
    text = _post(endpoint, "/detokenize", {"tokens": tokens})["prompt"]
    return replace(answer, token_ids=tokens, text=text)


def _continued(endpoint: Endpoint, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    body = {"prompt": token_ids, "temperature": 0, "max_tokens": max_tokens,
            "return_token_ids": True}  # fmt: skip
    return tuple(_post(endpoint, "/v1/completions", body)["choices"][0]["token_ids"])


def _post(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Any:
    status, text = request(
        endpoint.base_url + path, body={**body, "model": endpoint.model}, timeout_s=60
    )
    assert status == 200, text
    return json.loads(text)


def scores_of(
    endpoint: Endpoint, own: Sequence[Answer], others: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Score the baseline's answers with 20 best tokens, and others with the best one."""
    wide = list(dict.fromkeys(a.sequence for a in own))
    narrow = [s for s in dict.fromkeys(a.sequence for a in others) if s not in wide]
    rows = [*zip(wide, score(endpoint, wide, NUM_TOP), strict=True)]
    rows += zip(narrow, score(endpoint, narrow, 1), strict=True)
    return [{**vars(sequence), "tokens": _packed(tokens)} for sequence, tokens in rows]


def _packed(tokens: Iterable[ScoredToken]) -> list[Any]:
    """Write scored tokens: its own log-probability, then best tokens and their log-probabilities."""
    return [[round(t.logprob, 5), [[i, round(x, 5)] for i, x in t.top]] for t in tokens]


if __name__ == "__main__":
    main()
