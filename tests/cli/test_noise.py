"""`autotune noise` on the simulated engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from autotune.store.records import LaunchRecord, Phase

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Launches = Callable[..., list[LaunchRecord]]

NOISE = ("noise", "--profile", "traffic.yaml", "--space", "space.yaml", "--engine", "simulated")


def test_it_launches_one_config_again_and_again_and_says_how_far_it_differs(
    cli: Run, launches: Launches
) -> None:
    outcome = cli(*NOISE, "--k", "3", "--launches", "3", "--measurements", "2")

    assert outcome.returncode == 0, outcome.stderr
    assert "noise of K=3 (simulated)" in outcome.stdout
    assert "3 launches, 6 measurements, 96 requests" in " ".join(outcome.stdout.split())
    done = launches("tiny-noise")
    assert [x.phase for x in done] == [Phase.NOISE] * 3
    assert {x.config.num_speculative_tokens for x in done} == {3}
    assert [len(x.measurements) for x in done] == [2, 2, 2]


def test_launches_that_are_there_already_count(cli: Run, launches: Launches) -> None:
    cli(*NOISE, "--launches", "2")
    before = launches("tiny-noise")

    outcome = cli(*NOISE, "--launches", "3")

    assert outcome.returncode == 0
    after = launches("tiny-noise")
    assert after[:2] == before
    assert len(after) == 3


def test_figures_for_scripts_stand_alone_on_standard_output(cli: Run) -> None:
    outcome = cli(*NOISE, "--launches", "2", "--json")

    (first, *_) = json.loads(outcome.stdout)
    assert first["metric"] == "output_throughput_tps"
    assert first["num_launches"] == 2
    # By the formula in the docstring: exp((4.303 + 1.061) * CV * sqrt(2 / 2)) - 1 for two a side.
    cv = first["between_launches"]["cv_ratio"]
    assert first["detectable_gain_ratio"]["2"] == pytest.approx(
        2.71828 ** (5.364 * cv) - 1, rel=1e-2
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--k", "5"), "no candidate of the search space has K = 5"),
        (("--launches", "1"), "--launches"),
        (("--study", "../x"), "--study"),
    ],
)
def test_what_cannot_be_repeated_is_refused(
    cli: Run, arguments: tuple[str, ...], part: str
) -> None:
    outcome = cli(*NOISE, *arguments)

    assert outcome.returncode == 2
    assert part in outcome.stderr


def test_a_study_of_noise_can_be_shown(cli: Run) -> None:
    cli(*NOISE, "--launches", "2")

    shown = cli("show")

    assert shown.returncode == 0, shown.stderr
    assert "tiny-noise" in shown.stdout
    assert "K=" in shown.stdout
