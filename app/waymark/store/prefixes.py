"""Opaque prefixes in Redis: the number of tokens of each prefix that a holder has, and the time at which this expires.

A prefix is a hash with a field for each holder. Its field ``until`` is the time at which the key itself expires. A
reader subtracts the key's TTL from ``until``. The result is the time by the clock of Redis, so the clock of the reader
does not matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from waymark.domain.prefixes import Change, PrefixChange
from waymark.store import keys
from waymark.store.leases import Grant
from waymark.store.parsing import pairs
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

#: Changes in one call. Redis needs about 2 ms for them.
CHANGES_MAX = 128
_EVICTED_SHARE = 10


class Prefixes:
    """The entries of all sources. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def apply(
        self, grant: Grant, hot: int, warm: int, changes: Sequence[PrefixChange], *, ttl_seconds: int
    ) -> int | None:
        """Apply at most ``CHANGES_MAX`` changes of one source.

        ``hot`` and ``warm`` are the ids of its two holders, on the device and in storage. Returns how many entries the
        source has afterwards; None if another worker has the stream.
        """
        args: list[str | int] = []
        for change in changes:
            args += (change.change, "" if change.tokens is None else change.tokens)
        outcome = await self._scripts.run(
            "apply_prefixes",
            **grant.fenced_call,
            prefixes=keys.opaque_prefixes(grant.group_id),
            hot=keys.opaque_prefixes(grant.group_id, hot),
            warm=keys.opaque_prefixes(grant.group_id, warm),
            prefix=[keys.opaque_prefix(grant.group_id, change.key) for change in changes],
            milliseconds=1000 * ttl_seconds,
            hot_holder=hot,
            warm_holder=warm,
            change=args,
        )
        if not grant.counted(outcome):
            return None
        hot_entries, warm_entries, _ = outcome.numbers
        return hot_entries + warm_entries

    async def oldest(self, grant: Grant, hot: int, warm: int, entries_max: int) -> list[PrefixChange]:
        """Return changes that remove the oldest tenth of ``entries_max`` entries: at most ``CHANGES_MAX``, oldest
        first.
        """
        few = min(CHANGES_MAX, max(1, entries_max // _EVICTED_SHARE))
        named = ((hot, Change.FORGET_HOT), (warm, Change.FORGET_WARM))
        replies = await self._client.several(
            ("ZRANGE", keys.opaque_prefixes(grant.group_id, holder), 0, few - 1, "WITHSCORES") for holder, _ in named
        )
        changes = [
            (float(end), PrefixChange(name.decode(), change))
            for (_, change), reply in zip(named, replies, strict=True)
            for name, end in pairs(reply)
        ]
        return [change for _, change in sorted(changes, key=lambda dated: dated[0])[:few]]

    async def count(self, group_ids: Sequence[int]) -> int:
        """Return how many opaque prefixes these groups have."""
        now = int(1000 * time.time())
        commands = [("ZCOUNT", keys.opaque_prefixes(group_id), now, "+inf") for group_id in group_ids]
        replies = await self._client.several(commands, is_lenient=True) if commands else []
        return sum(reply or 0 for reply in replies)

    async def read(self, group_id: int, key: str, *, until: float) -> dict[int, int]:
        """Return the tokens of a prefix by holder, of live entries. Raise TimeoutError at ``until``."""
        name = keys.opaque_prefix(group_id, key)
        async with asyncio.timeout_at(until):
            fields, milliseconds = await self._client.several([("HGETALL", name), ("PTTL", name)], is_lenient=True)
        return _entries(dict(pairs(fields)), milliseconds)


def _entries(fields: Mapping[bytes, bytes], milliseconds: int | None) -> dict[int, int]:
    """Return the live entries; ``milliseconds`` is the remaining time of the key."""
    end = fields.get(b"until", b"")
    if milliseconds is None or milliseconds < 0 or not end.isdigit():
        return {}
    now = int(end) - milliseconds
    entries: dict[int, int] = {}
    for holder, value in fields.items():
        tokens, _, end_ms = value.partition(b" ")
        if holder.isdigit() and tokens.isdigit() and end_ms.isdigit() and int(end_ms) > now:
            entries[int(holder)] = int(tokens)
    return entries
