"""A request of ``POST /events`` uses what the request before knew, and only where nothing came between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from waymark.apply import resuming as kept_memories
from waymark.apply.resuming import KeptMemories
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.held import HeldBlocks
from waymark.domain.placing import PlainPlacer
from waymark.store import keys
from waymark.store.index import Index
from waymark.store.store import Store
from waymark.store.takeover import Takeover

TOKENS = list(range(1, 9))
HASHES = extend(None, token_bytes(TOKENS), 2)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The publisher of each time that blocks were read back from Redis."""
    fills: list[int] = []
    fill = Takeover.fill

    async def counted(self: Takeover, grant: Any, holders: Any, memory: Any) -> Any:
        fills.append(grant.publisher)
        return await fill(self, grant, holders, memory)

    monkeypatch.setattr(Takeover, "fill", counted)
    return fills


@pytest.fixture
async def two(store: Store, make_client: MakeClient) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
    """Two replicas on one Redis, with a publisher whose blocks have two tokens."""
    one, other = await make_client(store), await make_client(store)
    await register(one)
    return one, other


async def register(client: httpx.AsyncClient, instance_id: str = "pool-1") -> None:
    body = {"type": "standard", "instance_id": instance_id, "modelname": "m", "block_size": 2}
    answer = await client.post("/register", json=body)
    assert answer.status_code == 200, answer.text


async def store_one(client: httpx.AsyncClient, event_id: int, instance_id: str = "pool-1", **fields: Any) -> int:
    """Store the block ``event_id - 1`` of the prompt, by an engine hash that only the publisher knows."""
    i = event_id - 1
    event = {
        "event_id": event_id,
        "event_type": "stored",
        "backend_id": instance_id,
        "seq_hashes": [500 + i],
        "token_ids": TOKENS[2 * i : 2 * i + 2],
        "base_block_idx": i,
    } | ({"parent_hash": 499 + i} if i else {})
    return (await client.post("/events", json=event | fields)).status_code


async def remove_one(client: httpx.AsyncClient, event_id: int, i: int) -> int:
    event = {"event_id": event_id, "event_type": "removed", "backend_id": "pool-1", "seq_hashes": [500 + i]}
    return (await client.post("/events", json=event)).status_code


async def matched(client: httpx.AsyncClient) -> int:
    body = {"model": "m", "block_size": 2, "token_ids": TOKENS}
    row = (await client.post("/query", json=body)).json()["default"].get("pool-1", {})
    return int(row.get("longest_matched", 0))


async def test_the_next_request_reads_no_blocks_again(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int]
) -> None:
    client, _ = two
    for event_id in (1, 2, 3):
        assert await store_one(client, event_id) == 200
    assert await remove_one(client, 4, 2) == 200
    assert await matched(client) == 4
    assert len(fills) == 1


async def test_after_another_process_blocks_are_read_again(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int]
) -> None:
    client, other = two
    assert await store_one(client, 1) == 200
    assert await store_one(other, 2) == 200
    assert await store_one(client, 3) == 200, "its parent is a block that the other process stored"
    assert await matched(client) == 6
    assert await remove_one(other, 4, 2) == 200
    assert await remove_one(client, 5, 1) == 200
    assert await matched(client) == 2
    assert len(fills) == 5


async def test_another_lease_alone_ends_what_was_known(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int], store: Store
) -> None:
    """Its process may have written blocks and died before it said so in the record."""
    client, _ = two
    assert await store_one(client, 1) == 200
    (claim,) = await store.directory.claims()
    grant = await store.leases.take(claim, "", 10.0)
    assert grant is not None
    await store.leases.drop(grant)
    assert await store_one(client, 2) == 200
    assert len(fills) == 2


async def test_what_a_failed_request_knew_is_not_used(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = two
    assert await store_one(client, 1) == 200
    with monkeypatch.context() as patch:

        async def away(self: Index, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("redis is away")

        patch.setattr(Index, "apply", away)
        assert await store_one(client, 2) == 503
    assert await store_one(client, 2) == 200
    assert await matched(client) == 4
    assert len(fills) == 2


async def test_what_a_request_knew_that_ran_out_of_memory_is_not_used(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is in its table, and is written to no index."""
    client, _ = two
    assert await store_one(client, 1) == 200
    with monkeypatch.context() as patch:
        patch.setattr(PlainPlacer, "extend", out_of_memory_after(PlainPlacer.extend))
        patch.setattr(HeldBlocks, "store", out_of_memory_after(HeldBlocks.store))
        assert await store_one(client, 2) == 500
    assert await matched(client) == 2
    assert await store_one(client, 2) == 200
    assert await matched(client) == 4
    assert len(fills) == 2


def out_of_memory_after(method: Callable[..., Any]) -> Callable[..., Any]:
    """As a call of the C module whose last allocation fails."""

    def failing(*args: Any, **named: Any) -> Any:
        if method(*args, **named) is not False:
            raise MemoryError
        return False

    return failing


async def test_a_publisher_that_was_registered_again_has_no_blocks(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int]
) -> None:
    client, _ = two
    assert await store_one(client, 1) == 200
    answer = await client.post("/unregister", json={"instance_id": "pool-1"})
    assert answer.status_code == 200, answer.text
    await register(client)
    assert await store_one(client, 1) == 200
    assert await matched(client) == 2
    assert len(fills) == 2


async def test_a_record_that_was_set_back_is_read_again(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fills: list[int], store: Store
) -> None:
    """As a failover does that loses the last writes, but not the lease."""
    client, _ = two
    assert await store_one(client, 1) == 200
    (claim,) = await store.directory.claims()
    record = keys.record(claim.group_id, claim.publisher)
    before = await store.client.hgetall(record)
    assert await store_one(client, 2) == 200
    now = await store.client.hgetall(record)
    names = [name for name in now if name.startswith(b"event:")]
    assert names
    assert before[b"token"] != now[b"token"]
    await store.client.several([("HSET", record, name, before[name]) for name in names])
    assert await store_one(client, 2) == 200, "not stale: the record does not have it"
    assert len(fills) == 2


async def test_a_shard_that_was_set_back_is_read_again(
    redis_url: str, make_client: MakeClient, fills: list[int]
) -> None:
    store = Store.open(redis_url, shards=4)
    try:
        client = await make_client(store)
        await register(client)
        for event_id in range(1, 9):  # eight prompts of one block, on several shards
            assert (
                await store_one(client, event_id, token_ids=[event_id, 99], base_block_idx=0, parent_hash=None) == 200
            )
        assert len(fills) == 1
        (claim,) = await store.directory.claims()
        record = await store.client.hgetall(keys.record(claim.group_id, claim.publisher))
        (holder,) = (int(value) for name, value in record.items() if name.startswith(b"holder:"))
        engines = [keys.engine(claim.group_id, shard, holder) for shard in range(1, 4)]
        marks = await store.client.several([("HGET", engine, "applied") for engine in engines])
        shard, engine = next((i, engines[i - 1]) for i, mark in enumerate(marks, 1) if mark is not None)
        calls = ("HSET", keys.fence(claim.group_id, shard), f"calls:{claim.publisher}", "0")
        await store.client.several([("HSET", engine, "applied", "0 1"), calls])
        assert await store_one(client, 9, token_ids=[9, 99], base_block_idx=0, parent_hash=None) == 200
        assert len(fills) == 2
    finally:
        await store.close()


@pytest.mark.slow
async def test_memories_are_bounded_in_bytes(
    memory_store: Store, make_client: MakeClient, fills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KeptMemories] = []
    begin = KeptMemories.__init__
    metrics = Metrics()

    def begun(self: KeptMemories, store: Store, bytes_max: int, metrics: Metrics) -> None:
        begin(self, store, bytes_max, metrics)
        made.append(self)

    monkeypatch.setattr(KeptMemories, "__init__", begun)
    monkeypatch.setattr(kept_memories, "BYTES_MAX", 20_000)
    client = await make_client(memory_store, metrics=metrics)
    for i in range(40):
        await register(client, f"pool-{i}")
        assert await store_one(client, 1, f"pool-{i}") == 200
        (kept,) = made
        assert kept.bytes <= 20_000
        assert metrics.registry.get_sample_value("waymark_event_memory_bytes") == kept.bytes
    assert 0 < len(kept) < 40
    kept.clear()
    assert (len(kept), kept.bytes) == (0, 0)
