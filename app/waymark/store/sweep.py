"""Sweeping: removes a dead holder from its blocks, in small steps.

No query waits for a sweep: readers ignore a holder from the end of its life. A step is one bounded call, so it delays
a reader by little. A crash between two steps loses nothing, because the id stays in ``dead`` until every shard is
done. Each step checks whether the id is still in ``dead``. If it is not, another worker has swept the holder, or Redis
has come back empty, and nothing remains to sweep.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from waymark.metrics import Metrics
from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.directory import GroupEntry
from waymark.store.index import parse_entry
from waymark.store.parsing import Malformed, RecordKind, RecordParser, integer_of
from waymark.store.scripts import Scripts, Verdict

_ENGINE_HASH = re.compile(rb"[0-9a-f]{16}")

#: Blocks written in one step: some 0.3 ms of Redis, for which readers wait.
STEP_BLOCKS = 128
#: Entries read at once, for several steps.
SCAN_ENTRIES = 512


class Sweeper:
    def __init__(
        self, client: RedisClient, scripts: Scripts, parser: RecordParser | None = None, metrics: Metrics | None = None
    ) -> None:
        self._client = client
        self._parser = parser or RecordParser()
        self._scripts = scripts
        self._metrics = metrics or Metrics()

    async def pick(self, entry: GroupEntry) -> int | None:
        """Any dead holder of the group, or None. A member that is no holder id is deleted; None then, too."""
        key = keys.dead(entry.group_id)
        member = await self._client.srandmember(key)
        if member is None:
            return None
        holder = self._parser.parse(RecordKind.DEAD_HOLDER, key, member, integer_of, member, "the holder's id")
        if holder is None:
            await self._scripts.forget_dead(key, member)
        return holder

    async def left(self, entry: GroupEntry) -> int:
        """How many dead holders of the group are still to be swept."""
        return await self._client.scard(keys.dead(entry.group_id))

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        """Sweep one dead holder on all shards; yield the number of blocks of each step. The caller sets the pace.

        It ends at once if the holder is not, or no longer, in ``dead``.
        """
        for shard in range(entry.shards):
            cursor, has_found = 0, False
            entries: list[tuple[bytes, bytes]] = []
            while True:
                cursor, found = await self._scan(entry, shard, holder, cursor)
                has_found = has_found or bool(found)
                entries += found
                while len(entries) >= STEP_BLOCKS or (entries and cursor == 0):
                    done = await self._step(entry, shard, holder, entries[:STEP_BLOCKS])
                    if done is None:
                        return
                    entries = entries[done:]
                    self._metrics.sweep_blocks.inc(done)
                    yield done
                if cursor == 0:
                    # After a failover the cursor is invalid, so entries can be missed. A shard is done when a whole
                    # scan finds no entry.
                    if not has_found:
                        break
                    has_found = False
            if await self._step(entry, shard, holder, []) is None:
                return
            self._parser.forget(keys.engine(entry.group_id, shard, holder))
        forgotten = await self._scripts.forget_dead(keys.dead(entry.group_id), holder)
        self._metrics.sweeps.inc(forgotten.numbers[0])

    async def _scan(
        self, entry: GroupEntry, shard: int, holder: int, cursor: int
    ) -> tuple[int, list[tuple[bytes, bytes]]]:
        """The next cursor; engine hashes of the holder, each with the key of its block."""
        engine, prefix = keys.engine(entry.group_id, shard, holder), keys.block_prefix(entry.group_id, shard)
        cursor, fields = await self._client.hscan(engine, cursor, SCAN_ENTRIES)
        entries = [
            (name, prefix + b"%016x" % block)
            for name, value in fields.items()
            if name != b"applied"
            and not name.startswith(b"*")
            and (block := self._parser.parse(RecordKind.ENTRY, engine, name, _block_key, name, value)) is not None
        ]
        return cursor, entries

    async def _step(self, entry: GroupEntry, shard: int, holder: int, entries: list[tuple[bytes, bytes]]) -> int | None:
        """Remove the holder from the first blocks, and return their number; None if it is not in ``dead``."""
        dead = keys.dead(entry.group_id)
        # On shard 0, which has `dead`, the script checks. No id is used again, so a check before the script is enough.
        if shard and not await self._client.sismember(dead, holder):
            return None
        outcome = await self._scripts.sweep_holder(
            keys.engine(entry.group_id, shard, holder),
            [block for _, block in entries],
            None if shard else dead,
            holder,
            [name for name, _ in entries],
        )
        return None if outcome.verdict is Verdict.GONE else outcome.numbers[0]


def _block_key(engine_hash: bytes, entry: bytes) -> int:
    if _ENGINE_HASH.fullmatch(engine_hash) is None:
        raise Malformed("the engine hash is no 16 hex digits")
    namespace, seq_hash = parse_entry(int(engine_hash, 16), entry)
    return namespace ^ seq_hash
