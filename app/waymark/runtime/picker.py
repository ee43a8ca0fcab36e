"""The process of an endpoint picker, put together: selection, its gRPC servers, and HTTP for probes and metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from waymark.api.application import create_probes
from waymark.base import native
from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.asked_pools import AskedPools
from waymark.decide.fail_open import IngestWatch, StartupGate
from waymark.decide.reported import ReportedPrompts
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.decide.under_way import RequestsUnderWay
from waymark.epp.answers import BodyBytes
from waymark.epp.process_call import CallContext
from waymark.epp.server import IDLE_SECONDS, EppOptions, EppServer
from waymark.runtime import parts
from waymark.runtime.http_server import http_server
from waymark.runtime.replica import FormatCheck, freeze_heap, report_redis, server_bounds, stop_signal
from waymark.serving.listening import listen
from waymark.store.store import Store

#: The port of llm-d's picker for metrics.
_PROBE_PORT = 9090


def open_port(settings: Settings) -> list[socket.socket]:
    """Open the sockets of its HTTP port; without a port, return an empty list. Raise ``PortUnavailable`` if it is
    taken.
    """
    port = _PROBE_PORT if settings.probe_port is None else settings.probe_port
    return listen(settings.host, port, host_name="WAYMARK_HOST", port_name="WAYMARK_PROBE_PORT") if port else []


def epp_options(settings: Settings) -> EppOptions:
    files = {} if isinstance(settings.epp_tls, bool) else settings.epp_tls
    return EppOptions(
        host=settings.host,
        port=settings.epp_port,
        health_port=settings.epp_health_port or None,
        has_tls=bool(settings.epp_tls),
        cert_file=files.get("cert"),
        key_file=files.get("key"),
        streams_max=settings.connections_max,
        drain_seconds=settings.epp_drain_seconds,
        finish_seconds=settings.finish_seconds,
    )


def call_context(
    settings: Settings, requests: RequestSelector, under_way: RequestsUnderWay, metrics: Metrics
) -> CallContext:
    return CallContext(
        requests,
        under_way,
        metrics,
        BodyBytes(settings.max_body_bytes, parts.bodies_bytes_max(settings), metrics),
        settings.epp_tenant,
        settings.request_seconds,
        IDLE_SECONDS,
    )


async def run(settings: Settings, *, sockets: Sequence[socket.socket]) -> None:
    """Run one process, until a signal ends it. Raises SettingsError."""
    # First, because process 1 of a container gets no signal before this, and Redis may take long to answer.
    stop = stop_signal()
    is_native = native.select(settings.native) == "native"
    metrics = Metrics(role="epp", is_native=is_native)
    options, prompt_options = parts.selection_options(settings), parts.prompt_options(settings)
    store = parts.open_store(settings, metrics)
    tokenizers = parts.tokenizers(settings, metrics, store)
    asker = parts.asker(settings)
    check = FormatCheck(store)
    try:
        await check.begin()
        await report_redis(store)
        selector = Selector(store, options, metrics, pools=AskedPools(asker, metrics))
        watch = IngestWatch(store.heartbeats)
        gate = StartupGate(store.polled_claims, settings.min_initial_workers, watch)
        under_way = RequestsUnderWay(selector, store.begin)
        requests = RequestSelector(store, prompt_options, metrics, selector, tokenizers, gate)
        prompts = ReportedPrompts(store, requests, prompt_options, metrics, settings.epp_tenant)
        picker = call_context(settings, requests, under_way, metrics)
        bounds = server_bounds(settings, 0)
        http = http_server(create_probes(store, parts.api_options(settings), metrics, gate), bounds, metrics)
        freeze_heap()
        servers = EppServer(epp_options(settings), picker, prompts, partial(_waits_for, store, gate))
        async with servers as server, asyncio.TaskGroup() as tasks:
            if sockets:
                tasks.create_task(http.serve(list(sockets)))
            background = [tasks.create_task(work) for work in (watch.run(), check.run(stop))]
            await server.serve(stop)
            for task in background:
                task.cancel()
            http.should_exit = True
            await under_way.settle()
        if check.refusal is not None:
            raise SettingsError(check.refusal)
    finally:
        await tokenizers.close()
        await asker.close()
        await store.close()


async def _waits_for(store: Store, gate: StartupGate) -> str | None:
    """Return the reason why the picker is not ready yet."""
    try:
        reasons = await store.check()
        return "; ".join(reasons) if reasons else await gate.waiting()
    except StoreUnavailable as exc:
        return exc.sentence
