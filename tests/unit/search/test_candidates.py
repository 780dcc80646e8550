"""The candidate list, with every count worked out by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_helpers import head, make_space

from autotune.errors import InputError
from autotune.search.candidates import Candidates, enumerate_candidates
from autotune.serving.capabilities import Capabilities, EngineInfo, Fixed, capabilities
from autotune.serving.memory import MemoryModel
from autotune.serving.models import DrafterInfo
from autotune.serving.sizes import DeviceSizes, DrafterSizes, ServingSizes, TargetSizes
from autotune.serving.vllm_options import Needs

SAME = "the same as another candidate (drafter knobs at K = 0)"
SAME_BUDGET = "max_num_batched_tokens beyond what the offered requests can use, the same as less"
NO_GRAPHS = "max-cudagraph-capture-size below K + 1, which vLLM refuses"
NO_DIVISOR = "tree_width does not divide the number of draft tokens"
REFUSED = "max_num_batched_tokens below max_num_seqs, which vLLM refuses"
SAME_SEQS = "max_num_seqs at or above the offered concurrency, the same as the default"
STARVED = "max_num_batched_tokens starves decoding at the offered concurrency"

EVERYTHING = Capabilities(max_num_speculative_tokens=32, fixed={})
H100 = EngineInfo("vllm", "0.33.0", "cuda", "H100", compute_capability=(9, 0))


def listed(
    parameters: Mapping[str, Any],
    *,
    capable: Capabilities = EVERYTHING,
    heads: Sequence[DrafterInfo] = (head(),),
    concurrency: int | None = None,
    longest_request_tokens: int | None = None,
    memory: MemoryModel | None = None,
    **more: Any,
) -> Candidates:
    space = make_space(parameters, **more)
    return enumerate_candidates(
        space,
        capable,
        "model",
        heads,
        concurrency=concurrency,
        longest_request_tokens=longest_request_tokens,
        memory=memory,
    )


def ks(candidates: Candidates) -> list[int]:
    return [c.config.num_speculative_tokens for c in candidates.items]


def values_of(candidates: Candidates, dimension: str) -> tuple[Any, ...]:
    return next(d.values for d in candidates.dimensions if d.name == dimension)


# --- counts ---


def test_every_combination_is_accounted_for() -> None:
    found = listed(
        {
            "num_speculative_tokens": [0, 1, 2, 3, 4],
            "tree_width": [1, 2],
            "weights": ["as_is", "fp8"],
            "kv_cache_dtype": ["auto", "fp8"],
        }
    )

    assert found.num_combinations == 5 * 2 * 2 * 2
    # K = 1 and K = 3 cannot have width 2: 2 x 4 combinations of weights and cache.
    # K = 0 with width 2 is K = 0 with width 1: 4 of them.
    assert found.removed == {NO_DIVISOR: 8, SAME: 4}
    assert len(found.items) == 40 - 8 - 4


def test_no_candidate_stands_twice() -> None:
    found = listed({"num_speculative_tokens": [0, 2, 4], "tree_width": [1, 2, 4]})

    # K = 0: 1; K = 2: widths 1 and 2; K = 4: widths 1, 2 and 4.
    assert len(found.items) == 1 + 2 + 3
    assert len(found.by_digest()) == 6
    assert found.removed == {SAME: 2, NO_DIVISOR: 1}


def test_tree_width_must_divide_k() -> None:
    found = listed({"num_speculative_tokens": [6], "tree_width": [1, 2, 3, 4, 5, 6]})

    widths = [c.config.tree_width for c in found.items if c.config.num_speculative_tokens]
    assert widths == [1, 2, 3, 6]
    assert found.removed == {NO_DIVISOR: 2, SAME: 5}


def test_no_speculation_is_always_a_candidate() -> None:
    found = listed({"num_speculative_tokens": [3, 5]})

    assert ks(found) == [0, 3, 5]


def test_k_that_the_space_fixes_is_compared_with_no_speculation() -> None:
    found = listed({"max_num_seqs": [8, 16]}, fixed={"num-speculative-tokens": 5})

    assert set(ks(found)) == {0, 5}


# --- the cap on K ---


def test_k_is_capped_two_above_the_trained_depth() -> None:
    space = {"num_speculative_tokens": {"range": [0, 32]}}
    capable = capabilities(H100, None, [head(trained_depth=8)])

    found = listed(space, capable=capable)

    assert ks(found) == list(range(11))  # 0 to 8 + 2
    assert found.num_combinations == 11
    # 11 to 32 are 22 values.
    assert found.removed == {"K above 10, past the drafter's trained depth (values of K)": 22}


def test_k_beyond_the_trained_depth_is_searched_when_asked() -> None:
    space = {"num_speculative_tokens": {"range": [0, 32]}}
    capable = capabilities(H100, None, [head(trained_depth=8)], beyond_trained_depth=True)

    found = listed(space, capable=capable, beyond_trained_depth=True)

    assert ks(found) == list(range(33))
    assert found.removed == {}


def test_without_a_known_depth_k_goes_to_32() -> None:
    capable = capabilities(H100, None, [head(trained_depth=None)])

    found = listed({"num_speculative_tokens": {"range": [0, 32]}}, capable=capable)

    assert ks(found) == list(range(33))


def test_a_fixed_k_above_the_cap_leaves_only_no_speculation_and_says_so() -> None:
    capable = capabilities(H100, None, [head(trained_depth=3)])

    found = listed({"weights": ["as_is", "fp8"]}, capable=capable,
                   fixed={"num_speculative_tokens": 9})  # fmt: skip

    assert set(ks(found)) == {0}
    assert found.removed == {"K above 5, past the drafter's trained depth (values of K)": 1}


# --- knobs that cannot move ---


def test_without_a_drafter_k_is_fixed_with_the_reason() -> None:
    capable = capabilities(H100, None, [])

    found = listed({"num_speculative_tokens": {"range": [0, 8]}}, capable=capable, heads=[])

    assert ks(found) == [0]
    assert [(f.knob, f.value, f.reason) for f in found.fixed if f.knob.startswith("num")] == [
        ("num_speculative_tokens", 0, "no drafter is given")
    ]
    assert found.removed == {}
    assert found.baseline is found.default is found.starter


def test_a_dead_knob_keeps_its_value_and_is_listed_with_its_reason() -> None:
    why = Fixed("weights", "as_is", "this hardware cannot")
    capable = Capabilities(32, {"weights": why})

    found = listed(
        {"num_speculative_tokens": [0, 2], "weights": ["as_is", "fp8"]}, capable=capable
    )

    assert found.fixed == (why,)
    assert found.num_combinations == 2
    assert {c.config.weights for c in found.items} == {"as_is"}


def test_a_dead_knob_that_nobody_wanted_to_move_is_not_mentioned() -> None:
    capable = Capabilities(32, {"weights": Fixed("weights", "as_is", "this hardware cannot")})

    assert listed({"num_speculative_tokens": [0, 2]}, capable=capable).fixed == ()


def test_fp8_that_the_user_fixed_is_not_served_where_it_cannot_be() -> None:
    why = Fixed("kv_cache_dtype", "auto", "this hardware cannot")
    capable = Capabilities(32, {"kv_cache_dtype": why})

    found = listed({"num_speculative_tokens": [0, 2]}, capable=capable,
                   fixed={"kv-cache-dtype": "fp8"})  # fmt: skip

    assert {c.config.kv_cache_dtype for c in found.items} == {"auto"}
    assert found.fixed == (why,)


# --- several drafters ---


def test_several_drafters_collapse_at_k_0() -> None:
    heads = [head("one"), head("two")]

    found = listed({"num_speculative_tokens": [0, 1, 2, 3]}, heads=heads)

    assert found.num_combinations == 4 * 2
    assert found.removed == {SAME: 1}
    assert [(c.config.num_speculative_tokens, c.config.drafter) for c in found.items] == [
        (0, None), (1, "one"), (1, "two"), (2, "one"), (2, "two"), (3, "one"), (3, "two"),
    ]  # fmt: skip


def test_each_drafter_drafts_in_its_own_way() -> None:
    heads = [head("parallel"), head("one-by-one", is_parallel=False)]

    found = listed({"num_speculative_tokens": [2]}, heads=heads)

    drafting = {c.config.drafter: c.config.parallel_drafting for c in found.items}
    assert drafting == {None: False, "parallel": True, "one-by-one": False}


# --- max_num_seqs and max_num_batched_tokens ---


def test_the_engines_own_limits_stay_in_reach() -> None:
    found = listed(
        {"num_speculative_tokens": [0], "max_num_seqs": [8, 16], "max_num_batched_tokens": [512]},
    )

    # max_num_seqs: 8, 16 and the default; a single value of the other is a decision, not a choice.
    pairs = {(c.config.max_num_seqs, c.config.max_num_batched_tokens) for c in found.items}
    assert pairs == {(None, 512), (8, 512), (16, 512)}


def test_seqs_at_or_above_the_concurrency_are_the_default() -> None:
    found = listed(
        {"num_speculative_tokens": [0, 1], "max_num_seqs": [8, 15, 16, 32]}, concurrency=16
    )

    assert found.num_combinations == 2 * 5
    assert found.removed == {SAME_SEQS: 2 * 2}  # 16 and 32, for both K
    assert values_of(found, "max_num_seqs") == (None, 8, 15)


def test_above_vllms_own_smallest_default_of_128_seqs_they_matter() -> None:
    found = listed({"num_speculative_tokens": [0], "max_num_seqs": [64, 512]}, concurrency=200)

    # A default of 128, as on CPU, would hold 72 of the 200 back, so 512 is not the same.
    assert [c.config.max_num_seqs for c in found.items] == [None, 64, 512]


def test_a_known_devices_own_default_decides_which_seqs_are_the_same() -> None:
    space = {"num_speculative_tokens": [0], "max_num_seqs": [64, 512]}

    found = listed(space, concurrency=200, memory=sized(80e9))

    # 256 is that device's default: 512 is the same as it.
    assert [c.config.max_num_seqs for c in found.items] == [None, 64]
    assert found.removed == {SAME_SEQS: 1}


def test_a_fixed_number_of_seqs_is_kept_whatever_the_load() -> None:
    found = listed({"num_speculative_tokens": [0, 1]}, concurrency=4, fixed={"max-num-seqs": 32})

    assert {c.config.max_num_seqs for c in found.items} == {32}
    assert found.removed == {}


def test_a_budget_below_the_seqs_is_refused_by_vllm() -> None:
    found = listed(
        {
            "num_speculative_tokens": [0],
            "max_num_seqs": [16, 64],
            "max_num_batched_tokens": [32, 128],
        },
    )

    assert found.num_combinations == 3 * 3
    assert found.removed == {REFUSED: 1}  # 64 seqs with a budget of 32


@pytest.mark.parametrize(
    ("is_parallel", "starved"),
    [
        # At concurrency 8 a P-EAGLE head costs 8 x 2K: K = 2 takes 32, K = 3 takes 48, K = 4 64.
        (True, {(3, 32), (4, 32)}),
        # A plain EAGLE-3 head costs 8 x (K + 1): K = 3 takes 32, K = 4 takes 40.
        (False, {(4, 32)}),
    ],
)
def test_budgets_that_starve_decoding_go_out(
    is_parallel: bool, starved: set[tuple[int, int]]
) -> None:
    found = listed(
        {
            "num_speculative_tokens": [0, 1, 2, 3, 4],
            "max_num_batched_tokens": [32, 64, 128],
        },
        heads=[head(is_parallel=is_parallel)],
        concurrency=8,
    )

    everything = {(k, budget) for k in range(5) for budget in (None, 32, 64, 128)}
    left = {
        (c.config.num_speculative_tokens, c.config.max_num_batched_tokens) for c in found.items
    }
    assert left == everything - starved
    assert found.removed == {STARVED: len(starved)}


def test_without_speculation_a_request_costs_one_token() -> None:
    found = listed(
        {"num_speculative_tokens": [0], "max_num_batched_tokens": [7, 8]}, concurrency=8
    )

    assert [c.config.max_num_batched_tokens for c in found.items] == [None, 8]


def test_fewer_seqs_need_less_of_the_budget() -> None:
    found = listed(
        {
            "num_speculative_tokens": [4],
            "max_num_seqs": [2, 4],
            "max_num_batched_tokens": [16, 32],
        },
        concurrency=8,
    )

    # K = 4 costs 8 a request: the default of all 8 needs 64, 4 seqs 32, 2 seqs 16.
    left = {
        (c.config.max_num_seqs, c.config.max_num_batched_tokens)
        for c in found.items
        if c.config.num_speculative_tokens
    }
    assert left == {(None, None), (2, None), (4, None), (2, 16), (2, 32), (4, 32)}


def test_without_a_known_concurrency_one_request_must_fit_a_step() -> None:
    found = listed({"num_speculative_tokens": [8], "max_num_batched_tokens": [15, 16]})

    # K = 8 costs a P-EAGLE request 2 x 8 = 16 tokens a step; K = 0 costs one.
    assert found.removed == {STARVED: 1}
    assert [c.config.max_num_batched_tokens for c in found.items] == [None, 15, 16, None, 16]


# --- other vLLM options ---


def test_searched_and_fixed_options_reach_the_config() -> None:
    found = listed(
        {"num_speculative_tokens": [0], "block-size": [16, 32]}, fixed={"enforce-eager": True}
    )

    assert [c.config.flags for c in found.items] == [
        (("block-size", 16), ("enforce-eager", True)),
        (("block-size", 32), ("enforce-eager", True)),
    ]


def test_true_and_1_are_different_values() -> None:
    found = listed({"num_speculative_tokens": [0], "a": [True, False], "b": [1, 0]})

    assert len(found.items) == 4
    for candidate in found.items:
        assert found.nearest(candidate.params, set()) is candidate


# --- refusals ---


def test_a_space_that_leaves_nothing_says_what_went_out_and_why() -> None:
    with pytest.raises(InputError, match=r"leaves nothing to launch: .*starves decoding.* \(3\)"):
        listed({"num_speculative_tokens": [0, 1, 2]}, concurrency=8,
               fixed={"max-num-batched-tokens": 4})  # fmt: skip


def test_a_space_that_explodes_is_refused_before_it_is_listed() -> None:
    many = {f"option-{letter}": {"range": [1, 100]} for letter in "abc"}

    with pytest.raises(InputError, match="has 2,000,000 combinations; at most 500,000"):
        listed({"num_speculative_tokens": [0, 1], **many})


# --- anchors ---


def test_the_anchors_are_no_speculation_the_trained_depth_and_a_small_k() -> None:
    found = listed({"num_speculative_tokens": {"range": [0, 10]}}, heads=[head(trained_depth=8)])

    anchors = (found.baseline, found.default, found.starter)
    assert [a.config.num_speculative_tokens for a in anchors] == [0, 8, 3]


@pytest.mark.parametrize(
    ("depths", "trained", "default", "starter"),
    [
        ([0, 2, 4, 6], None, 6, 2),  # 7 is what published recipes use; 2 and 4 are as near to 3
        ([0, 1, 32], None, 1, 1),  # 7 is nearer to 1 than to 32
        ([0, 5, 6], 4, 5, 5),
        ([0, 1, 2], 8, 2, 2),
    ],
)
def test_anchors_are_the_nearest_that_the_space_has(
    depths: list[int], trained: int | None, default: int, starter: int
) -> None:
    found = listed({"num_speculative_tokens": depths}, heads=[head(trained_depth=trained)])

    assert found.default.config.num_speculative_tokens == default
    assert found.starter.config.num_speculative_tokens == starter


@pytest.mark.parametrize("is_default_first", [True, False])
def test_anchors_leave_everything_else_alone(is_default_first: bool) -> None:
    order = 1 if is_default_first else -1
    found = listed(
        {
            "num_speculative_tokens": [0, 3, 8],
            "weights": ["as_is", "fp8"][::order],
            "kv_cache_dtype": ["auto", "fp8"][::order],
            "tree_width": [1, 2][::order],
            "max_num_seqs": [8, 16],
            "max_num_batched_tokens": [2048, 4096],
        }
    )

    for anchor in (found.baseline, found.default, found.starter):
        assert anchor.config.max_num_seqs is None
        assert anchor.config.max_num_batched_tokens is None
        assert anchor.config.weights == "as_is"
        assert anchor.config.kv_cache_dtype == "auto"
        assert anchor.config.tree_width == 1


def test_the_default_is_a_k_that_can_be_launched() -> None:
    """A small token budget leaves only small K: what "drafter on" means then is the largest of them.

    At concurrency 256 a budget of 2048 is 8 tokens a request, which is K = 4 at 2K each.
    """
    found = listed({"num_speculative_tokens": {"range": [0, 10]}}, heads=[head(trained_depth=8)],
                   concurrency=256, fixed={"max-num-batched-tokens": 2048})  # fmt: skip

    assert ks(found) == [0, 1, 2, 3, 4]
    assert found.starter.config.num_speculative_tokens == 3
    assert found.default.config.num_speculative_tokens == 4


def test_the_deepest_is_the_default_where_the_cap_is_near() -> None:
    capable = capabilities(H100, None, [head(trained_depth=8)])
    found = listed({"num_speculative_tokens": {"range": [0, 32]}}, capable=capable)

    assert found.deepest is found.default  # K = 8 of at most 10


@pytest.mark.parametrize(("trained", "deepest"), [(None, 32), (8, 32)])
def test_the_deepest_is_near_the_largest_k_that_is_searched(
    trained: int | None, deepest: int
) -> None:
    found = listed({"num_speculative_tokens": {"range": [0, 32]}, "weights": ["as_is", "fp8"]},
                   heads=[head(trained_depth=trained)])  # fmt: skip

    assert found.deepest.config.num_speculative_tokens == deepest
    assert found.deepest.config.weights == "as_is"


# --- what the offered requests can use ---


def test_seqs_above_every_concurrency_are_one_value() -> None:
    found = listed({"num_speculative_tokens": [0], "max_num_seqs": [128, 512, 1024]},
                   concurrency=300)  # fmt: skip

    # The default may hold some of the 300 back; 512 and 1024 hold nobody back.
    assert [c.config.max_num_seqs for c in found.items] == [None, 128, 512]
    assert found.removed == {SAME_SEQS: 1}


def test_budgets_that_can_never_be_filled_are_one_value() -> None:
    found = listed(
        {"num_speculative_tokens": [0, 4], "max_num_batched_tokens": [2048, 4096, 8192]},
        concurrency=4,
        longest_request_tokens=600,
    )

    # K = 4: 4 users x (2 x 4 + 600) = 2432; K = 0: 4 x 601 = 2404. Only 2048 is below.
    assert {c.config.max_num_batched_tokens for c in found.items} == {None, 2048, 4096}
    assert found.removed == {SAME_BUDGET: 2}


# --- memory ---


def sized(memory_bytes: float, *, max_k: int = 8) -> MemoryModel:
    """A target of 16 GB with heads of 2 GB, 8,192 tokens of 64 KB in its longest request."""
    target = TargetSizes(8e9, 8e9, 16e9, 32, 4096, 100_000, 65_536.0)
    device = DeviceSizes("GPU", memory_bytes, 256, 8192)
    sizes = ServingSizes(target, {"head": DrafterSizes(1e9, 2e9, 1, 2048.0, 1000)}, device, 0.9)
    return MemoryModel(sizes, Needs(8, 8000, max_k, 32_768))


def test_what_does_not_fit_is_counted_and_the_anchors_stay_while_they_may() -> None:
    """0.9 x 24 GB = 21.6 GB. Working memory is 0.5 + 1.3 + 0.2 GB at 8,192 tokens and 5.9 GB at 32,768.

    With 16 GB of weights and 0.5 GB of graphs that leaves 3 GB without a head and 1 GB with one, of which
    one longest request takes 0.6 GB; the first band is 2 % of 24 GB and half of the working memory.
    """
    space = {"num_speculative_tokens": [0, 3, 8], "max_num_batched_tokens": [4096, 32_768]}

    found = listed(space, concurrency=8, memory=sized(24e9))

    assert sum(found.removed.values()) == found.num_combinations - len(found.items)
    assert any(reason.startswith("memory: ") for reason in found.removed)
    assert found.baseline.config.max_num_batched_tokens is None
    assert found.default.config.num_speculative_tokens == 8
    assert found.default.config.max_num_batched_tokens is None
    assert found.starter in found.items
    assert found.deepest in found.items
    assert 32_768 not in {c.config.max_num_batched_tokens for c in found.items}


def test_where_only_fp8_fits_it_stands_in_for_the_anchors() -> None:
    space = {"num_speculative_tokens": [0, 3, 8], "weights": ["as_is", "fp8"]}

    found = listed(space, concurrency=8, memory=sized(18e9))

    assert {c.config.weights for c in found.items} == {"fp8"}
    assert [a.config.weights for a in (found.baseline, found.default, found.starter)] == [
        "fp8"
    ] * 3
    assert values_of(found, "weights") == ("fp8",)


def test_a_space_that_does_not_fit_at_all_says_so() -> None:
    with pytest.raises(InputError, match=r"nothing to launch: memory: "):
        listed({"num_speculative_tokens": [0, 3]}, concurrency=8, memory=sized(10e9))


def test_a_capture_size_below_a_draft_is_refused_by_vllm() -> None:
    found = listed({"num_speculative_tokens": [0, 3, 4]}, concurrency=1, memory=sized(80e9),
                   fixed={"max-cudagraph-capture-size": 4})  # fmt: skip

    assert ks(found) == [0, 3]
    assert found.removed == {NO_GRAPHS: 1}


# --- size ---

LARGE = {
    "num_speculative_tokens": {"range": [0, 32]},
    "weights": ["as_is", "fp8"],
    "kv_cache_dtype": ["auto", "fp8"],
    "max_num_seqs": [8, 16, 32, 64, 96],
    "max_num_batched_tokens": [4096, 8192, 16_384, 32_768],
    "gpu-memory-utilization": [0.86, 0.88, 0.9, 0.91, 0.92],
}


def test_20_000_candidates_are_listed_and_searched_in_time() -> None:
    began_s = time.process_time()
    found = listed(LARGE, concurrency=128, longest_request_tokens=4000,
                   memory=sized(80e9, max_k=32))  # fmt: skip
    listed_s = time.process_time() - began_s

    assert found.num_combinations == 33 * 2 * 2 * 6 * 5 * 5
    assert found.num_combinations == len(found.items) + sum(found.removed.values())
    assert len(found.items) > 15_000
    assert listed_s < 3.0
    excluded = {c.config.digest for c in found.items[:50]}
    found.nearest(found.items[0].params, excluded)  # learns the places
    began_s = time.process_time()
    for candidate in found.items[100:110]:
        assert found.nearest(candidate.params, excluded) is candidate
    assert (time.process_time() - began_s) / 10 < 0.02


# --- nearest ---


def test_nearest_is_the_fewest_steps_away() -> None:
    found = listed({"num_speculative_tokens": {"range": [0, 10]}})
    at = {c.config.num_speculative_tokens: c for c in found.items}
    digests = {k: c.config.digest for k, c in at.items()}

    assert found.nearest(at[6].params, set()) is at[6]
    assert found.nearest(at[6].params, {digests[6], digests[5]}) is at[7]
    assert found.nearest(at[10].params, {digests[10]}) is at[9]
    assert found.nearest(at[0].params, set(digests.values()) - {digests[9]}) is at[9]
    assert found.nearest(at[0].params, set(digests.values())) is None


def test_steps_are_measured_against_the_length_of_the_line() -> None:
    found = listed({"num_speculative_tokens": {"range": [0, 8]}, "max_num_seqs": [8, 16, 32, 64]})
    at = {(c.config.num_speculative_tokens, c.config.max_num_seqs): c for c in found.items}
    wanted = at[4, 16]

    # max_num_seqs has 5 values (None, 8, ...), so a step is 1/4; a step of K is 1/8.
    excluded = {c.config.digest for c in found.items} - {
        at[5, 16].config.digest,  # 1/8 away
        at[4, 8].config.digest,  # 1/4 away
        at[7, 16].config.digest,  # 3/8 away
    }
    assert found.nearest(wanted.params, excluded) is at[5, 16]
    excluded.add(at[5, 16].config.digest)
    assert found.nearest(wanted.params, excluded) is at[4, 8]
    excluded.add(at[4, 8].config.digest)
    assert found.nearest(wanted.params, excluded) is at[7, 16]


def test_a_combination_that_went_out_is_answered_with_a_launchable_one() -> None:
    found = listed({"num_speculative_tokens": [0, 3, 4], "tree_width": [1, 2]})
    asked = {**found.items[0].params, "num_speculative_tokens": 3, "tree_width": 2}

    answer = found.nearest(asked, set())

    # K = 3 with width 2 cannot be launched; K = 4 with width 2 is half a line away, K = 3 with
    # width 1 is a whole one.
    assert answer is not None
    assert (answer.config.num_speculative_tokens, answer.config.tree_width) == (4, 2)


# --- any space ---

SPACES = st.fixed_dictionaries(
    {"num_speculative_tokens": st.lists(st.integers(0, 32), min_size=1, max_size=5)},
    optional={
        "tree_width": st.lists(st.integers(1, 4), min_size=1, max_size=3),
        "weights": st.lists(st.sampled_from(["as_is", "fp8"]), min_size=1, max_size=2),
        "kv_cache_dtype": st.lists(st.sampled_from(["auto", "fp8"]), min_size=1, max_size=2),
        "max_num_seqs": st.lists(st.integers(1, 512), min_size=2, max_size=3, unique=True),
        "max_num_batched_tokens": st.lists(
            st.integers(1, 8192), min_size=2, max_size=3, unique=True
        ),
        "block-size": st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=2),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    parameters=SPACES,
    concurrency=st.none() | st.integers(1, 512),
    depth=st.none() | st.integers(1, 16),
    num_heads=st.integers(1, 2),
)
def test_whatever_the_space_the_list_keeps_its_promises(
    parameters: dict[str, Any], concurrency: int | None, depth: int | None, num_heads: int
) -> None:
    heads = [replace(head(trained_depth=depth), name=f"head-{n}") for n in range(num_heads)]
    capable = capabilities(replace(H100, has_trees=True), None, heads)

    found = listed(parameters, capable=capable, heads=heads, concurrency=concurrency)

    beyond = {k for k in parameters["num_speculative_tokens"] if depth and k > depth + 2}
    num_removed = sum(found.removed.values()) - len(beyond)
    assert found.num_combinations == len(found.items) + num_removed
    assert len(found.by_digest()) == len(found.items)
    for candidate in found.items:
        config = candidate.config
        assert set(candidate.params) == {d.name for d in found.dimensions}
        assert all(candidate.params[d.name] in d.values for d in found.dimensions)
        assert config.num_speculative_tokens not in beyond
        if concurrency and config.max_num_batched_tokens:
            each = max(1, 2 * config.num_speculative_tokens)
            in_flight = min(concurrency, config.max_num_seqs or concurrency)
            assert each * in_flight <= config.max_num_batched_tokens
    defaults = [
        c for c in found.items
        if c.config.max_num_seqs is None and c.config.max_num_batched_tokens is None
    ]  # fmt: skip
    assert defaults
    for anchor in (found.baseline, found.default, found.starter, found.deepest):
        assert anchor in found.items
    assert found.baseline.config.num_speculative_tokens == 0
    assert found.baseline in defaults
