"""Parts: the changes of a batch, once every engine hash is resolved to a block and its place.

A part is a run of consecutive positions of one batch, for one holder, with one place. It names a block at most once,
and does not mix blocks that the holder has with blocks new to it. A part states the result, not the difference: a block
is present or not, with a number of copies. So a part may be written twice.

A list collects the parts of one batch, in Python or in the C module; adjacent parts that fit together are joined.

The shards of an index are written in parallel, and some parts must wait. A worker may stop when some shards have their
parts of a fold and others do not. The worker that takes over resolves the same batches again, with the blocks that
Redis has by then. It comes to the same parts if two rules hold:

- A block or a hash leaves only after Redis has every earlier part that was resolved with it.
- A block, and the block of a hash, is never on two shards for one holder: it leaves one before it comes to the other.

A part that would break a rule waits until Redis has applied all parts before it. A **wave** consists of such a waiting
part and the parts after it, up to the next one that waits. Parts of one shard are applied in order anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Literal, Self, TypeAlias

from waymark.base import native
from waymark.base.record import record
from waymark.domain.packing import KEY_BYTES, pack, unpack
from waymark.domain.rows import DEPTHS, SLOT_CHARS, Place, keys_of

PartKind = Literal["+", "-", "*"]
"""Whether the part stores blocks (``+``), removes them (``-``), or only writes copies (``*``)."""

Mode = Literal["count", "set", "all"]
"""How a holder's copies are counted. With ``all`` the counts are no longer trusted, and a removal takes the block."""

STEP = 2
"""The distance between positions of two hashes. A hash that changes to another block leaves the old one in between."""
#: A block with neither copies nor further hashes.
NO_COPIES = b"0"
UNCHANGED = b""


@record(slots=True)
class Part:
    kind: PartKind
    holder: int
    seq: int
    """The seq of the batch."""
    last: int
    """The position of the last block in its batch. Every hash of a batch has a position, even an ignored one, so that
    positions mean the same when the batch is resolved again. They ascend from part to part of a holder.
    """
    place: Place
    namespace: int
    slots: bytes
    """The slots of the blocks, as in a row: the block's key (seq_hash XOR namespace), and its depth in the piece."""
    packed_hashes: bytes
    """The engine hash of each block, eight bytes."""
    is_known: bool = False
    """The holder has the blocks already."""
    is_identity: bool = False
    """Engine hashes are the seq_hashes."""
    parent: int | None = None
    """The key of the block before the first, if it is in the same piece."""
    copies: list[bytes] = field(default_factory=list)
    """The new value of the field ``*<key>`` for each block; empty if no value changes."""
    waits: bool = False
    """Whether Redis must have all earlier parts first, including those of other shards; see ``Waves``."""

    @property
    def first(self) -> int:
        """The position of the first block."""
        return self.last - STEP * (self.count - 1)

    @property
    def count(self) -> int:
        """The number of blocks."""
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
        """Return blocks ``start`` to ``end`` as a part, at ``place`` if one is given."""
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


@record(slots=True)
class Commit:
    """The new watermark of a stream, and the fields to write with it."""

    watermark: int
    ts: float | None
    newest_ts: float | None
    """The largest ts of this life so far."""
    digest: str
    """The digest of the payload at the watermark, as 16 hex digits."""


class PackedParts(Sequence[Part]):
    """Parts in arrays of the C module, whose type ``Parts`` this class describes. Each access creates a ``Part``."""

    blocks: int
    """The number of blocks in the parts."""
    stored: int
    """The number of stored blocks among them."""
    singles: int
    """The number of parts for blocks of unknown depth."""
    run_frames: Callable[..., Any]
    """Reads and resolves frames, adds their parts, and packs them; see ``plain_runs``."""
    add: Callable[..., None]
    """Does what ``PartList.add_packed`` does; all arguments are required, by position."""
    add_block: Callable[..., None]
    """Does what ``PartList.add_block`` does, in the same way."""

    def __iadd__(self, others: PackedParts) -> Self: ...  # type: ignore[empty-body]

    def end(self, start: int, parts_max: int, blocks_max: int, /) -> int:  # type: ignore[empty-body]
        """Return the index up to which the parts from ``start`` on fit both bounds. One part always fits."""

    def cut(self, start: int, end: int, /) -> PackedParts:  # type: ignore[empty-body]
        """Return parts ``start`` to ``end``."""

    def shares(self, shards: int, /) -> list[dict[int, PackedParts]]:  # type: ignore[empty-body]
        """Return what ``shares_of`` returns for these parts."""

    def calls(self, prefixes: tuple[bytes, ...], /) -> list[Any]:  # type: ignore[empty-body]
        """Return the calls for these parts as ``PackedWave``s; ``prefixes`` has that of the row keys of each shard."""

    def pack(self, start: int, end: int, prefix: bytes, /) -> PackedCall:  # type: ignore[empty-body]
        """Return the fields of an ``ApplyCall``, with the number of rows before the rows; rows and parts are packed."""

    def reported(self, start: int, blocks_max: int, /) -> tuple[int, int, bytes]:  # type: ignore[empty-body]
        """Return the end of parts within the bound, how many of their blocks to keep, and their packed entries."""


PackedCall: TypeAlias = tuple[int, list[int], int, bytes, list[int], bytes]
Parts: TypeAlias = list[Part] | PackedParts
_IN_PYTHON: Final = (list, tuple)


def packed(parts: Sequence[Part]) -> PackedParts | None:
    """Return the parts, if they are the C module's; otherwise None."""
    packed_parts: Any = parts
    return None if isinstance(parts, _IN_PYTHON) else packed_parts


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


_BLOCKS_MAX = 64


def new_part_list(seq: int) -> PartList:
    """Return an empty list for the parts of one batch, implemented in C if the C module is selected."""
    if native.selected is None:
        return PartList(seq)
    packed_parts: PackedParts = native.selected.Parts(Part, Place, seq)
    return PackedPartList(seq, packed_parts)


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
        waits: bool = False,
    ) -> None:
        """Add blocks at consecutive positions, the first at ``position``."""
        slots = b"".join([b"%016x%c" % (key, DEPTHS[depth]) for key, depth in zip(keys, depths, strict=True)])
        copies = UNCHANGED
        self.add_packed(
            kind, holder, position, place, namespace, slots, pack(hashes), is_known, is_identity, parent, copies, waits
        )

    def add_block(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        spot: tuple[Place, int, int, int],
        engine_hash: int,
        is_known: bool = False,
        is_identity: bool = False,
        parent: int | None = None,
        copies: bytes = UNCHANGED,
        waits: bool = False,
    ) -> None:
        """Add a block; ``spot`` is a ``Spot``: its place, namespace, depth and key."""
        place, namespace, depth, key = spot
        slots, hashes = b"%016x%c" % (key, DEPTHS[depth]), pack((engine_hash,))
        self.add_packed(
            kind, holder, position, place, namespace, slots, hashes, is_known, is_identity, parent, copies, waits
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

        The blocks join the previous part if they fit. Blocks new to the holder join it only if they continue its last
        block: the part may begin a branch row, and the blocks of that must form a chain.
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


class PackedPartList(PartList):
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

    def add_block(
        self,
        kind: PartKind,
        holder: int,
        position: int,
        spot: tuple[Place, int, int, int],
        engine_hash: int,
        is_known: bool = False,
        is_identity: bool = False,
        parent: int | None = None,
        copies: bytes = UNCHANGED,
        waits: bool = False,
    ) -> None:
        self._packed.add_block(kind, holder, position, spot, engine_hash, is_known, is_identity, parent, copies, waits)


def _has_slot(slots: bytes, key: bytes) -> bool:
    """Return whether a block with this key, as text, is among the slots."""
    index = slots.find(key)
    while index > 0 and index % SLOT_CHARS:  # the digits may match across two slots
        index = slots.find(key, index + 1)
    return index >= 0


def new_waves(shards: int) -> Waves:
    """Return waves for this number of shards, implemented in C if the C module is selected."""
    if native.selected is None:
        return Waves(shards)
    waves: Waves = native.selected.Waves(shards)
    return waves


class Waves:
    """The blocks that the parts of the present wave use and remove, by their seq_hash. The C module has the same."""

    def __init__(self, shards: int) -> None:
        self.is_needed = shards > 1
        """Whether there are several shards."""
        self._shards = shards
        self._used: dict[int, set[int]] = {}
        self._left: dict[int, int] = {}

    @property
    def has_left(self) -> bool:
        """Whether a part of this wave has removed a block or a hash."""
        return bool(self._left)

    def begin(self) -> None:
        """Begin a fold or a wave. Redis has everything before it."""
        self._used.clear()
        self._left.clear()

    def use(self, seq_hash: int, place: Place, /) -> None:
        """Note that a part at ``place`` was resolved with this block."""
        if self.is_needed:
            self._used.setdefault(seq_hash, set()).add(place.shard(self._shards))

    def first_that_waits(self, blocks: Sequence[int], place: Place, /) -> int:
        """Return the index of the first block that would make ``leave`` return True; 0 if there is none, too."""
        shard = place.shard(self._shards)
        return next((i for i, block in enumerate(blocks) if not self._used.get(block, set()) <= {shard}), 0)

    def leave(self, blocks: Sequence[int], place: Place, /) -> bool:
        """Return whether the part that takes these blocks, or a hash of one, out of ``place`` must wait."""
        if not self.is_needed:
            return False
        shard = place.shard(self._shards)
        waits = any(not self._used.get(block, set()) <= {shard} for block in blocks)
        if waits:
            self.begin()
        self._left.update(dict.fromkeys(blocks, shard))
        return waits

    def store(self, blocks: Sequence[int | None], place: Place, /) -> bool:
        """Return whether the part that stores these blocks at ``place`` must wait. ``blocks`` includes the former
        blocks of their hashes.
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


def shares_of(parts: Sequence[Part], shards: int) -> Sequence[Mapping[int, Sequence[Part]]]:
    """Return each wave as the parts of its shards, in order; at least one wave, even without parts."""
    packed_parts = packed(parts)
    if packed_parts is not None:
        return packed_parts.shares(shards)
    waves: list[dict[int, list[Part]]] = []
    for wave in waves_of(parts):
        shares: dict[int, list[Part]] = {}
        for part in wave:
            shares.setdefault(part.place.shard(shards), []).append(part)
        waves.append(shares)
    return waves
