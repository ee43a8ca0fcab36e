"""The contact point with Redis: what a failure becomes, in which time, and what it never says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.listening import listening, port_of
from tests.patience import patient, within
from tests.proxy import proxy_to
from tests.store.factories import GROUP, registration
from tests.topologies import Server, farm, follow
from waymark.base import endpoints
from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.address import parse
from waymark.store.redis.client import REPEATABLE, SCRIPTS, RedisClient, Reply
from waymark.store.redis.connect import server
from waymark.store.redis.credentials import Credentials
from waymark.store.reservations import Offer, Reservations, ReservationTerms, packed_behind
from waymark.store.scripts import Scripts, Verdict
from waymark.store.selections import Selections
from waymark.store.steps import Step, Steps, finished
from waymark.store.store import Store


@pytest.fixture
async def silent_port() -> AsyncIterator[int]:
    """Something that accepts connections and never says a word."""

    async def accept(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with listening(accept) as server:
        yield port_of(server)


async def check_unavailable(store: Store) -> None:
    """Every way to Redis ends in our error, and ends."""
    ways: list[Callable[[], Awaitable[object]]] = [
        lambda: store.registry.register(registration()),
        lambda: store.directory.registrations(),
        lambda: store.directory.is_tenant_known("default"),
        lambda: store.read_incarnation(),
        lambda: store.reader.read(GROUP, 16, lambda n: b"", deadline_seconds=5.0),
    ]
    async with within(20):
        for way in ways:
            with pytest.raises(StoreUnavailable) as caught:
                await way()
            assert caught.value.retry_after_seconds >= 1
        (reason,) = await store.check()
    assert "is unavailable or answers with an error" in reason


async def test_a_redis_that_is_away_is_unavailable(free_port: int) -> None:
    store = Store.open(f"redis://127.0.0.1:{free_port}", timeout_seconds=0.5)
    await check_unavailable(store)
    await store.close()


async def test_a_redis_that_says_nothing_is_unavailable_in_bounded_time(silent_port: int) -> None:
    store = Store.open(f"redis://127.0.0.1:{silent_port}", timeout_seconds=0.05)
    await check_unavailable(store)
    await store.close()


async def test_the_name_of_redis_is_looked_up_as_those_of_engines_are(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop has few threads for it, waits for them when it ends, and asks again where nobody answers."""
    asked: list[str] = []
    is_over = threading.Event()

    def looked_up(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        if host == "silent.test":
            is_over.wait(600)
        # Nothing listens at the first one.
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("127.0.0.9", "127.0.0.1")]

    for module in (socket, endpoints):
        monkeypatch.setattr(module, "getaddrinfo", looked_up, raising=False)
    silent = Store.open("redis://silent.test:6379", timeout_seconds=0.05)
    store = Store.open(redis_url.replace("127.0.0.1", "redis.test"), timeout_seconds=patient(2.0))
    try:
        for _ in range(3):
            await check_unavailable(silent)
        assert asked == ["silent.test"]
        assert await store.directory.registrations() == []
        assert await store.reader.read(GROUP, 16, lambda n: b"", deadline_seconds=patient(5.0)) is None
    finally:
        is_over.set()
        await silent.close()
        await store.close()


async def test_an_error_that_redis_answers_is_unavailable_too(redis: Redis, store: Store) -> None:
    await redis.set(keys.GROUPS, "not a hash")
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        await store.directory.group(GROUP)
    await redis.delete(keys.GROUPS)


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_connection_that_broke_is_made_again(redis: Redis, redis_url: str) -> None:
    client = RedisClient.open(redis_url)
    await client.ping()
    await redis.client_kill_filter(_type="normal", skipme=True)
    await client.ping()
    await client.close()


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_read_that_fails_on_its_connection_is_repeated_by_redis_py(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.hset("names", mapping={"a": "1"})
    store = Store.open(redis_url)
    asked: list[bytes] = []

    def failing(packed: bytes, *_: object) -> Any:
        asked.append(packed)
        raise ConnectionError("the server is loading")

    assert store.client.reads is not None
    monkeypatch.setattr(store.client.reads, "ask", failing)
    assert await store.client.hget("names", "a") == b"1"
    assert await store.client.hgetall("names") == {b"a": b"1"}
    assert len(asked) == 2, "both were tried on the connection first"
    await redis.delete("names")
    await store.close()


async def test_a_script_that_redis_forgot_is_loaded_again(redis: Redis, store: Store) -> None:
    incarnation = await store.read_incarnation()
    await redis.script_flush()
    assert await store.read_incarnation() == incarnation
    assert await store.registry.register(registration())


async def test_check_loads_every_script(redis: Redis, store: Store) -> None:
    await redis.script_flush()
    assert await store.check() == []
    assert all(await redis.script_exists(*(script.sha for script in SCRIPTS.values())))


async def test_commands_in_one_round_trip_fail_as_one(redis: Redis, client: RedisClient) -> None:
    with pytest.raises(StoreUnavailable):
        await client.several([("PING",), ("HGET", "only-a-key"), ("PING",)])
    assert await client.several([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]
    assert await client.several([]) == []


async def test_a_word_on_the_channel_is_heard(store: Store, client: RedisClient) -> None:
    async with client.subscription(keys.CONTROL) as subscription:
        await subscription.get_message(seconds=5)  # the subscription itself
        await store.registry.register(registration())
        async with within(10):
            while (heard := await subscription.get_message(seconds=1)) is None:
                continue
        assert heard["data"] == b"registered"


async def test_every_memory_url_is_a_redis_of_its_own() -> None:
    one, other = Store.open("memory://"), Store.open("memory://")
    await one.registry.register(registration())
    assert await other.directory.registrations() == []
    await one.close()
    await other.close()


async def test_an_error_does_not_tell_the_password(free_port: int) -> None:
    store = Store.open(f"redis://user:secret@127.0.0.1:{free_port}", timeout_seconds=0.5)
    with pytest.raises(StoreUnavailable) as caught:
        await store.read_incarnation()
    assert "secret" not in caught.value.sentence
    assert "user" not in caught.value.sentence
    assert f"redis://***@127.0.0.1:{free_port}" in caught.value.sentence
    await store.close()


@pytest.mark.outside
@pytest.mark.parametrize(
    "name", sorted(REPEATABLE - {"release", "end_overdue", "read_loads", "reserve", "match_placements"})
)
async def test_calls_that_may_repeat_share_a_connection_and_outlive_it(redis_url: str, name: str) -> None:
    client = RedisClient.open(redis_url)
    words = ["1", "no such token", *[""] * 6, "64", "65536", "0", "0", "0"]

    async def fenced() -> bool:
        reply = await client.run(name, ["wm:{1}:fence", "wm:{1}:branches"], words)
        return bool(reply[0] == b"fenced")

    async with Redis.from_url(redis_url) as other:
        try:
            await client.load_scripts()
            assert all(await asyncio.gather(*(fenced() for _ in range(50))))
            opened = [each for each in await other.client_list() if each["cmd"] == "evalsha"]
            assert len(opened) == 1
            assert client.reads is not None
            assert client.reads.scripts.connection is not None
            await other.client_kill_filter(_id=opened[0]["id"])
            assert await fenced()
            await other.script_flush()
            assert await fenced()
        finally:
            await client.close()
    assert client.reads.scripts.connection is None


@pytest.mark.outside
async def test_a_primary_that_was_demoted_is_left_for_the_one_at_its_address() -> None:
    """As behind a name or a virtual address: the connections to the old primary stay open, and it refuses writes."""
    with farm() as servers:
        old = servers.start()
        new = follow(servers, old)
        async with proxy_to(old.port) as proxy, Redis.from_url(new.url) as other:
            store = Store.open(proxy.url)
            try:
                await store.registry.register(registration())
                await store.reservations.end_overdue(1)
                await store.reader.read(GROUP, 16, lambda n: b"", deadline_seconds=60.0)
                assert store.client.reads is not None
                to_old = store.client.reads.connection

                async def is_copied() -> bool:
                    return await other.hlen(keys.PUBLISHERS) == 1

                await wait_until(is_copied, "the replica has the registration")
                new.ask("REPLICAOF", "NO", "ONE")
                old.ask("REPLICAOF", "127.0.0.1", new.port)
                proxy.redis = new.port
                await store.registry.register(registration("pod-2"))
                assert await other.hlen(keys.PUBLISHERS) == 2
                await other.zadd(keys.reservations(1), {"7 0 0 00 ": 1})
                assert await store.reservations.end_overdue(1) == 1
                assert store.client.reads.connection is not to_old, "queries go there, too"
            finally:
                await store.close()


@pytest.mark.outside
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared-connection", "library"])
async def test_a_decision_whose_reply_is_lost_is_sent_again_and_counts_once(is_shared: bool) -> None:
    with farm() as servers:
        redis = servers.start()
        await _lose_replies(redis, is_shared=is_shared)


async def _lose_replies(redis: Server, *, is_shared: bool) -> None:
    async with proxy_to(redis.port) as proxy, Redis.from_url(redis.url) as other:
        # A script follows a slot that moves, and a Redis that has failed over, through the library.
        client = RedisClient.open(proxy.url) if is_shared else RedisClient(_library(proxy.url), proxy.url)
        reservations = Reservations(client, Scripts(client))
        decisions = [ReservationTerms(context=100, weight_active=1.0, request_id=each) for each in (None, "0" * 16)]
        try:
            await client.load_scripts()
            await other.hset(keys.holders(1), mapping={"publisher:7": "{}", "publisher:8": "{}"})
            for requests, terms in enumerate(decisions, start=1):
                await reservations.end_overdue(1)  # opens the connection
                proxy.lost_replies = 1
                found = await reservations.reserve(1, [Offer(7, 90), Offer(8, 90, handicap=0.5)], terms)
                assert proxy.lost_replies == 0
                assert found.verdict is Verdict.APPLIED, "its caller follows it as any other"
                assert found.reservation is not None
                assert (found.tokens, found.requests) == (0, 0), "the load without it"
                loads = await reservations.loads(1)
                assert sum(load.requests for load in loads.values()) == requests
                assert loads[found.reservation.publisher].tokens == 90
            proxy.lost_replies = 1
            offered = [7, 8], ["1 90 0.0 1.0 0 0 -"]
            packed = reservations.packed(1, (0.0, 1.0, 120_000, 0, 9), (100, "0"), _pack, offered, lambda: offered)
            reply = await finished(_of(packed))
            assert proxy.lost_replies == 0
            assert reply[0] == b"applied"
            assert sum(load.requests for load in (await reservations.loads(1)).values()) == 3
            assert await other.zcard(keys.reservations(1)) == 3
        finally:
            await client.close()


@pytest.mark.outside
async def test_a_selection_is_changed_once_however_often_replies_are_lost() -> None:
    with farm() as servers:
        redis = servers.start()
        async with proxy_to(redis.port) as proxy:
            client = RedisClient.open(proxy.url)
            selections, state = Selections(client, Scripts(client)), ""
            try:
                await client.load_scripts()
                for value in ("begun 1", "reserved 1", ""):
                    proxy.lost_replies = 1
                    assert await selections.change("one", state, value, 60_000)
                    assert proxy.lost_replies == 0
                    assert await selections.find("one") == value
                    assert not await selections.change("one", "begun 2", "reserved 2", 60_000), "another's"
                    state = value
            finally:
                await client.close()


def _pack(head: bytes, count: int, publishers: Sequence[int], terms: Sequence[str]) -> bytes:
    return packed_behind(head, count, (len(publishers), *publishers, len(terms), *terms))


def _of(step: Step) -> Steps[Reply]:
    return (yield step)


def _library(url: str) -> Redis:
    address = parse(url)
    return server(address, Credentials(), address.endpoints[0], timeout_seconds=2.0, connections=2)
