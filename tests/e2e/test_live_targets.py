"""Engines that are killed among others under load: decisions leave them out at once, and name them again at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests import forked
from tests.conftest import wait_until
from tests.e2e.conftest import ROOT, Service, Start
from tests.e2e.redis_server import RedisServer, redis_server
from tests.e2e.test_envoy import Picker
from tests.epp.proxy import Stream, destinations
from tests.forked import Process
from tests.grpc_loops import events_of_this_loop
from tests.patience import patient
from tests.ports import unused_port
from waymark.client import AsyncClient

__all__ = ["events_of_this_loop"]

ENGINES, CLIENTS = 4, 12
#: Decisions after which the share of an engine is known.
DECISIONS = 100
#: Seconds between the requests of a client.
SHORT, LONG = 0.04, 0.4

Ask = Callable[[int], Awaitable[str]]
"""One request of a client: the engine that the decision named."""


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    with redis_server() as server:
        await server.start()
        yield server


@dataclass
class Engines:
    """Simulated engines, each a process that can be killed and started again at its ports."""

    count: int = ENGINES
    http: list[int] = field(default_factory=lambda: [unused_port() for _ in range(ENGINES)])
    events: list[int] = field(default_factory=lambda: [unused_port() for _ in range(ENGINES)])
    running: dict[int, Process] = field(default_factory=dict)

    async def start(self, number: int) -> None:
        words = ["--engines", "1", "--instance-prefix", f"e{number}", "--http-port", str(self.http[number])]
        words += ["--base-port", str(self.events[number]), "--no-replay", "--prompts", "0", "--stay"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
        self.running[number] = forked.start(["simulate", *words], clean, subprocess.DEVNULL, ROOT)
        async with httpx.AsyncClient(base_url=self.address(number), trust_env=False) as client:

            async def is_up() -> bool:
                try:
                    return (await client.get("/v1/models")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_up, "the engine answers", 60)

    async def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        process.wait()

    def address(self, number: int) -> str:
        return f"http://127.0.0.1:{self.http[number]}"

    async def register(self, service: Service, *, has_events: bool) -> None:
        for number in range(self.count):
            fields: dict[str, Any] = {"type": "none"}
            if has_events:
                fields = {"type": "vLLM", "endpoint": f"tcp://127.0.0.1:{self.events[number]}"}
            await service.post(
                "/register",
                model="demo",
                instance_id=f"e{number}",
                block_size=16,
                address=self.address(number),
                **fields,
            )


@asynccontextmanager
async def engines(count: int = ENGINES) -> AsyncIterator[Engines]:
    found = Engines(count)
    try:
        await asyncio.gather(*map(found.start, range(count)))
        yield found
    finally:
        for number in list(found.running):
            await found.kill(number)


class Load:
    """Clients that ask all the time; what the decisions have named since the last ``clear``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.named: list[str] = []
        self._pause = SHORT
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, number: int) -> None:
        while True:
            self.named.append(await self._ask(number))
            await asyncio.sleep(self._pause)

    async def share(self, name: str) -> float:
        """The share of an engine in the next decisions."""
        self.named.clear()
        await self._until(lambda: len(self.named) >= DECISIONS, "decisions")
        return self.named.count(name) / len(self.named)

    def calms(self) -> None:
        """Clients ask less often, until the next ``names`` is over: what starts meanwhile needs the processor."""
        self._pause = LONG

    async def names(self, name: str, seconds: float) -> None:
        """An engine is named within this time, in which clients ask less often."""
        self.named.clear()
        self.calms()
        await self._until(lambda: name in self.named, f"{name} is named", seconds)
        self._pause = SHORT

    async def _until(self, is_so: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        def is_so_and_goes_on() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return is_so()

        await wait_until(is_so_and_goes_on, what, seconds)


async def chat(http: httpx.AsyncClient, address: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    (await http.post(f"{address}/v1/chat/completions", json=body)).raise_for_status()


async def killed_and_back(load: Load, found: Engines, *, back_seconds: float) -> None:
    """One of the engines is killed under the load, and comes back."""
    before = await load.share("e0")
    assert before > 0.1
    await found.kill(0)

    async def is_avoided() -> bool:
        return await load.share("e0") <= 1 / 20

    await wait_until(is_avoided, "hardly a decision names the engine that is away", seconds=4)
    load.calms()
    await found.start(0)
    await load.names("e0", back_seconds)
    assert await load.share("e0") > before / 2


def prompt(number: int) -> list[int]:
    return [1000 * number + n for n in range(64)]


@pytest.mark.long
async def test_a_killed_engine_is_left_out_by_the_outcomes_of_all_replicas(server: RedisServer, start: Start) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        replicas = [await start("query", server.url) for _ in range(2)]
        await found.register(replicas[0], has_events=False)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=patient(10)))
        clients = [await stack.enter_async_context(AsyncClient([each.url], timeout=patient(5))) for each in replicas]

        async def ask(number: int) -> str:
            target = clients[number % 2].select("demo", prompt(number), expect=False)
            try:
                async with target:
                    assert target.selection.address is not None
                    await chat(http, target.selection.address)
            except httpx.TransportError:
                pass
            return target.selection.instance_id

        async with Load(ask) as load:
            # It is tried again after 5 s, and if it is not there yet, 10 s later.
            await killed_and_back(load, found, back_seconds=15)

        for number in range(ENGINES):
            await found.kill(number)

        async def selection(at: int) -> dict[str, Any]:
            return dict(await replicas[at].post("/select", model="demo", token_ids=prompt(0), reserve=False))

        # The failures that one replica is told of count in the other.
        async def are_all_out() -> bool:
            taken = await replicas[0].post("/select", model="demo", token_ids=prompt(0))
            await replicas[0].post("/release", reservation=taken["reservation"], outcome="failed")
            return all([(await selection(at))["degraded"] for at in range(2)])

        await wait_until(are_all_out, "nobody else is left", 30)
        answer = await selection(1)
        assert answer["target"]["instance_id"] in {f"e{number}" for number in range(ENGINES)}


@pytest.mark.long
async def test_a_killed_engine_is_left_out_by_its_event_stream(server: RedisServer, start: Start) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        replicas = [await start("query", server.url) for _ in range(2)]
        await start("ingest", server.url)
        await found.register(replicas[0], has_events=True)
        for number in range(ENGINES):

            async def is_active(number: int = number) -> bool:
                return (await replicas[0].publisher(f"e{number}"))["status"] == "active"

            await wait_until(is_active, f"the stream of engine {number} is active", 30)
        clients = [await stack.enter_async_context(AsyncClient([each.url], timeout=patient(5))) for each in replicas]

        async def ask(number: int) -> str:
            # No outcome says that an engine has failed.
            async with clients[number % 2].select("demo", prompt(number), expect=False) as target:
                return target.selection.instance_id

        async with Load(ask) as load:
            await killed_and_back(load, found, back_seconds=5)

        async with httpx.AsyncClient(base_url=replicas[0].url, trust_env=False, timeout=patient(10)) as http:
            text = (await http.get("/activity", params={"follow": "false"})).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        of_stream = [each for each in events if each["kind"] in ("unreachable", "reachable")]
        assert [(each["kind"], each["instance_id"]) for each in of_stream] == [
            ("unreachable", "e0"),
            ("reachable", "e0"),
        ]
        assert "it is refused" in of_stream[0]["detail"]


async def test_an_engine_that_was_never_there_gets_no_request_while_another_is_there(
    server: RedisServer, start: Start
) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines(1))
        service = await start("serve", server.url)
        await found.register(service, has_events=True)
        away: dict[str, Any] = {
            "model": "demo",
            "instance_id": "away",
            "block_size": 16,
            "address": "http://127.0.0.1:1",
        }
        await service.post("/register", type="vLLM", endpoint=f"tcp://127.0.0.1:{unused_port()}", **away)

        async def are_known() -> bool:
            statuses = [(await service.publisher(name))["status"] for name in ("e0", "away")]
            return statuses == ["active", "unreachable"]

        await wait_until(are_known, "one is there, and the other one was refused", 30)

        async def selection() -> tuple[str, bool]:
            answer = await service.post("/select", model="demo", token_ids=prompt(0), reserve=False)
            return answer["target"]["instance_id"], answer["degraded"]

        async def is_left_out() -> bool:
            return {await selection() for _ in range(8)} == {("e0", False)}

        await wait_until(is_left_out, "decisions leave it out", 30)
        await service.post("/unregister", instance_id="e0")

        async def is_the_last() -> bool:
            return await selection() == ("away", True)

        await wait_until(is_the_last, "nobody else is left", 30)


async def test_a_gateway_without_an_ingest_worker_says_so(server: RedisServer, start: Start) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        await found.register(await start("query", server.url), has_events=True)
        gateway = await start("gateway", server.url)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=gateway.url, timeout=patient(30.0), trust_env=False)
        )

        async def warnings() -> str:
            return " ".join((await gateway.get("/ready")).get("warnings", ()))

        async def decision(text: str) -> str:
            body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-waymark-decision"]

        async def is_said() -> bool:
            return "no ingest worker is alive" in await warnings()

        await wait_until(is_said, "/ready names the missing worker")
        assert {await decision(f"question {number}") for number in range(8)} <= {"prefix", "load"}
        await wait_until(lambda: "no ingest worker is alive" in gateway.log, "the log names it", 20)

        await start("ingest", server.url)

        async def is_over() -> bool:
            return "no ingest worker is alive" not in await warnings()

        await wait_until(is_over, "/ready names it no more")
        assert {await decision(f"question {number}") for number in range(8)} == {"kv_aware"}


async def test_a_picker_without_an_ingest_worker_says_so(server: RedisServer, start: Start, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        await found.register(await start("query", server.url), has_events=True)
        picker = Picker(tmp_path, server.url, 0, epp_tls="false")
        stack.callback(picker.end)
        await picker.start()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}"))

        async def decision(number: int) -> str:
            stream = Stream(channel)
            if number % 2:
                await stream.ask({"model": "demo", "prompt": prompt(number)}, "/v1/completions")
            else:  # no tokenizer is set: an engine makes the tokens
                messages = [{"role": "user", "content": f"question {number}"}]
                await stream.ask({"model": "demo", "messages": messages}, "/v1/chat/completions")
            await stream.request_back()
            said = await stream.answered(is_end=True)
            await stream.close()
            return said["x-waymark-decision"]

        async def is_said() -> bool:
            return "no ingest worker is alive" in await picker.warnings()

        await wait_until(is_said, "/ready names the missing worker")
        assert {await decision(number) for number in range(8)} <= {"prefix", "load"}
        await wait_until(lambda: "no ingest worker is alive" in picker.log.read_text(), "the log names it", 20)

        await start("ingest", server.url)

        async def is_over() -> bool:
            return not await is_said()

        await wait_until(is_over, "/ready names it no more")
        assert {await decision(number) for number in range(8)} == {"kv_aware"}


@pytest.mark.long
async def test_a_killed_engine_draws_hardly_an_attempt_of_a_gateway(server: RedisServer, start: Start) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        await found.register(await start("query", server.url), has_events=False)
        await start("ingest", server.url)
        gateway = await start("gateway", server.url)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=gateway.url, timeout=patient(30.0), trust_env=False)
        )

        async def ask(number: int) -> str:
            body = {"model": "demo", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 2}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-waymark-engine"]

        async def attempts_in_vain() -> float:
            lines = (await http.get("/metrics")).text.splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if "gateway_retries_total{" in line)

        async with Load(ask) as load:
            await load.share("e0")
            await found.kill(0)

            async def is_avoided() -> bool:
                before = await attempts_in_vain()
                share = await load.share("e0")
                return share == 0 and await attempts_in_vain() - before <= DECISIONS / 20

            await wait_until(is_avoided, "hardly an attempt is made at the engine that is away", seconds=4)
            load.calms()
            await found.start(0)
            await load.names("e0", 15)


@pytest.mark.long
async def test_a_killed_engine_is_left_out_by_a_picker(server: RedisServer, start: Start, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(engines())
        await found.register(await start("query", server.url), has_events=False)
        picker = Picker(tmp_path, server.url, 0, epp_tls="false")
        stack.callback(picker.end)
        await picker.start()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}"))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=patient(10)))
        names = {f"127.0.0.1:{port}": f"e{number}" for number, port in enumerate(found.http)}

        async def ask(number: int) -> str:
            stream = Stream(channel)
            place, *_ = destinations(await stream.ask({"model": "demo", "prompt": prompt(number)}, "/v1/completions"))
            await stream.request_back()
            try:
                await chat(http, f"http://{place}")
            except httpx.TransportError:
                await stream.answered(503, is_end=True)  # as Envoy answers when no connection is made
            else:
                await stream.answered(is_end=True)
            await stream.close()
            return names[place]

        async with Load(ask) as load:
            await killed_and_back(load, found, back_seconds=15)
