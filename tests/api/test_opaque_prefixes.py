"""Decisions by opaque prefixes: by a hash that is given, and by the key of messages that no tokenizer reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.store.factories import begins
from waymark.chat.prefix_key import prefix_key as key_of_messages
from waymark.domain.prefixes import Change, PrefixChange, prefix_key
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
HASH = "9f2c" * 16
MESSAGES = [{"role": "system", "content": "You are short."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
async def sources(register: Register) -> None:
    for name in ("vllm-1", "vllm-2", "vllm-3"):
        await register(name, type="continuum", endpoint=f"http://{name}:8000/v1/kv_events")


async def report(store: Store, instance_id: str, prefix_hash: str, change: Change, tokens: int) -> None:
    """What the worker of a source writes."""
    claims = [each for each in await store.directory.claims() if each.registration.instance_id == instance_id]
    grant = await store.leases.take(claims[0], "test", 60.0, force=True)
    assert grant is not None
    begin = begins(grant.claim, "0 GPU", "0 DISK")
    ids = await store.records.new_life(grant, unit="", is_restart=False, begin=begin, above=grant.above)
    assert ids is not None
    changes = [PrefixChange(prefix_key(prefix_hash), change, tokens)]
    hot, warm = ids
    assert await store.prefixes.apply(grant, hot, warm, changes, ttl_seconds=60)


async def scores(client: httpx.AsyncClient, **fields: Any) -> dict[str, dict[str, Any]]:
    answer = await client.post("/score", json={"model": "m", "prefix_hash": HASH} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return {row["instance_id"]: row | {"decision": found["decision"]} for row in found["scores"]}


@pytest.mark.usefixtures("sources")
async def test_composite_scores_opaque_prefixes_as_published(client: httpx.AsyncClient, store: Store) -> None:
    await report(store, "vllm-1", HASH, Change.HOT, 2048)
    await report(store, "vllm-2", HASH, Change.WARM, 2048)
    await report(store, "vllm-3", HASH, Change.HOT, 512)
    rows = await scores(client, policy="composite")
    # 0.6 * (tokens / most tokens * tier) + 0.3 * (1 - load) + 0.1 * health, nobody being loaded.
    assert {name: round(row["score"], 6) for name, row in rows.items()} == {
        "vllm-1": 0.6 + 0.4,
        "vllm-2": 0.6 * 0.6 + 0.4,
        "vllm-3": 0.6 * 0.25 + 0.4,
    }
    assert (rows["vllm-1"]["device_tokens"], rows["vllm-2"]["disk_tokens"]) == (2048, 2048)
    assert {row["decision"] for row in rows.values()} == {"kv_aware"}


@pytest.mark.usefixtures("sources")
async def test_below_the_least_overlap_it_falls_back(client: httpx.AsyncClient, store: Store) -> None:
    rows = await scores(client, policy="composite")
    assert {row["decision"] for row in rows.values()} == {"fallback"}
    await report(store, "vllm-2", HASH, Change.HOT, 100)
    assert (await scores(client, policy="composite"))["vllm-2"]["decision"] == "kv_aware"


@pytest.mark.usefixtures("sources")
async def test_a_target_is_selected_by_the_key_of_messages(client: httpx.AsyncClient, store: Store) -> None:
    key = key_of_messages("m", MESSAGES)
    assert key is not None
    await report(store, "vllm-2", key.hex(), Change.HOT, 4096)
    for policy in ("composite", "least-work"):
        answer = await client.post("/select", json={"model": "m", "messages": MESSAGES, "policy": policy})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["target"]["instance_id"], found["prefix_key"]) == ("vllm-2", key.hex())
        assert found["target"]["device_tokens"] == 4096
        await client.post("/release", json={"reservation": found["reservation"]})


@pytest.mark.usefixtures("sources")
async def test_a_source_that_counts_wildly_makes_no_reservation_that_cannot_be_released(
    client: httpx.AsyncClient, store: Store
) -> None:
    await report(store, "vllm-2", HASH, Change.HOT, 2**53 - 1)
    selected = (await client.post("/select", json={"model": "m", "prefix_hash": HASH, "policy": "least-work"})).json()
    answer = await client.post("/release", json={"reservation": selected["reservation"]})
    assert (answer.status_code, answer.json()) == (200, {"released": 1, "gone": 0})


@pytest.mark.usefixtures("sources")
async def test_a_source_beside_an_engine_with_blocks(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    await register("pod-1")
    await report(store, "vllm-1", HASH, Change.HOT, 100)
    rows = await scores(client, policy="composite")
    assert rows["vllm-1"]["score"] > rows["pod-1"]["score"]


@pytest.mark.parametrize("kind", ["vLLM", "none"])
async def test_without_a_source_the_prefix_decides(client: httpx.AsyncClient, register: Register, kind: str) -> None:
    await register("pod-1", type=kind, endpoint=None if kind == "none" else "tcp://10.0.0.1:5557")
    for path in ("/score", "/select"):
        for prompt in ({"prefix_hash": HASH}, {"messages": MESSAGES}):
            answer = await client.post(path, json={"model": "m", "policy": "composite"} | prompt)
            assert (answer.status_code, answer.json()["decision"]) == (200, "prefix")


@pytest.mark.usefixtures("sources")
async def test_a_score_is_zeros_when_the_last_source_is_unregistered(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    await register("pod-1", type="none", endpoint=None)
    await report(store, "vllm-1", HASH, Change.HOT, 2048)
    assert (await scores(client))["vllm-1"]["device_tokens"] == 2048
    for name in ("vllm-1", "vllm-2", "vllm-3"):
        await client.post("/unregister", json={"instance_id": name})
    for policy in ("composite", "least-work", "sticky"):
        rows = await scores(client, policy=policy)
        assert rows.keys() == {"pod-1"}
        assert (rows["pod-1"]["device_tokens"], rows["pod-1"]["disk_tokens"]) == (0, 0)
    await client.post("/unregister", json={"instance_id": "pod-1"})
    assert await scores(client) == {}


async def test_a_source_is_read_only_where_endpoints_are_allowed(store: Store, make_client: MakeClient) -> None:
    api = await make_client(store, allowed_endpoints=("*.engines.svc",))
    body = {"type": "continuum", "instance_id": "vllm-1", "modelname": "m", "block_size": 2}
    refused = await api.post("/register", json=body | {"endpoint": "https://elsewhere:8000/v1/kv_events"})
    assert (refused.status_code, refused.json()["field"]) == (400, "endpoint")
    taken = await api.post("/register", json=body | {"endpoint": "https://a.engines.svc:8000/v1/kv_events"})
    assert taken.status_code == 200


@pytest.mark.usefixtures("sources")
async def test_workers_shows_what_a_source_holds(client: httpx.AsyncClient, store: Store) -> None:
    await report(store, "vllm-2", HASH, Change.WARM, 100)
    publishers = (await client.get("/workers")).json()["publishers"]
    assert {each["instance_id"]: each["prefixes"] for each in publishers} == {
        "vllm-1": {},
        "vllm-2": {"GPU": 0, "DISK": 1},
        "vllm-3": {},
    }
