"""Finds the parts of a fold that must wait, when the shards of an index are written in parallel.

A worker may stop when some shards have their parts of a fold and others do not. The worker that takes over resolves the
same batches again, with the blocks that Redis has by then. It comes to the same parts if two rules hold:

- A block or a hash leaves only after Redis has every earlier part that was resolved with it.
- A block, and the block of a hash, is never on two shards for one holder: it leaves one before it comes to the other.

A part that would break a rule waits until Redis has applied all parts before it. The parts between two that wait are a
**wave**. Parts of one shard are applied in order anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waymark.domain.parts import Part
from waymark.domain.rows import Place


class Waves:
    """The blocks that the parts of the present wave use and remove, by their seq_hash."""

    def __init__(self, shards: int) -> None:
        self.is_needed = shards > 1
        self._shards = shards
        self._used: dict[int, set[int]] = {}
        self._left: dict[int, int] = {}

    @property
    def has_left(self) -> bool:
        """A part of this wave has removed a block or a hash."""
        return bool(self._left)

    def begin(self) -> None:
        """Begin a fold, or a wave: Redis has everything before it."""
        self._used.clear()
        self._left.clear()

    def use(self, seq_hash: int, place: Place) -> None:
        """Note that a part at ``place`` was resolved with this block."""
        if self.is_needed:
            self._used.setdefault(seq_hash, set()).add(place.shard(self._shards))

    def leave(self, blocks: Sequence[int], place: Place) -> bool:
        """Return whether the part that takes these blocks, or a hash of one, out of ``place`` must wait."""
        if not self.is_needed:
            return False
        shard = place.shard(self._shards)
        waits = any(not self._used.get(block, set()) <= {shard} for block in blocks)
        if waits:
            self.begin()
        self._left.update(dict.fromkeys(blocks, shard))
        return waits

    def store(self, blocks: Iterable[int | None], place: Place) -> bool:
        """Return whether the part that stores these blocks at ``place`` must wait. ``blocks`` includes the former ones
        of their hashes.
        """
        shard = place.shard(self._shards) if self._left else 0
        waits = bool(self._left) and any(
            block is not None and self._left.get(block, shard) != shard for block in blocks
        )
        if waits:
            self.begin()
        return waits


def waves_of(parts: Sequence[Part]) -> list[Sequence[Part]]:
    """Return the parts in order, cut before each waiting part; at least one wave, even without parts."""
    cuts = [i for i, part in enumerate(parts) if part.waits and i]
    return [parts[start:end] for start, end in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
