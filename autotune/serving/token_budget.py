"""Arithmetic of a speculative decode step: rows, token budget, graph sizes, request lengths.

Read in vLLM 0.32 and 0.33 (`config/speculative.py`, `v1/core/sched/scheduler.py`): with parallel
drafting a decoding request is charged (K + 1) + (K - 1) = 2K tokens of `max_num_batched_tokens` in
every step, because the drafter runs K - 1 mask slots beside the K + 1 verified rows.
"""

from __future__ import annotations

from autotune.serving.config import ServingConfig

LENGTH_STEP_TOKENS = 256


def tokens_per_step(num_speculative_tokens: int, *, is_parallel: bool) -> int:
    """Tokens of the budget that one decoding request costs in one step."""
    if num_speculative_tokens == 0:
        return 1
    return 2 * num_speculative_tokens if is_parallel else num_speculative_tokens + 1


def _of(config: ServingConfig) -> int:
    return tokens_per_step(config.num_speculative_tokens, is_parallel=config.parallel_drafting)


def max_decoding_requests(config: ServingConfig, max_num_batched_tokens: int) -> int:
    """The most requests that can decode in one step; more of them just wait, silently."""
    return max_num_batched_tokens // _of(config)


def graph_capture_size(config: ServingConfig, concurrency: int) -> int:
    """Largest batch, in tokens, that CUDA graphs must cover so that the drafter never runs eagerly."""
    return _of(config) * concurrency


def needed_model_len(longest_request_tokens: int, max_num_speculative_tokens: int) -> int:
    """Smallest `max-model-len` for the longest request.

    vLLM stops drafting for the whole batch when one request comes within K tokens of the limit, so
    the limit must lie K above. Rounded up, so that all K of a study share one value.
    """
    needed = longest_request_tokens + max_num_speculative_tokens + 1
    return -(-needed // LENGTH_STEP_TOKENS) * LENGTH_STEP_TOKENS
