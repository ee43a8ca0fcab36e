"""Requests to publishers whose answers have no end, over both transports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import zmq

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, Bench
from tests.ingest.endless import EMPTY, LONGEST, PART_MAX, ROUTER, publishing, publishing_at
from tests.patience import patient, within
from waymark.ingest import snapshot, unfinished
from waymark.ingest.replay import Replay
from waymark.ingest.request import EndlessMessage, PublisherRequest
from waymark.ingest.sockets import ZmqContext

pytestmark = pytest.mark.outside

Ask = Callable[[ZmqContext, str], Awaitable[object]]
Answering = Callable[..., AbstractAsyncContextManager[str]]


async def replayed(context: ZmqContext, endpoint: str) -> object:
    replay = Replay(context, endpoint, 0, idle_seconds=patient(60), portion_bytes=PART_MAX, message_bytes_max=PART_MAX)
    async with replay:
        return await replay.batches(10)


async def _go_on() -> bool:
    return True


async def snapshot_of(context: ZmqContext, endpoint: str) -> object:
    return await snapshot.ask(context, endpoint, seconds=patient(60), message_bytes_max=PART_MAX, between=_go_on)


async def records_of(context: ZmqContext, endpoint: str) -> object:
    return await snapshot.ask_records(
        context, endpoint, seconds=patient(60), message_bytes_max=PART_MAX, block_size=16, between=_go_on
    )


@pytest.fixture(params=["tcp", "ipc"])
def answering(request: pytest.FixtureRequest, tmp_path: Path) -> Answering:
    return publishing if request.param == "tcp" else partial(publishing_at, tmp_path / "router")


@pytest.mark.parametrize(
    ("then", "growth"), [(LONGEST, 0), (EMPTY, 2**24)], ids=["more bytes than any", "more memory than bytes"]
)
@pytest.mark.parametrize("ask", [replayed, snapshot_of, records_of])
async def test_an_answer_without_an_end_ends_the_request(
    context: ZmqContext, answering: Answering, ask: Ask, then: bytes, growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = count(0, growth)  # the process grows with each look, or not at all
    monkeypatch.setattr(unfinished, "process_memory", lambda: next(memory))
    monkeypatch.setattr(unfinished, "MEMORY_BYTES_MAX", 2**25)
    if not growth:
        monkeypatch.setattr(snapshot, "BYTES_MAX", 2**22)
    async with answering(then=then, ready=ROUTER) as endpoint, within(60):
        with pytest.raises(EndlessMessage, match=f"a message of {endpoint} is longer than"):
            await ask(context, endpoint)


@pytest.mark.parametrize("ask", [replayed, snapshot_of, records_of])
async def test_a_request_to_a_name_without_an_address_is_an_error(context: ZmqContext, ask: Ask) -> None:
    async with within(30):
        with pytest.raises(OSError, match=r"_endpoint tcp://no-such-host\.invalid:1: its host has no address, or"):
            await ask(context, "tcp://no-such-host.invalid:1")


async def test_an_answer_that_is_read_late_is_taken(context: ZmqContext, answering: Answering) -> None:
    """Its messages are whole, however many wait."""
    message = b"\x01\x00" + b"\x02" + PART_MAX.to_bytes(8, "big") + bytes(PART_MAX)
    async with answering(*[message] * 8, ready=ROUTER) as endpoint:
        asking = PublisherRequest(
            context, endpoint, "replay_endpoint", b"x", part_max=PART_MAX, message_max=2 * PART_MAX
        )
        async with asking:
            async with within(30):
                for _ in range(30):
                    await asking.readable(1.0)
            for _ in range(8):
                await wait_until(lambda: bool(asking.socket.poll(0)), "the next message")
                assert [len(part) for part in asking.messages.receive()] == [0, PART_MAX]
            with pytest.raises(zmq.Again):
                asking.messages.receive()


async def test_a_stream_whose_replay_has_no_end_goes_on(bench: Bench) -> None:
    await bench.worker(options=replace(QUICK, probe_seconds=min(1.5, patient(0.5))), message_bytes_max=PART_MAX)
    async with publishing(then=LONGEST, ready=ROUTER) as endpoint:
        pod = await bench.pod(fields={"replay_endpoint": endpoint})
        await pod.work(8)

        async def is_asked_again() -> bool:
            await pod.work(1)
            return (await pod.state()).counters.get("replays.silent", 0) > 1

        await wait_until(is_asked_again, "it is asked again", PATIENCE_SECONDS)
        await pod.has_status("degraded")


async def test_one_answer_without_an_end_after_the_other_does_not_fill_the_memory(
    context: ZmqContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libzmq frees of one is given back before the next has as much."""
    monkeypatch.setattr(unfinished, "MEMORY_BYTES_MAX", 2**26)
    begun, left = unfinished.process_memory(), list[int]()
    async with publishing(then=EMPTY, ready=ROUTER) as endpoint, within(60):
        for _ in range(4):
            with pytest.raises(EndlessMessage):
                await replayed(context, endpoint)
            left.append(unfinished.process_memory() - begun)
    assert max(left) < 2**26, left
