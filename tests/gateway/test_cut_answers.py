"""An engine that stops at any byte of its answer, and answers that are none: never a whole answer to the client."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from tests.gateway.conftest import Running, Start, chat, registration

pytestmark = pytest.mark.outside

JSON = b'{"object": "made up", "choices": []}'
DONE = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
STOP = b'event: message_start\ndata: {}\n\nevent: message_stop\ndata: {"type": "message_stop"}\n\n'
COMPLETED = b'event: response.created\ndata: {}\n\nevent: response.completed\ndata: {"type": "response.completed"}\n\n'


def chunked(body: bytes, size: int = 20) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)] + [b""]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def answer(body: bytes, *, kind: bytes = b"text/event-stream", status: bytes = b"200 OK", lines: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + lines + b"Content-Type: " + kind + b"\r\n\r\n" + body


LENGTH, CHUNKED = b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"
CUT = {
    "length": ("/v1/chat/completions", answer(JSON, kind=b"application/json", lines=LENGTH % len(JSON))),
    "chunks": ("/v1/embeddings", answer(chunked(JSON), kind=b"application/json", lines=CHUNKED)),
    "stream": ("/v1/chat/completions", answer(chunked(DONE), lines=CHUNKED)),
    "stream of a length": ("/v1/completions", answer(DONE, lines=LENGTH % len(DONE))),
    "stream to the end of the connection": ("/v1/chat/completions", answer(DONE)),
    "messages": ("/v1/messages", answer(STOP)),
    "responses": ("/v1/responses", answer(COMPLETED)),
}


@asynccontextmanager
async def engine(whole: bytes, *, resets: bool = False) -> AsyncIterator[str]:
    """An engine that answers with as many bytes of ``whole`` as the field ``seed`` says, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        writer.write(whole[: json.loads(await reader.readexactly(length))["seed"]])
        await writer.drain()
        if resets:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def looks_whole(running: Running, path: str, bytes_sent: int) -> bool:
    """Whether a client of the gateway takes the answer of the engine for a whole one."""
    body = chat("a", seed=bytes_sent, input="a", prompt=[1], stream=True)
    try:
        got = await running.post(body, path)
    except httpx.TransportError:
        return False
    return got.status_code < 500 and '"error"' not in got.text


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", CUT)
async def test_an_answer_that_is_cut_short_never_looks_whole(start: Start, kind: str, resets: bool) -> None:
    path, whole = CUT[kind]
    running = await start(0)
    async with engine(whole, resets=resets) as url:
        await running.store.registry.register(registration(url, 0))
        if not resets:
            assert await looks_whole(running, path, len(whole))
        # A reset is an error at any byte; where an answer just ends, each byte is a case of its own, but for the heads,
        # which are much alike.
        first_cut = 0 if kind in ("length", "stream") else whole.index(b"\r\n\r\n")
        all_cuts = range(first_cut, len(whole), 8 if resets else 1)
        for first in range(0, len(all_cuts), 8):
            cuts = all_cuts[first : first + 8]
            found = await asyncio.gather(*(looks_whole(running, path, cut) for cut in cuts))
            assert [whole[:cut] for cut, is_whole in zip(cuts, found, strict=True) if is_whole] == []


@pytest.mark.parametrize(
    "sent",
    [
        answer(JSON, kind=b"application/json"),
        answer(JSON, status=b"101 Switching Protocols", lines=b"Connection: upgrade\r\nUpgrade: x\r\n"),
        answer(JSON, status=b"000 None", lines=LENGTH % len(JSON)),
        answer(JSON, status=b"099 None", lines=LENGTH % len(JSON)),
        answer(JSON, status=b"600 None", lines=LENGTH % len(JSON)),
        answer(JSON, status=b"999 None", lines=LENGTH % len(JSON)),
        answer(JSON, lines=b"Transfer-Encoding: gzip\r\n"),
        answer(JSON, lines=b" X-Folded: 1\r\n" + LENGTH % len(JSON)),
        answer(JSON, lines=b"\tX-Folded: 1\r\n" + LENGTH % len(JSON)),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(JSON, lines=b" X-Folded: 1\r\n" + LENGTH % len(JSON)),
        b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" + answer(JSON, lines=b" X-Folded: 1\r\n" + LENGTH % len(JSON)),
        answer(JSON, lines=LENGTH % len(JSON)).replace(b"HTTP/1.1", b"HTTP/2.0"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 1000])
async def test_what_is_not_an_answer_is_an_error_of_the_engine(start: Start, sent: bytes, pieces: int) -> None:
    running = await start(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await running.store.registry.register(registration(url, 0))
        got = await running.post()
        assert (got.status_code, got.json()["error"]["code"]) == (502, "no_answer")
        assert "x-folded" not in got.headers


@pytest.mark.parametrize("closes_first", [False, True])
async def test_a_kept_connection_that_is_closed_just_now_costs_no_try(start: Start, closes_first: bool) -> None:
    """One that was opened for the request is another thing: the engine cannot answer it."""
    running = await start(0)
    opened: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(await reader.readuntil(b"\r\n\r\n"))
        if not closes_first:
            writer.write(answer(JSON, kind=b"application/json", lines=LENGTH % len(JSON)))
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"POST ")  # the next request has begun
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await running.store.registry.register(registration(url, 0))
        statuses = [(await running.post(chat("a"))).status_code for _ in range(3)]
    assert statuses == 3 * [502 if closes_first else 200]
    assert len(opened) == 3
