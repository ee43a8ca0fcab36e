"""Rows: the values in which the index keeps blocks, up to 32 consecutive blocks of a chain in one.

A **piece** is the blocks of one chain at depths 32k to 32k+31, its **head** the first block. All chains that share a
head share the **row** at the head's key. A row has up to 64 **slots**, one for each block, and then the holders with a
bitmap each: bit s stands for slot s. The first slot belongs to the block that names the value, whether or not any
holder has it. A block for which its row has no slot begins a **branch row**, and the row is then **marked**. If only a
few blocks follow a block of a marked row, they go to a **shared branch row** instead, together with those of other
chains. Digits of its first block and of the head name it. A block of unknown depth is a **single**: a row of its own,
with one slot.

As text, with a ``+`` if the row is marked::

    <16 hex><depth in the piece, 0-9 a-v> ... [+] <holder>:<bitmap in hex> ...

All three kinds of values have this form. Their names, after ``wm:{g.s}:``, are ``<head>``, ``<key>:b`` and ``<key>:s``.
A block's key is ``seq_hash XOR namespace``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from waymark.base.record import record
from waymark.domain import packing
from waymark.domain.packing import KEY_BYTES

PIECE_BLOCKS = 32
ROW_SLOTS = 64
FORMAT = f"rows {PIECE_BLOCKS} {ROW_SLOTS}"
"""The format of rows. The two numbers are constants of the format; functions take them as parameters for
tests."""

SHARED_DIGITS = (1, 2)
"""A shared branch row has the name of its head, except for one or two leading digits, which are those of a block. A
head has 16 rows with one such digit, and 256 with two.
"""
SHARED_BLOCKS = 4
"""The most blocks that go to a shared branch row together. More get a separate one, which costs little per block."""

SLOT_CHARS = 17
DEPTHS = b"0123456789abcdefghijklmnopqrstuv"
SAME_HASH = 2**64 - 1
"""The value of a slot whose engine hash is its seq_hash, in an entry that stores the hashes of other slots."""

_SHARED_MASK = (1 << 4 * (2 * KEY_BYTES - max(SHARED_DIGITS))) - 1
_VALUE = re.compile(rb"((?:[0-9a-f]{16}[0-9a-v])*)(\+?)((?: [1-9][0-9]{0,15}:[1-9a-f][0-9a-f]{0,15})*)")
_FIELD = re.compile(rb"([0-9a-f]{16})(?::(?:([0-9a-f]{16})|(s)))?")


# ---- places ----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a block: its row, its branch row or its single."""

    head: int
    """The key of the head of the piece; for a single, the key of the block itself."""
    branch: int | None = None
    """The key of the first block of the branch row, or the number that names a shared one; None if the block is in
    neither.
    """
    is_single: bool = False

    @property
    def name(self) -> bytes:
        """The name of the value, after the prefix of group and shard."""
        if self.branch is not None:
            return b"%016x:b" % self.branch
        return b"%016x:s" % self.head if self.is_single else b"%016x" % self.head

    @property
    def field(self) -> bytes:
        """The field of the entry: it also names the row, if the block is in a branch row."""
        return self.name if self.branch is None else b"%016x:%016x" % (self.head, self.branch)

    @property
    def is_shared(self) -> bool:
        """Whether the place is a shared branch row."""
        return self.branch is not None and (self.branch ^ self.head) & _SHARED_MASK == 0

    def shard(self, shards: int) -> int:
        """Return the shard of the place, which is that of its head."""
        return self.head % shards


def shared_places(head: int, key: int) -> list[Place]:
    """Return the shared branch rows of a head that may have the block with ``key``, if its parent is in the row."""
    masks = [(1 << 4 * (2 * KEY_BYTES - digits)) - 1 for digits in SHARED_DIGITS]
    return [Place(head, branch) for branch in dict.fromkeys(key & ~mask | head & mask for mask in masks)]


def parse_field(field: bytes) -> Place:
    """Return the place that a field of an engine hash names. Raise ``ValueError`` for any other field."""
    match = _FIELD.fullmatch(field)
    if match is None:
        raise ValueError("the field names no row: <head>, <head>:<key> or <key>:s")
    head, branch, single = match.groups()
    return Place(int(head, 16), None if branch is None else int(branch, 16), single is not None)


def find_entry(value: bytes | None) -> HolderEntry | None:
    """Return the entry in a value; None if it is missing, or cannot be read."""
    try:
        return None if value is None else parse_entry(value)
    except ValueError:
        return None


def find_field_place(field: bytes) -> Place | None:
    """Return the place that a field of an engine hash names; None for any other field."""
    try:
        return parse_field(field)
    except ValueError:
        return None


# ---- values ----------------------------------------------------------------------------------------


@record(frozen=True, slots=True)
class Row:
    """A parsed value."""

    slots: bytes
    """Slots of 17 characters, in order: 16 hex digits of the block's key, and its depth."""
    is_marked: bool
    """Whether missing blocks of this piece may be in branch rows."""
    holders: Mapping[int, int]
    """A bitmap for each holder id, with a bit for each slot."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The block keys of the slots."""
        return tuple(keys_of(self.slots))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the slots within the piece."""
        return tuple(DEPTHS.index(digit) for digit in self.slots[16::SLOT_CHARS])


def parse(value: bytes, slots_max: int = ROW_SLOTS) -> Row:
    """Parse a row, branch row or single. Raise ``ValueError`` with a sentence that does not quote the value."""
    match = _VALUE.fullmatch(value)
    if match is None:
        raise ValueError("it is no row: slots of 17 characters, a plus if it is marked, <holder>:<bitmap> ...")
    slots, mark, rest = match.groups()
    count = len(slots) // SLOT_CHARS
    if count > slots_max:
        raise ValueError(f"it has {count} slots, and a row has at most {slots_max}")
    if len({slots[start : start + 16] for start in range(0, len(slots), SLOT_CHARS)}) < count:
        raise ValueError("a block has two slots")
    holders: dict[int, int] = {}
    pairs = rest.split()
    for pair in pairs:
        holder, bitmap = pair.split(b":")
        holders[int(holder)] = int(bitmap, 16)
    if len(holders) < len(pairs):
        raise ValueError("a holder occurs twice")
    if holders and max(holders.values()) >> count:
        raise ValueError("a bitmap has a bit beyond the slots")
    return Row(slots, bool(mark), holders)


def may_have(value: bytes, key: bytes) -> bool:
    """Return whether a row, or one of its branch rows, may have the block with the packed ``key``."""
    return b"+" in value or key.hex().encode() in value


def keys_of(slots: bytes) -> list[int]:
    """Return the block keys of slots."""
    return [int(slots[start : start + 16], 16) for start in range(0, len(slots), SLOT_CHARS)]


# ---- entries ---------------------------------------------------------------------------------------


class HolderEntry(NamedTuple):
    """The engine hashes of a holder's blocks in one row."""

    namespace: int
    hashes: Sequence[int]
    """The hashes in slot order, only up to the last slot with one; empty if they are the seq_hashes. A hash at a slot
    whose bit is not set has no meaning.
    """

    def hash_of(self, slot: int, key: int) -> int:
        """Return the engine hash of the block with ``key`` at ``slot``."""
        engine_hash = self.hashes[slot] if slot < len(self.hashes) else SAME_HASH
        return key ^ self.namespace if engine_hash == SAME_HASH else engine_hash


def parse_entry(value: bytes) -> HolderEntry:
    """Parse an entry: 8 bytes for each engine hash, and before them ``<16 hex>:`` in a namespace.

    Raise ``ValueError`` for any other value.
    """
    namespace = 0
    if len(value) % 8 == 1 and len(value) >= 17:
        digits, value = value[:17], value[17:]
        if re.fullmatch(rb"[0-9a-f]{16}:", digits) is None:
            raise ValueError("its namespace is no 16 hex digits with a colon after them")
        namespace = int(digits[:16], 16)
    if len(value) % 8 or len(value) > 8 * ROW_SLOTS:
        raise ValueError(f"it is no list of at most {ROW_SLOTS} engine hashes of 8 bytes")
    return HolderEntry(namespace, packing.unpack(value))
