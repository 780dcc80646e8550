"""What engines on a virtual clock share."""

from __future__ import annotations

from autotune.measure.records import ServerCounters
from autotune.serving.virtual import added


def test_counters_of_different_depth_can_be_added() -> None:
    total = added(
        ServerCounters(num_drafts=1, num_accepted_tokens_per_pos=(1,)),
        ServerCounters(num_drafts=2, num_accepted_tokens_per_pos=(2, 1), has_speculation=True),
    )

    assert total.num_drafts == 3
    assert total.num_accepted_tokens_per_pos == (3, 1)
    assert total.has_speculation
