"""A response cache in Redis: the same for all gateways, and in memory while Redis is unavailable."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.redis_server import RedisServer, redis_server
from tests.gateway.conftest import Start, chat
from tests.gateway.test_response_cache import answering, results
from tests.patience import patient
from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.gateway.answer_store import MemoryAnswers
from waymark.gateway.bounded import CacheSize
from waymark.gateway.kept_answer import KeptAnswer
from waymark.gateway.shared_answers import SharedAnswers
from waymark.store.store import Store

pytestmark = pytest.mark.outside

KEPT = KeptAnswer(b"application/json", b"\n{}\n")
KEY, OTHER = b"k" * 32, b"o" * 32


async def test_gateways_share_answers_and_one_of_them_clears_all(start: Start) -> None:
    one, two = await start(1, response_cache="redis"), await start(0, response_cache="redis")
    answering(one)
    first = await one.post()
    await wait_until(lambda: one.value("response_cache_entries") == 1, "the answer is kept", 10)
    second = await two.post()
    assert (first.headers["x-cache"], second.headers["x-cache"]) == ("MISS", "HIT")
    assert (first.content, first.headers["content-type"]) == (second.content, second.headers["content-type"])
    stats: dict[str, Any] = {}

    async def are_counted() -> bool:
        stats.update((await two.client.get("/admin/response-cache/stats")).json())
        return bool(stats["requests"]["total"] == 2)

    await wait_until(are_counted, "the requests of both gateways are counted", 10)
    assert (stats["backend_type"], stats["config"]["backend"], stats["entries"]) == ("redis", "redis", 1)
    assert stats["requests"] == {"hit": 1, "miss": 1, "skip": 0, "total": 2}
    assert stats["hit_rate"] == "0.5000"
    assert stats["size_bytes"] > len(first.content)
    connections = stats["redis"].pop("connections")
    assert stats["redis"] == {"fallback_active": False, "errors": {"connection": 0, "timeout": 0, "other": 0}}
    assert connections.keys() == {"active", "idle"}
    assert sum(connections.values()) >= 1
    assert two.value("response_cache_entries") == 1
    assert two.value("cache_backend_type", backend="redis") == 1
    assert two.value("cache_redis_latency_seconds_count", operation="get") >= 2
    assert two.value("cache_redis_connections_idle") + two.value("cache_redis_connections_active") >= 1
    cleared = await two.client.post("/admin/response-cache/invalidate", json={"clear_all": True})
    assert cleared.json()["cleared_entries"] == 1
    assert await results(one, chat("hello")) == ["MISS"]


async def test_what_is_kept_in_redis_has_bounds(start: Start) -> None:
    running = await start(1, response_cache="redis", response_cache_entries=2)
    answering(running)
    assert await results(running, *map(chat, "abcd")) == ["MISS"] * 4
    await wait_until(lambda: running.value("response_cache_evictions_total") == 2, "all were kept", 10)
    assert await results(running, chat("a")) == ["MISS"]
    assert running.value("response_cache_entries") == 2


@asynccontextmanager
async def shared(server: RedisServer, milliseconds: int = 60_000) -> AsyncIterator[tuple[SharedAnswers, Metrics]]:
    metrics = Metrics()
    store = Store.open(server.url, timeout_seconds=60.0)
    beside = MemoryAnswers(10, 100_000, 60, metrics)
    bounds = {"entries_max": 10, "bytes_max": 100_000, "ttl_seconds": 60, "milliseconds": milliseconds}
    yield SharedAnswers(store.answers, beside, metrics, store.begin, **bounds, look_seconds=0.05), metrics
    await store.close()


async def test_answers_are_in_memory_while_redis_is_away() -> None:
    with redis_server() as server:
        await server.start()
        async with shared(server) as (answers, metrics):
            found = await answers.find(KEY)
            await answers.keep(KEY, KEPT, found.clearing)
            assert (await answers.find(KEY)).kept == KEPT
            server.kill()
            found = await answers.find(OTHER)
            assert answers.is_away
            await answers.keep(OTHER, KEPT, found.clearing)
            assert (await answers.find(OTHER)).kept == KEPT
            assert answers.held.entries == 1
            assert metrics.registry.get_sample_value("waymark_cache_fallback_active") == 1
            errors = {"type": "connection"}
            assert (
                metrics.registry.get_sample_value("waymark_cache_redis_errors_total", errors)
                == answers.errors["connection"]
            )
            with pytest.raises(StoreUnavailable):
                await answers.clear()
            assert (await answers.find(OTHER)).kept is None, "this gateway's own are cleared"
            before = await answers.find(OTHER)
            await answers.keep(OTHER, KEPT, before.clearing)
            await server.start()
            await wait_until(lambda: not answers.is_away, "Redis is used again", 20)
            assert metrics.registry.get_sample_value("waymark_cache_fallback_active") == 0
            # What was kept meanwhile is forgotten, and an answer that began then is not kept.
            await answers.keep(OTHER, KEPT, before.clearing)
            assert await answers.count() == CacheSize(0, 0)
            assert (await answers.find(OTHER)).kept is None


async def test_a_slow_redis_costs_one_request_its_time() -> None:
    with redis_server() as server:
        await server.start()
        async with shared(server, milliseconds=int(patient(200))) as (answers, _):
            clearing = (await answers.find(KEY)).clearing
            assert not answers.is_away
            server.freeze()
            try:
                assert (await answers.find(KEY)).kept is None
                assert (answers.is_away, answers.errors["timeout"]) == (True, 1)
                await answers.keep(KEY, KEPT, clearing)
                assert answers.held.entries == 0
            finally:
                server.thaw()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RESPONSE_CACHE", "disk"),
        ("RESPONSE_CACHE_ENTRIES", "0"),
        ("RESPONSE_CACHE_BYTES", "1"),
        ("RESPONSE_CACHE_TTL_SECONDS", "0"),
        ("RESPONSE_CACHE_RESPONSE_BYTES", "0"),
        ("RESPONSE_CACHE_STREAM_BYTES", "0"),
        ("RESPONSE_CACHE_REDIS_MS", "0"),
    ],
)
def test_a_value_outside_of_its_range_ends_the_start(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f'WAYMARK_{name} is "{value}"')):
        Settings.from_env({f"WAYMARK_{name}": value})
