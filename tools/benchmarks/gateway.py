"""P13: the CPU of one request in a gateway, next to a bare aiohttp pass-through and nginx, on the same machine.

    python -m tools.benchmarks.gateway [--requests 1000] [--rounds 3]

The engine is a bare aiohttp server that answers at once, in one piece or in a number of chunks. CPU is the user and
system time of the proxy's processes; wall-clock time is not reported, because engine and client share the machine. Each
round sends requests to the proxies in turn, and measures the gateway's decision alone in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import aiohttp
import orjson
import uvloop
from aiohttp import web

from tests.ports import unused_port
from tools.benchmarks.options import Options
from tools.benchmarks.processes import START_SECONDS, cpu_seconds, redis_server, running, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.report import Row, table
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

#: The numbers of chunks in an answer; 0 is an answer in one piece.
CHUNKS = (0, 10, 200, 1000)
#: Two bounds, as multiples of the bare pass-through: on the cost of a request without its decision, and on the cost of
#: a request with the most chunks.
BAR, CHUNKS_BAR = 1.3, 1.2
_PAUSE_CHUNKS = 0.002
_CLIENTS = 16
_MODEL = "demo"
_HERE = (sys.executable, "-m", "tools.benchmarks.gateway")
_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_CHUNK = b'data: {"id":"a","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_LAST = b"data: [DONE]\n\n"


# ---- the engine and the bare proxy -------------------------------------------------------------------


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
    await response.write_eof(_LAST)
    return response


async def pass_through(port: int, target: str) -> None:
    """Run a proxy that only forwards; it is started as a separate process."""
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


# ---- the rounds --------------------------------------------------------------------------------------


def measure(options: Options) -> list[Row]:
    """Return the rows of ``make bench``."""
    return measured(200, 1) if options.is_quick else measured(1000, 3)


def measured(requests: int, rounds: int) -> list[Row]:
    """Return the rows of P13, in milliseconds of CPU."""
    costs: dict[tuple[str, int], list[float]] = defaultdict(list)
    decisions = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        engine = _started(stack, folder, "engine", lambda port: (*_HERE, "--engine", str(port)))[0]
        url = f"http://127.0.0.1:{engine}"
        replica.post(
            "/register", type="none", modelname=_MODEL, block_size=BLOCK_SIZE, instance_id="engine-0", address=url
        )
        proxies = {
            "aiohttp": _started(stack, folder, "aiohttp", lambda port: (*_HERE, "--pass", str(port), "--target", url))
        }
        nginx = shutil.which("nginx")
        if nginx is not None:
            proxies["nginx"] = _started(stack, folder, "nginx", lambda port: _nginx(nginx, folder, port, engine))
        proxies["gateway"] = _started(
            stack, folder, "gateway", lambda port: (sys.executable, "-m", "waymark", "gateway", "--port", str(port)),
            WAYMARK_REDIS_URL=redis.url, WAYMARK_LOG_LEVEL="error",
        )  # fmt: skip
        for _ in range(rounds):
            for chunks in CHUNKS:
                count = max(_CLIENTS, requests if chunks < 100 else 10 * requests // chunks)
                for name, (port, pid) in proxies.items():
                    costs[name, chunks].append(asyncio.run(_cost_ms(port, pid, chunks, count)))
            words = (*_HERE, "--selection", redis.url, "--requests", str(requests))
            decisions.append(float(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    return list(rows(costs, decisions))


def rows(costs: Mapping[tuple[str, int], list[float]], decisions: Sequence[float]) -> Iterator[Row]:
    """Yield the rows for each proxy, by the chunks of an answer, and the row for the decision alone."""
    yield Row("P13", "gateway's decision alone: body, tokens, target, reservation", median(decisions), "ms")
    for chunks in CHUNKS:
        answer = f"an answer of {chunks:,} chunks" if chunks else "a whole answer"
        ours, bare = costs["gateway", chunks], costs["aiohttp", chunks]
        if chunks == CHUNKS[-1]:
            of_rounds = [gateway / plain for gateway, plain in zip(ours, bare, strict=True)]
            what, bar = "gateway", CHUNKS_BAR
        else:
            turns = zip(ours, decisions, bare, strict=True)
            of_rounds = [(gateway - decision) / plain for gateway, decision, plain in turns]
            what, bar = "gateway, ratio without the decision", BAR
        yield Row("P13", f"{what}, {answer}", median(ours), "ms", median(bare), "aiohttp", median(of_rounds), bar)
        if nginx := costs.get(("nginx", chunks)):
            yield Row("P13", f"nginx, {answer}", median(nginx), "ms")


def _started(
    stack: ExitStack, folder: Path, name: str, command: Callable[[int], Sequence[str]], **environ: str
) -> tuple[int, int]:
    """Return the port and the process id of a proxy, once it answers."""
    port = unused_port()
    process = stack.enter_context(running(folder, f"{name}-{port}", *command(port), **environ))
    wait_until(lambda: asyncio.run(_is_up(port)), f"{name} answers", START_SECONDS, 0.1)
    return port, process.pid


def _nginx(program: str, folder: Path, port: int, engine: int) -> tuple[str, ...]:
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log /dev/null; events {{}} http {{ "
        f"access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; "
        f"fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; "
        f"upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }} server {{ listen {port}; "
        "location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ''; "
        "proxy_buffering off; } } }"
    )
    return program, "-c", str(path), "-p", str(folder)


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and of its present children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return cpu_seconds(pid) + sum(map(_cpu_seconds, map(int, children)))


async def _cost_ms(port: int, pid: int, chunks: int, count: int) -> float:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await _ask(session, port, chunks, max(1, count // 10))
        before = _cpu_seconds(pid)
        await _ask(session, port, chunks, count)
        return 1e3 * (_cpu_seconds(pid) - before) / count


async def _ask(session: aiohttp.ClientSession, port: int, chunks: int, count: int) -> None:
    numbers = iter(range(count))
    prompt = list(range(1000))

    async def work() -> None:
        for number in numbers:
            body = {"model": _MODEL, "prompt": [number, *prompt], "stream": bool(chunks)}
            headers = {"x-chunks": str(chunks)}
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers) as found:
                content = await found.read()
                if found.status != 200 or (chunks and content != chunks * _CHUNK + _LAST):
                    raise SystemExit(f"the answer has status {found.status} and {len(content)} bytes")

    await asyncio.gather(*(work() for _ in range(_CLIENTS)))


async def _is_up(port: int) -> bool:
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(url, json={"model": _MODEL, "prompt": [1]}) as found:
                return found.status == 200
        except aiohttp.ClientError:
            return False


async def selection(redis_url: str, requests: int) -> None:
    """Print the cost of a gateway's decision alone: body, tokens, target, and the end of the reservation."""
    settings = Settings(redis_url=redis_url)
    metrics = Metrics()
    store = Store.open(redis_url, metrics=metrics)
    tokenizers = parts.tokenizers(settings, metrics)
    selector = Selector(store, parts.selection_options(settings), metrics)
    gate = StartupGate(store.polled_claims, 0)
    decider = RequestSelector(store, parts.prompt_options(settings), metrics, selector, tokenizers, gate)
    under_way = RequestsUnderWay(selector, store.begin)

    def bodies(count: int) -> Iterator[bytes]:
        return iter([orjson.dumps({"model": _MODEL, "prompt": [n, *range(1000)]}) for n in range(count)])

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
    print(spent, flush=True)
    await tokenizers.close()
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
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
        print(table(measured(given.requests, given.rounds)))
