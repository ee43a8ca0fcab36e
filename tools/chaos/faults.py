"""The faults and their repairs: one method for each fault of the script.

Each method performs the fault and its repair. Repairs by others (a controller that registers again, a sender that sends
again) happen at the next quiet point.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import msgpack
from redis.exceptions import RedisError

from tests.e2e.fleet import Member
from tools.chaos.backend import Backend, Memory, Node
from tools.chaos.controller import Controller
from tools.chaos.fleet import Crew
from tools.chaos.publishers import Publisher
from tools.chaos.script import FAULTS, Fault
from tools.chaos.trace import Trace
from waymark.simulator.encode import Encoder
from waymark.simulator.options import Faults as EngineFaults

#: Fields among registrations and groups that a newer release, or a mistake, may have left there.
HOSTILE_RECORDS: tuple[tuple[str, bytes, bytes], ...] = (
    ("wm:publishers", b'["n","z",0]', b'{"kind":"TensorRT"}'),
    ("wm:publishers", b'["n","z",1]', b"\xff\xfe"),
    ("wm:publishers", b"n", b"{}"),
    ("wm:publishers", b'["n","z"]', b"[]"),
    ("wm:groups", b"later", b"a:b"),
    ("wm:groups", b'["n","z"]', b"7"),
    ("wm:groups", b'["n","z","x"]', b"1 1 1"),
)
HOSTILE_REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n",
    b'POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a":',
    b"\x00\x01\x02\x03" * 64 + b"\r\n\r\n",
    b"POST /events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n",
)


class Raw(Encoder):
    """An encoder that returns the given payload, whatever the events."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("vllm-map")
        self._payload = payload

    def payload(self, events: Any, *, ts: float, rank: int | None = 0) -> bytes:
        return self._payload


def hostile_payload(which: int, size: float) -> bytes:
    """Return a batch that is expensive to read, or a payload that is not a batch."""
    count = int(1e6 + 3e6 * size)
    head = b"\x93\xcb" + bytes(8)

    def array(length: int) -> bytes:
        return b"\xdd" + length.to_bytes(4, "big")

    bodies: list[bytes] = [
        head + array(count) + b"\x90" * count + b"\x00",  # empty lists
        head + array(count) + b"\x80" * count + b"\x00",  # empty maps
        head + array(1) + b"\x92\xacBlockRemoved" + array(count) + b"\x01" * count + b"\x00",  # one removal
        head + array(count) + b"\xc0" * count + b"\x00",
        b"\x91" * 100_000,  # nested
        bytes(random.Random(which).randbytes(count)),
        msgpack.packb([0.0, [{"type": "BlockStored", "block_hashes": "x" * 1000, "token_ids": -1}] * 5000, "rank"]),
    ]
    return bodies[which % len(bodies)]


class Faults:
    """A method for each fault of the script. ``lease_seconds`` is the time for which a stopped worker keeps its
    streams."""

    def __init__(
        self,
        backend: Backend,
        crew: Crew,
        publishers: list[Publisher],
        controller: Controller,
        trace: Trace,
        lease_seconds: float,
    ) -> None:
        self._backend = backend
        self._crew = crew
        self._controller = controller
        self._trace = trace
        self._lease_seconds = lease_seconds
        self._engines = [each for each in publishers if each.sender is None and each.spec.instance != "hostile"]
        self._hostile = next(each for each in publishers if each.spec.instance == "hostile")
        self._big = next(each for each in publishers if each.spec.instance == "big")
        self._http = httpx.AsyncClient(trust_env=False)

    async def carry_out(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self._trace(f"{fault}")
        await self._method(fault.what)(fault)

    def _method(self, what: str) -> Callable[[Fault], Awaitable[None]]:
        method: Callable[[Fault], Awaitable[None]] = getattr(self, "_" + what.replace(" ", "_"))
        return method

    # ---- workers ---------------------------------------------------------------------------------------

    def _worker(self, fault: Fault) -> Member:
        return self._crew.workers[fault.target % len(self._crew.workers)]

    async def _worker_ended(self, fault: Fault) -> None:
        worker = self._worker(fault)
        await self._crew.end(worker)
        await asyncio.sleep(fault.size)
        self._crew.start(worker)

    async def _worker_killed(self, fault: Fault) -> None:
        await self._kill(self._worker(fault), 1.5 * self._lease_seconds * fault.size)

    async def _worker_stopped(self, fault: Fault) -> None:
        """Pause a worker for longer than its leases last, and then let it continue."""
        worker = self._worker(fault)
        self._crew.stop(worker)
        await asyncio.sleep(self._lease_seconds * (1.2 + fault.size))
        self._crew.resume(worker)

    async def _worker_ended_while_writes_wait(self, fault: Fault) -> None:
        """End a worker in the middle of an apply that Redis has not answered."""
        milliseconds = 300 + 900 * fault.size
        await self._ask(self._node(fault), "CLIENT", "PAUSE", int(milliseconds), "WRITE")
        await asyncio.sleep(fault.other * milliseconds / 1000)
        await self._worker_ended(fault)

    async def _worker_killed_in_a_takeover(self, fault: Fault) -> None:
        """Kill one worker, and then the other one while it takes over the streams."""
        first, *others = self._crew.workers[fault.target % 2 :] + self._crew.workers[: fault.target % 2]
        await self._crew.kill(first)
        await asyncio.sleep(self._lease_seconds * (0.7 + fault.size))
        self._crew.start(first)
        await self._kill(others[0], fault.other)

    async def _kill(self, member: Member, seconds: float) -> None:
        await self._crew.kill(member)
        await asyncio.sleep(seconds)
        self._crew.start(member)

    # ---- connections to Redis --------------------------------------------------------------------------

    async def _worker_cut_off(self, fault: Fault) -> None:
        await self._cut(self._worker(fault), fault)

    async def _worker_unheard(self, fault: Fault) -> None:
        """Hold back the messages of a worker until others assume that it has ended."""
        await self._hold(self._worker(fault), self._lease_seconds * (0.5 + fault.size))

    async def _worker_slowed_down(self, fault: Fault) -> None:
        line = self._crew.lines[self._worker(fault)]
        line.delay_seconds = 0.02 + 0.15 * fault.size
        await asyncio.sleep(0.5 + fault.other)
        line.heal()

    async def _replica_cut_off(self, fault: Fault) -> None:
        await self._cut(self._replica(fault), fault)

    async def _replica_unheard(self, fault: Fault) -> None:
        await self._hold(self._replica(fault), 0.3 + fault.size)

    async def _cut(self, member: Member, fault: Fault) -> None:
        for _ in range(1 + int(4 * fault.size)):
            self._crew.lines[member].cut()
            await asyncio.sleep(0.2 * fault.other)

    async def _hold(self, member: Member, seconds: float) -> None:
        line = self._crew.lines[member]
        line.hold()
        await asyncio.sleep(seconds)
        line.heal()

    # ---- replicas --------------------------------------------------------------------------------------

    def _replica(self, fault: Fault) -> Member:
        return self._crew.replicas[fault.target % len(self._crew.replicas)]

    async def _replica_killed(self, fault: Fault) -> None:
        await self._kill(self._replica(fault), fault.size)

    # ---- Redis -----------------------------------------------------------------------------------------

    def _node(self, fault: Fault) -> Node:
        return self._backend.nodes[fault.target % len(self._backend.nodes)]

    async def _ask(self, node: Node, *command: Any) -> Any:
        return await asyncio.to_thread(node.ask, *command)

    async def _redis_paused(self, fault: Fault) -> None:
        milliseconds = int(100 + 1500 * fault.size)
        await self._ask(self._node(fault), "CLIENT", "PAUSE", milliseconds, "WRITE" if fault.other < 0.5 else "ALL")
        await asyncio.sleep(milliseconds / 1000)

    async def _redis_frozen(self, fault: Fault) -> None:
        node = self._node(fault)
        node.freeze()
        await asyncio.sleep(0.2 + 2.5 * fault.size)
        node.thaw()

    async def _redis_full(self, fault: Fault) -> None:
        """Let Redis refuse commands that may need memory."""
        node = self._node(fault)
        await self._ask(node, "CONFIG", "SET", "maxmemory", 1)
        await asyncio.sleep(0.1 + 2.5 * fault.size)
        await self._ask(node, "CONFIG", "SET", "maxmemory", 0)

    async def _redis_killed(self, fault: Fault) -> None:
        await self._restart_redis(fault, "all")

    async def _redis_killed_and_emptied(self, fault: Fault) -> None:
        await self._restart_redis(fault, "nothing")

    async def _redis_set_back(self, fault: Fault) -> None:
        """Set Redis back, as a failover does: its last writes are lost."""
        self._node(fault).remember()
        await asyncio.sleep(0.05 + 0.6 * fault.other)
        await self._restart_redis(fault, "all but the last")

    async def _restart_redis(self, fault: Fault, memory: Memory) -> None:
        node = self._node(fault)
        if memory == "nothing":
            self._controller.is_emptied = True
        self._controller.has_lost_writes = self._controller.has_lost_writes or memory != "all"
        node.kill()
        await asyncio.sleep(1.5 * fault.size)
        await node.back(memory)

    async def _redis_flushed(self, fault: Fault) -> None:
        self._controller.is_emptied = self._controller.has_lost_writes = True
        await asyncio.to_thread(self._backend.flush)

    async def _redis_flushed_twice(self, fault: Fault) -> None:
        """Flush Redis, and flush it again while the lost data is being restored."""
        await self._redis_flushed(fault)
        await asyncio.sleep(0.03 + 0.4 * fault.size)
        await self._redis_flushed(fault)

    async def _redis_flushed_in_a_sweep(self, fault: Fault) -> None:
        async with self._big.lock:
            self._big.clear()
        await asyncio.sleep(0.1 + 1.2 * fault.size)
        await self._redis_flushed(fault)

    # ---- engines ---------------------------------------------------------------------------------------

    def _engine(self, fault: Fault) -> Publisher:
        return self._engines[fault.target % len(self._engines)]

    async def _engine_restarted(self, fault: Fault) -> None:
        engine = self._engine(fault)
        if engine.spec.buffer_batches == 0:
            # A restart of an engine without a replay endpoint looks like lost batches, so such engines only restart at
            # quiet points.
            return await self._engine_cleared(fault)
        async with engine.lock:
            await engine.restart()

    async def _engine_cleared(self, fault: Fault) -> None:
        engine = self._engine(fault)
        async with engine.lock:
            engine.clear()

    async def _engine_away(self, fault: Fault) -> None:
        engine = self._engine(fault)
        async with engine.lock:
            await engine.socket.down()
        await asyncio.sleep(2 * fault.size)
        async with engine.lock:
            await engine.socket.up()

    async def _engine_frames_lost(self, fault: Fault) -> None:
        await self._faulty(fault, EngineFaults(drop_every=1 + int(3 * fault.other)))

    async def _engine_replay_silent(self, fault: Fault) -> None:
        engine = self._engine(fault)
        engine.excuse = engine.excuse or "its replay endpoint was silent"
        await self._faulty(fault, EngineFaults(replay_silent=True, drop_every=7))

    async def _engine_replay_cut(self, fault: Fault) -> None:
        """End replays early. Each further replay continues there, as long as the one before had batches."""
        await self._faulty(fault, EngineFaults(truncate_replay=5 + int(20 * fault.other), drop_every=9))

    async def _faulty(self, fault: Fault, faults: EngineFaults) -> None:
        engine = self._engine(fault)
        engine.socket.faults = faults
        await asyncio.sleep(0.5 + 1.5 * fault.size)
        engine.socket.faults = EngineFaults()

    async def _engine_moved(self, fault: Fault) -> None:
        """Move an engine's sockets to other addresses, and register it with those."""
        engine = self._engine(fault)
        async with engine.lock:
            await engine.socket.down()
            engine.socket.endpoint = "tcp://127.0.0.1:0"
            if engine.socket.replay_endpoint is not None:
                engine.socket.replay_endpoint = "tcp://127.0.0.1:0"
            await engine.socket.up()
        await self._controller.register(engine)

    async def _engine_registered_anew(self, fault: Fault) -> None:
        engine = self._engine(fault)
        await self._controller.unregister(engine)
        await asyncio.sleep(0.3 * fault.size)
        await self._controller.register(engine)

    # ---- hostile ---------------------------------------------------------------------------------------

    async def _hostile_frame(self, fault: Fault) -> None:
        socket = self._hostile.socket
        usual, socket.encoder = socket.encoder, Raw(hostile_payload(fault.target, fault.size))
        self._hostile.send_empty_batch()
        socket.encoder = usual

    async def _hostile_record(self, fault: Fault) -> None:
        """Write, for a moment, a record that no process of this release writes, next to real records."""
        name, field, value = HOSTILE_RECORDS[fault.target % len(HOSTILE_RECORDS)]
        node = self._backend.of(name)
        with suppress(RedisError):
            await self._ask(node, "HSET", name, field, value)
            await asyncio.sleep(0.5 + 2 * fault.size)
            await self._ask(node, "HDEL", name, field)

    async def clean(self) -> None:
        """Remove hostile records that reappeared when Redis was set back."""
        for name, field, _ in HOSTILE_RECORDS:
            await self._ask(self._backend.of(name), "HDEL", name, field)

    async def _hostile_client(self, fault: Fault) -> None:
        """Send requests that are malformed, or never end."""
        replica = self._replica(fault)
        writers = []
        for i in range(4 + int(20 * fault.size)):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", replica.port)
                writer.write(HOSTILE_REQUESTS[(fault.target + i) % len(HOSTILE_REQUESTS)])
                writers.append(writer)
        with suppress(httpx.TransportError):
            body = json.dumps({"model": 1, "token_ids": [[]], "block_size": "x"})
            for path in ("/query", "/register", "/events", "/query_by_hash", "/unregister"):
                url, headers = f"http://127.0.0.1:{replica.port}{path}", {"content-type": "application/json"}
                answer = await self._http.post(url, content=body, headers=headers)
                self._controller.check_status(path, answer)
        await asyncio.sleep(fault.other)
        for writer in writers:
            writer.transport.abort()

    async def close(self) -> None:
        await self._http.aclose()


assert all(hasattr(Faults, "_" + name.replace(" ", "_")) for name in FAULTS), "a fault of the script has no method"
