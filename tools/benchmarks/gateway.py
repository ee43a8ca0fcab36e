"""CPU that one request costs a gateway, beside a bare aiohttp pass-through and nginx, on the same machine.

    python -m tools.benchmarks.gateway [--requests 2000]

The engine is a bare aiohttp server that answers at once, whole or in so many chunks. CPU is user and system time of the
processes of the proxy, from /proc; wall clock is not reported, because engine and client share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import uvloop
from aiohttp import web

from tests.e2e.redis_server import redis_server
from tests.gateway.conftest import registration
from tests.patience import patient
from tests.ports import unused_port
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.fail_open import StartupGate
from waymark.decide.question import SelectParameters
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.decide.under_way import RESERVED_MS, RequestsUnderWay
from waymark.gateway.shapes import body_of_request
from waymark.runtime import parts
from waymark.store.store import Store

CHUNKS = (0, 10, 200)
_PAUSE_CHUNKS = 0.002
_CLIENTS = 16
_TICKS = os.sysconf("SC_CLK_TCK")
_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_CHUNK = b'data: {"id":"a","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'


async def answer(request: web.Request) -> web.StreamResponse:
    chunks = int(request.headers.get("x-chunks", "0"))
    await request.read()
    if not chunks:
        return web.json_response({"choices": [{"message": {"content": "word " * 16}, "finish_reason": "stop"}]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(chunks):
        await response.write(_CHUNK)
        await asyncio.sleep(_PAUSE_CHUNKS)
    await response.write_eof(b"data: [DONE]\n\n")
    return response


async def pass_through(port: int, target: str) -> None:
    """A proxy that does nothing but pass on, as a process of its own."""
    async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def proxied(request: web.Request) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
            async with session.post(target + request.path, data=await request.read(), headers=headers) as found:
                kept = {name: value for name, value in found.headers.items() if name.lower() not in _HOP}
                response = web.StreamResponse(status=found.status, headers=kept)
                await response.prepare(request)
                async for piece in found.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        await _serve(proxied, port)
        await asyncio.Event().wait()


async def _serve(handler: object, port: int) -> None:
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of the children it has now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(cpu_seconds(int(child)) for child in children)


@asynccontextmanager
async def process(*words: str, **environ: str) -> AsyncIterator[int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    running = await asyncio.create_subprocess_exec(*words, env=clean | environ)
    try:
        yield running.pid
    finally:
        running.terminate()
        await running.wait()


async def measure(name: str, port: int, pid: int, requests: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patient(120))) as session:
        for chunks in CHUNKS:
            count = requests if chunks < 100 else requests // 10
            await _ask(session, port, chunks, min(200, count))
            before = cpu_seconds(pid)
            await _ask(session, port, chunks, count)
            spent = 1000 * (cpu_seconds(pid) - before) / count
            print(
                json.dumps({"proxy": name, "chunks": chunks, "requests": count, "cpu_ms": round(spent, 3)}), flush=True
            )


async def _ask(session: aiohttp.ClientSession, port: int, chunks: int, count: int) -> None:
    numbers = iter(range(count))
    prompt = list(range(1000))

    async def work() -> None:
        for number in numbers:
            body = {"model": "demo", "prompt": [number, *prompt], "stream": bool(chunks)}
            headers = {"x-chunks": str(chunks)}
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers) as found:
                assert found.status == 200, await found.text()
                await found.read()

    await asyncio.gather(*(work() for _ in range(_CLIENTS)))


async def _until_up(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(
                    f"http://127.0.0.1:{port}/v1/completions", json={"model": "demo", "prompt": [1]}
                ) as found:
                    if found.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def main(requests: int) -> None:
    engine = unused_port()
    here = (sys.executable, "-m", "tools.benchmarks.gateway")
    async with process(*here, "--engine", str(engine)):
        await _until_up(engine)
        port = unused_port()
        async with process(*here, "--pass", str(port), "--target", f"http://127.0.0.1:{engine}") as pid:
            await _until_up(port)
            await measure("aiohttp", port, pid, requests)
        nginx = shutil.which("nginx")
        if nginx is not None:
            with tempfile.TemporaryDirectory() as directory:
                port = unused_port()
                path = Path(directory) / "nginx.conf"
                path.write_text(
                    f"daemon off; worker_processes 1; pid {directory}/pid; error_log /dev/null; events {{}} http {{ "
                    f"access_log off; client_body_temp_path {directory}/a; proxy_temp_path {directory}/b; "
                    f"fastcgi_temp_path {directory}/c; uwsgi_temp_path {directory}/d; scgi_temp_path {directory}/e; "
                    f"upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }} server {{ listen {port}; "
                    "location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ''; "
                    "proxy_buffering off; } } }"
                )
                async with process(nginx, "-c", str(path), "-p", directory) as pid:
                    await _until_up(port)
                    await measure("nginx", port, pid, requests)
        with redis_server() as server:
            await server.start()
            port = unused_port()
            words = (sys.executable, "-m", "waymark", "gateway", "--port", str(port))
            async with process(*words, WAYMARK_REDIS_URL=server.url, WAYMARK_LOG_LEVEL="error") as pid:
                await _register(server.url, f"http://127.0.0.1:{engine}")
                await _until_up(port)
                await measure("waymark gateway", port, pid, requests)
            alone = await asyncio.create_subprocess_exec(*here, "--selection", server.url, "--requests", str(requests))
            await alone.wait()


async def selection(redis_url: str, requests: int) -> None:
    """What a gateway's decisions cost alone: body, tokens, target, and the ends of the reservation."""
    settings = Settings(redis_url=redis_url)
    metrics = Metrics()
    store = Store.open(redis_url, metrics=metrics)
    tokenizers = parts.tokenizers(settings, metrics)
    selector = Selector(store, parts.selection_options(settings), metrics)
    gate = StartupGate(store.directory, 0)
    decider = RequestSelector(
        store, parts.prompt_options(settings), metrics, selector, tokenizers, gate, parts.profile(settings)
    )
    under_way = RequestsUnderWay(selector, store.begin)

    def bodies(count: int) -> Iterator[bytes]:
        return iter([orjson.dumps({"model": "demo", "prompt": [n, *range(1000)]}) for n in range(count)])

    async def decide(given: Iterator[bytes]) -> None:
        async def work() -> None:
            for body in given:
                asked = body_of_request("/v1/completions", body).request
                prepared = await decider.prepare(asked, tenant_id="default", session=None, counts_tokens=True)
                parameters = SelectParameters(milliseconds=RESERVED_MS, needs_address=True)
                request = under_way.add(await decider.take(prepared, parameters))
                request.prefilled()
                request.end(is_ok=True)

        await asyncio.gather(*(work() for _ in range(_CLIENTS)))

    await decide(bodies(200))
    measured = bodies(requests)
    before = time.process_time()
    await decide(measured)
    spent = 1000 * (time.process_time() - before) / requests
    print(json.dumps({"proxy": "selection alone", "requests": requests, "cpu_ms": round(spent, 3)}), flush=True)
    await tokenizers.close()
    await store.close()


async def _register(redis_url: str, address: str) -> None:
    store = Store.open(redis_url)
    try:
        await store.registry.register(registration(address, 0))
    finally:
        await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pass", dest="passes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--selection", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:

        async def engine() -> None:
            await _serve(answer, given.engine)
            await asyncio.Event().wait()

        asyncio.run(engine())
    elif given.selection:
        uvloop.run(selection(given.selection, given.requests))
    elif given.passes:
        asyncio.run(pass_through(given.passes, given.target))
    else:
        asyncio.run(main(given.requests))
