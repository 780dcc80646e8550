"""What the models of the search are told about a launch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from record_helpers import measurement as of_records
from record_helpers import record
from study_helpers import at_tps, config, launch, measurement

from autotune.search.decision import Goal
from autotune.search.observing import LAUNCH_SPREAD, TAIL_SPREAD, Observer
from autotune.search.surrogate import OBJECTIVE, Observation
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.store.records import LaunchRecord, LaunchState, Phase

PLAIN = Goal("output_throughput_tps", is_maximized=True, limits={}, margin_ratio=0.02)
LIMITED = replace(PLAIN, limits={"default": {"tpot_p95_ms": 20.0, "ttft_mean_ms": 400.0}})


def observe(*launches: LaunchRecord, goal: Goal = PLAIN) -> list[Observation]:
    return Observer(goal).observations(launches)


def test_outputs_are_logs_of_the_objective_and_of_the_share_of_each_limit() -> None:
    """Ten requests of 1 s with 10 tokens each: 10 tokens/s; the first after 0.1 s, then 9 in 0.9 s."""
    (seen,) = observe(launch(1, config(3), measurement([1.0] * 10)), goal=LIMITED)
    assert dict(seen.outputs) == pytest.approx(
        {
            OBJECTIVE: math.log(10.0),
            "default.tpot_p95_ms": math.log(100.0 / 20.0),
            "default.ttft_mean_ms": math.log(100.0 / 400.0),
        }
    )
    assert seen.config == config(3)
    assert seen.is_target_load
    assert seen.concurrency == 1
    assert seen.failure is None
    assert not seen.is_stopped_early


def test_times_and_tokens_are_means_over_answered_requests() -> None:
    kept = of_records(
        # TTFT 200 ms, 9 more tokens in 900 ms; TTFT 400 ms, 4 more in 800 ms; an error.
        record(0, 0.0, [(0.2, 1), (1.1, 10)], 1.1),
        record(1, 0.0, [(0.4, 1), (1.2, 5)], 1.2),
        record(2, 0.0, [], 9.0, error="HTTP 500: no"),
    )
    (seen,) = observe(launch(1, config(3), kept))
    assert seen.mean_tpot_s == pytest.approx((0.1 + 0.2) / 2)
    assert seen.mean_ttft_s == pytest.approx((0.2 + 0.4) / 2)
    assert seen.mean_completion_tokens == pytest.approx((10 + 5) / 2)
    assert seen.mean_prompt_tokens == pytest.approx(10)
    assert seen.duration_s == pytest.approx(9.0)


def test_one_user_who_never_pauses_has_one_request_in_flight() -> None:
    (seen,) = observe(launch(1, config(3), measurement([1.0] * 10)))
    assert seen.mean_running == pytest.approx(1.0)


def test_the_launch_report_says_how_long_it_took_and_how_much_cache_there_is() -> None:
    report = {"launch_s": 42.0, "resolved": {"kv_cache_size_tokens": 1234}}
    (seen,) = observe(launch(1, config(3), at_tps(100), report=report))
    assert (seen.launch_s, seen.kv_tokens) == (42.0, 1234)


def test_without_a_report_neither_is_known() -> None:
    (seen,) = observe(launch(1, config(3), at_tps(100)))
    assert (seen.launch_s, seen.kv_tokens) == (None, None)


def test_a_failure_has_its_kind_and_no_figures() -> None:
    failure = TrialFailure(FailureKind.INSUFFICIENT_MEMORY, "no room")
    (seen,) = observe(launch(1, config(3), failure))
    assert seen == Observation(
        config(3), None, True, failure=FailureKind.INSUFFICIENT_MEMORY, repeat=0
    )


def test_rungs_of_the_ladder_have_step_times_but_no_outputs() -> None:
    rung = replace(at_tps(50), schedule_digest="another", concurrency=4)
    main, low = observe(replace(launch(1, config(3), at_tps(100)), ladder=(rung,)), goal=LIMITED)
    assert main.is_target_load
    assert not low.is_target_load
    assert dict(low.outputs) == dict(low.errors) == {}
    assert low.concurrency == 4
    # 10 tokens in 0.2 s, of which the first takes an even share.
    assert low.mean_tpot_s == pytest.approx(0.02)
    assert low.output_throughput_tps == pytest.approx(50)


def test_what_was_stopped_early_is_marked() -> None:
    cut = replace(at_tps(100), stopped_early="hopeless")
    (seen,) = observe(launch(1, config(3), cut))
    assert seen.is_stopped_early


@pytest.mark.parametrize("phase", [Phase.QUALITY, Phase.NOISE])
def test_only_search_and_race_are_learnt_from(phase: Phase) -> None:
    assert observe(launch(1, config(3), at_tps(100), phase)) == []


@pytest.mark.parametrize("state", [LaunchState.RUNNING, LaunchState.ABANDONED])
def test_a_launch_that_did_not_end_says_nothing(state: LaunchState) -> None:
    assert observe(replace(launch(1, config(3), None), state=state)) == []


def test_launches_keep_their_order_and_are_read_once() -> None:
    observer = Observer(PLAIN)
    first, second = (
        launch(1, config(3), at_tps(100)),
        launch(2, config(5), at_tps(120), Phase.CONFIRM),
    )
    before = observer.observations([first])
    after = observer.observations([first, second])
    assert [o.config for o in after] == [config(3), config(5)]
    assert after[0] is before[0]


# --- errors ---


def test_without_noise_the_error_is_that_between_launches() -> None:
    (seen,) = observe(launch(1, config(3), at_tps(100, num_requests=40)))
    assert seen.errors[OBJECTIVE] == pytest.approx(LAUNCH_SPREAD, rel=0.05)


def test_requests_that_differ_add_to_it() -> None:
    """Requests of one user take 0.5 or 1.5 s: the mean of 100 has a standard error of 5 % at most."""
    (seen,) = observe(launch(1, config(3), measurement([0.5, 1.5, 1.5, 0.5] * 25)))
    assert LAUNCH_SPREAD < seen.errors[OBJECTIVE] < 0.1


def test_a_p95_of_few_requests_is_known_less_well() -> None:
    """sqrt(p (1 - p) / n) of the share above, and a log unit of an exponential tail holds about 3 p."""
    errors = [
        observe(launch(1, config(3), measurement([1.0] * n)), goal=LIMITED)[0].errors[
            "default.tpot_p95_ms"
        ]
        for n in (25, 100)
    ]
    tails = [math.sqrt(0.05 * 0.95 / n) / (3 * 0.05) for n in (25, 100)]
    assert errors == pytest.approx([math.hypot(TAIL_SPREAD, t) for t in tails])
    assert errors[0] > errors[1]


def test_a_figure_that_is_not_there_is_left_out() -> None:
    """No request was answered: no throughput, no latency."""
    (seen,) = observe(launch(1, config(3), measurement([1.0] * 4, num_failed=4)), goal=LIMITED)
    assert seen.mean_tpot_s is None
    assert seen.output_throughput_tps is None
    assert all(math.isfinite(v) for v in seen.outputs.values())
    assert OBJECTIVE not in seen.outputs
