"""Engines that discovery finds, or that somebody registers, are targets of each gateway without being named to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, StartEngine, engine, start_engine, vllm_models
from tests.discovery.test_sources import discovering
from tests.gateway.conftest import Running, Start, chat
from tests.patience import patient, within
from tests.serving.wire import served
from waymark.api.application import create_app
from waymark.api.options import ApiOptions
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.options import SelectionOptions
from waymark.discovery.describe import Describer
from waymark.discovery.engines import EngineRegistrations, GivenEngines
from waymark.runtime import parts
from waymark.store.store import Store

__all__ = ["engine", "start_engine"]

pytestmark = pytest.mark.outside

PATH = "/v1/chat/completions"


@asynccontextmanager
async def replica(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a query replica on a socket of its own."""
    metrics, asker = Metrics(), Asker()
    store = Store.open(redis_url, metrics=metrics)
    try:
        async with (
            served(
                create_app(store, ApiOptions(), SelectionOptions(), metrics, asker=asker),
                interface="asgi3",
            ) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patient(30), trust_env=False) as client,
        ):
            yield client
    finally:
        await asker.close()
        await store.close()


async def until_answered(running: Running, model: str, status: int) -> None:
    async def is_answered() -> bool:
        return (await running.post(chat("a") | {"model": model})).status_code == status

    await wait_until(is_answered, f"a request for {model} is answered with {status}", 30)


async def test_a_gateway_serves_what_discovery_finds_until_it_goes(
    start: Start, start_engine: StartEngine, tmp_path: Path
) -> None:
    running = await start(0)
    engines = await asyncio.gather(start_engine(), start_engine())
    for each in engines:
        each.is_vllm("no_replay")
        each.answers[PATH] = {"object": "chat.completion"}
    file = tmp_path / "endpoints.yaml"

    def write(*found: Engine) -> None:
        host_ports = [each.url.removeprefix("http://").split(":") for each in found]
        lines = [f'{{name: "pod-{port}", address: "{host}", port: "{port}"}}' for host, port in host_ports]
        file.write_text(f"endpoints: [{', '.join(lines)}]\n")

    write(engines[0])
    async with discovering(running.store, file):
        await until_answered(running, "llama", 200)
        assert PATH in engines[0].asked
        write(engines[1])

        async def is_replaced() -> bool:
            found = await running.store.directory.registrations()
            return [each.target.address for each in found] == [engines[1].url]

        await wait_until(is_replaced, "the other engine has taken its place", 30)

        async def is_asked() -> bool:
            await running.post(chat("b") | {"model": "llama"})
            return PATH in engines[1].asked

        await wait_until(is_asked, "the other engine gets requests", 30)


async def test_a_gateway_serves_what_is_registered_over_http_until_it_is_unregistered(
    start: Start, engine: Engine, redis_url: str
) -> None:
    """By ``POST /register`` at a query replica, with an address, as docs/gateway.md has it."""
    running = await start(0)
    engine.answers[PATH] = {"object": "chat.completion"}
    fields = {"instance_id": "by-hand", "type": "none", "modelname": "m", "block_size": 16}
    await until_answered(running, "m", 404)
    async with replica(redis_url) as client:
        bare = await client.post("/register", json=fields)
        assert bare.status_code == 200, bare.text
        # Without an address nobody can be sent there.
        await until_answered(running, "m", 503)
        assert PATH not in engine.asked
        answer = await client.post("/register", json=fields | {"address": engine.url})
        assert answer.status_code == 200, answer.text
        await until_answered(running, "m", 200)
        assert PATH in engine.asked
        models = (await running.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == ["m"]
        gone = await client.post("/unregister", json={"instance_id": "by-hand"})
        assert gone.status_code == 200, gone.text
        await until_answered(running, "m", 503)
        asked = len(engine.asked)
        assert (await running.post(chat("a") | {"model": "m"})).json()["error"]["code"] == "no_target"
        assert len(engine.asked) == asked


async def test_an_engine_that_is_registered_by_its_url_is_served(start: Start, engine: Engine, redis_url: str) -> None:
    running = await start(0)
    engine.is_vllm("no_replay")
    engine.answers[PATH] = {"object": "chat.completion"}
    async with replica(redis_url) as client:
        answer = await client.post("/register", json={"url": engine.url})
        assert answer.status_code == 200, answer.text
    for model in ("llama", "llama-alias"):
        await until_answered(running, model, 200)
    assert engine.asked.count(PATH) >= 2


@asynccontextmanager
async def given(running: Running, *engines: Engine, **settings: Any) -> AsyncIterator[None]:
    """``--engine`` for each of them, until all are registered."""
    allowed = AllowedEndpoints()
    asker = parts.asker(Settings(redis_url="memory://", **settings))
    found = EngineRegistrations(Describer(asker, allowed, seconds=20))
    try:
        async with within(30):
            await GivenEngines(running.store, found, [each.url for each in engines]).run()
        yield
    finally:
        await asker.close()


async def test_any_openai_server_is_behind_a_gateway_by_its_url(start: Start, start_engine: StartEngine) -> None:
    """A server with two models, and a vLLM of a release that names no sockets."""
    running = await start(0)
    other, older = await start_engine(), await start_engine()
    other.answers = {"/v1/models": vllm_models("llama3.2", "qwen3"), PATH: {"object": "chat.completion", "of": "other"}}
    older.is_vllm(block_size=32)
    del older.answers["/kv_event_sources"]
    older.answers[PATH] = {"object": "chat.completion", "of": "older"}
    async with given(running, other, older, engine_keys="127.0.0.1=sk-of-it="):
        assert (other.authorization, older.authorization) == ("Bearer sk-of-it=", "Bearer sk-of-it=")
        found = {each.model_name: each.block_size for each in await running.store.directory.registrations()}
        assert found == {"llama3.2": 16, "qwen3": 16, "llama": 32}, "a vLLM is known by its metrics, which say its size"
        for model, of in (("llama3.2", "other"), ("qwen3", "other"), ("llama", "older"), ("llama-alias", "older")):
            await until_answered(running, model, 200)
            assert (await running.post(chat("a") | {"model": model})).json()["of"] == of
        models = (await running.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == ["llama", "llama-alias", "llama3.2", "qwen3"]
