"""The plan: what a search would launch, what is fixed and why, and how long it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.search.setup import SearchSetup
from autotune.serving.memory import MemoryModel
from autotune.store.schema import without_password

GUESSED_LAUNCH_S = {"cpu": 40.0, "cuda": 120.0, "simulated": 90.0}
"""Seconds of one launch, before any was seen here: a small model on CPU, a large one on a GPU."""
SHOWN_CANDIDATES = 12


@dataclass(frozen=True)
class Plan:
    """A search that is not run."""

    lines: tuple[str, ...]
    num_launches: int
    estimated_s: float

    def as_text(self) -> str:
        return "\n".join(self.lines)


def make_plan(setup: SearchSetup) -> Plan:
    """Describe a prepared search without launching anything."""
    num_launches = setup.max_trials + _num_confirmations(setup)
    launch_s = GUESSED_LAUNCH_S[setup.info.device]
    traffic_s = setup.profile.measure.max_duration_s
    longest_s = num_launches * (launch_s + traffic_s)
    budget_s = setup.settings.budget_s
    estimated_s = min(longest_s, budget_s) if budget_s is not None else longest_s
    lines = [
        *_head(setup),
        *_candidates(setup),
        *_fixed(setup),
        *[f"note: {note}" for note in setup.notes],
        *[f"caution: {caveat}" for caveat in setup.caveats],
        f"launches: {setup.max_trials} to search, up to {_num_confirmations(setup)} to confirm",
        f"estimated time: at most {estimated_s / 60:.0f} min (a guess: {launch_s:.0f} s a launch, "
        f"traffic at most {traffic_s:.0f} s a launch)",
        "nothing was launched",
    ]
    return Plan(tuple(lines), num_launches, estimated_s)


def _head(setup: SearchSetup) -> list[str]:
    mark = " (simulated)" if setup.info.is_simulated else ""
    direction = "maximize" if setup.goal.is_maximized else "minimize"
    limits = [f"{c} {n} <= {v:g}" for c, of in setup.goal.limits.items() for n, v in of.items()]
    return [
        f"study: {setup.study_name} in {without_password(setup.settings.storage)}",
        f"engine: {setup.info.engine} {setup.info.version} on {setup.info.hardware}{mark}",
        f"model: {setup.model}",
        *[f"drafter: {head.name}" for head in setup.drafters],
        f"traffic: {len(setup.schedule.requests)} requests a measurement, schedule "
        f"{setup.schedule.digest}, {len(setup.schedule.warmup)} warm-up requests",
        f"objective: {direction} {setup.goal.objective}; limits: {'; '.join(limits) or 'none'}",
        f"sampler: {setup.sampler}, seed {setup.seed}",
    ]


def _candidates(setup: SearchSetup) -> list[str]:
    c = setup.candidates
    lines = [f"combinations: {c.num_combinations:,}"]
    lines += [f"  left out {count:,}: {reason}" for reason, count in c.removed.items()]
    lines.append(f"candidates: {len(c.items):,}")
    lines += _memory(setup)
    shown = [setup.label(candidate.config) for candidate in c.items[:SHOWN_CANDIDATES]]
    more = len(c.items) - len(shown)
    lines.append("  " + ", ".join(shown) + (f", ... and {more:,} more" if more else ""))
    anchors = {"no speculation": c.baseline, "default": c.default, "first guess": c.starter}
    if c.deepest is not c.default:
        anchors["deepest"] = c.deepest
    lines.append(
        "always measured: "
        + ", ".join(f"{setup.label(x.config)} ({n})" for n, x in anchors.items())
    )
    return lines


def _memory(setup: SearchSetup) -> list[str]:
    """Say what the default config would take, or that nobody knows."""
    if setup.sizes is None:
        return ["memory: sizes are not known, so nothing was left out for memory"]
    e = MemoryModel(setup.sizes, setup.needs).estimate(setup.candidates.default.config)
    if math.isinf(e.kv_bytes):
        return ["memory: the device's is not known, so nothing was left out for memory"]
    cache = f"KV cache {_gb(e.kv_bytes)}, which is {e.kv_tokens:,.0f} tokens"
    if setup.sizes.device.kv_bytes is None:
        cache = (
            f"weights {_gb(e.weight_bytes)}, drafter {_gb(e.drafter_bytes)}, working memory "
            f"{_gb(e.activation_bytes)}, graphs {_gb(e.graph_bytes)}, {cache}; "
            f"sampling under load {_gb(e.sampler_bytes)} more"
        )
    lines = [f"memory of the default config (estimated): {cache}"]
    users, longest = setup.needs.concurrency, setup.needs.longest_request_tokens
    if users is not None and longest is not None and e.kv_tokens < users * longest:
        lines.append(
            f"  caution: {users} of the longest requests ({longest:,} tokens) do not fit at once"
        )
    return lines


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _fixed(setup: SearchSetup) -> list[str]:
    lines = [f"fixed: {f.knob} = {f.value}, because {f.reason}" for f in setup.candidates.fixed]
    flags = setup.space.fixed_flags
    if flags:
        lines.append("fixed by the space: " + ", ".join(f"{k}={v}" for k, v in flags.items()))
    return lines


def _num_confirmations(setup: SearchSetup) -> int:
    anchors = {setup.candidates.baseline.config.digest, setup.candidates.default.config.digest}
    others = min(setup.settings.num_finalists, max(0, setup.max_trials - len(anchors)))
    return (others + len(anchors)) * setup.settings.num_repeats
