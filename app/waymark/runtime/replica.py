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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from waymark.api.application import create_app, create_probes
from waymark.base import native
from waymark.base.asgi import StraightTable
from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.serving.connection import protocol
from waymark.serving.limits import Connections, ServerBounds, Shape, files_for
from waymark.serving.listening import listen
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The time in which requests in progress must end.
_SHUTDOWN_SECONDS = 5
#: The pause before a Redis that did not answer is asked again for the format of its index.
_FORMAT_AGAIN_SECONDS = 0.5
#: How long a connection is kept for a next request: longer than load balancers keep theirs, usually 60 s.
_KEEP_ALIVE_SECONDS = 65


class _UvicornServer(uvicorn.Server):
    """uvicorn, with the signals left to us: it would end the process before the worker has released its leases."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    """Return the bounds of an HTTP server, of whose process an ingest worker takes ``worker_files`` open files."""
    connections = files_for(settings.connections_max, worker_files)
    return ServerBounds(settings.request_seconds, connections, parts.bodies_bytes_max(settings))


def http_server(
    app: Any,
    bounds: ServerBounds,
    metrics: Metrics,
    *,
    shutdown_seconds: int = _SHUTDOWN_SECONDS,
    shape: Shape = lambda *_: None,
    straight: StraightTable | None = None,
) -> uvicorn.Server:
    """Return an HTTP server that ends at ``should_exit``. ``straight`` has the straight questions of ``app``."""
    return _UvicornServer(
        uvicorn.Config(
            app,
            http=protocol(Connections(bounds, metrics, shape, straight)),
            interface="asgi3",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no handler uses the client's address
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_seconds,
        )
    )


def stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def run(
    settings: Settings,
    *,
    has_api: bool,
    has_worker: bool,
    sockets: Sequence[socket.socket],
    has_gateway: bool = False,
) -> None:
    """Run one process, until a signal ends it. Raise ``SettingsError`` if the file of publishers is wrong.

    ``sockets`` come from ``open_port``. The caller closes them.
    """
    if has_worker:
        from waymark.runtime import worker as runtime_worker  # a query replica starts sooner without it

        # a mistake in the settings ends the process before it opens anything
        options = runtime_worker.checked_options(settings)
    role = "serve" if has_api and has_worker else "query" if has_api else "gateway" if has_gateway else "ingest"
    is_native = native.select(settings.native) == "native"
    metrics = Metrics(role=role, is_native=is_native)
    store = parts.open_store(settings, metrics, keeps_answers=has_gateway)
    await report_redis(store)
    worker_files = 0
    if has_worker:
        options, worker_files = runtime_worker.within_files(options, is_alone=not (has_api or has_gateway))
    bounds = server_bounds(settings, worker_files)
    tokenizers = parts.tokenizers(settings, metrics, store)
    asker = parts.asker(settings)
    stop = stop_signal()
    gateway, api_options = None, parts.api_options(settings)
    if has_gateway:
        from waymark.runtime import gateway as runtime_gateway

        gateway = runtime_gateway.GatewayRole(store, settings, metrics, tokenizers, asker, stop)
        server = http_server(
            gateway.app,
            bounds,
            metrics,
            shutdown_seconds=settings.finish_seconds,
            shape=runtime_gateway.body_of_rejection,
        )
    elif has_api:
        app = create_app(store, api_options, parts.selection_options(settings), metrics, tokenizers, asker, stop)
        server = http_server(app, bounds, metrics, straight=app.straight)
    else:
        server = http_server(create_probes(store, api_options, metrics), bounds, metrics)
    freeze_heap()
    fit = asyncio.Event()
    refusals: list[str] = []

    async def check_format() -> None:
        refusal = await _other_format(store)
        if refusal is None:
            fit.set()
        else:
            refusals.append(refusal)
            stop.set()

    async def work() -> None:
        await fit.wait()
        await runtime_worker.worker(store, settings, metrics, options).run()

    try:
        if sockets:
            log.info("listening", extra=fields(host=settings.host, port=sockets[0].getsockname()[1], role=role))
        warning = parts.openness(settings, is_gateway=has_gateway) if has_api or has_gateway else None
        if warning is not None:
            log.warning(warning)
        async with asyncio.TaskGroup() as tasks:
            format_check = tasks.create_task(check_format())
            ended: set[asyncio.Task[Any]] = {tasks.create_task(stop.wait())}
            if sockets:
                ended.add(tasks.create_task(server.serve(list(sockets))))
            workers: list[asyncio.Task[None]] = []
            if has_worker:
                workers.append(tasks.create_task(work()))
                workers.append(tasks.create_task(runtime_worker.discovery(store, settings, metrics, asker).run()))
            if gateway is not None:
                workers += [tasks.create_task(task) for task in gateway.tasks()]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            server.should_exit = True
            for worker in (*workers, format_check):
                worker.cancel()
    finally:
        if gateway is not None:
            await gateway.close()
        await tokenizers.close()
        await asker.close()
        await store.close()
    if refusals:
        raise SettingsError(refusals[0])


async def report_redis(store: Store) -> None:
    """Log the problems of Redis before anything else."""
    health = await store.health.poll()
    if not health.is_up:
        log.error(
            "redis does not answer; start it, or set WAYMARK_REDIS_URL to the one that runs",
            extra=fields(redis=store.url),
        )


async def _other_format(store: Store) -> str | None:
    """Return ``Store.other_format``, as soon as Redis answers."""
    while True:
        try:
            return await store.other_format()
        except StoreUnavailable:
            await asyncio.sleep(_FORMAT_AGAIN_SECONDS)
