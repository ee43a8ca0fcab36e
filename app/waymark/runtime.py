"""Processes, put together: the API, the ingest worker, or both, over one store.

No logic of its own: it wires what the roles are. SIGTERM and SIGINT end a process in order: the API answers what it
has begun, the worker gives its leases back.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from waymark import native
from waymark.api.application import create_app, create_gateway_admin, create_probes
from waymark.api.engine_addresses import EngineAddresses
from waymark.api.registrations import registration_of
from waymark.apply.options import ApplyOptions
from waymark.asker import Asker
from waymark.discovery.describe import Describer
from waymark.discovery.engines import EngineRegistrations
from waymark.discovery.kubernetes import ApiServer
from waymark.discovery.pods import PodPorts
from waymark.discovery.run import Discovery, DiscoveryOptions
from waymark.domain.targets import URL, is_url
from waymark.endpoints import AllowedEndpoints
from waymark.errors import SettingsError, StoreUnavailable
from waymark.gateway.application import Gateway
from waymark.gateway.engines import GivenEngines
from waymark.gateway.mongo import MongoArchive
from waymark.gateway.response_cache import ResponseCache
from waymark.gateway.responses import Responses
from waymark.gateway.shapes import body_of_rejection
from waymark.ingest.descriptors import room_for
from waymark.ingest.options import WorkerOptions
from waymark.ingest.stream import StreamOptions
from waymark.ingest.worker import Worker
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.publishers_file import read_publishers, read_wanted
from waymark.serving.connection import protocol
from waymark.serving.limits import Bounds, Connections, Shape, files_for
from waymark.serving.listening import listen
from waymark.settings import Settings, hide_password
from waymark.store.credentials import Credentials
from waymark.store.hot import HotRows
from waymark.store.store import Store
from waymark.tokenization.tokenizers import ENGINE, Tokenizers

log = logging.getLogger(__name__)

#: Where a pod has the token and the CA of its ServiceAccount.
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: How long requests that have begun may take to end.
_SHUTDOWN_SECONDS = 5
#: The pause before a Redis that did not answer is asked again for the format of its index.
_FORMAT_AGAIN_SECONDS = 0.5
#: How long a connection is kept for a next request: longer than load balancers keep theirs, usually 60 s.
_KEEP_ALIVE_SECONDS = 65


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to us: it would end the process before the worker has released its leases."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def worker_options(settings: Settings) -> WorkerOptions:
    """What a worker needs of the settings, and of the file they name."""
    file = settings.publishers_file
    return WorkerOptions(
        worker_id=settings.worker_id,
        apply=ApplyOptions.of(settings),
        replays_max=settings.replays_max,
        sweep_blocks_per_second=settings.sweep_blocks_per_second,
        gauges_seconds=settings.gauges_seconds,
        allowed_endpoints=settings.allowed_endpoints,
        publishers=read_publishers(file, settings.allowed_endpoints) if file else (),
        stream=StreamOptions(
            on_gap=settings.on_gap,
            probe_seconds=settings.probe_seconds,
            replay_idle_seconds=settings.replay_idle_seconds,
            replay_seconds=settings.replay_seconds,
            replay_bytes_per_second_min=settings.replay_bytes_per_second_min,
            publisher_timeout=settings.publisher_timeout,
            lease_seconds=settings.lease_seconds,
            stream_buffer_bytes=settings.stream_buffer_bytes,
            stream_buffer_frames=settings.stream_buffer_frames,
            fold_batches=settings.fold_batches,
            message_bytes_max=4 * settings.frame_bytes_max,
        ),
    )


def discovery_options(settings: Settings, environ: Mapping[str, str]) -> DiscoveryOptions:
    """What discovery needs of the settings and of a pod's environment; ``SettingsError`` if that is too little."""
    ports = PodPorts(settings.discovery_api_port, settings.discovery_port, settings.discovery_replay_port)
    path = settings.publishers_file
    usual = (ports.events, ports.replay, 1)
    return DiscoveryOptions(
        worker_id=settings.worker_id,
        again_seconds=settings.discovery_seconds,
        api_server=_api_server(settings, environ) if settings.discovery == "kubernetes" else None,
        ports=ports,
        file=path or "",
        read_file=partial(read_wanted, path, settings.allowed_endpoints, usual) if path else None,
    )


def _api_server(settings: Settings, environ: Mapping[str, str]) -> ApiServer:
    url, token_file, ca_file = settings.discovery_url, settings.discovery_token_file, settings.discovery_ca_file
    if url is not None and not is_url(url):
        raise SettingsError(f"WAYMARK_DISCOVERY_URL is {hide_password(url)!r}: it must be {URL}")
    if url is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SettingsError(
                "WAYMARK_DISCOVERY is kubernetes, and this process runs in no pod: set WAYMARK_DISCOVERY_URL to the "
                "API server, or leave WAYMARK_DISCOVERY out"
            )
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        token_file, ca_file = token_file or f"{_ACCOUNT}/token", ca_file or f"{_ACCOUNT}/ca.crt"
    return ApiServer(url, token_file, ca_file, settings.discovery_namespace or "", settings.discovery_selector)


def _discovery(store: Store, settings: Settings, metrics: Metrics, asker: Asker) -> Discovery:
    allowed = AllowedEndpoints(settings.allowed_endpoints)
    return Discovery(
        store,
        metrics,
        discovery_options(settings, os.environ),
        Describer(asker, allowed),
        partial(registration_of, allowed=allowed),
    )


def _given_engines(store: Store, settings: Settings, asker: Asker) -> GivenEngines:
    allowed = AllowedEndpoints(settings.allowed_endpoints)
    engines = EngineRegistrations(Describer(asker, allowed), partial(registration_of, allowed=allowed))
    return GivenEngines(store, engines, settings.gateway_engines)


def freeze_heap() -> None:
    """Take what there is now out of every later garbage collection.

    These objects were imported and stay permanently. A full collection goes through all of it, which stopped one of the
    first queries of each replica for 40 to 70 ms.
    """
    gc.collect()
    gc.freeze()


def open_port(settings: Settings, *, has_api: bool) -> list[socket.socket]:
    """The sockets that a process listens on; none for a worker without a port. Raises ``PortUnavailable``."""
    port = settings.port if has_api else settings.ingest_port
    names = ("--host or WAYMARK_HOST", "--port or WAYMARK_PORT") if has_api else ("WAYMARK_HOST", "WAYMARK_INGEST_PORT")
    return listen(settings.host, port, host_name=names[0], port_name=names[1]) if port else []


def open_store(settings: Settings, metrics: Metrics) -> Store:
    """The store of a process. It connects on the first command."""
    return Store.open(
        settings.redis_url,
        settings.redis_read_url,
        shards=settings.shards,
        are_shards_set="shards" in settings.model_fields_set,
        hash_seed=settings.hash_seed,
        timeout_seconds=settings.redis_timeout_seconds,
        credentials=Credentials.of(settings),
        hot=HotRows(settings.hot_block_ms / 1000, settings.hot_block_bytes, metrics),
        metrics=metrics,
        apply_blocks_max=settings.apply_blocks_max,
    )


def http_server(
    app: Any,
    bounds: Bounds,
    metrics: Metrics,
    *,
    shutdown_seconds: int = _SHUTDOWN_SECONDS,
    shape: Shape = lambda path, rejection: None,
) -> uvicorn.Server:
    """An HTTP server, which ends when its ``should_exit`` is set."""
    return _Server(
        uvicorn.Config(
            app,
            http=protocol(Connections(bounds, metrics, shape)),
            interface="asgi3",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody here asks who the client is
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_seconds,
        )
    )


def stop_signal() -> asyncio.Event:
    """Set when SIGTERM or SIGINT arrives."""
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
    """One process, until a signal ends it; ``SettingsError`` where the file of publishers is wrong.

    ``sockets`` are those of ``open_port``. The caller closes them.
    """
    options = worker_options(settings) if has_worker else None
    if has_worker:
        discovery_options(settings, os.environ)  # what is wrong ends the process before anything is opened
    role = "serve" if has_api and has_worker else "query" if has_api else "gateway" if has_gateway else "ingest"
    is_native = native.select(settings.native) == "native"
    metrics = Metrics(role=role, is_native=is_native, models_max=settings.metrics_models_max)
    store = open_store(settings, metrics)
    await report_redis(store)
    worker_files = 0
    if options is not None:
        # Where both are in one process, HTTP connections get the other half.
        room = room_for(options.streams_max, options.replays_max, part=0.5 if has_api or has_gateway else 1.0)
        options = replace(options, streams_max=room.streams, replays_max=room.replays)
        worker_files = room.files
    bounds = Bounds(
        settings.request_seconds, files_for(settings.connections_max, worker_files), settings.bodies_max_bytes
    )
    tokenizers = Tokenizers.of(settings, metrics, EngineAddresses(store), fallback=ENGINE if has_gateway else None)
    asker = Asker.of(settings)
    stop = stop_signal()
    app: Any = create_probes(store, settings, metrics)
    if has_api:
        app = create_app(store, settings, metrics, tokenizers, asker, stop)
    gateway = None
    archive = MongoArchive.of(settings, metrics, store) if has_gateway else None
    if has_gateway:
        cache = ResponseCache.of(settings, metrics, store)
        others = create_gateway_admin(store, settings, metrics, None if cache is None else cache.operated)
        responses = Responses.of(settings, metrics, store, archive)
        app = gateway = Gateway(store, settings, metrics, tokenizers, others, cache, responses)
    if has_gateway:
        seconds = settings.gateway_drain_seconds
        server = http_server(app, bounds, metrics, shutdown_seconds=seconds, shape=body_of_rejection)
    else:
        server = http_server(app, bounds, metrics)
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

    async def work(worker: Worker) -> None:
        await fit.wait()
        await worker.run()

    try:
        if sockets:
            log.info("listening", extra=fields(host=settings.host, port=sockets[0].getsockname()[1], role=role))
        async with asyncio.TaskGroup() as tasks:
            format_check = tasks.create_task(check_format())
            ended: set[asyncio.Task[Any]] = {tasks.create_task(stop.wait())}
            if sockets:
                ended.add(tasks.create_task(server.serve(list(sockets))))
            workers: list[asyncio.Task[None]] = []
            if options is not None:
                workers.append(tasks.create_task(work(Worker(store, metrics, options, Asker.of(settings)))))
                workers.append(tasks.create_task(_discovery(store, settings, metrics, asker).run()))
            if archive is not None:
                workers.append(tasks.create_task(archive.run()))
            if has_gateway and settings.gateway_engines:
                workers.append(tasks.create_task(_given_engines(store, settings, asker).run()))
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            server.should_exit = True
            for worker in (*workers, format_check):
                worker.cancel()
    finally:
        if gateway is not None:
            await gateway.close()
        if archive is not None:
            archive.close()
        await tokenizers.close()
        await asker.close()
        await store.close()
    if refusals:
        raise SettingsError(refusals[0])


async def report_redis(store: Store) -> None:
    """Report in the log, before anything else, what is wrong with Redis."""
    health = await store.health.look()
    if not health.is_up:
        log.error(
            "redis does not answer; start it, or set WAYMARK_REDIS_URL to the one that runs",
            extra=fields(redis=store.url),
        )


async def _other_format(store: Store) -> str | None:
    """As ``Store.other_format``, as soon as Redis answers."""
    while True:
        try:
            return await store.other_format()
        except StoreUnavailable:
            await asyncio.sleep(_FORMAT_AGAIN_SECONDS)
