"""What the subscribers of a worker share: the end of messages without an end, and rarer attempts at many engines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import wait_until
from tests.hostile.engine_client import GREETING, READY
from tests.ingest.conftest import WITHOUT_PROBES, Bench
from tests.ingest.endless import EMPTY, FRAME, LONGEST, PART_MAX, publishing, publishing_at
from tests.listening import listening, port_of
from tests.patience import patient
from waymark.ingest import subscriber as subscriber_module
from waymark.ingest import subscribers as module
from waymark.ingest import unfinished
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.subscriber import Subscriber
from waymark.ingest.subscribers import Subscribers

pytestmark = pytest.mark.outside

IN_A_THREAD = asyncio.to_thread


@asynccontextmanager
async def following(context: ZmqContext, endpoint: str, others: Subscribers) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(
        context, endpoint, buffer_bytes=2**24, buffer_frames=1000, subscribers=others, message_bytes_max=PART_MAX
    )
    async with subscriber:
        yield subscriber


async def test_a_message_without_an_end_ends_its_connection_and_no_other(context: ZmqContext) -> None:
    others, now = Subscribers(message_bytes_max=PART_MAX), 0.0
    async with publishing(FRAME, FRAME) as honest_endpoint, following(context, honest_endpoint, others) as honest:
        await wait_until(lambda: honest.buffered_frames == 2, "the honest frames are here")
        async with publishing(then=LONGEST) as endpoint, following(context, endpoint, others) as hostile:

            def is_refused() -> bool:
                others.check(0, now)
                return hostile.is_refused

            await wait_until(is_refused, "the connection is ended")
            assert not hostile.is_connected
        assert honest.is_connected
        assert not honest.is_refused


async def test_the_connection_with_most_bytes_ends_if_the_process_has_grown(context: ZmqContext) -> None:
    others = Subscribers(message_bytes_max=2**40)
    beginning = FRAME[: len(FRAME) // 2]
    async with publishing(FRAME, beginning) as honest_endpoint, following(context, honest_endpoint, others) as honest:
        await wait_until(lambda: honest.buffered_frames == 1, "the honest frame is here")
        async with publishing(then=EMPTY) as endpoint, following(context, endpoint, others) as hostile:
            await wait_until(lambda: hostile.is_connected, "the other one is connected")

            def is_refused(memory: int) -> Callable[[], bool]:
                def check() -> bool:
                    others.check(memory, 0.0)
                    return hostile.is_refused

                return check

            for memory in (unfinished.MEMORY_BYTES_MAX, 2 * unfinished.MEMORY_BYTES_MAX):
                for _ in range(20):
                    assert not is_refused(memory)(), "it has not grown beyond the bound"
                    await asyncio.sleep(0.01)
            await wait_until(is_refused(2 * unfinished.MEMORY_BYTES_MAX + 1), "the connection is ended")
            others.check(4 * unfinished.MEMORY_BYTES_MAX, 0.0)
            assert honest.is_connected
            assert not honest.is_refused


def test_another_connection_is_blamed_only_when_the_first_one_is_freed() -> None:
    """Until then the growth may be the first one's; after a second what is kept is nobody's."""
    others, ended, forgotten = Subscribers(message_bytes_max=2**40), list[str](), list[str]()

    def refuse(name: str) -> None:
        ended.append(name)
        del others._watched[cast(Any, name)]

    for name, size in (("large", 2**26), ("small", 2**21)):
        message = SimpleNamespace(
            bytes=size, growth=2**30, look=lambda *_: None, forget=partial(forgotten.append, name)
        )
        watched = SimpleNamespace(message=message, is_to_blame=True, refuse=partial(refuse, name))
        others._watched[cast(Any, name)] = cast(Any, watched)
    for now, names in ((0.0, ["large"]), (0.2, ["large"]), (0.3, ["large", "small"])):
        others.check(2**30, now)
        assert ended == names
    assert not forgotten


async def test_memory_that_was_freed_is_no_room_for_the_next(context: ZmqContext) -> None:
    """Growth counts from the least that the process had, so that connections do not grow by as much in turn."""
    others, most = Subscribers(message_bytes_max=2**40), unfinished.MEMORY_BYTES_MAX
    async with publishing(then=EMPTY) as endpoint, following(context, endpoint, others) as hostile:
        await wait_until(lambda: hostile.is_connected, "it is connected")

        def is_refused(memory: int) -> bool:
            others.check(memory, 0.0)
            return hostile.is_refused

        assert not is_refused(most), "the beginning, with what others have"
        assert not is_refused(0), "these are gone"
        await wait_until(lambda: is_refused(most + 1), "the connection is ended")


async def test_one_connection_after_the_other_does_not_fill_the_memory(
    context: ZmqContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libzmq frees of one is given back before the next has as much."""
    monkeypatch.setattr(subscriber_module, "REFUSED_SECONDS", 0.01)
    others, most = Subscribers(message_bytes_max=2**40), unfinished.MEMORY_BYTES_MAX
    begun = peak = unfinished.process_memory()
    async with AsyncExitStack() as stack:
        watching = asyncio.ensure_future(others.keep_watching())
        stack.callback(watching.cancel)
        for _ in range(3):
            endpoint = await stack.enter_async_context(publishing(then=EMPTY))
            hostile = await stack.enter_async_context(following(context, endpoint, others))

        def has_returned() -> bool:
            nonlocal peak
            peak = max(peak, unfinished.process_memory())
            return hostile.connection >= 4

        await wait_until(has_returned, "one is ended, and comes again, three times", 60)
    assert peak - begun < 4 * most


class Played:
    """The memory of a process, and when it gives back what is free in it; looks are a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.free, self.now, self.given = 2**30, 0, 0.0, list[float]()
        monkeypatch.setattr(unfinished, "process_memory", lambda: self.memory)
        monkeypatch.setattr(unfinished, "give_back_memory", self.give_back)
        monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(asyncio, "to_thread", self.at_once)
        self.maps_long_blocks = False
        monkeypatch.setattr(unfinished, "map_long_blocks", lambda: setattr(self, "maps_long_blocks", True))
        monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.0)

    def monotonic(self) -> float:
        self.now += 0.05
        return self.now

    async def at_once(self, work: Callable[[], None]) -> None:
        """A thread takes as long as a busy machine likes: many looks."""
        work()

    def give_back(self) -> None:
        self.given.append(self.now)
        self.memory, self.free = self.memory - self.free, 0

    async def until(self, seconds: float) -> None:
        await wait_until(lambda: self.now >= seconds, f"{seconds} s have passed")


@pytest.fixture
async def played(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Played]:
    """A worker that watches, with a gibibyte to begin with."""
    played = Played(monkeypatch)
    watching = asyncio.ensure_future(Subscribers(message_bytes_max=PART_MAX).keep_watching())
    await played.until(1)
    assert played.maps_long_blocks
    yield played
    watching.cancel()


async def test_free_memory_is_given_back_when_much_has_grown(played: Played) -> None:
    played.memory += 2**26
    await played.until(10)
    assert not played.given
    played.memory, played.free = played.memory + 1, 2**26
    await wait_until(lambda: bool(played.given), "it is given back")
    seen = played.now
    await played.until(seen + 100)
    assert len(played.given) == 1, "it is as small as it was"


async def test_memory_that_becomes_free_later_is_given_back_too(played: Played) -> None:
    """What a worker needs for long is looked at more and more rarely."""
    played.memory += 2**28
    await played.until(400)
    tries = len(played.given)
    assert 8 < tries < 8 + played.now / module._GIVE_BACK_SECONDS_MAX, f"{tries} tries in {played.now} s"
    played.free = 2**28
    await played.until(played.now + 2 * module._GIVE_BACK_SECONDS_MAX)
    assert played.memory == 2**30
    begun = played.now
    played.memory, played.free = 2**30 + 2**28, 2**28
    await wait_until(lambda: played.memory == 2**30, "the next burst is given back")
    assert played.given[-1] - begun < module._GIVE_BACK_SECONDS_MAX / 2, "and at once"


async def test_what_is_free_is_given_back_while_a_message_grows(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the place of what is free first, and would not be seen to grow."""

    grows = False

    def check(subscribers: Subscribers, memory: int, now: float) -> None:
        subscribers._has_long = grows

    monkeypatch.setattr(Subscribers, "check", check)
    played.memory += 2**28
    await played.until(500)
    grows, begun, tries = True, played.now, len(played.given)
    await played.until(begun + 100)
    assert len(played.given) - tries > 0.4 * (played.now - begun), "each second"


async def test_a_process_that_has_grown_since_gives_back_at_once(played: Played) -> None:
    played.memory += 2**27
    await played.until(500)
    assert played.given[-1] - played.given[-2] > 16, "nothing was free"
    played.memory, played.free = played.memory + 2**25, 2**25
    begun, tries = played.now, len(played.given)
    await wait_until(lambda: len(played.given) > tries, "it is given back")
    assert played.given[tries] - begun < 5


async def test_a_message_of_some_length_is_known_to_grow(context: ZmqContext) -> None:
    others = Subscribers(message_bytes_max=2**40)
    async with publishing(FRAME, FRAME[: len(FRAME) // 2]) as endpoint, following(context, endpoint, others) as it:
        await wait_until(lambda: it.buffered_frames == 1, "the honest frame is here")
        others.check(0, 0.0)
        assert not others._has_long
    async with publishing(then=EMPTY) as endpoint, following(context, endpoint, others):

        def has_long() -> bool:
            others.check(0, 0.0)
            return others._has_long

        await wait_until(has_long, "it grows")


async def test_connections_are_looked_at_while_memory_is_given_back(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, release = list[float](), Event()
    monkeypatch.setattr(asyncio, "to_thread", IN_A_THREAD)
    monkeypatch.setattr(unfinished, "give_back_memory", release.wait)
    monkeypatch.setattr(Subscribers, "check", lambda _, memory, now: looks.append(now))
    played.memory += 2**27
    try:
        await wait_until(lambda: len(looks) > 20, "it goes on")
    finally:
        release.set()


def test_a_long_block_leaves_nothing_behind(tmp_path: Path) -> None:
    """The C library raises its bound with each long block that is freed, up to 32 MiB, and keeps all below it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from waymark.ingest.unfinished import map_long_blocks, process_memory\n"
        "if sys.argv[1] == 'mapped': map_long_blocks()\n"
        "bytearray(31 * 2**20)\n"
        "begun = process_memory()\n"
        "frames = [(bytearray(b'x') * (20 * 2**20), bytearray(b'x') * 300_000) for _ in range(10)]\n"
        "small = [each for _, each in frames]\n"
        "del frames\n"
        "print(process_memory() - begun)\n"
    )

    def left(how: str) -> int:
        return int(
            subprocess.run(
                [sys.executable, program, how], capture_output=True, check=True, text=True, timeout=patient(60)
            ).stdout
        )

    if left("kept") < 2**26:
        pytest.skip("the C library keeps no long blocks")
    assert left("mapped") < 2**24


@pytest.mark.parametrize("then", [EMPTY, LONGEST], ids=["empty parts", "longest parts"])
async def test_over_a_unix_socket_too(context: ZmqContext, tmp_path: Path, then: bytes) -> None:
    """The kernel does not count its bytes. Those that wait to be read again and again are of no message."""
    others = Subscribers(message_bytes_max=2**40)
    async with (
        publishing_at(tmp_path / "honest", FRAME) as honest_endpoint,
        following(context, honest_endpoint, others) as honest,
        publishing_at(tmp_path / "hostile", then=then) as endpoint,
        following(context, endpoint, others) as hostile,
    ):
        await wait_until(lambda: hostile.is_connected and honest.buffered_frames == 1, "both are connected")
        begun = unfinished.process_memory()

        def is_refused() -> bool:
            others.check(unfinished.process_memory(), time.monotonic())
            return hostile.is_refused

        await wait_until(is_refused, "the connection is ended")
        assert unfinished.process_memory() - begun < 8 * unfinished.MEMORY_BYTES_MAX
        assert honest.is_connected
        assert not honest.is_refused


async def test_messages_that_nobody_has_read_yet_are_finished(context: ZmqContext) -> None:
    """A worker that is late reads them: their publisher has done nothing wrong."""
    others, gate = Subscribers(message_bytes_max=PART_MAX), asyncio.Event()
    async with publishing(*[FRAME] * 8, gate=gate) as endpoint, following(context, endpoint, others) as subscriber:
        await wait_until(lambda: subscriber.buffered_frames == 1, "the first is here")
        subscriber._is_read_due = True  # as if its turn of the loop did not come
        others.check(0, time.monotonic())
        gate.set()
        assert subscriber._link is not None
        watched, reads = others._watched[subscriber._link], list[bool]()
        message, watched._read = watched.message, lambda: reads.append(True)

        def is_long() -> bool:
            others.check(0, time.monotonic())
            return message.bytes > 4 * PART_MAX

        await wait_until(is_long, "many bytes have come")
        assert not subscriber.is_refused
        assert reads, "nothing else tells the reader of them"
        subscriber._is_read_due = False
        subscriber.read()
        await wait_until(lambda: subscriber.buffered_frames == 8, "all are read")


async def test_a_worker_ends_it_and_says_why(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, message_bytes_max=PART_MAX)
    async with publishing(then=EMPTY) as endpoint:
        pod = await bench.pod(fields={"endpoint": endpoint, "replay_endpoint": None})
        await pod.has_status("failed")
        await pod.says("without an end")


async def test_a_frame_that_takes_long_and_a_silent_publisher_stay(context: ZmqContext) -> None:
    others = Subscribers(message_bytes_max=PART_MAX)
    async with (
        publishing(FRAME, FRAME[:-1]) as endpoint,
        following(context, endpoint, others) as subscriber,
    ):
        await wait_until(lambda: subscriber.buffered_frames == 1, "one is here")
        for hour in range(100):
            others.check(0, 3600.0 * hour)
        assert subscriber.is_connected
        assert not subscriber.is_refused


async def test_of_many_that_were_never_reached_each_is_tried_rarely(
    context: ZmqContext, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was reached at once, however many there are."""
    monkeypatch.setattr(module, "ATTEMPT_SECONDS", 3600.0)
    others = Subscribers(message_bytes_max=PART_MAX)
    connections = 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(GREETING + READY)
        await reader.readuntil(b"\x00\x01\x01")  # the subscription: then the handshake is over, and nothing is unread

    absent = f"tcp://127.0.0.1:{free_port}"
    async with (
        listening(speak) as server,
        following(context, absent, others) as never,
        following(context, f"tcp://127.0.0.1:{port_of(server)}", others) as reached,
    ):
        await wait_until(lambda: reached.connection >= 3, "it is connected to again and again")
        await wait_until(lambda: never.failure is not None, "the other one is refused")
        assert others.absent == 1
        async with listening(speak, free_port):
            await wait_until(lambda: reached.connection >= 6, "again")
            assert never.connection == 0
    assert others.absent == 0
