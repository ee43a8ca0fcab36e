"""``waymark epp`` as a process: the ports of its flags, and what health checks see of its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests import forked
from tests.conftest import wait_until
from tests.e2e.conftest import EXIT_SECONDS, READY_SECONDS
from tests.grpc_loops import events_of_this_loop as events_of_this_loop
from tests.listening import listening, port_of
from tests.patience import patient, within
from tests.ports import unused_port

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def begun(flags: list[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "waymark", "epp", *flags]
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)


async def test_health_is_asked_on_a_port_of_its_own_until_the_process_has_ended(redis_url: str, tmp_path: Path) -> None:
    port, health_port = unused_port(), unused_port()
    flags = ["--redis-url", redis_url, "--host", "127.0.0.1", "--port", str(port), "--health-port", str(health_port)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {"WAYMARK_PROBE_PORT": "0", "WAYMARK_EPP_DRAIN_SECONDS": "2"}
    log = tmp_path / "epp.log"
    process = begun(flags, environ, log)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            stub, request = HealthStub(channel), health_pb2.HealthCheckRequest(service="readiness")

            async def is_ready() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return bool((await stub.Check(request, timeout=patient(5.0))).status == SERVING)
                except grpc.aio.AioRpcError:
                    return False

            await wait_until(is_ready, "it is ready", READY_SECONDS)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
                with pytest.raises(grpc.aio.AioRpcError):  # the port for Envoy has TLS
                    await HealthStub(plain).Check(request, timeout=patient(5.0))
            watch = stub.Watch(request)
            async with within(20.0):
                assert (await watch.read()).status == SERVING
                process.send_signal(signal.SIGTERM)
                assert (await watch.read()).status == NOT_SERVING
        await wait_until(lambda: process.poll() is not None, "it has ended", EXIT_SECONDS)
        assert process.returncode == 0, log.read_text()
    finally:
        process.kill()
        process.wait(patient(EXIT_SECONDS))


def test_a_redis_that_other_processes_cannot_reach_is_refused() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    done = subprocess.run(
        [sys.executable, "-m", "waymark", "epp"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 2
    assert "WAYMARK_REDIS_URL" in done.stderr


async def test_a_signal_counts_while_redis_has_not_answered_yet(tmp_path: Path) -> None:
    """Process 1 of a container gets no signal that it does not listen to: it would be killed a minute later."""
    asked = asyncio.Event()

    async def silent(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {"WAYMARK_PROBE_PORT": "0", "WAYMARK_EPP_DRAIN_SECONDS": "0"}
    log = tmp_path / "epp.log"
    async with listening(silent) as server:
        flags = ["--redis-url", f"redis://127.0.0.1:{port_of(server)}/0", "--host", "127.0.0.1", "--health-port", "0"]
        with log.open("wb") as output:
            process = forked.start(["epp", *flags, "--port", str(unused_port())], environ, output, ROOT)
        try:
            async with within(READY_SECONDS):
                await asked.wait()
            process.send_signal(signal.SIGTERM)
            await wait_until(lambda: process.poll() is not None, "it has ended", EXIT_SECONDS)
            assert process.returncode == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
