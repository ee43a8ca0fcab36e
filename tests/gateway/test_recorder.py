"""The answer of ``/v1/responses`` as it is read on its way: each event as it came, in any pieces, in linear time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import pytest

from waymark.base.asgi import AsgiMessage
from waymark.gateway.recorder import Recorder

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
    small, large = await seconds(stream(MEBI // 4), size), await seconds(stream(2 * MEBI), size)
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
