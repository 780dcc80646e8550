"""Public traces and prompt sets give the figures that are known of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.traffic.formats import read_rows
from autotune.traffic.importing.draft import DraftOptions, draft_profile
from autotune.traffic.importing.fit import LogFit, fit_log
from autotune.traffic.profile import load_profile

SharedData = Callable[[str], Path]


def fit_of(path: Path) -> LogFit:
    return fit_log(read_rows(path))


def lengths(fit: LogFit) -> tuple[int, int, int, int]:
    assert fit.whole.input_tokens is not None
    assert fit.whole.output_tokens is not None
    input_tokens, output_tokens = fit.whole.input_tokens.value, fit.whole.output_tokens.value
    return input_tokens.p50, input_tokens.p95, output_tokens.p50, output_tokens.p95


def test_azure_code(shared_data: SharedData) -> None:
    fit = fit_of(shared_data("AzureLLMInferenceTrace_code.csv"))
    assert (fit.format, fit.whole.num_rows, fit.num_bad_rows) == ("azure", 8819, 0)
    assert lengths(fit) == (1469, 7315, 13, 90)
    assert fit.arrivals is not None
    assert fit.arrivals.rate_rps == pytest.approx(2.57, abs=0.005)
    assert fit.arrivals.gap_cv == pytest.approx(13.2, abs=0.05)
    assert not fit.whole.has_text


def test_mooncake_synthetic(shared_data: SharedData) -> None:
    fit = fit_of(shared_data("mooncake_synthetic_trace.jsonl"))
    assert (fit.format, fit.whole.num_rows, fit.num_bad_rows) == ("mooncake", 3993, 0)
    assert lengths(fit) == (11587, 49009, 69, 519)
    assert fit.arrivals is not None
    assert fit.arrivals.rate_rps == pytest.approx(3.91, abs=0.005)
    assert fit.blocks is not None
    assert fit.blocks.value.hit_ratio == pytest.approx(0.640, abs=0.0005)


def test_mt_bench(shared_data: SharedData) -> None:
    fit = fit_of(shared_data("mt_bench_question.jsonl"))
    assert (fit.format, fit.whole.num_rows, fit.whole.num_with_text) == ("mt_bench", 80, 80)
    assert [group.num_rows for group in fit.classes.values()] == [10] * 8
    assert fit.sessions is not None
    assert (fit.sessions.turns.value.p50, fit.sessions.turns.value.max) == (2, 2)


@pytest.mark.parametrize(
    ("name", "format_name", "num_rows"),
    [
        ("sharegpt_dummy_conversation.json", "sharegpt", 500),
        ("humaneval.jsonl", "humaneval", 164),
        ("gsm8k_test.jsonl", "gsm8k", 1319),
    ],
)
def test_prompt_sets(shared_data: SharedData, name: str, format_name: str, num_rows: int) -> None:
    fit = fit_of(shared_data(name))
    assert (fit.format, fit.whole.num_rows, fit.num_bad_rows) == (format_name, num_rows, 0)
    assert fit.whole.num_with_text == num_rows
    assert fit.arrivals is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AzureLLMInferenceTrace_code.csv", "trace"),
        ("mooncake_synthetic_trace.jsonl", "trace"),
        ("mt_bench_question.jsonl", "concurrency"),
        ("sharegpt_dummy_conversation.json", "concurrency"),
    ],
)
def test_their_drafts_are_profiles(
    shared_data: SharedData, tmp_path: Path, name: str, kind: str
) -> None:
    out = tmp_path / "traffic.yaml"
    out.write_text(draft_profile(fit_of(shared_data(name)), DraftOptions(out)), encoding="utf-8")
    profile = load_profile(out)
    assert profile.load.kind == kind
