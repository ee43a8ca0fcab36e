"""The Dynamo API, where the contract says more than a recorded session shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Hold, MakeClient
from tests.masters import started_master
from tests.patience import patient
from waymark.api.dynamo.queries import is_worker_id
from waymark.decide import asked_pools
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.pool_keys import page_hashes
from waymark.store import selections
from waymark.store.reader import Reading
from waymark.store.steps import Steps
from waymark.store.store import Store

TOKENS = [101, 15, 100, 55, 89, 63]
REGISTER = {"instance_id": 1, "endpoint": "tcp://10.0.0.1:5557", "model_name": "m", "block_size": 2}

Register = Callable[..., Awaitable[None]]


async def ask(client: httpx.AsyncClient, path: str = "/dynamo/query", **fields: Any) -> Any:
    body = {"model_name": "m"} | ({"token_ids": TOKENS} if path == "/dynamo/query" else {}) | fields
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def instance(gpu: int, dp: dict[str, int], cpu: int, disk: int) -> dict[str, Any]:
    return {"longest_matched": disk, "gpu": gpu, "dp": dp, "cpu": cpu, "disk": disk}


async def test_a_faster_medium_continues_a_slower_chain(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("1")
    await hold("1", TOKENS, blocks=[0])
    await hold("1", TOKENS, blocks=[1], medium="DISK")
    await hold("1", TOKENS, blocks=[2], medium="CPU")
    await register("2")
    await hold("2", TOKENS, blocks=[0], medium="CPU")
    await hold("2", TOKENS, blocks=[1, 2])
    answer = await ask(client)
    assert answer["instances"] == {"1": instance(2, {"0": 2}, 2, 6), "2": instance(0, {"0": 0}, 6, 6)}
    assert answer["scores"] == {"1": {"0": 2}}


async def test_an_instance_is_its_best_rank_not_their_sum(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    for rank in (0, 1, 2):
        await register("1", dp_rank=rank)
    await hold("1", TOKENS, rank=0, blocks=[0, 1])
    await hold("1", TOKENS, rank=1, blocks=[0, 1, 2], medium="CPU")
    await hold("1", TOKENS, rank=2, blocks=[1, 2])
    answer = await ask(client)
    assert answer["instances"] == {"1": instance(4, {"0": 4, "1": 0}, 6, 6)}
    assert answer["scores"] == {"1": {"0": 4}}


@pytest.mark.outside
async def test_a_pool_without_events_is_asked_for_its_blocks(
    make_client: MakeClient, store: Store, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "SECONDS", patient(5.0))
    client = await make_client(store)
    assert (await client.post("/dynamo/register", json=REGISTER)).status_code == 201
    await hold("1", TOKENS, blocks=[0])
    async with started_master() as master:
        pool = {"type": "Mooncake", "instance_id": "pool", "modelname": "m", "block_size": 2}
        answer = await client.post("/register", json=pool | {"query_endpoint": master.url, "shards": 1})
        assert answer.status_code == 200
        master.has = {f"m_{page}__k" for page in [*page_hashes(token_bytes(TOKENS), 2)][:2]}
        assert (await ask(client))["instances"] == {"1": instance(2, {"0": 2}, 2, 4)}
        assert (await ask(client, cache_salt="s"))["instances"] == {}
        assert len(master.asked) == 1
        # vLLM's hashes contain the salt, so the prompt is asked for with it.
        vllm = {"query_endpoint": master.url, "shards": 1, "query_keys": ["m@{sha256}"]}
        assert (await client.post("/register", json=pool | vllm)).status_code == 200
        body = {"model_name": "m", "token_ids": TOKENS}
        for number, path in enumerate(("query", "select", "overlap_scores"), 2):
            answer = await client.post(f"/dynamo/{path}", json=body | {"cache_salt": path})
            assert (answer.status_code, len(master.asked)) == (200, number), answer.text


async def test_a_pool_counts_for_every_rank_of_every_instance(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("1", dp_rank=0)
    await register("1", dp_rank=1)
    await register("2")
    await register("9", type="Mooncake")
    await hold("1", TOKENS, rank=1, blocks=[0])
    await hold("9", TOKENS, medium="CPU", blocks=[0, 1])
    answer = await ask(client)
    assert answer["instances"] == {"1": instance(2, {"0": 0, "1": 2}, 4, 4), "2": instance(0, {"0": 0}, 4, 4)}
    assert answer["scores"] == {"1": {"1": 2}}


async def test_both_apis_see_the_same_blocks(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    assert (await client.post("/dynamo/register", json=REGISTER)).status_code == 201
    await register("by-name")
    await register("007")
    for instance_id in ("1", "by-name", "007"):
        await hold(instance_id, TOKENS)
    assert set((await ask(client))["instances"]) == {"1"}
    root = await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": TOKENS})
    assert set(root.json()["default"]) == {"1", "by-name", "007"}
    assert [worker["instance_id"] for worker in (await client.get("/dynamo/workers")).json()] == [1]
    services = (await client.get("/services")).json()["services"]
    assert (services[0]["InstanceID"], services[0]["Type"]) == ("1", "vLLM")


@pytest.mark.parametrize(
    ("instance_id", "is_one"),
    [
        ("0", True),
        ("18446744073709551615", True),
        ("18446744073709551616", False),
        ("00", False),
        ("01", False),
        ("-1", False),
        ("", False),
        ("1 ", False),
        ("\u0661", False),
        ("1" * 5000, False),
    ],
)
def test_a_worker_id_is_a_canonical_u64(instance_id: str, is_one: bool) -> None:
    assert is_worker_id(instance_id) is is_one


async def test_one_block_size_per_model_and_group_whoever_registered_first(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("first", block_size=2)
    await register("1", block_size=3)
    await hold("1", TOKENS)
    assert (await ask(client))["instances"] == {}
    refused = await client.post("/dynamo/register", json=REGISTER | {"instance_id": 2, "block_size": 3})
    assert refused.status_code == 409
    assert refused.json() == {"error": "block_size mismatch for model=m routing_group=default: existing=2, requested=3"}
    assert (await client.post("/dynamo/register", json=REGISTER | {"instance_id": 2})).status_code == 201
    await hold("2", TOKENS)
    assert set((await ask(client))["instances"]) == {"2"}


@pytest.mark.parametrize("block_size", [0, 65537])
async def test_impossible_block_sizes_are_400(api: httpx.AsyncClient, block_size: int) -> None:
    answer = await api.post("/dynamo/register", json=REGISTER | {"block_size": block_size})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]


async def test_the_same_rank_under_another_model_is_named(client: httpx.AsyncClient, register: Register) -> None:
    await register("1", modelname="n")
    answer = await client.post("/dynamo/register", json=REGISTER)
    assert answer.status_code == 409
    assert answer.json() == {"error": "instance 1 is already registered for model=n routing_group=default"}


async def test_where_reads_are_protected_the_other_group_is_not_named(
    store: Store, make_client: MakeClient, register: Register
) -> None:
    """It may be another tenant's."""
    await register("1", tenant_id="acme", modelname="secret")
    client = await make_client(store, api_token="s3cret", protect_reads=True)
    answer = await client.post("/dynamo/register", json=REGISTER, headers={"authorization": "Bearer s3cret"})
    assert answer.status_code == 409
    assert answer.json() == {"error": "instance 1 is already registered for another model or routing_group"}


@pytest.mark.parametrize("there", [{}, {"dp_rank": 1}, {"routing_group": "g"}, {"model_name": "n"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"dp_rank": 1}, {"block_size": 3}, {"model_name": "n"}], ids=str)
async def test_an_instance_is_of_one_model_and_routing_group(
    client: httpx.AsyncClient, store: Store, there: dict[str, Any], more: dict[str, Any]
) -> None:
    """As released: whatever its rank and block size are."""
    assert (await client.post("/dynamo/register", json=REGISTER | there)).status_code == 201
    before = await store.directory.registrations()
    model, group = there.get("model_name", "m"), there.get("routing_group", "default")
    for other in ("g", "h", "default"):
        if (more.get("model_name", "m"), other) != (model, group):
            answer = await client.post("/dynamo/register", json=REGISTER | more | {"routing_group": other})
            named = f"instance 1 is already registered for model={model} routing_group={group}"
            assert (answer.status_code, answer.json()) == (409, {"error": named})
    assert await store.directory.registrations() == before
    unregistered = {"instance_id": 1, "model_name": model, "routing_group": group}
    assert (await client.post("/dynamo/unregister", json=unregistered)).status_code == 200
    assert (await client.post("/dynamo/register", json=REGISTER | {"routing_group": "g"})).status_code == 201


@pytest.mark.parametrize("field", ["routing_group", "tenant_id"])
async def test_routing_group_and_tenant_are_one_key(client: httpx.AsyncClient, hold: Hold, field: str) -> None:
    assert (await client.post("/dynamo/register", json=REGISTER | {field: "g"})).status_code == 201
    await hold("1", TOKENS, tenant_id="g")
    for spelling in ("routing_group", "tenant_id"):
        assert set((await ask(client, **{spelling: "g"}))["instances"]) == {"1"}
    assert set((await ask(client, routing_group="g", tenant_id="other"))["instances"]) == {"1"}
    unknown = await client.post("/dynamo/query", json={"model_name": "m", "token_ids": TOKENS})
    assert (unknown.status_code, unknown.json()) == (404, {"error": "no indexer for model=m routing_group=default"})


async def test_salts_and_adapters_separate_here_too(client: httpx.AsyncClient, hold: Hold) -> None:
    assert (await client.post("/dynamo/register", json=REGISTER | {"additionalsalt": "s"})).status_code == 201
    await hold("1", TOKENS[:2], salts=["s"])
    await hold("1", TOKENS[:4], adapter="l")
    lengths = [
        (await ask(client, **fields))["instances"].get("1", {}).get("gpu")
        for fields in ({}, {"cache_salt": "s"}, {"lora_name": "l"}, {"lora_name": "l", "cache_salt": "s"})
    ]
    assert lengths == [None, 2, 4, None]


async def test_by_hash_takes_local_hashes_in_any_form(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("1")
    await hold("1", TOKENS)
    local = [extend(None, token_bytes(TOKENS[i : i + 2]), 2)[0] for i in (0, 2, 4)]
    expected = {"scores": {"1": {"0": 6}}, "frequencies": [], "instances": {"1": instance(6, {"0": 6}, 6, 6)}}
    path = "/dynamo/query_by_hash"
    assert await ask(client, path, block_hashes=local) == expected
    assert await ask(client, path, block_hashes=[h - 2**64 if h >= 2**63 else h for h in local]) == expected
    assert await ask(client, path, block_hashes=local, lora_name="l") == expected
    packed = msgpack.packb({"model_name": "m", "block_hashes": b"".join(h.to_bytes(8, "little") for h in local)})
    answer = await client.post(path, content=packed, headers={"content-type": "application/msgpack"})
    assert msgpack.unpackb(answer.content) == expected
    for salt in ("s", ""):
        refused = await client.post(path, json={"model_name": "m", "block_hashes": local, "cache_salt": salt})
        assert refused.status_code == 400


async def test_unregister_by_rank_group_and_model(client: httpx.AsyncClient, store: Store, register: Register) -> None:
    for rank in (0, 1):
        body = REGISTER | {"dp_rank": rank, "routing_group": "g"}
        assert (await client.post("/dynamo/register", json=body)).status_code == 201
    for rank in (0, 1):
        # In this API an instance is of one group; the root's may put it into a second one.
        await register("1", dp_rank=rank, tenant_id="h")

    async def left() -> set[tuple[str, int]]:
        return {(each.tenant_id, each.dp_rank) for each in await store.directory.registrations()}

    async def unregister(**fields: Any) -> int:
        return (
            await client.post("/dynamo/unregister", json={"instance_id": 1, "model_name": "m"} | fields)
        ).status_code

    assert await unregister(model_name="n") == 404
    assert await unregister(dp_rank=2) == 404
    assert await unregister(dp_rank=0, routing_group="g") == 200
    assert await left() == {("g", 1), ("h", 0), ("h", 1)}
    assert await unregister(dp_rank=1) == 200
    assert await left() == {("h", 0)}
    assert await unregister() == 200
    assert await left() == set()
    assert await unregister() == 404


async def test_dump_has_groups_and_nothing_to_recover(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("1")
    await register("2", tenant_id="t", block_size=16)
    await hold("1", TOKENS)
    dump = await client.get("/dynamo/dump")
    assert dump.json() == {
        "m:default": {"block_size": 2, "events": []},
        "m:t": {"block_size": 16, "events": []},
    }
    assert dump.headers["x-waymark-note"].startswith("nothing to recover")


async def test_workers_without_a_listener_and_pools(client: httpx.AsyncClient, register: Register) -> None:
    await register("1", type="standard", endpoint=None)
    await register("2", type="Mooncake")
    (worker,) = (await client.get("/dynamo/workers")).json()
    assert worker["instance_id"] == 1
    assert (worker["source"], worker["endpoints"], worker["listeners"]) == ("discovery", {}, {})


async def test_peers_are_kept_for_all_replicas_up_to_a_bound(
    api: httpx.AsyncClient, memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selections, "PEERS_MAX", 3)
    client, other = await make_client(memory_store), await make_client(memory_store)
    for i in (2, 1, 0, 0):
        assert (await client.post("/dynamo/register_peer", json={"url": f"http://{i}"})).status_code == 201
    full = await other.post("/dynamo/register_peer", json={"url": "http://one-more"})
    assert full.status_code == 400
    peers = await other.get("/dynamo/peers")
    assert peers.json() == ["http://0", "http://1", "http://2"]
    for answer in (peers, await other.post("/dynamo/deregister_peer", json={"url": "http://0"})):
        assert answer.headers["x-waymark-note"].startswith("nothing to recover")
    assert (await client.post("/dynamo/deregister_peer", json={"url": "http://0"})).status_code == 404
    assert (await client.get("/dynamo/peers")).json() == ["http://1", "http://2"]


async def test_metrics_have_the_names_of_the_release_too(
    client: httpx.AsyncClient, register: Register, away: Store, make_client: MakeClient
) -> None:
    await register(instance_id="1", model="m")
    await register(instance_id="2", model="m", tenant_id="t")
    await register(instance_id="2", model="m", tenant_id="t", dp_rank=1)
    await register(instance_id="named", model="m")
    for _ in range(2):
        await client.post("/dynamo/query", json={"model_name": "m", "token_ids": [1]})
    await client.post("/dynamo/query", json={"model_name": "other", "token_ids": [1]})
    await client.post("/query", json={"model": "m", "token_ids": [1]})
    answer = await client.get("/dynamo/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name.removeprefix("dynamo_kvindexer_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("dynamo_kvindexer_")
    }
    assert found["requests_total", "/query", "POST"] == 3
    assert found["errors_total", "/query", "4xx"] == 1
    assert found["request_duration_seconds_count", "/query"] == 3
    assert found["request_duration_seconds_bucket", "/query", "+Inf"] == 3
    assert (found["models",], found["workers",]) == (2, 2)
    assert [found["listeners", status] for status in ("pending", "active", "paused", "failed")] == [3, 0, 0, 0]
    # The answer also has our own metrics, which count this scrape's path as any other.
    assert 'waymark_http_requests_total{method="POST",route="/dynamo/query",status="200"} 2.0' in answer.text
    # Without Redis the gauges about Redis are missing, not zero.
    alone = await (await make_client(away)).get("/dynamo/metrics")
    assert alone.status_code == 200
    assert "dynamo_kvindexer_requests_total" in alone.text
    assert "dynamo_kvindexer_workers" not in alone.text


async def test_every_error_has_the_form_of_the_release(
    api: httpx.AsyncClient, away: Store, make_client: MakeClient
) -> None:
    broken = await make_client(away)
    answers = [
        await api.post("/dynamo/query", content=b"{"),
        await api.post("/dynamo/query", json={}),
        await api.post("/dynamo/query", content=b"", headers={"content-type": "text/plain"}),
        await api.get("/dynamo/query"),
        await api.post("/dynamo/unregister", json={"instance_id": 1, "model_name": "m"}),
        await broken.post("/dynamo/register", json=REGISTER),
    ]
    assert [answer.status_code for answer in answers] == [400, 422, 415, 405, 404, 503]
    assert all(list(answer.json()) == ["error"] for answer in answers)


async def test_partial_readings_are_marked_here_too(
    client: httpx.AsyncClient, store: Store, register: Register, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register("1")
    await hold("1", TOKENS)
    local = [extend(None, token_bytes(TOKENS[i : i + 2]), 2)[0] for i in (0, 2, 4)]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/dynamo/query", {"model_name": "m", "token_ids": TOKENS}),
        ("/dynamo/query_by_hash", {"model_name": "m", "block_hashes": local}),
        ("/query_by_hash", {"model": "m", "block_size": 2, "seq_hashes": extend(None, token_bytes(TOKENS), 2)}),
    ]
    complete = [await client.post(path, json=body) for path, body in requests]
    assert all("x-waymark-partial" not in answer.headers for answer in complete)
    read = store.reader.reading

    def cut_short(*args: Any, **options: Any) -> Steps[Reading | None]:
        reading = yield from read(*args, **options)
        assert reading is not None
        return Reading(reading.walk, True, reading.round_trips, reading.blocks)

    monkeypatch.setattr(store.reader, "reading", cut_short)
    partial = [await client.post(path, json=body) for path, body in requests]
    assert [answer.headers.get("x-waymark-partial") for answer in partial] == ["true"] * 3
    assert [answer.json() for answer in partial] == [answer.json() for answer in complete]


async def test_a_replica_that_knows_a_table_sees_a_model_go_and_come_back_with_another_block_size(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("1", block_size=2)
    await hold("1", TOKENS)
    for _ in range(2):
        assert (await ask(client))["scores"] == {"1": {"0": 6}}
    await client.post("/unregister", json={"instance_id": "1"})
    for _ in range(2):
        answer = await client.post("/dynamo/query", json={"model_name": "m", "token_ids": TOKENS})
        assert (answer.status_code, answer.json()["error"]) == (404, "no indexer for model=m routing_group=default")
    await register("1", block_size=3)
    await hold("1", TOKENS[:3])
    for _ in range(2):
        assert (await ask(client))["scores"] == {"1": {"0": 3}}
