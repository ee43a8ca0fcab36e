"""Collects the parts of one batch, in Python or in the C module; adjacent parts that fit together are joined."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.base import native
from waymark.domain.keys import KEY_BYTES, pack
from waymark.domain.parts import STEP, UNCHANGED, PackedParts, Part, PartKind, Parts
from waymark.domain.rows import DEPTHS, SLOT_CHARS, Place

_BLOCKS_MAX = 64


def new_part_list(seq: int) -> PartList:
    """Return an empty list for the parts of one batch; it is in the C module if that is selected."""
    if native.selected is None:
        return PartList(seq)
    packed_parts: PackedParts = native.selected.Parts(Part, Place, seq)
    return _PackedPartList(seq, packed_parts)


class PartList:
    """Collects the parts of one batch."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self._parts: list[Part] = []

    @property
    def parts(self) -> Parts:
        return self._parts

    def add(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        place: Place,
        namespace: int,
        keys: Sequence[int],
        depths: Sequence[int],
        hashes: Sequence[int],
        *,
        is_known: bool = False,
        is_identity: bool = False,
        parent: int | None = None,
        copies: bytes = UNCHANGED,
        waits: bool = False,
    ) -> None:
        """Add blocks at consecutive positions, the first at ``position``; ``copies`` is for a single block only."""
        slots = b"".join([b"%016x%c" % (key, DEPTHS[depth]) for key, depth in zip(keys, depths, strict=True)])
        self.add_packed(
            kind, holder, position, place, namespace, slots, pack(hashes), is_known, is_identity, parent, copies, waits
        )

    def add_packed(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        place: Place,
        namespace: int,
        slots: bytes,
        hashes: bytes,
        is_known: bool = False,
        is_identity: bool = False,
        parent: int | None = None,
        copies: bytes = UNCHANGED,
        waits: bool = False,
    ) -> None:
        """Add a part whose slots and hashes are packed.

        The blocks join the previous part if they fit. New blocks of the holder join it only if they continue its last
        block, because a branch row that they may have to begin must hold a chain.
        """
        count = len(hashes) // KEY_BYTES
        last = self._parts[-1] if self._parts else None
        if (
            last is None
            or waits
            or last.last + STEP != position
            or last.place != place
            or last.kind != kind
            or last.holder != holder
            or last.is_known != is_known
            or last.is_identity != is_identity
            or last.count + count > _BLOCKS_MAX
            or (_has_slot(last.slots, slots[:16]) if is_known else parent != int(last.slots[-SLOT_CHARS:-1], 16))
        ):
            end = position + STEP * (count - 1)
            last = Part(kind, holder, self.seq, end, place, namespace, slots, hashes, is_known, is_identity, parent)
            last.waits = waits
            if copies != UNCHANGED:
                last.copies = [copies] * count
            self._parts.append(last)
            return
        if copies != UNCHANGED or last.copies:
            last.copies += [UNCHANGED] * (last.count - len(last.copies))
            last.copies += [copies] * count
        last.last += STEP * count
        last.slots += slots
        last.packed_hashes += hashes


class _PackedPartList(PartList):
    def __init__(self, seq: int, packed_parts: PackedParts) -> None:
        super().__init__(seq)
        self._packed = packed_parts

    @property
    def parts(self) -> PackedParts:
        return self._packed

    def add_packed(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        place: Place,
        namespace: int,
        slots: bytes,
        hashes: bytes,
        is_known: bool = False,
        is_identity: bool = False,
        parent: int | None = None,
        copies: bytes = UNCHANGED,
        waits: bool = False,
    ) -> None:
        self._packed.add(
            kind, holder, position, place, namespace, slots, hashes, is_known, is_identity, parent, copies, waits
        )


def _has_slot(slots: bytes, key: bytes) -> bool:
    """Return whether a block with this key, as text, is among the slots."""
    index = slots.find(key)
    while index > 0 and index % SLOT_CHARS:  # digits across two slots may be the same
        index = slots.find(key, index + 1)
    return index >= 0
