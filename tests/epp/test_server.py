"""Ports, certificates, health, and the end of a picker that still has requests."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.conftest import wait_until
from tests.epp.conftest import StartEpp
from tests.epp.proxy import Stream, destinations
from tests.patience import patient, within
from waymark.base.errors import SettingsError
from waymark.epp import radix_index, scores
from waymark.epp.server import EppOptions, HealthService
from waymark.store.store import Store

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


@pytest.fixture
async def store() -> Any:
    """What is tested here does not depend on Redis."""
    store = Store.open("memory://")
    yield store
    await store.close()


async def check(channel: Any, name: str) -> Any:
    async with within(10.0):
        return (await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_health_is_told_on_both_ports(store: Store, start_epp: StartEpp) -> None:
    epp = await start_epp(store)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{epp.server.health_port}") as health:

        async def is_ready() -> bool:
            return bool(await check(health, "readiness") == SERVING)

        await wait_until(is_ready, "it is ready")
        for channel in (epp.channel, health):
            assert [await check(channel, name) for name in NAMES] == [SERVING] * 4
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel, "another")
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_picker_that_ends_says_so_takes_what_comes_and_finishes_what_it_has(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    options = EppOptions("127.0.0.1", 0, 0, has_tls=False, drain_seconds=3.0, finish_seconds=60.0)
    epp = await start_epp(store, options=options)
    health = HealthStub(epp.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    await wait_until(lambda: epp.server._health.is_ready, "it is ready")
    running = epp.stream()
    destinations(await running.ask(CHAT))
    await running.request_back()
    epp.stop.set()
    async with within(10.0):
        async for answer in health:
            if answer.status == NOT_SERVING:
                break
    assert await check(epp.channel, "liveness") == SERVING
    late = epp.stream()
    destinations(await late.ask(CHAT))
    late.cancel()
    await running.answered()
    assert await running.content(b"data: a\n\n") == b"data: a\n\n"
    assert not epp.serving.done()
    assert await running.content(b"data: [DONE]\n\n", is_end=True)
    await running.close()
    async with within(20.0):
        await epp.serving


async def test_a_picker_that_is_done_refuses_new_requests(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    epp = await start_epp(store)
    epp.stop.set()
    async with within(20.0):
        await epp.serving
    assert await epp.stream().status() == grpc.StatusCode.UNAVAILABLE


async def certificate(port: int) -> bytes:
    """What the port shows to a client that does not check it."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=patient(10.0))
    return pem.encode()


async def test_a_certificate_is_made_where_none_is_given(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    epp = await start_epp(store, options=EppOptions("127.0.0.1", 0, None, drain_seconds=0.0, finish_seconds=0.0))
    credentials = grpc.ssl_channel_credentials(await certificate(epp.server.port))
    options = [("grpc.ssl_target_name_override", "waymark-epp")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{epp.server.port}", credentials, options) as channel:
        assert destinations(await Stream(channel).ask(CHAT))
    assert await epp.stream().status() == grpc.StatusCode.UNAVAILABLE, "plain text is refused"


async def test_certificates_of_files_may_change(
    store: Store, pods: dict[str, str], start_epp: StartEpp, tmp_path: Path
) -> None:
    cert_file, key_file = tmp_path / "tls.crt", tmp_path / "tls.key"

    def write() -> Any:
        authority = trustme.CA()
        made = authority.issue_cert("epp.example")
        made.private_key_pem.write_to_path(key_file)
        cert_file.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return authority

    async def serves(authority: Any) -> bool:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        options = [("grpc.ssl_target_name_override", "epp.example"), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{epp.server.port}", credentials, options) as channel:
            try:
                return bool(await check(channel, "liveness") == SERVING)
            except grpc.aio.AioRpcError:
                return False

    first = write()
    options = EppOptions("127.0.0.1", 0, None, True, cert_file, key_file, drain_seconds=0.0, finish_seconds=0.0)
    epp = await start_epp(store, options=options)
    assert await serves(first)
    second = write()

    async def has_changed() -> bool:
        return await serves(second)

    await wait_until(has_changed, "the new certificate is shown")
    cert_file.unlink()
    assert await serves(second), "a file that is gone leaves the last one in use"


async def test_what_cannot_be_used_is_named(store: Store, start_epp: StartEpp, tmp_path: Path) -> None:
    missing = EppOptions("127.0.0.1", 0, None, True, tmp_path / "no.crt", tmp_path / "no.key")
    with pytest.raises(SettingsError, match="WAYMARK_EPP_TLS"):
        await start_epp(store, options=missing)
    first = await start_epp(store)
    with pytest.raises(SettingsError, match="WAYMARK_EPP_PORT"):
        await start_epp(store, options=EppOptions("127.0.0.1", first.server.port, None, has_tls=False))


async def test_a_watcher_that_reads_nothing_holds_up_nobody() -> None:
    health = HealthService()
    never = asyncio.Event()

    class Slow:
        async def write(self, _: Any) -> None:
            await never.wait()

    request = health_pb2.HealthCheckRequest(service="readiness")
    watching = asyncio.create_task(health.Watch(request, Slow()))
    await asyncio.sleep(0)
    health.set(is_ready=True)
    assert (await health.Check(request, None)).status == SERVING
    watching.cancel()


@pytest.mark.parametrize(
    "path",
    [
        f"{scores.SERVICE}/GetPodScores",
        f"{scores.PREFIX_SERVICE}/MatchExternalKvPrefix",
        f"{radix_index.SERVICE}/Subscribe",
        f"{radix_index.SERVICE}/Publish",
    ],
)
async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    store: Store, start_epp: StartEpp, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    epp = await start_epp(store)
    call = epp.channel.stream_stream(f"/{path}", request_serializer=None, response_deserializer=None)()
    await call.write(b"\xff" * 9)
    await call.done_writing()
    async with within(10.0):
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
