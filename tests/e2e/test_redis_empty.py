"""Redis comes back without its memory: who stands in the file and who was heard is there again, by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines, Service, Start
from tests.e2e.redis_server import RedisServer, redis_server
from waymark.simulator.encode import Dimensions
from waymark.simulator.engine import build_engine
from waymark.simulator.workload import SimulatedPrompt

CHAT = tuple(range(100, 124))
OTHER = CHAT[:8] + tuple(range(300, 312))
BACK_SECONDS = 15.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_who_stands_in_the_file_needs_no_registration_and_survives_an_empty_redis(
    server: RedisServer, start: Start, engines: Engines, tmp_path: Path
) -> None:
    await server.start()
    named = [
        build_engine(
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1:0",
            block_size=BLOCK_SIZE,
            gpu_blocks=64,
            dialect="vllm-map",
            dimensions=Dimensions(tenant_id=engines.tenant_id, backend_id=f"named-{i}"),
            seed=100 + i,
        )
        for i in range(3)
    ]
    async with named[0].publisher, named[1].publisher, named[2].publisher:
        conductor = {
            f"named-{i}": {
                "type": "vLLM",
                "modelname": "m",
                "tenant_id": engines.tenant_id,
                "block_size": BLOCK_SIZE,
                "endpoint": engine.publisher.endpoint,
                "replay_endpoint": engine.publisher.replay_endpoint,
            }
            for i, engine in enumerate(named)
        }
        file = tmp_path / "conductor_config.json"
        file.write_text(json.dumps({"http_server_port": 13333, "kvevent_instance": conductor}))
        replica = await start("query", server.url)
        for name in ("one", "two"):
            await start("ingest", server.url, worker_id=name, publishers_file=file)
        for i, engine in enumerate(named):
            engines.engines[f"named-{i}"] = engine
            engines.model.ranks[f"named-{i}"] = {0}
            await engine.prefill(SimulatedPrompt(CHAT[: 8 * (i + 1)]))
        await engines.agree([replica], CHAT)
        heard = await engines.open(replica, "heard")
        await heard.prefill(SimulatedPrompt(CHAT))
        await engines.agree([replica], CHAT)
        assert await registered(replica) == ["heard", "named-0", "named-1", "named-2"]

        server.kill()
        for engine in engines.engines.values():
            await engine.prefill(SimulatedPrompt(OTHER))
        await server.start()

        async def are_all_there() -> bool:
            return await replica.is_ready() and await registered(replica) == ["heard", "named-0", "named-1", "named-2"]

        await wait_until(are_all_there, "everybody is registered again", BACK_SECONDS)
        await engines.agree([replica], CHAT, OTHER)
        for name in engines.engines:
            publisher = await replica.publisher(name, tenant_id=engines.tenant_id)
            assert publisher["counters"].get("batches_lost", 0) == 0
            assert publisher["status"] == "active", "nothing is missing"


async def registered(service: Service) -> list[str]:
    return sorted(each["InstanceID"] for each in (await service.get("/services"))["services"])


async def test_replicas_forget_what_an_emptied_redis_held(server: RedisServer, start: Start, engines: Engines) -> None:
    """Ids begin anew, and those of two tenants change places: no row of one is ever in an answer to the other."""
    await server.start()
    replicas = [await start("query", server.url) for _ in range(2)]
    tenants = ["mine", "theirs"]
    tokens = list(CHAT)
    event: dict[str, Any] = {
        "event_id": 1,
        "event_type": "stored",
        "base_block_idx": 0,
        "token_ids": tokens,
        "seq_hashes": [1, 2, 3],
    }
    for order in (tenants, tenants[::-1], tenants):
        with server.admin() as admin:
            admin.flushall()
        for i, tenant in enumerate(order):
            body: dict[str, Any] = {
                "type": "standard",
                "model": "m",
                "instance_id": f"pod-of-{tenant}",
                "tenant_id": tenant,
            }
            await replicas[0].post("/register", block_size=8, **body)
            length = 8 * (i + 1)
            told = event | {"token_ids": tokens[:length], "seq_hashes": [1, 2, 3][: i + 1]}
            await replicas[0].post("/events", backend_id=f"pod-of-{tenant}", tenant_id=tenant, **told)
        for replica in replicas:
            for i, tenant in enumerate(order):
                answer = await replica.query(tokens, block_size=8, model="m", tenant_id=tenant)
                assert answer.keys() == {tenant}
                assert answer[tenant].keys() == {f"pod-of-{tenant}"}
                assert answer[tenant][f"pod-of-{tenant}"]["longest_matched"] == 8 * (i + 1)


async def test_a_redis_that_comes_back_older_than_it_was_is_brought_up_to_date(
    server: RedisServer, start: Start, engines: Engines
) -> None:
    """As after a failover that lost the last writes: batches that were acknowledged are not there any more."""
    saving = ("--save", "", "--appendonly", "no", "--dbfilename", "dump.rdb")
    await server.start(*saving)
    service = await start("serve", server.url)
    engine = await engines.open(service, "a", gpu_blocks=12)
    await engine.prefill(SimulatedPrompt(CHAT[:8]))
    await engines.agree([service], CHAT)
    with server.admin() as admin:
        admin.save()
    for i in range(5):
        await engine.prefill(SimulatedPrompt(CHAT[: 4 * i] + (1000 + i,) * BLOCK_SIZE))
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT, OTHER)
    server.kill()
    await server.start(*saving)
    await engine.prefill(SimulatedPrompt(OTHER))
    await wait_until(service.is_ready, "it is ready again", BACK_SECONDS)
    await engines.agree([service], CHAT, OTHER, *(CHAT[: 4 * i] + (1000 + i,) * BLOCK_SIZE for i in range(5)))
