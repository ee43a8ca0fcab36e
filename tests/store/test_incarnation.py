"""Nothing that a process remembers of a Redis outlives it: hot rows, tables, ids."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, hgetall, registration, stored, stream_of
from waymark.base.metrics import Metrics
from waymark.domain.match import conductor_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.store import keys
from waymark.store.fetch import Fetched
from waymark.store.hot import HOLDERS_MIN, HotRows
from waymark.store.incarnation import Incarnation
from waymark.store.redis.client import RedisClient
from waymark.store.steps import Step, Steps, Waiting, finished
from waymark.store.store import Store

CHAIN = list(range(1, 601))
CROWD = HOLDERS_MIN
"""Holders of each block: enough for a value that is kept."""


# ---- the mechanism -----------------------------------------------------------------------------------


def test_all_caches_are_emptied_when_a_word_has_changed() -> None:
    incarnation = Incarnation()
    groups: dict[str, int] = incarnation.cache({})
    seen: set[int] = incarnation.cache(set())

    def fill() -> None:
        groups["m"] = 1
        seen.add(1)

    fill()
    incarnation.saw("wm:birth", b"one")
    incarnation.saw(1, b"a")
    incarnation.saw(2, b"b")
    incarnation.saw(1, b"a")
    assert (groups, seen, incarnation.changes) == ({"m": 1}, {1}, 0)
    incarnation.saw(2, b"c")
    assert (groups, seen, incarnation.changes) == ({}, set(), 1)
    fill()
    incarnation.saw(1, b"z")
    incarnation.saw("wm:birth", b"another")
    assert (groups, incarnation.changes) == ({"m": 1}, 1), "the words were forgotten, too"
    incarnation.saw("wm:birth", b"one")
    assert (groups, incarnation.changes) == ({}, 2)


def test_words_are_bounded() -> None:
    incarnation = Incarnation()
    known: set[int] = incarnation.cache({1})
    for place in range(5000):
        incarnation.saw(place, b"nonce")
    assert not known, "where a nonce was forgotten, nothing that was learned under it is kept"
    assert len(incarnation._nonces) < 5000


# ---- what it is for ----------------------------------------------------------------------------------


async def crowded(store: Store, redis: Redis, tenant_id: str, blocks: int) -> Stream:
    """A group whose first blocks are held by every rank of pod-<tenant>."""
    of = registration(f"pod-{tenant_id}", tenant_id=tenant_id)
    await store.registry.register(of)
    stream = await stream_of(store, redis, of, ids_above=10**12)
    holders = await stream.begin(*(f"{rank} GPU" for rank in range(CROWD)))
    for seq, holder in enumerate(holders, 1):
        await stream.apply(stored(holder, CHAIN[:blocks], seq=seq))
    return stream


async def asked(store: Store, tenant_id: str) -> dict[str, int]:
    left = list(CHAIN)

    def source(count: int) -> bytes:
        piece, left[:] = left[:count], left[count:]
        return pack(piece)

    reading = await store.reader.read(GroupName(tenant_id, "m"), 16, source, deadline_seconds=30.0)
    if reading is None:
        return {}
    return {name: row.longest for name, row in conductor_rows(reading.walk).items()}


@pytest.fixture
def hot() -> HotRows:
    return HotRows(60.0, 1 << 20, Metrics())


@pytest.fixture
def replica(client: RedisClient, hot: HotRows) -> Store:
    """Another process, that only asks."""
    return Store(RedisClient(client._redis, "redis://test"), hot=hot)


@pytest.mark.parametrize("tenant_id", ["a", "b"], ids=["same tenant", "another tenant"])
@pytest.mark.parametrize("blocks", [100, 600], ids=["fewer blocks", "more blocks"])
async def test_hot_rows_end_with_the_redis_they_were_read_from(
    store: Store, redis: Redis, replica: Store, hot: HotRows, tenant_id: str, blocks: int
) -> None:
    """The group of the new Redis has the same number, and its first holders have the same ids, as in an old release."""
    await crowded(store, redis, "a", 300)
    assert await asked(replica, "a") == {"pod-a": 300}
    assert len(hot) == 10
    await redis.flushall()
    stream = await crowded(store, redis, tenant_id, blocks)
    assert stream.grant.group_id == 1
    assert await asked(replica, tenant_id) == {f"pod-{tenant_id}": blocks}
    if tenant_id != "a":
        assert await asked(replica, "a") == {}


async def test_the_word_of_the_whole_redis_counts_too(store: Store, redis: Redis) -> None:
    known: set[int] = store.incarnation.cache({1})
    await store.read_incarnation()
    await store.read_incarnation()
    assert known == {1}
    await redis.flushall()
    await store.read_incarnation()
    assert known == set()


async def test_an_answer_of_the_redis_before_is_not_kept(
    store: Store, redis: Redis, client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked before the change, and comes after it."""
    await crowded(store, redis, "a", 300)
    hot = HotRows(60.0, 1 << 20)
    late = Store(client, hot=hot)
    assert await asked(late, "a") == {"pod-a": 300}
    hot.clear()
    fetch = late.reader._fetcher.fetch

    def changed(*args: Any, **kwargs: Any) -> Step:
        def steps() -> Steps[Fetched]:
            fetched: Fetched = yield fetch(*args, **kwargs)
            late.incarnation.forget()
            return fetched

        return Waiting(finished(steps()))

    monkeypatch.setattr(late.reader._fetcher, "fetch", changed)
    assert await asked(late, "a") == {}
    assert len(hot) == 0


async def test_a_group_without_a_table_does_not_make_the_others_forgotten(
    store: Store, redis: Redis, replica: Store
) -> None:
    """A registration that has stopped half way: its group has a number, and nothing else."""
    await crowded(store, redis, "a", 300)
    assert await asked(replica, "a") == {"pod-a": 300}
    await redis.hset(keys.GROUPS, keys.group_field(GroupName("b", "m")).decode(), "2 1")
    assert await asked(replica, "b") == {}
    assert replica.incarnation.changes == 0


@pytest.mark.parametrize("junk", [b"junk", b"[1,2]", None], ids=["no JSON", "no texts", "gone"])
async def test_a_table_that_cannot_be_read_does_not_make_the_others_forgotten(
    store: Store, redis: Redis, replica: Store, hot: HotRows, junk: bytes | None
) -> None:
    """Query after query, of a group that was read before: other tenants' tables and hot blocks stay."""
    await crowded(store, redis, "a", 300)
    other = await crowded(store, redis, "b", 300)
    assert await asked(replica, "a") == {"pod-a": 300}
    assert await asked(replica, "b") == {"pod-b": 300}
    table, kept = keys.holders(other.grant.group_id), len(hot)
    before = await hgetall(redis, table)
    await (redis.hdel(table, "group") if junk is None else redis.hset(table, "group", junk))
    await redis.hset(table, "version", "changed")
    for _ in range(6):
        assert await asked(replica, "b") == {}
    assert replica.incarnation.changes == 0
    assert len(hot) == kept
    # As soon as it can be read again, it is.
    await redis.hset(table, mapping={name: before[name] for name in (b"group", b"version")})
    assert await asked(replica, "b") == {"pod-b": 300}
