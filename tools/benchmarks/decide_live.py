"""Decisions by real processes, for engines on a simulated clock: replicas over HTTP, and the peer's own service.

Redis measures real time, not simulated time. So reservations must not expire during a run, speculative entries are off
unless a run asks for them, and loads are read for each decision. Events are published at the simulated time at which
they become visible. A decision waits until they have been applied.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import msgpack

from tools.benchmarks import prompts
from tools.benchmarks.decide_books import Placed, as_answered
from tools.benchmarks.decide_engines import PIECE_TOKENS, Change, Job
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL
from tools.benchmarks.simulate_service import Waymark, started
from tools.conformance.services import process, until_up, unused_port
from waymark.base.errors import InvalidValue
from waymark.simulator.encode import GPU, BlockRemoved, BlockStored, Encoder, WireEvent
from waymark.simulator.publisher import SimulatedPublisher
from waymark.store.reservations import parse_reservations

#: The environment of the peer, by the kind of run.
KINDS: Mapping[str, Mapping[str, str]] = {
    "defaults": {},
    "tuned": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2", "DYN_ROUTER_PREFILL_LOAD_SCALE": "10"},
}
SETTINGS = {"WAYMARK_LOADS_MS": "0"}
_MSGPACK = {"Content-Type": "application/msgpack"}
_RESERVED_SECONDS = 3600
#: The time that the peer gets to apply events, because it does not report that it has applied them.
_APPLY_SECONDS = 0.02
_REQUEST_SECONDS = 60.0


def check_kind(kind: str) -> None:
    if kind.removesuffix("mesh").rstrip("-") not in ("", *KINDS):
        raise InvalidValue(f"--peer is {kind!r}; known are {', '.join(KINDS)}, mesh, tuned-mesh", field="peer")


def events_of(changes: Sequence[Change]) -> dict[int, list[WireEvent]]:
    """Return the events of each engine, in order."""
    found: dict[int, list[WireEvent]] = {}
    for change in changes:
        names = prompts.engine_hashes(change.piece)
        event: WireEvent = BlockRemoved(tuple(names))
        if change.is_stored:
            parent = None if change.parent is None else prompts.engine_hashes(change.parent)[-1]
            event = BlockStored(tuple(names), parent, tuple(prompts.piece_tokens(change.piece)), BLOCK_SIZE, GPU)
        found.setdefault(change.engine, []).append(event)
    return found


def packed_tokens(job: Job) -> bytes:
    """Return the complete pieces of a prompt, followed by tokens of no other prompt, as little-endian u32."""
    tokens = array("I")
    for piece in job.pieces:
        tokens.extend(prompts.piece_tokens(piece))
    tokens.extend([7] * (job.input_tokens - PIECE_TOKENS * len(job.pieces)))
    return tokens.tobytes()


class Live:
    """The replicas of a Waymark, which decide in turn."""

    def __init__(
        self,
        service: Waymark,
        clients: Sequence[httpx.AsyncClient],
        policy: str,
        *,
        expects: bool,
        is_as_decided: bool = False,
    ) -> None:
        """With ``is_as_decided``, engines get requests in the order of the decisions in Redis, even if the answers
        arrive in another order."""
        self._service = service
        self._clients = clients
        self._turns = cycle(clients)
        self._policy = policy
        self._expects = expects
        self._is_as_decided = is_as_decided
        self._reservations: dict[int, str] = {}

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        placed = await as_answered(self._decide(next(self._turns), job) for job in jobs)
        if self._is_as_decided:
            # No prefill ends within an instant, so the tokens before a reservation give its position among those of its
            # target.
            placed.sort(key=lambda each: parse_reservations(self._reservations[each.job.number])[0].waited or 0)
        return placed

    async def hear(self, changes: Sequence[Change]) -> None:
        for engine, events in events_of(changes).items():
            self._service.tell(engine, events)
        await self._service.settle()

    async def begun(self, job: Job) -> None:
        await self._post(next(self._turns), "/release", reservation=self._reservations[job.number], part="prefill")

    async def ended(self, job: Job) -> None:
        await self._post(next(self._turns), "/release", reservation=self._reservations.pop(job.number))

    async def _decide(self, client: httpx.AsyncClient, job: Job) -> Placed:
        found = await self._post(
            client,
            "/select",
            model=MODEL,
            token_ids=packed_tokens(job),
            policy=self._policy,
            timeout_seconds=_RESERVED_SECONDS,
            expect=self._expects,
        )
        self._reservations[job.number] = found["reservation"]
        return Placed(job, int(found["target"]["instance_id"].removeprefix("engine-")))

    async def _post(self, client: httpx.AsyncClient, path: str, **body: Any) -> Any:
        answer = await client.post(path, content=msgpack.packb(body), headers=_MSGPACK)
        if answer.status_code != 200:
            raise SystemExit(f"{path} was answered with {answer.status_code}: {answer.content[:300]!r}")
        return msgpack.unpackb(answer.content)


@asynccontextmanager
async def ours(
    policy: str, engines: int, replicas: int, is_speculative: bool, *, is_as_decided: bool = False
) -> AsyncIterator[Live]:
    """Start a Waymark with these engines and replicas on an empty Redis."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        service = await stack.enter_async_context(
            started(folder, engines=engines, workers=1, replicas=replicas, environ=SETTINGS)
        )
        clients = [await stack.enter_async_context(_client(url)) for url in service.urls]
        yield Live(service, clients, policy, expects=is_speculative, is_as_decided=is_as_decided)


class Peer:
    """The replicas of ``dynamo.select_service``, which decide in turn."""

    def __init__(self, clients: Sequence[httpx.AsyncClient], publishers: Sequence[SimulatedPublisher]) -> None:
        self._turns = cycle(clients)
        self._publishers = publishers
        self._clients: dict[int, httpx.AsyncClient] = {}

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        return await as_answered(self._decide(next(self._turns), job) for job in jobs)

    async def hear(self, changes: Sequence[Change]) -> None:
        for engine, events in events_of(changes).items():
            self._publishers[engine].publish(events, ts=time.time())
        await asyncio.sleep(_APPLY_SECONDS)

    async def begun(self, job: Job) -> None:
        await self._call(self._clients[job.number], "POST", f"/reservations/{job.number}/prefill_complete")

    async def ended(self, job: Job) -> None:
        await self._call(self._clients.pop(job.number), "DELETE", f"/reservations/{job.number}")

    async def _decide(self, client: httpx.AsyncClient, job: Job) -> Placed:
        tokens = array("I", packed_tokens(job)).tolist()
        body = {"model_name": MODEL, "token_ids": tokens, "selection_id": str(job.number)}
        found = await self._call(client, "POST", "/select_and_reserve", json=body)
        # The replica that decided gets the later reports: without a mesh, no other replica knows the reservation.
        self._clients[job.number] = client
        return Placed(job, int(found["worker_id"]) - 1)

    async def _call(self, client: httpx.AsyncClient, method: str, path: str, **sent: Any) -> Any:
        answer = await client.request(method, path, **sent)
        if answer.status_code != 200:
            raise SystemExit(f"{method} {path} was answered with {answer.status_code}: {answer.text[:300]}")
        return answer.json()


@asynccontextmanager
async def theirs(kind: str, engines: int, replicas: int, python: str) -> AsyncIterator[Peer]:
    """Start processes of the peer's selector, as a mesh if ``kind`` says so."""
    is_mesh, constants = kind.endswith("mesh"), KINDS[kind.removesuffix("mesh").rstrip("-") or "defaults"]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        publishers = [
            await stack.enter_async_context(
                SimulatedPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoder=Encoder("vllm-map"))
            )
            for _ in range(engines)
        ]
        syncs = [unused_port() for _ in range(replicas)]
        clients = []
        for number in range(replicas):
            port, log = unused_port(), folder / f"select-{number}.log"
            options = ["--port", str(port)]
            if is_mesh and replicas > 1:
                peers = ",".join(f"tcp://127.0.0.1:{each}" for each in syncs if each != syncs[number])
                options += ["--replica-sync-port", str(syncs[number]), "--replica-sync-peers", peers]
            running = await stack.enter_async_context(
                process(log, python, "-m", "dynamo.select_service", *options, **constants, DYN_LOG="warn")
            )
            client = await stack.enter_async_context(_client(f"http://127.0.0.1:{port}"))
            await until_up(client, "/health", running, log)
            clients.append(client)
        for engine, publisher in enumerate(publishers):
            worker = {
                "worker_id": engine + 1,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
                "endpoint": f"http://127.0.0.1:{1 + engine}",
                "kv_events_endpoint": publisher.endpoint,
            }
            for client in clients:
                (await client.post("/workers", json=worker)).raise_for_status()
        async with asyncio.timeout(_REQUEST_SECONDS):
            while any(each.subscribers < replicas for each in publishers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the mesh does not report its subscriptions
        yield Peer(clients, publishers)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=_REQUEST_SECONDS, trust_env=False)
