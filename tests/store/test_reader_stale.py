"""Reader, where Redis is now one and now another: what is remembered of the one is not believed of the other.

Two databases stand for two Redis behind one address: replicas of which one lags, a failover that lost the last
writes, one that came back empty. Which of them a request goes to is decided anew for each, on one connection too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import hiredis
import pytest
from redis.asyncio import Redis

from tests.store.factories import registration, stored, stream_of
from waymark.domain.match import conductor_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.store.hot import HotRows
from waymark.store.reader import Reader
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

CHAIN = list(range(1, 601))
MINE, THEIRS = GroupName("mine", "m"), GroupName("theirs", "m")


class Request(NamedTuple):
    """Whole commands, as they were sent."""

    bytes: bytes
    commands: int


class Switch:
    """Stands before two databases of one server; each request goes to the one that ``choose`` names then."""

    def __init__(self, path: Path) -> None:
        self.choose: Callable[[], int] = lambda: 0
        self._path = path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = [await asyncio.open_unix_connection(str(self._path)) for _ in range(2)]
        try:
            for number, (answers, backend) in enumerate(backends):
                backend.write(b"SELECT %d\r\n" % number)
                assert await answers.readline() == b"+OK\r\n"
            with suppress(ConnectionError):  # a client that has seen enough may reset the connection
                while request := await self._request(reader):
                    answers, backend = backends[self.choose()]
                    backend.write(request.bytes)
                    writer.write(await self._answers(answers, request.commands))
        finally:
            for _, backend in backends:
                backend.close()
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> Request | None:
        """What the client has sent, up to the end of a command. A request may arrive in pieces, or several as one."""
        parser, sent, commands = hiredis.Reader(), b"", 0
        while part := await reader.read(1 << 20):
            parser.feed(part)
            sent += part
            while parser.gets() is not False:
                commands += 1
            if not parser.has_data():
                return Request(sent, commands)
        return None

    async def _answers(self, answers: asyncio.StreamReader, commands: int) -> bytes:
        """All answers of one backend: the next request may go to the other, and its answers come after these."""
        parser, answered = hiredis.Reader(), b""
        while commands:
            part = await answers.read(1 << 20)
            assert part, "Redis has closed the connection"
            parser.feed(part)
            answered += part
            while parser.gets() is not False:
                commands -= 1
        return answered


@dataclass
class Pair:
    """The two Redis, each as a store of its own, and a reader that does not know which one it asks."""

    redis: list[Redis]
    stores: list[Store]
    switch: Switch
    reader: Reader

    async def hold(self, number: int, *held: tuple[GroupName, str, int]) -> None:
        """On one of them: instances of groups, in this order, each with so many blocks of the chain."""
        for group, instance_id, blocks in held:
            of = registration(instance_id, tenant_id=group.tenant_id)
            stream = await stream_of(self.stores[number], self.redis[number], of)
            (gpu,) = await stream.begin("0 GPU")
            await stream.apply(stored(gpu, CHAIN[:blocks]))

    async def ask(self, group: GroupName) -> dict[str, int] | None:
        """Rows by instance, in blocks; None where the group is not known."""
        left = list(CHAIN)

        def source(count: int) -> bytes:
            piece, left[:] = left[:count], left[count:]
            return pack(piece)

        reading = await self.reader.read(group, 16, source, deadline_seconds=30.0)
        if reading is None:
            return None
        return {instance: row.longest for instance, row in conductor_rows(reading.walk).items()}


@asynccontextmanager
async def pair_behind(path: Path, socket: Path) -> AsyncIterator[Pair]:
    switch = Switch(path)
    server = await asyncio.start_unix_server(switch.serve, str(socket))
    redis = [Redis(unix_socket_path=str(path), db=number, protocol=2) for number in range(2)]
    reading = Store(RedisClient.open(f"unix://{socket}"), hot=HotRows(60.0, 1 << 20))
    try:
        yield Pair(redis, [Store(RedisClient(each, "redis://test")) for each in redis], switch, reading.reader)
    finally:
        await reading.close()
        for each in redis:
            await each.aclose()
        server.close()


@pytest.fixture
async def pair(redis_url: str, redis_socket: Path) -> AsyncIterator[Pair]:
    async with pair_behind(redis_socket, redis_socket.with_name("switch.sock")) as pair:
        yield pair
    with suppress(FileNotFoundError):
        redis_socket.with_name("switch.sock").unlink()


def in_turn() -> Callable[[], int]:
    turns = cycle([0, 1])
    return lambda: next(turns)


async def test_ids_that_mean_other_tenants_on_the_other_redis_give_nobody_anothers_row(pair: Pair) -> None:
    """Group 1 is mine on the one and theirs on the other, and the holder ids are the same."""
    await pair.hold(0, (MINE, "pod-of-mine", 600), (THEIRS, "pod-of-theirs", 300))
    await pair.hold(1, (THEIRS, "pod-of-theirs", 200), (MINE, "pod-of-mine", 100))
    found: set[tuple[str, ...]] = set()
    for seed in range(30):
        dice = random.Random(seed)
        pair.switch.choose = in_turn() if seed == 0 else lambda dice=dice: dice.randrange(2)  # type: ignore[misc]
        for _ in range(5):
            for group in (MINE, THEIRS):
                rows = await pair.ask(group) or {}
                assert rows.keys() <= {f"pod-of-{group.tenant_id}"}
                found.add(tuple(rows))
    assert ("pod-of-mine",) in found
    for number, mine, theirs in ((0, 600, 300), (1, 100, 200), (0, 600, 300)):
        pair.switch.choose = lambda number=number: number  # type: ignore[misc]
        assert await pair.ask(MINE) == {"pod-of-mine": mine}, "from the first query on"
        assert await pair.ask(THEIRS) == {"pod-of-theirs": theirs}


async def test_many_queries_at_once_keep_tenants_apart_while_redis_changes(pair: Pair) -> None:
    await pair.hold(0, (MINE, "pod-of-mine", 600), (THEIRS, "pod-of-theirs", 600))
    await pair.hold(1, (THEIRS, "pod-of-theirs", 600), (MINE, "pod-of-mine", 600))
    dice = random.Random(7)
    pair.switch.choose = lambda: dice.randrange(2)
    groups = [MINE, THEIRS] * 20
    for _ in range(5):
        for group, rows in zip(groups, await asyncio.gather(*map(pair.ask, groups)), strict=True):
            assert (rows or {}).keys() <= {f"pod-of-{group.tenant_id}"}


async def test_after_a_failover_that_lost_writes_the_older_table_is_believed(pair: Pair) -> None:
    """The same group on both; the second lacks pod-2, and its next holder id is handed out to another."""
    await pair.hold(0, (MINE, "pod-1", 600), (MINE, "pod-2", 400))
    await pair.hold(1, (MINE, "pod-1", 600))
    assert await pair.ask(MINE) == {"pod-1": 600, "pod-2": 400}
    pair.switch.choose = lambda: 1
    assert await pair.ask(MINE) == {"pod-1": 600}, "what was lost is no longer told"
    await pair.hold(1, (MINE, "pod-3", 50))
    assert await pair.ask(MINE) == {"pod-1": 600, "pod-3": 50}, "and its holder id is now another's"


async def test_a_version_of_one_replica_is_not_taken_for_the_table_of_another(pair: Pair) -> None:
    """The word is asked of one, the table of the other: the table is kept under its own word, never under that one."""
    await pair.hold(0, (MINE, "pod-1", 600))
    await pair.hold(1, (MINE, "pod-1", 600), (MINE, "pod-2", 600))
    # With a table of the second remembered, the first is asked for the word, then the second for the table.
    pair.switch.choose = lambda: 1
    assert await pair.ask(MINE) == {"pod-1": 600, "pod-2": 600}
    pair.switch.choose = in_turn()
    for _ in range(4):
        assert set(await pair.ask(MINE) or {}) <= {"pod-1", "pod-2"}
    for number, instances in ((0, {"pod-1"}), (1, {"pod-1", "pod-2"})) * 2:
        pair.switch.choose = lambda number=number: number  # type: ignore[misc]
        assert set(await pair.ask(MINE) or {}) == instances, "seen by the next query"


async def test_a_redis_that_is_empty_now_and_then_knows_nobody_and_forgets_nothing(pair: Pair) -> None:
    await pair.hold(0, (MINE, "pod-1", 600))
    for number, expected in ((0, {"pod-1": 600}), (1, None), (0, {"pod-1": 600}), (1, None)):
        pair.switch.choose = lambda number=number: number  # type: ignore[misc]
        assert await pair.ask(MINE) == expected
