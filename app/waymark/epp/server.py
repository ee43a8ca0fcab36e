"""The gRPC servers of an endpoint picker: its port, with bounds, and one for health checks alone.

Envoy does not check the certificate of an endpoint picker unless its configuration asks for it. So a self-signed one is
enough to have no plain text on the wire. The picker makes it when it starts, and writes it nowhere.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from waymark.base.errors import SettingsError
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.decide.reported import ReportedPrompts
from waymark.epp import messages
from waymark.epp.process_call import CallContext, ProcessCall, StreamCut, Streams
from waymark.epp.radix_index import RadixIndex
from waymark.epp.scores import PodScores, PrefixMatches

IDLE_SECONDS = 600.0
"""After this time without a message the stream of a request is ended. Envoy ends a request without bytes after 300 s,
so such a stream is forgotten."""

INDEX_STREAMS_MAX = 256
"""Streams of ``RadixIndex``. A gateway of smg opens two and keeps them, so these are 128 gateways."""


@record(frozen=True, slots=True)
class EppOptions:
    """The options of an endpoint picker. Times are in seconds."""

    host: str = "0.0.0.0"
    port: int = 9002
    """The port; 0 for any free one."""
    health_port: int | None = 9003
    """None: health is answered on ``port`` alone."""
    has_tls: bool = True
    cert_file: Path | None = None
    key_file: Path | None = None
    streams_max: int = 4096
    index_streams_max: int = INDEX_STREAMS_MAX
    prefix_seconds: float = 0.1
    """How long an answer to SGLang's router may take, which waits no longer."""
    drain_seconds: float = 5.0
    finish_seconds: float = 60.0


log = logging.getLogger(__name__)

#: Bytes of one message beyond those of the largest body. Envoy sends what it has buffered of a body in one message.
#: gRPC ends the stream of a larger message before it is read, and Envoy answers that with 500.
MORE_BYTES_MAX = 4 * 2**20
#: How long a certificate made here is valid.
_YEARS = 10
#: The most streams of a health port.
_HEALTH_STREAMS_MAX = 256
_LOOK_SECONDS = 1.0
#: gRPC accepts this many times the allowed streams, because a stream that gives up its place needs a moment to end.
_HEADROOM = 4
_TOO_MANY = "as many requests as WAYMARK_CONNECTIONS_MAX allows are under way; try again in a moment"

_STATUS_OF: Mapping[str, Any] = {
    "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    "idle": grpc.StatusCode.DEADLINE_EXCEEDED,
    "crowded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unexpected": grpc.StatusCode.INVALID_ARGUMENT,
}

WaitsFor = Callable[[], Awaitable[str | None]]
"""The condition that the process waits for before it can pick targets, as a sentence; None: it is ready."""


class Processor(ext_proc.ExternalProcessorServicer):  # type: ignore[misc]
    """``ExternalProcessor.Process``: one call for each HTTP request."""

    def __init__(self, picker: CallContext, streams_max: int) -> None:
        self._picker = picker
        self._streams = Streams(streams_max, picker.metrics)

    async def Process(self, _: Any, context: Any) -> None:
        metrics = self._picker.metrics

        async def read() -> Any:
            try:
                message = await context.read()
            except DecodeError:
                raise StreamCut("unexpected", "a message is not a ProcessingRequest") from None
            return None if message is grpc.aio.EOF else message

        place = self._streams.enter(context.peer())
        if place is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_MANY)
            return
        try:
            await ProcessCall(self._picker, place, read, context.write).run()
        except StreamCut as cut:
            metrics.epp_streams_cut.labels(reason=cut.reason).inc()
            await context.abort(_STATUS_OF[cut.reason], cut.sentence)
        finally:
            place.leave()


class EppServer:
    """``async with EppServer(...) as server``, then ``await server.serve(stop)``."""

    def __init__(self, options: EppOptions, picker: CallContext, prompts: ReportedPrompts, waits_for: WaitsFor) -> None:
        self._options = options
        self._waits_for = waits_for
        self._health = HealthService(messages.SERVICE)
        self.port = self.health_port = 0
        """The bound ports; 0 for a missing one."""
        message_bytes_max = picker.bodies.one_max + MORE_BYTES_MAX
        self._server = _new_server(_HEADROOM * options.streams_max + options.index_streams_max, message_bytes_max)
        ext_proc.add_ExternalProcessorServicer_to_server(Processor(picker, options.streams_max), self._server)
        self._server.add_generic_rpc_handlers((PodScores(picker.selector, picker.tenant_id).handler,))
        matches = PrefixMatches(prompts, picker.metrics, options.prefix_seconds)
        self._server.add_generic_rpc_handlers((matches.handler,))
        index = RadixIndex(prompts, picker.metrics, options.index_streams_max)
        self._server.add_generic_rpc_handlers((index.handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health_server = _new_server(_HEALTH_STREAMS_MAX, MORE_BYTES_MAX)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)

    async def __aenter__(self) -> EppServer:
        options = self._options
        credentials = _credentials(options)
        self.port = _bound(self._server, options.host, options.port, credentials, "WAYMARK_EPP_PORT")
        await self._server.start()
        if options.health_port is not None:
            name = "WAYMARK_EPP_HEALTH_PORT"
            self.health_port = _bound(self._health_server, options.host, options.health_port, None, name)
            await self._health_server.start()
        log.info("the endpoint picker listens", extra=fields(port=self.port, health_port=self.health_port))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._health_server.stop(0)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; then report that, accept late requests for a while, and finish those that have
        begun.
        """
        watching = asyncio.create_task(self._watch())
        try:
            await stop.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._health.set(is_ready=False)
        await asyncio.sleep(self._options.drain_seconds)
        self._health.end()
        await self._server.stop(self._options.finish_seconds)

    async def _watch(self) -> None:
        """Become ready as soon as targets can be picked. From then on stay ready, because later failures are handled
        without Redis."""
        logged = None
        while (waits_for := await self._waits_for()) is not None:
            if waits_for != logged:
                log.info("the endpoint picker is not ready", extra=fields(waits_for=waits_for))
                logged = waits_for
            await asyncio.sleep(_LOOK_SECONDS)
        self._health.set(is_ready=True)


def _new_server(streams_max: int, message_bytes_max: int) -> Any:
    return grpc.aio.server(
        maximum_concurrent_rpcs=streams_max,
        options=[
            ("grpc.so_reuseport", 0),  # a taken port is an error
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_concurrent_streams", streams_max),
            # Envoy may ping idle connections; without this its connection would be closed.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # A peer that disappears silently is noticed.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ],
    )


def _credentials(options: EppOptions) -> Any:
    if options.cert_file is not None and options.key_file is not None:
        return _from_files(options.cert_file, options.key_file)
    return self_signed() if options.has_tls else None


def _bound(server: Any, host: str, port: int, credentials: Any, variable: str) -> int:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound_port = (
            server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
        )
    except RuntimeError:
        bound_port = 0
    if not bound_port:
        raise SettingsError(f"{variable}: cannot listen on {place}; is another process there?")
    return int(bound_port)


# ``grpc.health.v1``: whether a picker lives, and whether it takes requests.


ALIVE, READY = "liveness", "readiness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of the server: it is alive from the start; its other names become ready, or not, all at once.

    A watcher that does not read does not delay others.
    """

    def __init__(self, *services: str) -> None:
        """``services`` are names beside ``liveness``, ``readiness`` and that of the whole server, which is empty."""
        self._ready_names = frozenset({"", READY, *services})
        self.is_ready = False
        self._has_ended = False
        self._changed = asyncio.Event()

    def set(self, *, is_ready: bool) -> None:
        """Report whether the server is ready, to clients that ask from now on and to those that watch."""
        self.is_ready = is_ready
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """End every watch, so that the server can end."""
        self._has_ended = True
        self.set(is_ready=False)

    def _status(self, service: str) -> Any:
        if service == ALIVE:
            return SERVING
        if service not in self._ready_names:
            return _UNKNOWN
        return SERVING if self.is_ready else NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._has_ended:
                return
            await changed.wait()


# ---- certificates ----------------------------------------------------------------------------------


def self_signed() -> Any:
    """Return server credentials with a key and a certificate made here."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "waymark-epp")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("waymark-epp"), *_own_names()]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(pem, certificate.public_bytes(serialization.Encoding.PEM))])


def _own_names() -> list[Any]:
    from cryptography import x509

    name = socket.gethostname()
    # A host name may have characters that no certificate takes.
    return [x509.DNSName(name)] if name.isascii() and 0 < len(name) < 64 else []


def _from_files(cert_file: Path, key_file: Path) -> Any:
    """Return server credentials from PEM files, which are read again for new connections after a change.

    ``SettingsError`` if they cannot be read. A file that cannot be read later leaves the last pair in use.
    """
    try:
        first = _read_pair(cert_file, key_file)
    except OSError as exc:
        raise SettingsError(f"the certificate of WAYMARK_EPP_TLS cannot be used: {exc}") from None
    return grpc.dynamic_ssl_server_credentials(_certificates(first), _reader_of(cert_file, key_file, first), False)


def _reader_of(cert_file: Path, key_file: Path, first: tuple[bytes, bytes]) -> Callable[[], Any]:
    last = first

    def changed() -> Any:
        """Return the new pair, or None if it is unchanged."""
        nonlocal last
        try:
            pair = _read_pair(cert_file, key_file)
        except OSError as exc:
            log.warning("the certificate cannot be read; the previous one stays in use", extra=fields(error=str(exc)))
            return None
        if pair == last:
            return None
        last = pair
        return _certificates(pair)

    return changed


def _read_pair(cert_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    return key_file.read_bytes(), cert_file.read_bytes()


def _certificates(pair: tuple[bytes, bytes]) -> Any:
    return grpc.ssl_server_certificate_configuration([pair])
