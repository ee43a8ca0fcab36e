"""A gateway in this process, over a real Redis and real sockets, in front of engines that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import pytest
from aiohttp import web

from tests.patience import patient, patient_settings
from tests.serving.wire import connections, served
from tests.tokenization.bounds import be_patient
from waymark.api.application import GatewayParts, create_gateway_admin
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.asked_pools import AskedPools
from waymark.decide.fail_open import StartupGate
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.domain.engines import EngineKind
from waymark.domain.names import Registration
from waymark.domain.targets import Target
from waymark.gateway.application import Gateway
from waymark.gateway.responses import Archive
from waymark.gateway.shapes import body_of_rejection
from waymark.runtime import gateway as runtime_gateway
from waymark.runtime import parts
from waymark.serving.connection import protocol
from waymark.store.reservations import Load
from waymark.store.store import Store

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """An engine. ``handler`` may be replaced at any time; ``asked`` are the requests that arrived, and their bodies."""

    url: str = ""
    handler: Handler | None = None
    asked: list[tuple[web.Request, bytes]] = field(default_factory=list)
    ended: int = 0
    """Requests whose handler has ended, also by a client that went away."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request, await request.read()))
        try:
            if self.handler is None:
                return web.json_response({"object": "made up", "path": request.path})
            return await self.handler(request)
        finally:
            self.ended += 1


@dataclass
class Running:
    """A gateway that runs."""

    client: httpx.AsyncClient
    engines: list[Engine]
    store: Store
    metrics: Metrics
    gateway: Gateway
    port: int

    async def post(self, body: Any = None, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return await self.client.post(path, json=chat("hello") if body is None else body, **more)

    async def loads(self) -> list[Load]:
        """The load of each engine, in the order of the engines."""
        (group,) = (await self.store.directory.groups()).values()
        found = await self.store.reservations.loads(group.group_id)
        claims = await self.store.directory.claims()
        by_url = {each.registration.target.address: found.get(each.publisher, Load()) for each in claims}
        return [by_url[engine.url] for engine in self.engines]

    async def requests(self) -> int:
        """Requests under way, by the loads of all engines."""
        return sum(load.requests for load in await self.loads())

    def value(self, name: str, **labels: str) -> float:
        """A sample of the metrics; ``name`` is without ``waymark_``."""
        found = self.metrics.registry.get_sample_value(f"waymark_{name}", labels)
        return 0.0 if found is None else found

    @property
    def asked(self) -> list[int]:
        """How many requests each engine got."""
        return [len(engine.asked) for engine in self.engines]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A conversation in turns, a user's first."""
    roles = ("user", "assistant")
    return {
        "model": "demo",
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)],
        **more,
    }


class Start(Protocol):
    def __call__(self, engines: int = 2, **settings: Any) -> Awaitable[Running]: ...


@pytest.fixture
async def start(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a gateway with that many engines and those settings; ``redis_url`` among them wins."""
    be_patient(monkeypatch)
    async with AsyncExitStack() as stack:

        async def begin(engines: int = 2, *, archive: Archive | None = None, **given: Any) -> Running:
            url = given.pop("redis_url", redis_url)
            bounds = {"request_seconds": given["request_seconds"]} if "request_seconds" in given else {}
            settings = Settings(redis_url=url, **patient_settings() | given)
            metrics = Metrics()
            store = parts.open_store(settings, metrics, keeps_answers=True)
            stack.push_async_callback(store.close)
            found = [await stack.enter_async_context(_engine()) for _ in range(engines)]
            for number, engine in enumerate(found):
                await store.registry.register(registration(engine.url, number))
            tokenizers = parts.tokenizers(settings, metrics)
            stack.push_async_callback(tokenizers.close)
            cache = runtime_gateway.response_cache(settings, metrics, store)
            asker = parts.asker(settings)
            stack.push_async_callback(asker.close)
            options = parts.api_options(settings, is_gateway=True)
            gate = StartupGate(store.polled_claims, settings.min_initial_workers)
            admin_parts = GatewayParts(gate, cache)
            admin = create_gateway_admin(store, options, metrics, admin_parts)
            responses = runtime_gateway.stored_responses(settings, metrics, store, archive)
            selector = Selector(store, parts.selection_options(settings), metrics, pools=AskedPools(asker, metrics))
            requests = RequestSelector(store, parts.prompt_options(settings), metrics, selector, tokenizers, gate)
            given_options, upstream = runtime_gateway.gateway_options(settings), runtime_gateway.upstream(settings)
            gateway = Gateway(store, given_options, metrics, selector, requests, upstream, admin, cache, responses)
            stack.push_async_callback(gateway.close)
            port = await stack.enter_async_context(
                served(gateway, protocol(connections(metrics, body_of_rejection, **bounds)))
            )
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patient(30), trust_env=False)
            )
            return Running(client, found, store, metrics, gateway, port)

        yield begin


def registration(url: str, number: int, model: str = "demo", **target: Any) -> Registration:
    """An engine without events."""
    return Registration(
        kind=EngineKind.NONE,
        instance_id=f"engine-{number}",
        tenant_id=target.pop("tenant_id", "default"),
        dp_rank=0,
        model_name=model,
        block_size=16,
        endpoint=None,
        replay_endpoint=None,
        lora_name=None,
        additional_salt=None,
        scope="instance",
        copies="count",
        sequence="publisher",
        target=Target(address=url, **target),
    )


@asynccontextmanager
async def _engine() -> AsyncIterator[Engine]:
    engine = Engine()
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


async def events(request: web.Request, *pieces: bytes, until: asyncio.Event | None = None) -> web.StreamResponse:
    """Answer with an event stream: all pieces but the last, then that one once ``until`` is set."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces[:-1]:
        await response.write(piece)
    if until is not None:
        await until.wait()
    await response.write(pieces[-1])
    await response.write_eof()
    return response


def texts(stream: Sequence[bytes]) -> str:
    return b"".join(stream).decode()
