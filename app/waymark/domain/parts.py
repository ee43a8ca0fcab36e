"""Parts: the changes of a batch, once every engine hash is resolved to a block and its place.

A part is a run of consecutive positions of one batch, for one holder, with one place. It names a block at most once,
and does not mix blocks that the holder has with blocks that are new to it. A part is absolute: a block is present or
not, with a number of copies. So a part may be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self, TypeAlias, cast

from waymark.domain.keys import KEY_BYTES, unpack
from waymark.domain.rows import DEPTHS, SLOT_CHARS, Place, keys_of

PartKind = Literal["+", "-", "*"]
"""Store, remove, only write copies."""

Mode = Literal["count", "set", "all"]
"""How a holder's copies are counted; ``all``: not trusted any more, a removal takes the block."""

STEP = 2
"""The distance between the positions of two hashes. A hash that comes to mean another block leaves its old block at the
position between."""
#: A block with neither copies nor further hashes.
NO_COPIES = b"0"
UNCHANGED = b""


@dataclass(slots=True)
class Part:
    kind: PartKind
    holder: int
    seq: int
    """The seq of the batch."""
    last: int
    """Position of the last block in its batch. Every hash of a batch has a position, even an ignored one, so that
    positions mean the same when the batch is resolved again. In the parts of a holder they only ascend.
    """
    place: Place
    namespace: int
    slots: bytes
    """The slots of the blocks, as in a row. Each slot is the block's key, which is seq_hash XOR namespace, and its
    depth within the piece."""
    packed_hashes: bytes
    """The engine hash of each block, eight bytes."""
    is_known: bool = False
    """The holder has the blocks already."""
    is_identity: bool = False
    """Engine hashes are the seq_hashes."""
    parent: int | None = None
    """Key of the block before the first, if it is in the same piece."""
    copies: list[bytes] = field(default_factory=list)
    """The new value of the field ``*<key>`` for each block; empty if no value changes."""
    waits: bool = False
    """Redis must have all parts before it first, those of other shards too; see ``waves``."""

    @property
    def first(self) -> int:
        """Position of the first block."""
        return self.last - STEP * (self.count - 1)

    @property
    def count(self) -> int:
        """How many blocks."""
        return len(self.packed_hashes) // KEY_BYTES

    @property
    def keys(self) -> list[int]:
        """The block keys."""
        return keys_of(self.slots)

    @property
    def depths(self) -> list[int]:
        """The depths of the blocks."""
        return [DEPTHS.index(digit) for digit in self.slots[16::SLOT_CHARS]]

    @property
    def hashes(self) -> list[int]:
        """The engine hashes."""
        return list(unpack(self.packed_hashes))

    def cut(self, start: int, end: int, place: Place | None = None) -> Part:
        """Return blocks ``start`` to ``end`` as a part, at ``place`` if that is set."""
        return Part(
            self.kind,
            self.holder,
            self.seq,
            self.last - STEP * (self.count - end),
            place or self.place,
            self.namespace,
            self.slots[SLOT_CHARS * start : SLOT_CHARS * end],
            self.packed_hashes[KEY_BYTES * start : KEY_BYTES * end],
            self.is_known,
            self.is_identity,
            self.keys[start - 1] if start else self.parent,
            self.copies[start:end],
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """The new watermark of a stream, and the fields to write with it."""

    watermark: int
    ts: float | None
    newest_ts: float | None
    """The largest ts of this life so far."""
    digest: str
    """16 hex digits of the payload at the watermark."""


class PackedParts(Sequence[Part]):
    """Parts in arrays, as the C module has them. This class describes the type ``Parts`` of the module, and is never
    instantiated.

    Each access creates a ``Part`` as an object of its own.
    """

    blocks: int
    """The number of blocks in the parts."""
    stored: int
    """The number of stored blocks among them."""
    singles: int
    """The number of parts for blocks of unknown depth."""

    def __iadd__(self, others: PackedParts) -> Self: ...  # type: ignore[empty-body]

    def add(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        place: Place,
        namespace: int,
        slots: bytes,
        hashes: bytes,
        is_known: bool,
        is_identity: bool,
        parent: int | None,
        copies: bytes,
        waits: bool,
        /,
    ) -> None:
        """``PartList.add_packed``, with every argument given."""

    def end(self, start: int, parts_max: int, blocks_max: int, /) -> int:  # type: ignore[empty-body]
        """Return the end of the parts from ``start`` on that fit both bounds; at least one part fits."""

    def cut(self, start: int, end: int, /) -> PackedParts:  # type: ignore[empty-body]
        """Return parts ``start`` to ``end``."""

    def pack(  # type: ignore[empty-body]
        self, start: int, end: int, prefix: bytes, /
    ) -> tuple[int, list[int], list[bytes], list[int], list[bytes]]:
        """Return the arguments of a call with these parts: how many blocks, holders, keys of rows, seqs, and the
        parts.
        """


Parts: TypeAlias = list[Part] | PackedParts
_IN_PYTHON: Final = (list, tuple)


def packed(parts: Sequence[Part]) -> PackedParts | None:
    """Return the parts, if they are the C module's; otherwise None."""
    return None if isinstance(parts, _IN_PYTHON) else cast("PackedParts", parts)


def joined(parts: Parts, second: Parts) -> Parts:
    """Join two lists of parts. The first one changes if both are of the same kind."""
    if not parts:
        return second
    packed_parts, more = packed(parts), packed(second)
    if packed_parts is None or more is None:
        return [*parts, *second]
    packed_parts += more
    return packed_parts


def blocks_of(parts: Sequence[Part]) -> int:
    """Return the number of blocks in the parts."""
    packed_parts = packed(parts)
    return (
        sum([len(part.packed_hashes) for part in parts]) // KEY_BYTES if packed_parts is None else packed_parts.blocks
    )


def stored_of(parts: Sequence[Part]) -> int:
    """Return the number of stored blocks in the parts."""
    packed_parts = packed(parts)
    return blocks_of([part for part in parts if part.kind == "+"]) if packed_parts is None else packed_parts.stored


def has_singles(parts: Sequence[Part]) -> bool:
    """Return whether a part is at a place of blocks of unknown depth."""
    packed_parts = packed(parts)
    return any(part.place.is_single for part in parts) if packed_parts is None else packed_parts.singles > 0
