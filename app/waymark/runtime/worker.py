"""The parts of a process with an ingest worker: the worker itself, and the discovery of engines.

``runtime`` imports this module only when it is needed, since a query replica starts sooner without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from waymark.api.publishers_file import read_publishers, read_wanted
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.discovery.describe import Describer
from waymark.discovery.kubernetes import ApiServer
from waymark.discovery.pods import PodPorts
from waymark.discovery.run import DiscoveryOptions, EngineDiscovery
from waymark.ingest.options import StreamOptions, WorkerOptions
from waymark.ingest.worker import Worker, room_for
from waymark.runtime import parts
from waymark.store.store import Store

#: Where a pod has the token and the CA of its ServiceAccount.
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def worker(store: Store, settings: Settings, metrics: Metrics, options: WorkerOptions) -> Worker:
    """Return the worker of a process; it connects when it runs."""
    return Worker(store, metrics, options, parts.asker(settings))


def checked_options(settings: Settings) -> WorkerOptions:
    """Return ``worker_options``, after a check of the needs of discovery. Raise ``SettingsError`` for a mistake."""
    options = worker_options(settings)
    discovery_options(settings, os.environ)
    return options


def within_files(options: WorkerOptions, *, is_alone: bool) -> tuple[WorkerOptions, int]:
    """Return the options with as many streams as the limit of open files allows, and how many files they take.

    If the process also has HTTP connections, those get the other half.
    """
    room = room_for(options.streams_max, options.replays_max, part=1.0 if is_alone else 0.5)
    return replace(options, streams_max=room.streams, replays_max=room.replays), room.files


def worker_options(settings: Settings) -> WorkerOptions:
    """Return the options of a worker, from the settings and the file that they name."""
    file = settings.publishers_file
    return WorkerOptions(
        worker_id=settings.worker_id,
        apply=parts.apply_options(settings),
        sweep_blocks_per_second=settings.sweep_blocks_per_second,
        gauges_seconds=settings.gauges_seconds,
        allowed_endpoints=settings.allowed_endpoints,
        publishers=read_publishers(file, settings.allowed_endpoints) if file else (),
        stream=StreamOptions(
            on_gap=settings.on_gap,
            probe_seconds=settings.probe_seconds,
            publisher_timeout=settings.publisher_timeout,
            lease_seconds=settings.lease_seconds,
            stream_buffer_bytes=settings.stream_buffer_bytes,
            stream_buffer_frames=parts.in_proportion(20_000, settings, "stream_buffer_bytes"),
            message_bytes_max=4 * settings.frame_bytes_max,
        ),
    )


def discovery_options(settings: Settings, environ: Mapping[str, str]) -> DiscoveryOptions:
    """Return the options of discovery, from the settings and a pod's environment. Raise ``SettingsError`` if one is
    missing.
    """
    ports = PodPorts(**settings.discovery_ports)
    path = settings.publishers_file
    usual = (ports.events, ports.replay, 1)
    return DiscoveryOptions(
        worker_id=settings.worker_id,
        api_server=_api_server(settings, environ) if settings.discovery == "kubernetes" else None,
        ports=ports,
        has_deletion_cost=settings.deletion_cost == "on",
        file=path or "",
        read_file=partial(read_wanted, path, settings.allowed_endpoints, usual) if path else None,
    )


def _api_server(settings: Settings, environ: Mapping[str, str]) -> ApiServer:
    place = (settings.discovery_namespace or "", settings.discovery_selector)
    if settings.discovery_url is not None:
        return ApiServer.at(settings.discovery_url, *place)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError(
            "WAYMARK_DISCOVERY is kubernetes, and this process runs in no pod: set WAYMARK_DISCOVERY_URL to the "
            "API server, or leave WAYMARK_DISCOVERY out"
        )
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ApiServer(url, f"{_ACCOUNT}/token", f"{_ACCOUNT}/ca.crt", *place)


def discovery(store: Store, settings: Settings, metrics: Metrics, asker: Asker) -> EngineDiscovery:
    allowed = AllowedEndpoints(settings.allowed_endpoints)
    return EngineDiscovery(store, metrics, discovery_options(settings, os.environ), Describer(asker, allowed))
