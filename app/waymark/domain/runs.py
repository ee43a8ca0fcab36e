"""Runs: the changes of a batch, once every engine hash is resolved to a block.

A run is a list of consecutive blocks of one batch that the same holder gets or loses. A run names no block twice: a
block that a batch repeats is in two runs, because the store reads the state of a whole run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from waymark.domain.memory import block_key, namespace_of

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
    """Position of the first block in its batch, from 1. Every hash of a batch has a position, also those that
    come to nothing, so that positions mean the same to whoever resolves the batch again; a hash that may have to
    leave another block first has two. In the runs of a holder they only ascend."""
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
    before: int | None = None
    """The watermark that Redis is known to have had: one that has less has lost writes. None: not known."""


#: A run grows no further, so that each can be handled in one go.
_RUN_BLOCKS_MAX = 4096


class RunList:
    """Collects the runs of one batch: consecutive blocks of one holder and kind, none twice."""

    def __init__(self, seq: int) -> None:
        self.runs: list[Run] = []
        self._seq = seq
        self._keys: set[int] = set()  # of the last run

    def add(
        self,
        kind: Kind,
        holder: int,
        position: int,
        places: Sequence[int],
        hashes: Sequence[int],
        *,
        is_identity: bool = False,
    ) -> None:
        """Blocks at consecutive positions, at least one, all of the same namespace."""
        ns = namespace_of(places[0])
        keys = [block_key(place) for place in places] if ns else list(places)
        distinct = set(keys)
        if len(distinct) < len(keys):
            # Two hashes of one event that stand for the same block: one at a time.
            for i in range(len(keys)):
                self.add(kind, holder, position + i, places[i : i + 1], hashes[i : i + 1], is_identity=is_identity)
            return
        last = self.runs[-1] if self.runs else None
        if (
            last is not None
            and last.kind == kind
            and last.holder == holder
            and last.namespace == ns
            and last.is_identity == is_identity
            and last.first + len(last.keys) == position
            and len(last.keys) < _RUN_BLOCKS_MAX
            and self._keys.isdisjoint(distinct)
        ):
            last.keys += keys
            last.hashes += hashes
            self._keys |= distinct
            return
        self.runs.append(Run(kind, holder, self._seq, position, keys, list(hashes), ns, is_identity))
        self._keys = distinct
