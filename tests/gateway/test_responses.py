"""A request to the Responses API goes on from an earlier answer, whichever engine and gateway it was given by."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from time import process_time
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis as AsyncRedis

from tests.e2e.redis_server import redis_server
from tests.gateway.conftest import Engine, Running, Start, events
from tests.patience import patient
from waymark.base.asgi import AsgiMessage
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.gateway.responses import MemoryResponses, Recorder
from waymark.store import keys

pytestmark = pytest.mark.outside

PATH = "/v1/responses"
WHERE = pytest.mark.parametrize("where", ["memory", "redis"])


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def said(number: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": f"answer {number}", "annotations": []}
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}


def answering(running: Running, status: str = "completed", **more: Any) -> None:
    """Every engine answers with ids in order, as a stream where that is asked for."""
    numbers = itertools.count(1)

    async def answer(request: web.Request) -> web.StreamResponse:
        number = next(numbers)
        response = {"id": f"resp_{number}", "object": "response", "status": status, "output": [said(number)], **more}
        response["previous_response_id"] = None
        if not (await request.json()).get("stream"):
            return web.json_response(response)
        begun = {"type": "response.created", "response": response | {"status": "in_progress", "output": []}}
        ended = {"type": f"response.{status}", "response": response}
        lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in (begun, ended)]
        return await events(request, lines[0][:30], lines[0][30:] + lines[1][:9], lines[1][9:])

    for engine in running.engines:
        engine.handler = answer


def last_body(engine: Engine) -> Any:
    return json.loads(engine.asked[-1][1])


async def respond(running: Running, text: Any, previous: str | None = None, **more: Any) -> dict[str, Any]:
    """The response; that of the last event where it is a stream."""
    body = {"model": "demo", "input": text, **({} if previous is None else {"previous_response_id": previous}), **more}
    answer = await running.post(body, PATH)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        assert int(answer.headers["content-length"]) == len(answer.content)
        return dict(answer.json())
    found = [json.loads(line[6:])["response"] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert {each["previous_response_id"] for each in found} == {previous}
    return dict(found[-1])


@WHERE
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_goes_on_from_its_last_answer(start: Start, where: str, is_stream: bool) -> None:
    running = await start(1, answers={"responses": where})
    answering(running)
    more: dict[str, Any] = {"stream": True} if is_stream else {}
    first = await respond(running, "one", instructions="be short", **more)
    second = await respond(running, [user("two")], first["id"], **more)
    assert second["previous_response_id"] == first["id"]
    third = await respond(running, "three", second["id"], temperature=0, **more)
    body = last_body(running.engines[0])
    assert body == {"model": "demo", "temperature": 0, **more, "input": body["input"]}
    assert body["input"] == [user("one"), said(1), user("two"), said(2), user("three")]
    stored = (await running.client.get(f"{PATH}/{third['id']}")).json()
    assert stored == third
    assert running.value("responses_total", outcome="kept") == 3


@WHERE
async def test_a_response_can_be_deleted(start: Start, where: str) -> None:
    running = await start(1, answers={"responses": where})
    answering(running)
    first = await respond(running, "one")
    deleted = await running.client.delete(f"{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    for answer in (
        await running.client.get(f"{PATH}/{first['id']}"),
        await running.client.delete(f"{PATH}/{first['id']}"),
        await running.post({"model": "demo", "input": "two", "previous_response_id": first["id"]}, PATH),
        await running.post({"model": "demo", "input": "two", "previous_response_id": ["x"]}, PATH),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert running.asked == [1]
    assert (await running.client.post(f"{PATH}/{first['id']}")).status_code == 405


@WHERE
@pytest.mark.parametrize(
    ("more", "status", "of_engine"),
    [({"store": False}, "completed", {}), ({}, "failed", {}), ({}, "completed", {"pad": "x" * 2000})],
    ids=["store-false", "failed", "too-large"],
)
async def test_some_answers_are_not_stored(
    start: Start, where: str, more: dict[str, Any], status: str, of_engine: dict[str, Any]
) -> None:
    running = await start(1, answers={"responses": where}, answers_bytes={"responses": 1500 * 256})
    answering(running, status, **of_engine)
    for is_stream in (False, True):
        found = await respond(running, "one", **more, stream=is_stream)
        assert (await running.client.get(f"{PATH}/{found['id']}")).status_code == 404


async def test_gateways_share_responses_in_redis_without_being_told(start: Start) -> None:
    one, two = await start(1), await start(0)
    answering(one)
    first = await respond(one, "one")
    second = await respond(two, "two", first["id"])
    assert (await one.client.get(f"{PATH}/{second['id']}")).json() == second


@WHERE
async def test_clients_and_tenants_never_see_each_other_s(start: Start, where: str) -> None:
    keys = tuple(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("one", "two"))
    running = await start(1, answers={"responses": where}, gateway_keys=keys)
    answering(running)
    first = await running.post({"model": "demo", "input": "x"}, PATH, headers={"x-api-key": "one"})
    path = f"{PATH}/{first.json()['id']}"
    seen = [(await running.client.get(path, headers={"x-api-key": name})).status_code for name in ("one", "two", "no")]
    assert seen == [200, 404, 401]


async def test_an_answer_is_not_held_up_where_it_cannot_be_stored(start: Start) -> None:
    with redis_server() as server:
        await server.start()
        running = await start(
            1, answers={"responses": "redis"}, redis_url=server.url, redis_timeout_seconds=0.5, query_deadline_ms=300
        )
        answering(running)
        first = await respond(running, "one")
        server.kill()
        await respond(running, "two")
        assert running.value("responses_total", outcome="failed") == 1
        asked = {"model": "demo", "input": "three", "previous_response_id": first["id"]}
        refused = await running.post(asked, PATH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


async def a_chat(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]})


async def test_answers_have_a_redis_of_their_own_and_chats_go_on_without_it(start: Start, redis_url: str) -> None:
    with redis_server() as server:
        await server.start()
        settings = {"answers": {"cache": "redis", "responses": "redis"}, "redis_timeout_seconds": patient(0.5)}
        running = await start(1, answers_redis_url=server.url, **settings)
        answering(running)
        first = await respond(running, "one")
        chats = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "x"}]}
        running.engines[0].handler = a_chat
        assert [(await running.post(chats)).headers["x-cache"] for _ in range(2)] == ["MISS", "HIT"]
        kept = {keys.ANSWERS_KEPT, keys.RESPONSES_KEPT}
        with server.admin() as answers:
            assert answers.exists(*kept) == 2
        async with AsyncRedis.from_url(redis_url) as index:
            assert await index.exists(*kept) == 0
        ready = (await running.client.get("/ready")).json()
        assert (ready["answers_redis"], "stores no responses" in str(ready["warnings"])) == (server.url, False)

        server.kill()
        assert (await running.post(chats)).status_code == 200
        answering(running)
        await respond(running, "two")
        ready = await running.client.get("/ready")
        assert ready.status_code == 200
        assert "this gateway caches answers in its memory and stores no responses" in str(ready.json()["warnings"])
        asked = {"model": "demo", "input": "three", "previous_response_id": first["id"]}
        assert (await running.post(asked, PATH)).status_code == 503


async def test_without_a_store_nothing_of_it_is_read_or_written(start: Start) -> None:
    running = await start(1, answers={"responses": "off"})
    answering(running)
    body = {"model": "demo", "input": "x", "previous_response_id": "resp_0"}
    answer = await running.post(body, PATH)
    assert (answer.json()["previous_response_id"], last_body(running.engines[0])) == (None, body)
    assert (await running.client.get(f"{PATH}/resp_1")).status_code == 404


@WHERE
async def test_what_is_stored_has_bounds_altogether(start: Start, where: str) -> None:
    room = 53_688  # of two responses, since 256 MiB are the room of 10,000
    running = await start(1, answers={"responses": where}, answers_bytes={"responses": room})
    answering(running)
    found = [await respond(running, text) for text in "abc"]
    statuses = [(await running.client.get(f"{PATH}/{each['id']}")).status_code for each in found]
    assert statuses == [404, 200, 200]
    assert (running.value("responses_stored"), running.value("responses_evicted_total")) == (2, 1)
    assert 1024 < running.value("responses_stored_bytes") <= room
    large = await respond(running, "x" * room)
    assert (await running.client.get(f"{PATH}/{large['id']}")).status_code == 404
    assert running.value("responses_total", outcome="too_large") == 1
    assert (await running.client.get(f"{PATH}/{found[2]['id']}")).status_code == 200


async def test_a_response_without_room_is_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep(self: MemoryResponses, name: str, value: bytes) -> bool:
        return False

    monkeypatch.setattr(MemoryResponses, "keep", keep)
    running = await start(1, answers={"responses": "memory"})
    answering(running)
    found = await respond(running, "one")
    assert (await running.client.get(f"{PATH}/{found['id']}")).status_code == 404
    assert running.value("responses_total", outcome="full") == 1


async def test_what_is_in_memory_has_bounds() -> None:
    place = MemoryResponses(2, 10_000, 60, Metrics())
    for name in "abc":
        await place.keep(name, b"{}")
    assert [await place.find(name) for name in "abc"] == [None, b"{}", b"{}"]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_response_is_no_larger_than_a_document_of_mongodb(start: Start) -> None:
    class Nothing:
        async def find(self, name: str) -> bytes | None:
            return None

    running = await start(1, archive=Nothing(), answers_bytes={"responses": 2**40})
    answering(running)
    await respond(running, "x" * (2**24 - 2**15))
    assert running.value("responses_total", outcome="too_large") == 1


def test_mongo_needs_redis() -> None:
    with pytest.raises(SettingsError, match="WAYMARK_ANSWERS has responses=memory"):
        Settings.from_env({"WAYMARK_RESPONSES_MONGO_URL": "mongodb://db"})


TOLD = {"previous_response_id": "resp_0"}
MEBI = 2**20


def event(end: str = "\n\n", **response: Any) -> bytes:
    fields = {"type": "response.completed", "response": {"object": "response", "id": "resp_1", **response}}
    return f"event: response.completed{end[: len(end) // 2]}data: {json.dumps(fields)}{end}".encode()


class Read:
    """What a client got, and what was kept."""

    def __init__(self, *, bytes_max: int = 8 * MEBI) -> None:
        self.body = bytearray()
        self.kept: list[dict[str, Any]] = []
        self._recorder = Recorder(self._send, TOLD, self._keep, bytes_max=bytes_max)

    async def _send(self, message: AsgiMessage) -> None:
        self.body += message.get("body", b"")

    async def _keep(self, response: dict[str, Any]) -> None:
        self.kept.append(response)

    async def all(self, pieces: Iterator[bytes]) -> Read:
        headers = [(b"content-type", b"text/event-stream")]
        await self._recorder({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await self._recorder({"type": "http.response.body", "body": piece, "more_body": True})
        await self._recorder({"type": "http.response.body", "body": b"", "more_body": False})
        return self


def cut(stream: bytes, size: int) -> Iterator[bytes]:
    return (stream[at : at + size] for at in range(0, len(stream), size))


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
async def test_events_are_found_in_any_pieces(end: str, size: int) -> None:
    others = f": comment{end}data: a{end}{end}".encode()
    stream = others + event(end, number=1) + others + event(end, number=2) + b"data: unfinished"
    read = await Read().all(cut(stream, size))
    assert [each["number"] for each in read.kept] == [1, 2]
    assert bytes(read.body).count(b"resp_0") == 2
    for each in (others, b"data: unfinished"):
        assert each in read.body
    assert bytes(read.body).replace(b',"previous_response_id":"resp_0"', b"").replace(b" ", b"") == stream.replace(
        b" ", b""
    )


async def seconds(stream: bytes, size: int) -> float:
    """The least CPU time of three, so that what else runs counts little."""
    found = []
    for _ in range(3):
        began = process_time()
        await Read().all(cut(stream, size))
        found.append(process_time() - began)
    return min(found)


#: A stream of about so many bytes, and the size of the pieces in which it comes.
HOSTILE: dict[str, tuple[Callable[[int], bytes], int]] = {
    "empty events": (lambda size: b"\n\n" * (size // 2), 8 * MEBI),
    "empty events with CR": (lambda size: b"\r\n\r\n" * (size // 4), 8 * MEBI),
    "events with nothing to read": (lambda size: b'data:"response"\n\n' * (size // 17), 8 * MEBI),
    "one event in small pieces": (lambda size: event(pad="x" * size), 256),
    "an event that never ends": (lambda size: b"data: " + b"\n" * 1 + b"x" * size, 256),
    "line ends that end nothing": (lambda size: b"\n \r" * (size // 3), 256),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_the_time_is_linear_in_the_bytes(kind: str) -> None:
    stream, size = HOSTILE[kind]
    small, large = await seconds(stream(MEBI // 2), size), await seconds(stream(4 * MEBI), size)
    assert large < 24 * small, "eight times as many bytes take as many times as long, not its square"


@pytest.mark.parametrize("kind", ["events with nothing to read"])
async def test_others_have_their_turn_within_a_piece(kind: str) -> None:
    stream, _ = HOSTILE[kind]
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await asyncio.sleep(0)
    before = turns
    await Read().all(iter([stream(MEBI)]))
    other.cancel()
    assert turns - before >= 16


async def test_a_response_that_is_too_deep_goes_on_and_is_not_kept() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    stream = event(output=deep)
    read = await Read().all(iter([stream]))
    assert (bytes(read.body), read.kept) == (stream, [])
