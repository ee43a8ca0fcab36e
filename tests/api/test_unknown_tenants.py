"""Anybody may ask for any tenant, so what a query of an unknown one costs does not grow with the registrations."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis

from tests.api.conftest import MakeClient
from tests.store.factories import registration
from waymark.store.store import Store

QUERIES = 20
READS = {f"cmdstat_{name}" for name in ("get", "mget", "hget", "hmget", "hlen", "hkeys", "hvals", "hgetall", "hscan")}
"""What the store writes in the background, such as the activity, is not of a query."""


async def sent(redis: Redis) -> tuple[int, dict[str, int]]:
    """The bytes that Redis has sent, and how often it has run each command that reads."""
    stats: dict[str, Any] = await redis.info("stats")
    commands: dict[str, Any] = await redis.info("commandstats")
    return stats["total_net_output_bytes"], {name: commands[name]["calls"] for name in READS & commands.keys()}


async def cost_of(api: httpx.AsyncClient, redis: Redis) -> tuple[int, dict[str, int]]:
    """The bytes of so many queries of tenants that nobody has registered, and the reads for each of them."""
    first, calls = await sent(redis)
    for number in range(QUERIES):
        body = {"model": "m", "block_size": 2, "token_ids": [1, 2, 3, 4], "tenant_id": f"nobody-{number}"}
        answer = await api.post("/query", json=body)
        assert answer.status_code == 200, answer.text
    last, after = await sent(redis)
    reads = {name: (after[name] - calls.get(name, 0)) // QUERIES for name in after}
    return last - first, {name: count for name, count in reads.items() if count}


async def test_what_a_query_of_an_unknown_tenant_reads_does_not_grow(redis_url: str, make_client: MakeClient) -> None:
    store = Store.open(redis_url)
    api = await make_client(store)
    async with Redis.from_url(redis_url, protocol=2) as redis:
        few_bytes = 0
        few: dict[str, int] = {}
        for number in range(200):
            await store.registry.register(registration(f"pod-{number}", tenant_id=f"tenant-{number}"))
            if number == 1:
                await cost_of(api, redis)  # the list of tenants is read once after a change
                few_bytes, few = min([await cost_of(api, redis) for _ in range(5)], key=lambda cost: cost[0])
        # The replica reads for itself now and then, whatever is asked, and on a slow machine in most measurements.
        for _ in range(40):
            many_bytes, many = await cost_of(api, redis)
            # The replies of INFO are among the bytes, and their digits grow.
            if many == few and many_bytes < few_bytes + 1000:
                break
    await store.close()
    assert many == few
    assert "cmdstat_hkeys" not in many
    assert "cmdstat_hgetall" not in many
    assert many_bytes < few_bytes + 1000
