"""Speculative entries: which target recently got a prompt with this prefix, and will have its blocks soon.

A prompt has a few entries, which are small keys that expire. They are at a few depths, each a third or a half greater
than the one before, and at the last block of the prompt. ``reserve`` writes them. If two prompts
share n blocks, and n is at least 8, the deepest entry that both have is at a depth of 2n/3 to n.

``prefix-cache-scorer`` of a picker file has a separate memory that does not expire: the last blocks that went to each
target.

``Placements`` are the same for external routers: for each block, the holders to which they have sent a prompt with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import hiredis

from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.parsing import lenient_text, pairs
from waymark.store.redis import errors
from waymark.store.redis.client import RedisClient
from waymark.store.redis.read_connection import Replies
from waymark.store.scripts import Scripts

_FIRST = 8
_ID_DIGITS_MAX = 16
#: The blocks that one call notes, and the targets that one call reads. Redis needs less than 2 ms for them.
_NOTED_PER_CALL, _TARGETS_PER_CALL = 512, 256


def depths(blocks: int) -> list[int]:
    """Return the depths, in blocks, at which a prompt of ``blocks`` blocks has entries: 8, 12, 16, 24, ... and the
    last.
    """
    result = []
    depth = _FIRST
    while depth < blocks:
        result.append(depth)
        depth = depth * 3 // 2 if depth & (depth - 1) == 0 else depth // 3 * 4
    return [*result, blocks] if blocks > 0 else []


class Speculative:
    """The speculative entries of all groups. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(
        self, group_id: int, block_keys: Sequence[int], *, until: float, has_stages: bool = False
    ) -> list[int | None]:
        """Return the publisher in each key. ``block_keys`` must not be empty.

        With ``has_stages``, the publishers that prefilled follow.

        Raises TimeoutError at ``until``, by the loop's clock.
        """
        names = [keys.spec(group_id, key) for key in block_keys]
        if has_stages:
            names += [keys.spec(group_id, key, of_prefill=True) for key in block_keys]
        try:
            packed = hiredis.pack_command(cast("Any", ("MGET", *names)))
            (values,) = await self._client.ask(keys.spec_prefix(group_id), packed, Replies(1), until)
            if not isinstance(values, list) or len(values) != len(names):
                raise errors.InvalidResponse(f"no reply to an MGET of {len(names)} keys")
        except (StoreUnavailable, errors.InvalidResponse):
            # A slot has moved, or the Redis is embedded: redis-py handles both.
            async with asyncio.timeout_at(until):
                (values,) = await self._client.several([("MGET", *names)])
        return [_publisher(value) for value in values]


def _publisher(value: bytes | None) -> int | None:
    """Return the publisher id in a value, or None for any other value."""
    return int(value) if value is not None and value.isdigit() and len(value) <= _ID_DIGITS_MAX else None


class PromptHistories:
    """The last blocks of prompts that went to each target. They are in the primary Redis, never in a replica."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def note(self, group_id: int, publisher: int, block_keys: Sequence[int], *, capacity: int) -> None:
        """Note that a prompt with these blocks goes to a target, which may have ``capacity`` blocks."""
        names = [f"{key:016x}" for key in block_keys]
        for start in reversed(range(0, len(names), _NOTED_PER_CALL)):
            await self._scripts.run(
                "note_history",
                history=keys.history(group_id, publisher),
                holders=keys.holders(group_id),
                publisher=publisher,
                capacity=capacity,
                block=names[start : start + _NOTED_PER_CALL],
            )

    async def match(
        self, group_id: int, publishers: Sequence[int], block_keys: Sequence[int], *, until: float
    ) -> dict[int, int]:
        """Return by target how many blocks from the beginning of the prompt went there, if any did.

        Raises TimeoutError at ``until``, by the loop's clock.
        """
        names = [f"{key:016x}" for key in block_keys]
        matches: dict[int, int] = {}
        async with asyncio.timeout_at(until):
            for start in range(0, len(publishers), _TARGETS_PER_CALL):
                batch = publishers[start : start + _TARGETS_PER_CALL]
                _, blocks = await self._scripts.reply(
                    "match_history", history=[keys.history(group_id, publisher) for publisher in batch], block=names
                )
                matches |= {publisher: count for publisher, count in zip(batch, blocks, strict=True) if count}
        return matches


#: Blocks in one call. Redis needs less than 1 ms for them.
BLOCKS_PER_CALL = 128
#: The most holders of one block, because every holder may have the beginning of a system prompt.
_HOLDERS_MAX = 1024
#: The most blocks, and the most holders of such blocks, that one call reads. Redis needs less than 2 ms for them.
_MATCHED_PER_CALL, _FIELDS_PER_CALL = 512, 4096
#: A number instead of a block. Its key has the dropped holders, each with the time at which its earlier placements
#: expire.
_DROPPED = 2**64 - 1


class Placements:
    """The placements of all groups. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def place(
        self, group_id: int, block_keys: Sequence[int], holder: str, *, milliseconds: int, blocks_max: int
    ) -> int:
        """Note that a holder was sent these blocks.

        Drops the oldest placements of the group above ``blocks_max``, and returns how many were dropped.
        """
        dropped = 0
        for first in range(0, len(block_keys), BLOCKS_PER_CALL):
            names = [keys.placement(group_id, f"{key:016x}") for key in block_keys[first : first + BLOCKS_PER_CALL]]
            count = await self._place(group_id, names, holder, milliseconds)
            while count > blocks_max:
                few = min(BLOCKS_PER_CALL, count - blocks_max)
                dropped_count = await self._drop_oldest(group_id, few)
                dropped += dropped_count
                if dropped_count < few:
                    break  # another call may drop them, too
                count -= dropped_count
        return dropped

    async def _place(self, group_id: int, names: Sequence[str], holder: str, milliseconds: int) -> int:
        """Return the number of placements of the group afterwards."""
        outcome = await self._scripts.run(
            "place",
            placements=keys.placements(group_id),
            placement=names,
            holder=holder,
            milliseconds=milliseconds,
            holders_max=_HOLDERS_MAX,
        )
        return outcome.numbers[0]

    async def _drop_oldest(self, group_id: int, count: int) -> int:
        name = keys.placements(group_id)
        (reply,) = await self._client.several([("ZRANGE", name, 0, count - 1, "WITHSCORES")])
        oldest = pairs(reply)
        if not oldest:
            return 0
        names = [keys.placement(group_id, block.decode()) for block, _ in oldest]
        outcome = await self._scripts.run(
            "drop_placements", placements=name, placement=names, before=f"{float(oldest[-1][1]):.0f}"
        )
        return outcome.numbers[0]

    async def drop(self, group_id: int, holder: str, *, milliseconds: int) -> None:
        """Note that the placements of a holder no longer count, except later ones.

        ``milliseconds`` is how long placements last.
        """
        await self._place(group_id, [keys.placement(group_id, f"{_DROPPED:016x}")], holder, milliseconds)

    async def match(self, group_id: int, block_keys: Sequence[int], *, until: float) -> dict[str, int]:
        """Return for each holder how many blocks from the start of the prompt were sent to it and have not expired.

        At ``until``, a time of the event loop's clock, it returns the result for the blocks that it has read.
        """
        depths: dict[str, int] = {}
        dropped = keys.placement(group_id, f"{_DROPPED:016x}")
        going: list[str] = []
        position = 0
        while position < len(block_keys):
            names = [
                keys.placement(group_id, f"{key:016x}") for key in block_keys[position : position + _MATCHED_PER_CALL]
            ]
            try:
                async with asyncio.timeout_at(until):
                    _, count, found = await self._scripts.reply(
                        "match_placements", dropped=dropped, placement=names, fields_max=_FIELDS_PER_CALL, holder=going
                    )
            except TimeoutError:
                break
            matches = {lenient_text(name): blocks for name, blocks in zip(found[::2], found[1::2], strict=True)}
            depths |= {holder: position + blocks for holder, blocks in matches.items()}
            going = [holder for holder, blocks in matches.items() if blocks == count]
            position += count
            if not going or not count:
                break
        return depths
