"""What a launch is expected to take: its own kind's time, failing that its weights', failing that any."""

from __future__ import annotations

import numpy as np
import pytest
from study_helpers import config

from autotune.search.launch_costs import GUESSED_LAUNCH_S, LaunchCosts
from autotune.search.surrogate import Observation
from autotune.serving.config import ServingConfig

CONFIGS = [
    config(4, max_num_seqs=8),
    config(4, max_num_seqs=64),
    config(6),
    config(4, weights="fp8"),
]
EVEN = np.zeros(len(CONFIGS))


def seen(of: ServingConfig, launch_s: float, duration_s: float = 0.0) -> Observation:
    return Observation(of, 1, True, launch_s=launch_s, duration_s=duration_s)


def test_before_any_launch_all_cost_the_same() -> None:
    assert LaunchCosts(CONFIGS).seconds([], EVEN).tolist() == [GUESSED_LAUNCH_S] * 4


def test_what_shares_weights_cache_and_k_shares_its_launch_time() -> None:
    costs = LaunchCosts(CONFIGS).seconds([seen(CONFIGS[0], 40.0), seen(CONFIGS[2], 60.0)], EVEN)
    # Own kind 40 and 60; FP8 weights were never launched, so the mean of all: 50.
    assert costs.tolist() == [40.0, 40.0, 60.0, 50.0]


def test_a_new_kind_is_expected_to_take_what_its_weights_take() -> None:
    costs = LaunchCosts(CONFIGS).seconds([seen(CONFIGS[0], 40.0), seen(CONFIGS[3], 90.0)], EVEN)
    assert costs[2] == 40.0


def test_traffic_follows_the_predicted_throughput_within_bounds() -> None:
    observations = [seen(CONFIGS[0], 0.0, duration_s=30.0)]
    speeds = np.log([1.0, 2.0, 0.5, 1000.0])
    costs = LaunchCosts(CONFIGS).seconds(observations, speeds)
    assert costs == pytest.approx([30.0, 15.0, 60.0, 7.5])
