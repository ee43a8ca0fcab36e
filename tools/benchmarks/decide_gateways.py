"""Decisions by real gateways, on a simulated clock: each job is a stream through one of them to a real socket.

The engine that gets the stream has the job. The first content is sent when the simulated engine has computed the
prompt, and the end when it has made the answer; so the stream shows the gateway when prefill and reservation end. A
simulated instant is over when Redis has all these changes. The time of a gateway itself is not in the figures.
"""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import aiohttp
from aiohttp import web

from tools.benchmarks.decide_books import Placed, as_answered
from tools.benchmarks.decide_engines import Change, Job
from tools.benchmarks.decide_live import SETTINGS, events_of, packed_tokens
from tools.benchmarks.prompts import MODEL
from tools.benchmarks.simulate_service import Waymark, started

_PATH = "/v1/completions"
#: Streams are open for as long as the simulation takes, and no worker reads the gauges of these engines.
_SETTINGS = SETTINGS | {"WAYMARK_GATEWAY_IDLE_SECONDS": "86400", "WAYMARK_GAUGES_SECONDS": "0"}


@dataclass(slots=True)
class _Stream:
    """One job on its way through a gateway."""

    engine: asyncio.Future[int]
    """The engine that got the job."""
    is_begun: asyncio.Event = field(default_factory=asyncio.Event)
    is_ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_seen: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether the client has the first content."""
    reading: asyncio.Task[None] | None = None


class Gateways:
    """Several gateways, used in turn, and the sockets of all engines behind them."""

    def __init__(self, service: Waymark, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        self._service = service
        self._turns = cycle(urls)
        self._session = session
        self._streams: dict[int, _Stream] = {}
        self._begun = 0
        """The number of streams that have got their first content and have not ended."""

    # ---- as a decider ----------------------------------------------------------------------------------

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        return await as_answered(self._decide(next(self._turns), job) for job in jobs)

    async def hear(self, changes: Sequence[Change]) -> None:
        for engine, events in events_of(changes).items():
            self._service.tell(engine, events)
        await self._service.settle()

    async def begun(self, job: Job) -> None:
        stream = self._streams[job.number]
        stream.is_begun.set()
        await self._unless_broken(stream, stream.was_seen.wait())
        self._begun += 1
        await self._settle()

    async def ended(self, job: Job) -> None:
        stream = self._streams.pop(job.number)
        stream.is_ended.set()
        assert stream.reading is not None
        await stream.reading
        self._begun -= 1
        await self._settle()

    async def close(self) -> None:
        """End the streams that the simulation has left open."""
        left = list(self._streams.values())
        for stream in left:
            stream.is_begun.set()
            stream.is_ended.set()
        await asyncio.gather(*(stream.reading for stream in left if stream.reading is not None))

    # ---- the two ends of a stream ----------------------------------------------------------------------

    async def serve(self, number: int, request: web.Request) -> web.StreamResponse:
        """Serve a stream as an engine."""
        stream = self._streams[int(request.headers["x-request-id"])]
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        stream.engine.set_result(number)
        await stream.is_begun.wait()
        await response.write(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
        await stream.is_ended.wait()
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    async def _decide(self, url: str, job: Job) -> Placed:
        stream = _Stream(asyncio.get_running_loop().create_future())
        self._streams[job.number] = stream
        stream.reading = asyncio.create_task(self._read(url, job, stream))
        await self._unless_broken(stream, stream.engine)
        return Placed(job, stream.engine.result())

    async def _read(self, url: str, job: Job, stream: _Stream) -> None:
        """Read a stream as a client."""
        prompt = array("I", packed_tokens(job)).tolist()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": job.output_tokens, "stream": True}
        headers = {"x-request-id": str(job.number)}
        async with self._session.post(url + _PATH, json=body, headers=headers) as answer:
            if answer.status != 200 or answer.headers["x-waymark-decision"] == "degraded":
                raise SystemExit(f"a gateway has answered {answer.status}: {(await answer.read())[:300]!r}")
            async for _ in answer.content.iter_any():
                stream.was_seen.set()

    async def _unless_broken(self, stream: _Stream, waited: Awaitable[object]) -> None:
        """Wait. Raise the error that has ended the stream, if there is one."""
        assert stream.reading is not None
        waiting = asyncio.ensure_future(waited)
        await asyncio.wait({waiting, stream.reading}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await stream.reading
            raise SystemExit("a stream has ended before its time")

    async def _settle(self) -> None:
        await self._service.until_reserved(len(self._streams), self._begun)


@asynccontextmanager
async def gateways(policy: str, engines: int, count: int) -> AsyncIterator[Gateways]:
    """Start gateways in front of engines, on one empty Redis."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        )
        behind: list[Gateways] = []
        addresses = [await stack.enter_async_context(_engine(number, behind)) for number in range(engines)]
        environ = _SETTINGS | {"WAYMARK_POLICY": policy}
        service = await stack.enter_async_context(
            started(folder, engines=engines, workers=1, replicas=1, environ=environ, addresses=addresses)
        )
        decider = Gateways(service, await service.start_gateways(count), session)
        behind.append(decider)
        try:
            yield decider
        finally:
            await decider.close()


@asynccontextmanager
async def _engine(number: int, behind: Sequence[Gateways]) -> AsyncIterator[str]:
    """Start the HTTP server of an engine, and yield its address. ``behind`` has one element, which gets the
    requests."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await behind[0].serve(number, request)

    application = web.Application(client_max_size=2**26)
    application.router.add_post(_PATH, answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
