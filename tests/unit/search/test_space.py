"""The search-space file: the ways to write values, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.search.space import MAX_VALUES, SearchSpace, load_space
from autotune.strict import validate


def space(parameters: dict[str, Any], **more: Any) -> SearchSpace:
    data = {"version": 1, "name": "s", "parameters": parameters, **more}
    return validate(SearchSpace, data, "space.yaml")


# --- values ---


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ({"choices": [8, 2, 4]}, [8, 2, 4]),
        ({"choices": [2, 2, 4]}, [2, 4]),
        ({"range": [0, 3]}, [0, 1, 2, 3]),
        ({"range": [5, 5]}, [5]),
        ({"powers_of_two": [8, 64]}, [8, 16, 32, 64]),
        ({"powers_of_two": [5, 33]}, [8, 16, 32]),
        ({"powers_of_two": [1, 1]}, [1]),
    ],
)
def test_values_can_be_written_in_three_ways(written: dict[str, Any], values: list[int]) -> None:
    found = space({"num_speculative_tokens" if 0 in values else "max_num_seqs": written})

    assert list(found.parameters.values())[0].as_list() == values


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({}, "exactly one of `choices`, `range` and `powers_of_two` must be given"),
        ({"choices": [1], "range": [1, 2]}, "exactly one of"),
        ({"choices": []}, "at least 1 item"),
        ({"range": [4, 2]}, r"must not be above the second, but got \[4, 2\]"),
        ({"powers_of_two": [0, 8]}, r"powers of two start at 1, but got \[0, 8\]"),
        ({"powers_of_two": [5, 7]}, r"no power of two in \[5, 7\]"),
        ({"range": [1, MAX_VALUES + 1]}, "at most 256 values"),
        ({"range": [1, 10**12]}, "at most 256 values"),
        ({"step": 2}, "unknown key 'step'"),
    ],
)
def test_values_that_make_no_sense_are_refused(written: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        space({"max_num_seqs": written})


def test_the_largest_number_of_values_is_allowed() -> None:
    found = space({"max_num_seqs": {"range": [1, MAX_VALUES]}})

    assert found.values_of("max_num_seqs") == list(range(1, 257))


# --- what a knob may be ---


@pytest.mark.parametrize(
    ("knob", "value", "told"),
    [
        ("num_speculative_tokens", 33, "whole numbers from 0 to 32, but got 33"),
        ("num_speculative_tokens", -1, "whole numbers from 0 to 32, but got -1"),
        ("num_speculative_tokens", 2.5, "whole numbers from 0 to 32, but got 2.5"),
        ("num_speculative_tokens", True, "whole numbers from 0 to 32, but got True"),
        ("num_speculative_tokens", "4", "whole numbers from 0 to 32, but got '4'"),
        ("weights", "int4", "weights must be one of as_is, fp8, but got 'int4'"),
        ("kv_cache_dtype", "fp16", "kv_cache_dtype must be one of auto, fp8, but got 'fp16'"),
        ("tree_width", 0, "tree_width must be whole numbers from 1, but got 0"),
        ("max_num_seqs", 0, "max_num_seqs must be whole numbers from 1, but got 0"),
        ("max_num_seqs", True, "max_num_seqs must be whole numbers from 1, but got True"),
        ("max_num_batched_tokens", 1.5, "whole numbers from 1, but got 1.5"),
    ],
)
def test_a_knob_takes_only_its_own_values(knob: str, value: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        space({knob: {"choices": [value]}})
    with pytest.raises(InputError, match=told):
        space({"seed": {"choices": [1]}}, fixed={knob: value})


def test_k_up_to_32_can_be_asked_for() -> None:
    found = space({"num_speculative_tokens": {"range": [0, 32]}})

    assert found.values_of("num_speculative_tokens") == list(range(33))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model", "may not be set here: give it with --model"),
        ("port", "a free port is chosen for every launch"),
        ("served_model_name", "it identifies the server under test"),
        ("speculative-config", "it is built from num_speculative_tokens"),
        ("speculative-config.method", "it is built from num_speculative_tokens"),
        ("quantization", "use the parameter `weights`"),
        ("config", "put its content under `fixed`"),
    ],
)
def test_what_autotune_sets_itself_is_refused(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        space({name: {"choices": ["x"]}})
    with pytest.raises(InputError, match=told):
        space({"seed": {"choices": [1]}}, fixed={name: "x"})


def test_a_misspelt_knob_is_not_taken_for_a_vllm_option() -> None:
    with pytest.raises(InputError, match="Did you mean 'max_num_seqs'"):
        space({"max_num_seq": {"choices": [8]}})


def test_a_vllm_option_with_underscores_is_told_how_it_is_written() -> None:
    with pytest.raises(InputError, match="written with dashes: 'block-size'"):
        space({"block_size": {"choices": [16, 32]}})


def test_a_parameter_cannot_be_both_searched_and_fixed() -> None:
    with pytest.raises(InputError, match="'max-num-seqs' stands under both"):
        space({"max_num_seqs": {"choices": [8, 16]}}, fixed={"max-num-seqs": 8})


def test_a_space_needs_a_parameter() -> None:
    with pytest.raises(InputError, match="parameters"):
        space({})


# --- reading it ---


def test_knobs_and_options_are_told_apart() -> None:
    found = space(
        {"num_speculative_tokens": {"range": [0, 1]}, "block-size": {"choices": [16, 32]}},
        fixed={"max-num-seqs": 32, "enforce-eager": True, "kv_cache_dtype": "fp8"},
    )

    assert found.searched_flags == {"block-size": [16, 32]}
    assert found.fixed_flags == {"enforce-eager": True}
    assert found.values_of("max_num_seqs") == [32]
    assert found.values_of("kv_cache_dtype") == ["fp8"]
    assert found.values_of("weights") is None


def test_a_knob_written_as_vllm_writes_it_is_still_the_knob() -> None:
    """`fixed` takes both spellings; under `parameters` a dashed knob must not turn into a flag.

    As a flag, `num-speculative-tokens` is an option that vLLM does not have, and
    `kv-cache-dtype` goes past the table of what the hardware can do.
    """
    found = space({"num-speculative-tokens": {"choices": [0, 4]}})

    assert found.searched_flags == {}
    assert found.values_of("num_speculative_tokens") == [0, 4]


def test_a_knob_written_as_vllm_writes_it_is_checked_all_the_same() -> None:
    with pytest.raises(InputError, match="whole numbers from 0 to 32, but got 33"):
        space({"num-speculative-tokens": {"choices": [33]}})


@pytest.mark.parametrize("name", ["p-eagle", "demo-cpu"])
def test_shipped_spaces_load_by_name(name: str) -> None:
    found = load_space(name)

    assert found.name == name
    assert 0 in (found.values_of("num_speculative_tokens") or [])


def test_an_unknown_name_is_answered_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"--space: .*but got 'p-eagel'. Did you mean 'p-eagle'"):
        load_space("p-eagel")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.yaml: the search space must exist"):
        load_space(str(tmp_path / "nowhere.yaml"))


def test_a_file_is_read_and_its_problems_name_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nname: mine\nparameters:\n  tree_widht: {choices: [1]}\n")
    with pytest.raises(InputError, match=r"mine.yaml: parameters: .*Did you mean 'tree_width'"):
        load_space(str(path))

    path.write_text("version: 1\nname: mine\nparameters:\n  tree_width: {choices: [1, 2]}\n")
    assert load_space(str(path)).values_of("tree_width") == [1, 2]


def test_a_space_of_another_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"space.yaml: version: .*but got 2"):
        validate(SearchSpace, {"version": 2, "name": "s", "parameters": {}}, "space.yaml")


@pytest.mark.parametrize(
    "name", ["speculative-config.num_speculative_tokens_per_batch_size", "speculative-config"]
)
@pytest.mark.parametrize("section", ["fixed", "parameters"])
def test_a_schedule_of_k_by_batch_size_cannot_be_slipped_in(name: str, section: str) -> None:
    """With P-EAGLE vLLM crashes, or takes the wrong rows, on all but one kind of schedule."""
    data: dict[str, Any] = {
        "version": 1,
        "name": "x",
        "parameters": {"num_speculative_tokens": {"choices": [0, 7]}},
    }
    value = "[[1, 8, 4]]"
    entry = {name: value if section == "fixed" else {"choices": [value]}}
    data[section] = {**data.get(section, {}), **entry}
    with pytest.raises(ValueError, match="may not be set here"):
        SearchSpace.model_validate(data)
