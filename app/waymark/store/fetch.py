"""Reads values of the index from Redis: one MGET per shard, over a read connection.

After an error (a moved slot, a loading Redis, a broken connection) the same commands are sent once more through
redis-py, which handles each such error.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import hiredis

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.packing import KEY_BYTES, unpack
from waymark.store import keys
from waymark.store.chain import ValueName, WantedValues
from waymark.store.directory import GroupEntry
from waymark.store.redis import errors
from waymark.store.redis.client import RedisClient
from waymark.store.redis.read_connection import Replies, ReplyReader, ReplyReceiver
from waymark.store.steps import Step, Waiting


class Fetched(NamedTuple):
    """The values that Redis returned for one request."""

    version: bytes | None
    """The version of the holder table; None if it was not requested, or there is no table."""
    values: list[bytes | None]
    """The rows of the heads, followed by the other requested values."""


class _ReadCommand(NamedTuple):
    """The MGET of one shard, or the HGET of the version."""

    prefix: bytes
    """The prefix of all keys of the shard."""
    words: tuple[str | bytes, ...]
    indexes: Sequence[int]
    """The position of each value among all values; empty for the version."""


class _CheckedReplies(Replies):
    """Reads the replies to commands. Raises InvalidResponse if a reply does not have the form of its command.

    ``sizes`` has the number of values of each command, and 0 for the command that reads the version.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(len(sizes))
        self._sizes = sizes

    def parsed(self, replies: list[Any]) -> list[Any]:
        for reply, size in zip(replies, self._sizes, strict=True):
            if size:
                _values(reply, size)
        return replies


class Fetch:
    """One request for values: a step, and the receiver of the replies."""

    __slots__ = ("_began", "_fetcher", "_is_sent", "_receiver", "asked", "done", "entry", "until", "with_version")

    def __init__(
        self, fetcher: Fetcher, entry: GroupEntry, asked: WantedValues, with_version: bool, deadline: float
    ) -> None:
        self._fetcher = fetcher
        self.entry = entry
        self.asked = asked
        self.with_version = with_version
        self.until = deadline

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        self._receiver = receiver
        self.done = receiver.done
        self._began = time.monotonic()
        self._is_sent = True
        if not self._fetcher.send(self):
            self._fetch_slowly()

    def set_result(self, fetched: Fetched) -> None:
        self.observe()
        self._receiver.set_result(fetched)

    def observe(self) -> None:
        """Record in the metrics how long the request has taken."""
        seconds, durations = time.monotonic() - self._began, self._fetcher.durations
        durations.sum += seconds
        durations.seen[bisect_left(durations.bounds, seconds)] += 1

    def set_exception(self, error: BaseException) -> None:
        if self._is_sent and isinstance(error, errors.RedisError):
            self._fetch_slowly()
        else:
            self._receiver.set_exception(error)

    def _fetch_slowly(self) -> None:
        self._is_sent = False
        Waiting(self._fetcher.fetch_slowly(self)).begin(self)


def _values(reply: Any, size: int) -> list[bytes | None]:
    if not isinstance(reply, list) or len(reply) != size:
        raise _no_reply(size)
    return reply


def _no_reply(size: int) -> errors.InvalidResponse:
    return errors.InvalidResponse(f"no reply to an MGET of {size} keys")


class _RowsReader:
    """Reads the replies to an MGET of ``rows`` rows and to an HGET of the version. Either command may be missing."""

    __slots__ = ("_rows", "_with_version", "count")

    def __init__(self, rows: int, with_version: bool) -> None:
        self._rows = rows
        self._with_version = with_version
        self.count = (rows > 0) + with_version

    def parsed(self, replies: list[Any]) -> Fetched:
        version = replies.pop() if self._with_version else None
        values = replies[0] if self._rows else []
        if not isinstance(values, list) or len(values) != self._rows:
            raise _no_reply(self._rows)
        return Fetched(version, values)


_rows_reader = lru_cache(256)(_RowsReader)


class _ValuesReader:
    """Reads the replies to any commands of one server."""

    __slots__ = ("_commands", "_with_version", "count")

    def __init__(self, commands: Sequence[_ReadCommand], with_version: bool) -> None:
        self._commands = commands
        self._with_version = with_version
        self.count = len(commands)

    def parsed(self, replies: list[Any]) -> Fetched:
        for reply, command in zip(replies, self._commands, strict=True):
            if command.indexes:
                _values(reply, len(command.indexes))
        return _merged(self._commands, replies, with_version=self._with_version)


class Fetcher:
    def __init__(self, client: RedisClient, metrics: Metrics) -> None:
        self._client = client
        self.durations = metrics.fetch_duration_seconds

    def fetch(self, entry: GroupEntry, asked: WantedValues, *, with_version: bool, until: float) -> Step:
        """Return the step that reads the values that ``asked`` names, with one request to each server.

        The result is a ``Fetched``. The errors are TimeoutError at ``until``, a time of the event loop's clock, and
        StoreUnavailable.
        """
        return Fetch(self, entry, asked, with_version, until)

    def send(self, fetch: Fetch) -> bool:
        """Send a request whose values are all on one server, if a connection to it is open."""
        entry, asked, with_version = fetch.entry, fetch.asked, fetch.with_version
        prefix, version = _of_group(entry.group_id, keys.ALL)
        if entry.shards == 1 and not asked.beside:  # the most frequent case: names packed in one call
            connection = self._client.connection(prefix)
            packed = _mget(prefix, asked.heads) if asked.heads else b""
            packed = packed + version if with_version else packed
            reader: ReplyReader[Fetched] = _rows_reader(len(asked.heads) // KEY_BYTES, with_version)
        else:
            commands = _commands(entry, asked, with_version=with_version)
            connections = {self._client.connection(command.prefix) for command in commands}
            connection = connections.pop() if len(connections) == 1 else None
            packed = b"".join([hiredis.pack_command(cast("Any", command.words)) for command in commands])
            reader = _ValuesReader(commands, with_version)
        if connection is None:
            return False
        connection.send(packed, reader, fetch, fetch.until)
        return True

    async def fetch_slowly(self, fetch: Fetch) -> Fetched:
        """Do what ``fetch`` does, from any servers, over connections that may have to be opened, and with one retry
        after any error.
        """
        asked, with_version, deadline = fetch.asked, fetch.with_version, fetch.until
        commands = _commands(fetch.entry, asked, with_version=with_version)
        try:
            replies = await self._ask(commands, deadline)
        except StoreUnavailable:
            async with asyncio.timeout_at(deadline):
                replies = await self._client.several([command.words for command in commands])
        return _merged(commands, replies, with_version=with_version)

    async def _ask(self, commands: Sequence[_ReadCommand], deadline: float) -> list[Any]:
        """Return the replies to commands for any servers. Raise StoreUnavailable if a reply is an error."""
        by_server: dict[object, list[int]] = {}
        for i, command in enumerate(commands):
            by_server.setdefault(self._client.server_of(command.prefix), []).append(i)
        calls = [self._ask_server([commands[i] for i in indexes], deadline) for indexes in by_server.values()]
        # Every reply is awaited, even after an error.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        replies: list[Any] = [None] * len(commands)
        for indexes, answer in zip(by_server.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            for i, reply in zip(indexes, answer, strict=True):
                replies[i] = reply
        return replies

    async def _ask_server(self, commands: Sequence[_ReadCommand], deadline: float) -> list[Any]:
        packed = b"".join([hiredis.pack_command(cast("Any", command.words)) for command in commands])
        reader = _CheckedReplies([len(command.indexes) for command in commands])
        return await self._client.ask(commands[0].prefix, packed, reader, deadline)


@lru_cache(1024)
def _of_group(group_id: int, _pattern: str) -> tuple[bytes, bytes]:
    """Return the prefix of the keys of a group's rows, and the packed HGET of the version of its holder table.

    ``_pattern`` is ``keys.ALL``. It is a parameter so that the cache has an entry for each prefix of the keys.
    """
    words = "HGET", keys.holders(group_id), "version"
    return keys.block_prefix(group_id, 0), hiredis.pack_command(cast("Any", words))


def _mget(prefix: bytes, heads: bytes) -> bytes:
    """Pack an MGET of at least one row; each name is ``prefix`` and the hex digits of one of the packed ``heads``."""
    # All names have the same length, so the bytes between the digits of two consecutive names are always the same.
    separator = b"\r\n$%d\r\n%b" % (len(prefix) + 2 * KEY_BYTES, prefix)
    digits = heads.hex(":", KEY_BYTES).encode().replace(b":", separator)
    return b"*%d\r\n$4\r\nMGET%b%b\r\n" % (len(heads) // KEY_BYTES + 1, separator, digits)


def _commands(entry: GroupEntry, asked: WantedValues, *, with_version: bool) -> list[_ReadCommand]:
    """Return one MGET for each shard with a value to read; the command for the version comes last."""
    names: list[ValueName] = [(head % entry.shards, b"%016x" % head) for head in unpack(asked.heads)]
    picked: dict[int, list[int]] = {}
    names += asked.beside
    for i, (shard, _) in enumerate(names):
        picked.setdefault(shard, []).append(i)
    commands = []
    for shard, indexes in picked.items():
        prefix = keys.block_prefix(entry.group_id, shard)
        commands.append(_ReadCommand(prefix, ("MGET", *[prefix + names[i][1] for i in indexes]), indexes))
    if with_version:
        words = "HGET", keys.holders(entry.group_id), "version"
        commands.append(_ReadCommand(keys.block_prefix(entry.group_id, 0), words, ()))
    return commands


def _merged(commands: Sequence[_ReadCommand], replies: list[Any], *, with_version: bool) -> Fetched:
    """Return the values of all replies, in the order in which ``asked`` names them."""
    values: list[bytes | None] = [None] * sum(len(command.indexes) for command in commands)
    for command, reply in zip(commands, replies, strict=True):
        if command.indexes:
            for i, value in zip(command.indexes, reply, strict=True):
                values[i] = value
    return Fetched(replies[-1] if with_version else None, values)
