"""The first draft of a profile: a `traffic.yaml` whose every value says what it comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import invalid
from autotune.traffic.importing.class_draft import ClassDrafter
from autotune.traffic.importing.fit import LogFit
from autotune.traffic.importing.loads import (
    GUESSED_CONCURRENCY,
    MAX_DURATION_S,
    MIN_REQUESTS,
    RateChoice,
    TraceChoice,
    choose_load,
)
from autotune.traffic.importing.yaml_text import Value, YamlText, flow, scalar

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class DraftOptions:
    """What the user says beside the log."""

    out: Path
    """Where the profile will stand; paths in it are relative to its folder."""
    name: str | None = None
    model: str | None = None
    drafter: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def draft_profile(fit: LogFit, options: DraftOptions) -> str:
    """Write the profile's text.

    Raises:
        InputError: the given name is none that a profile may have.
    """
    name = _profile_name(fit.path, options.name)
    log: dict[str, Value] = {"file": _path_from(options.out, fit.path), "format": fit.format}
    if options.columns:
        log["columns"] = options.columns
    has_turns = _sends_conversations(fit)
    load = choose_load(fit, by_session=has_turns)
    is_replay = isinstance(load, TraceChoice)
    yaml = YamlText()
    _write_head(yaml, fit, options, name)
    if load is None:
        guess = flow({"kind": "concurrency", "concurrency": GUESSED_CONCURRENCY})
        yaml.line(f"load: {guess}", "a guess: the log has no times")
    elif isinstance(load, TraceChoice):
        _write_trace(yaml, load, log)
    else:
        _write_rate(yaml, load, "conversations" if has_turns else "requests")
    _write_measure(yaml, load)
    yaml.line("classes:")
    ClassDrafter(
        yaml, fit, log, has_turns=has_turns and not is_replay, is_replay=is_replay
    ).write()
    yaml.line("objective: {practical_margin_ratio: 0.02}", "a default")
    return str(yaml)


def _sends_conversations(fit: LogFit) -> bool:
    """Whether whole conversations are sent: the log has some, and what is said in them."""
    return fit.sessions is not None and fit.whole.has_text


def _write_head(yaml: YamlText, fit: LogFit, options: DraftOptions, name: str) -> None:
    broken = f"; {fit.num_bad_rows:,} broken ones were left out" if fit.num_bad_rows else ""
    yaml.comment(
        f"Drafted by `autotune profile import` from {fit.path.name} ({fit.format}): "
        f"{fit.whole.num_rows:,} rows{broken}."
    )
    yaml.comment("Each value says what it comes from; check those that are not in the log.")
    yaml.line("version: 1")
    yaml.line(f"name: {scalar(name)}")
    for key, value in (("model", options.model), ("drafter", options.drafter)):
        if value is None:
            yaml.comment(f"{key}: OWNER/NAME  (or --{key})")
        else:
            yaml.line(f"{key}: {scalar(value)}")
    yaml.line("seed: 7", "a default")
    num_completions = fit.whole.num_completions
    if 2 * num_completions > fit.whole.num_rows:
        yaml.line("endpoint: completions", f"as {num_completions:,} rows are")
    else:
        yaml.line("endpoint: chat")


def _write_rate(yaml: YamlText, load: RateChoice, what: str) -> None:
    arrivals = load.arrivals
    yaml.line("load:")
    yaml.line("kind: rate", depth=1)
    source = f"{what} a second: {arrivals.num_times:,} with a time, over {arrivals.span_s:,.0f} s"
    yaml.line(f"rps: {scalar(load.rps)}", source, 1)
    coarse = " (freed of its coarse clock)" if arrivals.is_clock_coarse else ""
    gaps = f"CV of {arrivals.num_gaps:,} gaps: {arrivals.true_gap_cv:.3g}{coarse}"
    yaml.line(f"arrival: {load.arrival}", gaps, 1)
    if load.burstiness is not None:
        yaml.line(f"burstiness: {scalar(load.burstiness)}", "gamma shape: 1 / CV^2", 1)
    if load.doubt is not None:
        yaml.comment(f"The fit is rough: {load.doubt}.", 1)


def _write_trace(yaml: YamlText, load: TraceChoice, log: Mapping[str, Value]) -> None:
    yaml.line("load:")
    yaml.line("kind: trace", load.reason, 1)
    for key, value in log.items():
        yaml.line(flow({key: value})[1:-1], depth=1)
    window = flow({"start_s": 0, "duration_s": load.window_s})
    span_s = load.fitted.arrivals.span_s
    yaml.line(
        f"window: {window}",
        f"about {load.num_in_window:,} requests; the log has {span_s:,.0f} s",
        1,
    )
    yaml.line("time_scale: 1.0", depth=1)
    coarse = f"the log's clock ticks every {load.jitter_s:g} s" if load.jitter_s else ""
    yaml.line(f"jitter_s: {scalar(load.jitter_s)}", coarse, 1)
    fitted: dict[str, Value] = {
        "kind": "rate", "rps": load.fitted.rps, "arrival": load.fitted.arrival,
    }  # fmt: skip
    if load.fitted.burstiness is not None:
        fitted["burstiness"] = load.fitted.burstiness
    yaml.comment(f"The fit, which would lose that: load: {flow(fitted)}", 1)


def _write_measure(yaml: YamlText, load: RateChoice | TraceChoice | None) -> None:
    duration_s = MAX_DURATION_S if load is None else load.duration_s
    num_requests = load.num_requests if isinstance(load, RateChoice) else MIN_REQUESTS
    settings = flow(
        {
            "warmup": "auto", "min_requests": num_requests,
            "max_duration_s": duration_s, "request_timeout_s": 120,
        }
    )  # fmt: skip
    is_longer = duration_s > MAX_DURATION_S
    yaml.line(f"measure: {settings}", "as long as the load takes" if is_longer else "defaults")


def _path_from(out: Path, log: Path) -> str:
    """Return the log's path as it is written in a profile that stands at `out`."""
    return os.path.relpath(log.resolve(), out.resolve().parent)


def _profile_name(log: Path, given: str | None) -> str:
    """Return the profile's name: the given one, or one made of the log's.

    Raises:
        InputError: the given one is none that a profile may have.
    """
    if given is not None:
        if not _NAME.fullmatch(given):
            raise invalid(
                "must be at most 64 letters, digits, dots, dashes and underlines", where="--name",
                got=given,
            )  # fmt: skip
        return given
    stem = log.name.split(".", 1)[0]
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-_")[:64] or "imported"
