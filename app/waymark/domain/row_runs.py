"""Turns rows into runs, which say which holders have which blocks of a prompt.

A row has for each holder a bitmap of the slots that the holder has. This module maps the slots to the blocks of one
chain, and combines the bitmaps into runs of blocks with the same holders, which the walk takes. A value that cannot be
read is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from waymark.base import native
from waymark.domain.packing import KEY_BYTES
from waymark.domain.rows import DEPTHS, PIECE_BLOCKS, ROW_SLOTS, SHARED_DIGITS, SLOT_CHARS

Runs: TypeAlias = list[tuple[bytes, int]]
"""(holder ids, ascending, separated by spaces; how many consecutive blocks exactly these holders have)."""

_HOLDERS = re.compile(rb"(?: [1-9][0-9]{0,15}:[1-9a-f][0-9a-f]{0,15})*")
_KEY_DIGITS = 2 * KEY_BYTES
#: The first slot of a shared branch row differs from that of the head in at most this number of leading digits.
_SHARED = max(SHARED_DIGITS)


def row_runs(keys: bytes, rows: Sequence[bytes | None]) -> tuple[Runs, int, bool]:
    """Return the runs of a chain, as far as the rows alone determine who has its blocks.

    ``keys`` are packed block keys from the beginning of a piece; ``rows`` has the row of each piece, or None if there
    is no row. The result is the runs, the number of pieces that they cover, and whether the block after them has no
    holder. If the runs end before the last row although a holder may have the next block, the next row cannot be read,
    or it is marked and does not list all blocks.
    """
    if native.selected is not None:
        return native.selected.row_runs(keys, rows if isinstance(rows, list) else list(rows))
    runs: Runs = []
    slots = own_slots(keys)
    cache: dict[tuple[int, bytes], Runs] = {}
    width = SLOT_CHARS * PIECE_BLOCKS
    for index, value in enumerate(rows):
        own = slots[width * index : width * (index + 1)]
        if value is None or not own:
            return runs, index, True
        blocks = len(own) // SLOT_CHARS
        # Rows of one chain mostly differ only in their first slots, which have the blocks of the chain.
        rest = (blocks, value[len(own) :]) if value.startswith(own) else None
        runs_of_row = None if rest is None else cache.get(rest)
        if runs_of_row is None:
            row = _read(value, own)
            if row is None or not own.startswith(row.first) or (row.is_marked and row.missing):
                return runs, index, False
            runs_of_row = _runs_of(row.blocks, blocks)
            if rest is not None:
                cache[rest] = runs_of_row
        _extend(runs, runs_of_row)
        if sum(length for _, length in runs_of_row) < blocks:
            return runs, index, True
    return runs, len(rows), False


def piece_runs(keys: bytes, values: Sequence[bytes | None]) -> tuple[Runs, int, int]:
    """Return the runs of one piece from all values that may list its blocks.

    ``keys`` are the packed keys of the piece's blocks, at least one; ``values`` has the row and then branch rows, 128
    values at most, or None for a missing one. The result is the runs up to the first block without a holder; as a
    bitmap, the blocks that may be in branch rows, because the row is marked and does not list them; and as a bitmap,
    the values that cannot be read.
    """
    if native.selected is not None:
        return native.selected.piece_runs(keys, values if isinstance(values, list) else list(values))
    own = own_slots(keys)
    together: dict[int, int] = {}
    missing = unreadable = 0
    for index, value in enumerate(values):
        if value is None:
            continue
        row = _read(value, own)
        if row is None or (index == 0 and not own.startswith(row.first)):
            unreadable |= 1 << index
            continue
        if index == 0 and row.is_marked:
            missing = row.missing
        for holder, blocks in row.blocks.items():
            together[holder] = together.get(holder, 0) | blocks
    return _runs_of(together, len(keys) // KEY_BYTES), missing, unreadable


def pieces_of(keys: bytes) -> list[bytes]:
    """Return the packed keys of each piece of a chain; ``keys`` has the keys of the whole chain, from its root on."""
    width = KEY_BYTES * PIECE_BLOCKS
    return [keys[start : start + width] for start in range(0, len(keys), width)]


def last_piece(keys: bytes) -> bytes:
    """Return the last of ``pieces_of(keys)``; ``keys`` has at least one key."""
    width = KEY_BYTES * PIECE_BLOCKS
    return keys[(len(keys) - 1) // width * width :]


def own_slots(keys: bytes) -> bytes:
    """Return the slots of a chain's blocks, in the form of rows; ``keys`` are packed, from the beginning of a piece."""
    count = len(keys) // KEY_BYTES
    digits = keys.hex().encode()
    slots = bytearray(SLOT_CHARS * count)
    for digit in range(_KEY_DIGITS):  # a slice per digit costs less than a call per block
        slots[digit::SLOT_CHARS] = digits[digit::_KEY_DIGITS]
    slots[_KEY_DIGITS::SLOT_CHARS] = (DEPTHS * (count // PIECE_BLOCKS + 1))[:count]
    return bytes(slots)


class _OwnBlocks(NamedTuple):
    """The part of a value that concerns the blocks of one chain in a piece, its *own* blocks. Bit i of a bitmap is own
    block i.
    """

    first: bytes
    """The first slot."""
    is_marked: bool
    missing: int
    """The own blocks without a slot."""
    blocks: Mapping[int, int]
    """The own blocks that each holder has, by holder id."""


def _read(value: bytes, own: bytes) -> _OwnBlocks | None:
    """Parse a value for the own blocks of a piece, given as slots; None if it cannot be read."""
    end = value.find(b" ")
    slots, holders = (value, b"") if end < 0 else (value[:end], value[end:])
    is_marked = slots.endswith(b"+")
    if is_marked:
        slots = slots[:-1]
    count, rest = divmod(len(slots), SLOT_CHARS)
    if rest or not 1 <= count <= ROW_SLOTS:
        return None
    bitmaps = _bitmaps(holders)
    first = slots[:SLOT_CHARS]
    depth = DEPTHS.find(first[-1:])
    if bitmaps is None or depth < 0:
        return None
    if own[SLOT_CHARS * depth : SLOT_CHARS * (depth + 1)] != first and first[_SHARED:] != own[_SHARED:SLOT_CHARS]:
        return None
    if any(bitmap >> count for bitmap in bitmaps.values()):
        return None
    blocks = len(own) // SLOT_CHARS
    if slots.startswith(own):
        all_blocks = (1 << blocks) - 1
        return _OwnBlocks(first, is_marked, 0, {holder: bitmap & all_blocks for holder, bitmap in bitmaps.items()})
    places = _places(slots, own)
    missing = sum(1 << index for index, slot in enumerate(places) if slot is None)
    moved = {
        holder: sum((bitmap >> slot & 1) << index for index, slot in enumerate(places) if slot is not None)
        for holder, bitmap in bitmaps.items()
    }
    return _OwnBlocks(first, is_marked, missing, moved)


def _places(slots: bytes, own: bytes) -> list[int | None]:
    """Return the slot of each own block; None for those without a slot."""
    listed: dict[bytes, int] = {}
    for index in range(len(slots) // SLOT_CHARS):
        listed.setdefault(slots[SLOT_CHARS * index : SLOT_CHARS * (index + 1)], index)
    places: list[int | None] = []
    following = 0
    for start in range(0, len(own), SLOT_CHARS):
        block = own[start : start + SLOT_CHARS]
        # The blocks of a chain are mostly in consecutive slots.
        index = following * SLOT_CHARS
        slot = following if slots[index : index + SLOT_CHARS] == block else listed.get(block)
        places.append(slot)
        following = following if slot is None else slot + 1
    return places


def _bitmaps(holders: bytes) -> Mapping[int, int] | None:
    """Return the bitmap of each holder, or None if the text cannot be read, or names a holder twice."""
    if _HOLDERS.fullmatch(holders) is None:
        return None
    words = [word.partition(b":") for word in holders.split()]
    bitmaps = {int(holder): int(bitmap, 16) for holder, _, bitmap in words}
    return bitmaps if len(bitmaps) == len(words) else None


def _runs_of(blocks: Mapping[int, int], count: int) -> Runs:
    """Return the runs of blocks with a holder, from the first block on; ``blocks`` has a bitmap for each holder."""
    changes = 0
    for bitmap in blocks.values():
        changes |= bitmap ^ (bitmap >> 1)
    runs: Runs = []
    position = 0
    while position < count:
        holders = [holder for holder, bitmap in blocks.items() if bitmap >> position & 1]
        if not holders:
            break
        changes_left = changes >> position
        length = min((changes_left & -changes_left).bit_length() or count, count - position)
        runs.append((b" ".join([b"%d" % holder for holder in sorted(holders)]), length))
        position += length
    return runs


def _extend(runs: Runs, more: Runs) -> None:
    """Append ``more`` to ``runs``; neighbours with the same holders become one run."""
    if runs and more and runs[-1][0] == more[0][0]:
        value, length = runs.pop()
        more = [(value, length + more[0][1]), *more[1:]]
    runs += more
