"""From a serving config to vLLM's command line."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import Any

import pytest

from autotune.serving.capabilities import Device
from autotune.serving.config import Flag, ServingConfig
from autotune.serving.vllm_options import (
    Needs,
    negated,
    speculative_token_tree,
    to_argv,
    vllm_options,
)

PLAIN = ServingConfig(model="target")
P_EAGLE = ServingConfig("target", "head", 7, parallel_drafting=True)


def options(config: ServingConfig, device: Device = "cuda", **needs: Any) -> dict[str, Any]:
    return vllm_options(config, Needs(**needs), device)


# --- what a config sets ---


def test_a_plain_config_sets_nothing_but_the_model() -> None:
    assert options(PLAIN) == {"model": "target"}


def test_every_knob_has_its_option() -> None:
    config = replace(
        PLAIN, weights="fp8", kv_cache_dtype="fp8", max_num_seqs=64, max_num_batched_tokens=8192
    )
    assert options(config) == {
        "model": "target",
        "quantization": "fp8",
        "kv-cache-dtype": "fp8",
        "max-num-seqs": 64,
        "max-num-batched-tokens": 8192,
    }


def test_method_and_parallel_drafting_are_always_explicit() -> None:
    # vLLM guesses both from the head's name: "...-p-eagle-..." becomes method "eagle".
    assert options(P_EAGLE)["speculative-config"] == {
        "method": "eagle3",
        "model": "head",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    one_by_one = replace(P_EAGLE, parallel_drafting=False)
    assert options(one_by_one)["speculative-config"]["parallel_drafting"] is False


def test_a_tree_is_set_beside_its_number_of_tokens() -> None:
    tree = ServingConfig("target", "head", 4, tree_width=2)
    spec = options(tree)["speculative-config"]
    assert spec["num_speculative_tokens"] == 4
    assert spec["speculative_token_tree"] == "[(0,), (1,), (0, 0), (1, 0)]"
    assert "speculative_token_tree" not in options(P_EAGLE)["speculative-config"]


@pytest.mark.parametrize("off_above", [1, 2, 64, 70_000])
def test_speculation_off_above_a_batch_size_is_two_ranges(off_above: int) -> None:
    spec = options(replace(P_EAGLE, speculation_off_above=off_above))["speculative-config"]
    schedule = spec["num_speculative_tokens_per_batch_size"]

    # vLLM's validator: a list of [first, last, K], sorted, starting at 1; both ends inclusive.
    assert schedule[0] == [1, off_above, 7]
    assert [schedule[1][0], schedule[1][2]] == [off_above + 1, 0]
    assert schedule[1][1] >= schedule[1][0]
    assert "num_speculative_tokens_per_batch_size" not in options(P_EAGLE)["speculative-config"]


@pytest.mark.parametrize(
    ("width", "depth", "tree"),
    [
        (1, 1, "[(0,)]"),
        (1, 3, "[(0,), (0, 0), (0, 0, 0)]"),
        (3, 1, "[(0,), (1,), (2,)]"),
        (2, 2, "[(0,), (1,), (0, 0), (1, 0)]"),
    ],
)
def test_tree_literals(width: int, depth: int, tree: str) -> None:
    assert speculative_token_tree(width, depth) == tree


@pytest.mark.parametrize(("width", "depth"), [(1, 8), (4, 4), (8, 2), (2, 16)])
def test_a_tree_has_a_node_per_draft_token_each_with_its_parent(width: int, depth: int) -> None:
    nodes = ast.literal_eval(speculative_token_tree(width, depth))
    assert len(set(nodes)) == len(nodes) == width * depth
    assert all(node[:-1] in nodes for node in nodes if len(node) > 1)
    assert [len(node) for node in nodes] == sorted(len(node) for node in nodes)  # breadth first


# --- what is derived ---


def test_length_is_derived_from_the_longest_request_and_the_studys_largest_k() -> None:
    # 600 + 10 + 1 = 611, rounded up to 768; the same for every K of the study.
    needs: dict[str, Any] = {
        "longest_request_tokens": 600,
        "max_num_speculative_tokens": 10,
        "model_max_len": 8192,
    }
    assert options(PLAIN, **needs)["max-model-len"] == 768
    assert options(P_EAGLE, **needs)["max-model-len"] == 768


def test_length_is_left_alone_where_the_model_has_no_more() -> None:
    needs: dict[str, Any] = {"longest_request_tokens": 600, "max_num_speculative_tokens": 10}
    assert "max-model-len" not in options(PLAIN, **needs, model_max_len=768)
    assert "max-model-len" not in options(PLAIN, **needs, model_max_len=512)
    assert options(PLAIN, **needs)["max-model-len"] == 768
    assert "max-model-len" not in options(PLAIN)


def test_graphs_are_made_to_cover_the_drafter_on_cuda() -> None:
    # 2 x 7 x 37 = 518 tokens, above vLLM's default ceiling of 512; 2 x 7 x 36 = 504 is not.
    assert options(P_EAGLE, concurrency=37)["max-cudagraph-capture-size"] == 518
    assert "max-cudagraph-capture-size" not in options(P_EAGLE, concurrency=36)
    assert "max-cudagraph-capture-size" not in options(P_EAGLE, concurrency=None)
    assert "max-cudagraph-capture-size" not in options(P_EAGLE, "cpu", concurrency=37)
    assert "max-cudagraph-capture-size" not in options(PLAIN, concurrency=1000)


def test_graphs_need_not_cover_more_than_the_batch_can_hold() -> None:
    # At most 40 of the 256 users are in the batch: 2 x 7 x 40 = 560.
    config = replace(P_EAGLE, max_num_seqs=40)
    assert options(config, concurrency=256)["max-cudagraph-capture-size"] == 560
    assert "max-cudagraph-capture-size" not in options(
        replace(P_EAGLE, max_num_seqs=32), concurrency=256
    )


# --- what the user fixed ---


@pytest.mark.parametrize(
    "flag", ["enforce-eager", "cudagraph-capture-sizes", "compilation-config"]
)
def test_a_user_who_sets_graphs_is_left_alone(flag: str) -> None:
    config = replace(P_EAGLE, flags=((flag, True),))
    assert "max-cudagraph-capture-size" not in options(config, concurrency=64)


def test_the_users_own_value_goes_before_a_derived_one() -> None:
    config = replace(P_EAGLE, flags=(("max-cudagraph-capture-size", 256), ("max-model-len", 4096)))
    found = options(config, concurrency=64, longest_request_tokens=600)
    assert (found["max-cudagraph-capture-size"], found["max-model-len"]) == (256, 4096)


def test_a_flag_without_a_value_is_left_to_vllm() -> None:
    config = replace(PLAIN, flags=(("max-model-len", None), ("seed", 0)))
    assert options(config, longest_request_tokens=600) == {"model": "target", "seed": 0}


# --- the command line ---


@pytest.mark.parametrize(
    ("name", "value", "argv"),
    [
        ("max-num-seqs", 64, ["--max-num-seqs", "64"]),
        ("gpu-memory-utilization", 0.9, ["--gpu-memory-utilization", "0.9"]),
        ("dtype", "bfloat16", ["--dtype", "bfloat16"]),
        ("enforce-eager", True, ["--enforce-eager"]),
        ("enforce-eager", False, ["--no-enforce-eager"]),
        ("no-enable-prefix-caching", True, ["--no-enable-prefix-caching"]),
        ("no-enable-prefix-caching", False, ["--enable-prefix-caching"]),
        ("seed", 0, ["--seed", "0"]),
        (
            "compilation-config.cudagraph_mode",
            "NONE",
            ["--compilation-config.cudagraph_mode", "NONE"],
        ),
        (
            "compilation-config",
            {"b": [1], "a": None},
            ["--compilation-config", '{"a": null, "b": [1]}'],
        ),
        ("cudagraph-capture-sizes", [1, 2], ["--cudagraph-capture-sizes", "[1, 2]"]),
    ],
)
def test_one_option(name: str, value: Any, argv: list[str]) -> None:
    assert to_argv({name: value}) == argv


def test_the_model_goes_first_where_it_has_no_flag() -> None:
    found = {"max-num-seqs": 64, "model": "target"}
    assert to_argv(found, has_positional_model=True) == ["target", "--max-num-seqs", "64"]
    assert to_argv(found) == ["--max-num-seqs", "64", "--model", "target"]


def test_a_whole_command_line() -> None:
    flags: tuple[tuple[str, Flag], ...] = (
        ("enforce-eager", True),
        ("gpu-memory-utilization", 0.9),
    )
    config = replace(P_EAGLE, max_num_seqs=32, flags=flags)
    argv = to_argv(options(config, "cpu"), has_positional_model=True)
    assert argv[:4] == ["target", "--max-num-seqs", "32", "--speculative-config"]
    assert json.loads(argv[4])["num_speculative_tokens"] == 7
    assert argv[5:] == ["--enforce-eager", "--gpu-memory-utilization", "0.9"]


@pytest.mark.parametrize(
    ("name", "opposite"),
    [("enforce-eager", "no-enforce-eager"), ("no-enforce-eager", "enforce-eager")],
)
def test_opposites(name: str, opposite: str) -> None:
    assert negated(name) == opposite
