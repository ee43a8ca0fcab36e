"""Processes, put together: the API, the ingest worker, or both, over one store.

It has no logic of its own: it connects the parts of each role. SIGTERM and SIGINT end a process in order: the API
answers the requests in progress, the worker gives its leases back.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from waymark.api.first import FirstQuestions, LaterApplication
from waymark.base import native
from waymark.base.asker import Asker
from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.serving.limits import Connections, ServerBounds, files_for
from waymark.serving.listening import EarlyServer, listen
from waymark.store.store import Store

if TYPE_CHECKING:
    import uvicorn

    from waymark.runtime.gateway import GatewayRole
    from waymark.tokenization.tokenizers import Tokenizers

log = logging.getLogger(__name__)

#: The pause before a Redis that did not answer is asked again for the format of its index.
_FORMAT_AGAIN_SECONDS = 0.5
#: How long a process waits for Redis before it listens.
_ANSWER_SECONDS = 0.5


def freeze_heap() -> None:
    """Exclude all present objects from later garbage collections, and enable collections.

    These objects were imported and stay permanently. A full collection would visit all these objects, which stopped
    one of the first queries of each replica for 40 to 70 ms. For the same reason this function does not collect: of
    75,000 objects a collection would free a hundredth.
    """
    gc.freeze()
    gc.enable()


def open_port(settings: Settings, *, has_api: bool) -> list[socket.socket]:
    """Open the sockets that a process listens on; a worker may have no port. Raise ``PortUnavailable`` if a port
    is taken.
    """
    port = settings.port if has_api else settings.probe_port
    names = ("--host or WAYMARK_HOST", "--port or WAYMARK_PORT") if has_api else ("WAYMARK_HOST", "WAYMARK_PROBE_PORT")
    return listen(settings.host, port, host_name=names[0], port_name=names[1]) if port else []


def server_bounds(settings: Settings, worker_files: int) -> ServerBounds:
    """Return the bounds of an HTTP server. An ingest worker in its process uses ``worker_files`` open files."""
    connections = files_for(settings.connections_max, worker_files)
    return ServerBounds(settings.request_seconds, connections, parts.bodies_bytes_max(settings))


def stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@record(frozen=True, slots=True)
class ProcessParts:
    """The parts that serve the HTTP port of a process."""

    settings: Settings
    store: Store
    metrics: Metrics
    tokenizers: Callable[[], Tokenizers]
    """Returns the tokenizers, which are made in the first call."""
    asker: Asker
    stop: asyncio.Event
    """It is set when the process ends."""

    @classmethod
    def open(cls, settings: Settings, role: str) -> ProcessParts:
        """Return the parts of a process. They connect when they are first used."""
        metrics = Metrics(role=role, is_native=native.select(settings.native) == "native")
        store = parts.open_store(settings, metrics, keeps_answers=role == "gateway")
        tokenizers = cache(partial(parts.tokenizers, settings, metrics, store))
        return cls(settings, store, metrics, tokenizers, parts.asker(settings), stop_signal())

    def probes(self, bounds: ServerBounds) -> uvicorn.Server:
        """Return the server of a worker, which has probes only."""
        # A query replica listens before they are imported.
        from waymark.api.application import create_probes
        from waymark.runtime.http_server import http_server

        app = create_probes(self.store, parts.api_options(self.settings), self.metrics)
        return http_server(app, bounds, self.metrics)

    def api(self) -> LaterApplication:
        """Return the API of a replica."""
        options = parts.api_options(self.settings)
        first = FirstQuestions(self.store, options, self.metrics, self.tokenizers, self.asker)
        return LaterApplication(first, self._prepare, lambda: parts.selection_options(self.settings), self.stop)

    def _prepare(self) -> None:
        """Import what no first answer needs."""
        import_module("waymark.runtime.http_server")
        self.store.prepare()
        self.tokenizers()

    def gateway(self, bounds: ServerBounds) -> tuple[uvicorn.Server, GatewayRole]:
        """Return the server of a gateway, and its role."""
        from waymark.runtime import gateway as runtime_gateway
        from waymark.runtime.http_server import http_server

        role = runtime_gateway.GatewayRole(
            self.store, self.settings, self.metrics, self.tokenizers(), self.asker, self.stop
        )
        server = http_server(
            role.app,
            bounds,
            self.metrics,
            shutdown_seconds=self.settings.finish_seconds,
            shape=runtime_gateway.body_of_rejection,
        )
        return server, role

    async def close(self) -> None:
        await self.tokenizers().close()
        await self.asker.close()
        await self.store.close()


class HttpPort:
    """The HTTP server of a process."""

    def __init__(self, make: Callable[[], uvicorn.Server]) -> None:
        self.is_complete = asyncio.Event()
        """Set when the process has imported everything."""
        self._make = make
        self._server: uvicorn.Server | None = None
        self._is_ended = False

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Listen, if there are answers before the server is made."""

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Make the server, and serve until ``end``."""
        self._server = self._make()
        self._server.should_exit = self._is_ended
        await self._server.serve(list(sockets))

    def end(self) -> None:
        """End the server after the requests under way are answered."""
        self._is_ended = True
        if self._server is not None:
            self._server.should_exit = True


class EarlyPort(HttpPort):
    """A server that answers its first requests before uvicorn is imported."""

    def __init__(self, api: LaterApplication, bounds: ServerBounds, metrics: Metrics) -> None:
        early = EarlyServer(api, Connections(bounds, metrics, straight=api.straight))

        def make() -> uvicorn.Server:
            from waymark.runtime.http_server import http_server

            return http_server(api, bounds, metrics, early=early)

        super().__init__(make)
        self._early = early

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        await self._early.listen(sockets)

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        await self.is_complete.wait()
        await super().serve(sockets)


class FormatCheck:
    """The check whether this release can read the index in Redis. Nothing else is read before, and a worker waits."""

    def __init__(self, store: Store) -> None:
        self.is_passed = asyncio.Event()
        self.refusal: str | None = None
        """Why this release cannot read the index."""
        self._store = store

    async def begin(self) -> bool:
        """Check the format, unless Redis does not answer in time; return whether it has answered. Raise
        ``SettingsError`` if the format is another one.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._check()
        except TimeoutError:
            self._store.bar(f"Redis at {self._store.url} did not answer within {_ANSWER_SECONDS:g} s")
            return False
        if self.refusal is not None:
            raise SettingsError(self.refusal)
        return self.is_passed.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Check the format as soon as Redis answers. Set ``stop`` if it is another one."""
        while not self.is_passed.is_set():
            await asyncio.sleep(_FORMAT_AGAIN_SECONDS)
            await self._check()
            if self.refusal is not None:
                stop.set()
                return

    async def _check(self) -> None:
        try:
            self.refusal = await self._store.other_format()
        except StoreUnavailable as exc:
            self._store.bar(exc.sentence)
        else:
            self._store.bar(self.refusal)
            if self.refusal is None:
                self.is_passed.set()


async def run(
    settings: Settings, *, has_api: bool, has_worker: bool, sockets: Sequence[socket.socket], has_gateway: bool = False
) -> None:
    """Run one process, until a signal ends it. Raise ``SettingsError`` if the file of publishers is wrong.

    ``sockets`` come from ``open_port``. The caller closes them.
    """
    if has_worker:
        from waymark.runtime import worker as runtime_worker  # a query replica starts sooner without it

        # a mistake in the settings ends the process before it opens anything
        options = runtime_worker.checked_options(settings)
    role = "serve" if has_api and has_worker else "query" if has_api else "gateway" if has_gateway else "ingest"
    process = ProcessParts.open(settings, role)
    store, metrics = process.store, process.metrics
    gateway: GatewayRole | None = None
    api: LaterApplication | None = None
    check = FormatCheck(store)
    try:
        # A query replica answers its first queries before it imports redis-py, unless Redis does not answer.
        is_reported = not await check.begin() or has_worker or not has_api
        if is_reported:
            await report_redis(store)
        worker_files = 0
        if has_worker:
            options, worker_files = runtime_worker.within_files(options, is_alone=not (has_api or has_gateway))
        bounds = server_bounds(settings, worker_files)
        if has_gateway:
            server, gateway = process.gateway(bounds)
            port = HttpPort(lambda: server)
        elif has_api:
            api = process.api()
            port = EarlyPort(api, bounds, metrics)
        else:
            port = HttpPort(partial(process.probes, bounds))

        async def complete() -> None:
            if api is not None:
                await api.make()
            freeze_heap()
            port.is_complete.set()

        async def check_redis() -> None:
            if not is_reported:
                await port.is_complete.wait()
                await report_redis(store)
            await check.run(process.stop)

        async def work() -> None:
            await port.is_complete.wait()
            await check.is_passed.wait()
            await runtime_worker.worker(store, settings, metrics, options).run()

        _announce(settings, sockets, role)
        background: list[Coroutine[Any, Any, None]] = [check_redis()]
        if has_worker:
            background += [work(), runtime_worker.discovery(store, settings, metrics, process.asker).run()]
        if gateway is not None:
            background += gateway.tasks()
        await _serve(port, sockets, background, process.stop, complete())
    finally:
        if gateway is not None:
            await gateway.close()
        await process.close()
    if api is not None and api.failure is not None:
        raise api.failure
    if check.refusal is not None:
        raise SettingsError(check.refusal)


def _announce(settings: Settings, sockets: Sequence[socket.socket], role: str) -> None:
    """Log the port, and a warning if it is open to strangers."""
    if sockets:
        log.info("listening", extra=fields(host=settings.host, port=sockets[0].getsockname()[1], role=role))
    warning = None if role == "ingest" else parts.openness(settings, is_gateway=role == "gateway")
    if warning is not None:
        log.warning(warning)


async def _serve(
    port: HttpPort,
    sockets: Sequence[socket.socket],
    background: Sequence[Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    completion: Coroutine[Any, Any, None],
) -> None:
    """Serve the sockets, and run ``background``, until ``stop`` is set or the server ends.

    ``completion`` is not cancelled: requests may wait for it, which are answered before the server ends.
    """
    async with asyncio.TaskGroup() as tasks:
        ended: set[asyncio.Task[Any]] = {tasks.create_task(stop.wait())}
        if sockets:
            await port.listen(sockets)
            ended.add(tasks.create_task(port.serve(sockets)))
        tasks.create_task(completion)
        others = [tasks.create_task(work) for work in background]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        port.end()
        for task in others:
            task.cancel()


async def report_redis(store: Store) -> None:
    """Log the problems of Redis before anything else."""
    health = await store.health.poll()
    if not health.is_up:
        log.error(
            "redis does not answer; start it, or set WAYMARK_REDIS_URL to the one that runs",
            extra=fields(redis=store.url),
        )
