"""The optimisation itself: a loss, a learning rate, steps until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.demo.training.batches import Batch
from autotune.demo.training.drafter import Drafter
from autotune.demo.training.samples import IGNORED

WARMUP_STEPS = 50
FINAL_RATE_RATIO = 0.05
"""The learning rate ends at this fraction of its peak, so that late steps still count."""


@dataclass(frozen=True)
class Budget:
    """When training ends: at the time limit, or at the step limit if that comes first."""

    minutes: float
    max_steps: int | None = None

    def spent_ratio(self, elapsed_s: float, num_steps: int) -> float:
        """Return how much is used up, 0 to 1; training ends at 1."""
        by_steps = num_steps / self.max_steps if self.max_steps else 0.0
        return min(1.0, max(elapsed_s / (self.minutes * 60), by_steps))


def fit(
    drafter: Drafter,
    batches: Iterator[Batch],
    budget: Budget,
    peak_rate: float,
    on_step: Callable[[int, float], None],
) -> int:
    """Take training steps until the budget is spent.

    Args:
        drafter: changed in place.
        batches: as many as it takes.
        budget: when to stop; at least one step is taken.
        peak_rate: the learning rate after warm-up.
        on_step: called after every step with its number, from 1, and its loss.

    Returns:
        The number of steps.
    """
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.05)
    started = time.monotonic()
    num_steps, spent = 0, 0.0
    while spent < 1.0:
        loss = loss_of(drafter, next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        spent = budget.spent_ratio(time.monotonic() - started, num_steps)
        _set_rate(optimizer, peak_rate * rate_ratio(num_steps, spent))
        optimizer.step()
        num_steps += 1
        spent = budget.spent_ratio(time.monotonic() - started, num_steps)
        on_step(num_steps, loss.item())
    return num_steps


def rate_ratio(num_steps: int, spent_ratio: float) -> float:
    """Return the learning rate as a fraction of its peak.

    It rises linearly over the first steps and falls along half a cosine. The fall follows the
    budget, so that a run ends with small steps however many it manages.
    """
    warmup = min(1.0, (num_steps + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * spent_ratio))
    return warmup * (FINAL_RATE_RATIO + (1.0 - FINAL_RATE_RATIO) * cosine)


def loss_of(drafter: Drafter, batch: Batch) -> Tensor:
    """Return the mean cross entropy in nats over all labelled slots; 0 when there are none."""
    is_labelled = batch.labels != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = drafter.lm_head(_states(drafter, batch)[is_labelled])
    labels = batch.labels[is_labelled]
    # Not reduction="mean", which is NaN for no labels and would ruin every weight.
    total = functional.cross_entropy(logits.float(), labels, reduction="sum")
    return total / max(1, len(labels))


@torch.no_grad()
def accuracy_by_depth(drafter: Drafter, batches: Iterator[Batch], depth: int) -> list[float]:
    """Return for every depth how often the drafter's first choice is the target's token.

    Teacher-forced: every draft starts from the target's own answer, and a token counts whether or
    not the drafts before it were right. So depth k's accuracy is not the chance that k tokens in
    a row are accepted. Tokens outside the draft vocabulary are left out.

    Returns:
        `depth` fractions, 0 to 1; 0 where there was nothing to say.
    """
    num_right, num_all = torch.zeros(depth), torch.zeros(depth)
    for batch in batches:
        is_labelled = batch.labels != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            logits = drafter.lm_head(_states(drafter, batch)[is_labelled])
        is_right = logits.argmax(dim=-1) == batch.labels[is_labelled]
        depths = batch.depths[is_labelled]
        num_all += torch.bincount(depths, minlength=depth)
        num_right += torch.bincount(depths[is_right], minlength=depth)
    return cast(list[float], (num_right / num_all.clamp(min=1)).tolist())


def _states(drafter: Drafter, batch: Batch) -> Tensor:
    states = drafter(
        batch.token_ids, batch.features, batch.is_mask, batch.positions, batch.allowed
    )
    return cast(Tensor, states)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
