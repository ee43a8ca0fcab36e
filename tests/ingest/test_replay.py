"""The DEALER side over real sockets: both framings, every way to end, and bounded portions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.conftest import wait_until
from tests.patience import within
from waymark.base.errors import InvalidValue
from waymark.ingest.frames import ReplayedBatch
from waymark.ingest.replay import Replay, ReplayOutcome
from waymark.ingest.sockets import ZmqContext

END = [b"", b"\xff" * 8, b""]


class Router:
    """The replay endpoint of a publisher, answering by hand."""

    def __init__(self, context: ZmqContext, endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.client = b""

    async def request(self) -> list[bytes]:
        """The next request, without the identity of who sent it."""
        await wait_until(lambda: bool(self.socket.poll(0)), "a request")
        self.client, *parts = self.socket.recv_multipart()
        return parts

    def answer(self, *replies: list[bytes]) -> None:
        for reply in replies:
            self.socket.send_multipart([self.client, *reply])


@pytest.fixture(params=["tcp", "ipc"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Router]:
    context: ZmqContext = zmq.Context()
    router = Router(context, "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/replay")
    yield router
    router.socket.close(0)
    context.term()


def reply(seq: int, payload: bytes = b"batch") -> list[bytes]:
    return [b"", seq.to_bytes(8, "big"), payload]


def replay_of(context: ZmqContext, endpoint: str, start: int = 0, **options: Any) -> Replay:
    return Replay(context, endpoint, start, **{"idle_seconds": 5.0, "portion_bytes": 2**20, **options})


async def take_all(replay: Replay, limit: int = 100) -> list[tuple[int, bytes]]:
    batches: list[tuple[int, bytes]] = []
    async with within(10):
        while portion := await replay.batches(limit):
            assert len(portion) <= limit
            batches += [reply[:2] for reply in portion]
    return batches


async def test_the_request_is_an_empty_frame_and_a_seq(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint, 2**63 + 5):
        assert await router.request() == [b"", (2**63 + 5).to_bytes(8, "big")]


@pytest.mark.parametrize("topic", [[], [b""], [b"kv@pod@model"]], ids=["no-topic", "empty-topic", "topic"])
async def test_a_replay_is_complete_at_its_end_marker(context: ZmqContext, router: Router, topic: list[bytes]) -> None:
    async with replay_of(context, router.endpoint, 3) as replay:
        await router.request()
        router.answer(*([b"", *topic, *reply(seq)[1:]] for seq in (3, 4, 6)), [b"", *topic, *END[1:]])
        assert await take_all(replay) == [(3, b"batch"), (4, b"batch"), (6, b"batch")]
        assert replay.outcome is ReplayOutcome.COMPLETE
        assert await replay.batches(1) == []


async def test_an_end_marker_alone_is_a_complete_replay_of_nothing(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        router.answer(END)
        assert await take_all(replay) == []
        assert replay.outcome is ReplayOutcome.COMPLETE


async def test_replies_that_come_while_we_wait_are_given_at_once(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay, within(10):
        first = asyncio.create_task(replay.batches(10))
        await router.request()
        router.answer(reply(0))
        assert await first == [ReplayedBatch(0, b"batch")]
        assert replay.outcome is None
        second = asyncio.create_task(replay.batches(10))
        router.answer(END)
        assert await second == []
        assert replay.outcome is ReplayOutcome.COMPLETE


async def test_replies_that_stop_leave_the_replay_idle(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint, idle_seconds=0.2) as replay:
        await router.request()
        router.answer(reply(0), reply(1))
        assert [seq for seq, _ in await take_all(replay)] == [0, 1]
        assert replay.outcome is ReplayOutcome.IDLE


async def test_a_malformed_reply_is_counted_and_its_neighbours_arrive(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        router.answer(reply(0), [b"junk"], [b"", b"short", b"batch"], [b"1", b"2", *reply(9)], reply(1), END)
        assert [seq for seq, _ in await take_all(replay)] == [0, 1]
        assert replay.outcome is ReplayOutcome.COMPLETE
        assert replay.malformed == 3


async def test_more_garbage_than_one_portion_hides_nothing(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        router.answer(*([b"junk"] for _ in range(500)), reply(0), END)
        assert await take_all(replay, limit=10) == [(0, b"batch")]
        assert replay.outcome is ReplayOutcome.COMPLETE
        assert replay.malformed == 500


async def test_a_reply_of_many_parts_is_one_that_is_malformed(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        router.answer(reply(0), [b""] * 20_000, [b"", b"", *reply(7)], reply(1), END)
        assert await take_all(replay) == [(0, b"batch"), (1, b"batch")]
        assert replay.outcome is ReplayOutcome.COMPLETE
        assert replay.malformed == 2


@pytest.mark.parametrize(
    ("sent", "options", "outcome"),
    [
        pytest.param([b"junk"], {"idle_seconds": 0.2}, ReplayOutcome.IDLE, id="garbage-does-not-put-off-idle"),
        pytest.param(reply(0), {"deadline_in": 0.2}, ReplayOutcome.DEADLINE, id="batches-do-not-put-off-the-deadline"),
        pytest.param([b"junk"], {"deadline_in": 0.2}, ReplayOutcome.DEADLINE, id="neither-does-garbage"),
    ],
)
async def test_a_replay_without_an_end_is_ended(
    context: ZmqContext, router: Router, sent: list[bytes], options: dict[str, Any], outcome: ReplayOutcome
) -> None:
    async def answer_forever() -> None:
        while True:
            router.answer(sent)
            await asyncio.sleep(0.005)

    if "deadline_in" in options:
        options = {"deadline": time.monotonic() + options["deadline_in"]}
    async with replay_of(context, router.endpoint, **options) as replay:
        await router.request()
        answering = asyncio.create_task(answer_forever())
        await take_all(replay)
        answering.cancel()
        assert replay.outcome is outcome


async def test_a_deadline_that_has_passed_reads_nothing(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint, deadline=time.monotonic()) as replay:
        await router.request()
        router.answer(reply(0), END)
        assert await replay.batches(10) == []
        assert replay.outcome is ReplayOutcome.DEADLINE


async def test_nobody_at_the_endpoint_leaves_the_replay_idle(context: ZmqContext, tmp_path: Path) -> None:
    async with replay_of(context, f"ipc://{tmp_path}/nobody", idle_seconds=0.2) as replay:
        assert await take_all(replay) == []
        assert replay.outcome is ReplayOutcome.IDLE
        assert replay.malformed == 0


async def test_a_portion_ends_with_the_payload_that_reaches_its_bytes(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint, portion_bytes=250) as replay:
        await router.request()
        router.answer(*(reply(seq, b"x" * 100) for seq in range(7)), END)
        batches: list[int] = []
        async with within(10):
            while portion := await replay.batches(100):
                assert sum(len(each.payload) for each in portion) <= 300
                batches += [each.seq for each in portion]
        assert batches == list(range(7))
        assert replay.outcome is ReplayOutcome.COMPLETE


async def test_a_big_replay_arrives_whole(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        router.answer(*(reply(seq) for seq in range(10_000)), END)
        assert [seq for seq, _ in await take_all(replay, limit=256)] == list(range(10_000))
        assert replay.outcome is ReplayOutcome.COMPLETE


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "carrier-pigeon://roof"])
async def test_an_endpoint_that_cannot_be_read_is_refused(context: ZmqContext, endpoint: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        await replay_of(context, endpoint).__aenter__()
    assert refused.value.field == "replay_endpoint"
    assert endpoint in refused.value.sentence


async def test_a_replay_left_in_the_middle_leaves_nothing_open(context: ZmqContext, router: Router) -> None:
    async with replay_of(context, router.endpoint) as replay:
        await router.request()
        waiting = asyncio.create_task(replay.batches(10))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        router.answer(reply(0), reply(1))
        assert await replay.batches(1) == [ReplayedBatch(0, b"batch")]
