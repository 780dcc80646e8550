"""One pass over a log counts, samples and groups its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.traffic.formats import read_rows
from autotune.traffic.importing.fit import MAX_CLASSES, LogFit, fit_log
from autotune.traffic.importing.inferred import Inferred, MostCommon
from autotune.traffic.importing.summary import summary_lines
from autotune.traffic.rows import BadRow


def fit_of(folder: Path, *records: object, name: str = "log.jsonl", **options: Any) -> LogFit:
    path = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    return fit_log(read_rows(path, **options))


def body(content: str = "hi", model: str = "m", **more: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def test_what_a_log_of_requests_shows(tmp_path: Path) -> None:
    fit = fit_of(
        tmp_path,
        body("four", temperature=0.7, max_tokens=64, created=100,
             usage={"prompt_tokens": 10, "completion_tokens": 30}),
        "broken",
        body("sixsix", temperature=0.7, created=101, usage={"prompt_tokens": 20}),
        body(temperature=0.2, max_tokens=64, model="other"),
        body(messages=[]),
        {"model": "m", "prompt": "text", "max_tokens": 128},
    )  # fmt: skip
    assert (fit.format, fit.unit, fit.num_bad_rows) == ("openai", "line", 2)
    assert [bad.number for bad in fit.first_bad_rows] == [2, 5]
    whole = fit.whole
    assert (whole.num_rows, whole.num_with_text, whole.num_completions) == (4, 4, 1)
    assert whole.input_tokens is not None
    assert (whole.input_tokens.num_rows, whole.input_tokens.value.p50) == (2, 10)
    assert whole.output_tokens is not None
    assert (whole.output_tokens.num_rows, whole.output_tokens.value.max) == (1, 30)
    assert whole.prompt_chars is not None
    assert (whole.prompt_chars.num_rows, whole.prompt_chars.value.max) == (4, 6)
    assert whole.max_tokens == Inferred(MostCommon(64, pytest.approx(2 / 3)), 3)
    assert whole.sampling == {"temperature": Inferred(MostCommon(0.7, pytest.approx(2 / 3)), 3)}
    assert {name: group.num_rows for name, group in fit.classes.items()} == {"m": 3, "other": 1}
    assert fit.classes["other"].sampling["temperature"].value.value == 0.2
    assert fit.arrivals is not None
    assert (fit.arrivals.num_times, fit.arrivals.rate_rps) == (2, 1.0)


def test_only_the_first_broken_rows_are_kept(tmp_path: Path) -> None:
    fit = fit_of(tmp_path, body(), *["x"] * 50)
    assert fit.num_bad_rows == 50
    assert [bad.number for bad in fit.first_bad_rows] == [2, 3, 4]
    assert all(isinstance(bad, BadRow) for bad in fit.first_bad_rows)


def test_names_without_end_are_no_classes(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "category": f"c{n}"} for n in range(MAX_CLASSES + 1)]
    assert len(fit_of(tmp_path, *rows[:-1]).classes) == MAX_CLASSES
    assert fit_of(tmp_path, *rows, *rows).classes == {}


def test_first_requests_of_conversations_arrive_at_their_own_rate(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x", "conversation_id": n // 4, "timestamp": 100 * (n // 4) + n % 4}
        for n in range(40)
    ]
    fit = fit_of(tmp_path, *rows)
    assert fit.arrivals is not None
    assert fit.session_arrivals is not None
    assert fit.arrivals.num_times == 40
    # One conversation every 100 s.
    assert fit.session_arrivals.num_times == 10
    assert fit.session_arrivals.rate_rps == pytest.approx(0.01)


def test_the_same_log_gives_the_same_fit(tmp_path: Path) -> None:
    rows = [body(str(n), created=n, temperature=n % 3 / 10) for n in range(300)]
    assert fit_of(tmp_path, *rows) == fit_of(tmp_path, *rows)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"model": "m", "messages": []}] * 5,
         "no row of the log can be used; of 5 broken ones the first: line 1: the prompt must not be "
         "empty; line 2: the prompt must not be empty; line 3: "),
        ([{"resourceSpans": []}], "the log holds no request"),
        ([{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "GET /"}]}]}]}],
         "the log holds no request, only 1 other records"),
    ],
)  # fmt: skip
def test_a_log_without_a_usable_row_is_refused(
    tmp_path: Path, records: list[object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        fit_of(tmp_path, *records)
    assert str(caught.value).startswith(f"{tmp_path / 'log.jsonl'}: {said}")


def test_the_summary_says_what_was_found_and_no_text(tmp_path: Path) -> None:
    secret = "hunter2"
    system = {"role": "system", "content": f"{secret} is the password"}
    asking = {"role": "user", "content": f"say {secret}"}
    rows = [
        body(messages=[system, asking], created=n, temperature=0.7, conversation_id=n // 2)
        for n in range(100)
    ]
    text = "\n".join(summary_lines(fit_of(tmp_path, *rows, f'{{"{secret}": ')))
    assert secret not in text
    for part in (
        "openai (",
        "rows              100, 100 of them with text",
        "1 requests/s over 99 s, gap CV 0 (100 rows)",
        "temperature       0.7 in 100% of 100 rows",
        "system prompts    1 shared, by 100% of 100 rows; the most common has",
        "turns             p50 2, p95 2, max 2 (50 conversations)",
        "think time        p50 1 s, p95 1 s after the request before (50 turns)",
        "classes           m 100",
        "broken rows       1, left out; the first:",
        "line 101: each line must be one JSON object",
    ):
        assert part in text


def test_a_coarse_clock_is_told(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *[f"{n // 5},5,5" for n in range(100)]]
    text = "\n".join(summary_lines(fit_of(tmp_path, *rows, name="a.csv")))
    assert "its clock ticks every 1 s, without that the CV is" in text
