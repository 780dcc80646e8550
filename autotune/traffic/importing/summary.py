"""What an import found out, for the terminal: never any text of the log."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.traffic.formats import describe_formats
from autotune.traffic.importing.arrivals import Arrivals
from autotune.traffic.importing.fit import LogFit
from autotune.traffic.importing.inferred import Inferred, Quantiles

_MS = 1000
_MAX_CLASSES_SHOWN = 12


def summary_lines(fit: LogFit) -> Iterator[str]:
    """Yield what was detected, what was inferred from how many rows, and which rows are broken."""
    yield f"{fit.path}: {fit.format} ({describe_formats()[fit.format]})"
    yield _line("rows", f"{fit.whole.num_rows:,}, {fit.whole.num_with_text:,} of them with text")
    if fit.num_other:
        yield _line("others", f"{fit.num_other:,} parts of the file are no requests")
    yield _line("arrivals", _arrivals(fit.arrivals))
    for what, lengths in (
        ("input tokens", fit.whole.input_tokens),
        ("output tokens", fit.whole.output_tokens),
        ("prompt characters", fit.whole.prompt_chars),
    ):
        if lengths is not None:
            yield _line(what, f"{_quantiles(lengths)}{_sample(lengths)}")
    yield from _sharing(fit)
    yield from _sessions(fit)
    for name, found in sorted(fit.whole.sampling.items()):
        most = f"{found.value.value:g} in {found.value.share:.0%} of {found.num_rows:,} rows"
        yield _line(name, most)
    if fit.classes:
        shown = [f"{name} {group.num_rows:,}" for name, group in fit.classes.items()]
        more = (
            f", and {len(shown) - _MAX_CLASSES_SHOWN} more"
            if len(shown) > _MAX_CLASSES_SHOWN
            else ""
        )
        yield _line("classes", ", ".join(shown[:_MAX_CLASSES_SHOWN]) + more)
    if fit.num_bad_rows:
        yield _line("broken rows", f"{fit.num_bad_rows:,}, left out; the first:")
        for bad in fit.first_bad_rows:
            yield f"    {fit.unit} {bad.number}: {bad.reason}"


def _arrivals(arrivals: Arrivals | None) -> str:
    if arrivals is None:
        return "not in the log"
    text = (
        f"{arrivals.rate_rps:.3g} requests/s over {arrivals.span_s:,.0f} s, "
        f"gap CV {arrivals.gap_cv:.3g} ({arrivals.num_times:,} rows)"
    )
    if arrivals.is_clock_coarse:
        text += (
            f"; its clock ticks every {arrivals.resolution_s:g} s, "
            f"without that the CV is {arrivals.true_gap_cv:.3g}"
        )
    if arrivals.num_out_of_order:
        text += f"; {arrivals.num_out_of_order:,} times out of order"
    return text


def _sharing(fit: LogFit) -> Iterator[str]:
    if fit.blocks is not None:
        blocks = fit.blocks.value
        yield _line(
            "shared blocks",
            f"{blocks.hit_ratio:.1%} of {blocks.num_blocks:,} blocks of {blocks.block_tokens} tokens "
            f"came before ({fit.blocks.num_rows:,} rows)",
        )
    if fit.system_prompts is not None:
        system = fit.system_prompts.value
        yield _line(
            "system prompts",
            f"{system.num_shared:,} shared, by {system.shared_ratio:.0%} of "
            f"{fit.system_prompts.num_rows:,} rows; the most common has {system.num_chars:,} characters",
        )


def _sessions(fit: LogFit) -> Iterator[str]:
    sessions = fit.sessions
    if sessions is None:
        return
    turns = sessions.turns
    yield _line(
        "turns",
        f"p50 {turns.value.p50}, p95 {turns.value.p95}, max {turns.value.max} "
        f"({turns.num_rows:,} conversations)",
    )
    if sessions.think_ms is not None:
        think = sessions.think_ms.value
        after = "request" if sessions.is_think_after_request else "answer"
        yield _line(
            "think time",
            f"p50 {think.p50 / _MS:.3g} s, p95 {think.p95 / _MS:.3g} s after the {after} before "
            f"({sessions.think_ms.num_rows:,} turns)",
        )


def _quantiles(found: Inferred[Quantiles]) -> str:
    q = found.value
    return f"p50 {q.p50:,}, p90 {q.p90:,}, p95 {q.p95:,}, p99 {q.p99:,}, max {q.max:,}"


def _sample(found: Inferred[Quantiles]) -> str:
    sampled = found.value.num_sampled
    of = f", a sample of {sampled:,}" if sampled < found.num_rows else ""
    return f" ({found.num_rows:,} rows{of})"


def _line(what: str, text: str) -> str:
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"  {what:<18}{printable}"
