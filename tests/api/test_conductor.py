"""The root API: registrations come and go, queries tell what each instance has."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import httpx
import msgpack
import orjson
import pytest
from aiohttp import web

from tests.api.conftest import Hold, MakeClient
from tests.domain.prompts import BLOCK_SIZE, holder, publisher, table, value, walk
from tests.masters import started_master
from tests.patience import patient
from waymark.api import conductor
from waymark.api.conductor import AnswerCache, MatchRows, UnmatchedRows
from waymark.base.metrics import Metrics
from waymark.decide import asked_pools
from waymark.domain.hashing import extend, namespace, token_bytes
from waymark.domain.match import ConductorRow, Walk, conductor_rows, in_tokens
from waymark.domain.pool_keys import AskedPrompt, PromptIds, key_forms
from waymark.domain.table import HolderTable, View
from waymark.store.reader import Reading
from waymark.store.steps import Steps
from waymark.store.store import Store

TOKENS = [101, 15, 100, 55, 89, 63]

Register = Callable[..., Awaitable[None]]


def row(
    longest: int = 0, gpu: int = 0, dp: dict[str, int] | None = None, cpu: int = 0, disk: int = 0
) -> dict[str, Any]:
    return {"longest_matched": longest, "GPU": gpu, "DP": {"0": 0} if dp is None else dp, "CPU": cpu, "DISK": disk}


async def ask(client: httpx.AsyncClient, path: str = "/query", **fields: Any) -> Any:
    body = {"model": "m", "block_size": 2} | fields
    if path == "/query":
        body = {"token_ids": TOKENS} | body
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_worked_example_of_the_contract(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("engine", dp_rank=0)
    await register("engine", dp_rank=1)
    await register("pool", type="Mooncake")
    await hold("engine", TOKENS, rank=0, blocks=[0, 1])
    await hold("engine", TOKENS, rank=1, blocks=[0])
    await hold("pool", TOKENS, medium="CPU", blocks=[0, 1])
    await hold("pool", TOKENS, medium="DISK", blocks=[0, 2])

    answer = await ask(client)
    assert answer == {"default": {"engine": row(6, 4, {"0": 4, "1": 2}, 4, 4)}}
    assert list(answer["default"]["engine"]) == ["longest_matched", "GPU", "DP", "CPU", "DISK"]

    by_hash = await ask(client, "/query_by_hash", seq_hashes=extend(None, token_bytes(TOKENS), 2))
    assert by_hash == answer


@pytest.mark.outside
async def test_blocks_of_a_pool_without_events_count(
    make_client: MakeClient, store: Store, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "SECONDS", patient(5.0))
    client = await make_client(store)
    common = {"modelname": "m", "block_size": 2}
    async with started_master() as master:
        for instance_id in ("a", "b"):
            body = common | {
                "type": "vLLM",
                "instance_id": instance_id,
                "endpoint": f"tcp://10.0.0.7:5{ord(instance_id)}",
            }
            assert (await client.post("/register", json=body)).status_code == 200
        pool = {"type": "Mooncake", "instance_id": "pool", "query_endpoint": master.url, "query_keys": ["{sha256}"]}
        assert (await client.post("/register", json=common | pool)).status_code == 200
        await hold("a", TOKENS, rank=0, blocks=[0])
        read = key_forms(("{sha256}",))
        assert read is not None
        salted = PromptIds(token_bytes(TOKENS), namespace(None, ["s"]))
        first, second, _ = read.hashes(AskedPrompt(PromptIds(token_bytes(TOKENS), 0), 2, "m"))
        master.has = {first, second, *read.hashes(AskedPrompt(salted, 2, "m", "s"))}

        a = row(4, 2, {"0": 2}, 0, 4)
        assert await ask(client) == {"default": {"a": a, "b": row(4, 0, {"0": 0}, 0, 4)}}
        assert await ask(client, instance_id="a", block_size=None) == {"default": {"a": a}}
        assert (await ask(client, cache_salt="s"))["default"]["a"]["longest_matched"] == 6
        asked = len(master.asked)
        nothing = {"default": {"a": row(), "b": row()}}
        assert await ask(client, cache_salt="t", lora_name="x") == nothing
        hashes = {"token_ids": None, "seq_hashes": [1, 2]}
        assert await ask(client, "/query_by_hash", **hashes) == nothing
        assert len(master.asked) == asked

        async def refused() -> web.Response:
            return web.Response(status=503)

        master.answer, master.has = refused, set()
        assert await ask(client, token_ids=[*TOKENS, 7, 8]) == {"default": {"a": row(2, 2, {"0": 2}), "b": row()}}


async def test_every_instance_of_the_model_is_a_row(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a")
    await register("b", dp_rank=3)
    await register("other-model", modelname="n")
    await register("other-tenant", tenant_id="t")
    await hold("a", TOKENS[:4])
    assert await ask(client) == {"default": {"a": row(4, 4, {"0": 4}), "b": row(dp={"3": 0})}}
    assert await ask(client, tenant_id="t") == {"t": {"other-tenant": row()}}


async def test_instance_id_asks_for_one_row(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a")
    await register("b")
    await register("pool", type="Mooncake")
    await hold("a", TOKENS)
    assert await ask(client, instance_id="a") == {"default": {"a": row(6, 6, {"0": 6})}}
    assert await ask(client, instance_id="b") == {"default": {"b": row()}}
    assert await ask(client, instance_id="nobody") == {"default": {"nobody": row(dp={})}}
    assert await ask(client, instance_id="pool") == {"default": {"pool": row(dp={})}}
    assert await ask(client, instance_id="") == await ask(client)


async def test_unknown_model_and_unknown_tenant(client: httpx.AsyncClient, register: Register) -> None:
    assert await ask(client) == {}
    await register("a")
    assert await ask(client, model="unknown") == {"default": {}}
    assert await ask(client, model="unknown", instance_id="a") == {"default": {"a": row(dp={})}}
    assert await ask(client, tenant_id="unknown") == {}
    assert await ask(client, tenant_id="unknown", instance_id="a") == {}


async def test_tenant_without_registrations_is_not_known_any_more(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a")
    await hold("a", TOKENS)
    assert (await client.post("/unregister", json={"instance_id": "a"})).status_code == 200
    assert await ask(client) == {}
    await register("pool", type="Mooncake")
    assert await ask(client) == {"default": {}}


async def test_a_query_creates_nothing(client: httpx.AsyncClient, store: Store, register: Register) -> None:
    await register("a")
    groups = await store.directory.groups()
    await ask(client, model="unknown")
    await ask(client, tenant_id="unknown")
    assert await store.directory.groups() == groups


@pytest.mark.parametrize("tokens", [[], [101], TOKENS[:1]])
async def test_prompt_without_a_complete_block_matches_nothing(
    client: httpx.AsyncClient, register: Register, hold: Hold, tokens: list[int]
) -> None:
    await register("a")
    await hold("a", TOKENS)
    assert await ask(client, token_ids=tokens) == {"default": {"a": row()}}


async def test_long_prompt_matches_over_many_chunks(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    tokens = list(range(3001))
    await register("a")
    await hold("a", tokens)
    assert await ask(client, token_ids=tokens) == {"default": {"a": row(3000, 3000, {"0": 3000})}}
    assert await ask(client, token_ids=tokens[:2000] + [7] + tokens[2001:]) == {
        "default": {"a": row(2000, 2000, {"0": 2000})}
    }


async def test_another_block_size_matches_nothing(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a")
    await hold("a", TOKENS)
    assert await ask(client, block_size=1) == {"default": {"a": row()}}


async def test_new_medium_and_rank_known_from_batches_only(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a", dp_rank=2)
    await hold("a", TOKENS[:2], rank=2, batch_rank=10, medium="CXL")
    expected = row(2, 0, {"2": 0, "10": 2}) | {"CXL": 2}
    answer = await ask(client)
    assert answer == {"default": {"a": expected}}
    assert list(answer["default"]["a"]["DP"]) == ["2", "10"]


def test_further_media_come_last_and_in_order() -> None:
    answer = in_tokens(ConductorRow(longest=3, media={"ZNS": 1, "CXL": 2, "GPU": 3}, ranks={10: 3, 9: 0}), 16)
    assert list(answer) == ["longest_matched", "GPU", "DP", "CPU", "DISK", "CXL", "ZNS"]
    assert list(answer["DP"]) == ["9", "10"]
    assert answer == {"longest_matched": 48, "GPU": 48, "DP": {"9": 0, "10": 48}, "CPU": 0, "DISK": 0} | {
        "CXL": 32,
        "ZNS": 16,
    }


async def test_salts_separate_and_either_field_may_carry_them(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a")
    await hold("a", TOKENS, salts=["w8a8"])
    matched, nothing = {"default": {"a": row(6, 6, {"0": 6})}}, {"default": {"a": row()}}
    assert await ask(client) == nothing
    assert await ask(client, cache_salt="w8a8") == matched
    assert await ask(client, additional_salt="w8a8") == matched
    assert await ask(client, additionalsalt="w8a8", cache_salt="") == matched
    assert await ask(client, additional_salt="w8", cache_salt="a8") == nothing
    await hold("a", TOKENS[:2], salts=["x", "y"])
    assert (await ask(client, additional_salt="x", cache_salt="y"))["default"]["a"]["GPU"] == 2
    assert await ask(client, additional_salt="y", cache_salt="x") == nothing


async def test_adapters_separate_and_an_id_is_not_a_name(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a")
    await hold("a", TOKENS[:2], adapter=7)
    await hold("a", TOKENS[:4], adapter="7")
    asked: dict[str, dict[str, Any]] = {
        "base": {},
        "id": {"lora_id": 7},
        "name": {"lora_name": "7"},
        "empty": {"lora_name": ""},
    }
    lengths = {}
    for name, fields in asked.items():
        lengths[name] = (await ask(client, **fields))["default"]["a"]["longest_matched"]
    assert lengths == {"base": 0, "id": 2, "name": 4, "empty": 0}
    refused = await client.post(
        "/query", json={"model": "m", "block_size": 2, "token_ids": [], "lora_name": "x", "lora_id": 1}
    )
    assert refused.status_code == 400
    assert refused.json()["field"] == "lora_id"


@pytest.mark.parametrize("spelling", ["seq_hashes", "block_hash", "block_hashes"])
async def test_hashes_may_be_signed_or_decimal_strings(
    client: httpx.AsyncClient, register: Register, hold: Hold, spelling: str
) -> None:
    await register("a")
    await hold("a", TOKENS)
    hashes = extend(None, token_bytes(TOKENS), 2)
    expected = {"default": {"a": row(6, 6, {"0": 6})}}
    assert await ask(client, "/query_by_hash", **{spelling: hashes}) == expected
    assert await ask(client, "/query_by_hash", **{spelling: [str(h) for h in hashes]}) == expected
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    assert any(h < 0 for h in signed)
    assert await ask(client, "/query_by_hash", **{spelling: signed}) == expected
    assert await ask(client, "/query_by_hash", **{spelling: []}) == {"default": {"a": row()}}


@pytest.mark.parametrize("media_type", ["application/msgpack", "application/x-msgpack"])
async def test_msgpack_is_answered_in_msgpack(
    client: httpx.AsyncClient, register: Register, hold: Hold, media_type: str
) -> None:
    await register("a")
    await hold("a", TOKENS)
    hashes = extend(None, token_bytes(TOKENS), 2)
    for path, fields in (
        ("/query", {"token_ids": TOKENS}),
        ("/query", {"token_ids": token_bytes(TOKENS)}),
        ("/query_by_hash", {"seq_hashes": hashes}),
        ("/query_by_hash", {"seq_hashes": b"".join(h.to_bytes(8, "little") for h in hashes)}),
    ):
        body = msgpack.packb({"model": "m", "block_size": 2} | fields)
        answer = await client.post(path, content=body, headers={"content-type": media_type})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/msgpack"
        told = msgpack.unpackb(answer.content)
        assert told.pop("instances")["a"]["longest_matched"] == 6
        assert told == {"default": {"a": row(6, 6, {"0": 6})}}


async def test_registering_again_moves_or_conflicts(client: httpx.AsyncClient, store: Store) -> None:
    body = {"type": "SGLang", "endpoint": "tcp://a:1", "model": "m", "instance_id": "i", "block_size": 16}
    body["replay_endpoint"] = "tcp://a:2"
    for _ in range(2):
        answer = await client.post("/register", json=body)
        assert (answer.status_code, answer.json()) == (
            200,
            {"status": "registered successfully", "instance_id": "i"},
        )
    assert (await client.post("/register", json=body | {"endpoint": "tcp://b:1"})).status_code == 200
    for name, changed in {
        "block_size": 32,
        "model": "other",
        "type": "vllm",
        "lora_name": "x",
        "additional_salt": "very-secret",
        "scope": "shared",
    }.items():
        conflict = await client.post("/register", json=body | {"endpoint": "tcp://b:1", name: changed})
        assert conflict.status_code == 409, name
        assert conflict.json()["reason"] == "conflict"
        assert "very-secret" not in conflict.text
    (registration,) = await store.directory.registrations()
    assert (registration.endpoint, registration.block_size) == ("tcp://b:1", 16)


async def test_unregister_takes_out_a_rank_or_the_instance(client: httpx.AsyncClient, register: Register) -> None:
    for rank in (0, 1, 2):
        await register("a", dp_rank=rank)
    await register("a", tenant_id="t")
    await register("b")
    one = await client.post("/unregister", json={"instance_id": "a", "dp_rank": 1, "block_size": "not used"})
    assert one.json() == {"status": "unregistered successfully", "removed_instances": ["a|default|1"]}
    rest = await client.post("/unregister", json={"instance_id": "a", "tenant_id": None})
    assert rest.json()["removed_instances"] == ["a|default|0", "a|default|2"]
    gone = await client.post("/unregister", json={"instance_id": "a", "dp_rank": 0})
    assert gone.status_code == 404
    assert gone.json() == {
        "error": 'service not found: a|default|0; no publisher is registered with instance_id "a", '
        'tenant_id "default" and dp_rank 0; GET /workers lists those that are',
        "reason": "not_found",
    }
    assert await ask(client) == {"default": {"b": row()}}


async def test_partial_reading_is_marked_and_counted(
    client: httpx.AsyncClient,
    store: Store,
    make_client: MakeClient,
    register: Register,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await register("a")
    await hold("a", TOKENS)
    metrics = Metrics()
    counted = await make_client(store, metrics=metrics)
    body = {"model": "m", "block_size": 2, "token_ids": TOKENS}
    complete = await counted.post("/query", json=body)
    assert "x-waymark-partial" not in complete.headers

    read = store.reader.reading

    def cut_short(*args: Any, **options: Any) -> Steps[Reading | None]:
        reading = yield from read(*args, **options)
        assert reading is not None
        return Reading(reading.walk, True, reading.round_trips, reading.blocks)

    monkeypatch.setattr(store.reader, "reading", cut_short)
    partial = await counted.post("/query", json=body)
    assert partial.headers["x-waymark-partial"] == "true"
    assert partial.json() == complete.json()
    value = metrics.registry.get_sample_value
    assert value("waymark_query_partial_total") == 1
    assert value("waymark_query_blocks_sum") == 6
    assert value("waymark_query_matched_blocks_sum") == 6
    assert (value("waymark_query_round_trips_sum") or 0) >= 2
    labels = {"route": "/query", "method": "POST", "status": "200"}
    assert value("waymark_http_requests_total", labels) == 2
    assert value("waymark_http_request_duration_seconds_count", {"route": "/query"}) == 2


async def test_endpoints_may_be_limited_by_the_operator(memory_store: Store, make_client: MakeClient) -> None:
    client = await make_client(memory_store, allowed_endpoints=("10.0.0.0/8", "*.engines.svc"))
    body = {"type": "vLLM", "model": "m", "instance_id": "i", "block_size": 16}
    allowed = await client.post("/register", json=body | {"endpoint": "tcp://10.1.2.3:5557"})
    assert allowed.status_code == 200
    for fields, field in (
        ({"endpoint": "tcp://169.254.169.254:80"}, "endpoint"),
        ({"endpoint": "tcp://a.engines.svc:1", "replay_endpoint": "tcp://evil:1"}, "replay_endpoint"),
        ({"endpoint": "tcp://10.1.2.3:1", "address": "http://evil:8000"}, "address"),
        ({"endpoint": "tcp://10.1.2.3:1", "metrics_url": "http://169.254.169.254/metrics"}, "metrics_url"),
    ):
        refused = await client.post("/register", json=body | fields | {"instance_id": "j"})
        assert (refused.status_code, refused.json()["field"]) == (400, field)
    dynamo = await client.post(
        "/dynamo/register", json={"instance_id": 1, "endpoint": "tcp://evil:1", "model_name": "m", "block_size": 16}
    )
    assert dynamo.status_code == 400


def of_holders(count: int, first: int = 1) -> HolderTable:
    publishers = {i: publisher(f"pod-{i}") for i in range(first, first + count)}
    return table(publishers, *(holder(i, i, f"pod-{i}") for i in publishers))


def counted(of: Walk) -> dict[str, object]:
    return {name: in_tokens(row, BLOCK_SIZE) for name, row in conductor_rows(of).items()}


def value_of(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"waymark_answer_cache_{name}")


def test_what_is_remembered_is_counted_and_right() -> None:
    metrics, of = Metrics(), of_holders(2)
    rows = AnswerCache(1 << 20, metrics)
    for found in ([value(1, 2), value(1)], [value(1, 2)], [value(2)], [None]):
        first = rows.of_walk(walk(of, found))
        assert first.rows == counted(walk(of, found))
        assert first.json == orjson.dumps(first.rows)
        assert rows.of_walk(walk(of, found)) is first
    assert value_of(metrics, "hits_total") == 4
    assert value_of(metrics, "bytes") == rows.bytes > 0


@pytest.mark.parametrize("seed", range(20))
def test_rows_without_a_match_stand_between_those_with_one(seed: int) -> None:
    """Whatever the names, the ranks, and what a pool has: the text is that of all rows, in order of registration."""
    random = Random(seed)
    names = [f"{random.choice(['pod', 'ä', chr(34), chr(92), chr(10)])}-{i // 3}" for i in range(30)]
    publishers = {i: publisher(name, rank=i % 3) for i, name in enumerate(names, 1)}
    publishers |= {40: publisher("store", scope="shared")} if random.random() < 0.3 else {}
    holders = [
        holder(
            i, i, of.instance_id, random.choice([of.dp_rank, 7]), random.choice(["GPU", "CPU", "XPU"]), scope=of.scope
        )
        for i, of in publishers.items()
    ]
    of = table(publishers, *holders)
    for _ in range(10):
        chosen = random.sample(list(publishers), random.choice([0, 1, 2, 8]))
        found = walk(of, [value(*chosen)] * 2 + [value(*chosen[:1])] * 2)
        rows = {name: in_tokens(row, BLOCK_SIZE) for name, row in conductor_rows(found).items()}
        answer = MatchRows(found, UnmatchedRows(found.view))
        assert answer.json == orjson.dumps(rows)
        assert list(answer.rows.items()) == list(rows.items())


def test_another_table_is_counted_anew() -> None:
    rows = AnswerCache(1 << 20, Metrics())
    assert rows.of_walk(walk(of_holders(2), [value(1, 2)])).rows.keys() == {"pod-1", "pod-2"}
    assert rows.of_walk(walk(of_holders(1, first=2), [value(1, 2)])).rows.keys() == {"pod-2"}


def test_without_room_nothing_is_remembered() -> None:
    metrics, of = Metrics(), of_holders(2)
    rows = AnswerCache(0, metrics)
    for _ in range(3):
        assert rows.of_walk(walk(of, [value(1)])).rows == counted(walk(of, [value(1)]))
    assert (value_of(metrics, "hits_total"), value_of(metrics, "bytes")) == (0, 0)


def test_answers_of_a_view_that_is_larger_than_the_cache_are_kept() -> None:
    rows, of = AnswerCache(24_000, Metrics()), of_holders(100)
    kept = rows.of_walk(walk(of, [value(1)]))
    assert rows.of_walk(walk(of, [value(1)])) is kept
    assert 0 < rows.bytes <= 24_000


def test_the_rows_that_answers_share_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Counted(UnmatchedRows):
        def __init__(self, view: View | None) -> None:
            made.append(view)
            super().__init__(view)

    monkeypatch.setattr(conductor, "UnmatchedRows", Counted)
    rows, of = AnswerCache(20_000, Metrics()), of_holders(100)
    for number in range(1, 101):
        rows.of_walk(walk(of, [value(number)]))
        assert rows.bytes <= 20_000
    assert len(made) == 1
    rows.of_walk(walk(of_holders(2), [value(1)]))
    assert len(made) == 2
    rows.clear()
    del made[:], of
    gc.collect()
    assert len(rows._unmatched) == 0, "they end with their view"


def test_an_answer_without_room_takes_none_from_others() -> None:
    of = of_holders(20)
    rows = AnswerCache(12_000, Metrics())
    kept, large = rows.of_walk(walk(of, [value(1)])), [value(*range(1, 21))]
    for _ in range(2):
        assert rows.of_walk(walk(of, large)).rows == counted(walk(of, large))
    assert rows.of_walk(walk(of, [value(1)])) is kept


def test_all_that_is_kept_of_a_large_group_is_counted() -> None:
    """Also the rows that its answers share, and the second form of an answer."""
    of, rows = of_holders(500), AnswerCache(1 << 20, Metrics())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 60):
            found = walk(of, [value(number)] * 2)
            assert len(rows.instances(found, rows.of_walk(found))) == 500
        del found
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 2 * (1 << 20)


@pytest.mark.parametrize("bytes_max", [20_000, 100_000])
def test_it_never_takes_more_than_it_may_and_stays_right(bytes_max: int) -> None:
    metrics, random = Metrics(), Random(1)
    rows = AnswerCache(bytes_max, metrics)
    tables = [of_holders(3), of_holders(5), of_holders(3)]
    for _ in range(2000):
        of = random.choice(tables)
        found = [value(*random.choice([(1,), (1, 2), (2, 3)]))] * random.randrange(4) + [value(1)] * random.randrange(4)
        assert rows.of_walk(walk(of, found)).rows == counted(walk(of, found))
        assert rows.bytes <= bytes_max
    assert (value_of(metrics, "hits_total") or 0) > 10
