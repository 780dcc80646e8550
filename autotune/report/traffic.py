"""What a traffic profile sends, in numbers and pictures; never in words of its prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from autotune.report.charts import bar, columns, doubling_bins, rates
from autotune.traffic.caveats import caveats
from autotune.traffic.drawing import build_schedule
from autotune.traffic.loads import (
    ConcurrencyLoad,
    RateLoad,
    StagesLoad,
    TraceLoad,
    UsersLoad,
)
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import Schedule, ScheduledRequest
from autotune.traffic.tokens import CHARS_PER_TOKEN, TokenCounter

CHART_LINES = 6
MAX_COLUMNS = 100
MAX_BAR = 50
ARRIVALS_PER_BIN = 5
"""On average; with fewer the picture shows little but chance."""
BINS_IN_JSON = 30
CACHE_BLOCK_TOKENS = 16
"""vLLM's block: the least that its prefix cache shares."""


@dataclass(frozen=True)
class Quantiles:
    """Lengths in tokens."""

    p50: int
    p95: int
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Quantiles:
        """Take the nearest-rank quantiles of at least one value."""
        ordered = sorted(values)
        ranks = [-(-len(ordered) * percent // 100) - 1 for percent in (50, 95, 100)]
        return cls(*(ordered[rank] for rank in ranks))

    def __str__(self) -> str:
        if self.p50 == self.max:
            return f"{self.max:,}"
        return f"p50 {self.p50:,}, p95 {self.p95:,}, max {self.max:,}"


@dataclass(frozen=True)
class ClassView:
    """One class of a measurement."""

    name: str
    share: float
    """Of the weights."""
    num_requests: int
    num_conversations: int
    """Of several turns."""
    num_prompts: int
    """Different ones."""
    prompt_tokens: Quantiles
    """As sent, without the chat template and without what live turns bring along."""
    max_tokens: Quantiles
    """Limits of the answers."""
    reused_ratio: float
    """Of the prompts' text, what a prefix cache that forgets nothing would have seen before."""
    limits: dict[str, float]
    lengths: tuple[int, ...] = field(repr=False)
    """Of every prompt, in tokens."""
    answer_lengths: tuple[int, ...] = field(repr=False)
    """The limit of every answer, in tokens."""


@dataclass(frozen=True)
class TrafficView:
    """A profile's traffic, drawn once."""

    name: str
    endpoint: str
    load: str
    seed: int
    digest: str
    holdout_digest: str | None
    """Of the schedule on the held-out prompts; None where none are held out."""
    prompt_realism: str
    num_requests: int
    num_warmup: int
    num_conversations: int
    num_live: int
    """Later turns that bring the server's own answers along."""
    duration_s: float | None
    """From the first arrival to the last, or to the end of the last stage; None in closed loop."""
    is_exact: bool
    """Whether the model's own tokenizer counted."""
    classes: tuple[ClassView, ...]
    caveats: tuple[str, ...]
    notes: tuple[str, ...]
    arrivals_s: tuple[float, ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the view as plain data, for scripts."""
        data = asdict(self)
        del data["arrivals_s"]
        data["arrivals_rps"] = (
            rates(self.arrivals_s, self.duration_s, BINS_IN_JSON) if self.duration_s else None
        )
        for c, shown in zip(self.classes, data["classes"], strict=True):
            del shown["lengths"], shown["answer_lengths"]
            shown["prompt_histogram"] = [asdict(b) for b in doubling_bins(c.lengths)]
            shown["answer_histogram"] = [asdict(b) for b in doubling_bins(c.answer_lengths)]
        return {"format": "autotune-traffic", "version": 1, **data}


def view_traffic(profile: TrafficProfile, counter: TokenCounter, seed: int) -> TrafficView:
    """Draw a profile's schedule and sum it up.

    Raises:
        InputError: a file cannot be used, or has too few prompts.
    """
    schedule = build_schedule(profile, seed, counter=counter)
    holdout_digest = None
    if any(c.prompts is not None and c.prompts.holdout for c in profile.classes):
        holdout = build_schedule(profile, seed, counter=counter, part=Part.HOLDOUT)
        holdout_digest = holdout.digest
    arrivals_s = tuple(r.arrival_s for r in schedule.requests if r.arrival_s is not None)
    return TrafficView(
        name=profile.name,
        endpoint=profile.endpoint,
        load=_load_text(profile),
        seed=seed,
        digest=schedule.digest,
        holdout_digest=holdout_digest,
        prompt_realism=str(schedule.prompt_realism),
        num_requests=len(schedule.requests),
        num_warmup=len(schedule.warmup),
        num_conversations=_num_conversations(schedule.requests),
        num_live=sum(request.is_live for request in schedule.requests),
        duration_s=_duration_s(profile, arrivals_s),
        is_exact=counter.is_exact,
        classes=tuple(_class_views(profile, schedule, counter)),
        caveats=tuple(caveats(profile, schedule)),
        notes=schedule.notes,
        arrivals_s=arrivals_s,
    )


def draw_traffic(view: TrafficView, width: int) -> Iterator[Text]:
    """Lay a view out for a terminal of `width` columns."""
    yield Text(f"{view.name}: {view.load}", style="bold")
    yield Text("\n".join(_facts(view)))
    yield from _arrivals_chart(view, width)
    for c in view.classes:
        yield Text("\n".join(["", *_class_facts(c, view)]))
        yield Text("\n".join(_histogram("prompt", c.lengths, width)), no_wrap=True)
        if c.max_tokens.p50 < c.max_tokens.max:
            yield Text("\n".join(_histogram("answer", c.answer_lengths, width)), no_wrap=True)
    yield Text("")
    yield from (Text.assemble(("Caveat: ", "yellow"), f"{caveat}.") for caveat in view.caveats)
    yield from (Text.assemble(("Note: ", "yellow"), f"{note}.") for note in view.notes)


# What is drawn, in numbers


def _load_text(profile: TrafficProfile) -> str:
    load = profile.load
    if isinstance(load, ConcurrencyLoad):
        return f"closed loop, {load.concurrency} at once"
    if isinstance(load, UsersLoad):
        wait_s = load.think_time.mean_wait_s
        return f"closed loop, {load.users} users who think {wait_s:.3g} s on average"
    if isinstance(load, RateLoad):
        shape = f", burstiness {load.burstiness:g}" if load.burstiness is not None else ""
        return f"open loop, {load.rps:g} requests/s, {load.arrival}{shape}"
    if isinstance(load, StagesLoad):
        return f"open loop, {len(load.stages)} stages in {load.duration_s:g} s"
    return f"open loop, trace {load.file}"


def _duration_s(profile: TrafficProfile, arrivals_s: Sequence[float]) -> float | None:
    if profile.is_closed_loop:
        return None
    load = profile.load
    if isinstance(load, StagesLoad):
        return load.duration_s
    if isinstance(load, TraceLoad) and load.window is not None:
        return load.window.duration_s * load.time_scale + load.jitter_s * load.time_scale
    return arrivals_s[-1]


def _num_conversations(requests: Sequence[ScheduledRequest]) -> int:
    return len({r.conversation_id for r in requests} - {None})


def _class_views(
    profile: TrafficProfile, schedule: Schedule, counter: TokenCounter
) -> Iterator[ClassView]:
    total = sum(c.weight for c in profile.classes)
    counted: dict[str, int] = {}
    reuse = _reuse_by_class(schedule.requests)
    for c in profile.classes:
        requests = [r for r in schedule.requests if r.class_name == c.name]
        if not requests:
            continue
        lengths = [
            sum(_counted(content, counter, counted) for _, content in r.prompt.messages)
            for r in requests
        ]
        answers = tuple(r.max_tokens for r in requests)
        yield ClassView(
            name=c.name,
            share=c.weight / total,
            num_requests=len(requests),
            num_conversations=_num_conversations(requests),
            num_prompts=len({r.prompt.prompt_id for r in requests}),
            prompt_tokens=Quantiles.of(lengths),
            max_tokens=Quantiles.of(answers),
            reused_ratio=reuse[c.name],
            limits=dict(c.slo),
            lengths=tuple(lengths),
            answer_lengths=answers,
        )


def _counted(text: str, counter: TokenCounter, known: dict[str, int]) -> int:
    if text not in known:
        known[text] = counter.count(text)
    return known[text]


def _reuse_by_class(requests: Sequence[ScheduledRequest]) -> dict[str, float]:
    """Return for each class the share of prompt text whose every earlier part was seen before.

    The cache is cut into blocks of 16 tokens at four characters each, and never forgets. Prompts
    come in the schedule's order. What live turns bring along is not counted.
    """
    seen: set[bytes] = set()
    totals: dict[str, list[int]] = {}
    block_chars = CACHE_BLOCK_TOKENS * CHARS_PER_TOKEN
    for request in requests:
        counts = totals.setdefault(request.class_name, [0, 0])
        text = "".join(f"{role}\n{content}\n" for role, content in request.prompt.messages)
        chain = hashlib.blake2b(digest_size=16)
        is_hit = True
        for start in range(0, len(text), block_chars):
            block = text[start : start + block_chars]
            chain.update(block.encode("utf-8", "surrogatepass"))
            key = chain.digest()
            is_hit = is_hit and len(block) == block_chars and key in seen
            counts[0] += len(block) if is_hit else 0
            counts[1] += len(block)
            seen.add(key)
    return {name: reused / total if total else 0.0 for name, (reused, total) in totals.items()}


# How it is drawn


def _facts(view: TrafficView) -> Iterator[str]:
    count = "exact, by the model's tokenizer" if view.is_exact else "estimated, 4 characters each"
    yield (
        f"{view.num_requests} requests a measurement, {view.num_warmup} before it to warm up; "
        f"endpoint {view.endpoint}; seed {view.seed}"
    )
    if view.num_conversations:
        yield (
            f"{view.num_conversations} conversations of several turns; "
            f"{view.num_live} turns bring the server's own answers along"
        )
    if view.duration_s is None:
        yield "duration: as long as the server takes, since the next request follows an answer"
    else:
        yield f"duration: {view.duration_s:.1f} s of arrivals"
    yield f"prompts: {view.prompt_realism}; tokens are {count}"
    held = f"; on held-out prompts {view.holdout_digest}" if view.holdout_digest else ""
    yield f"schedule: {view.digest}{held}"


def _arrivals_chart(view: TrafficView, width: int) -> Iterator[Text]:
    if not view.duration_s:
        return
    margin = 9
    room = min(max(width - margin - 1, 10), MAX_COLUMNS)
    count = max(min(len(view.arrivals_s) // ARRIVALS_PER_BIN, room), 1)
    values = rates(view.arrivals_s, view.duration_s, count)
    values = [value for value in values for _ in range(room // count)]
    lines = columns(values, CHART_LINES)
    marks = [f"{max(values):.3g}", *[""] * (len(lines) - 2), "0"]
    chart = [f"{mark:>{margin - 2}} │{line}" for mark, line in zip(marks, lines, strict=True)]
    end = f"{view.duration_s:.4g} s"
    axis = f"{'':>{margin - 2}} └{'0 s':─<{max(len(values) - len(end), 3)}}{end}"
    yield Text("\n".join(["", "arrivals, requests per second", *chart, axis]), no_wrap=True)


def _class_facts(c: ClassView, view: TrafficView) -> Iterator[str]:
    unit = "" if view.is_exact else " (estimated)"
    yield f"{c.name}: {c.num_requests:,} requests ({c.share:.0%} by weight), {c.num_prompts:,} prompts"
    yield f"  tokens of a prompt{unit}: {c.prompt_tokens}"
    yield f"  tokens of an answer, at most: {c.max_tokens}"
    yield f"  text that a prefix cache would have seen before: {c.reused_ratio:.0%}"
    if c.limits:
        yield "  limits: " + ", ".join(f"{key} {value:g}" for key, value in c.limits.items())


def _histogram(name: str, lengths: Sequence[int], width: int) -> Iterator[str]:
    """Draw how many requests have which length; the first line names what is counted."""
    bins = doubling_bins(lengths)
    labels = [f"{b.low:,}–{b.high:,}" if b.low < b.high else f"{b.low:,}" for b in bins]
    margin = max(len(label) for label in labels) + 3
    count_width = max(len(f"{b.count:,}") for b in bins)
    room = min(max(width - margin - count_width - 3, 5), MAX_BAR)
    most = max(b.count for b in bins)
    yield f"{name:>{margin}}"
    for label, b in zip(labels, bins, strict=True):
        yield f"{label:>{margin}} {b.count:>{count_width},} {bar(b.count / most, room)}"
