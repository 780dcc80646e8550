"""K by batch size in exported files: the one safe schedule passes, every other one is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from autotune.export.vllm import VllmExporter, options_from_yaml
from autotune.serving.config import ServingConfig
from autotune.serving.vllm_options import Needs, vllm_options

CONFIG = ServingConfig("target", "head", 7, parallel_drafting=True, speculation_off_above=4)


def problems(options: dict[str, Any]) -> list[str]:
    files = {
        "config.yaml": yaml.safe_dump(options),
        "env.sh": "",
        "serve.sh": "#!/bin/sh\n",
        "result.json": "{}",
    }
    return VllmExporter().validate(files)


def with_schedule(schedule: object) -> dict[str, Any]:
    options = copy.deepcopy(vllm_options(CONFIG, Needs(), "cuda"))
    options["speculative-config"]["num_speculative_tokens_per_batch_size"] = schedule
    return options


def test_the_schedule_survives_the_file() -> None:
    options = vllm_options(CONFIG, Needs(), "cuda")

    assert problems(options) == []
    assert options_from_yaml(yaml.safe_dump(options)) == options


@pytest.mark.parametrize(
    "schedule",
    [
        [[1, 2, 7], [3, 8, 3]],  # vLLM dies with a P-EAGLE head
        [[1, 8, 4]],  # vLLM takes the wrong rows
        [[1, 4, 7]],  # nothing is switched off
        [[2, 4, 7], [5, 65536, 0]],
        [[1, 4, 0], [5, 65536, 7]],
        [[1, 4]],
        [7],
        [],
        {"1": 7},
        "x",
    ],
)
def test_any_other_schedule_is_refused(schedule: object) -> None:
    assert any("in one step" in problem for problem in problems(with_schedule(schedule)))
