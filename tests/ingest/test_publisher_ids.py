"""Engines whose batches name their process: what another id shows, and what the same one proves.

The engine here is made by hand, as far as a stream sees it: the socket, the replays, and what is left of its batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from tests.conftest import wait_until
from tests.factories import keys, registration
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench
from tests.ingest.test_stream_rules import CLEAR, Held, held, remove, store
from tests.patience import within
from waymark.domain.engines import EngineKind
from waymark.store import keys as names
from waymark.store.publisher_states import PublisherState

FIRST, SECOND, THIRD = (bytes([each]) * 16 for each in (1, 2, 3))
GPU = "0 GPU"


class HandmadeEngine:
    """A publisher of type vLLM. What it sends while it is down is only in its replay buffer."""

    def __init__(self, bench: Bench, *, kept: int | None) -> None:
        self.bench = bench
        self.context = zmq.asyncio.Context()
        self.endpoint, self.replay_endpoint = bench.address(), None if kept is None else bench.address()
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.ts = 1.0
        self.socket: zmq.asyncio.Socket | None = None
        self._replies: asyncio.Task[None] | None = None

    async def register(self, kind: EngineKind = EngineKind.VLLM) -> None:
        fields = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        await self.bench.store.registry.register(registration(kind, **fields))
        if self.replay_endpoint is not None:
            self._replies = asyncio.create_task(self._reply())

    async def up(self) -> None:
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.bind(self.endpoint)
        await self.subscribed()

    async def subscribed(self) -> None:
        """Wait for a further subscriber."""
        assert self.socket is not None
        async with within(PATIENCE_SECONDS):
            while not (await self.socket.recv()).startswith(b"\1"):
                pass

    async def down(self) -> None:
        assert self.socket is not None
        self.socket.close(0)
        self.socket = None
        await self.has(lambda state: state.status == "unreachable")

    async def send(self, seq: int, publisher_id: bytes | None, *events: Any) -> None:
        self.ts += 1
        payload = msgpack.packb([self.ts, list(events), 0, *([] if publisher_id is None else [publisher_id])])
        self.batches.append((seq, payload))
        if self.socket is not None:
            await self.socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    async def state(self) -> PublisherState:
        (claim,) = await self.bench.store.directory.claims()
        (state,) = await self.bench.store.publisher_states.of([claim])
        return state

    async def has(self, is_so: Callable[[PublisherState], bool]) -> None:
        async def does() -> bool:
            return is_so(await self.state())

        await wait_until(does, "the stream has come so far", PATIENCE_SECONDS)

    async def counted(self, **counts: int) -> None:
        await self.has(lambda state: all(state.counters.get(name, 0) == n for name, n in counts.items()))

    async def at(self, seq: int) -> None:
        await self.has(lambda state: state.watermark == seq)

    async def held(self) -> Held:
        (claim,) = await self.bench.store.directory.claims()
        found = await held(self.bench, names.record(claim.group_id, claim.publisher))
        return {name: blocks for name, blocks in found.items() if blocks}

    async def close(self) -> None:
        if self._replies is not None:
            self._replies.cancel()
            with suppress(asyncio.CancelledError):
                await self._replies
        self.context.destroy(0)

    async def _reply(self) -> None:
        socket = self.context.socket(zmq.ROUTER)
        assert self.replay_endpoint is not None
        socket.bind(self.replay_endpoint)
        while True:
            client, *_, start = await socket.recv_multipart()
            for seq, payload in list(self.batches):
                if seq >= int.from_bytes(start, "big"):
                    await socket.send_multipart([client, b"", seq.to_bytes(8, "big"), payload])
            await socket.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


@pytest.fixture
async def engine(bench: Bench, request: pytest.FixtureRequest) -> AsyncIterator[HandmadeEngine]:
    """An engine without replays, or that keeps as many batches as the parameter says."""
    found = HandmadeEngine(bench, kept=getattr(request, "param", None))
    try:
        yield found
    finally:
        await found.close()


async def started(engine: HandmadeEngine) -> None:
    """Blocks A and B of the first process, applied."""
    await engine.register()
    await engine.bench.worker(options=WITHOUT_PROBES if engine.replay_endpoint is None else QUICK)
    await engine.up()
    await engine.send(0, FIRST, store([1], "A"))
    await engine.send(1, FIRST, store([2], "B", 1))
    await engine.at(1)


async def test_another_id_is_another_life_though_its_number_is_the_next(engine: HandmadeEngine) -> None:
    await started(engine)
    await engine.down()
    await engine.up()
    await engine.send(2, SECOND, store([1], "X"))
    await engine.counted(restarts=1)
    await engine.at(2)
    assert await engine.held() == {GPU: set(keys("X"))}
    await engine.has(lambda state: "joined_late" in (state.last_error or ""))
    await engine.send(3, SECOND, store([2], "Y", 1))
    await engine.at(3)
    assert await engine.held() == {GPU: set(keys("XY"))}
    await engine.counted(restarts=1, gaps=0, batches_lost=0)


async def test_another_id_is_seen_without_a_new_connection_and_the_former_one_comes_too_late(
    engine: HandmadeEngine,
) -> None:
    await started(engine)
    await engine.send(5, SECOND, store([1], "X"))
    await engine.send(2, FIRST, store([3], "C", 2))
    await engine.send(6, SECOND, store([2], "Y", 1))
    await engine.at(6)
    assert await engine.held() == {GPU: set(keys("XY"))}
    await engine.counted(restarts=1, gaps=0, stale_batches=1)


async def test_the_next_worker_knows_the_process_from_redis(engine: HandmadeEngine) -> None:
    await engine.register()
    worker = await engine.bench.worker(options=WITHOUT_PROBES)
    await engine.up()
    await engine.send(0, FIRST, store([1], "A"))
    await engine.at(0)
    await worker.stop()
    await engine.bench.worker("worker-2", options=WITHOUT_PROBES)
    await engine.subscribed()
    await engine.has(lambda state: state.status == "active" and state.worker == "worker-2")
    await engine.send(1, SECOND, store([1], "X"))
    await engine.counted(restarts=1)
    await engine.at(1)
    assert await engine.held() == {GPU: set(keys("X"))}


async def test_the_same_id_proves_that_nothing_was_missed(engine: HandmadeEngine) -> None:
    await started(engine)
    await engine.down()
    await engine.up()
    await engine.send(2, FIRST, store([3], "C", 2))
    await engine.at(2)
    assert await engine.held() == {GPU: set(keys("ABC"))}
    # Without an id, a lower number with a newer time would be a restart.
    await engine.send(1, FIRST, store([9], "Z"))
    await engine.send(3, FIRST, store([4], "D", 3))
    await engine.at(3)
    assert await engine.held() == {GPU: set(keys("ABCD"))}
    await engine.counted(restarts=0, gaps=0, batches_lost=0, stale_batches=1)


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_with_the_same_id_a_short_replay_costs_its_batches_and_not_the_life(engine: HandmadeEngine) -> None:
    await started(engine)
    await engine.down()
    for seq in range(2, 6):
        await engine.send(seq, FIRST, store([seq], "CDEF"[seq - 2], None))
    await engine.up()
    await engine.at(5)
    await engine.counted(restarts=0, batches_lost=2)
    assert await engine.held() == {GPU: {*keys("AB"), *keys("E"), *keys("F")}}


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_with_another_id_a_short_replay_is_another_life(engine: HandmadeEngine) -> None:
    await started(engine)
    await engine.down()
    for seq in range(2, 4):
        await engine.send(seq, SECOND, store([seq], "CD"[seq - 2], None))
    await engine.up()
    await engine.at(3)
    await engine.counted(restarts=1)
    assert await engine.held() == {GPU: {*keys("C"), *keys("D")}}


@pytest.mark.parametrize("publisher_id", [None, FIRST], ids=["no id", "an id"])
async def test_a_clear_of_a_process_with_an_id_is_of_the_device(
    engine: HandmadeEngine, publisher_id: bytes | None
) -> None:
    await engine.register()
    await engine.bench.worker(options=WITHOUT_PROBES)
    await engine.up()
    await engine.send(0, publisher_id, store([1, 2], "AB"), store([1, 2], "", medium="CPU"))
    await engine.send(1, publisher_id, store([3], "C", 2), CLEAR, store([1], "A"), store([4], "D", 1))
    await engine.at(1)
    device = {GPU: set(keys("AD"))}
    off_device = {} if publisher_id is None else {"0 CPU": set(keys("AB"))}
    assert await engine.held() == device | off_device
    await engine.send(2, publisher_id, CLEAR)
    await engine.send(3, publisher_id)  # a heartbeat
    await engine.at(3)
    assert await engine.held() == off_device


async def test_an_id_that_is_none_counts_as_no_id(engine: HandmadeEngine) -> None:
    await started(engine)
    for seq, odd in enumerate([b"short", "text" * 4, 7, [FIRST], {"id": FIRST}], 2):
        await engine.send(seq, odd, store([seq + 1], "CDEFG"[seq - 2], seq))  # type: ignore[arg-type]
    await engine.at(6)
    assert await engine.held() == {GPU: set(keys("ABCDEFG"))}
    await engine.counted(restarts=0)


async def test_copies_are_what_the_engine_says(engine: HandmadeEngine) -> None:
    await engine.register()
    await engine.bench.worker(options=WITHOUT_PROBES)
    await engine.up()
    both, again = store([1, 2], "AB"), store([1, 2], "AB", origin="REUSED")
    seq = 0

    async def after(*events: Any) -> Held:
        nonlocal seq
        await engine.send(seq, THIRD, *events)
        await engine.at(seq)
        seq += 1
        return await engine.held()

    there = {GPU: set(keys("AB"))}
    assert await after(both, both) == there
    assert (await engine.state()).copies.rule == "count"
    assert await after(remove(2, 1, remaining_copy_counts=[1, 1])) == there
    assert await after(remove(2, 1, remaining_copy_counts=[0, 0])) == {}
    assert (await engine.state()).copies.rule == "set"
    assert await after(both, again, again) == there
    assert await after(remove(1, 2)) == {}
    # A count that is none says nothing; the removal is one all the same.
    assert await after(both, remove(1, 2, remaining_copy_counts=[-1, "x"])) == {}
    await engine.counted(copies_contradicted=0, **{"decode_errors.bad_event": 0})


async def test_an_engine_that_has_another_number_of_copies_is_counted(engine: HandmadeEngine) -> None:
    await engine.register()
    hand = await engine.bench.worker(options=WITHOUT_PROBES)
    await engine.up()
    both = store([1, 2], "AB")
    await engine.send(0, THIRD, both, both, remove(1, 2, remaining_copy_counts=[1, 0]))
    await engine.at(0)
    await engine.counted(copies_contradicted=1)
    assert hand.metric("copies_contradicted_total") == 1
