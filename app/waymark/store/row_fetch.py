"""Reads values of the index from Redis: one MGET per shard, over a read connection.

After an error (a slot that has moved, a Redis that is loading, a broken connection) the same commands are sent once
more through redis-py, which handles each of these errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import hiredis
from redis.exceptions import InvalidResponse

from waymark.errors import StoreUnavailable
from waymark.metrics import Metrics
from waymark.store import keys
from waymark.store.chain import Name
from waymark.store.client import RedisClient
from waymark.store.directory import GroupEntry
from waymark.store.read_connection import Replies


class Fetched(NamedTuple):
    """What Redis answered."""

    version: bytes | None
    """The version of the holder table; None if it was not asked for, or there is no table."""
    values: list[bytes | None]
    """In the order of the names."""


class _Command(NamedTuple):
    """The MGET of one shard, or the HGET of the version."""

    prefix: bytes
    """Of the shard's keys."""
    words: tuple[bytes, ...]
    indexes: Sequence[int]
    """The position of each value among all names; none for the version."""


class _Values(Replies):
    """The replies to commands, checked: a connection that is out of step would return those to others."""

    def __init__(self, commands: Sequence[_Command]) -> None:
        super().__init__(len(commands))
        self._sizes = [len(command.indexes) for command in commands]

    def parsed(self, replies: list[Any]) -> list[Any]:
        for reply, size in zip(replies, self._sizes, strict=True):
            if size and not (isinstance(reply, list) and len(reply) == size):
                raise InvalidResponse(f"no reply to an MGET of {size} keys")
        return replies


class RowFetcher:
    def __init__(self, client: RedisClient, metrics: Metrics) -> None:
        self._client = client
        self._duration = metrics.fetch_duration_seconds

    async def fetch(self, entry: GroupEntry, names: Sequence[Name], *, with_version: bool, until: float) -> Fetched:
        """Read the values of ``names``, with one request to each server.

        Raises TimeoutError at ``until``, a time of the event loop's clock, and StoreUnavailable.
        """
        began = time.monotonic()
        commands = _commands(entry, names, with_version=with_version)
        try:
            if entry.shards == 1:
                replies = await self._ask(commands, until)
            else:
                replies = await self._ask_servers(commands, until)
        except StoreUnavailable:
            async with asyncio.timeout_at(until):
                replies = await self._client.several([command.words for command in commands])
        self._duration.observe(time.monotonic() - began)
        version = cast("bytes | None", replies.pop()) if with_version else None
        if len(replies) == 1:
            return Fetched(version, replies[0])
        values: list[bytes | None] = [None] * len(names)
        for command, reply in zip(commands, replies, strict=False):
            for i, value in zip(command.indexes, reply, strict=True):
                values[i] = value
        return Fetched(version, values)

    async def _ask(self, commands: Sequence[_Command], until: float) -> list[Any]:
        """The replies to commands for one server, over one connection. Raises StoreUnavailable if one is an error."""
        packed = b"".join([hiredis.pack_command(cast("Any", command.words)) for command in commands])
        return await self._client.ask(commands[0].prefix, packed, _Values(commands), until)

    async def _ask_servers(self, commands: Sequence[_Command], until: float) -> list[Any]:
        """As ``_ask``, for commands to one or several servers."""
        by_server: dict[object, list[int]] = {}
        for i, command in enumerate(commands):
            by_server.setdefault(self._client.place(command.prefix), []).append(i)
        each = [self._ask([commands[i] for i in indexes], until) for indexes in by_server.values()]
        # Every answer is waited for, also behind an error.
        answers = await asyncio.gather(*each, return_exceptions=True)
        replies: list[Any] = [None] * len(commands)
        for indexes, answer in zip(by_server.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            for i, reply in zip(indexes, answer, strict=True):
                replies[i] = reply
        return replies


def _commands(entry: GroupEntry, names: Sequence[Name], *, with_version: bool) -> list[_Command]:
    """One MGET for each shard with names; the version's command comes last."""
    shards: dict[int, Sequence[int]]
    if entry.shards == 1:
        shards = {0: range(len(names))} if names else {}
    else:
        picked: dict[int, list[int]] = {}
        for i, (shard, _) in enumerate(names):
            picked.setdefault(shard, []).append(i)
        shards = dict(picked)
    commands = []
    for shard, indexes in shards.items():
        prefix = keys.block_prefix(entry.group_id, shard)
        commands.append(_Command(prefix, (b"MGET", *[prefix + names[i][1] for i in indexes]), indexes))
    if with_version:
        words = b"HGET", keys.holders(entry.group_id).encode(), b"version"
        commands.append(_Command(keys.block_prefix(entry.group_id, 0), words, ()))
    return commands
