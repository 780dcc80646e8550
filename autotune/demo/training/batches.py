"""Lay out samples as slots: what the drafter reads, may see and must say.

With h[t] the target's state and x[t] the token at position t, one draft of K tokens is made from
an *anchor* t, the last position for which the target's state is known:

    slot 0, a real slot at position t:     reads h[t] and x[t + 1],      says x[t + 2]
    slot k, a mask slot at position t + k: reads `mask_hidden` and MASK, says x[t + 2 + k]

x[t + 1] is known because the target's last step chose it. All mask slots read the same two
vectors (one shared `mask_hidden`, as in arXiv 2602.01469), so nothing they read tells the second
draft from the third. Their position does: each slot takes the one it will have in service, and
rotary embedding makes attention depend on it.

One sequence serves many drafts at once: every position is a real slot, and some are drawn as
anchors and get K - 1 mask slots behind the sequence. The attention rule keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from autotune.demo.training.samples import IGNORED, DraftVocabulary, Sample

NO_ANCHOR = -1
"""Anchor of a real slot, which belongs to no draft of its own."""


@dataclass
class Slots:
    """The slots of one sample; five lists of the same length, real slots first."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    """Draft ids, or `IGNORED` where nothing is to be learned."""
    depths: list[int] = field(default_factory=list)
    """Which draft of its pass a slot makes: 0 in real slots, from 1 in mask slots."""
    anchors: list[int] = field(default_factory=list)
    """Position of the anchor that a mask slot belongs to; `NO_ANCHOR` in real slots."""

    def add(self, token_id: int, position: int, label: int, depth: int, anchor: int) -> None:
        """Append one slot."""
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.labels.append(label)
        self.depths.append(depth)
        self.anchors.append(anchor)


@dataclass(frozen=True)
class Batch:
    """Slots of B samples, filled up to N slots each; C channels of auxiliary states."""

    token_ids: Tensor
    """Shape (B, N)."""
    features: Tensor
    """float32 of shape (B, N, C); zeros where a slot has no state of the target."""
    positions: Tensor
    """Shape (B, N)."""
    allowed: Tensor
    """Shape (B, 1, N, N), true where the query (row) may see the key (column)."""
    labels: Tensor
    """Shape (B, N), `IGNORED` in the padding."""
    depths: Tensor
    """Shape (B, N), 0 in the padding."""

    @property
    def is_mask(self) -> Tensor:
        """Shape (B, N), true in mask slots."""
        return self.depths > 0


@dataclass(frozen=True)
class SlotMaker:
    """Lays out samples for one head."""

    vocabulary: DraftVocabulary
    mask_token_id: int
    depth: int
    """K, the number of tokens drafted in one pass."""
    anchors_per_sample: int

    def slots(self, sample: Sample, anchors: Sequence[int]) -> Slots:
        """Return the real slots of the whole sample and the mask slots of the given anchors."""
        tokens, slots = sample.tokens, Slots()
        for t in range(len(tokens) - 1):
            slots.add(tokens[t + 1], t, self._label(sample, t + 2), 0, NO_ANCHOR)
        for t in anchors:
            for k in range(1, min(self.depth, len(tokens) - t - 2)):
                slots.add(self.mask_token_id, t + k, self._label(sample, t + 2 + k), k, t)
        return slots

    def draw_anchors(self, sample: Sample, rng: Random) -> list[int]:
        """Return rising positions from which a draft may start, none twice.

        The first is the prompt's last position: there, in service, the first draft is made. The
        last one still has a token left to say.
        """
        possible = range(max(sample.num_prompt_tokens - 1, 0), len(sample.tokens) - 2)
        return sorted(rng.sample(possible, min(self.anchors_per_sample, len(possible))))

    def _label(self, sample: Sample, position: int) -> int:
        # The prompt is given, not drafted, so its tokens are not worth learning.
        is_answer = sample.num_prompt_tokens <= position < len(sample.tokens)
        return self.vocabulary.label(sample.tokens[position]) if is_answer else IGNORED


def allowed_attention(positions: Tensor, anchors: Tensor) -> Tensor:
    """Return which slot may see which, as it will be when vLLM drafts.

    - A real slot sees the real slots up to itself: plain causal attention.
    - A mask slot sees the real slots up to its anchor, since nothing later exists when it drafts.
    - A mask slot also sees the mask slots of the same anchor up to itself.
    - Nothing else: drafts from different anchors never meet, and no real slot sees a mask slot.

    Args:
        positions: shape (N,).
        anchors: shape (N,), `NO_ANCHOR` in real slots.

    Returns:
        Boolean of shape (N, N); row = query, column = key.
    """
    is_real = anchors == NO_ANCHOR
    last_real = torch.where(is_real, positions, anchors)
    sees_real = is_real[None, :] & (positions[None, :] <= last_real[:, None])
    same_draft = ~is_real[:, None] & (anchors[:, None] == anchors[None, :])
    sees_mask = same_draft & (positions[None, :] <= positions[:, None])
    return sees_real | sees_mask


def collate(all_slots: Sequence[Slots], features: Sequence[Tensor]) -> Batch:
    """Pad the slots of several samples to one batch.

    Args:
        all_slots: the slots of each sample; non-empty.
        features: for each sample the target's states, shape (tokens, C). The last token's state
            has no slot, since no token follows that could be read with it.
    """
    size = (len(all_slots), max(len(slots.token_ids) for slots in all_slots))
    allowed = torch.eye(size[1], dtype=torch.bool).repeat(size[0], 1, 1)
    states = torch.zeros(*size, features[0].shape[-1])
    for i, (slots, of_sample) in enumerate(zip(all_slots, features, strict=True)):
        num_slots, num_real = len(slots.anchors), slots.anchors.count(NO_ANCHOR)
        rule = allowed_attention(torch.tensor(slots.positions), torch.tensor(slots.anchors))
        # Padding keeps the diagonal of `eye`: a row that may see nothing would become NaN.
        allowed[i, :num_slots, :num_slots] = rule
        states[i, :num_real] = of_sample[:num_real].float()
    return Batch(
        token_ids=_pad([slots.token_ids for slots in all_slots], 0),
        features=states,
        positions=_pad([slots.positions for slots in all_slots], 0),
        allowed=allowed[:, None],
        labels=_pad([slots.labels for slots in all_slots], IGNORED),
        depths=_pad([slots.depths for slots in all_slots], 0),
    )


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
