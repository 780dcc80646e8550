"""CPU seconds of a proposal with 20,000 candidates."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from autotune.search.candidates import Candidates
from autotune.search.observing import Observer
from autotune.search.setup import SearchSetup
from autotune.search.trial import run_trial
from autotune.serving.config import ServingConfig
from autotune.serving.engine import LaunchContext
from autotune.store.records import LaunchRecord, LaunchState, Phase
from benchmarks.search.scenarios import Scenario, Traffic, make_setup

NUM_CANDIDATES = 20_000
NUM_OBSERVED = 30
NUM_PROPOSALS = 10
SCENARIO = Scenario(0, "h100-8b", Traffic(64, 600, 250, 192), 1.0)


def report() -> str:
    """Return one line with the CPU seconds of proposals, learning included."""
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(
            SCENARIO, {"ttft_p95_ms": 2000.0, "tpot_p95_ms": 40.0}, 0, "auto", Path(folder)
        )
        seconds = proposal_seconds(_stretched(setup), Path(folder))
    return (
        f"{NUM_CANDIDATES:,} candidates, {NUM_OBSERVED} to {NUM_OBSERVED + NUM_PROPOSALS} launches known: "
        f"{median(seconds):.2f} s of CPU per proposal, {max(seconds):.2f} s at most"
    )


def _stretched(setup: SearchSetup) -> SearchSetup:
    """Return the setup with as many candidates as are wanted: more values of max_num_seqs."""
    items = list(setup.candidates.items)
    most_seqs = max(c.config.max_num_seqs or 0 for c in items)
    added = 0
    while len(items) < NUM_CANDIDATES:
        candidate = setup.candidates.items[added % len(setup.candidates.items)]
        seqs = most_seqs + 1 + added // len(setup.candidates.items)
        items.append(
            replace(
                candidate,
                config=replace(candidate.config, max_num_seqs=seqs),
                params={**candidate.params, "max_num_seqs": seqs},
            )
        )
        added += 1
    # Values of one knob collapse where configs differ by it alone; keep the first of each.
    unique = {c.config: c for c in items}
    dimensions = tuple(
        replace(d, values=tuple(dict.fromkeys(c.params[d.name] for c in unique.values())))
        if d.name == "max_num_seqs"
        else d
        for d in setup.candidates.dimensions
    )
    stretched: Candidates = replace(
        setup.candidates, items=tuple(unique.values()), dimensions=dimensions
    )
    return replace(setup, candidates=stretched)


def proposal_seconds(setup: SearchSetup, folder: Path) -> list[float]:
    """Launch candidates spread over the list, then time each further proposal with all it learns from."""
    from autotune.search.modelling import create_proposer

    observer = Observer(setup.goal)
    launches: list[LaunchRecord] = []
    tried: set[ServingConfig] = set()
    proposer = create_proposer(setup)
    items = setup.candidates.items
    configs = [items[i * len(items) // NUM_OBSERVED].config for i in range(NUM_OBSERVED)]
    seconds: list[float] = []
    for number in range(NUM_OBSERVED + NUM_PROPOSALS):
        if number < NUM_OBSERVED:
            config = configs[number]
        else:
            began_s = time.process_time()
            proposer.learn(observer.observations(launches))
            proposal = proposer.propose(tried, number - NUM_OBSERVED)
            seconds.append(time.process_time() - began_s)
            assert proposal is not None  # thousands are left
            config = items[proposal.index].config
        tried.add(config)
        launches.append(_launch(setup, config, number, folder))
    return seconds


def _launch(setup: SearchSetup, config: ServingConfig, number: int, folder: Path) -> LaunchRecord:
    context = LaunchContext(work_dir=folder, name=str(number), needs=setup.needs)
    result = run_trial(setup.engine, config, setup.screen_schedule, context)
    is_failed = result.failure is not None
    return LaunchRecord(
        launch_id=number,
        trial_number=number,
        phase=Phase.SEARCH,
        repeat=0,
        config=config,
        state=LaunchState.FAILED if is_failed else LaunchState.MEASURED,
        started_at_s=float(number),
        ended_at_s=float(number) + 1,
        report=asdict(result.report) if result.report is not None else {},
        failure=result.failure,
        measurements=result.measurements,
    )
