"""Where switching speculation off above a batch size is tried, and why not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_helpers import config, make_profile, make_setup

from autotune.search.refinement import batch_switches, why_not_refined
from autotune.search.setup import SearchSetup

BOUNDED = {"kind": "rate", "rps": 2.0, "max_concurrency": 16}


def setup_of(folder: Path, load: dict[str, Any]) -> SearchSetup:
    return make_setup(folder, profile=make_profile(folder, load=load))


@pytest.mark.parametrize(
    ("load", "sizes"),
    [
        # A quarter and a half of 16, and of 8.
        (BOUNDED, [4, 8]),
        ({"kind": "users", "users": 8, "think_time": {"dist": "constant", "s": 1}}, [2, 4]),
        # Of 2: half a request is one, and so is one.
        ({**BOUNDED, "max_concurrency": 2}, [1]),
        # Of 1: nothing is above one request.
        ({**BOUNDED, "max_concurrency": 1}, []),
    ],
)
def test_the_switch_is_tried_at_a_quarter_and_a_half(
    tmp_path: Path, load: dict[str, Any], sizes: list[int]
) -> None:
    setup = setup_of(tmp_path, load)
    winner = config(5, max_num_seqs=16)
    assert why_not_refined(setup) is None
    # Nothing but the switch is changed.
    assert batch_switches(setup, winner) == [
        replace(winner, speculation_off_above=size) for size in sizes
    ]


def test_without_speculation_there_is_nothing_to_switch_off(tmp_path: Path) -> None:
    assert batch_switches(setup_of(tmp_path, BOUNDED), config(0)) == []


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({"kind": "concurrency", "concurrency": 8}, "keeps the batch at one size"),
        ({"kind": "rate", "rps": 2.0}, "load.max_concurrency is not given"),
    ],
)
def test_where_it_is_no_use_it_says_why(tmp_path: Path, load: dict[str, Any], why: str) -> None:
    setup = setup_of(tmp_path, load)
    assert why in (why_not_refined(setup) or "")
    assert batch_switches(setup, config(5)) == []


def test_what_the_engine_cannot_do_goes_before_everything(tmp_path: Path) -> None:
    setup = replace(setup_of(tmp_path, BOUNDED), why_not_off_by_batch="too old a version")
    assert why_not_refined(setup) == "too old a version"
    assert batch_switches(setup, config(5)) == []
