"""The serving config: what it allows, and that its content, name and order hang together."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.serving.config import Flag, ServingConfig, config_from_dict

PLAIN = ServingConfig(model="m")
SPECULATIVE = ServingConfig("m", "d", 4, parallel_drafting=True)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_speculative_tokens": 33, "drafter": "d"}, "must be 0 to 32, but got 33"),
        ({"num_speculative_tokens": -1, "drafter": "d"}, "must be 0 to 32, but got -1"),
        ({"num_speculative_tokens": 4}, "a drafter must be given exactly when"),
        ({"drafter": "d"}, "a drafter must be given exactly when"),
        (
            {"num_speculative_tokens": 4, "drafter": "d", "tree_width": 3},
            "divide num_speculative_tokens, but got 3 and 4",
        ),
        (
            {"num_speculative_tokens": 4, "drafter": "d", "tree_width": 0},
            "at least 1 .*but got 0 and 4",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ServingConfig(model="m", **fields)


@pytest.mark.parametrize("k", [1, 32])
def test_both_ends_of_the_range_are_allowed(k: int) -> None:
    assert ServingConfig("m", "d", k).is_speculative


def test_no_draft_tokens_is_no_speculation() -> None:
    assert not PLAIN.is_speculative


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PLAIN.max_num_seqs = 3  # type: ignore[misc]  # that is the point


# --- digest ---


def test_the_digest_is_of_the_content_alone_and_never_changes() -> None:
    # The first 12 digits of SHA-256 of this text, which can be checked with `sha256sum`. Studies
    # keep the digest, so a change of it makes their trials unknown.
    text = (
        '{"drafter": "d", "flags": {"enforce-eager": true}, "kv_cache_dtype": "fp8", '
        '"max_num_batched_tokens": 8192, "max_num_seqs": 64, "model": "m", '
        '"num_speculative_tokens": 4, "parallel_drafting": true, "tree_width": 1, '
        '"weights": "as_is"}'
    )
    config = ServingConfig(
        model="m",
        drafter="d",
        num_speculative_tokens=4,
        parallel_drafting=True,
        kv_cache_dtype="fp8",
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        flags=(("enforce-eager", True),),
    )
    assert json.loads(text) == config.as_dict()
    assert config.digest == "aa2e7a038894"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"drafter": "other"},
        {"num_speculative_tokens": 5},
        {"parallel_drafting": False},
        {"tree_width": 2},
        {"weights": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 64},
        {"flags": (("enforce-eager", True),)},
    ],
)
def test_every_field_counts_for_the_digest(change: dict[str, Any]) -> None:
    assert replace(SPECULATIVE, **change).digest != SPECULATIVE.digest


# --- round trips ---


flag_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
)


@st.composite
def configs(draw: st.DrawFn, values: st.SearchStrategy[Flag] = flag_values) -> ServingConfig:
    k = draw(st.integers(0, 32))
    widths = [width for width in range(1, k + 1) if k % width == 0] or [1]
    flags = draw(st.dictionaries(st.text(min_size=1, max_size=8), values, max_size=4))
    return ServingConfig(
        model=draw(st.text(max_size=8)),
        drafter=draw(st.text(max_size=8)) if k else None,
        num_speculative_tokens=k,
        parallel_drafting=draw(st.booleans()),
        tree_width=draw(st.sampled_from(widths)),
        weights=draw(st.sampled_from(["as_is", "fp8"])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        max_num_seqs=draw(st.none() | st.integers(1, 4096)),
        max_num_batched_tokens=draw(st.none() | st.integers(1, 2**20)),
        flags=tuple(sorted(flags.items())),
    )


@given(configs())
def test_a_config_survives_json(config: ServingConfig) -> None:
    again = config_from_dict(json.loads(json.dumps(config.as_dict())))
    assert again == config
    assert again.digest == config.digest


# Texts alone as values, since Python takes True for 1 and 1 for 1.0.
@given(configs(values=st.text(max_size=2)), configs(values=st.text(max_size=2)))
def test_digests_are_equal_where_configs_are(one: ServingConfig, other: ServingConfig) -> None:
    assert (one.digest == other.digest) == (one == other)


# --- the simpler config wins a tie ---


def test_simpler_configs_come_first() -> None:
    deep = replace(SPECULATIVE, num_speculative_tokens=8)
    in_order = [
        PLAIN,
        replace(PLAIN, max_num_seqs=64),
        replace(PLAIN, max_num_seqs=128),
        replace(PLAIN, max_num_seqs=8, max_num_batched_tokens=4096),
        replace(PLAIN, kv_cache_dtype="fp8"),
        replace(PLAIN, kv_cache_dtype="fp8", weights="fp8"),
        SPECULATIVE,
        replace(SPECULATIVE, kv_cache_dtype="fp8"),
        replace(SPECULATIVE, tree_width=2),
        deep,
        replace(deep, max_num_seqs=64),
    ]
    mixed = in_order[1::2] + in_order[::2]
    assert sorted(mixed, key=lambda config: config.simplicity) == in_order


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (PLAIN, "K=0"),
        (SPECULATIVE, "K=4"),
        (replace(SPECULATIVE, tree_width=2), "K=4 width=2"),
        (
            replace(PLAIN, weights="fp8", kv_cache_dtype="fp8", max_num_seqs=64,
                    max_num_batched_tokens=8192),
            "K=0 fp8-weights fp8-kv seqs=64 tokens=8192",
        ),
    ],
)  # fmt: skip
def test_labels_name_what_differs_from_the_default(config: ServingConfig, label: str) -> None:
    assert config.label() == label
