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
    """The bytes and the commands of so many queries of tenants that nobody has registered."""
    first, calls = await sent(redis)
    for number in range(QUERIES):
        body = {"model": "m", "block_size": 2, "token_ids": [1, 2, 3, 4], "tenant_id": f"nobody-{number}"}
        answer = await api.post("/query", json=body)
        assert answer.status_code == 200, answer.text
    last, after = await sent(redis)
    return last - first, {name: after[name] - calls.get(name, 0) for name in after if after[name] != calls.get(name, 0)}


async def test_what_a_query_of_an_unknown_tenant_reads_does_not_grow(redis_url: str, make_client: MakeClient) -> None:
    store = Store.open(redis_url)
    api = await make_client(store)
    async with Redis.from_url(redis_url, protocol=2) as redis:
        found = []
        for number in range(200):
            await store.registry.register(registration(f"pod-{number}", tenant_id=f"tenant-{number}"))
            if number in (1, 199):
                await cost_of(api, redis)  # the list of tenants is read once after a change
                # The replica reads for itself now and then, whatever is asked: another command each time.
                sizes, calls = zip(*[await cost_of(api, redis) for _ in range(5)], strict=True)
                always = set(calls[0]).intersection(*calls)
                found.append((min(sizes), {name: min(each[name] for each in calls) for name in always}))
    await store.close()
    (few_bytes, few), (many_bytes, many) = found
    assert many == few
    assert "cmdstat_hkeys" not in many
    assert "cmdstat_hgetall" not in many
    # The replies of INFO are among the bytes, and their digits grow.
    assert many_bytes < few_bytes + 1000
