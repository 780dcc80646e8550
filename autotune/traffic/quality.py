"""The part of `traffic.yaml` that says how answers are checked, and what a solved task is.

It knows nothing of servers or answers, so that a profile can be read without either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from autotune.strict import StrictModel

Ratio = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]

ENTRY_POINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class ExactCheck(StrictModel):
    """Solved when the answer is the expected text, but for white space."""

    kind: Literal["exact"] = Field(description="compares texts")
    expected: str | None = Field(default=None, description="the right answer")
    expected_field: str | None = Field(
        default=None, description="the row's key that holds it, where all rows share one check"
    )

    @model_validator(mode="after")
    def _one_expectation(self) -> ExactCheck:
        _demand_one(self.expected, self.expected_field)
        return self


class NumberCheck(StrictModel):
    """Solved when the last number of the answer equals the expected one: 1,234.50 and 1234.5 do."""

    kind: Literal["number"] = Field(description="compares the last number")
    expected: float | None = Field(default=None, description="the right number")
    expected_field: str | None = Field(
        default=None, description="the row's key whose last number it is: `answer` in GSM8K"
    )

    @model_validator(mode="after")
    def _one_expectation(self) -> NumberCheck:
        _demand_one(self.expected, self.expected_field)
        return self


class RegexCheck(StrictModel):
    """Solved when the pattern (Python's `re`) is found anywhere in the answer."""

    kind: Literal["regex"] = Field(description="looks for a pattern")
    pattern: str = Field(min_length=1, max_length=10_000, description="of Python's `re`")


class JsonSchemaCheck(StrictModel):
    """Solved when the answer, or the one fenced block in it, is JSON that fits the schema."""

    kind: Literal["json_schema"] = Field(description="demands JSON of one shape")
    json_schema: dict[str, Any] = Field(description="a JSON schema")


class PythonCheck(StrictModel):
    """Solved when `function(prompt, answer)` returns True; both are text."""

    kind: Literal["python"] = Field(description="asks a function of yours")
    function: str = Field(pattern=ENTRY_POINT, description="the function, as module:function")


Check = Annotated[
    ExactCheck | NumberCheck | RegexCheck | JsonSchemaCheck | PythonCheck,
    Field(discriminator="kind"),
]


class QualityTask(StrictModel):
    """A file of questions whose answers can be checked."""

    file: Path = Field(description="JSON lines: a prompt and its check")
    check: Check | None = Field(default=None, description="for the rows without one of their own")
    max_rows: int = Field(default=200, ge=1, le=100_000, description="the file's first rows")
    max_tokens: int = Field(default=512, ge=1, le=100_000, description="of one answer")
    allow_python: bool = Field(
        default=False,
        description="whether checks of the kind `python` may run: they are code of the user's",
    )


class QualityThresholds(StrictModel):
    """Where the gate draws its lines; docs/quality.md says where each number comes from."""

    min_forced_ratio: Ratio = Field(
        default=0.995, description="emitted tokens that must be the best one or a near-tie"
    )
    max_single_gap_nats: Positive = Field(
        default=2.0, description="no emitted token may be further below the best one than this"
    )
    max_new_loops_ratio: Ratio = Field(
        default=0.05, description="prompts that only the config answers with a loop"
    )
    good_mean_kl_nats: Positive = Field(default=0.01, description="up to which nothing is said")
    max_mean_kl_nats: Positive = Field(
        default=0.05, description="above which a quantised config fails"
    )
    good_agreement_ratio: Ratio = Field(
        default=0.98, description="positions with the same best token, from which nothing is said"
    )
    min_agreement_ratio: Ratio = Field(
        default=0.95, description="below which a quantised config fails"
    )
    max_p_value: Ratio = Field(
        default=0.05, description="of McNemar's test, below which lost tasks are no accident"
    )

    @model_validator(mode="after")
    def _good_is_better_than_tolerable(self) -> QualityThresholds:
        if self.good_mean_kl_nats > self.max_mean_kl_nats:
            raise ValueError("good_mean_kl_nats must be at most max_mean_kl_nats")
        if self.good_agreement_ratio < self.min_agreement_ratio:
            raise ValueError("good_agreement_ratio must be at least min_agreement_ratio")
        return self


class QualitySettings(StrictModel):
    """How the recommended config's answers are checked against those without speculation."""

    gate: Literal["teacher_forced", "off"] = Field(
        default="teacher_forced", description="teacher_forced: a config that fails is not feasible"
    )
    num_prompts: int = Field(default=64, ge=1, le=10_000, description="prompts that are asked")
    max_tokens: int = Field(default=128, ge=1, le=100_000, description="tokens of each answer")
    max_logprob_gap: Positive | None = Field(
        default=None,
        description="nats below the best token that still count as a near-tie; "
        "default 0.25, and 0.5 where the config is quantised",
    )
    tasks: tuple[QualityTask, ...] = Field(
        default=(), description="files of questions whose answers can be checked"
    )
    thresholds: QualityThresholds = Field(
        default=QualityThresholds(), description="where the gate draws its lines"
    )


def _demand_one(expected: object, expected_field: str | None) -> None:
    if (expected is None) == (expected_field is None):
        raise ValueError("exactly one of `expected` and `expected_field` must be given")
