"""Measures the CPU of Python's gRPC for a message and its answer, on an open stream to a server that decides nothing.

    python -m tools.benchmarks.echoes [--messages 3000]

The servers are those of ``grpc.aio``, on asyncio's and on uvloop's loop, and of ``grpc`` with threads. Each server runs
in two forms: one echoes the messages that Envoy sends for a chunk of an answer, the other returns prepared bytes
without parsing the message. The last column is for pieces of 64 KB; a body with 100,000 token ids has nine of them. The
figures depend little on the load of the machine, but they include context switches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
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


def _tell_cpu(pipe: Connection) -> None:
    """Answer each question with the CPU of this process in seconds, until the pipe is closed."""
    while True:
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)


SERVERS = ("grpc.aio, asyncio", "grpc.aio, uvloop", "grpc, threads")


def _serve(name: str, pipe: Connection, is_parsed: bool) -> None:
    if name == "grpc, threads":
        _serve_in_threads(pipe, is_parsed=is_parsed)
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
