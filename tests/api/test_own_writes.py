"""After a replica has acknowledged a write, none of its answers is older than the write, whatever it has cached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.discovery.conftest import Engine, engine, start_engine
from waymark.domain.hashing import extend, token_bytes
from waymark.store.hot import HOLDERS_MIN, HotRows
from waymark.store.store import Store

__all__ = ["engine", "start_engine"]

TOKENS = list(range(1, 65))
HASHES = extend(None, token_bytes(TOKENS), 2)
HOLDERS = HOLDERS_MIN + 1


@pytest.fixture
async def hot() -> HotRows:
    """A cache whose rows last longer than any test."""
    return HotRows(3600, 2**20)


@pytest.fixture
async def replica(hot: HotRows, make_client: MakeClient) -> AsyncIterator[httpx.AsyncClient]:
    """A replica that has cached the row of a prompt that all publishers have."""
    store = Store.open("memory://", hot=hot)
    client = await make_client(store)
    for number in range(HOLDERS):
        body = {"type": "standard", "modelname": "m", "instance_id": f"pod-{number}", "block_size": 2}
        (await client.post("/register", json=body)).raise_for_status()
        await tell(client, number, 1, "stored", seq_hashes=HASHES, base_block_idx=0)
    assert await holders(client) == set(range(HOLDERS))
    assert len(hot) > 0
    yield client
    await store.close()


async def tell(client: httpx.AsyncClient, number: int, event_id: int, event_type: str, **fields: Any) -> None:
    event = {"event_id": event_id, "event_type": event_type, "backend_id": f"pod-{number}"} | fields
    answer = await client.post("/events", json=event)
    assert answer.json() == {"applied": 1, "stale": 0}, answer.text


async def holders(client: httpx.AsyncClient) -> set[int]:
    answer = await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": TOKENS})
    rows = answer.json().get("default", {})
    return {int(name.removeprefix("pod-")) for name, row in rows.items() if row["longest_matched"] == len(TOKENS)}


async def test_events_are_in_the_next_answer(replica: httpx.AsyncClient) -> None:
    everyone = set(range(HOLDERS))
    await tell(replica, 0, 2, "removed", seq_hashes=HASHES)
    assert await holders(replica) == everyone - {0}
    await tell(replica, 0, 3, "stored", seq_hashes=HASHES, base_block_idx=0)
    assert await holders(replica) == everyone
    await tell(replica, 1, 2, "cleared")
    assert await holders(replica) == everyone - {1}


async def test_registrations_are_in_the_next_answer(replica: httpx.AsyncClient, hot: HotRows) -> None:
    everyone = set(range(HOLDERS))
    (await replica.post("/unregister", json={"instance_id": "pod-3"})).raise_for_status()
    assert len(hot) == 0
    assert await holders(replica) == everyone - {3}
    assert len(hot) > 0
    body = {"type": "standard", "modelname": "m", "instance_id": "pod-3", "block_size": 2}
    (await replica.post("/register", json=body)).raise_for_status()
    assert len(hot) == 0
    assert await holders(replica) == everyone - {3}
    (await replica.post("/admin/kv-index/clear", json={"scope": "all"})).raise_for_status()
    assert len(hot) == 0
    assert await holders(replica) == set()


@pytest.mark.outside
async def test_a_registration_by_url_is_in_the_next_answer(
    replica: httpx.AsyncClient, hot: HotRows, engine: Engine
) -> None:
    engine.is_vllm()
    (await replica.post("/register", json={"url": engine.url})).raise_for_status()
    assert len(hot) == 0
    assert await holders(replica) == set(range(HOLDERS))


RANK = {"model_name": "m", "block_size": 2, "endpoint": "tcp://10.0.0.8:5557"}
WORKER = {"worker_id": 100, "model_name": "m", "block_size": 2, "endpoint": "http://10.0.0.8:8000"}
WORKER |= {"kv_events_endpoints": {"0": "tcp://10.0.0.8:5557"}}
DOORS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/dynamo/register", RANK | {"instance_id": 100}),
    ("POST", "/dynamo/unregister", {"model_name": "m", "instance_id": 100}),
    ("POST", "/dynamo/workers", WORKER),
    ("PATCH", "/dynamo/workers/100", {"endpoint": "http://10.0.0.9:8001"}),
    ("DELETE", "/dynamo/workers/100", {}),
]


async def test_what_the_doors_of_dynamo_have_acknowledged_is_in_the_next_answer(
    replica: httpx.AsyncClient, hot: HotRows
) -> None:
    for method, path, body in DOORS:
        assert await holders(replica) == set(range(HOLDERS))
        assert len(hot) > 0
        (await replica.request(method, path, json=body)).raise_for_status()
        assert len(hot) == 0, path
