"""The holders of each block of a chain, even after a block without holders: for inspection, not for queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from waymark.domain.packing import unpack
from waymark.domain.rows import Place, Row, parse, shared_places
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.redis.client import RedisClient

Holders: TypeAlias = list[set[int]]
"""The holder ids of each block of a piece."""

#: Values in one MGET.
_VALUES = 512


async def holders_of(
    client: RedisClient, entry: GroupEntry, pieces: Sequence[bytes], *, has_singles: bool
) -> list[Holders]:
    """Return the holders of each block of ``pieces``. A piece is given as its packed keys, from its head on.

    A value that cannot be read counts for no holder. Each 512 values take at most two round trips.
    """
    blocks = [unpack(piece) for piece in pieces]
    result: list[Holders] = [[set() for _ in piece_keys] for piece_keys in blocks]
    more: list[tuple[int, Place]] = []
    rows = await values_of(client, entry, [Place(piece_keys[0]) for piece_keys in blocks])
    for index, (piece_keys, value) in enumerate(zip(blocks, rows, strict=True)):
        row = read_row(value)
        if row is not None:
            _add(result[index], piece_keys, row)
        if row is not None and row.is_marked:
            more += [(index, place) for place in _branch_places(piece_keys, row)]
        if has_singles:
            more += [(index, Place(key, is_single=True)) for key in piece_keys]
    values = await values_of(client, entry, [place for _, place in more])
    for (index, _), value in zip(more, values, strict=True):
        row = read_row(value)
        if row is not None:
            _add(result[index], blocks[index], row)
    return result


def _branch_places(piece_keys: Sequence[int], row: Row) -> Iterator[Place]:
    """Yield the branch rows, own and shared, that may have blocks of a piece whose marked row is ``row``."""
    head, listed = piece_keys[0], set(row.keys)
    for parent, key in pairwise(piece_keys):
        if key not in listed:
            yield Place(head, key)
            if parent in listed:
                yield from shared_places(head, key)


async def values_of(client: RedisClient, entry: GroupEntry, places: Sequence[Place]) -> list[bytes | None]:
    """Return the values at ``places``, in their order."""
    values: list[bytes | None] = [None] * len(places)
    for start in range(0, len(places), _VALUES):
        shards: dict[int, list[int]] = {}
        for i in range(start, min(start + _VALUES, len(places))):
            shards.setdefault(places[i].shard(entry.shards), []).append(i)
        replies = await client.several(
            ("MGET", *(key_of(entry, places[i]) for i in indexes)) for indexes in shards.values()
        )
        for indexes, reply in zip(shards.values(), replies, strict=True):
            for i, value in zip(indexes, reply, strict=True):
                values[i] = value
    return values


def key_of(entry: GroupEntry, place: Place) -> bytes:
    """Return the name of the key in Redis."""
    return keys.block_prefix(entry.group_id, place.shard(entry.shards)) + place.name


def read_row(value: bytes | None) -> Row | None:
    """Return the row in a value, or None if there is no value, or it cannot be read."""
    try:
        return None if value is None else parse(value)
    except ValueError:
        return None


def _add(holders: Holders, blocks: Sequence[int], row: Row) -> None:
    slots = {key: slot for slot, key in enumerate(row.keys)}
    for ids, key in zip(holders, blocks, strict=True):
        slot = slots.get(key)
        if slot is not None:
            ids |= {holder for holder, bitmap in row.holders.items() if bitmap >> slot & 1}
