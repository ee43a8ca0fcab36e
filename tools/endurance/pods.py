"""Measures how long the discovery in an ingest worker takes to register every pod of a large cluster.

    python -m tools.endurance.pods [--pods 10000] [--asked] [--seconds 30]

A stub of the API server of Kubernetes lists new pods, with loopback addresses. Their annotations name the model and the
block size; with `--asked` they do not, and the worker asks each engine for both. The engines answer over HTTP, and
nothing listens at their event ports, so the worker keeps trying to connect, as to engines that are still starting.
`waymark ingest` and Redis are processes of their own. The command fails if not all pods are registered within
`--seconds` (longer if the machine is busy), if a warning says that Redis does not answer, or if the event loop of the
worker was blocked for longer than `tests.hostile` allows.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

from redis.asyncio import Redis

from tests.discovery.api_server import ApiServerStub, pod
from tests.e2e.redis_server import redis_server
from tests.hostile.beside import HELD_SECONDS, Processes
from tests.hostile.engine_server import GOOD
from tests.hostile.raw_server import http
from tests.listening import listening
from tests.live import Live, start
from tests.patience import patient, patient_settings
from tests.ports import unused_port
from waymark.store import keys

#: The annotations of a pod that spare the worker a request to its engine.
_SAID = {"type": "vLLM", "model": "llama", "block-size": "16"}
#: The program gives up after this multiple of the expected time, and shows the progress so far.
_GIVE_UP = 10


async def main(pods: int, seconds: float, *, is_asked: bool) -> bool:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        server = stack.enter_context(redis_server())
        await server.start()
        redis = await stack.enter_async_context(Redis(port=server.port, protocol=2))
        api = ApiServerStub()
        for number in range(1, pods + 1):
            address = f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
            api.put(pod(f"p{number:05}", address, annotations={} if is_asked else _SAID))
        api.status = 503  # until the worker has started
        await api.start()
        stack.push_async_callback(api.stop)
        port, probes = unused_port(), unused_port()
        await stack.enter_async_context(listening(_serve, port, host="0.0.0.0"))
        settings = patient_settings() | {
            "port": probes,
            "probe_port": probes,
            "discovery": "kubernetes",
            "discovery_url": api.url,
            "discovery_namespace": "serving",
            "discovery_ports": f"api={port},events=9,replay=0",
        }
        live = await stack.enter_async_context(start("ingest", server.url, directory / "log", **settings))
        api.status = 200
        return await _watched(live, redis, pods, seconds)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests on one connection, like an engine."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        path = head.split(b" ", 2)[1].decode()
        writer.write(http(GOOD[path]) if path in GOOD else http(b"", status="404 x"))
        await writer.drain()


async def _watched(live: Live, redis: Redis, pods: int, seconds: float) -> bool:
    """Follow the registrations, and request ``/health`` in the meantime. Return whether all bounds were kept."""
    worker, began = Processes([live.pid]), monotonic()
    cpu, held, there = worker.on_cpu(), 0.0, 0
    async with live.client() as client:
        while there < pods and monotonic() - began < _GIVE_UP * seconds:
            before = worker.on_cpu()
            (await client.get("/health")).raise_for_status()
            held = max(held, worker.on_cpu() - before)
            earlier, there = there, await redis.hlen(keys.PUBLISHERS)
            if there // 1000 > earlier // 1000:
                spent = worker.on_cpu() - cpu
                print(f"{there:6,} registered after {monotonic() - began:5.1f} s, {spent:5.1f} s of CPU", flush=True)
            await asyncio.sleep(0.05)
    took, spent = monotonic() - began, worker.on_cpu() - cpu
    lines = [line.split(" ", 2)[2] for line in live.said().splitlines() if " WARNING " in line or " ERROR " in line]
    for line, count in Counter(line.partition('"')[0] for line in lines).most_common():
        print(f"{count:6,} warnings: {line}")
    away = sum("redis" in line.lower() for line in lines)
    print(
        f"{there:,} of {pods:,} pods registered after {took:.1f} s, {spent:.1f} s of them on the CPU; "
        f"{away} warnings about Redis; an answer of /health was held for {held:.2f} s of CPU"
    )
    return there == pods and took <= patient(seconds) and not away and held <= patient(HELD_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Register the pods of a large cluster by discovery, and time it.")
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30, help="for all pods, on a quiet machine")
    parser.add_argument("--asked", action="store_true", help="every engine is asked what it serves")
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(main(arguments.pods, arguments.seconds, is_asked=arguments.asked)) else 1)
