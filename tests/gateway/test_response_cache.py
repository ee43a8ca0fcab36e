"""An answer is kept only where it is whole, and is sent again only to the same request of the same client."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from time import thread_time
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.conftest import wait_until
from tests.e2e.redis_server import RedisServer, redis_server
from tests.gateway.conftest import Running, Start, chat, events, registration
from tests.patience import patient
from waymark.base.bounded_cache import CacheSize
from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.chat.prefix_key import as_written, cache_key, is_cacheable
from waymark.gateway.kept_answer import KeptAnswer, MemoryAnswers
from waymark.gateway.response_cache import SharedAnswers
from waymark.store.store import Store

DELTA = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
MESSAGE = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

each_place = pytest.mark.parametrize("where", ["memory", "redis"])


def answering(running: Running, finish: Any = "stop") -> None:
    """Every engine answers, each time with another text."""
    numbers = itertools.count()

    async def answer(request: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "message": {"content": f"answer {next(numbers)}"}, "finish_reason": finish}
        return web.json_response({"choices": [choice], "stop_reason": finish, "content": [f"answer {next(numbers)}"]})

    for engine in running.engines:
        engine.handler = answer


def streaming(running: Running, *pieces: bytes) -> None:
    for engine in running.engines:
        engine.handler = lambda request: events(request, *pieces)


async def results(running: Running, *bodies: Any, path: str = "/v1/chat/completions", **more: Any) -> list[str]:
    return [(await running.post(body, path, **more)).headers["x-cache"] for body in bodies]


@pytest.mark.outside
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_an_equal_request_gets_the_same_answer(start: Start, path: str) -> None:
    running = await start(2, answers={"cache": "memory"})
    answering(running)
    body = chat("a", prompt="a", temperature=0)
    first, second = await running.post(body, path), await running.post({**body, "user": "b"}, path)
    assert (first.headers["x-cache"], second.headers["x-cache"]) == ("MISS", "HIT")
    assert first.content == second.content
    assert first.headers["content-type"] == second.headers["content-type"]
    assert sum(running.asked) == 1
    stats: dict[str, Any] = {}

    async def is_counted() -> bool:
        stats.update((await running.client.get("/admin/response-cache/stats")).json())
        return bool(stats["requests"]["total"] == 2)

    await wait_until(is_counted, "both are among the counts of all gateways", 10)
    assert stats["requests"] == {"hit": 1, "miss": 1, "skip": 0, "total": 2}
    assert (stats["hit_rate"], stats["entries"], stats["config"]["ttl"]) == ("0.5000", 1, "5m")
    assert stats["size_bytes"] > len(first.content)
    assert running.value("response_cache_hit_rate") == 0.5
    assert running.value("response_cache_entries") == 1
    assert running.value("response_cache_requests_total", result="hit") == 1
    assert running.value("response_cache_size_bytes") == stats["size_bytes"]
    cleared = await running.client.post("/admin/response-cache/invalidate", json={"clear_all": True})
    assert cleared.json() == {"success": True, "action": "clear_all", "cleared_entries": 1}
    assert await results(running, body, path=path) == ["MISS"]
    assert (await running.client.post("/admin/response-cache/invalidate", json={})).status_code == 400


@pytest.mark.outside
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_one_answer_is_cleared_by_its_key(start: Start, kind: str) -> None:
    running = await start(1, answers={"cache": kind})
    answering(running)
    first, other = await running.post(chat("a")), await running.post(chat("b"))
    key = first.headers["x-cache-key"]
    assert key != other.headers["x-cache-key"]
    await wait_until(lambda: running.value("response_cache_entries") == 2, "both are kept", 10)
    again = await running.post(chat("a"))
    assert (again.headers["x-cache"], again.headers["x-cache-key"]) == ("HIT", key)
    size = (await running.client.get("/admin/response-cache/stats")).json()["size_bytes"]

    async def clear(**body: Any) -> httpx.Response:
        return await running.client.post("/admin/response-cache/invalidate", json=body)

    assert (await clear(key=key)).json() == {"success": True, "action": "clear_key", "cleared_entries": 1}
    stats = (await running.client.get("/admin/response-cache/stats")).json()
    assert stats["entries"] == 1
    assert 0 < stats["size_bytes"] < size
    assert (await clear(key=key)).json()["cleared_entries"] == 0
    assert await results(running, chat("a"), chat("b")) == ["MISS", "HIT"]
    for body in ({"key": key, "clear_all": True}, {"key": "k"}, {"key": key.upper()}, {"key": key + "0"}):
        assert (await clear(**body)).status_code == 400


@pytest.mark.outside
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_an_answer_under_way_is_not_kept_when_its_key_is_cleared(start: Start, kind: str) -> None:
    running = await start(1, answers={"cache": kind})
    answering(running)
    key = (await running.post(chat("a"))).headers["x-cache-key"]
    await wait_until(lambda: running.value("response_cache_entries") == 1, "the answer is kept", 10)
    await running.client.post("/admin/response-cache/invalidate", json={"key": key})
    arrived, proceed = asyncio.Event(), asyncio.Event()
    plain = running.engines[0].handler
    assert plain is not None

    async def late(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await proceed.wait()
        return await plain(request)

    running.engines[0].handler = late
    asking = asyncio.create_task(running.post(chat("a")))
    await arrived.wait()
    await running.client.post("/admin/response-cache/invalidate", json={"key": key})
    proceed.set()
    assert (await asking).headers["x-cache"] == "MISS"
    assert await results(running, chat("a")) == ["MISS"]


@pytest.mark.outside
@pytest.mark.parametrize(
    ("path", "pieces"),
    [("/v1/chat/completions", (DELTA, LAST, DONE)), ("/v1/messages", (MESSAGE, STOP))],
)
async def test_a_stream_is_sent_again_as_a_stream(start: Start, path: str, pieces: tuple[bytes, ...]) -> None:
    running = await start(1, answers={"cache": "memory"})
    streaming(running, *pieces)
    body = chat("a", stream=True)
    first, second = await running.post(body, path), await running.post(body, path)
    assert (first.headers["x-cache"], second.headers["x-cache"]) == ("MISS", "HIT")
    assert first.content == second.content == b"".join(pieces)
    assert second.headers["content-type"] == "text/event-stream"
    assert await results(running, chat("a"), path=path) == ["MISS"]


@pytest.mark.outside
@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"stop": ["a"]},
        {"n": 2},
        {"seed": 1},
        {"logit_bias": {"1": 2}},
        {"max_tokens": 1},
        {"top_p": 0.5},
        {"made_up": None},
        {"stream": True},
    ],
)
async def test_any_other_field_makes_another_request(start: Start, change: dict[str, Any]) -> None:
    running = await start(1, answers={"cache": "memory"})
    answering(running)
    assert await results(running, chat("a"), chat("a", **change), chat("a")) == ["MISS", "MISS", "HIT"]


@pytest.mark.outside
async def test_what_may_not_be_kept_passes_by(start: Start) -> None:
    running = await start(1, answers={"cache": "memory"})
    answering(running)
    for body in (chat("a", temperature=0.1), chat("a", temperature="0"), chat("a", temperature=True)):
        assert await results(running, body, body) == ["BYPASS", "BYPASS"]
    for path in ("/v1/embeddings", "/v1/responses"):
        assert await results(running, chat("a"), chat("a"), path=path) == ["BYPASS", "BYPASS"]
    for directives in ("no-cache", "No-Store", "max-age=0, no-cache", "no-store,max-age=0"):
        assert await results(running, chat("a"), headers={"cache-control": directives}) == ["BYPASS"]
    plain = await start(1)
    assert "x-cache" not in (await plain.post()).headers


@pytest.mark.outside
@pytest.mark.parametrize(
    "pieces",
    [
        (DELTA, DONE),
        (DELTA, LAST),
        (DELTA, b'data: {"error": {"message": "out of memory"}}\n\n', LAST, DONE),
        (DELTA, LAST.replace(b"stop", b"abort"), DONE),
        (DELTA * 100, LAST, DONE),
    ],
    ids=["unfinished", "without-an-end", "failed", "aborted", "too-long"],
)
async def test_a_stream_that_is_not_whole_is_not_kept(start: Start, pieces: tuple[bytes, ...]) -> None:
    running = await start(1, answers={"cache": "memory"}, answers_bytes={"cache": 100 * 256})
    streaming(running, *pieces)
    body = chat("a", stream=True)
    assert await results(running, body, body) == ["MISS", "MISS"]


@pytest.mark.outside
@pytest.mark.parametrize("finish", [[], {}, [["stop"]]])
async def test_an_answer_of_any_shape_holds_up_no_equal_request(
    start: Start, monkeypatch: pytest.MonkeyPatch, finish: Any
) -> None:
    monkeypatch.setattr("waymark.gateway.response_cache._FLIGHT_SECONDS", 1e6)
    running = await start(1, answers={"cache": "memory"})
    answering(running, finish)
    assert await results(running, chat("a"), chat("a")) == ["MISS", "MISS"]


@pytest.mark.outside
async def test_an_answer_that_failed_is_not_whole_or_too_long_is_not_kept(start: Start) -> None:
    running = await start(1, answers={"cache": "memory"}, answers_bytes={"cache": 500 * 256})
    for finish in (None, "abort", "x" * 600):
        answering(running, finish)
        body = chat(f"{finish}"[:9])
        assert await results(running, body, body) == ["MISS", "MISS"]

    async def rejects(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"finish_reason": "stop"}]}, status=400)

    running.engines[0].handler = rejects
    assert await results(running, chat("a"), chat("a")) == ["MISS", "MISS"]


@pytest.mark.outside
@each_place
async def test_clients_and_tenants_never_share(start: Start, where: str) -> None:
    keys = tuple(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("one", "two"))
    running = await start(1, answers={"cache": where}, gateway_keys=keys)
    answering(running)
    for name in ("one", "two"):
        assert await results(running, chat("a"), chat("a"), headers={"x-api-key": name}) == ["MISS", "HIT"]
    by_tenant = await start(1, answers={"cache": where}, tenant_header="x-tenant")
    answering(by_tenant)
    await by_tenant.store.registry.register(registration(by_tenant.engines[0].url, 1, tenant_id="two"))
    for name in ("default", "two"):
        assert await results(by_tenant, chat("a"), chat("a"), headers={"x-tenant": name}) == ["MISS", "HIT"]


@pytest.mark.outside
async def test_equal_requests_at_once_are_one_for_the_engines(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the engine takes long for its next piece: only a client that does not read keeps nobody waiting."""
    monkeypatch.setattr("waymark.gateway.kept_answer.STALL_SECONDS", 0.0)
    running = await start(2, answers={"cache": "memory"})
    go_on = asyncio.Event()
    for engine in running.engines:
        engine.handler = lambda request: events(request, DELTA, LAST, DONE, until=go_on)
    asked = [asyncio.create_task(running.post(chat("a", stream=True))) for _ in range(8)]
    await wait_until(lambda: running.value("gateway_requests") == 8, "all are under way", 10)
    go_on.set()
    answers = await asyncio.gather(*asked)
    assert sum(running.asked) == 1
    assert sorted(answer.headers["x-cache"] for answer in answers) == ["HIT"] * 7 + ["MISS"]


@pytest.mark.outside
async def test_others_ask_themselves_where_the_first_goes_away_or_fails(start: Start) -> None:
    running = await start(1, answers={"cache": "memory"})
    never = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, DONE, until=never)
    first = asyncio.create_task(running.post(chat("a", stream=True)))
    await wait_until(lambda: running.asked == [1], "the first is under way", 10)
    second = asyncio.create_task(running.post(chat("a", stream=True)))
    await wait_until(lambda: running.value("gateway_requests") == 2, "the second waits", 10)
    streaming(running, DELTA, LAST, DONE)
    first.cancel()
    answer: httpx.Response = await second
    assert (answer.headers["x-cache"], running.asked) == ("MISS", [2])


@pytest.mark.outside
async def test_a_client_that_does_not_read_holds_up_no_equal_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waymark.gateway.response_cache._FLIGHT_SECONDS", 1e6)
    running = await start(1, answers={"cache": "memory"})
    streaming(running, *[DELTA + b": %b\n\n" % (b"x" * 65_536)] * 128, LAST, DONE)
    body = json.dumps(chat("a", stream=True)).encode()
    lines = b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", b"Content-Length: %d"
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        first.connect(("127.0.0.1", running.port))
        first.sendall(b"\r\n".join(lines) % len(body) + b"\r\n\r\n" + body)
        await wait_until(lambda: running.asked == [1], "the first is under way", 10)
        answer = await running.post(chat("a", stream=True))
        assert (answer.status_code, answer.headers["x-cache"], running.asked) == (200, "MISS", [2])
        assert answer.content.endswith(DONE)


@pytest.mark.outside
@each_place
async def test_what_began_before_a_clearing_is_not_kept(start: Start, where: str) -> None:
    running = await start(1, answers={"cache": where})
    other = running if where == "memory" else await start(0, answers={"cache": where})
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, LAST, DONE, until=go_on)
    body = chat("a", stream=True)
    first = asyncio.create_task(running.post(body))
    await wait_until(lambda: running.asked == [1], "the first is under way", 10)
    await other.client.post("/admin/response-cache/invalidate", json={"clear_all": True})
    go_on.set()
    await first
    assert await results(running, body) == ["MISS"]
    await wait_until(lambda: running.value("response_cache_entries") == 1, "the answer is kept", 10)
    assert await results(other, body) == ["HIT"]


@pytest.mark.outside
@each_place
async def test_what_began_before_a_clearing_answers_nothing_that_is_asked_after_it(
    start: Start, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the second request would go to an engine after this time, also if it waited for the first.
    monkeypatch.setattr("waymark.gateway.response_cache._FLIGHT_SECONDS", 1e6)
    running = await start(1, answers={"cache": where})
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, LAST, DONE, until=go_on)
    body = chat("a", stream=True)
    first = asyncio.create_task(running.post(body))
    await wait_until(lambda: running.asked == [1], "the first is under way", 10)
    await running.client.post("/admin/response-cache/invalidate", json={"clear_all": True})
    second = asyncio.create_task(running.post(body))
    try:
        await wait_until(lambda: running.asked == [2], "the second goes to an engine, too", 10)
    finally:
        go_on.set()
    assert [answer.headers["x-cache"] for answer in await asyncio.gather(first, second)] == ["MISS", "MISS"]


@pytest.mark.outside
async def test_the_admin_paths_need_the_token(start: Start) -> None:
    running = await start(1, api_token="secret")
    for method, path in (("GET", "stats"), ("POST", "invalidate")):
        answer = await running.client.request(method, f"/admin/response-cache/{path}", json={"clear_all": True})
        assert answer.status_code == 401
    answer = await running.client.get("/admin/response-cache/stats", headers={"authorization": "Bearer secret"})
    assert answer.json() == {"enabled": False}


@pytest.mark.outside
async def test_a_gateway_with_keys_and_no_token_tells_strangers_nothing(start: Start) -> None:
    """Its clients are strangers to its operator: the key of one opens none of these paths."""
    running = await start(1, gateway_keys=(f"one:{sha256(b'one').hexdigest()}",), answers={"cache": "memory"})
    paths = ["prefix-routing/stats", "kv-index/stats", "kv-index/backends", "response-cache/stats"]
    clears = {"response-cache/invalidate": {"clear_all": True}, "kv-index/clear": {"scope": "all"}}
    for headers in ({}, {"authorization": "Bearer one"}):
        asked = [await running.client.get(f"/admin/{path}", headers=headers) for path in paths]
        for path, clear in clears.items():
            asked.append(await running.client.post(f"/admin/{path}", json=clear, headers=headers))
        assert [answer.status_code for answer in asked] == [401] * 6
        assert all("this Waymark has no token for such requests" in answer.json()["error"] for answer in asked)
    assert "warnings" not in (await running.client.get("/ready")).json()


@pytest.mark.parametrize("path", ["response-cache/invalidate", "kv-index/clear"])
async def test_no_depth_of_a_body_is_an_error_of_ours(start: Start, path: str) -> None:
    running = await start(1, answers={"cache": "memory"})
    for depth in (1, 198, 199, 200, *range(252, 258), *range(1022, 1027), 100_000):
        deep = b"[" * depth + b"]" * depth
        for body in (deep, b'{"clear_all": %b}' % deep, b'{"clear_all": true, "scope": "all", "x": %b}' % deep):
            answer = await running.client.post(
                f"/admin/{path}", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (200, 400, 413), (depth, body[:32], answer.text)
            assert answer.is_success or answer.json()["error"]


@pytest.mark.outside
@pytest.mark.parametrize(
    ("settings", "is_open"),
    [({}, True), ({"api_token": "t"}, False), ({"gateway_keys": (f"one:{sha256(b'one').hexdigest()}",)}, False)],
    ids=["open", "token", "keys"],
)
async def test_an_open_gateway_says_so(start: Start, settings: dict[str, Any], is_open: bool) -> None:
    running = await start(1, **settings)
    warnings = (await running.client.get("/ready")).json().get("warnings", [])
    assert [warning.startswith("this port is open: ") for warning in warnings] == [True] * is_open


@pytest.mark.outside
@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ("a", [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
        ),
        ([{"type": "text", "text": "a", "cache_control": {"type": "x"}}], None),
        ([], None),
        (3, None),
        ([3], None),
    ],
)
async def test_a_system_prompt_is_marked_for_anthropic_s_cache(start: Start, system: Any, wanted: Any) -> None:
    running = await start(1, cache_control_injection=True)
    body = chat("a", system=system)
    sent = await running.post(body, "/v1/messages")
    content = sent.request.content
    (_, received), *_ = running.engines[0].asked
    if wanted is None:
        assert received == content
    else:
        assert await running.engines[0].asked[0][0].json() == body | {"system": wanted}
    await running.post(body)
    assert running.engines[0].asked[1][1] == content


# ---- without a gateway -----------------------------------------------------------------------------


async def test_the_cache_has_a_bound_in_entries_and_in_bytes() -> None:
    metrics, now = Metrics(), [0.0]
    answers = MemoryAnswers(3, 4000, 10, metrics, clock=lambda: now[0])

    async def has(name: bytes) -> bool:
        return (await answers.find(name)).answer == KeptAnswer(b"", name)

    for name in (b"a", b"b", b"c"):
        await answers.keep(name, KeptAnswer(b"", name), 0)
    assert await has(b"a")
    await answers.keep(b"d", KeptAnswer(b"", b"d"), 0)  # b was used least recently
    assert [await has(name) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    await answers.keep(b"e", KeptAnswer(b"", b"e" * 3000), 0)
    assert (answers.held.entries, answers.held.bytes <= 4000) == (1, True)
    await answers.keep(b"f", KeptAnswer(b"", b"f" * 4000), 0)
    assert ((await answers.find(b"f")).answer, answers.held.entries) == (None, 1)
    assert metrics.registry.get_sample_value("waymark_response_cache_evictions_total") == 4
    now[0] = 10.0
    assert ((await answers.find(b"e")).answer, answers.held) == (None, CacheSize(0, 0))
    none = MemoryAnswers(0, 4000, 10, metrics)
    await none.keep(b"a", KeptAnswer(b"", b"a"), 0)
    assert none.held == CacheSize(0, 0)


@pytest.mark.parametrize(("temperature", "may"), [(None, True), (0, True), (0.0, True), (-0.0, True), (1, False)])
def test_the_most_likely_answer_may_be_kept(temperature: Any, may: bool) -> None:
    assert is_cacheable({"temperature": temperature}) == may
    assert is_cacheable({}) is True


def test_no_two_requests_share_a_key() -> None:
    fields: list[dict[str, Any]] = [
        {}, {"a": 1}, {"a": "1"}, {"a": 1.5}, {"a": True}, {"a": None}, {"a": [1]}, {"a": {"b": 1}}, {"b": {"a": 1}},
        {"a": "\u00e9"}, {"a": "e"}, {"a": 1.0}, {"a": 2**64 - 1}, {"temperature": 0},
    ]  # fmt: skip
    keys = {cache_key(path, tenant, each) for path in ("/a", "/b") for tenant in ("t", "u") for each in fields}
    assert len(keys) == 4 * len(fields)
    assert cache_key("/a", "t", {"user": "x", "a": 1}) == cache_key("/a", "t", {"a": 1, "temperature": None})
    assert cache_key("/a", "t", {}, "x") != cache_key("/a", "t", {})
    assert cache_key("/a", "t", {"a": {"b": 1, "c": 2}}) == cache_key("/a", "t", {"a": {"c": 2, "b": 1}})


def test_a_key_costs_less_than_to_read_the_body() -> None:
    body = b'{"prompt": [' + b"1," * 1_000_000 + b"1]}"
    fields = bounded_loads(body)

    def seconds(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(5):
            began = thread_time()
            work()
            taken.append(thread_time() - began)
        return min(taken)

    assert seconds(lambda: cache_key("/a", "t", fields)) < seconds(lambda: bounded_loads(body))
    text = b'{"messages": "' + b"a" * 2**22 + b'"}'
    assert seconds(lambda: as_written(text)) < seconds(lambda: bounded_loads(text))


@pytest.mark.parametrize(
    ("number", "is_long"),
    [("9" * 15, False), ("1" * 16, True), ("-1234567890123456.5", True), ("123456789.0123456", False)],
)
def test_a_long_number_is_told_as_it_is_written(number: str, *, is_long: bool) -> None:
    found = [as_written(b'{"seed": ' + number.encode() + end) for end in (b"}", b" }")]
    assert all(found) == is_long
    assert len(set(found)) == (2 if is_long else 1)


@pytest.mark.outside
async def test_numbers_are_compared_as_they_are_written(start: Start) -> None:
    running = await start(1, answers={"cache": "memory"})
    answering(running)
    found = []
    for seed in ("18446744073709551616", "18446744073709551617", "1e20", "100000000000000000000", "1", "1.0"):
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "seed": %b}' % seed.encode()
        answers = [await running.client.post("/v1/chat/completions", content=body) for _ in range(2)]
        found.append([answer.headers["x-cache"] for answer in answers])
    assert found == [["MISS", "HIT"]] * 6


@pytest.mark.outside
async def test_every_header_that_an_engine_may_read_is_part_of_the_request(start: Start) -> None:
    running = await start(1, answers={"cache": "memory"})
    answering(running)

    async def result(*headers: tuple[str, str]) -> str:
        return str((await running.post(chat("a"), headers=list(headers))).headers["x-cache"])

    beta, other = ("anthropic-beta", "one"), ("anthropic-beta", "two")
    for told in ([], [beta], [other], [beta, other], [other, beta], [("openai-beta", "x")], [("x-unknown", "1")]):
        assert [await result(*told), await result(*told)] == ["MISS", "HIT"], told
    neutral = [("user-agent", "x"), ("traceparent", "00-1"), ("x-request-id", "1"), ("x-stainless-retry-count", "1")]
    assert await result(*neutral, ("authorization", "Bearer x"), ("connection", "x-hop"), ("x-hop", "1")) == "HIT"


pytestmark = pytest.mark.outside

KEPT = KeptAnswer(b"application/json", b"\n{}\n")
KEY, OTHER = b"k" * 32, b"o" * 32


async def test_gateways_share_answers_and_one_of_them_clears_all(start: Start) -> None:
    one, two = await start(1, answers={"cache": "redis"}), await start(0, answers={"cache": "redis"})
    answering(one)
    first = await one.post()
    await wait_until(lambda: one.value("response_cache_entries") == 1, "the answer is kept", 10)
    second = await two.post()
    assert (first.headers["x-cache"], second.headers["x-cache"]) == ("MISS", "HIT")
    assert (first.content, first.headers["content-type"]) == (second.content, second.headers["content-type"])
    stats: dict[str, Any] = {}

    async def are_counted() -> bool:
        stats.update((await two.client.get("/admin/response-cache/stats")).json())
        return bool(stats["requests"]["total"] == 2)

    await wait_until(are_counted, "the requests of both gateways are counted", 10)
    assert (stats["backend_type"], stats["config"]["backend"], stats["entries"]) == ("redis", "redis", 1)
    assert stats["requests"] == {"hit": 1, "miss": 1, "skip": 0, "total": 2}
    assert stats["hit_rate"] == "0.5000"
    assert stats["size_bytes"] > len(first.content)
    connections = stats["redis"].pop("connections")
    assert stats["redis"] == {"fallback_active": False, "errors": {"connection": 0, "timeout": 0, "other": 0}}
    assert connections.keys() == {"active", "idle"}
    assert sum(connections.values()) >= 1
    assert two.value("response_cache_entries") == 1
    assert two.value("cache_backend_type", backend="redis") == 1
    assert two.value("cache_redis_latency_seconds_count", operation="get") >= 2
    assert two.value("cache_redis_connections_idle") + two.value("cache_redis_connections_active") >= 1
    cleared = await two.client.post("/admin/response-cache/invalidate", json={"clear_all": True})
    assert cleared.json()["cleared_entries"] == 1
    assert await results(one, chat("hello")) == ["MISS"]


async def test_evictions_and_errors_are_those_of_all_gateways(start: Start) -> None:
    bounds = {"answers": {"cache": "redis"}, "answers_bytes": {"cache": 2 * 2**28 // 1000 + 1}}
    with redis_server() as answers:
        await answers.start()
        one, two = [await start(engines, **bounds, answers_redis_url=answers.url) for engines in (1, 0)]
        answering(one)
        for running in (one, two):
            # The bound is two answers.
            await results(running, *(chat(f"{running.port} {n}") for n in range(3)))
        await evicted(one, two, 4)
        answers.kill()
        for running in (one, two):
            await running.post(chat("hello"))

    def failed() -> int:
        return sum(int(running.value("cache_redis_errors_total", type="connection")) for running in (one, two))

    for running in (one, two):

        async def are_counted(running: Running = running) -> bool:
            stats = (await running.client.get("/admin/response-cache/stats")).json()
            return bool(stats["redis"]["errors"]["connection"] == failed() >= 2 and stats["evictions"] == 4)

        await wait_until(are_counted, "the errors and evictions of both are counted", 20)


async def evicted(one: Running, two: Running, number: int) -> None:
    def are_evicted() -> bool:
        return sum(running.value("response_cache_evictions_total") for running in (one, two)) == number

    await wait_until(are_evicted, f"{number} answers have made room for others", 20)


async def test_what_is_kept_in_redis_has_bounds(start: Start) -> None:
    running = await start(1, answers={"cache": "redis"}, answers_bytes={"cache": 2 * 2**28 // 1000 + 1})
    answering(running)
    assert await results(running, *map(chat, "abcd")) == ["MISS"] * 4
    await wait_until(lambda: running.value("response_cache_evictions_total") == 2, "all were kept", 10)
    assert await results(running, chat("a")) == ["MISS"]
    assert running.value("response_cache_entries") == 2


@asynccontextmanager
async def shared(server: RedisServer, milliseconds: int = 60_000) -> AsyncIterator[tuple[SharedAnswers, Metrics]]:
    metrics = Metrics()
    store = Store.open(server.url, timeout_seconds=60.0)
    beside = MemoryAnswers(10, 100_000, 60, metrics)
    bounds = {"entries_max": 10, "bytes_max": 100_000, "ttl_seconds": 60, "milliseconds": milliseconds}
    yield SharedAnswers(store.answers, beside, metrics, store.begin, store.counts, **bounds, look_seconds=0.05), metrics
    await store.close()


def errors(metrics: Metrics, kind: str) -> float:
    return metrics.registry.get_sample_value("waymark_cache_redis_errors_total", {"type": kind}) or 0.0


async def test_answers_are_in_memory_while_redis_is_away() -> None:
    with redis_server() as server:
        await server.start()
        async with shared(server) as (answers, metrics):
            found = await answers.find(KEY)
            await answers.keep(KEY, KEPT, found.clearing)
            assert (await answers.find(KEY)).answer == KEPT
            server.kill()
            found = await answers.find(OTHER)
            assert answers.is_away
            await answers.keep(OTHER, KEPT, found.clearing)
            assert (await answers.find(OTHER)).answer == KEPT
            assert answers.held.entries == 1
            assert metrics.registry.get_sample_value("waymark_cache_fallback_active") == 1
            assert errors(metrics, "connection") >= 1
            with pytest.raises(StoreUnavailable):
                await answers.clear()
            assert (await answers.find(OTHER)).answer is None, "this gateway's own are cleared"
            before = await answers.find(OTHER)
            await answers.keep(OTHER, KEPT, before.clearing)
            await server.start()
            await wait_until(lambda: not answers.is_away, "Redis is used again", 20)
            assert metrics.registry.get_sample_value("waymark_cache_fallback_active") == 0
            # What was kept meanwhile is forgotten, and an answer that began then is not kept.
            await answers.keep(OTHER, KEPT, before.clearing)
            assert await answers.count() == CacheSize(0, 0)
            assert (await answers.find(OTHER)).answer is None


async def test_a_slow_redis_costs_one_request_its_time() -> None:
    with redis_server() as server:
        await server.start()
        async with shared(server, milliseconds=int(patient(200))) as (answers, metrics):
            clearing = (await answers.find(KEY)).clearing
            assert not answers.is_away
            server.freeze()
            try:
                assert (await answers.find(KEY)).answer is None
                assert (answers.is_away, errors(metrics, "timeout")) == (True, 1)
                await answers.keep(KEY, KEPT, clearing)
                assert answers.held.entries == 0
            finally:
                server.thaw()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ANSWERS", "cache=disk"),
        ("ANSWERS_BYTES", "cache=1"),
        ("ANSWERS_TTL", "cache=0"),
    ],
)
def test_a_value_outside_of_its_range_ends_the_start(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f'WAYMARK_{name} is "{value}"')):
        Settings.from_env({f"WAYMARK_{name}": value})
