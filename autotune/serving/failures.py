"""Failed trials as values: a kind, the root cause in the server's own words, and the log's path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_ERROR_RATIO = 0.02
"""Share of failed requests above which a measurement says nothing about the config."""


class FailureKind(StrEnum):
    """Why a trial has no measurement."""

    INVALID_CONFIG = "invalid_config"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    LAUNCH_ERROR = "launch_error"
    LAUNCH_TIMEOUT = "launch_timeout"
    DIED_UNDER_LOAD = "died_under_load"
    OUT_OF_MEMORY_UNDER_LOAD = "out_of_memory_under_load"
    REQUEST_ERRORS = "request_errors"
    UNSTABLE = "unstable"
    CLIENT_OVERLOADED = "client_overloaded"
    SPECULATION_INACTIVE = "speculation_inactive"
    DEGENERATE_OUTPUT = "degenerate_output"
    CANCELLED = "cancelled"

    @property
    def is_worth_a_retry(self) -> bool:
        """Whether the same config may well succeed next time: the cause lay outside of it."""
        return self in {
            FailureKind.LAUNCH_TIMEOUT,
            FailureKind.CLIENT_OVERLOADED,
            FailureKind.UNSTABLE,
            FailureKind.CANCELLED,
        }


@dataclass(frozen=True)
class TrialFailure:
    """What a trial leaves behind instead of a measurement."""

    kind: FailureKind
    detail: str
    """The root-cause line, from the server's log where there is one."""
    log_path: str | None = None

    def __str__(self) -> str:
        where = f" (log: {self.log_path})" if self.log_path else ""
        return f"{self.kind}: {self.detail}{where}"


class TrialFailed(Exception):
    """Carries a `TrialFailure` up to the trial's boundary, where it becomes a value again."""

    def __init__(self, failure: TrialFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True)
class _Signature:
    pattern: re.Pattern[str]
    at_launch: FailureKind
    under_load: FailureKind


def _signature(
    pattern: str, at_launch: FailureKind, under_load: FailureKind | None = None
) -> _Signature:
    return _Signature(re.compile(pattern), at_launch, under_load or at_launch)


# In order of precision. The texts are vLLM's and torch's own (vLLM 0.32 and 0.33).
_SIGNATURES = (
    _signature(r"No available memory for the cache blocks", FailureKind.INSUFFICIENT_MEMORY),
    _signature(
        r"KV cache is needed, which is larger than the available KV cache memory",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    _signature(
        r"Available memory on node .* on kv cache allocation is less than requested",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    _signature(
        r"(Free memory on device|Available memory on node) .* on startup is less than desired",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    _signature(
        r"out of memory|OutOfMemoryError",
        FailureKind.INSUFFICIENT_MEMORY,
        FailureKind.OUT_OF_MEMORY_UNDER_LOAD,
    ),
    _signature(r"Address already in use|address already in use", FailureKind.LAUNCH_ERROR),
    _signature(
        r"validation errors? for \w*Config|\berror: (argument|unrecognized arguments)"
        r"|Unsupported speculative method|num_speculative_tokens was provided but without speculative model"
        r"|mask_hidden not found in weights|must have .*ptd_token_id"
        r"|Minimum capability:|is not supported for quantization method"
        r"|No valid cudagraph sizes after rounding|enough slots to schedule"
        r"|does not support M-RoPE|only supports padded drafter batch"
        r"|static_scaled_fp8_quant\(\) expected at most",
        FailureKind.INVALID_CONFIG,
    ),
    _signature(
        r"illegal memory access|AssertionError|EngineDeadError|EngineCore encountered an issue",
        FailureKind.LAUNCH_ERROR,
        FailureKind.DIED_UNDER_LOAD,
    ),
)

# Lines that report somebody else's error, or an error that follows from it.
_WRAPPER = re.compile(
    r"Engine core initialization failed|See root cause above|See stack trace|EngineDeadError"
    r"|please check the stack trace above|EngineCore encountered an issue|WorkerProc hit an exception"
    r"|WorkerProc initialization failed"
)
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b(:.*)?$")
_LOG_PREFIX = re.compile(
    r"^(\([\w \-]+pid=\d+\)\s*)?((ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:]+ (\[[^\]]*\] )?)?"
)
_USAGE_ERROR = re.compile(r"^\S+\.py: error: |^vllm\S* .*error: ")


def classify_log(log: str, *, is_under_load: bool) -> tuple[FailureKind, str]:
    """Find out of a server's log what went wrong.

    Args:
        log: the text of the log.
        is_under_load: whether the server had been healthy before.

    Returns:
        The kind, and the line that names the root cause: the first real exception, not the
        wrappers that vLLM prints after it.
    """
    lines = [_LOG_PREFIX.sub("", line.rstrip()).strip() for line in log.splitlines()]
    cause = _root_cause(lines)
    for text in (cause, log):
        for signature in _SIGNATURES:
            if signature.pattern.search(text):
                kind = signature.under_load if is_under_load else signature.at_launch
                return kind, cause or _first_match(lines, signature.pattern)
    default = FailureKind.DIED_UNDER_LOAD if is_under_load else FailureKind.LAUNCH_ERROR
    return default, cause or _last_words(lines)


def _root_cause(lines: list[str]) -> str:
    """Return the first exception line that is not a wrapper, with the assert that a bare one had."""
    for number, line in enumerate(lines):
        if _USAGE_ERROR.search(line):
            return line
        if _EXCEPTION_LINE.match(line) and not _WRAPPER.search(line):
            if line == "AssertionError":
                return f"{line} at `{_statement_above(lines, number)}`"
            return _with_detail(lines, number)
    return ""


def _with_detail(lines: list[str], number: int) -> str:
    """Append pydantic's explanation, which stands on the lines below its headline."""
    line = lines[number]
    if "validation error" not in line:
        return line
    below = " ".join(part for part in lines[number + 1 : number + 3] if part)
    return f"{line} {below}".strip()[:500]


def _statement_above(lines: list[str], number: int) -> str:
    """Return the source line of a bare assert, skipping the marks (^^^) below it."""
    for line in reversed(lines[max(0, number - 3) : number]):
        if line and not set(line) <= {"^", "~", " "}:
            return line
    return "unknown statement"


def _first_match(lines: list[str], pattern: re.Pattern[str]) -> str:
    return next((line for line in lines if pattern.search(line)), "")[:500]


def _last_words(lines: list[str]) -> str:
    said = [line for line in lines if line]
    return said[-1][:500] if said else "the server wrote nothing to its log"
