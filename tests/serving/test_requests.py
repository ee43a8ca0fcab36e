"""What a request is does not depend on what was read over its connection before, nor on how its bytes came."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.patience import within
from tests.serving.wire import SECONDS, ask, echo, request, served


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
    async with served(echo) as port:
        fresh, known = await client(port), await client(port)
        for body in (b"[1]", b"[22]", b"[333]"):
            assert body in await known.ask(post(body))
        assert await known.ask(second) == await fresh.ask(second)
        assert await known.ask(post(b"{}")) == await fresh.ask(post(b"{}"))
        fresh.close()
        known.close()


async def test_one_in_pieces_and_two_at_once_are_read_as_they_are() -> None:
    async with served(echo) as port:
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
    async with served(echo) as port:
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


async def test_whitespace_around_a_value_is_not_a_part_of_it() -> None:
    async with served(echo) as port:
        (got,) = await ask(port, request("/", "GET", "A:\t b c \t", "B: \t ", "Expect: x \t", "connection: close "))
    told = dict(got.echo["headers"])
    assert (told["a"], told["b"], told["expect"], told["connection"]) == ("b c", "", "x", "close")


@pytest.mark.parametrize("host", ["Host: a.example:1 ", "Host:a.example:1\t", "Host: \t a.example:1 \t "])
async def test_blanks_around_the_host_are_legal(host: str) -> None:
    async with served(echo) as port:
        (got,) = await ask(port, f"GET / HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".encode())
    assert (got.status, dict(got.echo["headers"])["host"]) == (200, "a.example:1")
