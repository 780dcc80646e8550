"""Blocks and system prompts that requests share."""

from __future__ import annotations

import random

import pytest

from autotune.traffic.importing import sharing
from autotune.traffic.importing.inferred import Inferred
from autotune.traffic.importing.sharing import Blocks, SharingRecorder, SystemPrompts
from autotune.traffic.rows import Row


def recorded(*rows: Row) -> SharingRecorder:
    recorder = SharingRecorder()
    for row in rows:
        recorder.add(row)
    return recorder


def blocks(*ids: int) -> Row:
    return Row(1, num_input_tokens=1, prefix_ids=ids)


def test_blocks_that_came_before_are_hits() -> None:
    # 9 blocks; of 1 2 3, 1 2 4, 5 the second request finds 1 and 2, the fourth all of its two.
    found = recorded(blocks(1, 2, 3), blocks(1, 2, 4), blocks(5), blocks(1, 2)).blocks()
    assert found == Inferred(Blocks(pytest.approx(4 / 9), 512, 9, 2), 4)
    assert recorded(Row(1, num_input_tokens=5)).blocks() is None


@pytest.mark.parametrize("is_consecutive", [True, False])
def test_more_blocks_than_are_kept_are_estimated(
    monkeypatch: pytest.MonkeyPatch, is_consecutive: bool
) -> None:
    monkeypatch.setattr(sharing, "MAX_BLOCKS_KEPT", 4096)
    rng = random.Random(4)
    ids = list(range(50_000)) if is_consecutive else [rng.getrandbits(63) for _ in range(50_000)]
    recorder = recorded(*(blocks(*ids[n : n + 10]) for n in range(0, 50_000, 10)))
    for n in range(0, 25_000, 10):
        recorder.add(blocks(*ids[n : n + 10]))
    found = recorder.blocks()
    assert found is not None
    # 50,000 different ones of 75,000; between 2,048 and 4,096 are kept, so 1/sqrt(2048) = 2.2 % each.
    assert found.value.hit_ratio == pytest.approx(1 / 3, abs=4 * 0.022 * 2 / 3)
    assert found.value.num_blocks == 75_000


def asked(text: str, system: str | None = None) -> Row:
    head = (("system", system),) if system else ()
    return Row(1, messages=(*head, ("user", text)))


def test_system_prompts_that_several_requests_have() -> None:
    found = recorded(
        asked("a", "be kind"), asked("b", "be kind"), asked("c", "be kind"), asked("d", "be brief"),
        asked("e", "be brief"), asked("f", "only once"), asked("g"),
        Row(1, turns=("h",), system="be kind"), Row(1, num_input_tokens=5),
    ).system_prompts()  # fmt: skip
    assert found == Inferred(SystemPrompts(6 / 8, 2, len("be kind")), 8)


def test_system_prompts_that_nobody_shares() -> None:
    assert recorded(asked("a", "one"), asked("b", "two"), asked("c")).system_prompts() is None
