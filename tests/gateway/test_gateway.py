"""Who may call, where requests go, and what is answered in the gateway's own name."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
from dataclasses import replace
from hashlib import sha256
from itertools import count, product
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.api.conftest import hold_blocks
from tests.conftest import wait_until
from tests.e2e.redis_server import redis_server
from tests.gateway.conftest import Start, chat, events, registration
from tests.patience import patient
from tests.ports import unused_port
from tests.store.factories import Readings
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import SettingsError
from waymark.chat.requests import session_token
from waymark.domain.targets import Role, Target
from waymark.gateway.security import ApiKeys
from waymark.gateway.shapes import COUNT_TOKENS, FURTHER, PATHS
from waymark.gateway.upstream import Upstream
from waymark.serving.limits import SLOW

pytestmark = pytest.mark.outside

DONE = b"data: [DONE]\n\n"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


# ---- keys and limits -------------------------------------------------------------------------------


async def test_a_client_needs_a_key_where_keys_are_set(start: Start) -> None:
    running = await start(1, gateway_keys=(f"a:{digest('one')}", f"b:{digest('two')}:other"))
    answer = await running.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (await running.post(headers={"authorization": "Bearer two-"})).status_code == 401
    assert (await running.post(headers={"authorization": "Bearer one"})).status_code == 200
    assert (await running.post(headers={"x-api-key": "one"})).status_code == 200
    # The other key's tenant has no engine.
    assert (await running.post(headers={"authorization": "Bearer two"})).status_code == 404
    models = await running.client.get("/v1/models", headers={"x-api-key": "two"})
    assert models.json() == {"object": "list", "data": []}
    assert "one" not in str([request.headers for request, _ in running.engines[0].asked])


async def test_keys_of_a_file_change_without_a_restart(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# clients\n\na:{digest('one')}\n")
    running = await start(1, gateway_keys=(str(path),))
    assert (await running.post(headers={"x-api-key": "one"})).status_code == 200
    path.write_text(f"b:{digest('two')}\n")
    os.utime(path, (1, 1))

    async def is_known() -> bool:
        return (await running.post(headers={"x-api-key": "two"})).status_code == 200

    await wait_until(is_known, "the new key is known", 10)
    assert (await running.post(headers={"x-api-key": "one"})).status_code == 401
    path.write_text("nonsense")
    os.utime(path, (2, 2))
    assert (await running.post(headers={"x-api-key": "two"})).status_code == 200


@pytest.mark.parametrize("entry", ["secret", "a:one", f"a b:{'0' * 64}", f"a:{'0' * 63}", f"a:{'0' * 64}:t:x"])
def test_an_entry_that_is_no_key_ends_the_start_and_is_not_shown(entry: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="WAYMARK_GATEWAY_KEYS has an entry") as error:
        ApiKeys([entry])
    assert entry not in str(error.value)
    (tmp_path / "keys").write_text(f"\n{entry}\n")
    with pytest.raises(SettingsError, match="line 2"):
        ApiKeys([str(tmp_path / "keys")])


def test_the_command_of_the_page_and_of_the_error_prints_what_a_key_needs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    (of_page,) = re.findall(r"^\$ (printf .*sha256sum.*)$", page, re.MULTILINE)
    with pytest.raises(SettingsError) as error:
        ApiKeys(["nonsense"])
    (of_error,) = re.findall(r"printf .*(?= prints)", str(error.value))
    for command in (of_page.replace('"$KEY"', "secret"), of_error.replace("KEY", "secret")):
        printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=patient(10))
        assert ApiKeys([f"a:{printed.stdout.rstrip()}"]).client({b"x-api-key": b"secret"}).name == "a"


async def test_no_body_and_no_key_is_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="waymark")
    secret = "a-secret-that-nobody-may-read"
    running = await start(
        2,
        gateway_keys=(f"a:{digest(secret)}",),
        answers={"cache": "memory"},
        engine_api_key=secret,
        engine_key_hosts=("*",),
    )
    headers = {"authorization": f"Bearer {secret}"}

    async def breaks_off(request: web.Request) -> web.StreamResponse:
        response = await events(request, secret.encode(), secret.encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    async def is_away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text=secret)

    for handler in (None, breaks_off, is_away):
        for engine in running.engines:
            engine.handler = handler
        for body in (
            chat(secret),
            chat(secret, stream=True),
            {"model": "nope", "messages": secret},
            {"secret": secret},
        ):
            await running.post(body, headers=headers)
    await running.client.post("/v1/responses", content=f'{{"{secret}'.encode(), headers=headers)
    await running.post(chat(secret), headers={"x-api-key": secret + "-"})
    ours = [record for record in caplog.records if record.name.startswith("waymark")]
    assert {"the request goes to another engine" in record.getMessage() for record in ours} == {True, False}
    assert not [record for record in ours if secret in record.getMessage() + str(vars(record))]


async def test_a_key_has_so_many_requests_and_tokens_under_way(start: Start) -> None:
    running = await start(
        1, gateway_keys=(f"a:{digest('one')}", f"b:{digest('two')}"), gateway_key_limits={"requests": 1, "tokens": 4}
    )
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, b"", DONE, until=go_on)
    body = {"model": "demo", "prompt": [1, 2, 3]}
    one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
    first = asyncio.create_task(running.post(body, "/v1/completions", headers=one))
    await wait_until(lambda: running.asked == [1], "the first request is under way", 10)
    refused = await running.post(body, "/v1/completions", headers=one)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "WAYMARK_GATEWAY_KEY_LIMITS" in refused.text
    refused = await running.post({"model": "demo", "prompt": [1, 2, 3, 4, 5]}, "/v1/completions", headers=two)
    assert (refused.status_code, "WAYMARK_GATEWAY_KEY_LIMITS" in refused.text) == (429, True)
    go_on.set()
    assert (await first).status_code == 200
    for _ in range(3):
        assert (await running.post(body, "/v1/completions", headers=one)).status_code == 200


async def test_a_header_names_the_tenant_where_there_are_no_keys(start: Start) -> None:
    running = await start(1, tenant_header="X-Tenant")
    assert (await running.post()).status_code == 200
    assert (await running.post(headers={"x-tenant": "other"})).status_code == 404


# ---- answers in the gateway's own name ---------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b"{}", 400, "model"),
        (b'{"model": 1}', 400, "model"),
        (b'{"model": "nope"}', 404, "nope"),
        (b'{"model": "demo", "pad": "' + b"x" * 2000 + b'"}', 413, "1500 bytes"),
    ],
)
async def test_errors_have_the_shape_of_their_path(
    start: Start, path: str, content: bytes, status: int, word: str
) -> None:
    running = await start(1, max_body_bytes=1500)
    answer = await running.client.post(path, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    fields = answer.json()
    if path == "/v1/messages":
        kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
        assert (fields["type"], fields["error"]["type"]) == ("error", kinds[status])
    else:
        assert fields["error"].keys() == {"message", "type", "param", "code"}
        assert fields["error"]["type"] == "invalid_request_error"
    assert word in fields["error"]["message"]
    assert running.asked == [0]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: gzip\r\n", 501),
        (b"Content-Length: nine\r\n", 400),
        (b"Content-Length: 9\r\nX-Large: " + b"x" * 40_000 + b"\r\n", 431),
    ],
)
async def test_errors_of_a_connection_have_the_shape_of_the_path(start: Start, head: bytes, status: int) -> None:
    running = await start(0)

    async def ask(path: str) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(f"POST {path}?a=b HTTP/1.1\r\nHost: a\r\n".encode() + head + b"\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in lines.lower()
        return dict(json.loads(body))

    openai = (await ask("/v1/chat/completions"))["error"]
    assert openai.keys() == {"message", "type", "param", "code"}
    assert openai["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (await ask("/v1/messages"))["error"]["type"] == ("invalid_request_error" if status < 500 else "api_error")
    assert (await ask("/admin/kv-index/stats")).keys() == {"error", "reason"}


async def test_the_index_is_cleared_before_the_answer_and_the_gate_is_one(start: Start) -> None:
    running = await start(1, min_initial_workers=2)
    assert "waiting for workers: 1 of 2" in (await running.client.get("/ready")).text
    assert (await running.post()).status_code == 503
    second = replace(registration("http://127.0.0.1:1", 7), target=Target(weight=0))
    await running.store.registry.register(second)

    async def is_answered() -> bool:
        return (await running.post()).status_code == 200

    await wait_until(is_answered, "the gate is open", 10)
    await running.store.registry.unregister([second.name])
    # Readiness is about the same gate, which stays open.
    assert (await running.client.get("/ready")).status_code == 200
    name = (await running.store.directory.registrations())[0].instance_id
    await hold_blocks(running.store, count(), name, range(64))
    (before,) = await running.store.states(lambda _: True)
    held = sum(before.blocks.values())
    cleared = await running.client.post("/admin/kv-index/clear", json={"scope": "all"})
    assert cleared.json() == {"success": True, "entries_before_clear": held, "cleared_entries": held}
    (after,) = await running.store.states(lambda _: True)
    assert held > sum(after.blocks.values()) == 0


async def test_a_body_that_comes_too_slowly_is_refused_in_the_shape_of_the_path(start: Start) -> None:
    running = await start(1, request_seconds=0.1)

    async def ask(path: str) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n"
        writer.write(head.encode() + b"{")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        fields, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in fields.lower()
        return json.loads(body)

    openai, anthropic, other = await asyncio.gather(
        *map(ask, ("/v1/responses", "/v1/messages", "/admin/response-cache/invalidate"))
    )
    wanted = {"message": SLOW.sentence, "type": "invalid_request_error", "param": None, "code": "unavailable"}
    assert openai == {"error": wanted}
    assert anthropic == {"type": "error", "error": {"type": "invalid_request_error", "message": SLOW.sentence}}
    assert other == {"error": SLOW.sentence, "reason": "unavailable"}
    assert running.asked == [0]


async def test_paths_that_are_none(start: Start) -> None:
    running = await start(1)
    assert (await running.client.get("/v1/chat/completions")).status_code == 405
    assert (await running.client.post("/v1/audio/none", json={})).json()["error"]["code"] == "not_found"
    assert (await running.client.get("/health")).json() == {"status": "ok"}
    assert (await running.client.get("/ready")).json()["status"] == "ready"
    # Nothing of a gateway registers anything, and a command that was given its URL has to say so.
    other = await running.client.post("/register", json={})
    assert (other.status_code, other.json()["reason"]) == (404, "not_found")
    assert "give the URL of a query replica ('waymark query')" in other.json()["error"]


async def test_the_models_are_read_again_when_a_registration_has_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(1)
    readings = Readings(running.store, monkeypatch)
    for number in range(2):
        await running.store.registry.register(registration(running.engines[0].url, 2 + number, f"demo-{number}"))
        for _ in range(20):
            found = (await running.client.get("/v1/models")).json()["data"]
            assert f"demo-{number}" in {model["id"] for model in found}
    assert readings() == 2


async def test_models_are_those_of_the_engines(start: Start) -> None:
    running = await start(1)
    await running.store.registry.register(
        registration(running.engines[0].url, 0, adapters=("sql",), aliases=("demo-1",))
    )
    found = (await running.client.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in found] == [("demo", None), ("demo-1", None), ("sql", "demo")]
    assert (await running.client.get("/v1/models/sql")).json()["parent"] == "demo"
    assert (await running.client.get("/v1/models/other")).status_code == 404

    async def is_served() -> bool:
        return {(await running.post({**chat("a"), "model": name})).status_code for name in ("sql", "demo-1")} == {200}

    await wait_until(is_served, "the names are known", 10)
    assert {json.loads(body)["model"] for _, body in running.engines[0].asked} == {"sql", "demo-1"}


async def test_an_engine_without_an_address_gets_no_request(start: Start) -> None:
    running = await start(0)
    await running.store.registry.register(replace(registration("", 0), target=Target()))
    answer = await running.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_target")
    assert "without an address" in answer.text


# ---- where requests go ------------------------------------------------------------------------------


async def test_without_a_tokenizer_equal_beginnings_go_to_the_same_engine(start: Start) -> None:
    running = await start(4, loads_ms=0)

    async def is_free() -> bool:
        return await running.requests() == 0

    places: dict[str, set[str]] = {}
    for _ in range(4):
        for n in range(8):
            body = chat(f"question {n}", "answer", f"more {len(places)}")
            answer = await running.post(body)
            assert answer.headers["x-waymark-decision"] == "prefix"
            await wait_until(is_free, "nothing is reserved", 10)
            places.setdefault(f"question {n}", set()).add(answer.headers["x-decoder-host-port"])
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) > 1
    assert running.value("decisions_without_tokens_total", reason="no_tokenizer") == 32


@pytest.mark.parametrize("has_stream", [True, False])
async def test_turns_that_follow_at_once_stay_at_their_engine(start: Start, has_stream: bool) -> None:
    running = await start(4)
    if has_stream:
        ends = asyncio.Event()
        for engine in running.engines:
            engine.handler = lambda request: events(request, b'data: {"a": 1}\n\n' + DONE, b": end\n\n", until=ends)
    for conversation in range(6):
        texts = [f"This is conversation {conversation}. " * 20]
        seen = set()
        for turn in range(4):
            async with running.client.stream("POST", "/v1/chat/completions", json=chat(*texts)) as answer:
                seen.add(answer.headers["x-session-token"])
                # A client takes the last event for the end.
                async for line in answer.aiter_lines():
                    if has_stream and line == "data: [DONE]":
                        break
                assert await running.requests() == 0
            texts += [f"answer {turn}", f"question {turn}"]
        assert len(seen) == 1, f"conversation {conversation} was at {len(seen)} engines"


async def test_an_engine_is_told_which_one_computes_the_prompt(start: Start) -> None:
    running = await start(2, profile="disagg")
    roles = (Role.PREFILL, Role.DECODE)
    for number, (engine, role) in enumerate(zip(running.engines, roles, strict=True)):
        await running.store.registry.register(registration(engine.url, number, role=role))
    answer = await running.post({"model": "demo", "prompt": list(range(64))}, "/v1/completions")
    prefill, decode = (engine.url.removeprefix("http://") for engine in running.engines)
    assert running.asked == [0, 1]
    assert answer.headers["x-decoder-host-port"] == decode
    assert answer.headers["x-prefiller-host-port"] == prefill
    sent = running.engines[1].asked[0][0].headers
    assert (sent["mif-prefill-endpoint"], sent["x-prefiller-host-port"]) == (prefill, prefill)

    async def is_free() -> bool:
        return await running.requests() == 0

    await wait_until(is_free, "both reservations have ended", 10)


async def test_a_decode_engine_that_is_away_takes_no_prefill_engine_with_it(start: Start) -> None:
    running = await start(1, profile="disagg")
    await running.store.registry.register(registration(running.engines[0].url, 0, role=Role.PREFILL))
    await running.store.registry.register(registration(f"http://127.0.0.1:{unused_port()}", 1, role=Role.DECODE))
    answer = await running.post({"model": "demo", "prompt": list(range(64))}, "/v1/completions")
    assert (answer.status_code, running.asked) == (502, [0])

    async def is_over() -> bool:
        (prefill,) = await running.loads()
        (group,) = (await running.store.directory.groups()).values()
        all_loads = (await running.store.reservations.loads(group.group_id)).values()
        return sum(load.failed for load in all_loads) == 1 and prefill.requests == prefill.failed == 0

    await wait_until(is_over, "only the decode engine has failed", 10)


async def test_decisions_are_counted_with_the_names_of_continuum_router(start: Start) -> None:
    running = await start(1)
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, b"", DONE, until=go_on)
    asked = asyncio.create_task(running.post(chat("hello")))
    backend = {"backend": "engine-0"}
    await wait_until(
        lambda: running.value("prefix_routing_backend_distribution", **backend) == 1, "it is under way", 10
    )
    go_on.set()
    assert (await asked).status_code == 200
    assert running.value("prefix_routing_requests_total", strategy="prefix_hash") == 1
    await wait_until(lambda: running.value("prefix_routing_prefix_cardinality") == 1, "its prefix is counted", 10)
    await running.post({"model": "demo", "prompt": [1, 2, 3]}, "/v1/completions")
    assert running.value("kv_index_routing_decisions_total", decision="kv_aware") == 1


async def test_a_session_stays_at_its_engine(start: Start) -> None:
    running = await start(4)
    for number in range(4):
        token = session_token(f"engine-{number}")
        answer = await running.post(headers={"x-session-token": token})
        assert answer.headers["x-session-token"] == token
        assert answer.headers["x-waymark-decision"] == "session"
    assert running.asked == [1, 1, 1, 1]
    answer = await running.post(headers={"x-session-token": "no base64!"})
    assert (answer.status_code, answer.headers["x-waymark-decision"] == "session") == (200, False)


async def test_the_same_prompt_goes_where_it_was(start: Start) -> None:
    running = await start(4, loads_ms=0)
    prompt = list(range(200))

    async def is_free() -> bool:
        return await running.requests() == 0

    first = await running.post({"model": "demo", "prompt": prompt}, "/v1/completions")
    assert first.headers["x-waymark-decision"] == "kv_aware"
    for n in range(4):
        await wait_until(is_free, "nothing is reserved", 10)
        again = await running.post({"model": "demo", "prompt": [*prompt, n]}, "/v1/completions")
        assert again.headers["x-decoder-host-port"] == first.headers["x-decoder-host-port"]


async def test_requests_go_on_where_redis_came_back_empty_or_does_not_answer(start: Start) -> None:
    with redis_server() as server:
        await server.start()
        running = await start(2, redis_url=server.url, redis_timeout_seconds=0.5, query_deadline_ms=300)
        assert (await running.post()).status_code == 200
        server.kill()
        answers = [await running.post(chat(f"a {n}")) for n in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-waymark-decision"] for answer in answers} == {"degraded"}
        assert all(running.asked)
        await server.start()

        async def is_asked() -> bool:
            return (await running.post({"model": "other"})).status_code == 404

        await wait_until(is_asked, "Redis is back, and empty", 10)
        answers = [await running.post(chat(f"b {n}")) for n in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert await running.store.directory.groups() == {}


async def test_a_saturated_fleet_is_429_in_the_shape_of_the_path(start: Start) -> None:
    running = await start(1, target_requests_max=1)
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, b"", DONE, until=go_on)
    first = asyncio.create_task(running.post())
    await wait_until(lambda: running.asked == [1], "the first request is under way", 10)
    refused = await running.post(path="/v1/messages")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    go_on.set()
    await first


async def test_a_place_that_is_not_allowed_gets_no_request(start: Start) -> None:
    running = await start(1, allowed_endpoints=("10.0.0.0/8",))
    answer = await running.post()
    assert (answer.status_code, "not_allowed" in answer.text) == (502, True)
    assert running.asked == [0]


async def test_no_redirect_is_followed(start: Start) -> None:
    from aiohttp import web

    running = await start(2)

    async def redirects(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "http://169.254.169.254/"})

    for engine in running.engines:
        engine.handler = redirects
    answer = await running.post()
    assert answer.status_code == 307
    assert sum(running.asked) == 1


@pytest.mark.parametrize("query", ["?a=%20b", ""])
async def test_nothing_of_a_query_changes_the_place(start: Start, query: str) -> None:
    running = await start(1)
    answer = await running.client.post(f"/v1/chat/completions{query}", json=chat("a"))
    assert answer.status_code == 200
    assert running.engines[0].asked[0][0].path_qs == f"/v1/chat/completions{query}"


async def test_certificates_that_cannot_be_read_are_a_sentence() -> None:
    upstream = Upstream(AllowedEndpoints(), first_byte_seconds=1.0, idle_seconds=1.0, ca_file="/nowhere/ca.pem")
    with pytest.raises(SettingsError, match="WAYMARK_ENGINE_CA_FILE"):
        await upstream.send("http://127.0.0.1:1", "/v1/models", b"", b"", ())


async def test_a_request_of_every_form_is_passed_on(start: Start) -> None:
    """The engine says what is wrong with a body, not the gateway."""
    running = await start(1)
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": "none"}),
        ("/v1/chat/completions", {"messages": [1, None, {"role": 2}], "tools": 3, "n": "x"}),
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": [2**40]}),
        ("/v1/completions", {"prompt": ["a", ["b"]]}),
        ("/v1/messages", {"messages": [], "system": [1]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("/v1/embeddings", {"input": [[1], [2]]}),
    ]
    for path, body in bodies:
        answer = await running.post({"model": "demo", **body}, path)
        assert answer.status_code == 200, (path, body, answer.text)


@pytest.mark.parametrize("paths", [*([path] for path in PATHS), [COUNT_TOKENS, *FURTHER]], ids=lambda paths: paths[0])
async def test_a_body_that_is_too_deep_is_refused_before_any_engine_has_it(start: Start, paths: list[str]) -> None:
    running = await start(1, answers={"cache": "memory", "responses": "memory"}, cache_control_injection=True)
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "system": "b"}
    names = ("unknown", "system", "input", "tools", "metadata")
    for path, name, depth in product(paths, names, (199, 200, 254, 1000, 5000)):
        # The object is a level, too. In a field that nothing reads, and in those that are read, changed and kept.
        deep = b"[" * depth + b"]" * depth
        fields = {each: value for each, value in body.items() if each != name}
        sent = orjson.dumps(fields)[:-1] + b',"%b":%b}' % (name.encode(), deep)
        answer = await running.client.post(path, content=sent)
        assert answer.status_code == (400 if depth >= 200 else 200), (path, name, depth, answer.text)
        if depth >= 200:
            assert "200 lists or objects" in answer.text or "not valid JSON" in answer.text
    assert sum(running.asked) == len(names) * len(paths), "of the depth that may be"
