"""What tests of search, store, export and report share: measurements by hand, worlds, small studies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.measure.records import Measurement, RequestRecord, ServerCounters
from autotune.search.setup import SearchSettings, SearchSetup, prepare
from autotune.search.space import SearchSpace
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine, EngineSettings
from autotune.serving.failures import TrialFailure
from autotune.serving.models import DrafterInfo
from autotune.serving.simulated import SimulatedEngine
from autotune.serving.worlds import Hardware, Head, Target, World
from autotune.store.records import LaunchRecord, LaunchState, Phase
from autotune.traffic.profile import TrafficProfile

TOKENS = 10
"""Tokens of every answer in a measurement made by hand."""


def config(k: int, **changes: Any) -> ServingConfig:
    """A config with K draft tokens of a parallel drafter."""
    fields: dict[str, Any] = {
        "model": "model",
        "drafter": "head" if k else None,
        "num_speculative_tokens": k,
        "parallel_drafting": k > 0,
    }
    return ServingConfig(**{**fields, **changes})


def head(
    name: str = "head", trained_depth: int | None = 8, *, is_parallel: bool = True
) -> DrafterInfo:
    """A draft head that is not in any folder."""
    return DrafterInfo(
        name=name,
        folder=Path(),
        kind="p-eagle" if is_parallel else "eagle3",
        trained_depth=trained_depth,
        num_layers=1,
        draft_vocab_size=1000,
        target_hidden_size=0,
        vocab_size=0,
    )


def measurement(
    seconds: Sequence[float],
    *,
    ttft_s: float | None = None,
    num_failed: int = 0,
    acceptance_length: float | None = None,
    class_name: str = "default",
    is_simulated: bool = False,
) -> Measurement:
    """One user who sends one request after another, each answered with `TOKENS` tokens.

    Args:
        seconds: how long each request takes. All requests follow each other without a gap, so the
            output throughput is TOKENS x len(seconds) / sum(seconds).
        ttft_s: time to the first token of every request; an even share of its seconds when None.
        num_failed: how many of the last requests end in an error instead of an answer.
        acceptance_length: what the server's counters say.
        class_name: of every request.
        is_simulated: marks the measurement.
    """
    records, now_s = [], 0.0
    for number, took_s in enumerate(seconds):
        first_s = now_s + (took_s / TOKENS if ttft_s is None else ttft_s)
        is_failed = number >= len(seconds) - num_failed
        records.append(
            RequestRecord(
                request_id=number,
                class_name=class_name,
                prompt_id=f"prompt-{number}",
                scheduled_s=None,
                sent_s=now_s,
                chunk_times_s=() if is_failed else (first_s, now_s + took_s),
                chunk_tokens=() if is_failed else (1, TOKENS),
                finished_s=now_s + took_s,
                num_prompt_tokens=5,
                num_completion_tokens=0 if is_failed else TOKENS,
                finish_reason=None if is_failed else "length",
                error="HTTP 500: no" if is_failed else None,
            )
        )
        now_s += took_s
    counters = ServerCounters()
    if acceptance_length is not None:
        accepted = 100 * (acceptance_length - 1)
        counters = ServerCounters(
            num_drafts=100,
            num_draft_tokens=400,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=(accepted, 0, 0, 0),
            has_speculation=True,
        )
    return Measurement(
        schedule_digest="0123456789abcdef",
        concurrency=1,
        started_at_s=1_700_000_000.0,
        duration_s=now_s,
        records=tuple(records),
        counters=counters,
        is_simulated=is_simulated,
    )


def at_tps(tps: float, num_requests: int = 10, **changes: Any) -> Measurement:
    """A measurement without any noise, of exactly this output throughput."""
    return measurement([TOKENS / tps] * num_requests, **changes)


def launch(
    launch_id: int,
    of: ServingConfig,
    result: Measurement | TrialFailure | None,
    phase: Phase = Phase.SEARCH,
    *,
    trial_number: int | None = None,
    repeat: int = 0,
    report: Mapping[str, Any] | None = None,
) -> LaunchRecord:
    """A launch as it comes out of the store; None as a result stands for one that was cut off."""
    is_measured = isinstance(result, Measurement)
    state = LaunchState.MEASURED if is_measured else LaunchState.FAILED
    return LaunchRecord(
        launch_id=launch_id,
        trial_number=trial_number,
        phase=phase,
        repeat=repeat,
        config=of,
        state=LaunchState.ABANDONED if result is None else state,
        started_at_s=float(launch_id),
        ended_at_s=float(launch_id) + 1,
        report=dict(report or {}),
        failure=result if isinstance(result, TrialFailure) else None,
        measurements=(result,) if isinstance(result, Measurement) else (),
    )


# A world of round numbers. 10 GB of weights at 1 TB/s: 10 ms a step; 1 ms for each row that is
# decoded; 1 GB of head and 1 ms of overhead: 2 ms to draft. Arithmetic and KV cache are free. So one
# request alone takes 11 ms a step without speculation, and 13 + K ms with K draft tokens.
ROUND_HARDWARE = Hardware(
    "Round GPU", bandwidth_bytes_per_s=1e12, compute_flops_per_s=1e30, memory_bytes=100e9
)
ROUND_TARGET = Target(
    name="round",
    weight_bytes=10e9,
    active_bytes=10e9,
    flops_per_token=10e9,
    kv_bytes_per_token=1.0,
    num_layers=10,
    overhead_s=0.0,
    overhead_per_row_s=1e-3,
)

# Tokens a step are 1 + the sum of the first K survivals. Tokens per second of one request alone:
#   K   0      1      2      3      4      5      6      7      8     9     10
#       1/11   1.95   2.85   3.7    4.5    5.3    5.32   5.33   5.33  5.33  5.33
#              /14    /15    /16    /17    /18    /19    /20    /21   /22   /23
#       90.9   139    190    231    265    294    280    266    254   242   232
BEST_K = 5
PEAK_AT_5 = World(
    ROUND_HARDWARE,
    ROUND_TARGET,
    Head(1e9, 1, 1e-3, (0.95, 0.9, 0.85, 0.8, 0.8, 0.02, 0.005, 0.001)),
    launch_s=30.0,
)
TRAINED_DEPTH = 8


def simulated(
    world: World = PEAK_AT_5, noise: float = 0.2, seed: int = 0, **faults: str
) -> SimulatedEngine:
    """An engine of a world; `faults` are failure kinds by K, such as ``k4="launch_error"``."""
    by_label = {f"K={name.removeprefix('k')}": kind for name, kind in faults.items()}
    options = {"world": world, "noise": noise, "faults": by_label}
    return SimulatedEngine(EngineSettings(options=options, seed=seed))


def make_profile(folder: Path, **changes: Any) -> TrafficProfile:
    """One user who asks for `max_tokens` tokens at a time; the prompts lie in `folder`."""
    rows = [json.dumps({"prompt": f"Question {n}: what is {n} + {n}?"}) + "\n" for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    traffic: dict[str, Any] = {
        "version": 1,
        "name": "study",
        "load": {"kind": "concurrency", "concurrency": 1},
        "measure": {"min_requests": 8, "warmup": 1},
        "classes": [
            {
                "prompts": {"file": "prompts.jsonl"},
                "output": {"max_tokens": 48, "ignore_eos": True},
            }
        ],
        **changes,
    }
    profile = TrafficProfile.model_validate(traffic)
    profile._path = folder / "traffic.yaml"
    return profile


def with_limits(limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """The traffic classes of `make_profile`, with limits."""
    return [
        {
            "prompts": {"file": "prompts.jsonl"},
            "output": {"max_tokens": 48, "ignore_eos": True},
            "slo": dict(limits),
        }
    ]


def make_space(parameters: Mapping[str, Any] | None = None, **more: Any) -> SearchSpace:
    """A search space; a list of values stands for `choices`, and K goes from 0 to 10 by default."""
    written = parameters or {"num_speculative_tokens": {"range": [0, 10]}}
    data = {
        "version": 1,
        "name": "space",
        "parameters": {
            name: {"choices": list(values)} if isinstance(values, list | tuple) else values
            for name, values in written.items()
        },
        **more,
    }
    return SearchSpace.model_validate(data)


def make_setup(
    folder: Path,
    *,
    engine: Engine | None = None,
    space: SearchSpace | None = None,
    profile: TrafficProfile | None = None,
    drafters: Sequence[str] = ("head",),
    **settings: Any,
) -> SearchSetup:
    """A small search that is ready to run, with its database and its files in `folder`."""
    chosen = SearchSettings(
        storage=str(folder / "autotune.db"),
        out_dir=folder / "out",
        command_line=("autotune", "search"),
        **{"sampler": "grid", **settings},
    )
    return prepare(
        profile or make_profile(folder),
        space or make_space(),
        engine or simulated(),
        "model",
        list(drafters),
        chosen,
    )


def with_settings(setup: SearchSetup, **changes: Any) -> SearchSetup:
    return replace(setup, settings=replace(setup.settings, **changes))
