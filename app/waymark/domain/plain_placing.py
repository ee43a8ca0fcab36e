"""Gives the blocks of plain events their places: of a whole event, or of many events, in one step.

The steps are those of ``KnownBlocks``. A step that does not fit the holder's blocks changes nothing; the caller then
stores or removes block by block with ``Placer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waymark.domain.events import PlainEvents
from waymark.domain.held import HeldBlocks
from waymark.domain.known import EventRun
from waymark.domain.part_list import PartList
from waymark.domain.parts import STEP, packed
from waymark.domain.rows import SAME_HASH, SLOT_CHARS, Place, keys_of
from waymark.domain.waves import Waves


class PlainPlacer:
    """The memory, the waves and the marks are those of a ``Placer``."""

    def __init__(self, memory: HeldBlocks, waves: Waves, applied: AppliedMarks, piece_blocks: int) -> None:
        self._memory = memory
        self._waves = waves
        self._applied = applied
        self._piece_blocks = piece_blocks

    def extend(
        self,
        parts: PartList,
        holder: int,
        position: int,
        namespace: int,
        parent: int | None,
        hashes: Sequence[int],
        tokens: bytes,
        block_size: int,
        seed: int,
    ) -> bool:
        """Hash and store the blocks of a plain store at once; whether it was plain. See ``KnownBlocks.extend``."""
        if self._applied.marks or SAME_HASH in hashes:
            return False
        previous = self._memory.held(holder, parent) if self._waves.is_needed and parent is not None else None
        has_left = self._waves.has_left
        former = self._memory.gone_blocks(holder, hashes) if has_left else []
        pieces = self._memory.extend(holder, parent, hashes, tokens, block_size, seed, namespace, self._piece_blocks)
        if pieces is None:
            return False
        for place, slots, some_hashes, start, previous_key in pieces:
            waits = False
            if has_left:
                keys = keys_of(slots)
                blocks = [*former[start : start + len(keys)], *(key ^ namespace for key in keys)]
                waits = self._waves.store(blocks, place)
            if previous is not None:
                self._waves.use(previous.seq_hash, place)
            offset = STEP * (position + start) + 1
            parts.add_packed(
                "+", holder, offset, place, namespace, slots, some_hashes, parent=previous_key, waits=waits
            )
        return True

    def take(self, parts: PartList, holder: int, position: int, hashes: Sequence[int]) -> bool:
        """Remove the blocks of a plain removal at once; whether it was plain. See ``KnownBlocks.take``."""
        groups = None if self._applied.marks else self._memory.take(holder, hashes)
        if groups is None:
            return False
        needs_waves = self._waves.is_needed
        for place, namespace, slots, some_hashes in groups:
            waits = needs_waves and self._waves.leave([key ^ namespace for key in keys_of(slots)], place)
            offset = STEP * position + 1
            parts.add_packed("-", holder, offset, place, namespace, slots, some_hashes, is_known=True, waits=waits)
            position += len(slots) // SLOT_CHARS
        return True

    def run(
        self,
        parts: PartList,
        holder: int,
        events: PlainEvents,
        at: int,
        position: int,
        *,
        seed: int,
        namespace: int,
        may_store: bool,
        may_remove: bool,
    ) -> EventRun | None:
        """Store and remove the blocks of plain events, from number ``at`` on, and return the progress.

        Return None if that is not possible. See ``KnownBlocks.run``.
        """
        packed_parts = packed(parts.parts)
        if packed_parts is None or self._applied.marks or self._waves.is_needed:
            return None
        return self._memory.run(
            holder,
            events,
            at,
            position,
            packed_parts,
            seed=seed,
            namespace=namespace,
            piece_blocks=self._piece_blocks,
            may_store=may_store,
            may_remove=may_remove,
        )


# The parts beyond the watermark that Redis has when a worker takes a stream over.
#
# The worker resolves their batches again, and leaves these parts out. It has read its memory of the blocks from Redis,
# so
# that memory has them, too.


class AppliedMarks:
    """How far each shard is for each holder."""

    def __init__(self, shards: int) -> None:
        self.marks: dict[tuple[int, int], tuple[int, int]] = {}
        """The seq and the position of the last part, by holder and shard. Empty once all of them are behind."""
        self._shards = shards

    def restore(self, marks: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        self.marks = dict(marks)

    def begin_batch(self, seq: int) -> None:
        if self.marks and all(seq > applied for applied, _ in self.marks.values()):
            self.marks = {}

    def has(self, seq: int, offset: int, holder: int, place: Place) -> bool:
        """Return whether Redis has the part that a batch writes at this position."""
        if not self.marks:
            return False
        mark = self.marks.get((holder, place.shard(self._shards)))
        return mark is not None and (seq, offset) <= mark
