"""Two workers, two replicas, and an engine with a snapshot socket: what no replay has is asked for once, for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Engines
from tests.e2e.fleet import Member, new_member
from tests.topologies import farm, start_cluster
from waymark.simulator.options import Faults
from waymark.simulator.workload import SimulatedPrompt

REPAIR_SECONDS = 30.0
QUESTIONS = 200
CHAT = tuple(range(64))
PROMPTS = [(*CHAT[: 4 * (i % 16)], *range(1000 * i, 1000 * i + 40)) for i in range(1, 41)]


@pytest.fixture(params=["one", "cluster"])
def redis_url_of(request: pytest.FixtureRequest) -> Iterator[str]:
    with farm() as servers:
        if request.param == "one":
            yield servers.start().url
        else:
            yield start_cluster(servers).url


async def test_one_snapshot_repairs_the_index_for_every_worker_and_replica(
    redis_url_of: str, engines: Engines, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        settings = {"redis_url": redis_url_of, "shards": 4}
        workers = [await new_member(stack, tmp_path, f"worker-{i}", "ingest", settings) for i in range(2)]
        replicas = [await new_member(stack, tmp_path, f"replica-{i}", "query", settings) for i in range(2)]
        for member in (*workers, *replicas):
            await member.ready()
        engine = await engines.open(
            replicas[0], "a", gpu_blocks=160, cpu_blocks=80, repeat_rate=0.5, buffer_batches=2, has_snapshots=True
        )

        async def stream() -> Any:
            return await replicas[0].publisher("a", tenant_id=engines.tenant_id)

        async def is_followed() -> bool:
            return bool((await stream())["status"] == "active")

        await wait_until(is_followed, "a worker has the stream", REPAIR_SECONDS)
        for prompt in PROMPTS[:10]:
            await engine.prefill(SimulatedPrompt(prompt))
        await engines.agree(replicas[:1], *PROMPTS[:3])
        assert engine.publisher.counts["snapshots"] == 0

        engine.publisher.faults = Faults(drop_every=1)
        for prompt in PROMPTS[:30]:
            await engine.prefill(SimulatedPrompt(prompt))
        engine.publisher.faults = Faults()
        for prompt in PROMPTS[30:]:
            await engine.prefill(SimulatedPrompt(prompt))
        last = engine.publisher.next_seq - 1

        async def is_repaired() -> bool:
            now = await stream()
            is_whole = now["counters"].get("snapshots.complete") == 1 and now["status"] == "active"
            return bool(is_whole and now["watermark"] >= last and now["known"] == 1.0)

        await wait_until(is_repaired, "a snapshot has repaired the index", REPAIR_SECONDS)
        await engines.agree(replicas, PROMPTS[-1])
        assert await wrong_answers(engines, replicas) == []
        assert engine.publisher.counts["snapshots"] == 1


async def wrong_answers(engines: Engines, replicas: list[Member]) -> list[tuple[int, ...]]:
    """The prompts of ``QUESTIONS`` questions, put to all replicas, that were not answered as the cache has them."""
    expected = {prompt: {engines.tenant_id: engines.model.query(prompt)} for prompt in PROMPTS}
    wrong: list[tuple[int, ...]] = []

    async def ask(replica: Member) -> None:
        for i in range(QUESTIONS // len(replicas)):
            prompt = PROMPTS[i % len(PROMPTS)]
            if await replica.query(prompt, **engines.group) != expected[prompt]:
                wrong.append(prompt)

    await asyncio.gather(*map(ask, replicas))
    return wrong
