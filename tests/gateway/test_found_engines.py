"""Engines that discovery finds, or that somebody registers, are targets of each gateway without being named to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, StartEngine, engine, start_engine
from tests.discovery.test_sources import ENTRY, discovering
from tests.gateway.conftest import Running, Start, chat
from waymark.api.registrations import registration_of
from waymark.endpoints import AllowedEndpoints

__all__ = ["engine", "start_engine"]

pytestmark = pytest.mark.outside

PATH = "/v1/chat/completions"


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


async def test_a_gateway_serves_what_is_registered_with_an_address(start: Start, engine: Engine) -> None:
    running = await start(0)
    engine.answers[PATH] = {"object": "chat.completion"}
    await until_answered(running, "m", 404)
    fields = ENTRY | {"instance_id": "by-hand", "endpoint": "tcp://127.0.0.1:9", "address": engine.url}
    await running.store.registry.register(registration_of(fields, AllowedEndpoints()))
    await until_answered(running, "m", 200)
    assert PATH in engine.asked
