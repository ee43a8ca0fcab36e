"""What the engine that holds blocks calls them: its hashes, from its holder entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waymark.domain.rows import PIECE_BLOCKS, HolderEntry, Place, parse_entry
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.places import read_row, values_of
from waymark.store.redis.client import RedisClient


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
        """Read the hashes of ``blocks`` from index ``first`` on, up to a block that none of the holders has in its row.

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
        found: list[HeldBlock] = []
        for at, (head, value) in enumerate(zip(heads, rows, strict=True)):
            row = read_row(value)
            if row is None:
                return found
            slots = {key: slot for slot, key in enumerate(row.keys)}
            entries = [_entry(each) for each in values[at * len(holders) : (at + 1) * len(holders)]]
            for key in blocks[max(head, first) : head + PIECE_BLOCKS]:
                slot = slots.get(key)
                held = None
                for holder, hashes in zip(holders, entries, strict=True):
                    has = slot is not None and row.holders.get(holder, 0) >> slot & 1
                    if slot is not None and has and hashes is not None:
                        held = HeldBlock(holder, hashes.hash_of(slot, key))
                        break
                if held is None:
                    return found
                found.append(held)
        return found


def _entry(value: bytes | None) -> HolderEntry | None:
    """Return the entry in a value; None if there is none, or if it cannot be read."""
    try:
        return None if value is None else parse_entry(value)
    except ValueError:
        return None
