"""A batch that stands for several frames: which frames it takes, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgpack
import pytest

from waymark.apply.applier import Incoming
from waymark.apply.slices import SliceRunner
from waymark.base import native
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.domain.events import Removed
from waymark.engines import decoder as decode_as
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import Frame, PayloadFacts, digest
from waymark.ingest.received import ReceivedFrames
from waymark.ingest.subscriber import Subscriber

pytestmark = pytest.mark.skipif(not native.is_built, reason="built without the C part")


@pytest.fixture(autouse=True)
def with_c(implementation_kept: None) -> None:
    native.select(True)


def removal(*hashes: int, rank: int = 0) -> bytes:
    payload: bytes = msgpack.packb([1.0, [["BlockRemoved", list(hashes), "GPU"]], rank])
    return payload


def frame(seq: int, payload: bytes | PayloadFacts, topic: bytes = b"", connection: int = 1) -> Frame:
    return Frame(seq, payload, topic, connection, 0.0)


class Decoding:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.decoder = BatchDecoder(
            "s", None, decode_as(EngineKind.VLLM, seed=1337), SliceRunner(), lambda name: None, self.metrics
        )

    async def run(self, frames: Sequence[Frame], *, hashes_max: int = 100, bytes_max: int = 10_000) -> Incoming:
        """The batch of the first frame, with those of the others that go together with it."""
        first = await self.decoder.decode(frames[0].seq, frames[0].payload, b"")
        assert first is not None
        return await self.decoder.go_on(first, frames[1:], hashes_max=hashes_max, bytes_max=bytes_max)

    @property
    def frames(self) -> float:
        return self.metrics.frames.value


async def test_a_batch_takes_the_next_frames_that_say_the_same() -> None:
    decoding = Decoding()
    frames = [frame(seq, removal(seq)) for seq in range(5, 25)]
    incoming = await decoding.run([*frames, frame(25, removal(25, rank=1)), frame(26, removal(26))])
    assert (incoming.seq, incoming.last_seq, incoming.batch.frames) == (5, 24, 20)
    assert incoming.digest == digest(frames[-1].payload)
    assert incoming.size == sum(len(each.payload) for each in frames)
    events = [each for i in range(20) for each in incoming.batch.frame(i).events]
    assert [each.engine_hashes for each in events if isinstance(each, Removed)] == [(seq,) for seq in range(5, 25)]
    assert decoding.frames == 20


async def test_without_a_frame_that_says_the_same_a_batch_is_that_of_its_frame() -> None:
    decoding = Decoding()
    for other in (removal(2, rank=1), b"", PayloadFacts(10**9, "d"), removal(2) + b"x"):
        first = frame(1, removal(1))
        assert (await decoding.run([first, frame(2, other), frame(3, removal(3))])).batch.frames == 1
    cleared: bytes = msgpack.packb([1.0, [["AllBlocksCleared"]], 0])
    assert (await decoding.run([frame(1, cleared), frame(2, cleared)])).batch.frames == 1


@pytest.mark.parametrize(("hashes_max", "frames"), [(1, 1), (2, 2), (7, 7)])
async def test_a_batch_takes_no_more_hashes_than_a_call_has(hashes_max: int, frames: int) -> None:
    incoming = await Decoding().run([frame(seq, removal(seq)) for seq in range(9)], hashes_max=hashes_max)
    assert incoming.batch.frames == frames


async def test_a_batch_takes_no_more_bytes_than_a_fold_has() -> None:
    frames = [frame(seq, removal(seq)) for seq in range(9)]
    size = len(frames[0].payload)
    assert (await Decoding().run(frames, bytes_max=6 * size)).batch.frames == 6
    assert (await Decoding().run(frames, bytes_max=6 * size - 1)).batch.frames == 5


async def test_a_number_that_no_publisher_comes_to_is_not_taken() -> None:
    frames = [frame(seq, removal(seq % 100)) for seq in range(2**53 - 3, 2**53 + 2)]
    assert (await Decoding().run(frames)).last_seq == 2**53 - 1


class Waiting:
    """The frames of a subscriber."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = list(frames)

    def take(self, limit: int) -> list[Frame]:
        taken, self._frames = self._frames[:limit], self._frames[limit:]
        return taken

    @property
    def waiting(self) -> Iterator[Any]:
        return iter(self._frames)


@pytest.mark.parametrize(
    ("third", "behind"),
    [
        (frame(3, b"3"), [2, 3, 4]),
        (frame(4, b"3"), [2]),
        (frame(2, b"3"), [2]),
        (frame(3, b"3", topic=b"t"), [2]),
        (frame(3, b"3", connection=2), [2]),
    ],
)
def test_the_frames_behind_one_are_in_order_and_of_its_topic_and_connection(third: Frame, behind: list[int]) -> None:
    received = ReceivedFrames(cast("Subscriber", Waiting([frame(1, b"1"), frame(2, b"2"), third, frame(4, b"4")])))
    received.take(10)
    first = received.next()
    assert first is not None
    for _ in range(2):  # they stay
        assert [each.seq for each in received.behind(first) or ()] == behind
    received.skip(len(behind))
    left = received.next()
    assert (left is None) == (len(behind) == 3)


def test_a_frame_that_a_replay_has_applied_is_not_behind_another_one() -> None:
    received = ReceivedFrames(cast("Subscriber", Waiting([frame(seq, b"") for seq in range(1, 6)])))
    received.take(10)
    received.applied(4)
    first = received.next()
    assert first is not None
    assert [each.seq for each in received.behind(first) or ()] == [2, 3]
