"""A primary behind three Sentinels: who it is, is found out again by itself when it has been another."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.store.factories import registration, stored
from tests.store.flow import BLOCKS, applied, asked, begun, granted, live_and_end
from tests.topologies import Sentinels, farm, start_sentinels
from waymark.base import endpoints
from waymark.base.errors import StoreUnavailable
from waymark.store.redis.client import RedisClient
from waymark.store.redis.credentials import Credentials
from waymark.store.store import Store

PASSWORD = "of-the-sentinels"


@pytest.fixture(scope="module")
def watched() -> Iterator[Sentinels]:
    with farm() as servers:
        yield start_sentinels(servers, password=PASSWORD)


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD + "\n")
    return Credentials(sentinel_password_file=secret)


@pytest.fixture
async def store(watched: Sentinels, credentials: Credentials) -> AsyncIterator[Store]:
    store = Store.open(watched.url, watched.url + "?role=replica", credentials=credentials, timeout_seconds=2.0)
    yield store
    await store.close()


async def test_all_that_the_roles_do_works_behind_sentinels(watched: Sentinels, credentials: Credentials) -> None:
    store = Store.open(watched.url, credentials=credentials)
    await live_and_end(store, 1)
    await store.close()
    watched.primary.ask("FLUSHALL")


async def test_sentinels_ask_for_a_password_of_their_own(watched: Sentinels) -> None:
    client = RedisClient.open(watched.url)
    with pytest.raises(StoreUnavailable, match="for Sentinels WAYMARK_REDIS_SENTINEL"):
        await client.ping()
    await client.close()


async def test_the_names_of_sentinels_are_looked_up_as_those_of_engines_are(
    watched: Sentinels, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(endpoints, "getaddrinfo", lambda *_, **__: found)
    client = RedisClient.open(watched.url.replace("127.0.0.1", "sentinel.test"), credentials=credentials)
    await client.ping()
    await client.close()


async def test_a_silent_sentinel_keeps_nobody_waiting(watched: Sentinels, credentials: Credentials) -> None:
    watched.sentinels[0].pause()
    try:
        # Each connection asks the Sentinels; were they asked in turn, the silent one would take the whole time.
        client = RedisClient.open(watched.url, credentials=credentials, timeout_seconds=60.0)
        await wait_until(lambda: _pings(client), "the others have answered", 20.0)
        await client.close()
    finally:
        watched.sentinels[0].resume()


async def _pings(client: RedisClient) -> bool:
    await client.ping()
    return True


@pytest.mark.long
async def test_a_replica_takes_over_and_everything_goes_on(watched: Sentinels, store: Store) -> None:
    """The last one: afterwards the primary is gone."""
    await store.registry.register(registration())
    grant = await granted(store, "pod-1")
    (gpu,) = await begun(store, grant, "0 GPU")
    await applied(store, grant, stored(gpu, BLOCKS))

    async def is_read() -> bool:
        try:
            return await asked(store) == {"pod-1": 600}
        except StoreUnavailable:
            return False

    await wait_until(is_read, "the replica has it", 20.0)
    served = watched.replica.info("commandstats")["cmdstat_mget"]["calls"]
    assert served > 0, "queries go to the replica"

    watched.primary.kill()

    async def is_written() -> bool:
        try:
            heir = await granted(store, "pod-1", "worker-2", force=True)
            await applied(store, heir, stored(gpu, [601], seq=2))
        except StoreUnavailable:
            return False
        return True

    await wait_until(is_written, "the replica has taken over", 40.0)
    assert watched.replica.info("replication")["role"] == "master"
    await wait_until(is_read, "it answers queries, too", 20.0)
    assert await store.check() == []
