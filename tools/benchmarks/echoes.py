"""Measures the CPU of Python's gRPC for a message and its answer, on an open stream to a server that decides nothing.

    python -m tools.benchmarks.echoes [--messages 3000]

The servers are those of ``grpc.aio``, on asyncio's and on uvloop's loop, and of ``grpc`` with threads. The last one is
a floor for Python: a protocol that reads and writes the frames of HTTP/2 which these streams need, and nothing else.
Each server runs in two forms: one echoes the messages that Envoy sends for a chunk of an answer, the other returns
prepared bytes without parsing the message. The last column is for pieces of 64 KB; a body with 100,000 token ids has
nine of them. The figures depend little on the load of the machine, but they include context switches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_STREAMS = (1, 8)
_CHUNK, _PIECE = (
    pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x" * size)).SerializeToString() for size in (100, 64 * 1024)
)
#: The traffic: the number of streams, and the message.
_CASES = (*((streams, _CHUNK) for streams in _STREAMS), (4, _PIECE))


#: Kinds and flags of frames, and the length of one with its kind, its flags and its stream.
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_FRAME, _FRAME_BYTES = struct.Struct(">IBI"), 2**14
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The headers before an answer (``:status`` and ``content-type``) and after it (``grpc-status``), in HPACK.
_ANSWERED, _DONE = b"\x88\x0f\x10\x10application/grpc", b"\x00\x0bgrpc-status\x010"


def _echo(message: Any) -> Any:
    answer = pb.ProcessingResponse()
    answer.response_body.response.body_mutation.streamed_response.body = message.response_body.body
    return answer


_MADE_BEFORE = _echo(pb.ProcessingRequest.FromString(_CHUNK)).SerializeToString()


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, behaviour: Callable[..., Any], *, is_parsed: bool) -> None:
        self._behaviour = behaviour
        self._codec = (pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString)
        if not is_parsed:
            self._codec = (None, None)

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._behaviour, *self._codec)


async def _serve_in_loop(pipe: Connection, *, is_parsed: bool) -> None:
    async def answers(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(_echo(message) if is_parsed else _MADE_BEFORE)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(answers, is_parsed=is_parsed),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, _tell_cpu, pipe)


def _serve_in_threads(pipe: Connection, *, is_parsed: bool) -> None:
    def answers(messages: Iterator[Any], _: Any) -> Iterator[Any]:
        for message in messages:
            yield _echo(message) if is_parsed else _MADE_BEFORE

    server = grpc.server(ThreadPoolExecutor(2 * max(_STREAMS)))
    server.add_generic_rpc_handlers((_Handler(answers, is_parsed=is_parsed),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    _tell_cpu(pipe)


class _Frames(asyncio.Protocol):
    """A connection whose streams are answered without gRPC. It reads no header, and minds no window."""

    def __init__(self, *, is_parsed: bool) -> None:
        self._is_parsed = is_parsed
        self._transport: Any = None
        self._received = bytearray()
        self._has_begun = False
        self._streams: dict[int, bytearray] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(_frame(_SETTINGS, 0, 0, b"") + _frame(_WINDOW, 0, 0, (2**30).to_bytes(4, "big")))

    def data_received(self, data: bytes) -> None:
        received, start = self._received, 0 if self._has_begun else len(_PREFACE)
        answers: list[bytes] = []
        received += data
        while len(received) >= start + _FRAME.size:
            first, flags, stream = _FRAME.unpack_from(received, start)
            end = start + _FRAME.size + (first >> 8)
            if end > len(received):
                break
            answers += self._answers(first & 255, flags, stream, bytes(received[start + _FRAME.size : end]))
            start, self._has_begun = end, True
        if self._has_begun:
            del received[:start]
        self._transport.write(b"".join(answers))

    def _answers(self, kind: int, flags: int, stream: int, content: bytes) -> Iterator[bytes]:
        if kind == _HEADERS:
            self._streams[stream] = bytearray()
            yield _frame(_HEADERS, _END_HEADERS, stream, _ANSWERED)
        elif kind == _DATA:
            message = self._streams[stream]
            message += content
            if content:
                window = len(content).to_bytes(4, "big")
                yield _frame(_WINDOW, 0, stream, window) + _frame(_WINDOW, 0, 0, window)
            while len(message) >= (end := 5 + int.from_bytes(message[1:5], "big")) > 5:
                answer = self._answer(bytes(message[5:end]))
                del message[:end]
                answer = b"\0" + len(answer).to_bytes(4, "big") + answer
                for start in range(0, len(answer), _FRAME_BYTES):
                    yield _frame(_DATA, 0, stream, answer[start : start + _FRAME_BYTES])
        elif kind in (_SETTINGS, _PING) and not flags:
            yield _frame(kind, _ACK, stream, content if kind == _PING else b"")
        if kind in (_HEADERS, _DATA) and flags & _END_STREAM:
            del self._streams[stream]
            yield _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _DONE)

    def _answer(self, message: bytes) -> bytes:
        if not self._is_parsed:
            return _MADE_BEFORE
        answer: bytes = _echo(pb.ProcessingRequest.FromString(message)).SerializeToString()
        return answer


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return _FRAME.pack(len(content) << 8 | kind, flags, stream) + content


async def _serve_frames(pipe: Connection, *, is_parsed: bool) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Frames(is_parsed=is_parsed), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await loop.run_in_executor(None, _tell_cpu, pipe)


def _tell_cpu(pipe: Connection) -> None:
    """Answer each question with the CPU of this process in seconds, until the pipe is closed."""
    while True:
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)


SERVERS = ("grpc.aio, asyncio", "grpc.aio, uvloop", "grpc, threads", "frames, uvloop")


def _serve(name: str, pipe: Connection, is_parsed: bool) -> None:
    if name == "grpc, threads":
        _serve_in_threads(pipe, is_parsed=is_parsed)
    elif name == "frames, uvloop":
        uvloop.run(_serve_frames(pipe, is_parsed=is_parsed))
    else:
        run = uvloop.run if name.endswith("uvloop") else asyncio.run
        run(_serve_in_loop(pipe, is_parsed=is_parsed))


async def _drive(port: int, streams: int, messages: int, message: bytes) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one() -> None:
            call = channel.stream_stream(_METHOD)()
            for _ in range(messages // streams):
                await call.write(message)
                await call.read()
            await call.done_writing()

        await asyncio.gather(*(one() for _ in range(streams)))


def cost_us(name: str, *, is_parsed: bool, messages: int) -> list[float]:
    """Return the CPU of a message in microseconds in each case."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(name, theirs, is_parsed))
    process.start()
    theirs.close()
    port, found = ours.recv(), []
    try:
        for streams, message in _CASES:
            asyncio.run(_drive(port, streams, messages // 10, message))
            ours.send("before")
            before = ours.recv()
            asyncio.run(_drive(port, streams, messages, message))
            ours.send("after")
            found.append((ours.recv() - before) / messages * 1e6)
    finally:
        ours.close()
        process.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=3_000)
    options = parser.parse_args()
    heads = (f"{streams} at a time{' of 64 KB' if message is _PIECE else ''}, us" for streams, message in _CASES)
    print(f"| Server | Messages | {' | '.join(heads)} |")
    print("|---|---|" + "---|" * len(_CASES))
    for name in SERVERS:
        for is_parsed in (True, False):
            costs = " | ".join(f"{cost:.0f}" for cost in cost_us(name, is_parsed=is_parsed, messages=options.messages))
            print(f"| {name} | {'parsed and built' if is_parsed else 'as bytes'} | {costs} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
