"""Placements in Redis: for each block, the holders to which external routers have sent a prompt with this block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from waymark.store import keys
from waymark.store.parsing import pairs
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

#: Blocks in one call. Redis needs less than 1 ms for them.
BLOCKS_PER_CALL = 128
#: The most holders of one block: every holder may have the beginning of a system prompt.
_HOLDERS_MAX = 1024
#: The most blocks, and the most holders of such blocks, that one call reads. Redis needs less than 2 ms for them.
_MATCHED_PER_CALL, _FIELDS_PER_CALL = 512, 4096
#: In place of a block: the holders that were dropped, each with the time at which its placements of before end.
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
            outcome = await self._scripts.place(
                placements=keys.placements(group_id),
                placement=names,
                holder=holder,
                milliseconds=milliseconds,
                holders_max=_HOLDERS_MAX,
            )
            while outcome.numbers[0] - blocks_max > 0:
                few = min(BLOCKS_PER_CALL, outcome.numbers[0] - blocks_max)
                dropped_count = await self._drop_oldest(group_id, few)
                dropped += dropped_count
                if dropped_count < few:
                    break  # another call may drop them, too
                outcome = outcome._replace(numbers=(outcome.numbers[0] - dropped_count,))
        return dropped

    async def _drop_oldest(self, group_id: int, count: int) -> int:
        name = keys.placements(group_id)
        (reply,) = await self._client.several([("ZRANGE", name, 0, count - 1, "WITHSCORES")])
        oldest = pairs(reply)
        if not oldest:
            return 0
        names = [keys.placement(group_id, block.decode()) for block, _ in oldest]
        outcome = await self._scripts.drop_placements(
            placements=name, placement=names, before=f"{float(oldest[-1][1]):.0f}"
        )
        return outcome.numbers[0]

    async def drop(self, group_id: int, holder: str, *, milliseconds: int) -> None:
        """Note that the placements of a holder do not count any more; those that follow do.

        ``milliseconds`` is how long placements last.
        """
        name = keys.placement(group_id, f"{_DROPPED:016x}")
        await self._scripts.place(
            placements=keys.placements(group_id),
            placement=[name],
            holder=holder,
            milliseconds=milliseconds,
            holders_max=_HOLDERS_MAX,
        )

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
                    count, matches = await self._scripts.match_placements(
                        dropped=dropped, placement=names, fields_max=_FIELDS_PER_CALL, holder=going
                    )
            except TimeoutError:
                break
            depths |= {holder: position + blocks for holder, blocks in matches.items()}
            going = [holder for holder, blocks in matches.items() if blocks == count]
            position += count
            if not going or not count:
                break
        return depths
