"""Arithmetic of a speculative decode step: rows, token budget, graph sizes, request lengths.

Read in vLLM 0.32 and 0.33 (`config/speculative.py`, `v1/core/sched/scheduler.py`): with parallel
drafting a decoding request is charged (K + 1) + (K - 1) = 2K tokens of `max_num_batched_tokens` in
every step, because the drafter runs K - 1 mask slots beside the K + 1 verified rows.
"""

from __future__ import annotations

from autotune.serving.config import ServingConfig

LENGTH_STEP_TOKENS = 256
DEFAULT_CAPTURE_SIZE = 512
"""vLLM's own ceiling of captured sizes (1024 on SM 10.x), below which nothing has to be said."""
GRAPH_OPTIONS = frozenset({"enforce-eager", "cudagraph-capture-sizes", "compilation-config"})
"""Options by which a user takes captured sizes into their own hands."""


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


def graph_ceiling(config: ServingConfig, concurrency: int | None) -> int:
    """Return the largest batch, in tokens, that CUDA graphs are captured for; 0 in eager mode.

    The user's own value; failing that vLLM's default, raised to what the drafter needs at `concurrency`.
    """
    flags = dict(config.flags)
    if flags.get("enforce-eager") is True:
        return 0
    own = flags.get("max-cudagraph-capture-size")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    if concurrency is None or not config.is_speculative or GRAPH_OPTIONS & set(flags):
        return DEFAULT_CAPTURE_SIZE
    seqs = min(concurrency, config.max_num_seqs or concurrency)
    return max(DEFAULT_CAPTURE_SIZE, graph_capture_size(config, seqs))


def captured_sizes(ceiling: int, num_speculative_tokens: int) -> tuple[int, ...]:
    """Return the batch sizes, in tokens, that vLLM captures: its default list up to `ceiling`.

    1, 2, 4, then every 8th up to 256, then every 16th; with speculation rounded up to multiples of K + 1
    (`config/compilation.py`).
    """
    plain = [1, 2, 4, *range(8, 257, 8), *range(272, ceiling + 1, 16)]
    step = num_speculative_tokens + 1
    rounded = (-(-size // step) * step for size in plain if size <= ceiling)
    return tuple(dict.fromkeys(size for size in rounded if size <= ceiling))


def needed_model_len(longest_request_tokens: int, max_num_speculative_tokens: int) -> int:
    """Smallest `max-model-len` for the longest request.

    vLLM stops drafting for the whole batch when one request comes within K tokens of the limit, so
    the limit must lie K above. Rounded up, so that all K of a study share one value.
    """
    needed = longest_request_tokens + max_num_speculative_tokens + 1
    return -(-needed // LENGTH_STEP_TOKENS) * LENGTH_STEP_TOKENS
