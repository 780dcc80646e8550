"""What is sent: classes of requests, each with its prompts, lengths, sampling and limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from autotune.strict import StrictModel
from autotune.traffic.fields import (
    BuiltinName,
    Columns,
    FormatName,
    Positive,
    Tokens,
    one_message,
)

SLO_KEY = r"^(ttft|tpot|e2el|icl)_(mean|p50|p90|p95|p99)_ms$"
_OWN_BODY_KEYS = frozenset(
    {
        "model", "messages", "prompt", "stream", "stream_options", "n",
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "ignore_eos",
        "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    }
)  # fmt: skip


class RandomPrompts(StrictModel):
    """Random words: for trying a server out, never for a choice."""

    tokens: Tokens = Field(description="length of every prompt")
    force: bool = Field(
        default=False, description="send them although the result says nothing about your traffic"
    )

    @model_validator(mode="after")
    def _only_by_force(self) -> RandomPrompts:
        if not self.force:
            raise ValueError(
                "random prompts are refused: what a drafter gets accepted depends on what is said, so "
                "figures on random text say nothing about your traffic. Use prompts of your own or "
                "a built-in set; `force: true` sends them anyway and marks every result"
            )
        return self


class PromptSource(StrictModel):
    """Where a class's prompts come from: exactly one of a file, a built-in set and random words."""

    file: Path | None = Field(
        default=None,
        description="prompts or a log of requests; a relative path starts at the profile's folder",
    )
    builtin: BuiltinName | None = Field(
        default=None, description="a set that ships with Autotune: demo/maths"
    )
    random: RandomPrompts | None = Field(
        default=None, description="meaningless words; refused unless forced"
    )
    format: FormatName = Field(
        default="auto",
        description="of the file: a format of `autotune profile import`; auto: by its keys",
    )
    columns: Columns = Field(
        default_factory=dict,
        description="what the file calls its columns, where that is free: {prompt: q}",
    )
    category: str | None = Field(
        default=None, description="only rows of the file that it itself calls so"
    )
    sample: int = Field(
        default=5000,
        ge=2,
        le=1_000_000,
        description="most prompts (or conversations) kept of a larger file",
    )
    holdout: float = Field(
        default=0.0,
        ge=0,
        le=0.9,
        description="share of the prompts that the search never sees; the finalists are compared on it",
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> PromptSource:
        if sum(source is not None for source in (self.file, self.builtin, self.random)) != 1:
            raise ValueError("exactly one of `file`, `builtin` and `random` must be given")
        of_file = {
            "format": self.format != "auto",
            "columns": bool(self.columns),
            "category": self.category is not None,
        }
        given = [key for key, is_given in of_file.items() if is_given]
        if self.file is None and given:
            raise ValueError(f"`{given[0]}` goes with `file` only")
        return self


class Turns(StrictModel):
    """Conversations instead of lone requests, where the prompts have several turns."""

    max: int = Field(default=4, ge=1, le=1000, description="most turns of one conversation")
    replay: Literal["live", "recorded"] = Field(
        default="live",
        description="live: the server's own answers stay in the conversation; recorded: the file's",
    )


class SharedPrefix(StrictModel):
    """A system prompt that many requests begin with: exactly one of `tokens` and `file`."""

    tokens: Tokens | None = Field(
        default=None, description="length of a stand-in, made of the class's own prompts"
    )
    file: Path | None = Field(default=None, description="the system prompt itself, as text")
    groups: int = Field(default=1, ge=1, le=10_000, description="number of different stand-ins")

    @model_validator(mode="after")
    def _one_of_both(self) -> SharedPrefix:
        if (self.tokens is None) == (self.file is None):
            raise ValueError("exactly one of `tokens` and `file` must be given")
        if self.file is not None and self.groups != 1:
            raise ValueError("`groups` goes with `tokens` only")
        return self


class FixedLength(StrictModel):
    """Every request has this length."""

    dist: Literal["fixed"] = Field(description="every request has the same length")
    tokens: Tokens = Field(description="the length")


class LognormalLength(StrictModel):
    """Lengths around a median with a long tail, given by two percentiles."""

    dist: Literal["lognormal"] = Field(description="lengths around a median with a long tail")
    p50: Tokens = Field(description="median, in tokens")
    p95: Tokens = Field(description="95th percentile, in tokens")
    max: Tokens = Field(description="longer draws are cut to this")

    @model_validator(mode="after")
    def _in_order(self) -> LognormalLength:
        if not self.p50 <= self.p95 <= self.max:
            raise ValueError("lengths must be in order: p50 <= p95 <= max")
        return self


class EmpiricalLength(StrictModel):
    """Lengths as a log has them; input and output of one file are drawn together, row by row."""

    dist: Literal["empirical"] = Field(description="lengths as a log has them")
    file: Path = Field(description="the log; its first 100,000 rows with both lengths are used")
    format: FormatName = Field(
        default="auto", description="a format of `autotune profile import`; auto: by its keys"
    )
    max: Tokens | None = Field(default=None, description="longer ones are cut to this")


LengthDistribution = Annotated[
    FixedLength | LognormalLength | EmpiricalLength, Field(discriminator="dist")
]


class Lengths(StrictModel):
    """Lengths in tokens for prompts that are fitted to them; the results are marked as by proxy."""

    input: LengthDistribution = Field(description="tokens of the prompt, shared prefix aside")
    output: LengthDistribution | None = Field(
        default=None, description="most tokens of the answer; default: `output.max_tokens`"
    )


class MaxTokensFromData(StrictModel):
    """Take each request's own limit from its row."""

    source: Literal["data"] = Field(alias="from", description="the row's limit, or its length")
    default: Tokens = Field(default=512, description="for rows that have neither")

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return {"from": self.source, "default": self.default}


class OutputLength(StrictModel):
    """How many tokens a request may generate."""

    max_tokens: Annotated[
        Tokens | MaxTokensFromData,
        one_message("must be a number of tokens above 0, or {from: data, default: 512}"),
    ] = Field(default=256, description="most tokens of one answer")
    ignore_eos: bool = Field(
        default=False, description="going past the model's own stop distorts acceptance: leave off"
    )

    def limit(self, of_row: int | None) -> int:
        """Return a request's limit, given what its row says."""
        if isinstance(self.max_tokens, int):
            return self.max_tokens
        return of_row or self.max_tokens.default


class Sampling(StrictModel):
    """Sampling as the users' requests ask for it; it changes acceptance, so it must be theirs."""

    temperature: float = Field(default=0.0, ge=0, le=2, description="0: the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="of the likeliest tokens together")
    top_k: int | None = Field(default=None, ge=-1, description="only the likeliest k tokens")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="least probability, as a share of the likeliest's"
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="for tokens that the answer has already"
    )
    frequency_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="for each time that the answer has the token already",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=2,
        description="for tokens that prompt or answer have already; 1: none",
    )

    def extra_body(self) -> dict[str, Any]:
        """Return the fields that are set beside temperature and top_p."""
        return self.model_dump(exclude={"temperature", "top_p"}, exclude_none=True)


class TrafficClass(StrictModel):
    """One kind of request, with its share of the traffic and its own limits."""

    name: str = Field(
        default="default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="unique in the profile"
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="share of the requests, against the other classes"
    )
    prompts: PromptSource | None = Field(
        default=None, description="may be missing only where a trace has the prompts itself"
    )
    turns: Turns | None = Field(
        default=None, description="send conversations; default: each row is one request"
    )
    shared_prefix: SharedPrefix | None = Field(
        default=None, description="a system prompt that the requests have in common"
    )
    lengths: Lengths | None = Field(
        default=None, description="fit the prompts to these lengths; for logs without text"
    )
    output: OutputLength = Field(default=OutputLength(), description="length of the answers")
    sampling: Sampling = Field(
        default=Sampling(), description="as your users' requests ask for it"
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further fields of each request's body"
    )
    slo: dict[str, Positive] = Field(
        default_factory=dict,
        description="limits such as ttft_p95_ms: 500",
        json_schema_extra={"propertyNames": {"pattern": SLO_KEY}},
    )

    @field_validator("slo")
    @classmethod
    def _known_limits(cls, slo: dict[str, float]) -> dict[str, float]:
        for key in slo:
            if not re.fullmatch(SLO_KEY, key):
                raise ValueError(
                    f"a limit must be named (ttft|tpot|e2el|icl)_(mean|p50|p90|p95|p99)_ms, not {key!r}"
                )
        return slo

    @field_validator("extra_body")
    @classmethod
    def _fields_of_others(cls, body: dict[str, Any]) -> dict[str, Any]:
        own = sorted(_OWN_BODY_KEYS & body.keys())
        if own:
            raise ValueError(
                f"`{own[0]}` is set by Autotune itself; use the profile's keys for it"
            )
        if not _is_json(body):
            raise ValueError("must hold plain JSON values: no dates, no NaN, keys of text")
        return body

    @model_validator(mode="after")
    def _parts_that_go_together(self) -> TrafficClass:
        if self.turns is not None and self.lengths is not None:
            raise ValueError("`turns` and `lengths` do not go together: give one of them")
        if self.turns is not None and self.prompts is not None and self.prompts.random:
            raise ValueError("`turns` and random prompts do not go together: give one of them")
        return self


def _is_json(body: dict[str, Any]) -> bool:
    """Whether a mapping comes back unchanged from JSON; YAML can hold more than that."""
    try:
        text = json.dumps(body, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError):  # UnicodeEncodeError, of half a surrogate pair, is one
        return False
    return bool(json.loads(text) == body)
