"""Reads the values of blocks from Redis: one MGET per shard, packed and parsed by our own code.

redis-py spends more time on a command of 512 keys than the rest of a query takes. So this module packs the whole
command at once, sends it over a read connection, and scans the reply in its buffer. After an error (a slot that has
moved, a Redis that is loading, a broken connection) the same commands are sent once more through redis-py, which
handles each of these errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import InvalidResponse

from waymark.domain.keys import KEY_BYTES, pack, unpack
from waymark.domain.match import value_runs
from waymark.errors import StoreUnavailable
from waymark.metrics import Metrics
from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.directory import GroupEntry
from waymark.store.hot import HotBlocks
from waymark.store.incarnation import Incarnation
from waymark.store.read_connection import Replies
from waymark.store.wire import hget, mget, scan


class Fetched(NamedTuple):
    """What Redis answered."""

    version: bytes | None
    """The version of the holder table; None if it was not asked for, or there is no table."""
    runs: list[tuple[bytes, int]]
    """(value, how many consecutive blocks have it), up to the first block without a holder."""
    found: int
    """The number of blocks in ``runs``."""


def _fetched(version: bytes | None, values: list[bytes | None]) -> Fetched:
    found = value_runs(values)
    return Fetched(version, found, sum(length for _, length in found))


class _Blocks:
    """A ``ReplyReader`` for an MGET of so many keys, and for the HGET of the version if one follows."""

    __slots__ = ("_keys", "_with_version", "count")

    def __init__(self, keys: int, with_version: bool) -> None:
        self._keys = keys
        self._with_version = with_version
        self.count = (keys > 0) + with_version

    def scan(self, data: bytes) -> tuple[Fetched, int] | None:
        found = scan(data, self._keys, self._with_version)
        if found is None:
            return None
        version, values, blocks, end = found
        return Fetched(version, values, blocks), end

    def parsed(self, replies: list[Any]) -> Fetched:
        version = replies.pop() if self._with_version else None
        return _fetched(version, _values(replies[0], self._keys) if replies else [])


def _values(reply: Any, count: int) -> list[bytes | None]:
    """Check the reply to an MGET: a connection that is out of step would return the reply to another command."""
    if not isinstance(reply, list) or len(reply) != count:
        raise InvalidResponse(f"no reply to an MGET of {count} keys")
    return reply


class _Question(NamedTuple):
    """The keys to read from one shard."""

    shard: int
    keys: bytes
    indexes: Sequence[int]
    """The position of each value among all keys of the query."""
    with_version: bool

    def packed(self, group_id: int) -> bytes:
        command = mget(keys.block_prefix(group_id, self.shard), self.keys) if self.keys else b""
        return command + hget(keys.holders(group_id).encode(), b"version") if self.with_version else command

    def commands(self, group_id: int) -> list[tuple[str | bytes, ...]]:
        """The same for the client library."""
        prefix = keys.block_prefix(group_id, self.shard)
        commands: list[tuple[str | bytes, ...]] = []
        if self.keys:
            commands.append(("MGET", *(b"%b%016x" % (prefix, key) for key in unpack(self.keys))))
        if self.with_version:
            commands.append(("HGET", keys.holders(group_id), "version"))
        return commands


class Fetcher:
    """Reads blocks from Redis, except for hot blocks, which are in memory."""

    def __init__(self, client: RedisClient, incarnation: Incarnation, hot: HotBlocks, metrics: Metrics) -> None:
        self._client = client
        self._incarnation = incarnation
        self._hot = hot
        self._metrics = metrics

    async def fetch(self, entry: GroupEntry, wanted: bytes, *, with_version: bool, until: float) -> tuple[Fetched, int]:
        """Read the values of the packed keys ``wanted``, with one request to each shard.

        Returns the values and the number of round trips, 0 or 1. Raises TimeoutError at ``until``, a time of the event
        loop's clock, and StoreUnavailable.
        """
        began = time.monotonic()
        changes = self._incarnation.changes
        kept = self._hot.find(entry.group_id, wanted, began)
        questions = _questions(entry, wanted, kept, with_version=with_version)
        if not questions:
            return _fetched(None, list(kept.values())), 0
        is_whole = len(questions) == 1 and not kept
        try:
            if is_whole:
                question = questions[0]
                fetched = await self._client.ask(
                    keys.block_prefix(entry.group_id, question.shard),
                    question.packed(entry.group_id),
                    _Blocks(len(wanted) // KEY_BYTES, with_version),
                    until,
                )
            else:
                replies = await self._ask(entry.group_id, questions, until)
                fetched = _together(len(wanted) // KEY_BYTES, kept, questions, replies)
        except StoreUnavailable:
            async with asyncio.timeout_at(until):
                replies = await self._ask_again(entry.group_id, questions)
            fetched = _together(len(wanted) // KEY_BYTES, kept, questions, replies)
        ended = time.monotonic()
        self._metrics.fetch_duration_seconds.observe(ended - began)
        if changes == self._incarnation.changes:
            self._hot.keep(entry.group_id, wanted, fetched.runs, ended)
        return fetched, 1

    async def _ask(self, group_id: int, questions: list[_Question], until: float) -> list[list[Any]]:
        """The replies to each question. Raises StoreUnavailable if one of them is an error."""
        by_server: dict[object, list[int]] = {}
        for i, question in enumerate(questions):
            by_server.setdefault(self._client.place(keys.block_prefix(group_id, question.shard)), []).append(i)
        each = [self._ask_server(group_id, [questions[i] for i in indexes], until) for indexes in by_server.values()]
        if len(each) == 1:
            answers: list[list[Any] | BaseException] = [await each[0]]
        else:
            answers = await asyncio.gather(*each, return_exceptions=True)
        replies: list[list[Any]] = [[] for _ in questions]
        for indexes, answer in zip(by_server.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            left = iter(answer)
            for i in indexes:
                replies[i] = [next(left) for _ in range(_replies_to(questions[i]))]
        return replies

    async def _ask_server(self, group_id: int, questions: list[_Question], until: float) -> list[Any]:
        """Ask the server of the first question's shard, over one connection."""
        return await self._client.ask(
            keys.block_prefix(group_id, questions[0].shard),
            b"".join([question.packed(group_id) for question in questions]),
            Replies(sum(map(_replies_to, questions))),
            until,
        )

    async def _ask_again(self, group_id: int, questions: list[_Question]) -> list[list[Any]]:
        commands = [question.commands(group_id) for question in questions]
        replies = iter(await self._client.several([command for each in commands for command in each]))
        return [[next(replies) for _ in each] for each in commands]


def _replies_to(question: _Question) -> int:
    return bool(question.keys) + question.with_version


def _questions(entry: GroupEntry, wanted: bytes, kept: dict[int, bytes], *, with_version: bool) -> list[_Question]:
    """The questions to the shards; the first one is to shard 0, which has the table, if the version is asked for."""
    if entry.shards == 1 and not kept:
        return [_Question(0, wanted, range(len(wanted) // KEY_BYTES), with_version)] if wanted or with_version else []
    picked: dict[int, list[int]] = {0: []} if with_version else {}
    numbers = unpack(wanted)
    for i, key in enumerate(numbers):
        if i not in kept:
            picked.setdefault(key % entry.shards, []).append(i)
    return [
        _Question(shard, pack([numbers[i] for i in indexes]), indexes, with_version and shard == 0)
        for shard, indexes in picked.items()
    ]


def _together(count: int, kept: dict[int, bytes], questions: list[_Question], replies: list[list[Any]]) -> Fetched:
    """The values in the order of the keys."""
    version = replies[0].pop() if questions[0].with_version else None
    values: list[bytes | None] = [None] * count
    for i, value in kept.items():
        values[i] = value
    for question, answers in zip(questions, replies, strict=True):
        if question.keys:
            for i, value in zip(question.indexes, answers[0], strict=True):
                values[i] = value
    return _fetched(version, values)
