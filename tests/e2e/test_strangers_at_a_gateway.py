"""A running gateway between clients and an engine that forge, nest and cut short: each lie is refused or removed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.hostile.doors import HOSTILE, gateway
from tests.hostile.gateway_client import ANSWERS
from tests.hostile.raw_server import Pieces, RawServer, chunked, http
from tests.listening import listening
from tests.live import start
from tests.patience import patient

pytestmark = pytest.mark.outside

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
JSON = json.dumps(ANSWERS[CHAT]).encode()
ELSEWHERE = "10.6.6.6:1"
#: Names by which engines are told where to copy from.
PLACES = (
    "x-kv-cache-source-host-port",
    "x-prefiller-host-port",
    "x-decoder-host-port",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-prefiller-url",
    "mif-prefill-endpoint",
)
#: Names of an answer that only the gateway gives.
OURS = ("x-waymark-decision", "x-waymark-other", "x-cache", "x-session-token", *PLACES[1:3])


class Door:
    """A gateway, a client, and the engine of the client's model, which answers with ``lie``."""

    def __init__(self, client: httpx.AsyncClient, redis_url: str) -> None:
        self.client = client
        self.redis_url = redis_url
        self.engine = RawServer(self._answer)
        self.lie: Pieces = []
        self.asked: list[tuple[str, bytes]] = []

    def _answer(self, path: str, body: bytes) -> Pieces:
        if path not in (CHAT, RESPONSES):
            return [http(b"{}", status="404 Not Found")]
        self.asked.append((path, body))
        return self.lie or [http(json.dumps(ANSWERS[path]).encode())]

    async def ask(self, path: str = CHAT, *headers: tuple[str, str], **fields: Any) -> httpx.Response:
        message = {"role": "user", "content": "hello"}
        prompt = {"input": "hello"} if path == RESPONSES else {"messages": [message]}
        return await self.client.post(path, json={"model": HOSTILE, **prompt, **fields}, headers=[*headers])

    async def looks_whole(self, lie: Pieces, path: str) -> bool:
        """Whether a client takes this answer of the engine for a whole one."""
        self.lie = lie
        try:
            answer = await self.ask(path, stream=True, user=str(len(self.asked)))
        except httpx.TransportError:
            return False
        return answer.status_code < 500 and '"error"' not in answer.text


@pytest.fixture(scope="module")
async def opened(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    url = f"unix://{redis_socket}"
    async with Redis.from_url(url, protocol=2) as redis:
        await redis.flushall()
    async with (
        gateway(url, tmp_path_factory.mktemp("gateway")) as process,
        httpx.AsyncClient(base_url=process.target["url"], timeout=patient(60), trust_env=False) as client,
    ):
        door = Door(client, url)
        async with listening(door.engine.handler, process.target["engine_port"]):
            yield door


@pytest.fixture
def door(opened: Door) -> Door:
    opened.lie = []
    opened.asked.clear()
    opened.engine.heads.clear()
    return opened


async def test_no_client_tells_an_engine_where_to_copy_from(door: Door) -> None:
    answer = await door.ask(CHAT, *((name, ELSEWHERE) for name in PLACES), ("x-own", "1"), user="places")
    assert answer.status_code == 200
    (head,) = (head for head in door.engine.heads if "x-own" in head)
    assert not [name for name, value in head.items() if ELSEWHERE in value]


async def test_what_differs_in_a_digit_or_a_header_shares_no_answer(door: Door) -> None:
    async def results(seed: str, *headers: tuple[str, str]) -> list[str]:
        body = b'{"model": "%b", "messages": [], "user": "keys", "seed": %b}' % (HOSTILE.encode(), seed.encode())
        asked = [await door.client.post(CHAT, content=body, headers=[*headers]) for _ in range(2)]
        return [answer.headers["x-cache"] for answer in asked]

    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    door.lie = [http(json.dumps({"choices": [choice]}).encode())]
    for seed in ("18446744073709551616", "18446744073709551617", "1e20", "1", "1.0"):
        assert await results(seed) == ["MISS", "HIT"], seed
    beta, other, last = (("anthropic-beta", name) for name in ("one", "two", "last"))
    for headers in ([beta, last], [other, last], [last]):
        assert await results("1", *headers) == ["MISS", "HIT"], headers


async def test_a_body_that_is_too_deep_reaches_no_engine(door: Door) -> None:
    for depth in (254, 255, 1000):
        for path, name in ((RESPONSES, "input"), (RESPONSES, "metadata"), (CHAT, "tools")):
            fields = json.dumps({"model": HOSTILE, "input": "a", "messages": [], name: "DEEP"}).encode()
            body = fields.replace(b'"DEEP"', b"[" * depth + b"]" * depth)
            assert (await door.client.post(path, content=body)).status_code == 400, (depth, path, name)
    assert not door.asked


async def test_an_answer_of_one_gateway_is_known_to_the_next(door: Door, tmp_path: Path) -> None:
    first = (await door.ask(RESPONSES)).json()
    async with start("gateway", door.redis_url, tmp_path / "log") as live, live.client() as client:
        found = await client.get(f"{RESPONSES}/{first['id']}")
    assert (found.status_code, found.json()) == (200, first)


async def test_names_that_are_the_gateway_s_are_taken_from_no_engine(door: Door) -> None:
    door.lie = [http(JSON, *(f"{name}: {ELSEWHERE}" for name in OURS), "x-kept: 1")]
    answer = await door.ask(user="forged")
    assert (answer.status_code, answer.headers["x-kept"]) == (200, "1")
    assert ELSEWHERE not in str(answer.headers)


WHOLE = http(JSON)
NO_ANSWERS = {
    "a fold after the status": WHOLE.replace(b"\r\n", b"\r\n x-decoder-host-port: a\r\n", 1),
    "a fold behind another answer": b"HTTP/1.1 103 x\r\na: b\r\n\r\n" + WHOLE.replace(b"\r\n", b"\r\n\ta: b\r\n", 1),
    **{f"status {status}": http(JSON, status=f"{status} x") for status in ("000", "099", "101", "600", "999")},
}


async def test_what_is_not_an_answer_is_an_error_of_the_engine(door: Door) -> None:
    for what, lie in NO_ANSWERS.items():
        door.lie = [lie]
        answer = await door.ask(user=what)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_answer"), what


EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type": "response.completed", "response": {"id": "r"}}\n\n'
CUT: dict[str, tuple[str, bytes]] = {
    "length": (CHAT, WHOLE),
    "chunks": (CHAT, b"".join(chunked(JSON[:9], JSON[9:], kind="application/json"))),
    "stream": (CHAT, b"".join(chunked(EVENT, b"data: [DONE]\n\n"))),
    "stream without a length": (CHAT, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT),
    "responses": (RESPONSES, b"".join(chunked(COMPLETED))),
}


@pytest.mark.parametrize("kind", CUT)
async def test_an_answer_that_is_cut_short_never_looks_whole(door: Door, kind: str) -> None:
    """Some of its bytes; ``gateway/test_cut_answers.py`` has each of them."""
    path, sent = CUT[kind]
    whole = [sent] if kind != "stream without a length" else [sent, b"data: [DONE]\n\n"]
    assert await door.looks_whole(whole, path)
    cuts = sorted({*range(0, len(sent), 11), len(sent) - 1, *([] if len(whole) == 1 else [len(sent)])})
    assert [cut for cut in cuts if await door.looks_whole([sent[:cut]], path)] == []
