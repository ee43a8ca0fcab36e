"""Engines and Redis are killed in the middle of streams; every answer must still belong to its request.

``python -m tests.e2e.gateway_chaos 20000`` runs that many requests, ``test_gateway_chaos`` a small number of them.
Requests go through two gateways. Each piece of a simulated engine's answer carries the mark of its request and its
number, so a piece that crosses to another answer, is lost or comes twice is seen.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests import forked
from tests.conftest import wait_until
from tests.e2e.redis_server import RedisServer, redis_server
from tests.forked import Process
from tests.patience import patient, within
from tests.ports import unused_port
from waymark.simulator.workload import mark_of
from waymark.store.store import Store

ENGINES, CLIENTS, TOKENS = 3, 24, 12
#: Between two faults.
PAUSE_SECONDS = 1.0


@dataclass
class Fleet:
    """The processes of a run."""

    redis: RedisServer
    gateways: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    engines: dict[int, Process] = field(default_factory=dict)

    async def start_engine(self, number: int) -> None:
        words = ["--engines", "1", "--instance-prefix", f"engine-{number}", "--http-port", str(self.ports[number])]
        words += ["--base-port", "0", "--prompts", "0", "--stay", "--tokens-per-second", "200"]
        self.engines[number] = _process("simulate", *words, "--answer-tokens", str(TOKENS))

    async def kill_engine(self, number: int) -> None:
        self.engines[number].kill()
        self.engines[number].wait()


def _process(*words: str, **environ: str) -> Process:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    return forked.start(words, clean | environ, subprocess.DEVNULL, Path(__file__).parents[2])


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    """Redis, an ingest worker, engines, and two gateways that know the engines."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server())
        await server.start()
        running = Fleet(server, ports=[unused_port() for _ in range(ENGINES)])
        started: list[Process] = []
        stack.push_async_callback(_end, running, started)
        for number in range(ENGINES):
            await running.start_engine(number)
        started.append(_process("ingest", WAYMARK_REDIS_URL=server.url))
        urls = ",".join(f"http://127.0.0.1:{port}" for port in running.ports)
        for _ in range(2):
            port = unused_port()
            environ = {"WAYMARK_REDIS_URL": server.url, "WAYMARK_GATEWAY_ENGINES": urls, "WAYMARK_HOST": "127.0.0.1"}
            started.append(_process("gateway", "--port", str(port), **environ))
            running.gateways.append(f"http://127.0.0.1:{port}")
        async with httpx.AsyncClient(trust_env=False, timeout=patient(10)) as client:
            for url in running.gateways:
                await wait_until(lambda url=url: _serves(client, url), "a gateway knows the model", 60)  # type: ignore[misc]
        yield running


async def _end(running: Fleet, started: list[Process]) -> None:
    for each in (*started, *running.engines.values()):
        each.kill()
        each.wait()


async def _serves(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return [each["id"] for each in (await client.get(f"{url}/v1/models")).json()["data"]] == ["demo"]
    except (httpx.TransportError, KeyError):
        return False


async def _answers(client: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
    except httpx.TransportError:
        return False


async def run(running: Fleet, requests: int, seed: int = 0) -> Counter[str]:
    """How many requests ended in which way. Raises AssertionError where an answer is another request's."""
    ends: Counter[str] = Counter()
    numbers = iter(range(requests))
    async with httpx.AsyncClient(
        trust_env=False, timeout=patient(60), limits=httpx.Limits(max_connections=None)
    ) as client:

        async def work() -> None:
            for number in numbers:
                url = running.gateways[number % len(running.gateways)]
                ends[await _ask(client, url, f"{seed}/{number}", is_stream=number % 3 != 0)] += 1

        is_answered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_break(running, random.Random(seed), client, is_answered))
            workers = [tasks.create_task(work()) for _ in range(CLIENTS)]
            await asyncio.wait(workers)
            is_answered.set()
    return ends


async def _break(running: Fleet, rng: random.Random, client: httpx.AsyncClient, is_answered: asyncio.Event) -> None:
    """Faults, one after the other, until every request has its answer; each is over before the next, and at the end.

    An engine takes seconds to start on a busy machine. Without the wait for it, all engines would be gone in the end.
    """
    for fault in itertools.cycle(("engine", "redis", "engine", "freeze")):
        await asyncio.sleep(PAUSE_SECONDS)
        if is_answered.is_set():
            return
        if fault == "engine":
            number = rng.randrange(ENGINES)
            await running.kill_engine(number)
            await asyncio.sleep(PAUSE_SECONDS)
            await running.start_engine(number)
            await wait_until(lambda port=running.ports[number]: _answers(client, port), "the engine is back", 60)  # type: ignore[misc]
        elif fault == "redis":
            running.redis.kill()
            await asyncio.sleep(PAUSE_SECONDS)
            await running.redis.start()
        else:
            running.redis.freeze()
            await asyncio.sleep(PAUSE_SECONDS)
            running.redis.thaw()


async def _ask(client: httpx.AsyncClient, url: str, name: str, *, is_stream: bool) -> str:
    """Ask, and check what belongs to the request; how it ended."""
    text = f"request {name}"
    body = {"model": "demo", "stream": is_stream, "messages": [{"role": "user", "content": text}]}
    try:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
    except httpx.TransportError as error:
        return f"transport {type(error).__name__}"
    if answer.status_code != 200:
        assert "error" in answer.json(), answer.text
        return str(answer.status_code)
    said = _said(answer.text) if is_stream else answer.json()["choices"][0]["message"]["content"]
    mark = mark_of(text)
    pieces = re.findall(r"(\S+)\.(\d+) ", said)
    # As far as the answer goes, every piece of it is this request's, and none is missing or twice.
    assert pieces == [(mark, str(n)) for n in range(len(pieces))], (text, said)
    if is_stream and "[DONE]" not in answer.text:
        assert '"error"' in answer.text, answer.text
        return "interrupted"
    assert len(pieces) == TOKENS, (text, said)
    return "whole"


def _said(stream: str) -> str:
    chunks = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: {")]
    found = []
    for chunk in chunks:
        try:
            fields = json.loads(chunk)
        except ValueError:
            continue  # cut in the middle
        found += [choice["delta"].get("content") or "" for choice in fields.get("choices", ())]
    return "".join(found)


async def check_free(running: Fleet) -> None:
    """No request is reserved half a minute after the last one, at the latest."""
    store = Store.open(running.redis.url, timeout_seconds=patient(5))
    try:

        async def is_free() -> bool:
            groups = (await store.directory.groups()).values()
            loads = [await store.reservations.loads(group.group_id) for group in groups]
            for group in groups:
                await store.reservations.end_overdue(group.group_id)
            return not any(load.requests or load.tokens for each in loads for load in each.values())

        await wait_until(is_free, "nothing is reserved", 45)
    finally:
        await store.close()


async def main(requests: int) -> None:
    async with fleet() as running:
        async with within(requests / 5 + 120):
            ends = await run(running, requests)
        await check_free(running)
    print(json.dumps(dict(ends.most_common())))
    assert ends["whole"] > requests / 2, "most requests were not answered"


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
