"""A publisher of hostile frames, two workers, and neighbours: no other worker takes its stream, and they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tests.ingest.conftest import WITHOUT_PROBES, Bench, Pod
from tests.patience import patient
from waymark.apply.slices import SliceRunner
from waymark.domain.plain_runs import AlikeFrames
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import FrameBuffer, PayloadFacts

ROUNDS = 4
#: Turns of the loop that a neighbour's frame may wait; a report that is under way to Redis takes most of them.
TURNS_MAX = 60
#: Above this a payload is one of the hostile ones.
HOSTILE_BYTES = 50_000


def batch(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([1.0, list(events), 0])
    return packed


def bytewise(count: int, byte: bytes, *, is_removal: bool = False) -> bytes:
    """A batch of so many events of one byte, or of one removal of so many hashes."""
    several = b"\xdd" + count.to_bytes(4, "big") + byte * count
    return b"\x93\x01" + (b"\x91\x92\xacBlockRemoved" + several if is_removal else several) + b"\x00"


#: Made when they are needed: they take a second, and tens of megabytes.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: batch(*([[]] * 4_000_000)),
    "empty lists below the ceiling": lambda: batch(*([[]] * 65_000)),
    "empty maps below the ceiling": lambda: batch(*([{}] * 65_000)),
    "removed": lambda: batch(["BlockRemoved", [2**62 + i for i in range(1_800_000)]]),
    "removed below the ceiling": lambda: batch(["BlockRemoved", [2**62 + i for i in range(262_000)]]),
    "stores below the ceiling": lambda: batch(
        *(["BlockStored", [i + 1], None, [1, 2, 3, i], 4, None, "GPU"] for i in range(20_000))
    ),
    # The last two are larger than a frame may be. They are sent once.
    "20 million empty maps": lambda: bytewise(20_000_000, b"\x80"),
    "20 million removed": lambda: bytewise(20_000_000, b"\x07", is_removal=True),
}


class Lag:
    """How many turns of the loop streams have taken, how many while a frame of a neighbour waited, and how many gave
    others a turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns = self.most = self.measured = self.shared = self._others = 0
        self._arrived: dict[int, tuple[bytes, int]] = {}
        put, decode, pause = FrameBuffer.put, BatchDecoder.decode, SliceRunner.pause
        take = AlikeFrames.take

        def putting(buffer: FrameBuffer, frame: Any) -> None:
            is_too_long = isinstance(frame.payload, PayloadFacts)
            if not is_too_long and len(frame.payload) < HOSTILE_BYTES:
                self._arrived[id(frame.payload)] = frame.payload, self.turns
            put(buffer, frame)

        def began(payload: bytes) -> None:
            if (arrived := self._arrived.pop(id(payload), None)) is not None:
                self.most = max(self.most, self.turns - arrived[1])
                self.measured += 1

        def going(frames: AlikeFrames, seq: int, payloads: tuple[bytes, ...], *rest: Any) -> Any:
            for payload in payloads:
                began(payload)
            return take(frames, seq, payloads, *rest)

        async def beginning(decoder: BatchDecoder, seq: int, payload: bytes, topic: bytes, **options: Any) -> Any:
            began(payload)
            return await decode(decoder, seq, payload, topic, **options)

        def other() -> None:
            self._others += 1

        async def counting(runner: SliceRunner) -> None:
            self.turns += 1
            before = self._others
            asyncio.get_running_loop().call_soon(other)
            await pause(runner)
            self.shared += self._others > before

        monkeypatch.setattr(FrameBuffer, "put", putting)
        monkeypatch.setattr(BatchDecoder, "decode", beginning)
        monkeypatch.setattr(AlikeFrames, "take", going)
        monkeypatch.setattr(SliceRunner, "pause", counting)
        # A turn after every slice: turns count work, whatever the machine's clock says.
        monkeypatch.setattr("waymark.apply.slices.SLICE_SECONDS", 0.0)


@pytest.mark.long
async def test_neighbours_go_on_and_a_hostile_stream_is_not_taken_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(WITHOUT_PROBES, lease_seconds=patient(2.0))
    hands = [await bench.worker(f"worker-{i}", options) for i in range(2)]
    hostile = await bench.pod("hostile")
    neighbours = [await bench.pod(f"pod-{i}") for i in range(4)]
    for pod in (hostile, *neighbours):
        await pod.caught_up()
    before = await bench.record(hostile.name)
    lag = Lag(monkeypatch)
    hostile_payloads = [payload() for payload in HOSTILE.values()]

    async def flood() -> None:
        for number in range(ROUNDS // 4):
            for payload in hostile_payloads[: None if number == 0 else -2]:
                hostile.publisher.publish_payload(payload)
                await asyncio.sleep(0)

    async def work(pod: Pod) -> None:
        for _ in range(ROUNDS):
            await pod.work(1)
            await pod.at_watermark(pod.last_seq)

    await flood()
    await asyncio.gather(*map(work, neighbours))
    await hostile.at_watermark(hostile.last_seq)
    assert lag.measured >= ROUNDS * len(neighbours)
    assert lag.turns > 10 * TURNS_MAX, "there was work to wait behind"
    assert lag.shared > lag.turns / 2, "others ran meanwhile"
    assert lag.most <= TURNS_MAX
    after = await bench.record(hostile.name)
    assert (after["token"], after["worker"]) == (before["token"], before["worker"]), "nobody took it over"
    assert sum(hand.metric("leases_lost_total") for hand in hands) == 0
    await hostile.counted(restarts=0)
    for pod in neighbours:
        await pod.agrees()
        await pod.counted(restarts=0, gaps=0, batches_lost=0)
