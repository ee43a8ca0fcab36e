"""Registration by URL: every rank of an engine, or a sentence that names what is missing; and who may unregister."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.discovery.conftest import Engine, engine, start_engine, vllm_metrics
from tests.patience import patient
from waymark.api import first as first_questions
from waymark.domain.names import Origin
from waymark.store import keys
from waymark.store.store import Store

pytestmark = pytest.mark.outside

__all__ = ["engine", "start_engine"]

Post = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
async def post(make_client: MakeClient, store: Store) -> Post:
    client = await make_client(store)

    async def post(url: str, **fields: Any) -> httpx.Response:
        return await client.post("/register", json={"url": url} | fields)

    return post


async def services(store: Store) -> dict[int, dict[str, Any]]:
    return {
        each.dp_rank: {"instance": each.instance_id, "endpoint": each.endpoint, "block_size": each.block_size}
        for each in await store.directory.registrations()
    }


async def test_one_url_registers_every_rank(engine: Engine, post: Post, store: Store) -> None:
    engine.is_vllm(adapters=("sql",), engines=2)
    answer = await post(engine.url, tenant_id="t", role="decode")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "status": "registered successfully",
            "instance_id": engine.url.removeprefix("http://"),
            "model": "llama",
            "type": "vLLM",
            "block_size": 16,
            "adapters": ["sql"],
            "ranks": [
                {
                    "dp_rank": r,
                    "endpoint": f"tcp://127.0.0.1:{5557 + r}",
                    "replay_endpoint": f"tcp://127.0.0.1:{5657 + r}",
                    "snapshot_endpoint": None,
                }
                for r in range(2)
            ],
        },
    )
    first, second = await store.directory.registrations()
    assert (first.tenant_id, first.target.address, first.target.role) == ("t", engine.url, "decode")
    assert (first.target.adapters, first.target.aliases) == (("sql",), ("llama-alias",))
    assert first.origin == second.origin == Origin("url", engine.url)
    assert (await post(engine.url, tenant_id="t", role="decode")).status_code == 200
    assert len(await store.directory.registrations()) == 2


async def test_sglang_is_registered_by_one_url(engine: Engine, post: Post, store: Store) -> None:
    engine.is_sglang()
    assert (await post(engine.url + "/", instance_id="pod-1")).status_code == 200
    assert {each.name.rank for each in await store.directory.registrations()} == {
        ("pod-1", "default", 0),
        ("pod-1", "default", 1),
    }
    assert {each.kind for each in await store.directory.registrations()} == {"SGLang"}


async def test_what_an_engine_does_not_say_is_asked_of_the_client(engine: Engine, post: Post, store: Store) -> None:
    engine.is_vllm()
    del engine.answers["/kv_event_sources"]
    engine.answers["/metrics"] = 404
    answer = (await post(engine.url, type="vllm")).json()
    assert (answer["reason"], answer["field"]) == ("missing", "block_size")
    assert "Send block_size and endpoint" in answer["error"]
    assert "0.32" in answer["error"]
    assert "cache_config_info" in answer["error"]
    assert await store.directory.registrations() == []
    given = {"type": "vllm", "block_size": 32, "endpoint": "tcp://127.0.0.1:7"}
    assert (await post(engine.url, **given)).status_code == 200
    (registered,) = await store.directory.registrations()
    assert (registered.block_size, registered.endpoint, registered.model_name) == (32, "tcp://127.0.0.1:7", "llama")
    assert registered.origin.kind == "client"


async def test_an_engine_without_events_can_be_registered_for_requests(
    engine: Engine, post: Post, store: Store
) -> None:
    engine.is_vllm("off")
    answer = (await post(engine.url)).json()
    assert answer["field"] == "endpoint"
    assert '"type": "none"' in answer["error"]
    assert (await post(engine.url, type="none")).status_code == 200
    (registered,) = await store.directory.registrations()
    assert (registered.kind, registered.endpoint, registered.target.address) == ("none", None, engine.url)


@pytest.mark.parametrize(
    ("fields", "field", "named"),
    [
        ({"block_size": 32}, "block_size", "which has 16"),
        ({"modelname": "other"}, "modelname", 'which serves "llama"'),
        ({"dp_rank": 7}, "endpoint", "dp_rank that was given"),
        ({"url": "ftp://x"}, "url", "URL"),
        ({"url": 7}, "url", "URL"),
        ({"url": "http://user@host/"}, "url", "URL"),
        ({"dp_rank": -1}, "dp_rank", "integer"),
        ({"type": "llama.cpp"}, "type", "one of"),
        ({"role": "king"}, "role", "one of"),
    ],
)
async def test_what_contradicts_the_engine_is_refused(
    engine: Engine, post: Post, store: Store, fields: dict[str, Any], field: str, named: str
) -> None:
    engine.is_vllm()
    answer = await post(**({"url": engine.url} | fields))
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert named in answer.json()["error"]
    assert await store.directory.registrations() == []


async def test_one_rank_alone_can_be_registered(engine: Engine, post: Post, store: Store) -> None:
    engine.is_vllm()
    assert (await post(engine.url, dp_rank=1)).status_code == 200
    assert list(await services(store)) == [1]


async def test_a_conflict_of_one_rank_registers_none(
    engine: Engine, post: Post, store: Store, make_client: MakeClient
) -> None:
    engine.is_vllm()
    other = {"instance_id": "i", "dp_rank": 1, "type": "vLLM", "modelname": "m", "block_size": 16}
    client = await make_client(store)
    await client.post("/register", json=other | {"endpoint": "tcp://127.0.0.1:1"})
    answer = await post(engine.url, instance_id="i")
    assert (answer.status_code, answer.json()["field"]) == (409, "modelname")
    assert list(await services(store)) == [1]


async def test_an_engine_that_does_not_answer_registers_nothing(post: Post, store: Store, free_port: int) -> None:
    answer = await post(f"http://127.0.0.1:{free_port}")
    assert (answer.status_code, answer.json()["reason"]) == (503, "unavailable")
    assert f"http://127.0.0.1:{free_port}" in answer.json()["error"]
    assert await store.directory.registrations() == []


async def test_only_allowed_urls_are_asked(engine: Engine, make_client: MakeClient, store: Store) -> None:
    engine.is_vllm()
    client = await make_client(store, allowed_endpoints=("10.0.0.0/8",))
    answer = await client.post("/register", json={"url": engine.url})
    assert (answer.status_code, answer.json()["field"], engine.asked) == (400, "url", [])
    client = await make_client(store, allowed_endpoints=("http://127.0.0.1:*",))
    answer = await client.post("/register", json={"url": engine.url})
    assert "WAYMARK_ALLOWED_ENDPOINTS" in answer.json()["error"]  # its sockets are not allowed
    assert engine.asked != []
    assert await store.directory.registrations() == []


async def test_the_key_of_engines_is_sent(engine: Engine, make_client: MakeClient, store: Store) -> None:
    engine.is_vllm()
    client = await make_client(store, engine_api_key="secret", engine_key_hosts=("127.0.0.0/8",))
    assert (await client.post("/register", json={"url": engine.url})).status_code == 200
    assert engine.authorization == "Bearer secret"
    # Another host gets the same question without the key, although it may be asked.
    client = await make_client(store, engine_api_key="secret", engine_key_hosts=("*.engines.svc",))
    engine.authorization = "not asked"
    assert (await client.post("/register", json={"url": engine.url})).status_code == 200
    assert engine.authorization is None


@pytest.mark.parametrize(
    "url",
    ["{}?a=5ecret", "{}/?a=5ecret", "{}#5ecret", "{}/v1#5ecret", "{}/v1/?", "{}/#", "http://u:5ecret@{host}",
     "u:5ecret@{host}",
     "http://5ecret@{host}/?a", "http://u:5ecr?et@{host}", "http:/u:5ecret@{host}", "http://u:5ecret@[::1", "http://5ecret@"],
)  # fmt: skip
async def test_a_url_with_a_user_a_query_or_a_fragment_is_refused_and_not_shown(
    engine: Engine, make_client: MakeClient, store: Store, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    caplog.set_level(logging.DEBUG)
    engine.is_vllm()
    engine.authorization = "not asked"
    client = await make_client(store, access_log=True)
    given = url.replace("{host}", engine.url.removeprefix("http://")).replace("{}", engine.url)
    bodies: list[tuple[str, dict[str, Any]]] = [("url", {"url": given})]
    full = {"type": "none", "instance_id": "a", "modelname": "m", "block_size": 16}
    bodies.append(("address", full | {"address": given}))
    if "@" in given:
        full |= {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557"}
        bodies += [(field, full | {field: given}) for field in ("endpoint", "replay_endpoint", "metrics_url")]
    for field, body in bodies:
        answer = await client.post("/register", json=body)
        assert (answer.status_code, answer.json()["field"]) == (400, field)
        assert "5ecr" not in answer.text
    assert engine.authorization == "not asked"
    assert "5ecr" not in caplog.text


async def test_a_slow_engine_holds_no_other_registration_up(
    engine: Engine, make_client: MakeClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Describing takes no place of the requests that write."""
    import asyncio

    arrived, go = asyncio.Event(), asyncio.Event()

    async def slow(_: Any) -> Any:
        arrived.set()
        await go.wait()
        from aiohttp import web

        return web.Response(text=vllm_metrics())

    engine.is_vllm()
    engine.answers["/metrics"] = slow
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    client = await make_client(store)
    asked = asyncio.ensure_future(client.post("/register", json={"url": engine.url}))
    await arrived.wait()
    other = {"instance_id": "i", "type": "none", "modelname": "m", "block_size": 16}
    assert (await client.post("/register", json=other)).status_code == 200
    go.set()
    assert (await asked).status_code == 200


async def test_a_client_that_registers_keeps_what_was_found(engine: Engine, post: Post, store: Store) -> None:
    """An origin survives Redis; a registration by a client is from then on a client's alone."""
    engine.is_vllm()
    await post(engine.url, instance_id="i")
    (first, *_) = await store.directory.registrations()
    from dataclasses import replace

    from waymark.domain.names import BY_CLIENT

    assert await store.registry.register(replace(first, origin=BY_CLIENT))
    assert await store.registry.register(replace(first, origin=Origin("discovery", "ns/pod"))) is False
    assert (await store.directory.registrations())[0].origin == BY_CLIENT


async def test_a_publisher_whose_holes_nothing_fills_is_warned_about(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store)
    fields = {"endpoint": "tcp://10.0.0.1:5557", "modelname": "llama", "block_size": 16}

    async def warnings(**more: str) -> list[str]:
        answer = await client.post("/register", json={"instance_id": "pod-1"} | fields | more)
        assert answer.status_code == 200, answer.text
        await client.post("/unregister", json={"instance_id": "pod-1"})
        return list(answer.json().get("warnings", []))

    (sentence,) = await warnings(type="vLLM")
    assert "pod-1|default|0" in sentence
    assert '"copies": "set"' in sentence
    assert await warnings(type="vLLM", copies="set") == []
    assert await warnings(type="vLLM", replay_endpoint="tcp://10.0.0.1:5657") == []
    assert await warnings(type="Mooncake") == [], "it counts no copies"


async def test_each_rank_of_a_url_without_a_replay_is_warned_about(engine: Engine, post: Post) -> None:
    engine.is_vllm("no_replay")
    answer = (await post(engine.url)).json()
    (sentence,) = answer["warnings"]
    assert f"{answer['instance_id']}|default|0" in sentence


async def test_a_repair_is_asked_of_the_streams_that_can_have_one(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store)
    fields = {"type": "vLLM", "modelname": "m", "block_size": 4, "instance_id": "i"}
    able = {"snapshot_endpoint": "tcp://10.0.0.7:5758"}, {"replay_endpoint": "tcp://10.0.0.7:5658"}
    for rank, more in enumerate(({}, *able)):
        refused = await client.post("/repair", json={"instance_id": "i"})
        assert refused.status_code == (404, 409, 200)[rank]
        assert rank != 1 or "no snapshot_endpoint and no replay" in refused.json()["error"]
        sockets = {"endpoint": f"tcp://10.0.0.7:{5557 + rank}", "dp_rank": rank}
        assert (await client.post("/register", json=fields | sockets | more)).status_code == 200
    answer = await client.post("/repair", json={"instance_id": "i"})
    assert answer.json() == {"status": "repair requested", "asked_instances": ["i|default|1", "i|default|2"]}
    records = [keys.record(claim.group_id, claim.publisher) for claim in await store.directory.claims()]
    assert [b"repair" in await store.client.hgetall(record) for record in records] == [False, True, True]


async def test_the_master_of_a_pool_is_registered_in_place_of_its_events(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store, allowed_endpoints=("10.0.0.0/8",))
    body = {"type": "Mooncake", "instance_id": "pool", "modelname": "m", "block_size": 2}
    url = "http://10.0.0.9:9003"
    keys = ["m@{sha256}@0,m@{sha256}@1"]
    fields = {"query_endpoint": url, "shards": 4, "query_keys": keys}
    assert (await client.post("/register", json=body | fields)).status_code == 200
    (registration,) = await store.directory.registrations()
    assert (registration.endpoint, registration.scope) == (None, "shared")
    assert (registration.target.query_endpoint, registration.target.query_parts) == (url, 4)
    table = await store.reader.table(registration.group, deadline_seconds=patient(5.0))
    assert table is not None
    assert [(each.query_endpoint, each.query_keys) for each in table.targets.values()] == [(url, tuple(keys))]
    for change, field in (
        ({}, "endpoint"),
        ({"query_endpoint": url, "scope": "instance"}, "endpoint"),
        ({"query_endpoint": "tcp://10.0.0.9:9003"}, "query_endpoint"),
        ({"query_endpoint": url + "?a"}, "query_endpoint"),
        ({"query_endpoint": url, "query_keys": ["no placeholder"]}, "query_keys"),
        ({"query_endpoint": "http://192.168.0.9:9003"}, "query_endpoint"),
    ):
        refused = await client.post("/register", json=body | change)
        assert (refused.status_code, refused.json()["field"]) == (400, field)
