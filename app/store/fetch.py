"""Block values out of Redis: one MGET per shard, packed and read with as little in between as can be.

The client library spends more on a command of 512 keys than all else a query does. So the bytes of the command are
made at once and sent over a connection that the library has opened, and the library's parser reads the reply. Any
error on the way (a slot that has moved, a Redis that loads, a connection that broke) sends the same questions once
more through the library, which knows what each of them means.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from app.domain.native import mget, pack, runs, unpack
from app.errors import StoreUnavailable
from app.metrics import Metrics
from app.store import keys
from app.store.client import Client
from app.store.hot import HotBlocks
from app.store.registry import GroupEntry


class Fetched(NamedTuple):
    """What Redis answered."""

    version: bytes | None
    """The table's; None where it was not asked for, or there is none."""
    runs: list[tuple[bytes, int]]
    """Runs of equal neighbours, (value, how many), up to the first block that nobody has."""


class _Question(NamedTuple):
    """What is asked of one shard."""

    shard: int
    keys: bytes
    indexes: Sequence[int]
    """Where the answers belong among all that is wanted."""
    with_version: bool

    def packed(self, group_id: int) -> bytes:
        command = mget(keys.block_prefix(group_id, self.shard), self.keys) if self.keys else b""
        if self.with_version:
            command += _hget(keys.holders(group_id), "version")
        return command

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
    """Asks Redis for blocks, except for those that are hot."""

    def __init__(self, client: Client, hot: HotBlocks, metrics: Metrics) -> None:
        self._client = client
        self._hot = hot
        self._metrics = metrics

    async def fetch(self, entry: GroupEntry, wanted: bytes, *, with_version: bool) -> tuple[Fetched, int]:
        """The values of the packed keys ``wanted``, each shard asked once, and how many round trips that took."""
        kept = self._hot.find(entry.group_id, wanted, time.monotonic())
        questions = _questions(entry, wanted, kept, with_version=with_version)
        replies: list[list[Any]] = []
        if questions:
            began = time.perf_counter()
            try:
                replies = await self._ask(entry.group_id, questions)
            except StoreUnavailable:
                replies = await self._ask_again(entry.group_id, questions)
            self._metrics.fetch_duration_seconds.observe(time.perf_counter() - began)
        version = replies[0].pop() if with_version else None
        if len(questions) == 1 and not kept:
            values = replies[0][0] if wanted else []
        else:
            values = _together(len(unpack(wanted)), kept, questions, replies)
        found = runs(values)
        self._hot.keep(entry.group_id, wanted, found, time.monotonic())
        return Fetched(version, found), int(bool(questions))

    def forget(self) -> None:
        """Forget what is hot."""
        self._hot.clear()

    async def _ask(self, group_id: int, questions: list[_Question]) -> list[list[Any]]:
        """The replies to each question; ``StoreUnavailable`` where any of them is an error."""
        if len(questions) == 1:
            return [await self._ask_one(group_id, questions)]
        by_server: dict[object, list[int]] = {}
        for i, question in enumerate(questions):
            by_server.setdefault(self._client.place(keys.block_prefix(group_id, question.shard)), []).append(i)
        each = [self._ask_one(group_id, [questions[i] for i in indexes]) for indexes in by_server.values()]
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

    async def _ask_one(self, group_id: int, questions: list[_Question]) -> list[Any]:
        """Over one connection: to where the first question's shard is."""
        async with self._client.lend(keys.block_prefix(group_id, questions[0].shard)) as connection:
            # Not the library's public calls: they keep a time each, and this query has a deadline.
            await connection._send_packed_command([b"".join([question.packed(group_id) for question in questions])])
            parser: Any = connection._parser
            replies = []
            for question in questions:
                for _ in range(_replies_to(question)):
                    reply = await parser.read_response()
                    if isinstance(reply, ResponseError):
                        raise reply
                    replies.append(reply)
            return replies

    async def _ask_again(self, group_id: int, questions: list[_Question]) -> list[list[Any]]:
        commands = [question.commands(group_id) for question in questions]
        replies = iter(await self._client.several([command for each in commands for command in each]))
        return [[next(replies) for _ in each] for each in commands]


def _hget(key: str, field: str) -> bytes:
    return b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key.encode(), len(field), field.encode())


def _replies_to(question: _Question) -> int:
    return bool(question.keys) + question.with_version


def _questions(entry: GroupEntry, wanted: bytes, kept: dict[int, bytes], *, with_version: bool) -> list[_Question]:
    """What is to be asked; the version first, of shard 0, where the table is."""
    if entry.shards == 1 and not kept:
        return [_Question(0, wanted, (), with_version)] if wanted or with_version else []
    picked: dict[int, list[int]] = {0: []} if with_version else {}
    numbers = unpack(wanted)
    for i, key in enumerate(numbers):
        if i not in kept:
            picked.setdefault(key % entry.shards, []).append(i)
    return [
        _Question(shard, pack([numbers[i] for i in indexes]), indexes, with_version and shard == 0)
        for shard, indexes in picked.items()
    ]


def _together(
    count: int, kept: dict[int, bytes], questions: list[_Question], replies: list[list[Any]]
) -> list[bytes | None]:
    """All values in the order in which they are wanted."""
    values: list[bytes | None] = [None] * count
    for i, value in kept.items():
        values[i] = value
    for question, answers in zip(questions, replies, strict=True):
        if question.keys:
            for i, value in zip(question.indexes, answers[0], strict=True):
                values[i] = value
    return values
