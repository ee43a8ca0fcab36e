"""The admin paths: the names and nesting that Continuum Router publishes, counts of all replicas, and clearing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.api.test_opaque_prefixes import HASH, report
from tests.conftest import wait_until
from waymark.domain.prefixes import Change
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
TOKENS = [1, 2, 3, 4]

#: The published examples, as far as names, nesting and kinds of values go.
PREFIX_STATS = {
    "enabled": True,
    "config": {
        "max_prefix_length": 1024,
        "load_factor_epsilon": 0.25,
        "virtual_nodes": 150,
        "anthropic_cache_control_injection": False,
    },
    "routing_decisions": {"total": 0, "prefix_hash": 0, "overflow": 0, "fallback": 0, "overflow_rate": "0.0000"},
    "backend_distribution": [
        {"backend": "pod-1", "in_flight_requests": 0},
        {"backend": "vllm-1", "in_flight_requests": 0},
    ],
    "unique_prefixes": 0,
}
SOURCE = {
    "backend_name": "pod-1",
    "connected": False,
    "events_received": 0,
    "events_dropped": 0,
    "last_event_at": None,
    "reconnect_count": 0,
}
INDEX_STATS = {
    "enabled": True,
    "config": {
        "backend": "redis",
        "max_entries": 100_000,
        "entry_ttl_seconds": 600,
        "event_sources_count": 2,
        "scoring": {"overlap_weight": 0.6, "load_weight": 0.3, "health_weight": 0.1, "min_overlap_threshold": 0.3},
    },
    "index": {"prefix_count": 0, "entry_count": 0, "total_hits": 0, "total_evictions": 0},
    "event_sources": [SOURCE, SOURCE | {"backend_name": "vllm-1"}],
    "routing_decisions": {"kv_aware": 0, "fallback": 0, "total": 0},
    "query_latency_count": 0,
    "overlap_score_count": 0,
}
BACKEND = {
    "backend_name": "pod-1",
    "connection": {"connected": False, "reconnect_count": 0, "last_event_at": None},
    "events": {"received": 0, "dropped": 0, "index_created": 0, "index_evicted": 0},
}


@pytest.fixture
async def fleet(register: Register) -> None:
    await register("pod-1", endpoint="tcp://10.0.0.1:5557")
    await register("vllm-1", type="continuum", endpoint="http://vllm-1:8000/v1/kv_events")


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.usefixtures("fleet")
async def test_names_and_nesting_are_those_that_are_published(client: httpx.AsyncClient) -> None:
    assert await get(client, "/admin/prefix-routing/stats") == PREFIX_STATS
    assert await get(client, "/admin/kv-index/stats") == INDEX_STATS
    backends = await get(client, "/admin/kv-index/backends")
    assert backends == {"enabled": True, "backends": [BACKEND, BACKEND | {"backend_name": "vllm-1"}]}


@pytest.mark.usefixtures("fleet")
@pytest.mark.slow
async def test_counts_are_of_all_replicas(client: httpx.AsyncClient, store: Store, make_client: MakeClient) -> None:
    other = await make_client(Store(store.client))
    await report(store, "vllm-1", HASH, Change.HOT, 100)
    for number in range(6):
        body = {"model": "m", "prefix_hash": f"{number % 3:064x}", "policy": "sticky"}
        answer = await (client, other)[number % 2].post("/select", json=body)
        assert answer.json()["decision"] in ("prefix_hash", "overflow")
    for replica in (client, other):
        await replica.post("/select", json={"model": "m", "prefix_hash": HASH, "policy": "composite"})

    async def are_there() -> bool:
        prefix = (await get(client, "/admin/prefix-routing/stats"))["routing_decisions"]
        index = (await get(other, "/admin/kv-index/stats"))["routing_decisions"]
        return prefix["total"] == 6 and index["total"] == 2

    await wait_until(are_there, "the counts have arrived", 20)
    stats = await get(other, "/admin/prefix-routing/stats")
    assert stats["unique_prefixes"] == 4
    assert sum(each["in_flight_requests"] for each in stats["backend_distribution"]) == 8
    decided = stats["routing_decisions"]
    assert decided["overflow_rate"] == f"{decided['overflow'] / 6:.4f}"
    index = await get(client, "/admin/kv-index/stats")
    assert index["routing_decisions"] == {"kv_aware": 2, "fallback": 0, "total": 2}
    assert (index["index"]["prefix_count"], index["index"]["entry_count"]) == (1, 1)
    await store.close()


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(("body", "cleared", "left"), [({}, 1, 2), ({"scope": "all"}, 3, 0)])
async def test_clearing_ends_opaque_prefixes_or_everything(
    client: httpx.AsyncClient, store: Store, hold: Hold, body: dict[str, Any], cleared: int, left: int
) -> None:
    await hold("pod-1", TOKENS)
    await report(store, "vllm-1", HASH, Change.HOT, 100)
    answer = await client.post("/admin/kv-index/clear", json=body)
    assert answer.json() == {"success": True, "entries_before_clear": 3, "cleared_entries": cleared}
    assert (await get(client, "/admin/kv-index/stats"))["index"]["entry_count"] == left
    found = (await client.post("/query", json={"model": "m", "token_ids": TOKENS, "block_size": 2})).json()
    assert found["default"]["pod-1"]["longest_matched"] == 2 * left
    again = await client.post("/admin/kv-index/clear", json=body)
    assert again.json()["cleared_entries"] == 0
    refused = await client.post("/admin/kv-index/clear", json={"scope": "some"})
    assert (refused.status_code, refused.json()["field"]) == (400, "scope")


@pytest.mark.usefixtures("fleet")
async def test_admin_paths_need_a_token_wherever_there_is_one(store: Store, make_client: MakeClient) -> None:
    api = await make_client(store, api_token="root")
    for path in ("/admin/prefix-routing/stats", "/admin/kv-index/stats", "/admin/kv-index/backends"):
        assert (await api.get(path)).status_code == 401
        assert (await api.get(path, headers={"Authorization": "Bearer root"})).status_code == 200
    assert (await api.post("/admin/kv-index/clear", json={})).status_code == 401
    assert (await api.get("/services")).status_code == 200
