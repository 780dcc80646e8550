"""The gate over recorded real vLLM answers: honest servers pass, broken ones do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.measure.quality import gate as gate_module
from autotune.measure.quality.endpoint import EndpointFailed
from autotune.measure.quality.gate import Findings, Gate
from autotune.measure.quality.tasks import load_tasks
from autotune.measure.quality.verdict import (
    QualityFigures,
    QualityLevel,
    QualityVerdict,
    verdict_from_dict,
)
from autotune.traffic.quality import QualitySettings
from tests.quality_fakes import NUM_PROMPTS, Replay, recorded_prompts, recording

SETTINGS = QualitySettings(max_tokens=64)


def gate_of(
    settings: QualitySettings = SETTINGS, *, is_lossy: bool = False, **more: object
) -> Gate:
    return Gate(settings, recorded_prompts(), 2, is_lossy=is_lossy, **more)  # type: ignore[arg-type]  # passed on


def speculative_verdict(fault: str | None = None) -> QualityVerdict:
    """Judge K = 8, broken or not."""
    gate = gate_of()
    assert gate.missing() == "candidate"
    with Replay("k8", "baseline", fault) as fake:
        gate.visit_candidate(fake.endpoint)
    assert gate.missing() == "baseline"
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
    assert gate.missing() is None
    return gate.verdict()


def figures_of(verdict: QualityVerdict) -> QualityFigures:
    assert verdict.figures is not None
    return verdict.figures


# --- Without quantisation ---


def test_real_speculation_passes() -> None:
    verdict = speculative_verdict()
    assert verdict.level is QualityLevel.PASSED
    assert verdict.reasons == ()
    figures = figures_of(verdict)
    assert figures.num_prompts == NUM_PROMPTS == figures.floor.num_pairs
    assert figures.forced.num_positions == sum(
        len(answer["token_ids"]) for c in ("1", "4") for answer in recording()["answers"]["k8"][c]
    )
    assert figures.forced.num_best == figures.forced.num_positions
    assert figures.distributions is None
    # Several tokens at a time take another path through the arithmetic than a single one does: the
    # baseline at 1 parts from itself at 4 more often than it does from K = 8 there.
    assert figures.match_concurrent.num_exact == NUM_PROMPTS
    assert figures.floor.num_exact == figures.match_serial.num_exact < NUM_PROMPTS
    # And its own answers are not all what it would choose on reading them.
    assert figures.forced_baseline.num_best < figures.forced_baseline.num_near
    assert figures.loops.num_new == 0
    assert figures.num_cut_short == 0


def test_one_wrong_token_in_one_answer_is_caught() -> None:
    verdict = speculative_verdict("wrong_token")
    assert verdict.level is QualityLevel.FAILED
    forced = figures_of(verdict).forced
    # One position of about a thousand: the share alone would let it pass.
    assert forced.num_near >= 0.995 * forced.num_positions
    assert forced.num_far == 1
    assert (forced.worst[0].prompt, forced.worst[0].position) == (5, 20)
    assert forced.worst[0].gap_nats > 2
    assert "at token 20 of the answer to prompt 5" in verdict.reasons[0]


def test_a_loop_is_caught_and_named() -> None:
    verdict = speculative_verdict("loop")
    assert verdict.level is QualityLevel.FAILED
    loops = figures_of(verdict).loops
    assert (loops.num_new, loops.num_prompts) == (1, 16)
    assert any("answered with a loop" in reason for reason in verdict.reasons)
    assert any("emitted tokens are not those" in reason for reason in verdict.reasons)


def test_tokens_shifted_at_the_borders_of_drafts_are_caught() -> None:
    verdict = speculative_verdict("shift")
    assert verdict.level is QualityLevel.FAILED
    figures = figures_of(verdict)
    # Each answer of 64 tokens has borders at 9, 18, ... 63: about seven wrong tokens of each.
    assert figures.forced.num_positions - figures.forced.num_near > 5 * NUM_PROMPTS
    assert figures.match_concurrent.num_exact == 0
    assert any("the baseline equals itself in" in reason for reason in verdict.reasons)


def test_a_loop_of_the_models_own_is_not_held_against_the_config() -> None:
    gate = gate_of()
    with Replay("k8", "baseline", "loop") as fake:
        gate.visit_candidate(fake.endpoint)
    with Replay("baseline", "baseline", "loop") as fake:
        gate.visit_baseline(fake.endpoint)
    loops = figures_of(gate.verdict()).loops
    assert (loops.num_baseline, loops.num_candidate, loops.num_new) == (1, 1, 0)


@pytest.mark.parametrize(
    ("finish_reason", "is_cut_too", "num_cut_short"),
    [
        ("length", False, 1),  # 10 tokens, though 64 were allowed
        ("length", True, 0),  # the model's limit: it holds for both
        ("abort", False, 1),
        ("stop", False, 0),  # its last token is judged like any other
    ],
)
def test_answers_that_end_early_are_counted(
    finish_reason: str, is_cut_too: bool, num_cut_short: int
) -> None:
    gate = gate_of()
    with Replay("k8", "baseline") as fake:
        fake.cut(3, 10, finish_reason)
        gate.visit_candidate(fake.endpoint)
    with Replay("baseline", "baseline") as fake:
        if is_cut_too:
            fake.cut(3, 10, finish_reason)
        gate.visit_baseline(fake.endpoint)
    verdict = gate.verdict()
    assert figures_of(verdict).num_cut_short == num_cut_short
    assert (verdict.level is QualityLevel.FAILED) == bool(num_cut_short)


def test_equal_answers_are_scored_once() -> None:
    gate = gate_of()
    with Replay("k8", "baseline") as fake:
        gate.visit_candidate(fake.endpoint)
        # Answers alone: 16 at one at a time and 16 at four, which is the least for a batch.
        assert [body["path"] for body in fake.bodies] == ["/v1/chat/completions"] * 32
        assert fake.peak_in_flight <= 4
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
        scored = [tuple(b["prompt"]) for b in fake.bodies if b["path"] == "/v1/completions"]
    assert len(scored) == len(set(scored))


# --- With quantisation ---


def lossy_verdict(gate: Gate) -> QualityVerdict:
    assert gate.missing() == "baseline"
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
    assert gate.missing() == "candidate"
    with Replay("fp8", "fp8") as fake:
        gate.visit_candidate(fake.endpoint)
    assert gate.missing() is None
    return gate.verdict()


def test_a_quantised_cache_is_judged_by_its_distributions() -> None:
    verdict = lossy_verdict(gate_of(is_lossy=True))
    figures = figures_of(verdict)
    # The answers differ, and yet each token is the quantised model's own choice.
    assert figures.match_serial.num_exact < NUM_PROMPTS
    assert figures.forced.is_good
    assert figures.forced.max_gap_nats == 0.5
    distances = figures.distributions
    assert distances is not None
    assert distances.num_positions == sum(
        len(answer["token_ids"]) for answer in recording()["answers"]["baseline"]["1"]
    )
    # FP8 with three bits of mantissa under a model of 135 M parameters: not nothing, and not noise.
    assert 0.001 < distances.mean_kl_nats < 0.1
    assert 0.8 < distances.agreement_ratio < 0.995
    assert verdict.level in {QualityLevel.WARNED, QualityLevel.FAILED}
    assert any("mean KL" in reason for reason in verdict.reasons)


def test_the_limits_are_the_profiles() -> None:
    generous = {"good_mean_kl_nats": 1.0, "max_mean_kl_nats": 2.0,
                "good_agreement_ratio": 0.1, "min_agreement_ratio": 0.1}  # fmt: skip
    settings = QualitySettings.model_validate({"max_tokens": 64, "thresholds": generous})
    assert lossy_verdict(gate_of(settings, is_lossy=True)).level is QualityLevel.PASSED
    strict = {"good_mean_kl_nats": 1e-6, "max_mean_kl_nats": 1e-5}
    settings = QualitySettings.model_validate({"max_tokens": 64, "thresholds": strict})
    verdict = lossy_verdict(gate_of(settings, is_lossy=True))
    assert verdict.level is QualityLevel.FAILED
    assert any("mean KL" in reason for reason in verdict.reasons)


# --- Launches ---


def baseline_findings() -> Findings:
    gate = gate_of(is_lossy=True)
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
    assert gate.baseline is not None
    return gate.baseline


def test_a_known_baseline_is_not_asked_again() -> None:
    gate = gate_of(is_lossy=True, baseline=baseline_findings())
    assert gate.missing() == "candidate"
    with Replay("fp8", "fp8") as fake:
        gate.visit_candidate(fake.endpoint)
    assert gate.missing() is None

    gate = gate_of(baseline=baseline_findings())
    with Replay("k8", "baseline", "wrong_token") as fake:
        gate.visit_candidate(fake.endpoint)
    assert gate.missing() == "baseline"
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
        # It only has to judge tokens that it did not write itself.
        assert {body["path"] for body in fake.bodies} == {"/v1/completions"}
    assert gate.missing() is None


def test_the_wrong_order_only_costs_a_launch() -> None:
    gate = gate_of()
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
    with Replay("k8", "baseline", "wrong_token") as fake:
        gate.visit_candidate(fake.endpoint)
    assert gate.missing() == "baseline"
    assert gate.verdict().level is QualityLevel.NOT_CHECKED
    with Replay("baseline", "baseline") as fake:
        gate.visit_baseline(fake.endpoint)
    assert gate.verdict().level is QualityLevel.FAILED


def test_the_wrong_order_with_quantisation_only_costs_a_launch_too() -> None:
    gate = gate_of(is_lossy=True)
    with Replay("fp8", "fp8") as fake:
        gate.visit_candidate(fake.endpoint)
        assert {body["path"] for body in fake.bodies} == {"/v1/chat/completions"}
    assert lossy_verdict(gate) == lossy_verdict(gate_of(is_lossy=True))


def test_off_asks_nobody() -> None:
    gate = gate_of(QualitySettings(gate="off"))
    assert gate.missing() is None
    assert gate.verdict().level is QualityLevel.NOT_CHECKED
    assert gate.verdict().is_feasible


def test_a_server_that_fails_leaves_the_gate_as_it_was() -> None:
    gate = gate_of()
    with Replay("k8", "baseline") as fake:
        gate.visit_candidate(fake.endpoint)
    with pytest.raises(EndpointFailed):
        gate.visit_baseline(fake.endpoint)  # it has stopped
    assert gate.missing() == "baseline"
    assert gate.verdict().level is QualityLevel.NOT_CHECKED


def test_what_is_too_long_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [a for c in ("1", "4") for a in recording()["answers"]["baseline"][c]]
    sizes = sorted(len(a["prompt_token_ids"]) + len(a["token_ids"]) for a in answers)
    monkeypatch.setattr(gate_module, "MAX_SCORED_TOKENS", sizes[len(sizes) // 2])
    figures = figures_of(speculative_verdict())
    assert 0 < figures.num_unscored < 3 * NUM_PROMPTS
    assert 0 < figures.forced.num_positions < sum(len(a["token_ids"]) for a in answers)
    monkeypatch.setattr(gate_module, "MAX_SCORED_TOKENS", 10)
    verdict = speculative_verdict()
    assert verdict.level is QualityLevel.NOT_CHECKED
    assert "too long" in verdict.reasons[0]


# --- Tasks ---


def test_tasks_are_asked_of_both_and_compared(tmp_path: Path) -> None:
    # The recorded prompts as tasks: solved is what the baseline said, word for word.
    rows = [
        {
            "messages": prompt.body["messages"],
            "check": {"kind": "exact", "expected": answer["text"]},
        }
        for prompt, answer in zip(
            recorded_prompts(), recording()["answers"]["baseline"]["1"], strict=True
        )
    ]
    (tmp_path / "checks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = QualitySettings.model_validate(
        {"max_tokens": 64, "tasks": [{"file": "checks.jsonl", "max_tokens": 64}]}
    )
    gate = gate_of(settings, is_lossy=True, tasks=load_tasks(settings, tmp_path))
    figures = figures_of(lossy_verdict(gate))
    (task,) = figures.tasks
    texts = {
        name: [a["text"].split() for a in recording()["answers"][name]["4"]]
        for name in ("baseline", "fp8")
    }
    wanted = [a["text"].split() for a in recording()["answers"]["baseline"]["1"]]
    solved = {name: [a == b for a, b in zip(t, wanted, strict=True)] for name, t in texts.items()}
    assert (task.file, task.num_rows) == ("checks.jsonl", 16)
    assert task.num_solved_baseline == sum(solved["baseline"])
    assert task.num_solved_candidate == sum(solved["fp8"])
    assert task.num_only_baseline - task.num_only_candidate == (
        task.num_solved_baseline - task.num_solved_candidate
    )
    assert task.unusable == {}


# --- What is kept ---


def test_a_verdict_survives_json_and_holds_no_text() -> None:
    for verdict in (speculative_verdict("shift"), lossy_verdict(gate_of(is_lossy=True))):
        text = json.dumps(verdict.as_dict())
        assert verdict_from_dict(json.loads(text)) == verdict
        for prompt, answer in zip(
            recorded_prompts(), recording()["answers"]["k8"]["1"], strict=True
        ):
            assert prompt.body["messages"][0]["content"][:20] not in text
            assert answer["text"][:20] not in text
        assert "token_ids" not in text
    nothing = QualityVerdict(QualityLevel.NOT_CHECKED, ("off",))
    assert verdict_from_dict(json.loads(json.dumps(nothing.as_dict()))) == nothing
