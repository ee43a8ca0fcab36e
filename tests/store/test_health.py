"""health: what is wrong with a Redis that answers is said once, and never waited for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from tests.patience import within
from tests.store.factories import registration
from waymark.api.application import create_probes
from waymark.api.options import ApiOptions
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.store.health import HealthReason, HealthWatch
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

SOUND = {
    "redis_version": "7.4.1",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "maxmemory": 0,
    "used_memory": 1000,
    "evicted_keys": 0,
    "cluster_enabled": 0,
    "loading": 0,
}


class RedisWithInfo(RedisClient):
    """A Redis with the INFO that a test gives it; None hangs."""

    def __init__(self, *, is_cluster: bool = False, **info: Any) -> None:
        super().__init__(Redis(), "redis://test")
        self._is_cluster = is_cluster
        self.answers: list[dict[str, Any]] | None = [SOUND | info]
        self.asked = 0
        self.seed: bytes | None = None

    @property
    def is_cluster(self) -> bool:
        return self._is_cluster

    async def infos(self) -> list[dict[str, Any]]:
        self.asked += 1
        if self.answers is None:
            await asyncio.Event().wait()
        assert self.answers is not None
        return self.answers

    async def hget(self, key: str, field: Any) -> bytes | None:
        return self.seed if (key, field) == ("wm:groups", "hash_seed") else None


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def warnings(told: RedisWithInfo, *, are_shards_set: bool = False) -> dict[HealthReason, str]:
    return dict((await HealthWatch(told, are_shards_set=are_shards_set).poll()).warnings)


@pytest.mark.parametrize(
    ("info", "reason", "words"),
    [
        pytest.param({"maxmemory_policy": "allkeys-lru"}, "eviction", "any key", id="evicts-any-key"),
        pytest.param({"maxmemory_policy": "volatile-ttl"}, "eviction", "leases", id="evicts-leases"),
        pytest.param({"redis_version": "6.0.16"}, "old_version", "6.0.16; use 6.2 or later", id="old"),
        pytest.param({"redis_version": "5.0.14"}, "old_version", "5.0.14", id="very-old"),
        pytest.param({"cluster_enabled": 1}, "cluster_url", "redis+cluster://", id="cluster-by-a-plain-url"),
        pytest.param({"role": "slave", "slave_read_only": 1}, "read_only", "primary", id="replica"),
        pytest.param({"maxmemory": 900}, "out_of_memory", "1000 of 900 bytes", id="full"),
    ],
)
async def test_what_is_wrong_is_said_with_the_way_out(info: dict[str, Any], reason: str, words: str) -> None:
    found = await warnings(RedisWithInfo(**info))
    assert list(found) == [reason]
    assert words in found[HealthReason(reason)]


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({}, id="as-it-should-be"),
        pytest.param({"redis_version": "6.2.0"}, id="oldest"),
        pytest.param({"redis_version": "10.0.1"}, id="version-of-two-digits"),
        pytest.param({"redis_version": "unstable"}, id="no-version"),
        pytest.param({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, id="valkey"),
        pytest.param({"role": "slave", "slave_read_only": 0}, id="writable-replica"),
        pytest.param({"maxmemory": 1001}, id="nearly-full"),
    ],
)
async def test_what_is_right_is_not_complained_about(info: dict[str, Any]) -> None:
    assert await warnings(RedisWithInfo(**info)) == {}


async def test_a_cluster_whose_shards_nobody_has_thought_of_is_warned_of() -> None:
    told = RedisWithInfo(is_cluster=True, cluster_enabled=1)
    assert list(await warnings(told)) == ["shards_not_set"]
    assert await warnings(told, are_shards_set=True) == {}


async def test_every_primary_is_known_and_one_that_is_wrong_is_enough() -> None:
    told = RedisWithInfo(is_cluster=True)
    told.answers = [SOUND, SOUND | {"used_memory": 7, "maxmemory": 8, "evicted_keys": 9, "maxmemory_policy": "x-lfu"}]
    health = await HealthWatch(told).poll()
    assert [(p.memory_bytes, p.memory_max_bytes, p.evicted_keys) for p in health.primaries] == [(1000, 0, 0), (7, 8, 9)]
    assert list(health.warnings) == ["eviction"]


async def test_a_change_is_said_once_and_seen_after_some_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told, clock = RedisWithInfo(maxmemory_policy="allkeys-lru"), Clock()
    watch = HealthWatch(told, clock=clock)
    for _ in range(3):
        assert (await watch.poll()).warnings
    assert told.asked == 1
    told.answers = [SOUND]
    assert (await watch.poll()).warnings, "not asked again yet"
    clock.now += 3.0
    assert not (await watch.poll()).warnings
    clock.now += 3.0
    await watch.poll()
    said = [(record.levelname, getattr(record, "fields", {})["reason"]) for record in caplog.records]
    assert said == [("WARNING", "eviction"), ("INFO", "eviction")]


async def test_a_redis_that_hangs_is_waited_for_by_one_and_not_for_long() -> None:
    told, clock = RedisWithInfo(maxmemory_policy="allkeys-lru"), Clock()
    watch = HealthWatch(told, clock=clock)
    assert (await watch.poll()).is_up
    told.answers = None
    clock.now += 3.0
    async with within(5.0):
        first, *others = await asyncio.gather(*(watch.poll() for _ in range(20)))
    assert not first.is_up
    assert told.asked == 2
    assert list(first.warnings) == ["eviction"], "what was known is still known"
    assert all(other.is_up for other in others), "the others were told what was known before"


async def test_a_redis_that_loads_its_data_is_not_up() -> None:
    assert not (await HealthWatch(RedisWithInfo(loading=1)).poll()).is_up


async def test_a_redis_that_is_not_there_is_not_up(free_port: int) -> None:
    client = RedisClient.open(f"redis://127.0.0.1:{free_port}", timeout_seconds=0.5)
    with pytest.raises(StoreUnavailable):
        await client.infos()
    assert not (await HealthWatch(client).poll()).is_up
    await client.close()


@pytest.fixture
def admin(redis_url: str) -> Iterator[SyncRedis]:
    """The real Redis; what a test has set is set back."""
    with SyncRedis.from_url(redis_url, protocol=2) as admin:
        yield admin
        admin.config_set("maxmemory-policy", "noeviction")
        admin.acl_deluser("plain")


async def test_a_user_who_may_not_ask_has_a_redis_that_is_up(admin: SyncRedis, redis_url: str) -> None:
    admin.acl_setuser(
        "plain", enabled=True, passwords=["+word"], categories=["+@all"], commands=["-info"], keys=["wm:*"]
    )
    client = RedisClient.open(redis_url.replace("unix://", "unix://plain:word@"))
    health = await HealthWatch(client).poll()
    assert (health.is_up, health.primaries) == (True, ())
    await client.close()


async def test_a_real_redis_is_read_and_a_later_change_is_seen(admin: SyncRedis, redis_url: str) -> None:
    client, clock = RedisClient.open(redis_url), Clock()
    watch = HealthWatch(client, clock=clock)
    health = await watch.poll()
    assert (health.is_up, health.warnings) == (True, {})
    assert health.primaries[0].memory_bytes > 100_000
    admin.config_set("maxmemory-policy", "volatile-lru")
    clock.now += 3.0
    assert list((await watch.poll()).warnings) == ["eviction"]
    await client.close()


async def test_of_the_embedded_redis_there_is_nothing_to_tell() -> None:
    store, metrics = Store.open("memory://"), Metrics()
    app = create_probes(store, ApiOptions(), metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark") as client:
        assert (await client.get("/ready")).json() == {"status": "ready"}
        text = (await client.get("/metrics")).text
    assert "waymark_redis_up 1.0" in text
    series = [line for line in text.splitlines() if line.startswith("waymark_redis_")]
    assert series == ["waymark_redis_up 1.0"]
    await store.close()


async def test_another_hash_seed_than_that_of_the_index_is_said(store: Store, client: RedisClient) -> None:
    assert (await HealthWatch(client, hash_seed=7).poll()).warnings == {}
    await store.registry.register(registration())
    assert (await HealthWatch(client).poll()).warnings == {}
    warnings = (await HealthWatch(client, hash_seed=7).poll()).warnings
    assert list(warnings) == [HealthReason.HASH_SEED]
    assert "WAYMARK_HASH_SEED 1337, here it is 7" in warnings[HealthReason.HASH_SEED]
