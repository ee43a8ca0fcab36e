"""A store on both kinds of Redis, and a check that every key a test leaves behind is in the key table."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, client_of, snapshot, stream_of
from tests.store.key_table import KeyTable
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store


@pytest.fixture(scope="session")
def key_table() -> KeyTable:
    return KeyTable.read()


@pytest.fixture
async def redis(redis: Redis, key_table: KeyTable) -> AsyncIterator[Redis]:
    """As everywhere; what is there after the test is held against the key table of ``lua/README.md``."""
    yield redis
    strangers = key_table.strangers(await snapshot(redis))
    assert not strangers, f"not in the key table of lua/README.md: {strangers}"


@pytest.fixture
def shards() -> int:
    """Of new groups; a test that wants several says so with ``parametrize``."""
    return 1


@pytest.fixture
async def client(redis: Redis) -> AsyncIterator[RedisClient]:
    client = client_of(redis)
    yield client
    if client.reads is not None:
        client.reads.close()


@pytest.fixture
def store(client: RedisClient, shards: int) -> Store:
    return Store(client, shards=shards)


@pytest.fixture
async def stream(store: Store, redis: Redis) -> Stream:
    """pod-1's, leased by worker-1."""
    return await stream_of(store, redis)
