"""Reads every block of a stream's live holders from Redis, for the worker that takes the stream over.

The caller has raised the fence, so no other worker writes for these holders at the same time.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence

from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.rows import SAME_HASH, HolderEntry, Place, Row, parse, parse_entry, parse_field
from waymark.domain.status import RecordKind
from waymark.store import keys
from waymark.store.hashes import ReportedBlock
from waymark.store.leases import Grant
from waymark.store.parsing import Malformed, RecordParser
from waymark.store.redis.client import RedisClient

#: The number of fields in one HSCAN, and of their rows in the MGET after it.
_FIELDS = 512
#: The number of rows read at once while other streams go on: they have up to 2,000 blocks, which take a millisecond.
_ROWS = 64
_COPIES = re.compile(rb"([1-9][0-9]{0,15})((?: [0-9a-f]{16})*)")
_COPIES_FIELD = re.compile(rb"\*[0-9a-f]{16}")
_APPLIED = re.compile(rb"([0-9]{1,16}) ([0-9]{1,16})")

_StoredBlock = tuple[Place, int, int, int, int]
"""Place, namespace, key, depth, engine hash."""

BlockCounts = dict[tuple[int, int], tuple[int, int]]
"""The seq and position up to which a shard has applied the parts of a holder, by holder and shard."""


SWEPT = 2**53 - 1, 0
"""The mark of a holder that a shard has swept (``lua/end_holder.lua``). No block of a batch has position 0."""


class Takeover:
    def __init__(self, client: RedisClient, parser: RecordParser | None = None) -> None:
        self._client = client
        self._parser = parser or RecordParser()

    async def fill(self, grant: Grant, holders: dict[int, int], memory: HeldBlocks) -> BlockCounts:
        """Fill an empty memory with the blocks of ``holders`` (id to rank). Raises StoreUnavailable.

        A value that cannot be parsed counts for no holder; the parser counts and logs it.
        """
        counted: BlockCounts = {}
        for holder, dp_rank in holders.items():
            memory.begin(holder, dp_rank)
            for shard in range(grant.shards):
                mark = await self._fill_from(grant, shard, holder, memory)
                if mark is not None:
                    counted[holder, shard] = mark
        return counted

    async def reported(self, grant: Grant, holders: Sequence[int]) -> AsyncIterator[list[ReportedBlock]]:
        """Yield the blocks of the holders in portions, each with its engine hash. Raise StoreUnavailable if Redis is
        unavailable.

        Blocks removed during the call may be missing, and blocks stored during it may be included.
        """
        for holder in holders:
            async for blocks in self._portions(grant, holder, has_singles=False):
                yield [
                    ReportedBlock(engine_hash, Spot(Place(place.head), namespace, depth, key))
                    for place, namespace, key, depth, engine_hash in blocks
                ]

    async def keys_of(self, grant: Grant, holder: int) -> AsyncIterator[list[int]]:
        """Yield the keys of a holder's blocks in portions; a key may come twice. Raises StoreUnavailable."""
        async for blocks in self._portions(grant, holder, has_singles=True):
            yield [key for _, _, key, _, _ in blocks]

    async def _portions(self, grant: Grant, holder: int, *, has_singles: bool) -> AsyncIterator[list[_StoredBlock]]:
        for shard in range(grant.shards):
            engine, cursor, is_over = keys.engine(grant.group_id, shard, holder), 0, False
            while not is_over:
                cursor, fields = await self._client.hscan(engine, cursor, _FIELDS)
                is_over = cursor == 0
                entries = [self._entry_of(engine, name, value) for name, value in fields.items() if _is_place(name)]
                placed = [entry for entry in entries if entry is not None and (has_singles or not entry[0].is_single)]
                for start in range(0, len(placed), _ROWS):
                    some = placed[start : start + _ROWS]
                    rows = await self._rows(grant, shard, some)
                    yield [
                        block
                        for row, (place, entry) in zip(rows, some, strict=True)
                        for block in _blocks(row, place, entry, holder)
                    ]

    async def _fill_from(self, grant: Grant, shard: int, holder: int, memory: HeldBlocks) -> tuple[int, int] | None:
        engine = keys.engine(grant.group_id, shard, holder)
        mark: tuple[int, int] | None = None
        several: dict[int, tuple[int, list[int]]] = {}
        late: list[_StoredBlock] = []
        places: set[Place] = set()
        cursor = 0
        while True:
            cursor, fields = await self._client.hscan(engine, cursor, _FIELDS)
            entries: list[tuple[Place, HolderEntry]] = []
            for name, value in fields.items():
                if name == b"applied":
                    mark = self._parser.parse(RecordKind.ENTRY, engine, name, _applied, value)
                elif not _is_place(name):
                    copies = self._parser.parse(RecordKind.ENTRY, engine, name, _copies, name, value)
                    if copies is not None:
                        several[copies[0]] = copies[1:]
                else:
                    placed_entry = self._entry_of(engine, name, value)
                    if placed_entry is not None and placed_entry[0] not in places:
                        places.add(placed_entry[0])
                        entries.append(placed_entry)
            late += await self._fill_rows(grant, shard, holder, entries, memory)
            if cursor == 0:
                break
        # In an entry, the value SAME_HASH means that the engine hash is the seq_hash. So a block A whose engine hash
        # is this very value was read under its seq_hash. Until the copies of A are restored, that seq_hash seems to
        # belong to A, although it may be an engine hash of another block B. If the copies of B were restored first, B
        # would lose this hash, and a later removal by it would find no block. If the late blocks were stored first, a
        # B whose entry names this hash would not be stored at all.
        _restore(
            memory, holder, {key: block_copies for key, block_copies in several.items() if SAME_HASH in block_copies[1]}
        )
        for place, namespace, key, depth, engine_hash in late:
            _, further = several.get(key, (1, []))
            first = further[0] if SAME_HASH in further else engine_hash
            if memory.are_new(holder, [first], [key]):
                memory.store(holder, place, namespace, [key], [depth], [first])
        _restore(memory, holder, several)
        return mark

    async def _fill_rows(
        self, grant: Grant, shard: int, holder: int, entries: list[tuple[Place, HolderEntry]], memory: HeldBlocks
    ) -> list[_StoredBlock]:
        """Remember the blocks of the entries. Return those whose engine hash already belongs to another block.

        If an entry names no engine hash for a block, the seq_hash is used. The field with the copies of the block may
        replace it later.
        """
        late: list[_StoredBlock] = []
        rows = await self._rows(grant, shard, entries)
        for row, (place, entry) in zip(rows, entries, strict=True):
            if row is not None and row.is_marked:
                memory.full.add(place)
            new: dict[int, tuple[int, int]] = {}
            for block in _blocks(row, place, entry, holder):
                _, _, key, depth, engine_hash = block
                if engine_hash not in new and memory.are_new(holder, [engine_hash], [key]):
                    new[engine_hash] = key, depth
                else:
                    late.append(block)
            if new:
                found_keys, found_depths = zip(*new.values(), strict=True)
                memory.store(holder, place, entry.namespace, found_keys, found_depths, list(new))
        return late

    def _entry_of(self, engine: str, name: bytes, value: bytes) -> tuple[Place, HolderEntry] | None:
        return self._parser.parse(RecordKind.ENTRY, engine, name, _entry, name, value)

    async def _rows(self, grant: Grant, shard: int, entries: Sequence[tuple[Place, HolderEntry]]) -> list[Row | None]:
        """Return the row of each entry, or None if it is missing or cannot be read."""
        if not entries:
            return []
        prefix = keys.block_prefix(grant.group_id, shard)
        names = [prefix + place.name for place, _ in entries]
        (values,) = await self._client.several([("MGET", *names)])
        return [
            None if value is None else self._parser.parse(RecordKind.BLOCK, name.decode(), "", parse_row, value)
            for name, value in zip(names, values, strict=True)
        ]


def _is_place(field: bytes) -> bool:
    """Return whether a field of a holder's entries names a place."""
    return field != b"applied" and not field.startswith(b"*")


def _blocks(row: Row | None, place: Place, entry: HolderEntry, holder: int) -> Iterator[_StoredBlock]:
    """Yield the blocks that the holder has in a row."""
    if row is not None:
        bitmap, block_keys, depths = row.holders.get(holder, 0), row.keys, row.depths
        for slot in range(bitmap.bit_length()):
            if bitmap >> slot & 1:
                key = block_keys[slot]
                yield place, entry.namespace, key, depths[slot], entry.hash_of(slot, key)


def _restore(memory: HeldBlocks, holder: int, several: dict[int, tuple[int, list[int]]]) -> None:
    for key, (copies, hashes) in several.items():
        if memory.held_block(holder, key) is not None:
            memory.copies(holder).restore(key, copies, hashes)


def parse_row(value: bytes) -> Row:
    """Parse a row, branch row or single. Raise ``Malformed`` if it cannot be read."""
    try:
        return parse(value)
    except ValueError as exc:
        raise Malformed(str(exc)) from None


def _entry(field: bytes, value: bytes) -> tuple[Place, HolderEntry]:
    try:
        return parse_field(field), parse_entry(value)
    except ValueError as exc:
        raise Malformed(str(exc)) from None


def _copies(field: bytes, value: bytes) -> tuple[int, int, list[int]]:
    """Return key, copies and further engine hashes of a block."""
    match = _COPIES.fullmatch(value)
    if match is None or _COPIES_FIELD.fullmatch(field) is None:
        raise Malformed("it is no number of copies with further engine hashes after it")
    return int(field[1:], 16), int(match[1]), [int(text, 16) for text in match[2].split()]


def _applied(value: bytes) -> tuple[int, int]:
    match = _APPLIED.fullmatch(value)
    if match is None:
        raise Malformed("it is not <seq> <position>")
    return int(match[1]), int(match[2])
