"""Secrets stay inside: nothing of them in a log at its most talkative, nothing of one tenant in another's answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.api.conftest import Hold
from tests.conftest import wait_until
from tests.live import Live, start
from tests.ports import unused_port

MARK = "5ecr37"
API_TOKEN = f"token-{MARK}"
PASSWORD = f"password-{MARK}"
SALT = f"salt-{MARK}"
TOKENS = [3153211111, 3153222222, 3153233333, 3153244444]
BAD_TOKEN = 31532555555

REGISTER = {"type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "model": "m", "instance_id": "1", "block_size": 2}
PROMPT = {"model": "m", "model_name": "m", "block_size": 2, "token_ids": TOKENS, "cache_salt": SALT}
BY_HASH = {"model": "m", "model_name": "m", "block_size": 2, "seq_hashes": TOKENS, "block_hashes": TOKENS}
SALTED = {"additionalsalt": SALT, "additional_salt": SALT, "cache_salt": SALT}
BODIES: dict[str, dict[str, Any]] = {
    "/register": REGISTER | {"additionalsalt": SALT},
    "/query": PROMPT | {"additional_salt": SALT},
    "/query_by_hash": BY_HASH | SALTED,
    "/inspect/prompt": PROMPT | {"additional_salt": SALT},
    "/inspect/block": {"key": MARK},
    "/inspect/holder": {"holder": 1, "model": MARK},
    "/inspect/keys": {"tenant_id": MARK},
    "/unregister": REGISTER | SALTED,
    "/repair": REGISTER | SALTED,
    "/weight": REGISTER | SALTED | {"weight": 1},
    "/dynamo/register": REGISTER | {"instance_id": 2, "model_name": "m", "additional_salt": SALT},
    "/dynamo/query": PROMPT,
    "/dynamo/query_by_hash": BY_HASH,
    "/dynamo/query_tiered_by_hash": BY_HASH,
    "/dynamo/unregister": {"instance_id": 2, "model_name": "m"} | SALTED,
    "/dynamo/register_peer": {"url": f"http://user:{PASSWORD}@peer"},
    "/dynamo/deregister_peer": {"url": f"http://user:{PASSWORD}@peer"},
    "/score": PROMPT | {"additional_salt": SALT, "session_token": MARK},
    "/select": PROMPT | {"additional_salt": SALT, "request_id": MARK},
    "/release": {"reservation": MARK},
    "/policies/replay": {"model": MARK, "file": f"plugins: [{{type: {MARK}}}]", "tenant_id": MARK},
    "/tokenize": {"model": "m", "prompt": MARK},
    "/detokenize": {"model": "m", "tokens": TOKENS},
    "/admin/kv-index/clear": {"backend_id": MARK},
    "/dynamo/workers": {"worker_id": 3, "model_name": "m", "block_size": 2, "endpoint": f"http://user:{PASSWORD}@w"},
    "/dynamo/select": PROMPT | {"cache_salt": SALT, "selection_id": MARK},
    "/dynamo/select_and_reserve": PROMPT | {"cache_salt": SALT, "selection_id": MARK},
    "/dynamo/reservations": PROMPT | {"cache_salt": SALT, "selection_id": MARK, "worker_id": 3},
    "/dynamo/reservations/{reservation_id}/prefill_complete": {},
    "/dynamo/reservations/{reservation_id}/output_block": {},
    "/dynamo/overlap_scores": PROMPT | {"cache_salt": SALT},
    "/dynamo/potential_loads": PROMPT | {"cache_salt": SALT},
    "/events": {"event_type": "stored", "backend_id": "1", "seq_hashes": TOKENS, "additional_salt": SALT},
}
#: What must be nowhere in a log.
SECRETS = [MARK, *map(str, TOKENS), str(BAD_TOKEN)]


@pytest.fixture
async def locked_redis(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a Redis of its own, with a password in it."""
    port = unused_port()
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    assert server is not None
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--requirepass",
        PASSWORD,
        "--save",
        "",
        "--dir",
        str(tmp_path),
    ]
    with (tmp_path / "redis.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(server, *options, stdout=output, stderr=output)
    try:
        url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        async with Redis.from_url(url, protocol=2) as redis:

            async def answers() -> bool:
                try:
                    return bool(await redis.ping())
                except RedisConnectionError:
                    return False

            await wait_until(answers, "a Redis with a password is up")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def ask(client: httpx.AsyncClient, method: str, target: str, headers: dict[str, str]) -> int:
    """The status; of an answer without an end only the head is read."""
    async with client.stream(method, target, headers=headers) as answer:
        if answer.headers.get("content-type") != "text/event-stream":
            await answer.aread()
        return answer.status_code


async def drive(live: Live) -> set[int]:
    """Every endpoint, as it should be called and as it should not; the statuses."""
    statuses = set()
    async with live.client() as client:
        contract = (await client.get("/openapi.json")).json()["paths"]
        assert {path for path, methods in contract.items() if "post" in methods} <= set(BODIES)
        for path, methods in contract.items():
            for headers in ({}, {"authorization": f"Bearer wrong-{MARK}"}, {"x-request-id": f"{{{MARK}}}"}):
                for method in ("GET", "POST"):
                    target = f"{path}?token={MARK}"
                    statuses.add(await ask(client, method, target, headers))
            if "post" not in methods:
                continue
            body = BODIES[path]
            spoiled = body | {"token_ids": [*TOKENS, BAD_TOKEN], "seq_hashes": [*TOKENS, MARK], "dp_rank": MARK}
            spoiled |= {"block_hashes": [MARK], "block_size": MARK, "additional_salt": 2 * SALT, "cache_salt": [SALT]}
            for content in (body, body, spoiled, {"type": MARK, "endpoint": f"tcp://{MARK}", "model": MARK}):
                statuses.add((await client.post(path, json=content)).status_code)
                packed = {"content": msgpack.packb(content), "headers": {"content-type": "application/msgpack"}}
                statuses.add((await client.post(path, **packed)).status_code)
            headers = {"content-type": "application/json"}
            broken = f'{{"{SALT}": {TOKENS[0]}, {MARK}'
            statuses.add((await client.post(path, content=broken, headers=headers)).status_code)
        statuses.add((await client.get(f"/{MARK}?{MARK}")).status_code)
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(f"{MARK} {MARK}\r\n{MARK}\r\n\r\n".encode())
    await writer.drain()
    writer.close()
    return statuses


@pytest.mark.outside
async def test_no_secret_is_ever_logged(locked_redis: str, tmp_path: Path) -> None:
    log = {"access_log": "true", "log_level": "debug", "api_token": API_TOKEN, "protect_reads": "true"}
    async with start("query", locked_redis, tmp_path / "log", **log) as live:
        statuses = await drive(live)
        # A Redis that no longer lets us in, and one that is gone: what the driver says then is logged or answered.
        async with Redis.from_url(locked_redis, protocol=2) as redis:
            await redis.config_set("requirepass", "another")
            await redis.client_kill_filter(_type="normal", skipme=False)
        statuses |= await drive(live)
        async with live.client() as client:
            refused = await client.post("/query", json=PROMPT)
        assert refused.status_code == 503
        assert MARK not in refused.text
    assert {200, 201, 400, 401, 404, 405, 409, 422, 503} <= statuses
    assert 500 not in statuses
    text = live.said()
    assert text.count("waymark.api.access_log: request") > 200
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.outside
async def test_settings_that_do_not_fit_are_refused_without_a_secret(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as refused:
        async with start("query", f"redis://:{PASSWORD}@[nonsense", tmp_path / "log", api_token=f"{API_TOKEN} blank"):
            pass
    assert "WAYMARK_" in str(refused.value)
    assert MARK not in (tmp_path / "log").read_text()


# ---- tenants, salts, names -------------------------------------------------------------------------

PREFIX = [1, 2, 3, 4]
ODD = [
    "a|b",
    "a|b|0",
    "{1}",
    "{g}:holders",
    "wm:{1}:holders",
    "}",
    "a\nb",
    "a\r\n\r\nb",
    "\x00",
    " ",
    "*",
    "\u202e",
    "'",
]
ODD += ["\U0001f9ed", "n" * 4096]

Register = Callable[..., Awaitable[None]]


async def found(client: httpx.AsyncClient, **fields: str) -> dict[str, dict[str, int]]:
    """Instances with a match, by tenant."""
    body = {"model": "m", "block_size": 2, "token_ids": PREFIX} | fields
    answer = await client.post("/query", json=body)
    assert answer.status_code == 200, answer.text
    return {
        tenant: {name: row["longest_matched"] for name, row in rows.items() if row["longest_matched"]}
        for tenant, rows in answer.json().items()
    }


@pytest.mark.slow
async def test_odd_names_are_names_like_others(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    for odd in ODD:
        await register(odd, tenant_id=odd, modelname=odd, additionalsalt=odd, lora_name=odd)
        await hold(odd, PREFIX, tenant_id=odd, adapter=odd, salts=[odd])
    for odd in ODD:
        whole = {"tenant_id": odd, "model": odd, "lora_name": odd, "additional_salt": odd}
        assert await found(client, **whole) == {odd: {odd: 4}}
        for other in ODD:
            if other == odd:
                continue
            assert await found(client, **whole | {"tenant_id": other}) == {other: {}}
            assert await found(client, **whole | {"additional_salt": other}) == {odd: {}}
            assert await found(client, **whole | {"lora_name": other}) == {odd: {}}
            assert await found(client, **whole | {"model": other}) == {odd: {}}
            assert await found(client, **whole | {"instance_id": other}) == {odd: {}}
    for odd in ODD:
        body = {"instance_id": odd, "tenant_id": odd, "dp_rank": 0}
        answer = await client.post("/unregister", json=body)
        assert answer.json()["removed_instances"] == [f"{odd}|{odd}|0"]
    assert (await client.get("/services")).json()["count"] == 0


async def test_names_that_read_alike_when_joined_are_different(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    for tenant, instance in (("a", "b|c"), ("a|b", "c")):
        await register(instance, tenant_id=tenant)
        await hold(instance, PREFIX, tenant_id=tenant)
    assert await found(client, tenant_id="a") == {"a": {"b|c": 4}}
    assert await found(client, tenant_id="a|b") == {"a|b": {"c": 4}}
    assert await found(client, tenant_id="a|b|c") == {}
    assert (await client.post("/unregister", json={"instance_id": "c", "tenant_id": "a|b"})).status_code == 200
    assert await found(client, tenant_id="a") == {"a": {"b|c": 4}}


async def test_a_salt_opens_its_own_blocks_only(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("i")
    salts: list[list[str]] = [[], ["a"], ["b"], ["ab"], ["a", "b"], ["b", "a"], ["a,b"], ["['a', 'b']"], ["a\x00b"]]
    prompts = [[n, n, n, n] for n in range(1, len(salts) + 1)]
    for tokens, salt in zip(prompts, salts, strict=True):
        await hold("i", tokens, salts=salt)
    for i, tokens in enumerate(prompts):
        for j, salt in enumerate(salts):
            names = dict(zip(("additional_salt", "cache_salt"), salt, strict=False))
            body = {"model": "m", "block_size": 2, "token_ids": tokens} | names
            row = (await client.post("/query", json=body)).json()["default"]["i"]
            assert row["longest_matched"] == (4 if i == j else 0), (salt, salts[i])


@pytest.mark.parametrize("field", ["tenant_id", "instance_id", "modelname", "lora_name", "additionalsalt"])
@pytest.mark.parametrize("name", ["n" * 4097, "\u00e9" * 2049, "n" * 2**20], ids=["4097", "2049-of-two", "1-MiB"])
async def test_names_beyond_4096_bytes_are_refused(api: httpx.AsyncClient, field: str, name: str) -> None:
    body = {"type": "vLLM", "endpoint": "tcp://a:1", "modelname": "m", "instance_id": "i", "block_size": 2}
    answer = await api.post("/register", json=body | {field: name})
    assert (answer.status_code, answer.json()["reason"], answer.json()["field"]) == (400, "out_of_range", field)
    assert "4096 bytes" in answer.json()["error"]
    assert len(answer.content) < 400
    assert (await api.get("/services")).json()["count"] == 0


@pytest.mark.parametrize("field", ["tenant_id", "instance_id", "model", "lora_name", "additional_salt", "cache_salt"])
async def test_queries_by_names_beyond_4096_bytes_are_refused(api: httpx.AsyncClient, field: str) -> None:
    body = {"model": "m", "block_size": 2, "token_ids": [1, 2]} | {field: "n" * 2**20}
    answer = await api.post("/query", json=body)
    assert (answer.status_code, answer.json()["reason"], answer.json()["field"]) == (400, "out_of_range", field)
