"""An engine whose stream costs much to read holds up no other client of its gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import httpx

from tests.hostile.beside import held_up_nobody
from tests.hostile.doors import HOSTILE, gateway
from tests.hostile.raw_server import Pieces, RawServer, chunked, http
from tests.listening import listening
from tests.patience import patient

_EVENT = b'data: {"type": "response.output_text.delta", "delta": "%b"}\n\n'


def in_pieces(body: bytes, size: int) -> Iterable[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


#: A stream, made when it is asked for, and the size of its pieces.
STREAMS: dict[str, tuple[Callable[[], bytes], int]] = {
    "8 MB of empty events": (lambda: b"\n\n" * 4_000_000, 65536),
    "8 MB of events without a text": (lambda: b"data:\n\n" * 1_200_000, 65536),
    "two events of 1 MB in small pieces": (lambda: _EVENT % (b"a" * 1_000_000) * 2, 512),
}


async def test_a_stream_that_costs_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    stream: list[bytes] = []

    def answer(path: str, body: bytes) -> Pieces:
        return stream if path == "/v1/responses" else [http(b"", status="404 Not Found")]

    async with gateway(redis_url, tmp_path) as opened:
        engine, url = RawServer(answer), opened.target["url"]
        async with (
            listening(engine.handler, opened.target["engine_port"]),
            httpx.AsyncClient(base_url=url, timeout=patient(60), trust_env=False) as stranger,
        ):
            (process,) = opened.processes
            for name, (content, size) in STREAMS.items():
                stream = chunked(*in_pieces(content(), size))
                before = engine.asked
                received = await held_up_nobody(read(stranger), redis_url, process.pid, opened.checks)
                assert received >= 1_000_000, name
                assert engine.asked > before


async def read(client: httpx.AsyncClient) -> int:
    """Return how many bytes of the hostile engine's answer have come."""
    received = 0
    body = {"model": HOSTILE, "input": "hello", "stream": True}
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200
        try:
            async for piece in answer.aiter_raw():
                received += len(piece)
        except httpx.RemoteProtocolError:
            pass  # the stream has no last event, and ends as an error
    return received
