"""What engines on a virtual clock share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.measure.records import ServerCounters
from autotune.serving.virtual import added, answered
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest


def test_counters_of_different_depth_can_be_added() -> None:
    total = added(
        ServerCounters(num_drafts=1, num_accepted_tokens_per_pos=(1,)),
        ServerCounters(num_drafts=2, num_accepted_tokens_per_pos=(2, 1), has_speculation=True),
    )

    assert total.num_drafts == 3
    assert total.num_accepted_tokens_per_pos == (3, 1)
    assert total.has_speculation


def test_answers_of_a_closed_loop_follow_each_other() -> None:
    # 5 tokens: 0.5 s to the first, then four of 0.1 s: 0.9 s. Two users take four requests in turn.
    records = answered(make_schedule([None] * 4, 2), ttft_s=0.5, tpot_s=0.1)

    assert [r.sent_s for r in records] == pytest.approx([0.0, 0.0, 0.9, 0.9])
    assert [r.finished_s for r in records] == pytest.approx([0.9, 0.9, 1.8, 1.8])
    assert records[0].chunk_times_s == pytest.approx((0.5, 0.6, 0.7, 0.8, 0.9))
    assert records[0].chunk_tokens == (1, 2, 3, 4, 5)


def test_answers_of_an_open_loop_begin_at_their_times() -> None:
    records = answered(make_schedule([0.0, 0.2, 5.0], None), ttft_s=0.5, tpot_s=0.1)

    assert [r.scheduled_s for r in records] == [0.0, 0.2, 5.0]
    assert [r.finished_s for r in records] == pytest.approx([0.9, 1.1, 5.9])


def make_schedule(arrivals_s: Sequence[float | None], concurrency: int | None) -> Schedule:
    requests = tuple(
        ScheduledRequest(
            request_id=number,
            class_name="default",
            prompt=Prompt(f"prompt-{number}", (("user", "hello"),)),
            max_tokens=5,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=True,
            sampling_seed=number,
            arrival_s=arrival_s,
        )
        for number, arrival_s in enumerate(arrivals_s)
    )
    return Schedule("chat", concurrency, requests, (), 1e6, 1e6)
