"""Runs: what a batch comes to, once every engine hash is resolved to a block.

A run is consecutive blocks of one batch that the same holder gets or loses. It names no block twice: what a
batch repeats stands in two runs, because the store reads the state of a whole run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["+", "-", "!"]
"""Stored; removed (one copy, where copies are counted); leaves the block, whatever its count."""

Mode = Literal["count", "set", "all"]
"""How a holder's copies are counted; ``all``: not trusted any more, a removal takes the block."""


@dataclass(slots=True)
class Run:
    kind: Kind
    holder: int
    seq: int
    """Of the batch."""
    first: int
    """Position of the first block in its batch, from 1; every hash of a batch has a position, also those that
    come to nothing, so that positions mean the same to whoever resolves the batch again."""
    keys: list[int]
    """Block keys: seq_hash XOR namespace, u64."""
    hashes: list[int]
    """The engine hash of each block, u64."""
    namespace: int = 0
    is_identity: bool = False
    """Engine hashes are the seq_hashes."""

    def part(self, start: int, end: int) -> Run:
        """Blocks ``start`` to ``end`` of it."""
        keys, hashes = self.keys[start:end], self.hashes[start:end]
        return Run(self.kind, self.holder, self.seq, self.first + start, keys, hashes, self.namespace, self.is_identity)


@dataclass(frozen=True, slots=True)
class Commit:
    """Where a stream's watermark goes, and what is kept beside it."""

    watermark: int
    ts: float | None
    newest_ts: float | None
    """The largest ts of this life so far."""
    digest: str
    """16 hex digits of the payload at the watermark."""
