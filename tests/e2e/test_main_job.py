"""The main job, end to end: engines publish, a worker applies, and every replica gives the same right answers.

The processes, two query replicas and one ingest worker, serve all tests of this file; each has a tenant of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines, Service, Start, settle, starting
from tests.model import Space
from tests.store.factories import Change, apply_changes, begins, blocks_of
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.workload import SimulatedPrompt
from waymark.store.scripts import Verdict
from waymark.store.store import Store

SYSTEM = tuple(range(100, 116))
CHAT = SYSTEM + tuple(range(200, 210))
OTHER = SYSTEM[:8] + tuple(range(300, 312))


class Cluster(NamedTuple):
    replicas: list[Service]
    ingest: Service
    redis_url: str


@pytest.fixture(scope="module")
async def cluster(redis_socket: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    url = f"unix://{redis_socket}"
    async with Redis.from_url(url, protocol=2) as redis:
        await redis.flushall()
    async with starting(tmp_path_factory.mktemp("cluster")) as start:
        # A million tokens are a walk of 62,500 blocks, and this machine may be busy.
        replicas = [await start("query", url, query_deadline_ms=30_000) for _ in range(2)]
        yield Cluster(replicas, await start("ingest", url), url)


async def held_blocks(cluster: Cluster, engines: Engines) -> set[int]:
    """The blocks in Redis that a holder of the engines' group has."""
    async with Redis.from_url(cluster.redis_url, protocol=2) as redis:
        field = f'["{engines.tenant_id}","m"]'
        entry = await cast("Awaitable[bytes | None]", redis.hget("wm:groups", field))
        assert entry is not None
        return set(await blocks_of(redis, int(entry.split()[0])))


@pytest.mark.parametrize("dialect", ["vllm-map", "vllm-list-9", "sglang-map", "standard", "standard-tokens"])
async def test_what_engines_publish_evict_and_clear_is_what_replicas_answer(
    cluster: Cluster, engines: Engines, dialect: str
) -> None:
    first = await engines.open(cluster.replicas[0], "a", dialect=dialect, gpu_blocks=8, cpu_blocks=4, disk_blocks=4)
    second = await engines.open(cluster.replicas[1], "b", dialect=dialect, gpu_blocks=8)
    await first.prefill(SimulatedPrompt(CHAT))
    await second.prefill(SimulatedPrompt(OTHER))
    await engines.agree(cluster.replicas, CHAT, OTHER, SYSTEM)
    assert engines.model.query(CHAT)["a"]["longest_matched"] == 24
    assert engines.model.query(CHAT)["b"]["longest_matched"] == 8

    for i in range(1000, 1004):
        await first.prefill(SimulatedPrompt(tuple(range(16 * i, 16 * i + 16))))
    await engines.agree(cluster.replicas, CHAT, OTHER, SYSTEM, tuple(range(16003, 16019)))
    assert engines.model.query(CHAT)["a"]["GPU"] < 24

    await first.clear()
    await engines.agree(cluster.replicas, CHAT, OTHER)
    assert engines.model.query(CHAT)["a"]["longest_matched"] == 0
    await first.prefill(SimulatedPrompt(CHAT))
    await engines.agree(cluster.replicas, CHAT, OTHER)


@pytest.mark.parametrize("rebind", [False, True])
async def test_a_restarted_engine_has_nothing_of_its_life_before(
    cluster: Cluster, engines: Engines, rebind: bool
) -> None:
    engine = await engines.open(cluster.replicas[0], "a")
    for tokens in (CHAT, OTHER, SYSTEM):
        await engine.prefill(SimulatedPrompt(tokens))
    await engines.agree(cluster.replicas, CHAT, OTHER)
    await engine.restart(rebind=rebind)
    await engine.prefill(SimulatedPrompt(OTHER))
    await engines.agree(cluster.replicas, CHAT, OTHER)
    assert engines.model.query(CHAT)["a"]["longest_matched"] == 8
    assert (await cluster.replicas[1].publisher("a", tenant_id=engines.tenant_id))["restarts"] == 1


async def test_ranks_on_one_socket_and_on_sockets_of_their_own_are_told_apart(
    cluster: Cluster, engines: Engines
) -> None:
    replica = cluster.replicas[0]
    both = await engines.open(replica, "both", ranks=2)
    await both.prefill(SimulatedPrompt(CHAT), rank=0)
    await both.prefill(SimulatedPrompt(OTHER), rank=1)
    for rank, tokens in enumerate((CHAT, OTHER)):
        engine = await engines.open(replica, "each", fields={"dp_rank": rank}, ranks=2)
        await engine.prefill(SimulatedPrompt(tokens), rank=rank)
    row = {"longest_matched": 24, "GPU": 24, "DP": {"0": 24, "1": 8}, "CPU": 0, "DISK": 0}
    for service in cluster.replicas:
        ask = partial(service.query, CHAT, **engines.group)
        await settle(ask, {engines.tenant_id: {"both": row, "each": row}})


async def test_unregister_takes_the_row_out_at_once_and_later_frames_write_nothing(
    cluster: Cluster, engines: Engines
) -> None:
    replica, other_replica = cluster.replicas
    engine = await engines.open(replica, "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree(cluster.replicas, CHAT)

    gone = await other_replica.post("/unregister", tenant_id=engines.tenant_id, instance_id="a")
    assert gone["removed_instances"] == [f"a|{engines.tenant_id}|0"]
    for service in cluster.replicas:
        assert await service.query(CHAT, **engines.group) == {}
    await engine.prefill(SimulatedPrompt(OTHER))

    # A stream that began after those frames is applied: so would they have been.
    del engines.engines["a"], engines.model.ranks["a"]
    witness = await engines.open(replica, "b")
    await witness.prefill(SimulatedPrompt(CHAT))
    await engines.agree(cluster.replicas, CHAT, OTHER)
    hashes = set(extend(None, token_bytes(CHAT), BLOCK_SIZE))

    async def is_swept() -> bool:
        return await held_blocks(cluster, engines) == hashes

    await wait_until(lambda: engine.publisher.subscribers == 0, "nobody listens to the engine any more")
    await wait_until(is_swept, "only the witness' blocks are left")
    not_found = await replica.post("/unregister", status=404, tenant_id=engines.tenant_id, instance_id="a")
    assert not_found["reason"] == "not_found"


async def test_a_replica_that_starts_later_is_right_with_its_first_query(
    cluster: Cluster, engines: Engines, start: Start
) -> None:
    engine = await engines.open(cluster.replicas[0], "a", cpu_blocks=8, gpu_blocks=8)
    for tokens in (CHAT, OTHER):
        await engine.prefill(SimulatedPrompt(tokens))
    await engines.agree(cluster.replicas, CHAT)
    late = await start("query", cluster.redis_url)
    assert await late.query(CHAT, **engines.group) == {engines.tenant_id: engines.model.query(CHAT)}


async def test_tenants_never_see_each_others_rows(cluster: Cluster, engines: Engines) -> None:
    tenants = [f"{engines.tenant_id}-{name}" for name in ("x", "y")]
    for instance_id, tenant_id in zip(("of-x", "of-y"), tenants, strict=True):
        engine = await engines.open(cluster.replicas[0], instance_id, fields={"tenant_id": tenant_id})
        await engine.prefill(SimulatedPrompt(CHAT if instance_id == "of-x" else SYSTEM))
    for instance_id, tenant_id, matched in (("of-x", tenants[0], 24), ("of-y", tenants[1], 16)):
        row = {"longest_matched": matched, "GPU": matched, "DP": {"0": matched}, "CPU": 0, "DISK": 0}
        for service in cluster.replicas:
            for ask in (service.query, service.query_by_hash):
                expected = {tenant_id: {instance_id: row}}
                await settle(partial(ask, CHAT, model="m", tenant_id=tenant_id), expected)
                nobody = {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0}
                stranger = "of-y" if instance_id == "of-x" else "of-x"
                answer = await ask(CHAT, model="m", tenant_id=tenant_id, instance_id=stranger)
                assert answer == {tenant_id: {stranger: nobody}}


# ---- adapters and salts ----------------------------------------------------------------------------


async def test_adapters_and_salts_of_requests_are_found_only_by_their_like(cluster: Cluster, engines: Engines) -> None:
    engine = await engines.open(cluster.replicas[0], "a")
    for tokens, space in (
        (CHAT, Space()),
        (CHAT[:20], Space("adapter")),
        (CHAT[:16], Space(None, ("salt",))),
        (CHAT[:12], Space("adapter", ("salt",))),
        (CHAT[:8], Space("adapter", ("another",))),
    ):
        await engine.prefill(SimulatedPrompt(tokens, space.lora_name, space.salts[0] if space.salts else None))
    for space, matched in (
        (Space(), 24),
        (Space("adapter"), 20),
        (Space(None, ("salt",)), 16),
        (Space("adapter", ("salt",)), 12),
        (Space("adapter", ("another",)), 8),
        (Space("unknown"), 0),
        (Space(None, ("another",)), 0),
        (Space(None, ("salt", "salt")), 0),
    ):
        await engines.agree(cluster.replicas, CHAT, space=space)
        assert engines.model.query(CHAT, space)["a"]["longest_matched"] == matched


async def test_adapter_and_salt_of_a_registration_count_for_all_its_blocks(cluster: Cluster, engines: Engines) -> None:
    fields = {"lora_name": "adapter", "additionalsalt": "w8a8"}
    engine = await engines.open(cluster.replicas[0], "a", fields=fields)
    await engine.prefill(SimulatedPrompt(CHAT))
    await engine.prefill(SimulatedPrompt(SYSTEM, None, "mine"))
    replica, group = cluster.replicas[1], engines.group

    async def matched(**fields: Any) -> int:
        answer = await replica.query(CHAT, **group, **fields)
        return int(answer[engines.tenant_id]["a"]["longest_matched"])

    both = {"lora_name": "adapter", "additional_salt": "w8a8", "cache_salt": "mine"}
    await settle(partial(matched, **both), 16)
    assert await matched(lora_name="adapter", additional_salt="w8a8") == 24
    assert await matched(lora_name="adapter", cache_salt="w8a8") == 24
    nothing: dict[str, Any] = {}
    for missing in (nothing, {"lora_name": "adapter"}, {"cache_salt": "w8a8"}, both | {"lora_name": None}):
        assert await matched(**missing) == 0
    assert await matched(lora_name="adapter", additional_salt="mine", cache_salt="w8a8") == 0


# ---- unusual queries -------------------------------------------------------------------------------


async def test_unknown_names_and_short_prompts_are_answered_and_create_nothing(
    cluster: Cluster, engines: Engines
) -> None:
    engine = await engines.open(cluster.replicas[0], "a")
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree(cluster.replicas, CHAT)
    zeros = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}
    tenant = engines.tenant_id
    async with Redis.from_url(cluster.redis_url, protocol=2) as redis:
        groups = await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall("wm:groups"))
        for service in cluster.replicas:
            for ask in (service.query, service.query_by_hash):
                assert await ask(CHAT, tenant_id=tenant, model="unknown") == {tenant: {}}
                assert await ask(CHAT, tenant_id="unknown", model="m") == {}
                assert await ask([], **engines.group) == {tenant: {"a": zeros}}
                assert await ask(CHAT[:3], **engines.group) == {tenant: {"a": zeros}}
                assert await ask(CHAT, **engines.group, block_size=8) == {tenant: {"a": zeros}}
        assert await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall("wm:groups")) == groups


async def test_a_prompt_of_a_million_tokens_is_walked_to_its_end(cluster: Cluster, engines: Engines) -> None:
    tokens = tuple(range(2**20))
    engine = await engines.open(
        cluster.replicas[0], "a", fields={"block_size": 16}, gpu_blocks=2**16, dialect="standard"
    )
    await engine.prefill(SimulatedPrompt(tokens))
    row = {"longest_matched": 2**20, "GPU": 2**20, "DP": {"0": 2**20}, "CPU": 0, "DISK": 0}
    expected = {engines.tenant_id: {"a": row}}
    replica, group = cluster.replicas[0], engines.group
    await settle(partial(replica.query, tokens, block_size=16, **group), expected, seconds=120)
    assert await replica.query(tokens + (1,) * 15, block_size=16, **group) == expected


async def test_a_block_with_many_holders_has_as_many_right_rows(cluster: Cluster, engines: Engines) -> None:
    """Thirty instances of eight ranks: rank r of each has the first r + 1 blocks."""
    replica, group = cluster.replicas[0], engines.group
    names = [(f"i{i:02}", rank) for i in range(30) for rank in range(8)]
    gate = asyncio.Semaphore(16)
    hashes = extend(None, token_bytes(tuple(range(40))), BLOCK_SIZE)

    async def register(instance_id: str, dp_rank: int) -> None:
        async with gate:
            fields = group | {"type": "standard", "instance_id": instance_id, "dp_rank": dp_rank}
            await replica.post("/register", **fields, block_size=BLOCK_SIZE)

    async def hold(store: Store, claim: Any) -> None:
        async with gate:
            grant = await store.leases.take(claim, "test", 60.0)
            assert grant is not None
            dp_rank = claim.registration.dp_rank
            begin = begins(claim, f"{dp_rank} GPU")
            ids = await store.records.new_life(grant, unit="", is_restart=False, begin=begin, above=grant.above)
            assert ids is not None
            held = hashes[: dp_rank + 1]
            verdict = await apply_changes(store, grant, Change("+", ids[0], 1, 1, held, held), mode="set")
            assert verdict is Verdict.APPLIED

    store = Store.open(cluster.redis_url, timeout_seconds=10)
    try:
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(register(*name))
        async with asyncio.TaskGroup() as tasks:
            for claim in await store.directory.claims():
                if claim.registration.tenant_id == engines.tenant_id:
                    tasks.create_task(hold(store, claim))
    finally:
        await store.close()
    ranks = {str(rank): 4 * (rank + 1) for rank in range(8)}
    row = {"longest_matched": 32, "GPU": 32, "DP": ranks, "CPU": 0, "DISK": 0}
    for service in cluster.replicas:
        for ask in (service.query, service.query_by_hash):
            answer = await ask(tuple(range(40)), **group)
            assert answer == {engines.tenant_id: {f"i{i:02}": row for i in range(30)}}
