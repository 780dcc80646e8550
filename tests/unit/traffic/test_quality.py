"""The part of the profile that is about quality."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.strict import validate
from autotune.traffic.quality import QualitySettings


def test_defaults_are_those_of_the_documents() -> None:
    settings = validate(QualitySettings, {}, "traffic.yaml")
    assert (settings.gate, settings.num_prompts, settings.max_tokens) == (
        "teacher_forced",
        64,
        128,
    )
    thresholds = settings.thresholds
    assert (thresholds.min_forced_ratio, thresholds.max_single_gap_nats) == (0.995, 2.0)
    assert (thresholds.good_mean_kl_nats, thresholds.max_mean_kl_nats) == (0.01, 0.05)
    assert (thresholds.good_agreement_ratio, thresholds.min_agreement_ratio) == (0.98, 0.95)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"gate": "of"}, "gate: must be 'teacher_forced' or 'off'"),
        ({"num_prompt": 5}, "unknown key 'num_prompt'. Did you mean 'num_prompts'?"),
        ({"num_prompts": 0}, "num_prompts: must be greater than or equal to 1"),
        ({"max_logprob_gap": 0}, "max_logprob_gap"),
        ({"thresholds": {"max_mean_kl_nats": 0.001}}, "good_mean_kl_nats must be at most"),
        ({"thresholds": {"min_agreement_ratio": 0.99}}, "good_agreement_ratio must be at least"),
        ({"thresholds": {"min_forced_ratio": 1.5}}, "thresholds.min_forced_ratio"),
        ({"tasks": [{}]}, "tasks[0].file: the key is required"),
        ({"tasks": [{"file": "a", "check": {"kind": "regex"}}]}, "tasks[0].check.pattern"),
        ({"tasks": [{"file": "a", "check": {}}]}, "the key `kind` is required"),
        ({"tasks": [{"file": "a", "check": {"kind": "number"}}]}, "exactly one of `expected`"),
    ],
)
def test_mistakes_are_named(data: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(QualitySettings, data, "traffic.yaml")
    assert said in str(caught.value)
