"""Where a target copies blocks from: what is named, what is booked, and the bound over all replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.conftest import wait_until
from waymark.decide import sources
from waymark.domain.hashing import extend, token_bytes
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
TOKENS = list(range(4096))
"""2,048 blocks of two tokens."""
SOURCE = {"kv_source": "tcp://10.0.0.1:7777"}


async def select(client: httpx.AsyncClient, *only: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "token_ids": TOKENS, "only": list(only), "policy": "least-work"} | fields
    answer = await client.post("/select", json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def release(client: httpx.AsyncClient, selected: dict[str, Any], **fields: Any) -> None:
    answer = await client.post("/release", json={"reservation": selected["reservation"]} | fields)
    assert answer.json()["released"] == 1, answer.text


async def test_a_source_is_the_engine_that_has_more_with_the_hashes_of_these_blocks(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("has", **SOURCE)
    await register("lacks")
    await hold("has", TOKENS[:3072])
    await hold("has", TOKENS, medium="CPU", blocks=range(1536, 1600))
    await hold("lacks", TOKENS[:512])
    selected = await select(client, "lacks")
    hashes = extend(None, token_bytes(TOKENS[:3200]), 2)[256:]
    assert selected["source"] == {
        "instance_id": "has",
        "dp_rank": 0,
        "kv_source": "tcp://10.0.0.1:7777",
        "tokens": {"GPU": 2560, "CPU": 128},
        "engine_hashes": hashes,
    }
    assert selected["headers"]["x-kv-cache-source-host-port"] == "10.0.0.1:7777"
    own = await select(client, "has")
    assert "source" not in own, "nobody copies from itself"
    near = await select(client, "lacks", token_ids=TOKENS[:1534])
    assert "source" not in near, "1,022 tokens are not worth it"


async def test_without_a_registration_that_names_one_there_is_no_source(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("has", kv_bytes_per_token=1, transfer_gbps=1)
    await register("lacks", kv_hints=True)
    await hold("has", TOKENS)
    selected = await select(client, "lacks")
    assert "source" not in selected
    assert selected["headers"].keys() <= {"x-gateway-destination-endpoint"}


@pytest.mark.parametrize(("gbps", "is_cheaper"), [(10.0, True), (0.001, False), (0.0, True)])
async def test_copying_has_to_be_cheaper_than_computing(
    store: Store, make_client: MakeClient, register: Register, hold: Hold, gbps: float, is_cheaper: bool
) -> None:
    """At 10,000 tokens a second a token costs 0.1 ms; 100 kB cost 0.08 ms at 10 Gbit/s."""
    replica = await make_client(store, prefill_tokens_per_second=10_000)
    await register("has", **SOURCE, kv_bytes_per_token=100_000, transfer_gbps=gbps)
    await register("lacks")
    await hold("has", TOKENS)
    assert ("source" in await select(replica, "lacks")) == is_cheaper


async def test_a_source_has_room_again_when_its_pull_has_ended(
    store: Store, make_client: MakeClient, register: Register, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PULLS_MAX", 1)
    replica = await make_client(store)
    await register("has", **SOURCE)
    await register("lacks")
    await hold("has", TOKENS)
    for fields in ({"part": "prefill"}, {}, {"outcome": "failed"}):
        first = await select(replica, "lacks")
        assert "source" in first
        assert "source" not in await select(replica, "lacks"), "it has as many as it may have"
        await release(replica, first, part="renew", timeout_seconds=60)
        assert "source" not in await select(replica, "lacks"), "a longer reservation is the same pull"
        await release(replica, first, **fields)
        again = await select(replica, "lacks")
        assert "source" in again
        await release(replica, again)


async def test_a_pull_that_nobody_ends_is_over_with_its_reservation(
    store: Store, make_client: MakeClient, register: Register, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PULLS_MAX", 1)
    replica = await make_client(store)
    await register("has", **SOURCE)
    await register("lacks")
    await hold("has", TOKENS)
    assert "source" in await select(replica, "lacks", timeout_seconds=1)

    async def has_room() -> bool:
        return "source" in await select(replica, "lacks")

    await wait_until(has_room, "the reservation is over")


async def test_a_repeated_request_has_its_source_again(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("has", **SOURCE)
    await register("lacks")
    await hold("has", TOKENS)
    first = await select(client, "lacks", request_id="r")
    again = await select(client, "lacks", request_id="r")
    assert (first["source"], first["reservation"]) == (again["source"], again["reservation"])


@pytest.mark.outside
@pytest.mark.parametrize("store", ["real"], indirect=True)
async def test_eight_replicas_keep_each_source_within_its_bound(
    store: Store, make_client: MakeClient, register: Register, hold: Hold
) -> None:
    """200 decisions of one instant, with two engines that count the pulls that are under way."""
    replicas = [await make_client(store, query_deadline_ms=60_000) for _ in range(8)]
    for name in ("a", "b"):
        await register(name, kv_source=f"tcp://10.0.0.{ord(name)}:7777")
        await hold(name, TOKENS)
    targets = [f"idle-{number}" for number in range(4)]
    for name in targets:
        await register(name)
    under_way: Counter[str] = Counter()
    pulls: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def one(replica: httpx.AsyncClient) -> None:
        selected = await select(replica, *targets)
        if "source" in selected:
            engine = selected["source"]["instance_id"]
            under_way[engine] += 1
            pulls[engine] += 1
            most[engine] = max(most[engine], under_way[engine])
            await asyncio.sleep(0)
            under_way[engine] -= 1
        await release(replica, selected)

    await asyncio.gather(*(one(replicas[at % 8]) for at in range(200)))
    assert pulls["a"] >= 4 <= pulls["b"]
    assert max(most.values()) <= 4
    # Without an end of any, each has as many as it may have.
    found = await asyncio.gather(*(select(replicas[at % 8], *targets) for at in range(40)))
    assert Counter(each["source"]["instance_id"] for each in found if "source" in each) == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_source", "http://10.0.0.1:7777"), ("kv_source", "tcp://10.0.0.1"), ("transfer_gbps", -1), ("kv_hints", 2)],
)
async def test_a_field_that_does_not_fit_is_named(api: httpx.AsyncClient, field: str, value: Any) -> None:
    body = {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557", "modelname": "m", "block_size": 2, "instance_id": "a"}
    answer = await api.post("/register", json=body | {field: value})
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_a_source_is_named_only_where_endpoints_are_allowed(store: Store, make_client: MakeClient) -> None:
    api = await make_client(store, allowed_endpoints=("10.1.0.0/16",))
    body = {"type": "vLLM", "endpoint": "tcp://10.1.0.1:5557", "modelname": "m", "block_size": 2, "instance_id": "a"}
    refused = await api.post("/register", json=body | SOURCE)
    assert (refused.status_code, refused.json()["field"]) == (400, "kv_source")
