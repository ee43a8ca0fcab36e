"""Cuts parts into calls of the apply script, and packs each part as the script reads it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from waymark.domain.moves import Moves
from waymark.domain.parts import Commit, PackedParts, Part, blocks_of, packed
from waymark.domain.rows import Place
from waymark.store.redis.words import PackedWords

#: The limits of one call. A call at either limit takes Redis about 2 ms, and every reader waits that long.
CALL_PARTS = 128
CALL_BLOCKS = 3584
#: The fixed cost of a part for the pacer, in blocks.
PART_COST = 8
#: The header of a packed part: kind, holder, batch, position of its last block, row, branch row, number of blocks,
#: flags.
_HEADER = struct.Struct(">cHHIHHBB")


class ApplyCall(NamedTuple):
    """The arguments of one call that come from its parts."""

    blocks: int
    """The number of blocks in all parts."""
    holders: list[int]
    """The holder ids, each once, in order of first use. A part names a holder by its position here, from 1."""
    rows: Sequence[bytes]
    """The keys of rows, branch rows and singles, each once. A part names a key by its position here, from 1.

    The rows listed only because a branch row belongs to them come last.
    """
    seqs: list[int]
    """The seq of each batch, each once. A part names a batch by its position here, from 1."""
    words: Sequence[bytes]
    """The packed parts."""


class ApplyCalls:
    """The calls for parts of one shard, one after the other. If the script refuses a block, the later calls change."""

    def __init__(self, parts: Sequence[Part], moves: Moves, prefix: bytes) -> None:
        self._moves = moves
        self._prefix = prefix
        self._packed: PackedParts | None = None if moves.are_any else packed(parts)
        """The parts, if the native module has packed them and each is applied at its planned place; otherwise None."""
        self._done = 0
        """How many parts of ``_packed`` are done."""
        self._under_way: list[Part] = []
        """The parts of the present call, if ``_packed`` is None."""
        self._waiting: list[Part] = [] if self._packed is not None else list(parts)
        self._end = 0
        self._behind = 0
        """How many parts of the call come after the first undone one."""

    @property
    def are_left(self) -> bool:
        """Whether parts follow after the present call."""
        return bool(self._waiting) if self._packed is None else self._end < len(self._packed)

    def next(self) -> ApplyCall:
        """Return the next call, which may have no parts. Call ``done`` after each call."""
        if self._packed is not None:
            start, end = self._done, self._packed.end(self._done, CALL_PARTS, CALL_BLOCKS)
            self._moves.send(self._packed, start, end)
            self._end = end
            blocks, holders, count, rows, seqs, words = self._packed.pack(start, end, self._prefix)
            return ApplyCall(blocks, holders, PackedWords(count, rows), seqs, PackedWords(end - start, words))
        self._under_way, self._waiting = _next_parts(self._waiting, self._moves)
        return pack(self._under_way, self._prefix)

    def done(self, count: int) -> None:
        """Note that the first ``count`` parts of the present call are done. Later calls repeat the others."""
        if self._packed is not None:
            self._behind = self._end - self._done - count - 1
            self._done += count
            self._end = self._done
        else:
            self._behind = len(self._under_way) - count - 1
            self._waiting = self._under_way[count:] + self._waiting

    def refused(self, offset: int, *, is_row: bool, is_apart: bool) -> None:
        """Note that block ``offset`` of the next part found no slot in its place; see ``Moves.refused``."""
        if self._packed is not None:
            self._waiting, self._packed = list(self._packed[self._done :]), None
        first, *rest = self._waiting
        self._moves.stopped_before(rest[: self._behind])
        self._waiting = [*self._moves.refused(is_row, first, offset, is_apart=is_apart), *rest]


def pack(parts: Sequence[Part], prefix: bytes) -> ApplyCall:
    """Return a call with these parts; ``prefix`` is the prefix of the keys of its shard."""
    holders = {holder: i for i, holder in enumerate(dict.fromkeys(part.holder for part in parts), 1)}
    seqs = {seq: i for i, seq in enumerate(dict.fromkeys(part.seq for part in parts), 1)}
    rows = {place: i for i, place in enumerate(dict.fromkeys(part.place for part in parts if part.kind != "*"), 1)}
    for place in [place for place in rows if place.branch is not None]:
        rows.setdefault(Place(place.head), len(rows) + 1)
    words = [_packed(part, holders[part.holder], seqs[part.seq], rows) for part in parts]
    return ApplyCall(blocks_of(parts), list(holders), [prefix + place.name for place in rows], list(seqs), words)


def _next_parts(waiting: list[Part], moves: Moves) -> tuple[list[Part], list[Part]]:
    """Split ``waiting`` into the parts of the next call, at their present places, and the rest."""
    call: list[Part] = []
    blocks, are_moved = 0, moves.are_any
    end = len(waiting)
    for i, part in enumerate(waiting):
        moved_parts = moves.follow(part) if are_moved else (part,)
        count = part.count
        if call and (len(call) + len(moved_parts) > CALL_PARTS or blocks + count > CALL_BLOCKS):
            end = i
            break
        call += moved_parts
        blocks += count
    if not are_moved:
        moves.send(call, 0, len(call))
    return call, waiting[end:]


def _packed(part: Part, holder: int, batch: int, rows: Mapping[Place, int]) -> bytes:
    """Pack a part as the script reads it."""
    place = part.place
    row = branch = 0
    if part.kind != "*":
        row = rows[place] if place.branch is None else rows[Place(place.head)]
        branch = 0 if place.branch is None else rows[place]
    hashes = part.packed_hashes if part.kind == "+" and not part.is_identity else b""
    parent = b"%016x" % part.parent if part.kind == "+" and place.is_shared and part.parent is not None else b""
    flags = (1 if hashes else 0) + (2 if part.namespace else 0) + (4 if parent else 0)
    header = _HEADER.pack(part.kind.encode(), holder, batch, part.last, row, branch, part.count, flags)
    namespace = b"%016x" % part.namespace if part.namespace else b""
    return b"".join((header, namespace, parent, part.slots, hashes, b";".join(part.copies)))


def commit_words(commit: Commit | None) -> dict[str, Any]:
    """Return the watermark, its ts, the newest ts and its digest; empty strings without a commit."""
    if commit is None:
        return {"watermark": "", "ts": "", "newest_ts": "", "digest": ""}
    ts, newest = commit.ts, commit.newest_ts
    return {
        "watermark": commit.watermark,
        "ts": "" if ts is None else repr(ts),
        "newest_ts": "" if newest is None else repr(newest),
        "digest": commit.digest,
    }
