"""A bench: a real store, workers with short times, and simulated engines on real sockets, held against each other."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from redis import Redis as SyncRedis
from redis.asyncio import Redis, RedisCluster

from tests.conftest import _wait_for_server, wait_until
from tests.patience import patient
from tests.store.factories import blocks_of
from waymark.base.errors import StoreUnavailable
from waymark.base.exposition import family
from waymark.base.instruments import rows
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.match import conductor_rows
from waymark.domain.names import GroupName, PublisherName, Registration
from waymark.domain.packing import pack
from waymark.ingest.options import StreamOptions, WorkerOptions
from waymark.ingest.replay import Replay
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.worker import Worker
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys
from waymark.store.holder_tables import decode_table
from waymark.store.publisher_states import PublisherState
from waymark.store.redis.client import RedisClient
from waymark.store.redis.read_connection import ReadConnection
from waymark.store.store import Store

GROUP = GroupName("default", "m")
BLOCK_SIZE = 4
PATIENCE_SECONDS = 20.0

Held = dict[tuple[int, str], set[int]]
"""(rank, medium) to the seq_hashes held there."""
Answer = tuple[int, dict[str, int], dict[int, int]]
"""(matched, per medium, per rank) in blocks."""

QUICK = StreamOptions(
    probe_seconds=0.3,
    replay_idle_seconds=0.5,
    replay_seconds=30.0,
    publisher_timeout=1.0,
    lease_seconds=2.0,
)
#: Options of a worker, not of its streams.
OF_WORKER = ("replays_max", "publishers", "apply", "sweep_blocks_per_second")
#: Nothing is asked that the frames do not ask for, so counters can be told beforehand.
WITHOUT_PROBES = replace(QUICK, probe_seconds=60.0, publisher_timeout=60.0)


class Clock:
    """An engine's clock, which may be set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Pod:
    """A registered simulated engine and what was asked of it."""

    bench: Bench
    engine: SimulatedEngine
    registration: Registration
    clock: Clock
    prompts: list[SimulatedPrompt] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def publisher(self) -> Any:
        return self.engine.publisher

    @property
    def name(self) -> PublisherName:
        return self.registration.name

    @property
    def last_seq(self) -> int:
        return int(self.engine.publisher.next_seq) - 1

    async def work(self, prompts: int = 3, rank: int = 0) -> None:
        """Prompts that nobody had before, with shared beginnings: each is one batch."""
        for _ in range(prompts):
            head = tuple(range(100 * (h := self._random.randrange(4)), 100 * h + 8))
            prompt = SimulatedPrompt(
                head + tuple(self._random.choices(range(1000, 2**31), k=self._random.randrange(4, 25)))
            )
            self.prompts.append(prompt)
            assert await self.engine.prefill(prompt, rank) is not None

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """What is sent meanwhile is lost on the way; a replay has it."""
        before = self.publisher.faults
        self.publisher.faults = before.model_copy(update={"drop_every": 1})
        yield
        self.publisher.faults = before

    def fault(self, **faults: Any) -> None:
        """From now on."""
        self.publisher.faults = self.publisher.faults.model_copy(update=faults)

    def truth(self) -> Held:
        held: Held = {}
        for rank, cache in enumerate(self.engine.caches):
            for medium, prefixes in cache.contents().items():
                hashes = {extend(None, token_bytes(each.tokens), cache.block_size)[-1] for each in prefixes}
                if hashes:
                    held[rank, medium] = hashes
        return held

    async def register(self) -> None:
        await self.bench.store.registry.register(self.registration)

    async def subscribed(self) -> None:
        await wait_until(lambda: self.publisher.subscribers > 0, f"{self.name} has a subscriber", PATIENCE_SECONDS)

    async def is_left(self) -> None:
        """The socket of the worker that died is closed. ZMQ closes it in the background."""
        await wait_until(lambda: self.publisher.subscribers == 0, f"{self.name} has no subscriber", PATIENCE_SECONDS)

    async def caught_up(self) -> None:
        """Subscribed, and the replay that comes with it is over: what is sent from now on is live."""
        await self.subscribed()
        await self.has_status("active", "degraded")

    async def at_work(self, prompts: int = 3) -> None:
        """Caught up, and so many prompts later."""
        await self.caught_up()
        await self.work(prompts)
        await self.agrees()

    async def state(self) -> PublisherState:
        return await self.bench.state(self.name)

    async def has_status(self, *statuses: str) -> None:
        last = await self.state()

        async def has() -> bool:
            nonlocal last
            last = await self.state()
            return last.status in statuses

        wanted = " or ".join(statuses)
        await wait_until(
            has, lambda: f"{self.name} is {wanted}, but {last.status}: {last.last_error}", PATIENCE_SECONDS
        )

    async def says(self, reason: str) -> None:
        """``last_error`` names the reason."""

        async def does() -> bool:
            return reason in ((await self.state()).last_error or "")

        await wait_until(does, f"{self.name} says {reason}", PATIENCE_SECONDS)

    async def is_silent_about(self, reason: str) -> None:
        async def is_gone() -> bool:
            return reason not in ((await self.state()).last_error or "")

        await wait_until(is_gone, f"{self.name} no longer says {reason}", PATIENCE_SECONDS)

    async def counted(self, **counts: int) -> None:
        """The record's counters are these in the end; a dot in a name is written as two underscores."""
        expected = {name.replace("__", "."): n for name, n in counts.items()}

        async def are_so() -> bool:
            found = (await self.state()).counters
            return all(found.get(name, 0) == n for name, n in expected.items())

        try:
            await wait_until(are_so, "the counters", 5.0)
        except BaseException:
            found = (await self.state()).counters
            assert {name: found.get(name, 0) for name in expected} == expected
            raise

    async def at_watermark(self, seq: int) -> None:
        """Wait for the watermark. Only it is read, because tests wait for it after most frames."""
        record = ""

        async def is_there() -> bool:
            nonlocal record
            watermark = await self.bench.redis.hget(record, "watermark") if record else None
            if watermark is None:  # the publisher has no record yet, or another one
                state = await self.state()
                record = keys.record(state.group_id, state.id)
                return state.watermark == seq
            return bool(watermark == b"%d" % seq)

        await wait_until(is_there, f"{self.name} is at {seq}", PATIENCE_SECONDS)

    async def agrees(self) -> None:
        """The index comes to hold exactly what the caches do, and answers so."""

        wrong: list[str] = []

        async def does() -> bool:
            held, truth = await self.bench.held(self.name), self.truth()
            lacks = {unit: len(hashes - held.get(unit, set())) for unit, hashes in truth.items()}
            ghosts = {unit: len(hashes - truth.get(unit, set())) for unit, hashes in held.items()}
            wrong[:] = [f"missing {lacks}, ghosts {ghosts}"] if held != truth else []
            for prompt in self.prompts if not wrong else ():
                found, expected = await self.bench.row(self, prompt), self.expected(prompt)
                if found != expected:
                    wrong.append(f"answers {found}, not {expected}")
            return not wrong

        try:
            await wait_until(does, "the index is the engine's caches", PATIENCE_SECONDS)
        except BaseException:
            state = await self.state()
            pytest.fail(f"{wrong[:3]} at {state.watermark} of {self.last_seq}: {state}")

    def expected(self, prompt: SimulatedPrompt) -> Answer:
        """What the caches say to one prompt."""
        matched, media, ranks = 0, Counter[str](), Counter[int]()
        for blocks in zip(*(cache.held(prompt.tokens) for cache in self.engine.caches), strict=True):
            if not any(blocks):
                break
            matched += 1
            media.update(frozenset[str]().union(*blocks))
            ranks.update(rank for rank, block in enumerate(blocks) if block)
        return matched, dict(media), dict(ranks)


class Mortal(RedisClient):
    """A client that can die as a process does: from one moment on it says nothing more to Redis."""

    is_dead = False

    def _check(self) -> None:
        if self.is_dead:
            raise StoreUnavailable("this process is dead")

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        self._check()
        return await super().run(name, keys, args)

    def script_connection(self, name: str) -> ReadConnection | None:
        return None if self.is_dead else super().script_connection(name)

    def connection(self, key: bytes, *, is_script: bool = False) -> ReadConnection | None:
        return None if self.is_dead else super().connection(key, is_script=is_script)

    async def several(self, commands: Any, *, is_lenient: bool = False) -> list[Any]:
        self._check()
        return await super().several(commands, is_lenient=is_lenient)

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        self._check()
        return await super().hgetall(key)


@dataclass
class Hand:
    """A running worker."""

    worker_id: str
    worker: Worker
    metrics: Metrics
    task: asyncio.Task[None]
    client: Mortal

    def metric(self, name: str, **labels: str) -> float:
        """A sample; 0 where a series has counted nothing yet. A name that is no metric's fails the test.

        Only this metric is read: tests wait for a number by asking again and again.
        """
        row = next((row for row in rows(Metrics) if row.full_name == f"waymark_{name}"), None)
        assert row is not None, f"there is no metric {name}"
        samples = family(row, getattr(self.metrics, row.name)).samples
        return next((each.value for each in samples if (each.name, each.labels) == (row.full_name, labels)), 0.0)

    @contextlib.contextmanager
    def without_places(self) -> Iterator[None]:
        """Meanwhile no replay gets a place: all of them are taken."""
        places = self.worker._places
        taken = [places.request(self.worker_id, is_slow=False, on_held=lambda: None) for _ in range(places.size)]
        assert all(place.is_held for place in taken)
        yield
        for place in taken:
            place.release()

    async def stop(self) -> None:
        """As on SIGTERM."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def die(self) -> None:
        """As on SIGKILL: nothing more is said to Redis, sockets close."""
        self.client.is_dead = True
        await self.stop()


class Bench:
    """One Redis; workers and pods by name; everything is closed at the end."""

    def __init__(
        self, url: str, directory: Path, stack: AsyncExitStack, timeout_seconds: float, *, shards: int = 1
    ) -> None:
        self._url, self._stack = url, stack
        self._timeout_seconds = timeout_seconds
        self._client = RedisClient.open(url, timeout_seconds=timeout_seconds)
        self.shards = shards
        self.store = Store(self._client, shards=shards)
        self.redis = self._redis()
        self._directory = directory
        self._addresses = 0

    def _redis(self) -> Redis:
        """A client of the library."""
        if isinstance(self._client._redis, Redis):
            return self._client._redis
        host, port = self._client._redis._seeds[0]
        redis = RedisCluster(host=host, port=port, protocol=2)
        self._stack.push_async_callback(redis.aclose)
        return cast("Redis", redis)  # it has the same commands

    def address(self, transport: str = "ipc") -> str:
        self._addresses += 1
        return "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{self._directory}/{self._addresses}"

    async def at_watermark_by_another_loop(self, publisher: int, seq: int) -> None:
        """Wait for the watermark of a publisher's record by the clock of another loop."""

        def wait() -> None:
            with SyncRedis.from_url(self._url) as redis:
                record = keys.record(1, publisher)
                # Not for long: a loop whose clock stands still turns all the time if anything waits for a moment.
                asyncio.run(
                    wait_until(lambda: redis.hget(record, "watermark") == b"%d" % seq, f"{record} is at {seq}", 3.0)
                )

        await asyncio.to_thread(wait)

    async def pod(
        self,
        instance_id: str = "pod-1",
        *,
        transport: str = "ipc",
        has_replay: bool = True,
        has_snapshots: bool = False,
        kind: EngineKind = EngineKind.VLLM,
        is_registered: bool = True,
        fields: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Pod:
        """An engine that runs, registered unless told otherwise."""
        clock = Clock()
        options: dict[str, Any] = {"block_size": BLOCK_SIZE, "gpu_blocks": 40, "cpu_blocks": 60, "clock": clock}
        options |= changes
        replay = self.address(transport) if has_replay else None
        snapshots = self.address(transport) if has_snapshots else None
        engine = build_engine(self.address(transport), replay, snapshots, **options)
        await self._stack.enter_async_context(engine.publisher)
        registration = Registration(
            kind=kind,
            instance_id=instance_id,
            tenant_id="default",
            dp_rank=0,
            model_name="m",
            block_size=BLOCK_SIZE,
            endpoint=engine.publisher.endpoint,
            replay_endpoint=engine.publisher.replay_endpoint,
            lora_name=None,
            additional_salt=None,
            scope="instance",
            copies="count" if kind in (EngineKind.VLLM, EngineKind.SGLANG) else "set",
            sequence="publisher",
            snapshot_endpoint=engine.publisher.snapshot_endpoint,
        )
        pod = Pod(self, engine, replace(registration, **(fields or {})), clock)
        if is_registered:
            await self.store.registry.register(pod.registration)
        return pod

    async def worker(self, worker_id: str = "worker-1", options: StreamOptions = QUICK, **changes: Any) -> Hand:
        """A worker at work."""
        # fakeredis lives in one client; a real Redis is reached by a client of each worker's own.
        url = self._url
        is_emulated = url.startswith("memory:")
        opened = self._client if is_emulated else RedisClient.open(url, timeout_seconds=self._timeout_seconds)
        client, metrics = Mortal(opened._redis, url, reads=opened.reads), Metrics()
        of_worker = {name: changes.pop(name) for name in OF_WORKER if name in changes}
        worker = Worker(
            Store(client, shards=self.shards, metrics=metrics),
            metrics,
            WorkerOptions(worker_id, replace(options, **changes), **of_worker),
        )
        hand = Hand(worker_id, worker, metrics, asyncio.create_task(worker.run()), client)
        if opened is not self._client:
            self._stack.push_async_callback(opened.close)
        self._stack.push_async_callback(hand.stop)
        return hand

    async def state(self, name: PublisherName) -> PublisherState:
        claims = [claim for claim in await self.store.directory.claims() if claim.registration.name == name]
        (state,) = await self.store.publisher_states.of(claims)
        return state

    async def record(self, name: PublisherName) -> dict[str, str]:
        """The raw record."""
        state = await self.state(name)
        fields = await self._client.hgetall(keys.record(state.group_id, state.id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def blocks(self) -> dict[int, set[int]]:
        """The holder ids of every block of the group, by key."""
        return await blocks_of(self.redis)

    async def held(self, name: PublisherName) -> Held:
        """What the index says of a publisher, block by block, by its live holders."""
        claims = [claim for claim in await self.store.directory.claims() if claim.registration.name == name]
        table = decode_table(await self._client.hgetall(keys.holders(1)), self.store.parser, keys.holders(1))
        if not claims or table is None:
            return {}
        publisher = claims[0].publisher
        of = {h.id: (h.dp_rank, h.medium) for h in table.holders.values() if h.publisher == publisher}
        held: Held = {}
        for key, ids in (await self.blocks()).items():
            for holder in ids:
                if holder in of:
                    held.setdefault(of[holder], set()).add(key)
        return held

    async def row(self, pod: Pod, prompt: SimulatedPrompt) -> Answer:
        """What a query of the prompt answers for a pod."""
        hashes = extend(None, token_bytes(prompt.tokens), BLOCK_SIZE)
        source = iter(hashes)
        reading = await self.store.reader.read(
            GROUP,
            BLOCK_SIZE,
            lambda n: pack(islice(source, n)),
            deadline_seconds=patient(5.0),
        )
        assert reading is not None
        row = conductor_rows(reading.walk)[pod.registration.instance_id]
        return row.longest, row.media, {rank: n for rank, n in row.ranks.items() if n}

    async def strangers(self) -> set[int]:
        """Ids in blocks that are neither of a live holder nor still to be swept."""
        table = decode_table(await self._client.hgetall(keys.holders(1)), self.store.parser, keys.holders(1))
        assert table is not None
        ids: set[int] = set().union(*(await self.blocks()).values())
        return ids - set(table.holders) - {int(word) for word in await self.redis.smembers(keys.dead(1))}

    async def is_swept(self) -> None:
        async def is_clean() -> bool:
            return not await self._client.command("SCARD", keys.dead(1))

        await wait_until(is_clean, "every dead holder is swept", PATIENCE_SECONDS)
        assert await self.strangers() == set()


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    """A context for the code under test; that it can be terminated proves that every socket was closed."""
    context: ZmqContext = zmq.Context()
    yield context
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(patient(5))
    assert not ending.is_alive(), "a socket was left open"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for ipc sockets, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        yield Path(directory)


async def bench_on(
    url: str, directory: Path, *, timeout_seconds: float | None = None, shards: int = 1
) -> AsyncIterator[Bench]:
    timeout_seconds = timeout_seconds or patient(1.0)
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("waymark.ingest.status_reporter._REPORT_SECONDS", 0.1)
        # A worker that starts looks for that many tables, in a hundredth of a second.
        patch.setattr("waymark.store.claim_writer._TABLES_MAX", 20)
        bench = Bench(url, directory, stack, timeout_seconds, shards=shards)
        stack.push_async_callback(bench.store.close)
        yield bench


@pytest.fixture
async def bench(redis_url: str, short_path: Path) -> AsyncIterator[Bench]:
    """On the real Redis."""
    async for bench in bench_on(redis_url, short_path):
        yield bench


@pytest.fixture(params=["emulated", "real"])
async def any_bench(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[Bench]:
    """Once on the emulated Redis, once on the real one."""
    url = "memory://" if request.param == "emulated" else request.getfixturevalue("redis_url")
    async for bench in bench_on(url, short_path):
        yield bench


class Server:
    """A redis-server of the test's own, which it may stop, freeze and start again with its data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        assert server is not None
        options = ["--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._directory), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always"]
        log = self._directory / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen([server, *options], stdout=output, stderr=output)
        _wait_for_server(self._process, self._socket, log)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(timeout=patient(10))

    def freeze(self) -> None:
        cast("subprocess.Popen[bytes]", self._process).send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        cast("subprocess.Popen[bytes]", self._process).send_signal(signal.SIGCONT)

    def ping(self) -> bool:
        with SyncRedis(unix_socket_path=str(self._socket), protocol=2) as client:
            return bool(client.ping())


@pytest.fixture
def server(short_path: Path) -> Iterator[Server]:
    server = Server(short_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_bench(server: Server, short_path: Path) -> AsyncIterator[Bench]:
    """On a Redis of the test's own, which it freezes: so each call that is not answered is given up soon."""
    async for bench in bench_on(server.url, short_path, timeout_seconds=min(0.5, patient(0.25))):
        yield bench


@pytest.fixture
def replays_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays wait for a publisher without faults as long as the test wants: a busy machine is not its silence.

    Each test has one pod.
    """
    faults: dict[str, Any] = {}
    fault = Pod.fault

    def noted(pod: Pod, **changes: Any) -> None:
        faults.update(changes)
        fault(pod, **changes)

    class Waiting(Replay):
        def __init__(self, *given: Any, idle_seconds: float, **options: Any) -> None:
            if faults.get("truncate_replay"):
                idle_seconds = max(idle_seconds, min(1.0, patient(0.25)))
            elif not faults.get("replay_silent"):
                idle_seconds = PATIENCE_SECONDS
            super().__init__(*given, idle_seconds=idle_seconds, **options)

    monkeypatch.setattr(Pod, "fault", noted)
    monkeypatch.setattr("waymark.ingest.replay.Replay", Waiting)
