"""The sentences on a decision's evidence and on the search's models."""

from __future__ import annotations

import math
from typing import Any

from study_helpers import at_tps, config

from autotune.report.evidence import evidence_text
from autotune.report.models import models_text
from autotune.search.decision import Decision, Finalist, Goal, decide
from autotune.search.race import race_step

GOAL = Goal("output_throughput_tps", is_maximized=True, limits={}, margin_ratio=0.02)


def decided(*speeds: tuple[int, float], is_heldout: bool = False) -> Decision:
    finalists = [
        Finalist(config(k), (), (at_tps(tps), at_tps(tps)), f"K={k}") for k, tps in speeds
    ]
    race = race_step(finalists, GOAL, 12)
    decision = decide(finalists, GOAL, race=race, is_heldout=is_heldout)
    assert decision is not None
    return decision


def test_it_says_how_much_was_launched_and_how_sure_it_is() -> None:
    text = evidence_text(decided((0, 50.0), (4, 100.0), is_heldout=True))
    assert text.startswith("Evidence: 4 fresh launches of 2 finalists, ")
    assert "on prompts that the search never saw" in text
    assert "with over 99% probability the leader is within 2% of the best finalist" in text
    assert "Not told apart" not in text


def test_it_names_what_is_as_good() -> None:
    assert evidence_text(decided((3, 100.0), (4, 100.5))).endswith("Not told apart from it: K=4.")


def test_a_decision_of_an_older_version_has_no_evidence() -> None:
    old = Decision(**{**vars(decided((0, 50.0), (4, 100.0))), "evidence": None, "tied": ()})
    assert evidence_text(old) == ""


def test_models_are_named_best_first() -> None:
    environment: dict[str, Any] = {
        "models": {
            "leave_one_out": {
                "cost model": {"objective": math.log(1.2)},
                "physics-free": {"objective": math.log(1.05)},
            },
            "num_configs": 7,
            "findings": ["abc: position 2 is above position 1"],
        }
    }
    assert models_text(environment) == [
        "Models (leave-one-out error of the objective over 7 configs): physics-free 5.0%, "
        "cost model 20.0%; physics-free predicted better",
        "Speculation of abc: position 2 is above position 1",
    ]


def test_a_study_without_models_says_nothing() -> None:
    assert models_text({}) == []
    assert models_text({"models": {"leave_one_out": {}, "num_configs": 2}}) == []
