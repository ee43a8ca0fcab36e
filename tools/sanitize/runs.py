"""A reference in plain Python for the C functions that turn a whole batch into parts, and into the bytes that Redis
gets."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgpack
from xxhash import xxh3_64_intdigest

from tools.sanitize import batches
from waymark.base import native
from waymark.domain.events import Removed, Stored
from waymark.domain.known import MAY_REMOVE, MAY_STORE, Spot
from waymark.domain.parts import Part
from waymark.domain.rows import Place

HOLDER, FIRST, SEED, SEQ = 7, 1, 1337, 2**53
PREFIX = b"wm:{1}:"
EVENTS_MAX, JOINED_MAX, CALL_PARTS, CALL_BLOCKS = 99, 64, 128, 3584
U64_MAX = 2**64 - 1
_MAY = MAY_STORE | MAY_REMOVE


def medium_of(name: str | None) -> str | None:
    return "GPU" if name is None else name.upper()


def use_parts(parts_type: Callable[..., Any], payload: bytes, namespace: int, piece_blocks: int, shards: int) -> object:
    """Read a batch, run its plain events, and pack the parts."""
    loops = native.selected
    assert loops is not None
    read = loops.read_batch(payload, EVENTS_MAX, *batches.EVENT_TYPES, medium_of, 10, 3)
    if read is None or isinstance(read[1], list):
        return None
    places = loops.Places(Place, Spot)
    known, *gone = (loops.KnownBlocks(places, has_keys) for has_keys in (True, False, False))
    parts, waves = parts_type(Part, Place, SEQ), loops.Waves(shards)
    at, position, counted = 0, FIRST, [0, 0, 0]
    while at < len(read[1]):
        # The bound of 5 is small, so that runs end in the middle of a batch.
        rest: tuple[Any, ...] = HOLDER, SEED, namespace, {}, piece_blocks, tuple(gone), _MAY, [], waves, ()
        at, position, *more = known.run(read[1], at, position, 5, parts, *rest)[:5]
        counted = [one + other for one, other in zip(counted, more, strict=True)]
        if not any(more) and at < len(read[1]):
            position += len(read[1][at].engine_hashes)
            at += 1
    few = min(len(parts), CALL_PARTS)
    held = known.blocks(), len(known), len(gone[0]), len(gone[1])
    rest = EVENTS_MAX, 10**6, medium_of, 10, 3
    following = read[1].go_on((payload, payload, b""), read[0], read[2], read[3], *rest)
    gone_on = [list(map(list, following[0])), *following[1:]]
    shares = [{shard: (len(each), each.blocks) for shard, each in wave.items()} for wave in parts.shares(shards)]
    packed = parts.pack(0, few, PREFIX)
    reported = parts.reported(0, JOINED_MAX)
    use_frames(parts_type, read, payload, namespace, piece_blocks, waves, shards)
    return counted, position, held, parts.blocks, parts.stored, parts.singles, packed, reported, shares, gone_on


def use_frames(
    parts_type: Callable[..., Any],
    read: Any,
    payload: bytes,
    namespace: int,
    piece_blocks: int,
    waves: Any,
    shards: int,
) -> None:
    """Process two more batches of the same bytes with one call, and with a call for each step. Check that the results
    are equal."""
    loops = native.selected
    assert loops is not None
    ts, events, rank, publisher_id, *_ = read
    reading = publisher_id, EVENTS_MAX, 10**6, medium_of, 10, 3
    prefixes = tuple(PREFIX + b"%d" % shard for shard in range(shards))
    outcomes: list[Any] = []
    for is_one_step in (True, False):
        places, parts = loops.Places(Place, Spot), parts_type(Part, Place, SEQ)
        known, *gone = (loops.KnownBlocks(places, has_keys) for has_keys in (True, False, False))
        running: tuple[Any, ...] = HOLDER, SEED, namespace, {}, piece_blocks
        waves.begin()
        if is_one_step:
            frames = (payload, payload)
            patterns = events.patterns(events)
            ways = {rank: (patterns, known, (*running, waves, ()), tuple(gone), _MAY)}
            taken = parts.run_frames(ways, frames, ts, (patterns, *reading), SEQ, prefixes)
            ran, packed = (None, None) if taken is None else (taken[0][0][2], taken[1])
        else:
            following = events.go_on((payload, payload), ts, rank, *reading)[0]
            numbered, ran, packed = list(enumerate(following, SEQ)), None, None
            if following:
                rest = (*running, tuple(gone), _MAY, numbered, waves, ())
                ran = known.run(events, len(events), FIRST, 10**6, parts, *rest)
                is_whole = (ran[0], ran[6]) == (len(events), 2)
                packed = _packed(parts, prefixes) if is_whole else None
        outcomes.append((ran, packed, known.blocks(), len(gone[0]), list(parts)))
    assert outcomes[0] == outcomes[1]


def _packed(parts: Any, prefixes: Sequence[bytes]) -> list[Any]:
    """Return the calls of each shard, wave by wave, in the form of the single call."""
    calls: list[Any] = []
    for wave in parts.shares(len(prefixes)):
        done, is_first = dict.fromkeys(wave, 0), True
        while is_first or any(done[shard] < len(share) for shard, share in wave.items()):
            calls.append({})
            for shard, share in wave.items():
                start, end = done[shard], share.end(done[shard], CALL_PARTS, CALL_BLOCKS)
                if start < end:
                    calls[-1][shard] = end - start, share.pack(start, end, prefixes[shard])
                done[shard] = end
            is_first = False
    return calls


_Block: TypeAlias = tuple[int, int, int]
"""The key, depth and engine hash of a block."""


class _Model:
    """The blocks of a stream: the block of each engine hash, and the removed blocks."""

    def __init__(self, namespace: int, piece_blocks: int, shards: int) -> None:
        self.shards = shards
        self.used: set[tuple[int, int]] = set()  # pairs of a block and the shard of a part that needs it, in this wave
        self.left: dict[int, int] = {}  # block -> the shard that it has left in this wave
        self.waiting: list[bool] = []  # one value for each part
        self.namespace = namespace
        self.piece_blocks = piece_blocks
        self.spots: dict[int, tuple[int, int, int]] = {}  # head, depth, key
        self.gone: dict[int, int] = {}  # the key of each hash
        self.parts: list[tuple[bytes, int, int, list[_Block]]] = []  # kind, head, position, blocks
        self.counted = [0, 0, 0]

    def store(self, event: Stored, position: int) -> None:
        hashes, width = event.engine_hashes, 4 * event.block_size
        above = None
        if event.parent is not None:
            above = self.spots.get(event.parent)
            if above is None:
                return
        before = None if above is None else above[2] ^ self.namespace
        depth = 0 if above is None else (above[1] + 1) % self.piece_blocks
        head = 0 if above is None else above[0]
        found: list[tuple[int, int, int]] = []
        for at in range(len(hashes)):
            local = xxh3_64_intdigest(event.tokens[at * width : (at + 1) * width], SEED)
            before = local if before is None else xxh3_64_intdigest(struct.pack("<QQ", before, local), SEED)
            key = before ^ self.namespace
            head = key if depth == 0 else head
            found.append((head, depth, key))
            depth = (depth + 1) % self.piece_blocks
        keys = {key for _, _, key in found}
        if U64_MAX in hashes or len(keys) < len(found) or self.spots.keys() & set(hashes):
            return
        if keys & {key for _, _, key in self.spots.values()}:
            return
        parent = None if above is None or found[0][1] == 0 else above[2]
        at = 0
        for _, group in groupby(found, lambda spot: spot[0]):
            blocks = [
                (key, depth, engine_hash) for (_, depth, key), engine_hash in zip(group, hashes[at:], strict=False)
            ]
            shard = found[at][0] % self.shards
            stored = {key for key, _, _ in blocks} | {self.gone[each] for *_, each in blocks if each in self.gone}
            waits = any(self.left.get(key, shard) != shard for key in stored)
            if waits:
                self.begin_wave()
            if above is not None:
                self.used.add((above[2], shard))
            self.add(b"+", found[at][0], position + at, blocks, parent if at == 0 else None, waits=waits)
            at += len(blocks)
        self.spots |= dict(zip(hashes, found, strict=True))
        for each in hashes:
            self.gone.pop(each, None)
        self.counted = [self.counted[0] + 1, self.counted[1] + len(hashes), self.counted[2]]

    def remove(self, event: Removed, position: int) -> None:
        hashes = event.engine_hashes
        if not set(hashes) <= self.spots.keys():
            return
        at = 0
        for head, group in groupby(hashes, lambda each: self.spots[each][0]):
            blocks = [(self.spots[each][2], self.spots[each][1], each) for each in group]
            shard, free = head % self.shards, 0
            while free < len(blocks) and not any(key == blocks[free][0] and used != shard for key, used in self.used):
                free += 1
            if free:
                self.leave(shard, head, position + at, blocks[:free], waits=False)
            if free < len(blocks):
                self.begin_wave()
                self.leave(shard, head, position + at + free, blocks[free:], waits=True)
            at += len(blocks)
        for each in hashes:
            self.gone[each] = self.spots.pop(each)[2]
        self.counted[2] += len(hashes)

    def leave(self, shard: int, head: int, position: int, blocks: list[_Block], *, waits: bool) -> None:
        self.left |= {key: shard for key, _, _ in blocks}
        self.add(b"-", head, position, blocks, None, waits=waits)

    def begin_wave(self) -> None:
        self.used.clear()
        self.left.clear()

    def shares(self) -> list[dict[int, tuple[int, int]]]:
        """Return the numbers of parts and blocks of each shard, for each wave."""
        waves: list[dict[int, tuple[int, int]]] = [{}]
        for (_, head, _, blocks), waits in zip(self.parts, self.waiting, strict=True):
            if waits and waves[-1]:
                waves.append({})
            count, some = waves[-1].get(head % self.shards, (0, 0))
            waves[-1][head % self.shards] = count + 1, some + len(blocks)
        return waves

    def add(
        self, kind: bytes, head: int, position: int, blocks: list[_Block], parent: int | None, *, waits: bool
    ) -> None:
        last = self.parts[-1] if self.parts else None
        if (
            last is not None
            and not waits
            and last[:2] == (kind, head)
            and last[2] + len(last[3]) == position
            and len(last[3]) + len(blocks) <= JOINED_MAX
            and (kind == b"-" or parent == last[3][-1][0])
            and not (kind == b"-" and blocks[0][0] in [key for key, _, _ in last[3]])
        ):
            last[3].extend(blocks)
        else:
            self.parts.append((kind, head, position, blocks))
            self.waiting.append(waits)


def _bulks(words: list[bytes]) -> bytes:
    """Return words as RESP bulk strings."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def parts(payload: bytes, namespace: int, piece_blocks: int, shards: int) -> object:
    read: Any = batches.read_batch(payload, EVENTS_MAX, *batches.EVENT_TYPES, medium_of, 10, 3)
    if read is None or batches.keeping(read[1]) != "alike":
        return None
    if not 0 <= namespace <= U64_MAX or not -(2**63) <= piece_blocks < 2**63:
        raise OverflowError
    if not 0 <= shards < 2**64:
        raise OverflowError
    if not 1 <= piece_blocks <= 32 or not 1 <= shards <= 256:
        raise ValueError
    model, position = _Model(namespace, piece_blocks, shards), FIRST
    for event in read[1]:
        (model.store if isinstance(event, Stored) else model.remove)(event, position)
        position += len(event.engine_hashes)
    few = model.parts[:CALL_PARTS]
    heads = list(dict.fromkeys(head for _, head, _, _ in few))
    words = [
        kind
        + struct.pack(
            ">HHIHHBB", 1, 1, 2 * (at + len(blocks)) - 1, heads.index(head) + 1, 0, len(blocks), flags(kind, namespace)
        )
        + (b"%016x" % namespace if namespace else b"")
        + b"".join(b"%016x%c" % (key, b"0123456789abcdefghijklmnopqrstuv"[depth]) for key, depth, _ in blocks)
        + (b"".join(struct.pack(">Q", each) for _, _, each in blocks) if kind == b"+" else b"")
        for kind, head, at, blocks in few
    ]
    blocks, stored = (
        sum(len(each) for kind, _, _, each in model.parts if kind in kinds) for kinds in ((b"+", b"-"), (b"+",))
    )
    held = len(model.spots), len(model.spots), len(model.gone), 0
    rows = [PREFIX + b"%016x" % head for head in heads]
    of_few = sum(len(each) for _, _, _, each in few)
    packed = of_few, [HOLDER] * bool(few), len(rows), _bulks(rows), [SEQ] * bool(few), _bulks(words)
    reported = _reported(model.parts, namespace)
    gone_on = _gone_on(read[0], read[1], read[2])
    return model.counted, position, held, blocks, stored, 0, packed, reported, model.shares(), gone_on


def _reported(parts: list[tuple[bytes, int, int, list[_Block]]], namespace: int) -> tuple[int, int, bytes]:
    """Return the entries of the new blocks of the first part, and of the next parts up to ``JOINED_MAX`` blocks in
    all."""
    words, end, count = list[bytes](), 0, 0
    for kind, head, _, blocks in parts:
        if kind == b"+" and count and count + len(blocks) > JOINED_MAX:
            break
        end += 1
        for key, depth, engine_hash in blocks if kind == b"+" else ():
            of_namespace = b"%016x" % namespace if namespace else b""
            digit = b"0123456789abcdefghijklmnopqrstuv"[depth]
            words += struct.pack(">Q", engine_hash), b"%016x%c%016x%b" % (key, digit, head, of_namespace)
            count += 1
    return end, count, _bulks(words)


def _gone_on(ts: object, events: list[Any], rank: object) -> object:
    """Return the events and counts that two more batches of the same bytes add."""
    is_plain = type(ts) is float and 0 <= ts < 1e11 and (rank is None or type(rank) is int)
    stores = [len(each.engine_hashes) for each in events if isinstance(each, Stored)]
    removals = [len(each.engine_hashes) for each in events if isinstance(each, Removed)]
    if not is_plain:
        return [[], ts, 0, 0, 0, 0]
    return [[events, events], ts, 2 * len(stores), 2 * sum(stores), 2 * len(removals), 2 * sum(removals)]


def flags(kind: bytes, namespace: int) -> int:
    return (kind == b"+") + 2 * bool(namespace)


def _stored(hashes: list[int], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    tokens = [each % 5 for each in hashes for _ in range(2)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 2, "medium": "GPU"} | fields


def _removed(*hashes: int) -> list[Any]:
    return ["BlockRemoved", list(hashes), "GPU"]


_LONG = list(range(100, 200))
RUNS: list[list[Any]] = [
    [_stored([1]), _stored([2], 1), _stored([3], 2), _removed(2, 3), _stored([3], 1)],
    [_stored(_LONG, token_ids=list(range(200))), _stored([5], 150), _removed(*_LONG[::-1])],
    [_stored(_LONG[:40], token_ids=list(range(80))), *([_removed(each) for each in _LONG[:40]])],
    [_stored([each], each - 1 if each > 1 else None) for each in range(1, 90)],
    [_stored([1, 2, 3]), _stored([4], 9), _stored([U64_MAX], 3), _stored([1], 2), _removed(7), _removed(1, 9)],
    [_stored([2**63 + 1], lora_name="a"), _stored([2], 2**63 + 1, lora_name="a")],
    [_stored([1], token_ids=list(range(200)), block_size=200)],
]
PAYLOADS: list[bytes] = [msgpack.packb([1.5, events, 0]) for events in RUNS]
