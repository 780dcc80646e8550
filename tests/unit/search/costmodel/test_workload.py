"""A schedule summed up: lengths, loads, and what measurements teach of them."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.search.costmodel.workload import Workload
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest


def profile(load: dict[str, Any]) -> TrafficProfile:
    classes = [{"name": "d", "prompts": {"builtin": "demo/chat"}}]
    return TrafficProfile.model_validate(
        {"version": 1, "name": "t", "load": load, "classes": classes}
    )


def schedule(
    concurrency: int | None, lengths: tuple[tuple[int, int], ...], **changes: Any
) -> Schedule:
    requests = tuple(
        ScheduledRequest(
            request_id=i,
            class_name="d",
            prompt=Prompt(f"p{i}", (("user", "x" * num_chars),)),
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            ignore_eos=changes.get("ignore_eos", True),
            sampling_seed=i,
            arrival_s=None if concurrency is not None else 2.0 * i,
        )
        for i, (num_chars, max_tokens) in enumerate(lengths)
    )
    return Schedule("chat", concurrency, requests, (), 100.0, 100.0)


def test_closed_loop_lengths_are_counted_by_four_characters() -> None:
    sent = schedule(2, ((400, 10), (800, 30)))
    load = Workload.of(profile({"kind": "concurrency", "concurrency": 2}), sent)
    assert (load.users, load.rate_rps) == (2, None)
    assert load.prompt_tokens == pytest.approx((100 + 200) / 2)
    assert load.completion_tokens == pytest.approx((10 + 30) / 2)
    # Deviation 10 of mean 20.
    assert load.completion_cv2 == pytest.approx(0.25)


def test_answers_that_may_stop_are_taken_as_shorter_until_they_are_seen() -> None:
    sent = schedule(1, ((400, 100),), ignore_eos=False)
    load = Workload.of(profile({"kind": "concurrency", "concurrency": 1}), sent)
    assert load.completion_tokens < 100
    seen = load.learnt(prompt_tokens=120.0, completion_tokens=37.0)
    assert (seen.prompt_tokens, seen.completion_tokens) == pytest.approx((120.0, 37.0))


def test_burstiness_is_the_inverse_of_the_squared_variation_of_gaps() -> None:
    load = {"kind": "rate", "rps": 0.5, "arrival": "gamma", "burstiness": 0.25}
    found = Workload.of(profile(load), schedule(None, ((400, 10),) * 4))
    assert (found.users, found.rate_rps, found.arrival_cv2) == (None, 0.5, 4.0)
