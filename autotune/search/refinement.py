"""Switching speculation off above a batch size: an opt-in refinement of the winner.

With a parallel drafter K by batch size knows two values that are safe, K and none (see
`ServingConfig.speculation_off_above`). So it can only help where the batch varies and is at times so large
that speculation loses. It also costs something by itself: vLLM reports 7 to 22 % a token for "K = 0" in one
against no speculation at all (issue #49548). Whether it pays is measured like anything else.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.search.setup import SearchSetup
from autotune.serving.config import ServingConfig
from autotune.traffic.loads import ConcurrencyLoad

SHARES_OF_CONCURRENCY = (0.25, 0.5)
"""Where the switch is tried, as shares of the most requests in flight. Nobody can say in advance where
speculation begins to lose; two launches more bracket it."""


def why_not_refined(setup: SearchSetup) -> str | None:
    """Say why there is nothing to switch here; None where there is."""
    if setup.why_not_off_by_batch is not None:
        return setup.why_not_off_by_batch
    load = setup.profile.load
    if isinstance(load, ConcurrencyLoad):
        return "the load keeps the batch at one size, so one K serves it"
    if setup.profile.offered_concurrency is None:
        return "load.max_concurrency is not given, so nobody knows where to switch"
    return None


def batch_switches(setup: SearchSetup, winner: ServingConfig) -> list[ServingConfig]:
    """Return the winner with speculation switched off above some batch sizes; none where that is no use."""
    concurrency = setup.profile.offered_concurrency
    if not winner.is_speculative or why_not_refined(setup) is not None or concurrency is None:
        return []
    sizes = dict.fromkeys(max(1, round(s * concurrency)) for s in SHARES_OF_CONCURRENCY)
    return [replace(winner, speculation_off_above=size) for size in sizes if size < concurrency]
