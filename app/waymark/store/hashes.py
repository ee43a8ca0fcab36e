"""Engine hashes: for each hash the block that a group's engines have reported for it, and for each block its hash.

Entries from a hash to its block exist only in groups with a pool, because the events of a pool name blocks by the
hashes of the engines, and in groups that a client asks about by these hashes. They are in ten Redis hashes. When the
newest is full, the oldest is deleted.

For the opposite direction, from a block to its hash, ``HeldHashes`` reads the entries of a holder.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from waymark.domain.known import Spot
from waymark.domain.packing import pack
from waymark.domain.parts import PackedParts
from waymark.domain.rows import DEPTHS, PIECE_BLOCKS, Place, find_entry
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.leases import Grant
from waymark.store.places import read_row, values_of
from waymark.store.redis.client import RedisClient
from waymark.store.redis.words import PackedWords
from waymark.store.scripts import Arg, Scripts, Verdict
from waymark.store.selections import change_entry

KEPT: Final = "hashes_kept"
"""A flag of the record, which means that the hashes of all blocks of this life have been kept."""
GENERATIONS: Final = 10
#: Entries in one call. Redis needs less than 1 ms for them.
CALL_ENTRIES: Final = 512
#: The most hashes that one call looks up, in up to ten Redis hashes. The event loop needs about 3 ms for them.
FIND_HASHES: Final = 256
#: Each of the ten Redis hashes expires a week after its last write, for example if the group has no pool any more.
_KEEP_MS: Final = 7 * 86_400_000
#: For how long the hashes of a group are kept after a client has asked about the group.
ASKED_SECONDS: Final = 86_400
_ASKED_MAX: Final = 10_000
_BLOCK: Final = re.compile(rb"([0-9a-f]{16})([0-9a-v])([0-9a-f]{16})([0-9a-f]{16})?")


HashEntries: TypeAlias = PackedWords
"""Blocks by their engine hashes, as words for one call."""


class ReportedBlock(NamedTuple):
    """A block that an engine has."""

    engine_hash: int
    spot: Spot


class AskedGroups:
    """The groups about which clients have asked recently. Workers do costly work only for these."""

    def __init__(self, client: RedisClient, scripts: Scripts, key: str, seconds: float) -> None:
        self._client = client
        self._scripts = scripts
        self._key = key
        self._seconds = seconds

    async def add(self, group_ids: Collection[int]) -> None:
        now, asked_at = time.time(), await self._client.hgetall(self._key)
        changes = [(str(group_id).encode(), f"{now:.0f}".encode()) for group_id in group_ids]
        changes += [(name, b"") for name, asked in asked_at.items() if not self._is_recent(asked, now)]
        for name, value in changes:
            # If another process has noted the same meanwhile, no hash is lost.
            await change_entry(self._scripts, self._key, name.decode(), asked_at.get(name, b""), value, _ASKED_MAX)

    async def read(self) -> set[int]:
        now, asked_at = time.time(), await self._client.hgetall(self._key)
        return {int(name) for name, asked in asked_at.items() if name.isdigit() and self._is_recent(asked, now)}

    def _is_recent(self, asked_at: bytes, now: float) -> bool:
        return asked_at.isdigit() and int(asked_at) > now - self._seconds


class KeptHashes:
    """Keeps the blocks of one stream by their engine hashes."""

    def __init__(self, scripts: Scripts, grant: Grant, hashes_max: int) -> None:
        self._scripts, self._grant, self._hashes_max = scripts, grant, hashes_max
        self._number = 0
        """The newest of the ten Redis hashes, as far as it is known. A reply corrects a wrong number."""

    def values(self, entries: Sequence[Arg]) -> dict[str, Any]:
        """Return the words of a call that keeps ``entries``, by the names of the signature."""
        group_id, number = self._grant.group_id, self._number
        return {
            **self._grant.fenced_call,
            "hashes": keys.hashes(group_id),
            "newest": keys.hashes(group_id, number),
            "oldest": keys.hashes(group_id, number + 1 - GENERATIONS),
            "number": number,
            "most": max(1, self._hashes_max // GENERATIONS),
            "milliseconds": _KEEP_MS,
            "entry": entries,
        }

    def heard(self, number: int) -> None:
        """Note the newest of the ten Redis hashes."""
        self._number = number

    async def keep_entries(self, entries: Sequence[Arg]) -> bool:
        """Keep up to ``CALL_ENTRIES`` blocks, given as words; False if fenced."""
        while True:
            outcome = await self._scripts.run("keep_hashes", **self.values(entries))
            if outcome.verdict is Verdict.FENCED:
                return False
            self.heard(outcome.numbers[0])
            if self._grant.counted(outcome):
                return True

    async def keep(self, blocks: Sequence[ReportedBlock]) -> bool:
        """Keep blocks; False if fenced."""
        for start in range(0, len(blocks), CALL_ENTRIES):
            entries: list[Arg] = []
            for block in blocks[start : start + CALL_ENTRIES]:
                entries += (pack([block.engine_hash]), _encoded(block.spot))
            if not await self.keep_entries(entries):
                return False
        return True


class EngineHashes:
    """The blocks of all groups, by engine hash."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts
        self.asked = AskedGroups(client, scripts, keys.ASKED, ASKED_SECONDS)
        """The groups whose engines' streams keep their hashes."""

    def kept(self, grant: Grant, hashes_max: int) -> KeptHashes:
        """Return what a stream needs to keep its hashes, at most about ``hashes_max`` of the group."""
        return KeptHashes(self._scripts, grant, hashes_max)

    async def find(self, group_id: int, engine_hashes: Sequence[int]) -> dict[int, Spot]:
        """Return the blocks that these hashes name, if engines reported them. Raise ValueError for more than
        ``FIND_HASHES``.
        """
        if len(engine_hashes) > FIND_HASHES:
            raise ValueError(f"engine_hashes has {len(engine_hashes)} elements and one call takes {FIND_HASHES}")
        if not engine_hashes:
            return {}
        newest = await self._newest(group_id)
        numbers = range(max(0, newest + 1 - GENERATIONS), newest + 1)
        fields = [pack([wanted_hash]) for wanted_hash in engine_hashes]
        spots: dict[int, Spot] = {}
        replies = await self._client.several([("HMGET", keys.hashes(group_id, number), *fields) for number in numbers])
        for values in replies:  # the newest one last, so that it counts
            for engine_hash, value in zip(engine_hashes, values, strict=True):
                spot = None if value is None else _decoded(value)
                if spot is not None:
                    spots[engine_hash] = spot
        return spots

    async def _newest(self, group_id: int) -> int:
        (newest,) = await self._client.several([("GET", keys.hashes(group_id))])
        return int(newest) if newest and newest.isdigit() and len(newest) < 16 else 0


def reported_entries(parts: PackedParts) -> Iterator[HashEntries]:
    """Yield the new blocks with a known depth, under their engine hashes, as packed words for one call each."""
    start = 0
    while start < len(parts):
        start, count, words = parts.reported(start, CALL_ENTRIES)
        if count:
            yield PackedWords(2 * count, words)


def _encoded(spot: Spot) -> bytes:
    namespace = b"%016x" % spot.namespace if spot.namespace else b""
    return b"%016x%c%016x%b" % (spot.key, DEPTHS[spot.depth], spot.place.head, namespace)


def _decoded(value: bytes) -> Spot | None:
    """Return the block in a value, or None if the value cannot be read."""
    match = _BLOCK.fullmatch(value)
    if match is None:
        return None
    key, depth, head, namespace = match.groups()
    return Spot(Place(int(head, 16)), int(namespace or b"0", 16), DEPTHS.index(depth), int(key, 16))


class HeldBlock(NamedTuple):
    """A block, its holder on the fastest medium, and its engine hash there."""

    holder: int
    engine_hash: int


class HeldHashes:
    """The engine hashes of the blocks that holders have."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(
        self, entry: GroupEntry, blocks: Sequence[int], first: int, holders: Sequence[int]
    ) -> list[HeldBlock]:
        """Read the hashes of ``blocks`` from index ``first`` on, up to a block that no holder has in its row.

        ``blocks`` are the keys of a prompt from its beginning, and ``holders`` are in order of preference. It takes two
        round trips.
        """
        heads = range(first // PIECE_BLOCKS * PIECE_BLOCKS, len(blocks), PIECE_BLOCKS)
        places = [Place(blocks[head]) for head in heads]
        if not places or not holders:
            return []
        rows = await values_of(self._client, entry, places)
        names = [(place, holder) for place in places for holder in holders]
        values = await self._client.several(
            [
                ("HGET", keys.engine(entry.group_id, place.shard(entry.shards), holder), place.field)
                for place, holder in names
            ]
        )
        blocks_found: list[HeldBlock] = []
        for index, (head, value) in enumerate(zip(heads, rows, strict=True)):
            row = read_row(value)
            if row is None:
                return blocks_found
            slots = {key: slot for slot, key in enumerate(row.keys)}
            entries = [find_entry(value) for value in values[index * len(holders) : (index + 1) * len(holders)]]
            for key in blocks[max(head, first) : head + PIECE_BLOCKS]:
                slot = slots.get(key)
                block = None
                for holder, hashes in zip(holders, entries, strict=True):
                    has = slot is not None and row.holders.get(holder, 0) >> slot & 1
                    if slot is not None and has and hashes is not None:
                        block = HeldBlock(holder, hashes.hash_of(slot, key))
                        break
                if block is None:
                    return blocks_found
                blocks_found.append(block)
        return blocks_found
