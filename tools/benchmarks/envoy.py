"""Measures the CPU of Envoy and of the picker for a request through a real Envoy, with and without an endpoint picker.

    python -m tools.benchmarks.envoy --requests 500 --redis-url redis://127.0.0.1:6379/0

Each run has the same simulated engines. In the first runs Envoy picks engines in turn. In the next ones its inner hop
asks a picker, which does or does not get the bodies of answers. In the last ones a process that decides nothing
replaces the picker: it sends every message back unchanged, so its CPU is the cost of gRPC itself. An engine sends each
chunk by itself, 250 a second. CPU is that of the processes, minus their CPU at rest, so it depends little on the load
of the machine. The Redis has to be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import grpc
import httpx
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from grpc_health.v1 import health_pb2_grpc

from tests.e2e.envoy import Envoy, envoy
from tests.e2e.test_envoy import Picker, body_of
from tests.ports import unused_port
from tests.store.factories import registration
from tests.tokenization import small
from tools.benchmarks.report import Row, table
from waymark.domain.engines import EngineKind
from waymark.domain.targets import Target
from waymark.epp import messages
from waymark.epp.server import HealthService, self_signed
from waymark.simulator.engine import EngineSpeed, build_engine
from waymark.simulator.http import EngineHttp
from waymark.store.store import Store

CHUNKS = (1, 1_000)
#: The bound on the cost of the most chunks, as a multiple of the cost of one chunk.
CHUNKS_BAR = 2.0
_ENGINES = 3
_AT_ONCE = 8
_REST_SECONDS = 4.0
_LABELS = {
    "none": "none",
    "NONE": "`NONE`",
    "FULL_DUPLEX_STREAMED": "`FULL_DUPLEX_STREAMED`",
    "echo": "`FULL_DUPLEX_STREAMED`, decides nothing",
}


class Cost(NamedTuple):
    """The cost of a request; CPU in milliseconds."""

    envoy: float
    picker: float
    messages: float
    """Messages from Envoy to the picker."""


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- a picker that decides nothing -------------------------------------------------------------------


class Echo(ext_proc.ExternalProcessorServicer):  # type: ignore[misc]
    """A picker that answers each message at once, without a change."""

    async def Process(self, _: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            if kind not in ("request_body", "response_body"):
                await context.write(messages.GO_ON[kind])
                continue
            body = message.request_body if kind == "request_body" else message.response_body
            is_request = kind == "request_body"
            for piece in messages.pieces(body.body, is_request=is_request, is_end=body.end_of_stream):
                await context.write(piece)


async def serve_echo(port: int) -> None:
    server = grpc.aio.server()
    ext_proc.add_ExternalProcessorServicer_to_server(Echo(), server)
    health = HealthService()
    health.set(is_ready=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_secure_port(f"127.0.0.1:{port}", self_signed())
    await server.start()
    await server.wait_for_termination()


# ---- the runs ----------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """A picker, real or not, that is running."""

    port: int
    pid: int


@asynccontextmanager
async def _picker(kind: str, directory: Path, url: str, model: str) -> AsyncIterator[list[_Running]]:
    if kind == "none":
        yield []
    elif kind == "echo":
        port = unused_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tools.benchmarks.envoy", "--echo", str(port)
        )
        try:
            yield [_Running(port, process.pid)]
        finally:
            process.kill()
            await process.wait()
    else:
        small.directory(directory / "models" / model, template=small.CHATML)
        picker = Picker(directory, url, 0, tokenizers_dir=directory / "models")
        try:
            await picker.start()
            yield [_Running(picker.port, picker.pid)]
        finally:
            picker.end()


async def run(url: str, directory: Path, requests: int, *, kind: str, chunks: int) -> Cost:
    """Send ``requests`` chats, after a tenth as many that only warm up. Each run has a model of its own."""
    model = f"llama-{kind.lower()}-{chunks}"
    async with AsyncExitStack() as stack:
        store = Store.open(url)
        stack.push_async_callback(store.close)
        engines = []
        for number in range(_ENGINES):
            engine = build_engine("tcp://127.0.0.1:0", seed=number)
            await stack.enter_async_context(engine.publisher)
            http = EngineHttp(
                engine, host="127.0.0.1", port=0, model_name=model, block_size=16, gpu_blocks=65_536,
                pace=EngineSpeed(tokens_per_second=250.0), answer_tokens=chunks,
            )  # fmt: skip
            engines.append(await stack.enter_async_context(http))
            await store.registry.register(
                registration(
                    f"{model}-{number}", kind=EngineKind.NONE, model_name=model, endpoint=None,
                    target=Target(address=http.url),
                )
            )  # fmt: skip
        ports = [int(engine.url.rpartition(":")[2]) for engine in engines]
        pickers = await stack.enter_async_context(_picker(kind, directory, url, model))
        mode = "NONE" if kind == "NONE" else "FULL_DUPLEX_STREAMED"
        proxy = await stack.enter_async_context(envoy(directory, [picker.port for picker in pickers], ports, mode))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60.0, trust_env=False))
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with at_once:
                answer = await client.post(
                    "/v1/chat/completions", json=body_of(f"turn {number}", model=model, max_tokens=chunks, stream=True)
                )
                assert answer.status_code == 200, answer.text

        async def several(count: int) -> None:
            await asyncio.gather(*(one(number) for number in range(count)))

        await several(max(1, requests // 10))
        pids = [proxy.pid, *(picker.pid for picker in pickers)]
        at_rest = [cpu_seconds(pid) for pid in pids]
        await asyncio.sleep(_REST_SECONDS)
        before, messages_before = [cpu_seconds(pid) for pid in pids], await _messages(proxy)
        began = monotonic()
        await several(requests)
        share = (monotonic() - began) / _REST_SECONDS
        spent = [
            1000 * (cpu_seconds(pid) - begin - share * (begin - rest)) / requests
            for pid, begin, rest in zip(pids, before, at_rest, strict=True)
        ]
        assert sum(each.generator.requests for each in engines) >= requests
        sent = (await _messages(proxy) - messages_before) / requests
        return Cost(spent[0], spent[1] if pickers else 0.0, sent)


async def _messages(proxy: Envoy) -> int:
    """Return how many messages Envoy has sent to its pickers so far."""
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as client:
        text = (await client.get("/stats?filter=ext_proc.stream_msgs_sent")).text
    return int(text.rpartition(":")[2] or 0)


def rows(found: Mapping[tuple[str, int], Cost]) -> Iterator[Row]:
    """Yield the rows of P14: for a picker, the ratio of the cost of an answer with the most chunks to that of an answer
    with one."""
    for kind in ("NONE", "FULL_DUPLEX_STREAMED"):
        few, many = (found[kind, chunks].picker for chunks in CHUNKS)
        what = f"picker, response_body_mode {kind}, an answer of {CHUNKS[1]:,} chunks"
        yield Row("P14", what, many, "ms", few, "one chunk", many / few, CHUNKS_BAR)


async def main(url: str, requests: int) -> None:
    found = {}
    print("| Picker, `response_body_mode` | Chunks | Envoy, ms of CPU | Picker, ms of CPU | Messages to the picker |")
    print("|---|---|---|---|---|")
    for kind, label in _LABELS.items():
        for chunks in CHUNKS:
            with tempfile.TemporaryDirectory() as directory:
                count = requests if chunks == 1 else max(_AT_ONCE, requests // 10)
                cost = found[kind, chunks] = await run(url, Path(directory), count, kind=kind, chunks=chunks)
            picker = " | " if kind == "none" else f"{cost.picker:.2f} | {cost.messages:,.0f}"
            print(f"| {label} | {chunks:,} | {cost.envoy:.2f} | {picker} |", flush=True)
    print(table(list(rows(found))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if arguments.echo is not None:
            runner.run(serve_echo(arguments.echo))
        else:
            runner.run(main(arguments.redis_url, arguments.requests))
