"""Prompts divided among warm-up, search and held out: disjoint, stable, whoever shares them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.traffic.classes import TrafficClass
from autotune.traffic.pools import Part, Pool, load_pools
from autotune.traffic.schedule import PromptRealism
from autotune.traffic.tokens import TokenCounter


def classes_of(*prompts: dict[str, object], **rest: object) -> list[TrafficClass]:
    return [
        TrafficClass.model_validate({"name": f"c{i}", "prompts": each, **rest})
        for i, each in enumerate(prompts)
    ]


@pytest.fixture
def pools(tmp_path: Path, words: TokenCounter) -> Callable[..., dict[str, Pool]]:
    def load(classes: list[TrafficClass], seed: int = 1) -> dict[str, Pool]:
        return load_pools(classes, tmp_path, random.Random(seed), words)

    return load


def ids(pool: Pool, part: str) -> set[str]:
    return {c.content_id for c in getattr(pool, part)}


def write_prompts(path: Path, first: int, last: int) -> None:
    path.write_text("".join(f"question {i}\n" for i in range(first, last)), encoding="utf-8")


@pytest.mark.parametrize(
    ("holdout", "sizes"),
    [
        # 50 prompts: a fifth for the warm-up, the share of the other 40 held out.
        (0.0, (10, 40, 0)),
        (0.25, (10, 30, 10)),
        (0.5, (10, 20, 20)),
        (0.9, (10, 4, 36)),
    ],
)
def test_parts_have_their_sizes_and_share_nothing(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]], holdout: float, sizes: tuple[int, ...]
) -> None:
    write_prompts(tmp_path / "p.txt", 0, 50)
    pool = pools(classes_of({"file": "p.txt", "holdout": holdout}))["c0"]
    parts = [ids(pool, part) for part in ("warmup", "search", "holdout")]
    assert tuple(map(len, parts)) == sizes
    assert len(set.union(*parts)) == 50


def test_the_division_is_the_same_every_time(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    write_prompts(tmp_path / "p.txt", 0, 50)
    classes = classes_of({"file": "p.txt", "holdout": 0.5})
    assert pools(classes) == pools(classes)
    assert pools(classes, seed=2) != pools(classes)


def test_what_is_measured_depends_on_the_part(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    write_prompts(tmp_path / "p.txt", 0, 50)
    held, all_searched = (
        pools(classes_of({"file": "p.txt", "holdout": share}))["c0"] for share in (0.5, 0.0)
    )
    assert (held.of(Part.SEARCH), held.of(Part.HOLDOUT)) == (held.search, held.holdout)
    assert all_searched.of(Part.HOLDOUT) == all_searched.of(Part.SEARCH) == all_searched.search


def test_classes_of_one_source_share_its_pool(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    write_prompts(tmp_path / "p.txt", 0, 50)
    found = pools(classes_of({"file": "p.txt"}, {"file": "p.txt"}))
    assert found["c0"] == found["c1"]


def test_overlapping_sources_keep_apart_what_must_be(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    # 30 questions stand in both files.
    write_prompts(tmp_path / "a.txt", 0, 50)
    write_prompts(tmp_path / "b.txt", 20, 70)
    classes = classes_of({"file": "a.txt", "holdout": 0.5}, {"file": "b.txt"})
    for seed in range(10):
        found = pools(classes, seed).values()
        warm = set.union(*(ids(pool, "warmup") for pool in found))
        searched = set.union(*(ids(pool, "search") for pool in found))
        held = set.union(*(ids(pool, "holdout") for pool in found))
        assert not warm & searched
        assert not warm & held
        assert not held & searched


def test_a_class_that_loses_all_its_prompts_to_another_is_refused(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    write_prompts(tmp_path / "a.txt", 0, 2)
    write_prompts(tmp_path / "b.txt", 0, 40)
    classes = classes_of({"file": "a.txt"}, {"file": "b.txt", "holdout": 0.9})
    messages = []
    for seed in range(20):
        try:
            pools(classes, seed)
        except InputError as err:
            messages.append(str(err))
    assert messages
    assert set(messages) == {
        "a.txt: a class must have prompts of its own, but all that could be measured are in the "
        "warm-up or held out for another class. "
        "Add prompts, or give both classes the same `prompts`."
    }


@pytest.mark.parametrize(("count", "holdout", "needed"), [(1, 0.0, 2), (2, 0.5, 3)])
def test_too_few_prompts_are_refused(
    tmp_path: Path,
    pools: Callable[..., dict[str, Pool]],
    count: int,
    holdout: float,
    needed: int,
) -> None:
    write_prompts(tmp_path / "p.txt", 0, count)
    with pytest.raises(InputError, match=rf"at least {needed} distinct prompts.*got {count}\."):
        pools(classes_of({"file": "p.txt", "holdout": holdout}))


def test_the_smallest_pool_that_can_be_divided(
    tmp_path: Path, pools: Callable[..., dict[str, Pool]]
) -> None:
    write_prompts(tmp_path / "p.txt", 0, 3)
    pool = pools(classes_of({"file": "p.txt", "holdout": 0.9}))["c0"]
    assert [len(part) for part in (pool.warmup, pool.search, pool.holdout)] == [1, 1, 1]


# --- how real they are ---


def test_realism_follows_the_source(tmp_path: Path, pools: Callable[..., dict[str, Pool]]) -> None:
    write_prompts(tmp_path / "p.txt", 0, 5)
    random_words = {"random": {"tokens": 7, "force": True}}
    found = pools(classes_of({"file": "p.txt"}, {"builtin": "demo/chat"}, random_words))
    assert [found[f"c{i}"].realism for i in range(3)] == [
        PromptRealism.USER,
        PromptRealism.PROXY,
        PromptRealism.RANDOM,
    ]


def test_random_prompts_have_their_length_and_none_comes_twice(
    pools: Callable[..., dict[str, Pool]], words: TokenCounter
) -> None:
    pool = pools(classes_of({"random": {"tokens": 12, "force": True}}))["c0"]
    texts = [c.turns[0].prompt.text for c in (*pool.warmup, *pool.search)]
    assert len(texts) == len(set(texts)) == 1000
    assert {words.count(text) for text in texts} == {12}


def test_long_random_prompts_are_fewer(
    pools: Callable[..., dict[str, Pool]], words: TokenCounter
) -> None:
    # A million tokens in all: 50 prompts of 20,000.
    pool = pools(classes_of({"random": {"tokens": 20_000, "force": True}}))["c0"]
    assert len(pool.warmup) + len(pool.search) == 50
