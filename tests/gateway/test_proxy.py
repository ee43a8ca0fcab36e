"""Requests through the gateway: bytes, streams, retries, clients that go away, and the load that all of it leaves."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from tests.conftest import wait_until
from tests.gateway.conftest import Running, Start, chat, events, registration
from tests.patience import within
from tests.store.factories import answered_before
from waymark.base.endpoints import AllowedEndpoints
from waymark.chat.requests import InferenceRequest
from waymark.decide.requests import PreparedRequest, RequestSelector
from waymark.decide.selector import Selector
from waymark.decide.under_way import RequestUnderWay
from waymark.domain.books import NO_USAGE, Usage
from waymark.gateway import proxy
from waymark.gateway.proxy import Avoided
from waymark.gateway.upstream import Interrupted, Upstream

pytestmark = pytest.mark.outside

DELTA = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def fails(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "busy"}, status=503)


async def breaks(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


def free(running: Running) -> Any:
    async def is_free() -> bool:
        return await running.requests() == 0

    return is_free


async def test_a_body_goes_on_byte_for_byte_with_the_headers_that_may_pass(start: Start) -> None:
    running = await start(1, engine_api_key="engine-key", engine_key_hosts=("127.0.0.1",))
    body = b'{ "model":"demo",  "messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}], "unknown": 1e3 }'
    headers = {
        "authorization": "Bearer mine",
        "x-api-key": "mine",
        "x-waymark-decision": "x",
        "mif-prefill-endpoint": "10.0.0.1:1",
        "x-prefiller-host-port": "10.0.0.1:1",
        "x-kv-cache-source-host-port": "10.0.0.1:1",
        "x-data-parallel-host-port": "10.0.0.1:1",
        "x-decoder-host-port": "10.0.0.1:1",
        "x-encoder-hosts-ports": "10.0.0.1:1",
        "x-gateway-destination-endpoint": "10.0.0.1:1",
        "x-gateway-destination-endpoint-served": "10.0.0.1:1",
        "x-prefiller-url": "http://10.0.0.1:1",
        "x-data-parallel-rank": "7",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "mine-1",
        "openai-organization": "kept",
    }
    answer = await running.client.post("/v1/chat/completions?beta=true", content=body, headers=headers)
    assert answer.json() == {"object": "made up", "path": "/v1/chat/completions"}
    assert answer.headers["x-request-id"] == "mine-1"
    request, received = running.engines[0].asked[0]
    assert (received, request.query_string) == (body, "beta=true")
    assert request.headers["authorization"] == "Bearer engine-key"
    assert request.headers["traceparent"] == headers["traceparent"]
    assert (request.headers["x-request-id"], request.headers["openai-organization"]) == ("mine-1", "kept")
    gone = {"x-api-key", "x-waymark-decision", "mif-prefill-endpoint", "x-hop", "te", "x-prefiller-url"}
    gone |= {f"x-{name}-host-port" for name in ("prefiller", "kv-cache-source", "data-parallel")}
    gone |= {"x-encoder-hosts-ports", "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served"}
    assert not gone & {name.lower() for name in request.headers}
    place = running.engines[0].url.removeprefix("http://")
    assert request.headers.getall("x-decoder-host-port", []) in ([], [place]), "only the decision names one"
    assert "x-data-parallel-rank" not in request.headers


@pytest.mark.parametrize("hosts", ["10.0.0.0/8", "*.engines.svc", "127.0.0.2"])
async def test_an_engine_that_the_operator_has_not_named_gets_no_key(start: Start, hosts: str) -> None:
    running = await start(1, engine_api_key="engine-key", engine_key_hosts=(hosts,))
    assert (await running.post(headers={"authorization": "Bearer mine"})).status_code == 200
    ((request, _),) = running.engines[0].asked
    assert "authorization" not in request.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_body_that_names_an_engine_to_copy_from_reaches_no_engine(start: Start, path: str) -> None:
    running = await start(1)
    prompt: dict[str, Any] = {"model": "demo", "max_tokens": 1, "input": "a", "prompt": "a"}
    prompt["messages"] = [{"role": "user", "content": "a"}]
    answer = await running.client.post(path, json=prompt | {"kv_transfer_params": None})
    assert answer.status_code == 200, answer.text
    for name, value in {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5000},
        "kv_hints": {"actions": []},
        "bootstrap_host": "10.0.0.1",
    }.items():
        answer = await running.client.post(path, json=prompt | {name: value})
        assert answer.status_code == 400
        assert f"{name} tells an engine where to copy blocks from" in answer.text
        assert "leave it out" in answer.text
    assert len(running.engines[0].asked) == 1


async def test_headers_of_an_answer_that_the_gateway_decides_are_its_own(start: Start) -> None:
    running = await start(1)

    async def forges(request: web.Request) -> web.StreamResponse:
        headers = {
            "x-waymark-decision": "x",
            "x-waymark-other": "x",
            "x-session-token": "x",
            "x-cache": "HIT",
            "x-cache-key": "x",
            "x-request-id": "x",
            "x-decoder-host-port": "10.0.0.1:1",
            "X-Prefiller-Host-Port": "10.0.0.1:1",
            "mif-prefill-endpoint": "10.0.0.1:1",
            "connection": "x-hop",
            "x-hop": "1",
            "x-kept": "1",
        }
        return web.json_response({}, headers=headers)

    running.engines[0].handler = forges
    answer = await running.post()
    assert answer.headers.get_list("x-waymark-decision") != ["x"]
    assert len(answer.headers.get_list("x-session-token")) == 1
    assert answer.headers.get_list("x-decoder-host-port") == [running.engines[0].url.removeprefix("http://")]
    assert (len(answer.headers.get_list("x-request-id")), answer.headers["x-request-id"] == "x") == (1, False)
    forged = {"x-waymark-other", "x-cache", "x-cache-key", "x-prefiller-host-port", "mif-prefill-endpoint"}
    assert not forged & answer.headers.keys()
    assert ("x-hop" in answer.headers, answer.headers["x-kept"]) == (False, "1")


async def test_a_stream_arrives_while_it_is_made(start: Start) -> None:
    running = await start(1)
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, DONE, until=go_on)
    async with running.client.stream("POST", "/v1/chat/completions", json=chat("a", stream=True)) as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == DELTA
        assert running.value("gateway_requests") == 1
        go_on.set()
        assert b"".join([piece async for piece in pieces]) == DONE
    await wait_until(free(running), "nothing is reserved", 10)


@pytest.mark.parametrize("fault", [fails, breaks])
async def test_an_engine_that_does_not_begin_an_answer_is_replaced(start: Start, fault: Any) -> None:
    running = await start(2)
    for engine in running.engines:
        engine.handler = fault
    refused = await running.post()
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "no_answer"
    assert running.asked == [1, 1]
    running.engines[0].handler = None
    assert [(await running.post()).status_code for _ in range(8)] == [200] * 8
    await wait_until(free(running), "nothing is reserved", 10)
    assert (await running.loads())[1].failed > 0


async def test_an_engine_without_a_listener_is_replaced_at_most_twice(start: Start, free_port: int) -> None:
    running = await start(4)
    for engine in running.engines:
        engine.handler = fails
    answer = await running.post()
    assert sum(running.asked) == 3
    assert (answer.status_code, answer.json()) == (503, {"error": "busy"})
    await running.store.registry.register(registration(f"http://127.0.0.1:{free_port}", 9))
    for engine in running.engines:
        engine.handler = None
    answers = [await running.post(chat(f"hello {n}")) for n in range(40)]
    assert {answer.status_code for answer in answers} == {200}
    assert running.value("gateway_retries_total", reason="connect") > 0


async def test_an_error_for_want_of_an_answer_names_the_engines(start: Start, free_port: int) -> None:
    running = await start(0)
    await running.store.registry.register(registration(f"http://127.0.0.1:{free_port}", 0))
    sentence = (await running.post()).json()["error"]["message"]
    assert sentence == (
        'all engines of model "demo" are unreachable; tried were "engine-0" (connect); start them, or try again later'
    )


async def test_an_engine_that_breaks_off_is_not_called_unreachable(start: Start) -> None:
    running = await start(1)
    running.engines[0].handler = breaks
    sentence = (await running.post()).json()["error"]["message"]
    assert sentence == 'none of the engines of model "demo" answered: "engine-0" (broken); try again in a moment'


async def test_an_error_after_three_of_four_engines_names_those_that_were_tried(start: Start) -> None:
    running = await start(4)
    for engine in running.engines:
        engine.handler = breaks
    refused = await running.post()
    tried = [f'"engine-{number}" (broken)' for number, count in enumerate(running.asked) if count]
    assert len(tried) == 3
    sentence = refused.json()["error"]["message"]
    first, _, rest = sentence.partition(": ")
    names, _, last = rest.partition("; ")
    assert (refused.status_code, first) == (502, "none of the engines that were tried answered")
    assert (sorted(names.split(", ")), last) == (tried, "try again in a moment")


async def test_an_engine_without_a_listener_is_avoided_for_a_while(
    start: Start, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "AVOID_SECONDS", 3600)
    running = await start(1)
    await running.store.registry.register(registration(f"http://127.0.0.1:{free_port}", 9))
    for n in range(40):
        assert (await running.post(chat(f"hello {n}"))).status_code == 200
    assert running.value("gateway_retries_total", reason="connect") == 1
    assert running.asked == [40]


async def test_engines_that_are_avoided_are_better_than_none(
    start: Start, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "AVOID_SECONDS", 3600)
    running = await start(0)
    await running.store.registry.register(registration(f"http://127.0.0.1:{free_port}", 9))
    assert [(await running.post()).status_code for _ in range(3)] == [502] * 3
    assert running.value("gateway_retries_total", reason="connect") == 3


def test_an_engine_is_avoided_for_its_time() -> None:
    now = [0.0]
    avoided = Avoided(5, lambda: now[0])
    avoided.failed("a")
    avoided.failed("b")
    avoided.answered("b")
    assert avoided.now() == {"a"}
    now[0] = 5.0
    assert avoided.now() == frozenset()
    off = Avoided(0)
    off.failed("a")
    assert off.now() == frozenset()


async def test_other_errors_of_an_engine_are_the_answer(start: Start) -> None:
    running = await start(2)

    async def rejects(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    for engine in running.engines:
        engine.handler = rejects
    answer = await running.post()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert sum(running.asked) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(start: Start, path: str) -> None:
    running = await start(2)

    async def begins(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(DELTA[:-10])
        assert request.transport is not None
        await asyncio.sleep(0)
        request.transport.abort()
        return response

    for engine in running.engines:
        engine.handler = begins
    answer = await running.post(chat("a", stream=True, input="a"), path)
    assert sum(running.asked) == 1
    last = answer.text.rstrip().split("\n\n")[-1]
    fields = json.loads(last.partition("data: ")[2])
    assert "broken off" in json.dumps(fields)
    assert last.startswith("event: error") == (path != "/v1/chat/completions")
    assert running.value("gateway_interrupted_total") == 1
    await wait_until(free(running), "nothing is reserved", 10)
    assert sum(load.failed for load in await running.loads()) == 1


async def test_an_answer_of_a_length_that_breaks_off_ends_the_connection(start: Start) -> None:
    running = await start(1)

    async def begins(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        await asyncio.sleep(0)
        request.transport.abort()
        return response

    running.engines[0].handler = begins
    with pytest.raises(httpx.RemoteProtocolError):
        await running.post()
    await wait_until(free(running), "nothing is reserved", 10)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_goes_away_ends_its_request_at_the_engine(start: Start, has_begun: bool) -> None:
    running = await start(1)
    never = asyncio.Event()
    running.engines[0].handler = (lambda request: events(request, DELTA, DONE, until=never)) if has_begun else hangs
    asked = asyncio.create_task(running.post(chat("a", stream=True)))
    await wait_until(lambda: running.asked == [1], "the engine has the request", 10)

    async def is_reserved() -> bool:
        return await running.requests() == 1

    await wait_until(is_reserved, "the request is reserved", 10)
    asked.cancel()
    async with within(10):
        await asyncio.wait({asked})
    await wait_until(lambda: running.engines[0].ended == 1, "the engine's request has ended", 10)
    await wait_until(free(running), "nothing is reserved", 10)
    load = (await running.loads())[0]
    assert (load.failed, load.ok) == (0, int(has_begun)), "an engine without an answer is neither good nor bad"
    assert running.value("gateway_requests") == 0


async def test_a_client_that_does_not_read_holds_up_its_engine_and_nobody_else(start: Start) -> None:
    running = await start(1)
    # More than the buffers of all sockets on the way may grow to.
    piece, pieces = b"x" * 2**16, 2**10
    written = [0]

    async def pours(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(pieces):
            await response.write(piece)
            written[0] += 1
        await response.write_eof()
        return response

    running.engines[0].handler = pours
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=2**16)
    body = json.dumps(chat("a", stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    seen: list[int] = []

    def has_stopped() -> bool:
        seen.append(written[0])
        return seen[-1] > 0 and len(set(seen[-20:])) == 1 and len(seen) >= 20

    await wait_until(has_stopped, "the engine writes no more", 30)
    assert written[0] < pieces, "what nobody reads is held by the gateway"
    running.engines[0].handler = None
    assert (await running.post()).status_code == 200
    answer = await reader.read(-1)
    assert answer.count(b"x") >= len(piece) * pieces
    assert written[0] == pieces
    writer.close()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_an_engine_that_hangs_is_given_up_after_its_time(start: Start, has_begun: bool) -> None:
    running = await start(1, gateway_idle_seconds=0.3)
    never = asyncio.Event()
    running.engines[0].handler = (lambda request: events(request, DELTA, DONE, until=never)) if has_begun else hangs
    answer = await running.post(chat("a", stream=True))
    if has_begun:
        assert answer.text.startswith(DELTA.decode())
        assert "broken off" in answer.text
    else:
        assert (answer.status_code, "timeout" in answer.text) == (502, True)
    await wait_until(free(running), "nothing is reserved", 10)


async def test_a_client_that_reads_slowly_is_no_engine_that_hangs() -> None:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(Mock(asyncio.Transport))
    content = StreamReader(protocol, 2**16, loop=loop)
    upstream = Upstream(AllowedEndpoints(), first_byte_seconds=1.0, idle_seconds=0.05)
    pieces = upstream.pieces(cast(aiohttp.ClientResponse, SimpleNamespace(content=content)))
    over = 0.0

    def is_over() -> bool:
        return loop.time() > over

    for piece in (b"a", b"b"):
        content.feed_data(piece)
        assert await anext(pieces) == piece
        over = loop.time() + 0.15
        await wait_until(is_over, "the client has taken longer than an engine may", 10)

    with pytest.raises(Interrupted, match=r"^idle$"):
        await anext(pieces)


def test_the_words_of_a_last_event_are_in_every_one() -> None:
    chosen = random.Random(1)
    parts = [
        b"\n", b"\r", b"data: ", b"data:", b"[DONE]", b'{"error"', b'{ "type": "error"', b"event: ", b"error", b" ",
        b"{", b"message_stop", b"response.", b"completed", b"failed", b'"type": "', b'"', b"word",
    ]  # fmt: skip
    found = set()
    for _ in range(20_000):
        near = b"".join(chosen.choices(parts, k=chosen.randrange(1, 6)))
        is_last = proxy._LAST_EVENT.search(near) is not None
        assert proxy._has_last_event(near) is is_last, near
        found.add(is_last)
    assert found == {False, True}


@pytest.mark.parametrize(
    ("path", "before", "content"),
    [
        ("/v1/completions", b"", DELTA),
        ("/v1/messages", b"event: message_start\ndata: {}\n\n", b"event: content_block_delta\n\n"),
        ("/v1/responses", b"event: response.created\n\n", b"event: response.output_item.added\n\n"),
    ],
)
async def test_prefill_ends_with_the_first_content(start: Start, path: str, before: bytes, content: bytes) -> None:
    running = await start(1)
    goes, ends = asyncio.Event(), asyncio.Event()

    async def streams(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if before:
            await response.write(before)
        await goes.wait()
        await response.write(content)
        await ends.wait()
        return response

    running.engines[0].handler = streams
    # Token ids need no tokenizer; a text without one is reserved by an estimate of its tokens.
    prompt = {"prompt": [1, 2, 3]} if path == "/v1/completions" else chat("a")
    asked = asyncio.create_task(running.post({"model": "demo", "input": "a", **prompt, "stream": True}, path))

    async def is_load(*, has_tokens: bool) -> bool:
        load = (await running.loads())[0]
        return (load.tokens > 0, load.requests) == (has_tokens, 1)

    await wait_until(lambda: running.asked == [1], "the engine has the request", 10)
    await wait_until(lambda: is_load(has_tokens=True), "all of it is reserved", 10)
    assert running.value("ttft_seconds_count") == 0
    goes.set()
    await wait_until(lambda: running.value("ttft_seconds_count") == 1, "the first content was seen", 10)
    await wait_until(lambda: is_load(has_tokens=False), "its prefill is released", 10)
    ends.set()
    await asked
    await wait_until(free(running), "nothing is reserved", 10)


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'


@pytest.mark.parametrize("is_stream", [True, False])
async def test_each_further_token_of_a_stream_is_timed(start: Start, is_stream: bool) -> None:
    running = await start(1)
    goes_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, USAGE + DONE, until=goes_on)
    asked = asyncio.create_task(running.post(chat("a", stream=is_stream)))
    await wait_until(lambda: running.value("ttft_seconds_count") == 1, "the first content was seen", 10)
    seen = monotonic()
    await wait_until(lambda: monotonic() - seen > 0.005, "more than a millisecond has passed")
    goes_on.set()
    await asked
    await wait_until(free(running), "nothing is reserved", 10)

    (timed,) = (await running.store.answer_times.read(1, [1])).values()
    assert timed.first_token.requests == 1
    assert (timed.further_tokens.requests, timed.further_tokens.ms > 0) == ((1, True) if is_stream else (0, False))


COMPLETED = (
    b'event: response.output_text.delta\ndata: {}\n\nevent: response.completed\ndata: {"type": "response.completed", '
)


@pytest.mark.parametrize(
    ("path", "kind", "pieces"),
    [
        ("/v1/chat/completions", "application/json", [b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}', b""]),
        (
            "/v1/responses",
            "text/event-stream",
            [COMPLETED, b'"response": {"usage": {"input_tokens": 9, "output_tokens": 2}}}\n\n'],
        ),
    ],
    ids=["the last chunk comes alone", "the last event comes in two pieces"],
)
async def test_a_usage_is_noted_however_its_answer_is_cut(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, pieces: list[bytes]
) -> None:
    running = await start(1)
    goes_on = asyncio.Event()
    usages: list[Usage] = []
    end = RequestUnderWay.end

    def noted(self: RequestUnderWay, *, is_ok: bool | None, usage: Usage = NO_USAGE) -> asyncio.Task[None] | None:
        usages.append(usage)
        return end(self, is_ok=is_ok, usage=usage)

    async def answers(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(pieces[0])
        await goes_on.wait()
        if pieces[1]:
            await response.write(pieces[1])
        await response.write_eof()
        return response

    monkeypatch.setattr(RequestUnderWay, "end", noted)
    running.engines[0].handler = answers
    asked = asyncio.create_task(running.post(chat("a", input="a"), path))
    await wait_until(lambda: running.value("ttft_seconds_count") == 1, "the first piece was seen", 10)
    goes_on.set()
    await asked
    assert usages[0] == Usage(None, 9, 2), "the first end of a request counts"


async def cuts(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(DELTA)
    return await hangs(request)


@pytest.mark.parametrize(
    ("handler", "leaves"),
    [(None, False), (fails, False), (breaks, False), (hangs, False), (cuts, False), (hangs, True)],
)
async def test_a_body_stays_no_longer_than_its_request(
    start: Start, monkeypatch: pytest.MonkeyPatch, handler: Any, *, leaves: bool
) -> None:
    running = await start(1, gateway_idle_seconds=0.3)
    running.engines[0].handler = handler
    seen: list[Any] = []
    prepare = RequestSelector.prepare

    async def noted(self: RequestSelector, request: InferenceRequest, **more: Any) -> PreparedRequest:
        seen.append(request.messages)
        return await prepare(self, request, **more)

    monkeypatch.setattr(RequestSelector, "prepare", noted)
    alone = [[chat("a")]]

    def has_request(number: int) -> bool:
        return running.asked == [number]

    def are_free() -> bool:
        return {sys.getrefcount(each) for each in seen} == {sys.getrefcount(each) for each in alone}

    gc.disable()
    try:
        for number in range(1, 4):
            asked = asyncio.create_task(running.post(chat("a", stream=True)))
            await wait_until(partial(has_request, number), "the engine has the request", 10)
            if leaves:
                asked.cancel()
            await asyncio.wait({asked})
        assert len(seen) == 3
        await wait_until(are_free, "only this test has the bodies, without the garbage collector", 10)
    finally:
        gc.enable()


async def test_the_reservations_of_the_last_requests_end_before_the_gateway(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(1)
    running.engines[0].handler = hangs
    begun, goes_on = asyncio.Event(), asyncio.Event()
    release = Selector.release

    async def late(self: Selector, *arguments: Any, **more: Any) -> tuple[int, int]:
        begun.set()
        await goes_on.wait()
        return await release(self, *arguments, **more)

    monkeypatch.setattr(Selector, "release", late)
    asked = asyncio.create_task(running.post())
    await wait_until(lambda: running.asked == [1], "the engine has the request", 10)
    asked.cancel()
    await asyncio.wait({asked})
    await wait_until(begun.is_set, "its release has begun", 10)
    closing = asyncio.create_task(running.gateway.close())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not closing.done()
    goes_on.set()
    await closing
    assert await running.requests() == 0


async def test_a_client_may_ask_for_times(start: Start, tmp_path: Path) -> None:
    picker = tmp_path / "picker.yaml"
    picker.write_text(
        "kind: EndpointPickerConfig\nplugins: [{type: predicted-latency-scorer}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: predicted-latency-scorer}]}]\n"
    )
    running = await start(2, policy=str(picker), loads_ms=0)
    claims = {each.registration.target.address: each.publisher for each in await running.store.directory.claims()}
    for engine, ttft_ms, tpot_ms in ((0, 50.0, 40.0), (1, 250.0, 10.0)):
        await answered_before(running.store, claims[running.engines[engine].url], ttft_ms, tpot_ms)

    for headers, expected in (
        ({}, [1, 0]),
        ({"X-SLO-TTFT-ms": "300", "x-slo-tpot-ms": "20"}, [1, 1]),
        ({"x-slo-ttft-ms": "\xb2", "x-slo-tpot-ms": ""}, [2, 1]),
    ):
        await running.post(headers=[(name.encode(), value.encode("latin-1")) for name, value in headers.items()])
        assert running.asked == expected


@pytest.mark.parametrize(
    ("body", "requests"),
    [
        ({"prompt": [1, 2, 3], "n": 3}, 3),
        ({"prompt": [[1, 2, 3], [4, 5], [6]]}, 3),
        ({"prompt": [[1, 2, 3], [4, 5]], "n": 2}, 4),
        ({"prompt": [1], "n": 1000}, 64),
    ],
)
async def test_each_sequence_is_reserved(start: Start, body: dict[str, Any], requests: int) -> None:
    running = await start(1)
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, DELTA, DONE, until=go_on)
    asked = asyncio.create_task(running.post({"model": "demo", "stream": True, **body}, "/v1/completions"))

    async def are_reserved() -> bool:
        return await running.requests() == requests

    await wait_until(are_reserved, "each sequence is reserved", 10)
    go_on.set()
    await asked
    await wait_until(free(running), "nothing is reserved", 10)
