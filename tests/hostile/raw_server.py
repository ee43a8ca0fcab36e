"""An HTTP server of a few lines that is not bound to HTTP: what it answers are bytes, and when it pleases."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from tests.listening import Handler

#: What is answered to a request, by its path and body. Each piece is written by itself.
Pieces = list[bytes]
Answer = Callable[[str, bytes], Pieces | Awaitable[Pieces]]


def http(body: bytes, *fields: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A whole answer, as it should be."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*pieces: bytes, kind: str = "text/event-stream", has_end: bool = True) -> Pieces:
    """An answer in chunks."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return [
        head,
        *(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces if each),
        *([b"0\r\n\r\n"] if has_end else []),
    ]


class RawServer:
    """``answer`` may be replaced at any time; ``asked`` counts requests. After an answer it closes."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked = 0
        self.pause = 0.0
        """Between two pieces."""
        self.heads: deque[dict[str, str]] = deque(maxlen=1000)
        """Of the last requests, their fields in small letters."""
        self.handler: Handler = self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines[1:])}
        self.heads.append(fields)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        found = self.answer(lines[0].split(" ")[1], body)
        for piece in found if isinstance(found, list) else await found:
            writer.write(piece)
            await writer.drain()
            if self.pause:
                await asyncio.sleep(self.pause)
