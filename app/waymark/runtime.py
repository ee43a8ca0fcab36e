"""Processes, put together: the API, the ingest worker, or both, over one store.

No logic of its own: it wires what the roles are. SIGTERM and SIGINT end a process in order: the API answers what it
has begun, the worker gives its leases back.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from waymark import native
from waymark.api.application import create_app, create_probes
from waymark.api.engine_addresses import EngineAddresses
from waymark.apply.options import ApplyOptions
from waymark.asker import Asker
from waymark.ingest.descriptors import room_for
from waymark.ingest.options import WorkerOptions
from waymark.ingest.stream import StreamOptions
from waymark.ingest.worker import Worker
from waymark.metrics import Metrics
from waymark.publishers_file import read_publishers
from waymark.serving.connection import protocol
from waymark.serving.limits import Bounds, Connections, files_for
from waymark.settings import Settings
from waymark.store.credentials import Credentials
from waymark.store.hot import HotBlocks
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

#: How long requests that have begun may take to end.
_SHUTDOWN_SECONDS = 5
#: How long a connection is kept for a next request: longer than load balancers keep theirs, usually 60 s.
_KEEP_ALIVE_SECONDS = 65


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to us: it would end the process before the worker has given back its leases."""

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


def freeze_heap() -> None:
    """Take what there is now out of every later garbage collection.

    It is what was imported and stays for good. A full collection goes through all of it, which stopped one of the
    first queries of each replica for 40 to 70 ms.
    """
    gc.collect()
    gc.freeze()


async def run(settings: Settings, *, has_api: bool, has_worker: bool) -> None:
    """One process, until a signal ends it; ``SettingsError`` where the file of publishers is wrong."""
    options = worker_options(settings) if has_worker else None
    worker_files = 0
    if options is not None:
        # Where both are in one process, HTTP connections get the other half.
        room = room_for(options.streams_max, options.replays_max, part=0.5 if has_api else 1.0)
        options = replace(options, streams_max=room.streams, replays_max=room.replays)
        worker_files = room.files
    role = "serve" if has_api and has_worker else "query" if has_api else "ingest"
    is_native = native.select(settings.native) == "native"
    metrics = Metrics(role=role, is_native=is_native, models_max=settings.metrics_models_max)
    store = Store.open(
        settings.redis_url,
        settings.redis_read_url,
        shards=settings.shards,
        are_shards_set="shards" in settings.model_fields_set,
        hash_seed=settings.hash_seed,
        timeout_seconds=settings.redis_timeout_seconds,
        credentials=Credentials.of(settings),
        hot=HotBlocks(settings.hot_block_ms / 1000, settings.hot_block_bytes, metrics),
        metrics=metrics,
        apply_blocks_max=settings.apply_blocks_max,
    )
    bounds = Bounds(
        settings.request_seconds, files_for(settings.connections_max, worker_files), settings.bodies_max_bytes
    )
    tokenizers = Tokenizers.of(settings, metrics, EngineAddresses(store))
    asker = Asker.of(settings)
    port = settings.port if has_api else settings.ingest_port
    app: Any = create_probes(store, settings, metrics)
    if has_api:
        app = create_app(store, settings, metrics, tokenizers, asker)
    server = _Server(
        uvicorn.Config(
            app,
            http=protocol(Connections(bounds, metrics)),
            interface="asgi3",
            ws="none",
            host=settings.host,
            port=port,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody here asks who the client is
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )
    freeze_heap()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            ended: set[asyncio.Task[Any]] = {tasks.create_task(stop.wait())}
            tasks.create_task(store.health.look())  # says in the log what is wrong with Redis
            if port:
                ended.add(tasks.create_task(server.serve()))
            worker = tasks.create_task(Worker(store, metrics, options, Asker.of(settings)).run()) if options else None
            # A server that ends by itself could not open its port.
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            server.should_exit = True
            if worker is not None:
                worker.cancel()
    finally:
        await tokenizers.close()
        await asker.close()
        await store.close()
