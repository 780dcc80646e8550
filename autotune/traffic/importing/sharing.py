"""How much requests share: blocks of a prompt that came before, and system prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from autotune.traffic.importing.inferred import Inferred
from autotune.traffic.rows import Row

MAX_BLOCKS_KEPT = 262_144
"""Above that many different blocks their number is an estimate, within 0.3 % (one standard error)."""

MAX_SYSTEM_PROMPTS = 10_000


@dataclass(frozen=True)
class Blocks:
    """Sharing between prompts that are told by the ids of their blocks, as Mooncake's traces do."""

    hit_ratio: float
    """Share of all blocks that came before: the hits of a prefix cache that never forgets.

    An id stands for its block and all before it, so a block that came before is a hit.
    """
    block_tokens: int
    num_blocks: int
    num_first_blocks: int
    """Different first blocks, which begin the groups of requests that share anything."""


@dataclass(frozen=True)
class SystemPrompts:
    """System prompts that requests begin with."""

    shared_ratio: float
    """Share of the requests whose system prompt another request has as well."""
    num_shared: int
    """Different system prompts that several requests have."""
    num_chars: int
    """Length of the one that most requests have."""


class SharingRecorder:
    """Takes rows in one pass and constant memory."""

    def __init__(self) -> None:
        self._blocks = _DistinctCounter()
        self._first_blocks = _DistinctCounter()
        self._num_blocks = 0
        self._num_rows_with_blocks = 0
        self._block_tokens = 0
        self._num_rows_with_text = 0
        self._systems: dict[bytes, tuple[int, int]] = {}  # by digest: requests, characters

    def add(self, row: Row) -> None:
        if row.prefix_ids:
            self._num_rows_with_blocks += 1
            self._num_blocks += len(row.prefix_ids)
            self._block_tokens = row.prefix_block_tokens
            self._first_blocks.add(row.prefix_ids[0])
            for block in row.prefix_ids:
                self._blocks.add(block)
        if row.has_text:
            self._num_rows_with_text += 1
            system = _system_of(row)
            if system:
                self._add_system(system)

    def blocks(self) -> Inferred[Blocks] | None:
        """Return how blocks are shared, None if no row has ids of blocks."""
        if not self._num_blocks:
            return None
        found = Blocks(
            hit_ratio=max(0.0, 1 - self._blocks.count() / self._num_blocks),
            block_tokens=self._block_tokens,
            num_blocks=self._num_blocks,
            num_first_blocks=round(self._first_blocks.count()),
        )
        return Inferred(found, self._num_rows_with_blocks)

    def system_prompts(self) -> Inferred[SystemPrompts] | None:
        """Return how system prompts are shared, None if no two requests have the same."""
        shared = [known for known in self._systems.values() if known[0] > 1]
        if not shared:
            return None
        num_requests = sum(count for count, _ in shared)
        found = SystemPrompts(
            shared_ratio=num_requests / self._num_rows_with_text,
            num_shared=len(shared),
            num_chars=max(shared)[1],
        )
        return Inferred(found, self._num_rows_with_text)

    def _add_system(self, system: str) -> None:
        digest = hashlib.blake2b(system.encode(), digest_size=8).digest()
        if digest in self._systems or len(self._systems) < MAX_SYSTEM_PROMPTS:
            count, _ = self._systems.get(digest, (0, 0))
            self._systems[digest] = (count + 1, len(system))


class _DistinctCounter:
    """Counts different whole numbers: exactly while they fit, then by keeping a known share of them.

    Adaptive sampling (Flajolet 1990, "On Adaptive Sampling"): only numbers whose hash ends in `depth`
    zero bits are kept, so there are 2^depth times as many.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()
        self._depth = 0

    def add(self, value: int) -> None:
        if self._depth and _mixed(value) & ((1 << self._depth) - 1):
            return
        self._kept.add(value)
        while len(self._kept) > MAX_BLOCKS_KEPT:
            self._depth += 1
            mask = (1 << self._depth) - 1
            self._kept = {kept for kept in self._kept if not _mixed(kept) & mask}

    def count(self) -> float:
        return len(self._kept) * 2.0**self._depth


def _mixed(value: int) -> int:
    """Spread a number over 64 bits (the finaliser of splitmix64), since ids are often consecutive."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _system_of(row: Row) -> str | None:
    if row.messages is not None:
        role, content = row.messages[0]
        return content if role == "system" else None
    return row.system
