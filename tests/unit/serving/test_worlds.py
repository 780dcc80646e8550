"""The named worlds against published figures and data sheets, and what their truth adds to a roofline.

Fitted: gpt-oss-120b on B200 (overheads, overlap of routing, acceptance) to the batch 1 and batch 8 figures of
vLLM PR 32887; the heads' acceptance to their cards and to vLLM's post of 2026-03-13. Predicted: the
comparison of heads on gpt-oss-20b (but for the choice of one overhead, see docs/engines.md), the gain of
Qwen3-Coder, and all that is said of trees.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autotune.serving.capabilities import capabilities
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext
from autotune.serving.failures import FailureKind, TrialFailed
from autotune.serving.scheduler_limits import scheduler_limits
from autotune.serving.simulated import SimulatedEngine, true_measurement, true_objective
from autotune.serving.step_cost import step_time_s
from autotune.serving.vllm_options import Needs
from autotune.serving.worlds import WORLDS, World, acceptance, survival
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

B200_120B = "b200-gpt-oss-120b"
P_EAGLE_20B, EAGLE3_20B = "b200-gpt-oss-20b", "b200-gpt-oss-20b-trees"
H100 = WORLDS["h100-8b"]


def config(k: int = 0, *, is_parallel: bool = True, **knobs: Any) -> ServingConfig:
    drafter = "drafter" if k else None
    return ServingConfig("model", drafter, k, parallel_drafting=is_parallel and k > 0, **knobs)


def schedule(
    num_requests: int, concurrency: int, max_tokens: int = 256, chars: int = 400
) -> Schedule:
    requests = tuple(
        ScheduledRequest(
            request_id=number,
            class_name="default",
            prompt=Prompt(f"prompt-{number}", (("user", "x" * chars),)),
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=True,
            sampling_seed=number,
            arrival_s=None,
        )
        for number in range(num_requests)
    )
    return Schedule("chat", concurrency, requests, (), 1e6, 1e6)


@cache
def tps(
    world: str, k: int, concurrency: int, *, is_parallel: bool = True, width: int = 1
) -> float:
    served = config(k, is_parallel=is_parallel, tree_width=width)
    sent = schedule(2 * concurrency, concurrency)
    return true_objective(served, sent, world=world)


def best_k(world: str, concurrency: int) -> int:
    return max(range(11), key=lambda k: tps(world, k, concurrency))


class TestPublishedFigures:
    def test_gpt_oss_120b_alone(self) -> None:
        # PR 32887: K = 7, about 560 tok/s, 1.52 x no speculation.
        k = best_k(B200_120B, 1)

        assert 6 <= k <= 8
        assert tps(B200_120B, k, 1) == pytest.approx(560, rel=0.05)
        assert tps(B200_120B, k, 1) / tps(B200_120B, 0, 1) == pytest.approx(1.52, rel=0.05)

    def test_gpt_oss_120b_at_batch_8(self) -> None:
        # PR 32887: K = 3, 1.34 x no speculation.
        k = best_k(B200_120B, 8)

        assert 2 <= k <= 4
        assert tps(B200_120B, k, 8) / tps(B200_120B, 0, 8) == pytest.approx(1.34, rel=0.05)

    @pytest.mark.parametrize(
        ("concurrency", "human_eval"),
        [(1, 1.55), (2, 1.53), (4, 1.45), (8, 1.35), (16, 1.31), (32, 1.37), (64, 1.23)],
    )
    def test_p_eagle_over_eagle3_each_at_its_best(
        self, concurrency: int, human_eval: float
    ) -> None:
        # vLLM's post of 2026-03-13: K in {3, 5, 7}, 1.05 x to 1.69 x over all its data sets.
        parallel = max(tps(P_EAGLE_20B, k, concurrency) for k in (3, 5, 7))
        sequential = max(tps(EAGLE3_20B, k, concurrency, is_parallel=False) for k in (3, 5, 7))

        assert 1.05 <= parallel / sequential <= 1.69
        assert parallel / sequential == pytest.approx(human_eval, rel=0.15)

    def test_qwen3_coder_alone(self) -> None:
        # AWS, 2026-06-17: B200, FP8, HumanEval, K = 11: 1,167 tok/s against 294, 3.97 x. The ratio alone.
        k11, none = (
            true_objective(config(k, weights="fp8"), schedule(2, 1), world="b200-qwen3-coder-30b")
            for k in (11, 0)
        )
        assert k11 / none == pytest.approx(3.97, rel=0.1)

    @pytest.mark.parametrize(
        ("world", "k", "length"),
        [
            (P_EAGLE_20B, 3, 3.02),  # HumanEval, the post
            (P_EAGLE_20B, 7, 3.94),
            (EAGLE3_20B, 3, 2.65),
            (EAGLE3_20B, 7, 3.03),
            (B200_120B, 5, 2.68),  # MT-Bench, the card
            ("h200-qwen3-coder-30b", 4, 4.30),  # HumanEval, the card
            ("h200-qwen3-coder-30b", 10, 6.66),
            ("h200-qwen3-coder-30b", 18, 7.51),
        ],
    )
    def test_acceptance_lengths(self, world: str, k: int, length: float) -> None:
        assert 1 + sum(survival(WORLDS[world], k)) == pytest.approx(length, rel=0.03)


class TestStepsOfAGpu:
    def test_rows_are_padded_to_captured_sizes(self) -> None:
        # Sizes are every 8th: 201 to 208 rows cost the same but for the part of each row, 5 us.
        # The 8 rows of a size more are 8 x 29 us of arithmetic, of which the p-norm leaves over half.
        of_rows = {n: float(step_time_s(H100, config(), n, 0.0)) for n in (200, 201, 208, 209)}

        assert of_rows[208] - of_rows[201] == pytest.approx(7 * 5e-6)
        assert of_rows[201] - of_rows[200] > 4 * 29e-6
        assert of_rows[209] - of_rows[208] > 4 * 29e-6

    def test_full_graphs_hold_whole_requests(self) -> None:
        # K = 6: sizes are rounded up to multiples of 7, so 32 requests are 224 rows: a size. 31 requests
        # are 217, which the list's 216 is rounded up to: a size as well; no row is padded in either.
        free_head = replace(
            H100.head, weight_bytes=0.0, num_layers=0, overhead_s=0.0, overhead_per_row_s=0.0
        )
        world = replace(H100, head=free_head)
        unpadded = replace(world, hardware=replace(H100.hardware, has_graphs=False))
        for batch in (31, 32):
            verified_s = float(step_time_s(world, config(6), batch, 0.0))
            assert verified_s == pytest.approx(
                float(step_time_s(unpadded, config(), 7 * batch, 0.0))
            )

    def test_above_the_largest_graph_kernels_are_launched_one_by_one(self) -> None:
        # 36 layers x 20 us, with and without a graph for the same 256 rows.
        eager = config(flags=(("enforce-eager", True),))
        small = config(flags=(("max-cudagraph-capture-size", 128),))
        graph_s = step_time_s(H100, config(), 256, 0.0)

        assert step_time_s(H100, eager, 256, 0.0) - graph_s == pytest.approx(36 * 20e-6)
        assert step_time_s(H100, small, 256, 0.0) - graph_s == pytest.approx(36 * 20e-6)

    def test_reading_and_computing_get_in_each_others_way_at_the_balance_point(self) -> None:
        # 16.4 GB / 2.8 TB/s = 5.857 ms; 200 rows x 16.4 GFLOP / 560 TFLOP/s = 5.857 ms: times 2^(1/4).
        expected_s = 16.4e9 / 2.8e12 * 2**0.25 + 0.9e-3 + 200 * 5e-6
        assert step_time_s(H100, config(), 200, 0.0) == pytest.approx(expected_s)

    def test_fp8_arithmetic_pays_only_where_there_is_some(self) -> None:
        def gain(world: str) -> float:
            fp8 = step_time_s(WORLDS[world], config(weights="fp8"), 512, 0.0)
            return float(step_time_s(WORLDS[world], config(), 512, 0.0) / fp8)

        assert gain("h100-8b") > 1.3
        assert gain("a100-qwen3-8b") < 1.1

    def test_a_step_without_drafts_costs_a_twentieth_more_than_no_speculation(self) -> None:
        off = step_time_s(H100, config(4, speculation_off_above=8), 16, 5e3, is_drafting=False)

        assert off == pytest.approx(1.05 * float(step_time_s(H100, config(), 16, 5e3)))

    def test_the_head_computes_prompts_too(self) -> None:
        # Arithmetic bounds both: 4,096 tokens x 2.2 GFLOP / 560 TFLOP/s = 16.1 ms for the head.
        extra_s = step_time_s(H100, config(4), 0, 0.0, 4096) - step_time_s(
            H100, config(), 0, 0.0, 4096
        )
        assert extra_s == pytest.approx(0.0161, rel=0.05)

    def test_alike_routing_touches_fewer_experts(self) -> None:
        world = WORLDS[B200_120B]
        apart = replace(world, target=replace(world.target, routing_overlap=0.0))

        assert step_time_s(world, config(7), 1, 0.0) < step_time_s(apart, config(7), 1, 0.0)
        assert step_time_s(world, config(), 8, 0.0) == step_time_s(apart, config(), 8, 0.0)


class TestAcceptance:
    def test_a_larger_k_lowers_every_position_by_up_to_3_percent(self) -> None:
        at_2, at_8 = survival(H100, 2), survival(H100, 8)

        assert all(0.97 <= b / a < 0.995 for a, b in zip(at_2, at_8, strict=False))

    def test_it_falls_off_a_cliff_past_the_trained_depth(self) -> None:
        values = survival(H100, 10)  # trained to 8

        assert values[7] / values[6] > 0.6
        assert values[8] / values[7] == pytest.approx(0.3)

    def test_precision_changes_it_a_little(self) -> None:
        plain = acceptance(H100, config(3))
        fp8 = acceptance(H100, config(3, weights="fp8", kv_cache_dtype="fp8"))

        # 0.99 and 0.995 for each position on the way.
        expected = [p * (0.99 * 0.995) ** (i + 1) for i, p in enumerate(plain)]
        assert fp8 == pytest.approx(expected)


class TestTrees:
    def test_only_an_engine_with_trees_lets_the_width_move(self) -> None:
        def live(world: str) -> bool:
            engine = SimulatedEngine(EngineSettings(options={"world": world}))
            target, heads = engine.inspect("model", ["drafter"], "--model", "--drafter")
            return capabilities(engine.describe(), target, heads).is_live("tree_width")

        assert live("h100-8b-trees")
        assert not live("h100-8b")

    def test_more_candidates_at_the_root_raise_every_level(self) -> None:
        chain = acceptance(WORLDS["h100-8b-trees"], config(3, is_parallel=False))
        tree = acceptance(WORLDS["h100-8b-trees"], config(6, is_parallel=False, tree_width=2))

        # The root is missed 2^-0.75 times as often; what follows it is as before.
        root = 1 - (1 - chain[0]) * 2**-0.75
        assert tree == pytest.approx(
            [root, chain[1] * root / chain[0], chain[2] * root / chain[0]]
        )

    @pytest.mark.parametrize("world", ["h100-8b-trees", "l40s-8b-trees"])
    def test_width_pays_in_small_batches_alone(self, world: str) -> None:
        def best(concurrency: int, width: int) -> float:
            depths = (1, 2, 3, 4)
            return max(
                tps(world, width * d, concurrency, is_parallel=False, width=width) for d in depths
            )

        assert best(1, 2) > 1.03 * best(1, 1)
        assert best(128, 2) < best(128, 1)

    def test_a_parallel_config_is_refused(self) -> None:
        with pytest.raises(TrialFailed, match="mask_hidden not found"):
            true_measurement(config(4), schedule(2, 1), world="h100-8b-trees")


class TestMemory:
    def test_the_samplers_buffers_can_kill_a_server_under_load(self) -> None:
        # 80 GB x 1 % = 0.8 GB is left beside the server; 9 rows x 151,936 x 4 bytes = 5.47 MB a
        # request, so the 147th request that decodes is one too many.
        served = config(8, flags=(("gpu-memory-utilization", 0.99),))
        assert scheduler_limits(H100, served).max_sampled_requests == 146

        true_measurement(served, schedule(146, 146, 64))
        with pytest.raises(TrialFailed) as caught:
            true_measurement(served, schedule(160, 160, 64))
        assert caught.value.failure.kind is FailureKind.OUT_OF_MEMORY_UNDER_LOAD

    def test_an_overfull_cache_preempts_and_costs_throughput(self) -> None:
        # L40S: (48 x 0.9 - 16.4 - 0.61 - 0.71) GB / 147,456 bytes = 172,800 tokens. 200 requests of
        # 100 + 1,500 tokens need 320,000.
        sent = schedule(200, 200, 1500)
        measurement = true_measurement(config(max_num_seqs=200), sent, world="l40s-8b")
        calm = true_measurement(config(max_num_seqs=100), sent, world="l40s-8b")

        assert measurement.counters.num_preemptions > 20
        assert calm.counters.num_preemptions == 0
        assert [r.num_completion_tokens for r in measurement.records] == [1500] * 200

    def test_nothing_fits_without_room_for_one_request(self) -> None:
        with pytest.raises(TrialFailed) as caught:
            true_measurement(
                config(),
                schedule(1, 1),
                world="h100-8b",
                needs=Needs(longest_request_tokens=10**6),
            )
        assert caught.value.failure.kind is FailureKind.INSUFFICIENT_MEMORY


class TestOptionsOfVllm:
    def test_stream_interval_merges_chunks(self) -> None:
        plain = true_measurement(config(), schedule(1, 1, 100)).records[0]
        merged = true_measurement(
            config(flags=(("stream-interval", 20),)), schedule(1, 1, 100)
        ).records[0]

        # One token a step: the first at once, then every twentieth, and the rest at the end.
        assert merged.chunk_tokens == (1, 21, 41, 61, 81, 100)
        assert merged.finished_s == plain.finished_s
        assert merged.chunk_times_s[1] == plain.chunk_times_s[20]

    def test_speculation_off_above_a_batch_size_drafts_in_small_batches_only(self) -> None:
        served = config(4, speculation_off_above=4)
        small = true_measurement(served, schedule(8, 4))
        large = true_measurement(served, schedule(8, 8, 64))

        assert small.counters.num_drafts > 0
        assert small.records == true_measurement(config(4), schedule(8, 4)).records
        assert large.counters.num_drafts == 0
        assert large.counters.has_speculation


class TestSizes:
    @pytest.mark.parametrize("name", WORLDS)
    def test_they_are_the_data_sheets(self, name: str) -> None:
        engine = SimulatedEngine(EngineSettings(options={"world": name}))
        _, heads = engine.inspect("model", ["a", "b"], "--model", "--drafter")
        sizes = engine.sizes("model", heads)

        assert set(sizes.drafters) == {"a", "b"}
        device, hardware = sizes.device, WORLDS[name].hardware
        if name != "cpu-demo":
            assert device.bandwidth_bytes_per_s is not None
            assert device.compute_flops_per_s is not None
            assert device.bandwidth_bytes_per_s > hardware.bandwidth_bytes_per_s
            assert device.compute_flops_per_s > hardware.compute_flops_per_s
        assert device.has_graphs is (name != "cpu-demo")

    def test_experts_by_hand(self) -> None:
        # 20.9 G parameters, 19.1 G of them experts at 4.25 bits = 10.2 GB; 32 experts, 4 per token.
        sizes = SimulatedEngine(EngineSettings(options={"world": P_EAGLE_20B})).sizes("m", [])

        assert sizes.target.expert_bytes == pytest.approx(10.2e9, rel=0.15)
        assert sizes.target.num_active_parameters == pytest.approx(3.6e9)


class TestMatrix:
    def test_there_are_enough_and_none_that_does_not_fit(self) -> None:
        assert len(WORLDS) >= 25
        assert "h100-qwen3-32b" not in WORLDS
        assert "l40s-gpt-oss-120b" not in WORLDS
        assert WORLDS["h100-8b"] is WORLDS["h100-qwen3-8b"]

    @pytest.mark.parametrize("name", WORLDS)
    def test_each_serves(self, name: str) -> None:
        is_parallel = WORLDS[name].head.is_parallel
        sent = schedule(4, 2, 16)
        assert (
            true_measurement(config(3, is_parallel=is_parallel), sent, world=name).num_errors == 0
        )
        assert 30 <= WORLDS[name].launch_s <= 200


class TestChance:
    @staticmethod
    def launches(world: World, number: int) -> tuple[int, int]:
        """Launch again and again; count crashes and outliers."""
        engine = SimulatedEngine(EngineSettings(options={"world": world}))
        exact_s = true_measurement(config(), schedule(1, 1, 400), world=world).duration_s
        crashes = outliers = 0
        for launch in range(number):
            try:
                with engine.launch(config(), LaunchContext(Path(), f"launch-{launch}")) as server:
                    duration_s = server.measure(schedule(1, 1, 400)).duration_s
                    outliers += duration_s > 1.06 * exact_s
            except TrialFailed as failed:
                crashes += failed.failure.kind.is_worth_a_retry
        return crashes, outliers

    def test_one_launch_in_a_hundred_crashes_and_three_are_slow(self) -> None:
        crashes, outliers = self.launches(H100, 1000)

        # Means 10 and 30, standard deviations 3.1 and 5.4: within 3 of them.
        assert 1 <= crashes <= 19
        assert 14 <= outliers <= 46


class TestSpeed:
    @pytest.mark.parametrize(
        ("concurrency", "num_requests", "max_tokens", "interval", "limit_s"),
        [(256, 512, 256, 16, 0.15), (64, 200, 512, 1, 0.1)],
    )
    def test_a_measurement_is_quick(
        self, concurrency: int, num_requests: int, max_tokens: int, interval: int, limit_s: float
    ) -> None:
        served = config(5, flags=(("stream-interval", interval),))
        sent = schedule(num_requests, concurrency, max_tokens, chars=2000)
        engine = SimulatedEngine(EngineSettings())
        with engine.launch(served, LaunchContext(Path(), "launch-1")) as server:
            began_s = time.process_time()
            server.measure(sent)
            assert time.process_time() - began_s < limit_s
