"""Sweeping: taking out of the blocks, in small steps, what a dead holder left.

Nothing waits for it: readers do not count a dead holder from the moment its life ended. A step is one bounded
call, so no reader feels it; a crash between two steps loses nothing, since the id stays in ``dead`` until every
shard is done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from waymark.store import keys
from waymark.store.client import Client
from waymark.store.index import parse_entry
from waymark.store.registry import GroupEntry
from waymark.store.scripts import Scripts

#: Entries read, and blocks written, in one step.
STEP_BLOCKS = 64


class Sweeper:
    def __init__(self, client: Client, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def pick(self, entry: GroupEntry) -> int | None:
        """A dead holder of the group, any one; None where none is left."""
        holder = await self._client.srandmember(keys.dead(entry.group_id))
        return None if holder is None else int(holder)

    async def left(self, entry: GroupEntry) -> int:
        """How many dead holders of the group are still to be swept."""
        return await self._client.scard(keys.dead(entry.group_id))

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        """Sweep one dead holder on all shards; after each step, the blocks it took. The caller sets the pace."""
        for shard in range(entry.shards):
            engine = keys.engine(entry.group_id, shard, holder)
            prefix = keys.block_prefix(entry.group_id, shard)
            cursor, has_found = 0, False
            while True:
                cursor, fields = await self._client.hscan(engine, cursor, STEP_BLOCKS)
                entries = [
                    (name, prefix + b"%016x" % _block_key(name, value))
                    for name, value in fields.items()
                    if name != b"applied" and not name.startswith(b"*")
                ]
                has_found = has_found or bool(entries)
                for start in range(0, len(entries), STEP_BLOCKS):
                    step = entries[start : start + STEP_BLOCKS]
                    while step:
                        outcome = await self._scripts.sweep_holder(
                            engine, [block for _, block in step], holder, [name for name, _ in step]
                        )
                        step = step[outcome.numbers[0] :]
                        yield outcome.numbers[0]
                if cursor == 0:
                    # A cursor means nothing to a replica that has taken over meanwhile: all are through when a whole
                    # scan finds none.
                    if not has_found:
                        break
                    has_found = False
            await self._scripts.sweep_holder(engine, [], holder, [])
        await self._scripts.forget_dead(keys.dead(entry.group_id), holder)


def _block_key(engine_hash: bytes, entry: bytes) -> int:
    namespace, seq_hash = parse_entry(int(engine_hash, 16), entry)
    return namespace ^ seq_hash
