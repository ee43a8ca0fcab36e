"""Measures how much memory and CPU misbehaving clients cost an endpoint picker, and how they affect other clients.

    python -m tools.benchmarks.hostile --redis-url redis://127.0.0.1:6379/0

One connection sends a message of 1 GB; then others open 10,000 streams and send nothing more on them. Meanwhile another
client requests decisions, one at a time. The Redis has to be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from tests.e2e.test_envoy import Picker
from tests.epp.proxy import Stream, destinations
from tests.store.factories import registration
from waymark.domain.engines import EngineKind
from waymark.domain.targets import Target
from waymark.store.store import Store

_STREAMS, _CONNECTIONS = 10_000, 10
_BODY = {"model": "llama", "prompt": list(range(512))}
_ANY = {"request_serializer": None, "response_deserializer": None}


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def channel(port: int) -> Any:
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited)


async def register_targets(store: Store) -> list[str]:
    """Register three targets of the model llama, and return their addresses."""
    addresses = [f"http://10.0.0.{number}:8000" for number in range(3)]
    for number, address in enumerate(addresses):
        target = Target(address=address)
        await store.registry.register(
            registration(f"pod-{number}", kind=EngineKind.NONE, model_name="llama", endpoint=None, target=target)
        )
    return addresses


async def picks(port: int, count: int) -> tuple[float, int]:
    """Return the median time of ``count`` decisions in milliseconds, and how many requests were refused in the
    meantime."""
    times: list[float] = []
    refused = 0
    async with channel(port) as own:
        while len(times) < count:
            began = perf_counter()
            stream = Stream(own)
            try:
                assert destinations(await stream.ask(_BODY, "/v1/completions"))
                times.append(1000 * (perf_counter() - began))
            except grpc.aio.AioRpcError:
                refused += 1
            stream.cancel()
    return statistics.median(times), refused


async def huge(port: int) -> str:
    """Send 1 GB as one message. Return the status with which the stream ends."""
    async with channel(port) as own:
        call = own.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process", **_ANY)()
        with suppress(grpc.aio.AioRpcError):  # the status has the reason
            await call.write(bytes(10**9))
        return str((await call.code()).name)


async def endless(port: int, stack: AsyncExitStack) -> list[Any]:
    """Open streams that never end."""
    calls = []
    for _ in range(_CONNECTIONS):
        own = await stack.enter_async_context(channel(port))
        process = own.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process", **_ANY)
        calls += [process() for _ in range(_STREAMS // _CONNECTIONS)]
    return calls


async def main(url: str) -> None:
    async with AsyncExitStack() as stack:
        store = Store.open(url)
        stack.push_async_callback(store.close)
        await register_targets(store)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        picker = Picker(Path(directory), url, 0, epp_tls="false")
        stack.callback(picker.end)
        await picker.start()
        print("| What a peer does | Status | Memory, MiB | Decisions of another peer: median, ms | refused |")
        print("|---|---|---|---|---|")
        alone, lost = await picks(picker.port, 100)
        print(f"| nothing | | {resident(picker.pid):.0f} | {alone:.1f} | {lost} |", flush=True)
        sending = asyncio.create_task(huge(picker.port))
        beside, lost = await picks(picker.port, 100)
        status = await sending
        memory = resident(picker.pid)
        print(f"| sends a message of 1 GB | {status} | {memory:.0f} | {beside:.1f} | {lost} |", flush=True)
        calls = await endless(picker.port, stack)
        beside, lost = await picks(picker.port, 100)
        memory = resident(picker.pid)
        status = f"{sum(call.done() for call in calls):,} refused"
        print(f"| opens {_STREAMS:,} streams | {status} | {memory:.0f} | {beside:.1f} | {lost} |", flush=True)
        for call in calls:
            call.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    asyncio.run(main(parser.parse_args().redis_url))
