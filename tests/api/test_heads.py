"""heads: what a request is does not depend on what was read over its connection before."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from tests.api.test_answers import bounded, served
from tests.patience import within
from waymark.serving.heads import Head, head_of

pytestmark = pytest.mark.outside

SECONDS = 20.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with all that it was told."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    told = {key: repr(value) for key, value in scope.items() if key not in ("client", "server", "extensions")}
    content = orjson.dumps({"scope": told, "body": body.decode("latin-1")}, option=orjson.OPT_SORT_KEYS)
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": content})


def post(body: bytes, *lines: str, path: str = "/query", length: str | None = None) -> bytes:
    told = str(len(body)) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: x", "X-Note: a", f"Content-Length: {told}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


class Client:
    """One connection; each piece is sent when what came before it was answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, *pieces: bytes) -> bytes:
        """A whole answer, or what came before the end of the connection."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)
        async with within(SECONDS):
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"HTTP/1.1 100 "):
                    head += await self._reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                return head + await self._reader.readexactly(length)
            except asyncio.IncompleteReadError as exc:
                return exc.partial

    async def end(self) -> bytes:
        """Says no more, and reads to the end."""
        self._writer.write_eof()
        async with within(SECONDS):
            return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


async def client(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


#: What may come on a connection after requests like ``post(b"..")``.
LATER = [
    post(b"{}"),
    post(b"x" * 1234),
    post(b"x" * 100_000),
    post(b""),
    post(b"{}", path="/other"),
    post(b"{}", path="/query?a=b"),
    post(b"{}", path="/%71uery"),
    post(b"{}", "X-More: 1"),
    post(b"{}", "Connection: close"),
    post(b"{}", length="02"),
    post(b"{}", length="+2"),
    post(b"{}", length="2 "),
    post(b"{}", "Content-Length: 2"),
    post(b"{}", "Content-Length: 3"),
    post(b"{}", "Expect: 100-continue"),
    post(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    post(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"),
    post(b"{}").replace(b"X-Note: a", b"x-note: b"),
    post(b"{}").replace(b"\r\n", b"\n"),
    post(b"{}").replace(b"POST", b"PUT"),
    b"\r\n" + post(b"{}"),
    b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("number", range(len(LATER)))
async def test_a_request_after_others_is_read_as_on_a_connection_of_its_own(number: int) -> None:
    second = LATER[number]
    async with served(bounded(), echo) as port:
        fresh, known = await client(port), await client(port)
        for body in (b"[1]", b"[22]", b"[333]"):
            assert body in await known.ask(post(body))
        assert await known.ask(second) == await fresh.ask(second)
        assert await known.ask(post(b"{}")) == await fresh.ask(post(b"{}"))
        fresh.close()
        known.close()


async def test_one_in_pieces_and_two_at_once_are_read_as_they_are() -> None:
    async with served(bounded(), echo) as port:
        fresh, known = await client(port), await client(port)
        for body in (b"[1]", b"[22]"):
            await known.ask(post(body))
        second = post(b'{"a":1}')
        expected = await fresh.ask(second)
        for at in range(1, len(second)):
            assert await known.ask(second[:at], second[at:]) == expected, at
        for each in (fresh, known):
            assert await each.ask(second + post(b"{}") + second[:20]) == expected
            assert b'"body":"{}"' in await each.ask()
            assert await each.ask(second[20:]) == expected
            each.close()


async def test_what_is_changed_anywhere_is_read_as_on_a_connection_of_its_own() -> None:
    chance = Random(7)
    async with served(bounded(), echo) as port:
        for _ in range(150):
            second = bytearray(post(b'{"token_ids":[1,2,3]}'))
            for _ in range(chance.randrange(1, 3)):
                second[chance.randrange(len(second))] = chance.choice(b"0129 \r\n:\tACxyz\x00\xff")
            fresh, known = await client(port), await client(port)
            for body in (b"[1]", b"[22]"):
                await known.ask(post(body))
            for each in (fresh, known):
                each._writer.write(bytes(second))
            assert await known.end() == await fresh.end(), bytes(second)
            fresh.close()
            known.close()


def read(data: bytes, *headers: tuple[bytes, bytes]) -> Head | None:
    scope: dict[str, Any] = {"type": "http", "path": "/query", "state": {}}
    return head_of(data, scope, list(headers))


HEADERS = ((b"host", b"x"), (b"x-note", b"a"), (b"content-length", b"2"))


def test_a_head_is_kept_around_its_length() -> None:
    head = read(post(b"{}"), *HEADERS)
    assert head is not None
    assert head.scope == {"type": "http", "path": "/query"}
    assert head.read(post(b"12345")) == ([*HEADERS[:2], (b"content-length", b"5")], b"12345")
    for other in (post(b"12345")[:-1], post(b"12345") + b"6", post(b"{}", "A: b"), post(b"{}", length="02"), b""):
        assert head.read(other) is None, other


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (post(b"{}")[:-1], HEADERS),
        (post(b"{}") + b"G", HEADERS),
        (post(b"{}", length="02"), (*HEADERS[:2], (b"content-length", b"02"))),
        (post(b"{}", "Connection: keep-alive"), (*HEADERS, (b"connection", b"keep-alive"))),
        (post(b"{}", "Expect: 100-continue"), (*HEADERS, (b"expect", b"100-continue"))),
        (post(b"{}", "Content-Length: 2"), (*HEADERS, (b"content-length", b"2"))),
        (post(b"{}", "X-Long: " + "x" * 3000), (*HEADERS, (b"x-long", b"x" * 3000))),
        (b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", HEADERS[:1]),
        (post(b"{}").replace(b"a\r\nC", b"a\r\n C"), ((b"host", b"x"), (b"x-note", b"a Content-Length: 2"))),
    ],
)
def test_what_is_unusual_is_parsed_each_time(data: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert read(data, *headers) is None
