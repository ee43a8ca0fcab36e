"""The doors, as their owners open them: which processes run, what a stranger learns of them, and what is asked beside.

What an attacker does at a door is in the file of the door's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import wait_until
from tests.e2e.conftest import Api, Engines
from tests.hostile.beside import GROWTH_MIB, Check
from tests.live import Live, start
from tests.ports import unused_port
from tests.store.factories import registration
from waymark.domain.engines import EngineKind
from waymark.domain.targets import Target
from waymark.simulator.engine import EngineSpeed, build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.workload import SimulatedPrompt, mark_of
from waymark.store.store import Store
from waymark.tokenization import rendering

#: What is hostile has this name, what is honest that one: nothing that the first says may change the second.
HOSTILE, HONEST = "hostile", "honest"
_PROMPT = tuple(range(1, 41))
_MIB = 2**20
#: Until a block that an honest engine stores is found.
_VISIBLE_SECONDS = 3.0
#: What a rendering may take, and while it waits its tokenizer a text of 2 MiB, of which each byte takes some 300.
_MODEL_MIB = rendering.MEMORY_BYTES_MAX / _MIB + 2 * 300


@dataclass(frozen=True, slots=True)
class Opened:
    """A door that is open."""

    processes: list[Live]
    target: Mapping[str, Any]
    """What a stranger knows, as JSON."""
    checks: Mapping[str, Check]
    slow: Mapping[str, Check] = field(default_factory=dict)
    growth_mib: float = GROWTH_MIB


Open = Callable[[str, Path], AbstractAsyncContextManager[Opened]]


def equal(found: object, expected: object) -> None:
    assert found == expected, f"it is {found!r}, not {expected!r}"


async def is_up(client: httpx.AsyncClient) -> None:
    equal((await client.get("/health")).status_code, 200)


# ---- a service that follows engines ----------------------------------------------------------------


@asynccontextmanager
async def service(redis_url: str, directory: Path, /, role: str = "serve", **settings: Any) -> AsyncIterator[Opened]:
    """A service with an honest engine, whose old blocks are asked for, and whose new ones have to be found."""
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(start(role, redis_url, directory / "log", **settings))
        client = await stack.enter_async_context(live.client())
        api, engines = Api(client), Engines(stack, HONEST)
        checks: dict[str, Check] = {"health": partial(is_up, client)}
        slow: dict[str, Check] = {}
        if role == "serve":
            engine = await engines.open(api, HONEST, gpu_blocks=8192)
            publisher = engine.publisher
            await wait_until(lambda: publisher.subscribers > 0, "the honest engine is followed")
            await engine.prefill(SimulatedPrompt(_PROMPT))
            await engines.agree([api], _PROMPT)
            numbers = count(100)

            async def sees_new() -> None:
                tokens = (next(numbers),) * 8
                await engine.prefill(SimulatedPrompt(tokens))
                await engines.agree([api], tokens, seconds=_VISIBLE_SECONDS)

            slow["new blocks"] = sees_new
        else:
            answer = await client.post(
                "/register",
                json=engines.group
                | {"instance_id": HONEST, "type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "block_size": 4},
            )
            equal(answer.status_code, 200)
        expected = await api.query(_PROMPT, **engines.group)

        async def is_right() -> None:
            equal(await api.query(_PROMPT, **engines.group), expected)

        checks["query"] = is_right
        target = {"url": live.url, "port": live.port, "directory": str(directory)}
        yield Opened([live], target, checks, slow)


@asynccontextmanager
async def template(redis_url: str, directory: Path) -> AsyncIterator[Opened]:
    models = directory / "models"
    models.mkdir()
    async with service(redis_url, directory, role="query", tokenizers_dir=str(models)) as opened:
        target = {**opened.target, "models": str(models)}
        yield Opened(opened.processes, target, opened.checks, opened.slow, _MODEL_MIB)


@asynccontextmanager
async def following(redis_url: str, directory: Path) -> AsyncIterator[Opened]:
    """A service that does all that a stranger may have a part in: it discovers, scrapes, and asks engines for ids."""
    port, engine_port = unused_port(), unused_port()
    async with service(
        redis_url,
        directory,
        tokenizers='{"hostile": "engine:"}',
        gauges_seconds=0.5,
        discovery="kubernetes",
        discovery_url=f"http://127.0.0.1:{port}",
        discovery_namespace="serving",
        discovery_ports=f"api={engine_port}",
    ) as opened:
        target = {**opened.target, "api_port": port, "engine_port": engine_port}
        yield Opened(opened.processes, target, opened.checks, opened.slow)


# ---- a gateway -------------------------------------------------------------------------------------


def target_of(instance_id: str, url: str, model: str) -> Any:
    """The registration of an engine without events."""
    kind = EngineKind.NONE
    return registration(instance_id, kind=kind, model_name=model, endpoint=None, target=Target(address=url))


@asynccontextmanager
async def gateway(redis_url: str, directory: Path) -> AsyncIterator[Opened]:
    """A gateway before two engines: an honest one, and one that is whatever an attacker makes of it."""
    port = unused_port()
    async with AsyncExitStack() as stack:
        engine = build_engine("tcp://127.0.0.1:0", block_size=16)
        await stack.enter_async_context(engine.publisher)
        http = await stack.enter_async_context(
            EngineHttp(
                engine,
                host="127.0.0.1",
                port=0,
                model_name=HONEST,
                block_size=16,
                gpu_blocks=4096,
                pace=EngineSpeed(),
            )
        )
        store = Store.open(redis_url)
        stack.push_async_callback(store.close)
        await store.registry.register(target_of(HONEST, http.url, HONEST))
        await store.registry.register(target_of(HOSTILE, f"http://127.0.0.1:{port}", HOSTILE))
        settings = {"answers": "cache=memory", "gateway_idle_seconds": 5}
        live = await stack.enter_async_context(start("gateway", redis_url, directory / "log", **settings))
        client = await stack.enter_async_context(live.client())
        numbers = count()

        async def is_answered() -> None:
            text = f"hello {next(numbers)}"
            body = {"model": HONEST, "messages": [{"role": "user", "content": text}]}
            answer = await client.post("/v1/chat/completions", json=body)
            equal(answer.status_code, 200)
            said = answer.json()["choices"][0]["message"]["content"]
            equal(said, "".join(f"{mark_of(text)}.{n} " for n in range(16)))

        target = {"url": live.url, "port": live.port, "engine_port": port}
        yield Opened([live], target, {"health": partial(is_up, client), "chat": is_answered})


# ---- a picker --------------------------------------------------------------------------------------


@asynccontextmanager
async def picker_stream(redis_url: str, directory: Path) -> AsyncIterator[Opened]:
    """An endpoint picker with small bounds, so that an attacker reaches them."""
    import grpc  # reads the environment of the process when it is imported, and takes long

    from tests.epp.proxy import Stream, destinations

    port, metrics_port = unused_port(), unused_port()
    address = "http://10.0.0.7:8000"
    async with AsyncExitStack() as stack:
        store = Store.open(redis_url)
        stack.push_async_callback(store.close)
        await store.registry.register(target_of(HONEST, address, HONEST))
        live = await stack.enter_async_context(
            start(
                "epp",
                redis_url,
                directory / "log",
                port=metrics_port,
                probe_port=metrics_port,
                epp_port=port,
                epp_health_port=0,
                epp_tls="false",
                connections_max=256,
                epp_drain_seconds=0,
                finish_seconds=1,
                max_body_bytes=2 * _MIB,
                request_seconds=5,
            )
        )
        client = await stack.enter_async_context(live.client())
        own = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        channel = await stack.enter_async_context(own)

        async def is_picked() -> None:
            stream = Stream(channel)
            try:
                answer = await stream.ask({"model": HONEST, "prompt": "hello"}, "/v1/completions")
                equal(destinations(answer), [address.removeprefix("http://")])
            finally:
                stream.cancel()
                with suppress(asyncio.CancelledError):
                    await stream.call.code()

        target = {"picker_port": port, "url": live.url, "port": live.port}
        yield Opened([live], target, {"health": partial(is_up, client), "pick": is_picked})


#: What is attacked, by the name of the attacker's file. Doors with the same opening are of the same processes.
DOORS: dict[str, Open] = {
    "engine_client": following,
    "engine_server": following,
    "template": template,
    "gateway_client": gateway,
    "gateway_engine": gateway,
    "picker_stream": picker_stream,
    "page": following,
    "api_server": following,
}
