"""What happens to streams is noted for people: restarts, takeovers, losses and sweeps, by real processes."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Start
from tests.patience import patient
from waymark.simulator.workload import SimulatedPrompt

CHAT = tuple(range(100, 124))


async def test_a_restart_a_takeover_a_loss_and_a_sweep_are_noted(
    redis_url: str, start: Start, engines: Engines
) -> None:
    replica = await start("query", redis_url)
    settings: dict[str, Any] = {"lease_seconds": 2, "publisher_timeout": 1}
    first = await start("ingest", redis_url, worker_id="first", **settings)
    engine = await engines.open(replica, "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([replica], CHAT)

    async with Redis.from_url(redis_url, protocol=2) as redis:

        async def noted(kind: str, detail: str = "") -> bool:
            found: list[Any] = await redis.xrange("wm:activity") or []
            entries = [entry[b"entry"].decode() for _, entry in found]
            return any(f'"kind":"{kind}"' in entry and detail in entry for entry in entries)

        async def has(kind: str, detail: str = "") -> None:
            await wait_until(lambda: noted(kind, detail), f"{kind} is noted", 30.0)

        await has("registered", '"instance_id":"a"')
        await engine.restart()
        await engine.prefill(SimulatedPrompt(CHAT))
        await has("restart", '"instance_id":"a"')
        await has("sweep", "blocks")
        await first.kill()
        second = await start("ingest", redis_url, worker_id="second", **settings)
        await has("takeover", '"detail":"from first"')
        async with httpx.AsyncClient(trust_env=False, timeout=patient(30.0)) as client:
            assert "\nwaymark_takeovers_total 1.0\n" in (await client.get(f"{second.url}/metrics")).text
        await engine.publisher.close()
        await has("lost", '"instance_id":"a"')
