"""Random sessions of several engines: whatever they do, every answer is the brute-force model's.

Many sessions hand their payloads past the sockets to what ingest makes of them; a handful goes through a whole
worker and real sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.session import MODEL_NAME, Publisher, Session, Spec, Step, prompts, registration, specs, steps
from tests.model import Model, Space, Tokens
from tests.patience import patient
from tests.unit import examples
from waymark.api.application import create_app
from waymark.api.options import ApiOptions
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed
from waymark.base.metrics import Metrics
from waymark.decide.options import SelectionOptions
from waymark.decide.served import PromptOptions
from waymark.domain.hashing import DEFAULT_SEED, extend, token_bytes
from waymark.domain.names import DEFAULT_TENANT, PublisherName
from waymark.engines import decoder
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions, WorkerOptions
from waymark.ingest.worker import Worker
from waymark.simulator.encode import WireEvent
from waymark.simulator.options import Faults
from waymark.simulator.publisher import SimulatedPublisher
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

Questions = Sequence[tuple[Tokens, Space]]


@asynccontextmanager
async def replicas(redis: Redis) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Two query replicas over one Redis, each with a mind of its own."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            app = create_app(
                Store(RedisClient(redis, "redis://test")),
                ApiOptions(prompts=PromptOptions(deadline_seconds=patient(2.0))),
                SelectionOptions(),
                Metrics(),
            )
            transport = httpx.ASGITransport(app=app)
            client = httpx.AsyncClient(transport=transport, base_url="http://waymark")
            clients.append(await stack.enter_async_context(client))
        yield clients


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def rows(client: httpx.AsyncClient, block_size: int, tokens: Tokens, space: Space, *, by_hash: bool) -> Any:
    salts = dict(zip(("additional_salt", "cache_salt"), space.salts, strict=False))
    body = {"model": MODEL_NAME, "block_size": block_size, "lora_name": space.lora_name} | salts
    if by_hash:
        hashes = extend(None, token_bytes(tokens), block_size)
        answer = await post(client, "/query_by_hash", body | {"seq_hashes": hashes})
    else:
        answer = await post(client, "/query", body | {"token_ids": tokens})
    return answer.get(DEFAULT_TENANT, {})


# ---- past the sockets ------------------------------------------------------------------------------


@dataclass
class Stream:
    """What is between a publisher's socket and Redis, and what its replay endpoint would still have."""

    life: Life
    next_seq: int = 0
    sent: list[tuple[int, bytes]] = field(default_factory=list)


class Direct:
    """Applies payloads as ``ingest.stream`` does, without sockets; a fold is open until ``fold_batches`` are in it."""

    def __init__(self, store: Store, clients: list[httpx.AsyncClient], block_size: int, fold_batches: int) -> None:
        self._store = store
        self._clients = clients
        self._replica = cycle(clients)
        self._block_size = block_size
        self._fold_batches = fold_batches
        self._streams: dict[PublisherName, Stream] = {}

    async def register(self, publisher: Publisher) -> None:
        await self._flush()
        spec = publisher.spec
        await post(next(self._replica), "/register", registration(spec, self._block_size))
        self._streams[spec.name] = Stream(await self._take(spec))
        self._tell_ranks()

    async def unregister(self, publisher: Publisher) -> None:
        await self._flush()
        spec = publisher.spec
        del self._streams[spec.name]
        await post(next(self._replica), "/unregister", {"instance_id": spec.instance, "dp_rank": spec.rank})
        self._tell_ranks()

    async def send(self, publisher: Publisher, events: list[WireEvent], rank: int) -> None:
        stream = self._stream(publisher)
        seq = stream.next_seq
        stream.next_seq += 1
        payload = publisher.encoder.payload(events, ts=float(seq), rank=rank)
        stream.sent.append((seq, payload))
        await self._apply(stream, seq, payload)

    async def restart(self, publisher: Publisher) -> None:
        stream = self._stream(publisher)
        await stream.life.flush()
        await stream.life.begin_anew("test")
        stream.next_seq = 0
        stream.sent.clear()

    async def crash(self, publisher: Publisher) -> None:
        """The open fold is lost with its worker; the next one goes on from the watermark it finds in Redis."""
        stream = self._stream(publisher)
        stream.life = await self._take(publisher.spec)
        self._tell_ranks()
        watermark = stream.life.order.watermark
        for seq, payload in stream.sent:
            if watermark is None or seq > watermark:
                await self._apply(stream, seq, payload)

    async def lose(self, publisher: Publisher, count: int) -> bool:
        stream = self._stream(publisher)
        await stream.life.flush()
        stream.next_seq += count
        stream.sent.clear()
        return stream.life.order.watermark is not None

    async def check(self, questions: Questions, model: Model) -> None:
        await self._flush()
        for i, (tokens, space) in enumerate(questions):
            client = self._clients[i % 2]
            answer = await rows(client, self._block_size, tokens, space, by_hash=i % 4 < 2)
            assert answer == model.query(tokens, space), (tokens, space)

    def _stream(self, publisher: Publisher) -> Stream:
        return self._streams[publisher.spec.name]

    async def _flush(self) -> None:
        for stream in self._streams.values():
            await stream.life.flush()

    async def _apply(self, stream: Stream, seq: int, payload: bytes) -> None:
        life = stream.life
        if life.order.watermark is not None and seq > life.order.watermark + 1:
            await life.flush()
            await life.lose(seq)
        incoming = await life.decoder.decode(seq, payload, b"")
        assert incoming is not None
        assert not incoming.batch.rejected, incoming.batch.samples
        life.append(incoming)
        if seq % self._fold_batches == 0:
            await life.flush()

    def _tell_ranks(self) -> None:
        for name, stream in self._streams.items():
            others = {other.dp_rank for other in self._streams if other.instance_id == name.instance_id}
            stream.life.applier.resolver.registered_ranks = frozenset(others - {name.dp_rank})

    async def _take(self, spec: Spec) -> Life:
        """The stream, under a lease of its own, from what its record says: as a worker takes it."""
        claim = next(each for each in await self._store.directory.claims() if each.registration.name == spec.name)
        grant = await self._store.leases.take(claim, "test", 60.0, force=True)
        assert grant is not None
        metrics = Metrics()
        applier, state = await resumed(grant, self._store, metrics, ApplyOptions(waiting_blocks=100))
        return Life(applier, decoder(claim.registration.kind, seed=DEFAULT_SEED), metrics, state, on_gap="keep")


@pytest.mark.parametrize("dialect", ["vllm-map", "sglang-map", "standard", "standard-tokens"])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_copies_count_where_they_should_and_only_as_long_as_nothing_was_lost(
    redis: Redis, dialect: str, is_lost: bool
) -> None:
    """What random sessions seldom do: store a block twice, lose batches, remove it once, and once more."""
    stored, removed = (Step("batch", 0, 0, ((kind, 0, 0, 2, 0, 0),)) for kind in ("stored", "removed"))
    check, lose = Step("check", 0), [Step("lose", 0)] if is_lost else []
    async with replicas(redis) as clients:
        driver = Direct(Store(RedisClient(redis, "redis://test")), clients, 2, fold_batches=1)
        session = Session(driver, [Spec("a", 0, dialect)], [(0, 1, 0)], 2)
        await session.run([stored, stored, *lose, removed, check, removed, check])


# ---- through the sockets ---------------------------------------------------------------------------


class Sockets:
    """Publishes over ZMQ to a whole worker; what does not arrive live is replayed."""

    def __init__(
        self, client: RedisClient, clients: list[httpx.AsyncClient], block_size: int, stack: AsyncExitStack
    ) -> None:
        self._client = client
        self._store = Store(client)
        self._clients = clients
        self._block_size = block_size
        self._stack = stack
        self._publishers: dict[PublisherName, SimulatedPublisher] = {}
        self._lost: Counter[PublisherName] = Counter()
        self._told: dict[PublisherName, float] = {}
        """The ts of the last batch; no two batches have the same."""
        self._clock = count(1)
        self._worker: asyncio.Task[None] | None = None

    async def register(self, publisher: Publisher) -> None:
        name = publisher.spec.name
        if name not in self._publishers:
            socket = SimulatedPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoder=publisher.encoder)
            self._publishers[name] = await self._stack.enter_async_context(socket)
        socket = self._publishers[name]
        # What it told before it was registered is of a life that is over.
        await socket.restart()
        at = {"endpoint": socket.endpoint, "replay_endpoint": socket.replay_endpoint}
        await post(self._clients[0], "/register", registration(publisher.spec, self._block_size, **at))
        self._publish(name, [], 0)
        if self._worker is None:
            self._start_worker()

    async def unregister(self, publisher: Publisher) -> None:
        await self._applied()
        spec = publisher.spec
        await post(self._clients[1], "/unregister", {"instance_id": spec.instance, "dp_rank": spec.rank})
        del self._told[spec.name]

    async def send(self, publisher: Publisher, events: list[WireEvent], rank: int) -> None:
        self._publish(publisher.spec.name, events, rank)

    async def restart(self, publisher: Publisher) -> None:
        # The connection breaks, as with every process that ends: within one, a lower seq of another rank is no restart.
        await self._publishers[publisher.spec.name].restart(rebind=True)
        # An engine that says nothing has not restarted, as far as anybody can see.
        self._publish(publisher.spec.name, [], 0)

    async def crash(self, publisher: Publisher) -> None:
        await self.stop_worker()
        self._start_worker()

    async def lose(self, publisher: Publisher, count: int) -> bool:
        """The next batches are not sent live; a replay has them."""
        self._lost[publisher.spec.name] = count
        return False

    async def check(self, questions: Questions, model: Model) -> None:
        await self._applied()
        for i, (tokens, space) in enumerate(questions):
            answer = await rows(self._clients[i % 2], self._block_size, tokens, space, by_hash=i % 4 < 2)
            assert answer == model.query(tokens, space), (tokens, space)

    async def stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    def _start_worker(self) -> None:
        stream = StreamOptions(fold_batches=3, lease_seconds=1.0)
        options = WorkerOptions(f"worker-{next(self._clock)}", stream, apply=ApplyOptions())
        self._worker = asyncio.create_task(Worker(self._store, Metrics(), options).run())

    def _publish(self, name: PublisherName, events: list[WireEvent], rank: int) -> None:
        socket = self._publishers[name]
        socket.faults = Faults(drop_every=1 if self._lost[name] > 0 else 0)
        self._lost[name] -= 1
        self._told[name] = float(next(self._clock))
        socket.publish(events, ts=self._told[name], rank=rank)

    async def _applied(self) -> None:
        """Wait until the last batch of every publisher is in Redis."""
        for name in self._told:
            self._lost[name] = 0
            self._publish(name, [], 0)

        async def is_applied() -> bool:
            assert self._worker is not None
            assert not self._worker.done(), self._worker
            applied: dict[PublisherName, float | None] = {}
            for claim in await self._store.directory.claims():
                ts = await self._client.hget(keys.record(claim.group_id, claim.publisher), "ts")
                applied[claim.registration.name] = None if ts is None else float(ts)
            return applied == self._told

        await wait_until(is_applied, "every batch is applied", 15)


_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


# On the real Redis, which is faster; what the scripts do on the emulated one is shown by tests/store and tests/lua.
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@settings(max_examples=examples(80), deadline=None, suppress_health_check=_CHECKS)
@given(
    specs=specs,
    prompts=prompts,
    steps=steps,
    block_size=st.integers(1, 3),
    fold_batches=st.integers(1, 5),
)
async def test_every_answer_is_the_models(
    redis: Redis,
    specs: tuple[Spec, ...],
    prompts: list[tuple[int, ...]],
    steps: list[Step],
    block_size: int,
    fold_batches: int,
) -> None:
    note(f"{specs} {prompts} {steps} {block_size=} {fold_batches=}")
    await redis.flushall()
    async with replicas(redis) as clients:
        driver = Direct(Store(RedisClient(redis, "redis://test")), clients, block_size, fold_batches)
        await Session(driver, specs, prompts, block_size).run(steps)


# A worker hears of a registration a moment after the call has returned; until then whose a rank is, is not settled.
_one_socket_each = specs.map(lambda every: tuple(spec for spec in every if spec.rank == 0))


# Not shrunk: a session that fails waits for its deadline first.
@settings(max_examples=10, deadline=None, suppress_health_check=_CHECKS, phases=(Phase.generate,))
@given(specs=_one_socket_each, prompts=prompts, steps=steps, block_size=st.integers(1, 3))
async def test_every_answer_is_the_models_through_real_sockets(
    redis_url: str, specs: tuple[Spec, ...], prompts: list[tuple[int, ...]], steps: list[Step], block_size: int
) -> None:
    note(f"{specs} {prompts} {steps} {block_size=}")
    async with Redis.from_url(redis_url, protocol=2) as redis, AsyncExitStack() as stack:
        await redis.flushall()
        clients = await stack.enter_async_context(replicas(redis))
        driver = Sockets(RedisClient(redis, "redis://test"), clients, block_size, stack)
        stack.push_async_callback(driver.stop_worker)
        await Session(driver, specs, prompts, block_size).run(steps)
