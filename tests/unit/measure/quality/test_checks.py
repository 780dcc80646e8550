"""Files of checks: what is read, what is refused and how."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.measure.quality.checks import CheckRow, load_task
from autotune.traffic.quality import ExactCheck, NumberCheck, QualityTask, RegexCheck

EXACT = {"kind": "exact", "expected": "Paris"}

Load = Callable[..., tuple[CheckRow, ...]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Give a function that writes rows to a file and reads them as a task."""

    def write_and_load(
        *rows: Mapping[str, Any] | str | bytes, **task: Any
    ) -> tuple[CheckRow, ...]:
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        (tmp_path / "checks.jsonl").write_bytes(data)
        return load_task(QualityTask.model_validate({"file": "checks.jsonl", **task}), tmp_path)

    return write_and_load


def test_rows_in_every_shape(load: Load) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = load(
        {"prompt": "Capital of France?", "check": EXACT},
        "",
        {"question": "2+2?", "check": {"kind": "number", "expected": 4}},
        {"messages": [system, {"role": "user", "content": "Say yes."}],
         "check": {"kind": "regex", "pattern": "^yes"}},
    )  # fmt: skip
    assert [row.check for row in rows] == [
        ExactCheck(kind="exact", expected="Paris"),
        NumberCheck(kind="number", expected=4),
        RegexCheck(kind="regex", pattern="^yes"),
    ]
    assert rows[2].messages == (("system", "Be brief."), ("user", "Say yes."))
    assert rows[2].text == "Be brief.\n\nSay yes."
    assert rows[2].where.endswith("checks.jsonl:4")  # the empty line counts


def test_one_check_for_all_rows_takes_what_is_expected_from_the_row(load: Load) -> None:
    gsm8k = {"question": "How much?", "answer": "He has 2*600 = 1,200.\n#### 1,200"}
    rows = load(gsm8k, check={"kind": "number", "expected_field": "answer"})
    assert rows[0].check == NumberCheck(kind="number", expected=1200)
    rows = load({"prompt": "?", "is": "Paris"}, check={"kind": "exact", "expected_field": "is"})
    assert rows[0].check == ExactCheck(kind="exact", expected="Paris")


def test_a_row_goes_before_its_task(load: Load) -> None:
    rows = load(
        {"prompt": "a", "check": EXACT}, {"prompt": "b"}, check={"kind": "regex", "pattern": "x"}
    )
    assert [row.check.kind for row in rows] == ["exact", "regex"]


def test_only_the_first_rows_are_read(load: Load) -> None:
    assert len(load(*[{"prompt": "a", "check": EXACT}] * 5, "not JSON", max_rows=5)) == 5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("not JSON", "checks.jsonl:1: each line must be one JSON object"),
        ("[1]", "checks.jsonl:1: each line must be one JSON object, but got 'list'"),
        ({"check": EXACT}, "must have a `prompt`, a `question` or `messages`"),
        ({"prompt": " ", "check": EXACT}, "must have a `prompt`"),
        ({"messages": [{"role": "assistant", "content": "x"}], "check": EXACT}, "by the user"),
        ({"messages": ["x"], "check": EXACT}, "by the user"),
        ({"prompt": "a"}, "the row must have a `check`"),
        ({"prompt": "a", "check": {"kind": "exat"}}, "checks.jsonl:1: check"),
        ({"prompt": "a", "check": {"kind": "regex"}}, "check.pattern: Field required"),
        ({"prompt": "a", "check": {"kind": "exact"}}, "exactly one of `expected`"),
        ({"prompt": "a", "check": {**EXACT, "x": 1}}, "check.x: Extra inputs are not permitted"),
        ({"prompt": "a", "check": {"kind": "python", "function": "os.system"}}, "check.function"),
        ('{"prompt": "\\ud800", "check": {"kind": "exact", "expected": "a"}}', "half a character"),
    ],
)
def test_bad_rows_are_named(load: Load, row: Mapping[str, Any] | str, said: str) -> None:
    with pytest.raises(InputError, match=r"checks\.jsonl:1: ") as caught:
        load(row)
    assert said in str(caught.value)


def test_an_expected_field_that_is_not_there_is_named(load: Load) -> None:
    check = {"kind": "number", "expected_field": "answer"}
    with pytest.raises(InputError, match=r"checks.jsonl:1: answer: .*number.*Keys of this row: p"):
        load({"prompt": "a"}, check=check)
    with pytest.raises(InputError, match="answer"):
        load({"prompt": "a", "answer": "none at all"}, check=check)
    with pytest.raises(InputError, match="answer"):
        load({"prompt": "a", "answer": True}, check=check)


def test_code_runs_only_where_the_profile_allows_it(load: Load) -> None:
    row = {"prompt": "a", "check": {"kind": "python", "function": "mine:is_right"}}
    with pytest.raises(InputError, match="allow_python: true"):
        load(row)
    assert load(row, allow_python=True)[0].check.kind == "python"


def test_an_empty_file_and_a_missing_one(load: Load, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one row"):
        load("")
    with pytest.raises(InputError, match="must exist"):
        load_task(QualityTask(file=Path("nowhere.jsonl")), tmp_path)


def test_gsm8k_can_be_used_as_it_is() -> None:
    root = Path(__file__).parents[4]
    folder = Path(os.environ.get("AUTOTUNE_SHARED_DATA", root / "shared" / "data"))
    if not (folder / "gsm8k_test.jsonl").is_file():
        pytest.skip("needs gsm8k_test.jsonl: set AUTOTUNE_SHARED_DATA to its folder")
    check = {"kind": "number", "expected_field": "answer"}
    task = {"file": "gsm8k_test.jsonl", "check": check, "max_rows": 5000}
    rows = load_task(QualityTask.model_validate(task), folder)
    assert len(rows) == 1319
    # The first question's answer ends with "#### 18".
    assert rows[0].check == NumberCheck(kind="number", expected=18)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["prompt", "messages", "check", "kind", "expected", "role", "content"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_file_is_read_or_refused_in_words(load: Load, data: bytes) -> None:
    try:
        rows = load(data)
    except InputError:
        return
    assert rows
