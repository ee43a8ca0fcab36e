"""Placements in Redis: which holder was sent a prompt with a block, as routers outside report it, until when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.parsing import pairs
from waymark.store.scripts import Scripts

#: Blocks in one call, below 1 ms of Redis.
BLOCKS_PER_CALL = 128
#: Holders of one block: the beginning of a system prompt is everywhere.
_HOLDERS_MAX = 1024


class Placements:
    """The placements of all groups. Always on the Redis that takes writes."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def place(
        self, group_id: int, block_keys: Sequence[int], holder: str, *, milliseconds: int, blocks_max: int
    ) -> int:
        """Note blocks of a holder; how many older ones of the group were dropped, so that it has ``blocks_max``."""
        dropped = 0
        for first in range(0, len(block_keys), BLOCKS_PER_CALL):
            names = [keys.placement(group_id, f"{key:016x}") for key in block_keys[first : first + BLOCKS_PER_CALL]]
            outcome = await self._scripts.place(keys.placements(group_id), names, holder, milliseconds, _HOLDERS_MAX)
            while outcome.numbers[0] - blocks_max > 0:
                few = min(BLOCKS_PER_CALL, outcome.numbers[0] - blocks_max)
                gone = await self._drop_oldest(group_id, few)
                dropped += gone
                if gone < few:
                    break  # others drop them, too
                outcome = outcome._replace(numbers=(outcome.numbers[0] - gone,))
        return dropped

    async def _drop_oldest(self, group_id: int, count: int) -> int:
        name = keys.placements(group_id)
        (reply,) = await self._client.several([("ZRANGE", name, 0, count - 1, "WITHSCORES")])
        found = pairs(reply)
        if not found:
            return 0
        names = [keys.placement(group_id, block.decode()) for block, _ in found]
        outcome = await self._scripts.drop_placements(name, names, f"{float(found[-1][1]):.0f}")
        return outcome.numbers[0]

    async def read(self, group_id: int, block_keys: Sequence[int], *, until: float) -> list[set[str]]:
        """The holders of each block, without those whose time is over.

        Raises TimeoutError at ``until``, a time of the event loop's clock.
        """
        name = keys.placements(group_id)
        commands: list[tuple[str | int, ...]] = [("ZRANGE", name, -1, -1, "WITHSCORES"), ("PTTL", name)]
        commands += [("HGETALL", keys.placement(group_id, f"{key:016x}")) for key in block_keys]
        async with asyncio.timeout_at(until):
            last, left, *replies = await self._client.several(commands, is_lenient=True)
        found = pairs(last)
        if not found or left is None or left < 0:
            return [set() for _ in block_keys]
        now = float(found[0][1]) - left  # the key ends with its last member
        return [
            {holder.decode("utf-8", "replace") for holder, end in pairs(reply) if end.isdigit() and int(end) > now}
            for reply in replies
        ]
