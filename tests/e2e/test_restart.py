"""Processes come and go, well and badly: nothing is lost, and nothing has to be copied to come back."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines, Service, Start, spawn
from tests.patience import within
from tests.ports import unused_port
from waymark.cli import EXIT_NO_PORT
from waymark.simulator.options import Faults
from waymark.simulator.workload import SimulatedPrompt

LEASE_SECONDS = 2
CHAT = tuple(range(100, 124))
OTHER = CHAT[:8] + tuple(range(300, 312))


async def worker_of(service: Service, engines: Engines, instance_id: str) -> str | None:
    publisher = await service.publisher(instance_id, tenant_id=engines.tenant_id)
    worker: str | None = publisher["worker"]
    return worker


async def test_a_worker_that_is_told_to_end_gives_its_leases_back_at_once(
    redis_url: str, start: Start, engines: Engines
) -> None:
    # Leases of five minutes: whoever takes over in time can only have been given them.
    replica = await start("query", redis_url)
    workers = {name: await start("ingest", redis_url, worker_id=name, lease_seconds=300) for name in ("one", "two")}
    for i in range(6):
        engine = await engines.open(replica, f"i{i}")
        await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([replica], CHAT)

    async def owners() -> set[str | None]:
        return {await worker_of(replica, engines, name) for name in engines.engines}

    await wait_until(owners_are(owners, {"one", "two"}), "both workers have streams")
    async with Redis.from_url(redis_url, protocol=2) as redis:
        before = {key: await redis.get(key) async for key in redis.scan_iter("wm:{*}:lease:*")}
        await workers["one"].stop()
        kept = [key for key, token in before.items() if await redis.get(key) == token]
        alive = await redis.zrange("wm:workers", 0, -1)
    assert 0 < len(kept) < len(before) == 6
    assert alive == [b"two/4096"]
    for engine in engines.engines.values():
        await engine.prefill(SimulatedPrompt(OTHER))
    await engines.agree([replica], CHAT, OTHER)
    await wait_until(owners_are(owners, {"two"}), "one worker has all streams")


def owners_are(owners: Any, expected: set[str]) -> Any:
    async def is_so() -> bool:
        return bool(await owners() == expected)

    return is_so


async def test_streams_of_a_killed_worker_are_taken_over_and_nothing_is_lost(
    redis_url: str, start: Start, engines: Engines
) -> None:
    replica = await start("query", redis_url)
    workers = {
        name: await start("ingest", redis_url, worker_id=name, lease_seconds=LEASE_SECONDS) for name in ("one", "two")
    }
    engine = await engines.open(replica, "a", gpu_blocks=16, cpu_blocks=16)
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([replica], CHAT)
    owner = await worker_of(replica, engines, "a")
    assert owner in workers
    await workers.pop(owner).kill()
    for i in range(20):
        await engine.prefill(SimulatedPrompt(CHAT[: 4 * (i % 6)] + (1000 + i,) * BLOCK_SIZE))
    await engine.prefill(SimulatedPrompt(OTHER))

    (heir,) = workers
    prompts = [CHAT, OTHER, CHAT[:4] + (1019,) * BLOCK_SIZE]
    # Both leases and the list of workers run out after the lease; a worker looks every two seconds.
    async with within(LEASE_SECONDS + 2 + 4):
        await engines.agree([replica], *prompts)
    assert await worker_of(replica, engines, "a") == heir
    counters = (await replica.publisher("a", tenant_id=engines.tenant_id))["counters"]
    assert [counters.get(name, 0) for name in ("batches_lost", "restarts", "waiting_lost")] == [0, 0, 0]


async def test_frames_lost_on_the_way_are_replayed(redis_url: str, start: Start, engines: Engines) -> None:
    service = await start("serve", redis_url)
    engine = await engines.open(service, "a", faults=Faults(drop_every=3))
    for i in range(25):
        await engine.prefill(SimulatedPrompt(CHAT[: 4 * (i % 5)] + (1000 + i,) * BLOCK_SIZE))
        await engines.agree([service], CHAT) if i == 10 else None
    await engine.prefill(SimulatedPrompt(OTHER))
    assert engine.publisher.counts["dropped"] == 8
    await engines.agree([service], CHAT, OTHER, CHAT[:16] + (1024,) * BLOCK_SIZE)


async def test_a_killed_replica_loses_nothing(redis_url: str, start: Start, engines: Engines) -> None:
    first, second = [await start("query", redis_url) for _ in range(2)]
    await start("ingest", redis_url)
    engine = await engines.open(first, "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([first, second], CHAT)
    await first.kill()
    expected = {engines.tenant_id: engines.model.query(CHAT)}
    assert await second.query(CHAT, **engines.group) == expected
    third = await start("query", redis_url)
    assert await third.query(CHAT, **engines.group) == expected
    assert (await third.get("/services"))["count"] == 1


async def test_one_process_on_a_memory_forgets_at_its_end_and_says_so(start: Start, engines: Engines) -> None:
    port = unused_port()
    service = await start("serve", "memory://", port=port)
    assert "The index is lost when the process ends" in service.log
    engine = await engines.open(service, "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT)
    await service.stop()
    again = await start("serve", "memory://", port=port)
    assert (await again.get("/services"))["count"] == 0
    assert await again.query(CHAT, **engines.group) == {}


async def test_one_process_on_a_real_redis_forgets_nothing(redis_url: str, start: Start, engines: Engines) -> None:
    service = await start("serve", redis_url)
    assert "forgets" not in service.log
    engine = await engines.open(service, "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT)
    await service.stop()
    await engine.prefill(SimulatedPrompt(OTHER))
    again = await start("serve", redis_url)
    assert await again.query(CHAT, **engines.group) == {engines.tenant_id: engines.model.query(CHAT)}
    await engines.agree([again], CHAT, OTHER)


@pytest.mark.parametrize("role", ["query", "ingest", "serve"])
async def test_a_port_that_is_taken_ends_the_process_with_an_error(tmp_path: Path, redis_url: str, role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"WAYMARK_REDIS_URL": redis_url, "WAYMARK_HOST": "127.0.0.1"}
        environ["WAYMARK_PROBE_PORT" if role == "ingest" else "WAYMARK_PORT"] = port
        process = spawn(role, environ, tmp_path / "log")
        try:
            await wait_until(lambda: process.poll() is not None, "the process has ended")
        finally:
            process.kill()
            process.wait()
    log = (tmp_path / "log").read_text()
    assert process.returncode == EXIT_NO_PORT, log
    (line,) = log.splitlines()
    assert line.startswith(f"waymark {role}: port {port} of 127.0.0.1 cannot be opened, another process listens on it;")
