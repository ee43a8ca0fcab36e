"""A picker at its bound of all bodies refuses those that hold most of it, and no other request."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.epp.proxy import Stream, destinations, refused
from tests.grpc_loops import events_of_this_loop as events_of_this_loop
from tests.hostile.beside import Times, watched
from tests.hostile.doors import is_up
from tests.live import start
from tests.patience import within
from tests.ports import unused_port
from tests.store.factories import registration
from waymark.domain.engines import EngineKind
from waymark.domain.targets import Target
from waymark.store.store import Store

pytestmark = pytest.mark.outside

GREEDY, PIECES, PIECE = 60, 14, b"x" * 500_000
BODY = PIECES * len(PIECE)
HELD_MAX = 256 * 2**20
#: So many bodies are below the bound together, but not beside this prompt.
FITTING, LARGE = HELD_MAX // BODY, 3_000_000
HONEST = 100
PLACE = "10.0.0.7:8000"


async def test_bodies_that_are_held_cost_no_other_request(redis_url: str, tmp_path: Path) -> None:
    store = Store.open(redis_url)
    target = Target(address=f"http://{PLACE}")
    await store.registry.register(registration("pod", kind=EngineKind.NONE, endpoint=None, target=target))
    await store.close()
    port, metrics_port = unused_port(), unused_port()
    settings: dict[str, Any] = {"epp_port": port, "epp_health_port": 0, "epp_drain_seconds": 0, "epp_tls": "false"}
    settings |= {"port": metrics_port, "probe_port": metrics_port, "request_seconds": 120}
    async with (
        start("epp", redis_url, tmp_path / "log", **settings) as live,
        channel_to(port) as honest,
        live.client() as client,
        watched(redis_url, live.pid) as processes,
    ):
        # Each on a connection of its own, as from so many proxies: none waits for another's window.
        channels = [channel_to(port) for _ in range(GREEDY)]
        held = [Stream(channel) for channel in channels]
        answers = [asyncio.create_task(held_body(stream)) for stream in held[:FITTING]]
        try:
            async with within(120):
                while await live.metric("waymark_epp_bodies_bytes") < FITTING * BODY:
                    await is_picked(honest)
                assert not any(task.done() for task in answers), "the bound is reached too early"
                await is_picked(honest, LARGE)
                answers += [asyncio.create_task(held_body(stream)) for stream in held[FITTING:]]
                while sum(task.done() for task in answers) < GREEDY - FITTING:
                    await is_picked(honest)
                for _ in range(HONEST):
                    await is_picked(honest)
                    cost = await processes.cost_of(partial(is_up, client))
                    assert not cost.is_late(Times()), cost
            assert {refused(await task)[0] for task in answers if task.done()} == {503}
            bytes_held = await live.metric("waymark_epp_bodies_bytes")
            assert HELD_MAX / 2 < bytes_held <= HELD_MAX, "few have given way"
        finally:
            for task in answers:
                task.cancel()
            for stream in held:
                stream.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            await asyncio.gather(*(channel.close() for channel in channels))


def channel_to(port: int) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


async def held_body(stream: Stream) -> Any:
    """Send all of a body but its end; return the answer, which comes if the body has to give way."""
    await stream.headers()
    answer = asyncio.create_task(stream.call.read())
    try:
        for _ in range(PIECES):
            if answer.done():
                break
            await stream.body(PIECE, is_end=False)
        return await answer
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return await answer  # it has ended before all was sent
    finally:
        answer.cancel()


async def is_picked(channel: Any, size: int = 5) -> None:
    stream = Stream(channel)
    answer = await stream.ask({"model": "m", "prompt": "a" * size}, "/v1/completions")
    assert destinations(answer) == [PLACE], answer
    stream.cancel()
