"""The sockets of a simulated engine: live frames over PUB, past ones over a ROUTER.

One publisher is one counter of batches and one buffer of the last ones. Live frames are ``[topic, seq, payload]``
with seq as eight bytes, big-endian; a replay request is ``["", start]``, its answers carry every buffered batch
from there on, and then an end marker: an empty payload under seq ``ff*8``.

The live socket is an XPUB. To a subscriber it is the same as a PUB, and ``subscribers`` counts who is connected, so
a test need not guess when the first frame may be sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from waymark.base.errors import InvalidValue
from waymark.simulator.encode import (
    CPU,
    DISK,
    GPU,
    BlockRemoved,
    BlockStored,
    Encoder,
    ReplayFraming,
    WireEvent,
    signed,
)
from waymark.simulator.options import Faults, is_due

END_SEQ = b"\xff" * 8
BIND_SECONDS = 5.0
"""The time to wait for an address that the last socket has not released yet."""

BEAT_SECONDS = 1.0
"""The pause between two empty batches, of an engine that makes snapshots."""

_GARBAGE = b"\xc1 this is no batch"


class SimulatedPublisher:
    """``async with SimulatedPublisher(...) as publisher``; both ends within one task.

    ``endpoint`` may be ``tcp://127.0.0.1:0`` or ``ipc://path``; once open, ``endpoint`` and ``replay_endpoint`` are the
    bound addresses. ``faults`` may be replaced at any time. ``counts`` holds ``batches``, ``dropped``, ``restarts``,
    ``replays``, ``bad_requests``. When it closes, unsent messages get ``linger_seconds``.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        snapshot_endpoint: str | None = None,
        *,
        encoder: Encoder,
        topic: str = "",
        buffer_batches: int = 10_000,
        replay_framing: ReplayFraming = "topic",
        first_seq: int = 0,
        linger_seconds: float = 0.0,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a publisher. With ``snapshot_endpoint`` each batch names the process, and an empty one is sent each
        second.
        """
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.snapshot_endpoint = snapshot_endpoint
        self.snapshot: Callable[[], list[tuple[int, list[WireEvent]]]] = list
        """Makes the chunks of a snapshot, each with its rank."""
        self.encoder = encoder
        self._clock = clock
        self._name_process()
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self.first_seq = first_seq
        self.next_seq = first_seq
        self._topic = topic.encode()
        self._framing = replay_framing
        self._linger_seconds = linger_seconds
        self._buffer: deque[tuple[int, bytes, bytes]] = deque(maxlen=buffer_batches)
        self._context = zmq.Context()
        self._async_context = zmq.asyncio.Context(shadow=self._context)
        self._live: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._snapshots: zmq.asyncio.Socket | None = None
        self._subscribers = 0
        self._tasks = asyncio.TaskGroup()
        self._serving: list[asyncio.Task[None]] = []

    # ---- sockets ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> SimulatedPublisher:
        await self._tasks.__aenter__()
        try:
            await self.up()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down(linger_seconds=self._linger_seconds)
        try:
            # The caller's own error is not the group's, which would wrap it.
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._context.term()

    async def close(self) -> None:
        """Close permanently, as leaving the ``async with`` does."""
        await self.__aexit__()

    async def up(self) -> None:
        """Bind both sockets, without any other change. An address in use is tried for ``BIND_SECONDS``."""
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._subscribers = 0
        self.endpoint = await _bind(self._live, self.endpoint, "--base-port")
        if self.replay_endpoint is not None:
            self._replay = self._async_context.socket(zmq.ROUTER)
            self.replay_endpoint = await _bind(self._replay, self.replay_endpoint, "--base-port")
            self._serving.append(self._tasks.create_task(self._serve(self._replay)))
        if self.snapshot_endpoint is not None:
            self._snapshots = self._async_context.socket(zmq.ROUTER)
            self.snapshot_endpoint = await _bind(self._snapshots, self.snapshot_endpoint, "--snapshot-port")
            if self._has_records:
                self._serving.append(self._tasks.create_task(self._serve_records(self._snapshots)))
            else:
                self._serving.append(self._tasks.create_task(self._serve_snapshots(self._snapshots)))
                self._serving.append(self._tasks.create_task(self._beat()))

    async def down(self, *, linger_seconds: float = 0.0) -> None:
        """Close both sockets, as a lost network does: seq and buffer stay."""
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        for socket in (self._live, self._replay, self._snapshots):
            if socket is not None:
                socket.close(linger=int(linger_seconds * 1000))
        self._live = self._replay = self._snapshots = None
        self._serving.clear()
        self._subscribers = 0

    async def restart(self, *, rebind: bool = False) -> None:
        """Restart the process: seq from ``first_seq``, an empty buffer. ``rebind`` closes the sockets in between."""
        if rebind:
            await self.down()
        self.encoder.reset()
        self._name_process()
        self.next_seq = self.first_seq
        self._buffer.clear()
        self.counts["restarts"] += 1
        if rebind:
            await self.up()

    @property
    def subscribers(self) -> int:
        """How many subscriptions are in place now."""
        while self._live is not None and self._live.poll(0, zmq.POLLIN):
            self._subscribers += 1 if self._live.recv()[:1] == b"\x01" else -1
        return self._subscribers

    @property
    def batches(self) -> list[tuple[int, bytes, bytes]]:
        """The batches of a replay: seq, payload and topic of each."""
        return list(self._buffer)

    # ---- live ------------------------------------------------------------------------------------------

    def publish(self, events: list[WireEvent], *, ts: float, rank: int | None = 0) -> int:
        """Send one batch and keep it for replay. Return its seq."""
        return self._send(self.encoder.payload(events, ts=ts, rank=rank))

    def publish_garbage(self) -> int:
        """Publish a frame of the right form whose payload is not a batch. Return its seq."""
        return self._send(_GARBAGE)

    def publish_payload(self, payload: bytes, topic: bytes | None = None) -> int:
        """Publish a frame with exactly this payload, under another topic if one is set. Return its seq."""
        return self._send(payload, topic)

    def send_malformed(self) -> None:
        """Send a frame with an invalid seq. It is not kept and does not use up a seq."""
        if self._live is not None and not self.is_silent:
            self._live.send_multipart([self._topic, b"seq", _GARBAGE])

    @property
    def is_silent(self) -> bool:
        """Whether the engine hangs."""
        return 0 < self.faults.silent_after <= self.counts["batches"]

    def _send(self, payload: bytes, topic: bytes | None = None) -> int:
        seq, topic = self.next_seq, self._topic if topic is None else topic
        is_lost = self.is_silent or self._live is None or is_due(self.faults.drop_every, self.counts["batches"] + 1)
        self.next_seq += 1
        self.counts["batches"] += 1
        self._buffer.append((seq, payload, topic))
        if is_lost or self._live is None:
            self.counts["dropped"] += 1
        else:
            _ = self.subscribers  # subscriptions are read off, or they would pile up in the socket
            self._live.send_multipart([topic, seq.to_bytes(8, "big"), payload])
        return seq

    # ---- replay ----------------------------------------------------------------------------------------

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            request = await socket.recv_multipart()
            if len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
                self.counts["bad_requests"] += 1
            elif not (self.faults.replay_silent or self.is_silent):
                self.counts["replays"] += 1
                await self._answer(socket, request[0], int.from_bytes(request[2], "big"))

    async def _answer(self, socket: zmq.asyncio.Socket, identity: bytes, start: int) -> None:
        faults = self.faults
        frames = [
            (topic, seq.to_bytes(8, "big"), payload)
            for seq, payload, topic in self._buffer
            if seq >= start + faults.late_replay and not is_due(faults.replay_hole_every, seq - self.first_seq + 1)
        ]
        if faults.truncate_replay:
            frames = frames[: faults.truncate_replay]
        else:
            frames.append((b"", END_SEQ, b""))
        for topic, seq, payload in frames:
            rest = [seq, payload] if self._framing == "seq" else [topic, seq, payload]
            await socket.send_multipart([identity, b"", *rest])

    # ---- snapshots -------------------------------------------------------------------------------------

    def _name_process(self) -> None:
        is_named = self.snapshot_endpoint is not None and not self._has_records
        self.encoder.publisher_id = secrets.token_bytes(16) if is_named else None

    @property
    def _has_records(self) -> bool:
        return self.encoder.dialect.startswith("sglang")

    async def _beat(self) -> None:
        """Send an empty batch each second, so that a reader sees a loss soon."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self.publish([], ts=self._clock())

    async def _serve_snapshots(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, *request = await socket.recv_multipart()
            if request != [b"", b"snapshot"]:
                self.counts["bad_requests"] += 1
            elif not (self.faults.snapshot_silent or self.is_silent):
                self.counts["snapshots"] += 1
                await socket.send_multipart([identity, b"", *self._snapshot()])

    async def _serve_records(self, socket: zmq.asyncio.Socket) -> None:
        """Answer as SGLang does: a header, chunks of records, and an end, each a message."""
        while True:
            identity, *request = await socket.recv_multipart()
            if request not in ([b"", b"snapshot-v1"], [b"", b"snapshot-v2"]):
                self.counts["bad_requests"] += 1
            elif request[1][-1:] != b"%d" % self.faults.snapshot_version:
                await socket.send_multipart([identity, b"", b"error", b"unsupported_version"])
            elif not (self.faults.snapshot_silent or self.is_silent):
                self.counts["snapshots"] += 1
                for kind, payload in self._record_messages():
                    await socket.send_multipart([identity, b"", kind, payload])

    def _record_messages(self) -> list[tuple[bytes, bytes]]:
        faults = self.faults
        chunks = [_records(events, faults.snapshot_version) for _, events in self.snapshot()]
        chunks = [chunk for chunk in chunks if chunk]
        barrier = self.next_seq - 1
        header = {
            "version": faults.snapshot_version,
            "epoch": 1,
            "replica_rank": 0,
            "resume_seq": barrier + 1,
            "barrier_seq": barrier,
            "barrier_id": 1,
            "record_count": sum(map(len, chunks)) + faults.snapshot_below_zero,
        }
        packed = [msgpack.packb(chunk) for chunk in chunks]
        if packed and faults.snapshot_cut:
            packed[-1] = packed[-1][: len(packed[-1]) // 2]
        return [(b"header", msgpack.packb(header)), *((b"chunk", content) for content in packed), (b"end", b"")]

    def _snapshot(self) -> list[bytes]:
        faults, publisher_id = self.faults, self.encoder.publisher_id
        assert publisher_id is not None
        if self.counts["snapshots"] <= faults.snapshot_unavailable:
            return [(-2).to_bytes(8, "big", signed=True), publisher_id]
        ts = self._clock()
        chunks = [self.encoder.payload(events, ts=ts, rank=rank) for rank, events in self.snapshot()]
        if chunks and faults.snapshot_below_zero:
            rank, events = self.snapshot()[-1]
            removed = [event for event in events if isinstance(event, BlockRemoved)]
            removed *= 1 + max(Counter(e.block_hashes for e in events if isinstance(e, BlockStored)).values())
            chunks.append(self.encoder.payload(list(removed), ts=ts, rank=rank))
        if chunks and faults.snapshot_cut:
            chunks[-1] = chunks[-1][: len(chunks[-1]) // 2]
        if chunks and faults.snapshot_other_id:
            chunks[-1] = chunks[-1].replace(publisher_id, bytes(16))
        return [(self.next_seq - 1).to_bytes(8, "big", signed=True), publisher_id, *chunks]


def _records(events: Sequence[WireEvent], version: int) -> list[dict[str, Any]]:
    """Return the records of a chunk, in the form of this version of the request."""
    stores = [event for event in events if isinstance(event, BlockStored)]
    parents = {event.block_hashes[0]: event.parent_block_hash for event in stores if event.token_ids}
    references = {(event.block_hashes[0], event.medium) for event in stores if not event.token_ids}
    if version == 1:
        return [
            {"parent_block_hash": signed(parents[engine_hash]), "block_hashes": [signed(engine_hash)]}
            for engine_hash, medium in references
            if medium == GPU
        ]
    tiers = {medium: tier for tier, medium in enumerate((GPU, CPU, DISK), 1)}
    return [
        {
            "parent_block_hash": signed(parents[engine_hash]),
            "block_hash": signed(engine_hash),
            "tier": tiers[medium],
            "component_mask": 1,
            "block_size": stores[0].block_size,
        }
        for engine_hash, medium in references
    ]


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str, flag: str) -> str:
    """Bind without any limit on waiting messages. Return the bound endpoint. An error names the flag of the port."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    deadline = asyncio.get_running_loop().time() + BIND_SECONDS
    for pause_seconds in itertools.chain((0.01, 0.02, 0.05), itertools.repeat(0.1)):
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            is_used = error.errno == zmq.EADDRINUSE
            if not is_used or asyncio.get_running_loop().time() > deadline:
                sentence = f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}"
                way_out = f"; end what has this port, or choose another {flag}" if is_used else ""
                raise InvalidValue(sentence + way_out, field="endpoint") from error
            await asyncio.sleep(pause_seconds)
        else:
            break
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
