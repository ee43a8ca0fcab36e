"""An endpoint picker with its servers in the test's loop, over a store that is emulated or real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import pytest

from tests.decide.conftest import MakeSelector, make_selector, metrics, store
from tests.epp.proxy import Stream
from tests.grpc_loops import events_of_this_loop
from tests.patience import patient, within
from tests.store.factories import registration
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.reported import ReportedPrompts
from waymark.decide.under_way import RequestsUnderWay
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName
from waymark.domain.targets import Target
from waymark.epp.answers import BodyBytes
from waymark.epp.process_call import CallContext
from waymark.epp.server import EppOptions, EppServer
from waymark.runtime import parts
from waymark.store.reservations import Load
from waymark.store.store import Store

__all__ = ["events_of_this_loop", "make_selector", "metrics", "store"]

PLACES = {f"pod-{n}": f"10.0.0.{n}:8000" for n in (1, 2, 3)}


@dataclass
class Epp:
    """A running one, and a channel to it."""

    server: EppServer
    channel: Any
    stop: asyncio.Event
    serving: asyncio.Task[None]
    streams: list[Stream] = field(default_factory=list)
    """All of them: gRPC cancels a call that nobody holds, and its reservation ends."""

    def stream(self) -> Stream:
        self.streams.append(Stream(self.channel))
        return self.streams[-1]


class StartEpp(Protocol):
    async def __call__(self, store: Store, **settings: Any) -> Epp: ...


@pytest.fixture
async def start_epp(make_selector: MakeSelector, metrics: Metrics) -> AsyncIterator[StartEpp]:
    """``options`` and ``body_max`` are the servers', all others settings of the selection."""
    async with AsyncExitStack() as stack:

        async def start(
            store: Store,
            *,
            options: EppOptions | None = None,
            bodies: tuple[int, int] = (2**20, 2**22),
            request_seconds: float = 60.0,
            idle_seconds: float = 60.0,
            **settings: Any,
        ) -> Epp:
            selector = make_selector(store, **{"loads_ms": 0} | settings)
            under_way = RequestsUnderWay(selector.selector, store.begin)
            picker = CallContext(
                selector,
                under_way,
                metrics,
                BodyBytes(*bodies, metrics),
                "default",
                patient(request_seconds),
                patient(idle_seconds),
            )

            # A query that waits for a busy machine is still to be answered.
            asked = parts.prompt_options(Settings(**{"query_deadline_ms": 60_000} | settings))
            prompts = ReportedPrompts(store, selector, asked, metrics, "default")

            async def waits_for() -> str | None:
                return None

            given = options or EppOptions("127.0.0.1", 0, 0, has_tls=False, drain_seconds=0.0, finish_seconds=0.1)
            server = await stack.enter_async_context(EppServer(given, picker, prompts, waits_for))
            stop = asyncio.Event()
            serving = asyncio.create_task(server.serve(stop))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))

            async def end() -> None:
                stop.set()
                async with within(20.0):
                    await serving
                await under_way.settle()

            stack.push_async_callback(end)
            return Epp(server, channel, stop, serving)

        yield start


async def register(store: Store, name: str, model: str = "llama", **target: Any) -> None:
    said: dict[str, Any] = {"address": f"http://{PLACES[name]}" if name in PLACES else None} | target
    await store.registry.register(
        registration(name, kind=EngineKind.NONE, model_name=model, endpoint=None, target=Target(**said))
    )


@pytest.fixture
async def pods(store: Store) -> dict[str, str]:
    """Three targets, by instance their ``host:port``."""
    for name in PLACES:
        await register(store, name)
    return PLACES


async def loads(store: Store) -> dict[str, Load]:
    """The loads with requests, by ``host:port``."""
    group = GroupName("default", "llama")
    table, entry = await store.reader.table(group), await store.directory.group(group)
    assert table is not None
    assert entry is not None
    found = await store.reservations.loads(entry.group_id)
    return {PLACES[table.publishers[publisher].instance_id]: load for publisher, load in found.items() if load.requests}
