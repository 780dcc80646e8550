"""Arithmetic of a decode step. The numbers are those found in vLLM's scheduler, see each comment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.serving.config import ServingConfig
from autotune.serving.token_budget import (
    graph_capture_size,
    max_decoding_requests,
    needed_model_len,
    tokens_per_step,
)


def p_eagle(k: int) -> ServingConfig:
    return ServingConfig("m", "d" if k else None, k, parallel_drafting=k > 0)


@pytest.mark.parametrize(
    ("k", "is_parallel", "tokens"),
    [
        (0, False, 1),  # the next token
        (0, True, 1),
        (1, True, 2),  # (1 + 1) rows to verify, no mask slot
        (7, True, 14),  # (7 + 1) rows to verify, 7 - 1 mask slots
        (32, True, 64),
        (1, False, 2),
        (7, False, 8),  # one pass per token: no mask slots
    ],
)
def test_tokens_of_one_request_in_a_step(k: int, is_parallel: bool, tokens: int) -> None:
    assert tokens_per_step(k, is_parallel=is_parallel) == tokens


@pytest.mark.parametrize(
    ("budget", "k", "requests"),
    [
        # floor(budget / 2K), for vLLM's default budgets by GPU size.
        (2048, 7, 146),
        (2048, 16, 64),
        (2048, 32, 32),
        (8192, 7, 585),
        (8192, 16, 256),
        (8192, 32, 128),
        (16384, 7, 1170),
        (16384, 16, 512),
        (16384, 32, 256),
    ],
)
def test_requests_that_decode_in_one_step(budget: int, k: int, requests: int) -> None:
    assert max_decoding_requests(p_eagle(k), budget) == requests


def test_an_autoregressive_head_has_no_mask_slots() -> None:
    config = ServingConfig("m", "d", 7)
    assert max_decoding_requests(config, 2048) == 256  # floor(2048 / (7 + 1))
    assert graph_capture_size(config, 64) == 512


def test_without_speculation_a_request_costs_one_token() -> None:
    assert max_decoding_requests(p_eagle(0), 2048) == 2048


@pytest.mark.parametrize(
    ("k", "concurrency", "size"),
    [
        (7, 36, 504),  # the last that vLLM's default ceiling of 512 covers
        (7, 37, 518),
        (16, 16, 512),
        (32, 8, 512),
        (0, 64, 64),
    ],
)
def test_graphs_cover_the_drafters_rows(k: int, concurrency: int, size: int) -> None:
    assert graph_capture_size(p_eagle(k), concurrency) == size


@pytest.mark.parametrize(
    ("longest", "k", "length"),
    [
        (600, 10, 768),  # 611 is needed; the next multiple of 256 is 3 x 256
        (1, 0, 256),
        (255, 0, 256),  # 256 exactly
        (255, 1, 512),  # 257
        (223, 32, 256),  # 223 + 32 + 1 = 256
    ],
)
def test_length_leaves_room_for_the_drafts(longest: int, k: int, length: int) -> None:
    assert needed_model_len(longest, k) == length


@given(st.integers(1, 200_000), st.integers(0, 32))
def test_no_request_ever_comes_within_k_of_the_limit(longest: int, k: int) -> None:
    length = needed_model_len(longest, k)
    assert length - k > longest
    assert length % 256 == 0
    assert length - 256 - k <= longest  # and no more than needed
