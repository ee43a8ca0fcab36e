"""MongoDB behind Redis: it gets every change in the end, whatever it did meanwhile, and has what Redis has lost.

No MongoDB can be installed where these tests run. mongomock, which does not know what pymongo sends to write several
documents, has what is read; the rest runs against a server of ours that speaks MongoDB's wire protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import mongomock
import pytest
from pymongo import MongoClient
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.gateway.mongo_server import MongoServer, mongo_server
from tests.patience import patient
from waymark.base.errors import RemoteUnavailable, SettingsError, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.gateway.mongo import MongoArchive, MongoOptions
from waymark.gateway.responses import RedisResponses
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.responses import ResponseBounds
from waymark.store.store import Store

pytestmark = pytest.mark.outside

NAME, OTHER = "1" * 32, "2" * 32


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield redis


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(RedisClient(redis, "redis://test"))


def archive_of(store: Store, collection: Any, *, milliseconds: int = 20_000, claim_ms: int = 60_000) -> MongoArchive:
    options = {"ttl_seconds": 3600, "milliseconds": milliseconds, "claim_ms": claim_ms}
    return MongoArchive(store.responses, collection, Metrics(), **options, poll_seconds=0.02)


def place_of(store: Store, archive: MongoArchive, entries_max: int = 100) -> RedisResponses:
    return RedisResponses(store.responses, ResponseBounds(3_600_000, entries_max, 1_000_000, 1000), Metrics(), archive)


@asynccontextmanager
async def copying(archive: MongoArchive) -> AsyncIterator[None]:
    task = asyncio.create_task(archive.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def waiting(redis: Redis) -> int:
    """Changes that MongoDB does not have yet."""
    return int(await redis.xlen(keys.RESPONSES_QUEUE))


async def is_copied(redis: Redis) -> bool:
    return not await waiting(redis)


async def test_what_redis_has_lost_comes_back_from_there(store: Store, redis: Redis) -> None:
    collection: Any = mongomock.MongoClient(tz_aware=True).db.responses
    place = place_of(store, archive_of(store, collection))
    now = datetime.now(UTC)
    collection.insert_one({"_id": NAME, "response": b"{}", "until": now + timedelta(hours=1)})
    collection.insert_one({"_id": OTHER, "response": b"{}", "until": now - timedelta(hours=1)})
    assert [await place.find(name) for name in (NAME, OTHER, "3" * 32)] == [b"{}", None, None]
    assert await store.responses.find([NAME]) == [b"{}"]
    assert await redis.pttl(keys.RESPONSES_KEPT) > 0
    assert await waiting(redis) == 0, "what came from there does not go there again"


# ---- over the wire -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> MongoServer:
    return MongoServer()


@pytest.fixture
def clients() -> Iterator[list[MongoClient[Any]]]:
    found: list[MongoClient[Any]] = []
    yield found
    for client in found:
        client.close()


def wired(store: Store, clients: list[MongoClient[Any]], url: str, milliseconds: int) -> MongoArchive:
    times: dict[str, Any] = dict.fromkeys(
        ("serverSelectionTimeoutMS", "connectTimeoutMS", "socketTimeoutMS"), milliseconds
    )
    clients.append(MongoClient(url, tz_aware=True, connect=False, **times))
    return archive_of(store, clients[-1].waymark.responses, milliseconds=milliseconds)


LONG = 20_000


async def test_what_is_kept_and_deleted_arrives(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]]
) -> None:
    async with mongo_server(server) as url:
        archive = wired(store, clients, url, round(patient(LONG)))
        place = place_of(store, archive)
        await place.keep(NAME, b'{"a":1}')
        await place.keep(OTHER, b'{"b":1}')
        async with copying(archive):
            await wait_until(lambda: is_copied(redis), "both are copied", 20)
            found = {name: bytes(each["response"]) for name, each in server.documents.items()}
            assert found == {NAME: b'{"a":1}', OTHER: b'{"b":1}'}
            assert [index["expireAfterSeconds"] for index in server.indexes] == [0]
            await place.delete(NAME)
            assert await place.find(NAME) is None, "it is deleted at once, though MongoDB has it still"
            await wait_until(lambda: is_copied(redis), "the deletion is copied", 20)
        assert server.documents.keys() == {OTHER}
        await redis.delete(keys.RESPONSES_KEPT)
        assert await place.find(OTHER) == b'{"b":1}'


async def test_another_gateway_copies_what_one_left_behind(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]]
) -> None:
    async with mongo_server(server) as url:
        archive = wired(store, clients, url, round(patient(LONG)))
        archive._claim_ms = 1
        await place_of(store, archive).keep(NAME, b"{}")
        assert len(await store.responses.take("a gateway that has died", 10, idle_ms=60_000)) == 1
        async with copying(archive):
            await wait_until(lambda: is_copied(redis), "the other one has copied it", 20)
        assert server.documents.keys() == {NAME}


@pytest.mark.parametrize("fault", ["away", "slow", "full"])
async def test_nothing_is_lost_while_it_is_of_no_use(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]], fault: str
) -> None:
    async with mongo_server(server) as url:
        pass  # a port on which nobody listens now
    archive = wired(store, clients, url, 300)
    place = place_of(store, archive)
    server.is_slow, server.is_full = fault == "slow", fault == "full"

    def failed() -> bool:
        outcome = {"outcome": "failed"}
        return bool(archive._metrics.registry.get_sample_value("waymark_responses_copied_total", outcome))

    async with copying(archive):
        if fault == "away":
            await place.keep(NAME, b"{}")
            await wait_until(failed, "it has been tried", 20)
            with pytest.raises(RemoteUnavailable, match="MongoDB cannot be used"):
                await place.find(OTHER)
            assert (await place.find(NAME), await waiting(redis)) == (b"{}", 1)
        async with mongo_server(server):
            if fault != "away":
                await place.keep(NAME, b"{}")
                await wait_until(failed, "it has been tried", 20)
                assert (await place.find(NAME), await waiting(redis), server.documents) == (b"{}", 1, {})
                server.is_slow = server.is_full = False
            await wait_until(lambda: is_copied(redis), "it is copied in the end", 60)
    assert bytes(server.documents[NAME]["response"]) == b"{}"


async def test_a_full_store_waits_for_mongodb_and_says_so(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]]
) -> None:
    async with mongo_server(server) as url:
        archive = wired(store, clients, url, round(patient(LONG)))
        place = place_of(store, archive, entries_max=1)
        assert await place.keep(NAME, b"{}")
        assert not await place.keep(OTHER, b"{}")
        with pytest.raises(StoreUnavailable, match="raise responses in WAYMARK_ANSWERS_BYTES"):
            await place.delete(OTHER)
        async with copying(archive):
            await wait_until(lambda: is_copied(redis), "the first is copied", 20)
            assert await place.keep(OTHER, b'{"b":1}')
            await wait_until(lambda: is_copied(redis), "the other is copied", 20)
        assert [await place.find(name) for name in (NAME, OTHER)] == [b"{}", b'{"b":1}']


async def test_a_late_copy_does_not_undo_a_deletion(
    store: Store, server: MongoServer, clients: list[MongoClient[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mongo_server(server) as url:
        slow, other = [wired(store, clients, url, round(patient(LONG))) for _ in range(2)]
        place = place_of(store, slow)
        await place.keep(NAME, b"{}")
        loop, write = asyncio.get_running_loop(), slow._write
        writes: list[dict[str, bytes | None]] = []

        async def delete() -> None:
            await place.delete(NAME)
            await other._copy(await store.responses.take("other", 10, idle_ms=60_000))

        def write_late(values: dict[str, bytes | None]) -> None:
            writes.append(values)
            if len(writes) == 1:
                asyncio.run_coroutine_threadsafe(delete(), loop).result()
            write(values)

        monkeypatch.setattr(slow, "_write", write_late)
        await slow._copy(await store.responses.take("slow", 10, idle_ms=60_000))
        assert (writes, server.documents) == ([{NAME: b"{}"}, {NAME: b""}], {})


async def test_a_deletion_outlives_its_mark(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]]
) -> None:
    async with mongo_server(server) as url:
        archive = wired(store, clients, url, round(patient(LONG)))
        place = place_of(store, archive)
        for name in (NAME, OTHER):
            await place.keep(name, b"{}")
        await archive._copy(await store.responses.take("one", 10, idle_ms=60_000))
        assert server.documents.keys() == {NAME, OTHER}
        await place.delete(NAME)
        await place.keep(OTHER, b'{"b":1}')
        await redis.delete(keys.RESPONSES, keys.RESPONSES_KEPT, keys.RESPONSES_DUE, keys.RESPONSES_COPIED)
        await archive._copy(await store.responses.take("one", 10, idle_ms=60_000))
        assert server.documents.keys() == {OTHER}, "what Redis has only lost is left as it is"


async def test_a_long_queue_is_copied_in_parts(
    store: Store, redis: Redis, server: MongoServer, clients: list[MongoClient[Any]]
) -> None:
    async with mongo_server(server) as url:
        archive = wired(store, clients, url, round(patient(LONG)))
        place = place_of(store, archive)
        for number in range(25):
            await place.keep(f"{number:032}", b"{}")
        entries = await store.responses.take("one", 100, idle_ms=60_000)
        server.writes_max = 2
        with pytest.raises(RemoteUnavailable):
            await archive._copy(entries)
        assert (len(server.documents), await waiting(redis)) == (20, 5), (
            "the parts that were copied are out of the queue"
        )
        server.writes_max = None
        await archive._copy(entries)
        assert (len(server.documents), await waiting(redis)) == (25, 0)


@pytest.mark.parametrize(
    ("url", "milliseconds"),
    [
        ("mongodb://db/waymark", 500),
        ("mongodb://db/waymark?timeoutMS=2000&w=1", 2000),
        ("mongodb://db/?w=1&timeoutms=70", 70),
        ("mongodb://db/?xtimeoutMS=70", 500),
        ("mongodb://db/timeoutMS=70", 500),
    ],
)
def test_the_url_has_the_time_of_an_operation(url: str, milliseconds: int) -> None:
    assert MongoOptions(url, 1).milliseconds == milliseconds


async def test_a_url_that_is_none_ends_the_start(store: Store) -> None:
    with pytest.raises(SettingsError, match="WAYMARK_RESPONSES_MONGO_URL cannot be used"):
        MongoArchive.open(MongoOptions("postgres://db", 1), Metrics(), store)


@pytest.mark.parametrize(("path", "name"), [("", "waymark.responses"), ("/other", "other.responses")])
async def test_the_url_names_the_database(store: Store, path: str, name: str) -> None:
    archive = MongoArchive.open(MongoOptions(f"mongodb://127.0.0.1:1{path}", 1), Metrics(), store)
    assert archive._collection.full_name == name
    archive.close()
