"""The SUB side over real sockets: order, bounds, and the truth about the connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from tests.conftest import wait_until
from tests.listening import listening, port_of
from tests.patience import patient, within
from waymark.base import endpoints
from waymark.base.errors import InvalidValue
from waymark.ingest import sockets
from waymark.ingest import subscriber as module
from waymark.ingest.frames import Frame, PayloadFacts, digest
from waymark.ingest.sockets import ConnectionFailure, LiveConnection, MessageReader, ZmqContext, connect, open_socket
from waymark.ingest.subscriber import UNREACHABLE_NOTE_SECONDS, Subscriber
from waymark.ingest.subscribers import Subscribers


class Publisher:
    """An XPUB: a PUB that also tells when somebody has subscribed."""

    def __init__(self, context: ZmqContext, endpoint: str) -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.set(zmq.SNDHWM, 0)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self.endpoint: str = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def has_subscriber(self) -> bool:
        return bool(self.socket.poll(0))

    def send(self, *seqs: int, payload: bytes = b"batch") -> None:
        for seq in seqs:
            self.socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """What was sent still goes out."""
        self.socket.close(2000)


@pytest.fixture
def publish() -> Iterator[Callable[[str], Publisher]]:
    context: ZmqContext = zmq.Context()
    publishers: list[Publisher] = []

    def make(endpoint: str) -> Publisher:
        publishers.append(Publisher(context, endpoint))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.socket.close(0)
    context.term()


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path, free_port: int) -> str:
    return f"tcp://127.0.0.1:{free_port}" if request.param == "tcp" else f"ipc://{tmp_path}/kv"


async def bind_again(publish: Callable[[str], Publisher], endpoint: str) -> Publisher:
    """A closed socket gives its address back a little later."""
    made: list[Publisher] = []

    def is_bound() -> bool:
        with contextlib.suppress(zmq.ZMQError):
            made.append(publish(endpoint))
        return bool(made)

    await wait_until(is_bound, f"{endpoint} is free")
    return made[0]


def subscriber_of(
    context: ZmqContext, endpoint: str, *, buffer_bytes: int = 2**24, buffer_frames: int = 100_000
) -> Subscriber:
    return Subscriber(context, endpoint, buffer_bytes=buffer_bytes, buffer_frames=buffer_frames)


def state_of(subscriber: Subscriber) -> tuple[bool, int, int]:
    return subscriber.is_connected, subscriber.connection, subscriber.state_version


async def take_all(subscriber: Subscriber, count: int) -> list[Frame]:
    """``count`` frames, through ``wait`` and ``take`` alone."""
    frames: list[Frame] = []
    async with within(10):
        while len(frames) < count:
            await subscriber.wait(1)
            frames += subscriber.take(1000)
    return frames


async def test_frames_come_in_order_in_both_framings(
    context: ZmqContext, publish: Callable[[str], Publisher], address: str
) -> None:
    publisher = publish(address)
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.socket.send_multipart([b"kv@pod@model", (7).to_bytes(8, "big"), b"first"])
        publisher.socket.send_multipart([(8).to_bytes(8, "big"), b"second"])
        frames = await take_all(subscriber, 2)

    assert [(f.seq, f.topic, f.payload, f.connection) for f in frames] == [
        (7, b"kv@pod@model", b"first", 1),
        (8, b"", b"second", 1),
    ]
    assert frames[0].received <= frames[1].received


async def test_a_malformed_frame_is_counted_and_its_neighbours_arrive(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(1)
        publisher.socket.send_multipart([b"alone"])
        publisher.socket.send_multipart([b"", b"short", b"batch"])
        publisher.socket.send_multipart([b"", b"", (2).to_bytes(8, "big"), b"batch"])
        publisher.send(3)
        assert [f.seq for f in await take_all(subscriber, 2)] == [1, 3]
        assert subscriber.malformed == 3
        assert subscriber.dropped == 0


async def test_a_message_of_many_parts_costs_a_turn_no_more_than_frames_do(
    context: ZmqContext, publish: Callable[[str], Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    read_in_turns = [0]
    received = zmq.Socket.recv

    def recv(self: Any, *args: Any, **options: Any) -> Any:
        part = received(self, *args, **options)
        read_in_turns[-1] += 1
        return part

    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        monkeypatch.setattr(zmq.Socket, "recv", recv)
        publisher.send(1)
        publisher.socket.send_multipart([b""] * 50_000)
        publisher.send(2)
        async with within(10):
            while subscriber.buffered_frames < 2:
                read_in_turns.append(0)
                await asyncio.sleep(0)
        assert [f.seq for f in subscriber.take(10)] == [1, 2]
        assert subscriber.malformed == 1
    assert sum(read_in_turns) >= 50_000
    assert max(read_in_turns) < 10 * module.FRAMES_PER_READ


def test_a_message_without_room_is_thrown_away(context: ZmqContext) -> None:
    with context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://without-room")
        receiver.connect("inproc://without-room")
        sender.send_multipart([b"topic", bytes(8), bytes(1000)])
        sender.send_multipart([b""] * 50)
        sender.send_multipart([b"topic", bytes(8), b"small"])
        reader, asked = MessageReader(receiver), list[int]()

        def has_room(size: int) -> bool:
            asked.append(size)
            return size < 100

        received = []
        with contextlib.suppress(zmq.Again):
            while True:
                received.append(reader.receive_within(has_room))
        assert received[0] is None
        assert received[-1] == [b"topic", bytes(8), b"small"]
        assert asked[0] == 1000
        assert asked[-1] == 8, "the longest part"
        assert all(parts == [] for parts in received[2:-1])


@pytest.mark.parametrize("bounds", [{"buffer_frames": 4}, {"buffer_bytes": 49}], ids=["frames", "bytes"])
async def test_what_the_buffer_cannot_hold_is_dropped_and_counted(
    context: ZmqContext, publish: Callable[[str], Publisher], bounds: dict[str, int]
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint, **bounds) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(*range(10), payload=b"x" * 12)
        await wait_until(lambda: subscriber.dropped == 6, "six dropped")
        assert (subscriber.buffered_frames, subscriber.buffered_bytes) == (4, 48)
        assert [f.seq for f in subscriber.take(10)] == [0, 1, 2, 3]
        assert (subscriber.buffered_frames, subscriber.buffered_bytes) == (0, 0)

        publisher.send(10, payload=b"x" * 12)
        assert [f.seq for f in await take_all(subscriber, 1)] == [10]
        assert subscriber.dropped == 6


async def test_a_payload_that_is_too_long_waits_without_its_bytes(
    context: ZmqContext, publish: Callable[[str], Publisher], address: str
) -> None:
    long = bytes(1001)
    publisher = publish(address)
    bounds: dict[str, Any] = {"buffer_bytes": 1500, "buffer_frames": 10, "payload_bytes_max": 1000}
    async with Subscriber(context, publisher.endpoint, **bounds) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        for seq in range(3):
            publisher.send(seq, payload=long)
        publisher.send(3, payload=long[:1000])
        await wait_until(lambda: subscriber.buffered_frames == 4, "all have room")
        frames = subscriber.take(10)
    assert [(frame.seq, len(frame.payload)) for frame in frames] == [(0, 0), (1, 0), (2, 0), (3, 1000)]
    assert frames[0].payload == PayloadFacts(1001, digest(long))
    assert digest(frames[0].payload) == digest(long)


async def test_take_gives_the_oldest_and_leaves_the_rest(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(*range(5))
        await wait_until(lambda: subscriber.buffered_frames == 5, "five frames")
        assert [f.seq for f in subscriber.take(2)] == [0, 1]
        assert (subscriber.buffered_frames, subscriber.buffered_bytes) == (3, 15)
        assert await subscriber.wait(0)
        assert [f.seq for f in subscriber.take(100)] == [2, 3, 4]
        assert subscriber.take(100) == []


async def test_wait_tells_a_change_of_connection_once(context: ZmqContext, publish: Callable[[str], Publisher]) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    subscriber = subscriber_of(context, publisher.endpoint)
    assert state_of(subscriber) == (False, 0, 0)
    async with subscriber:  # the handshake may be over before this has returned
        assert await subscriber.wait(patient(10))
        assert state_of(subscriber) == (True, 1, 1)
        assert not await subscriber.wait(0.02)

        publisher.close()
        assert await subscriber.wait(patient(10))
        assert state_of(subscriber) == (False, 1, 2)
        assert not await subscriber.wait(0)


async def test_a_frame_wakes_who_is_waiting(context: ZmqContext, publish: Callable[[str], Publisher]) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber, within(10):
        await wait_until(publisher.has_subscriber, "subscribed")
        assert await subscriber.wait(10)
        waiting = asyncio.create_task(subscriber.wait(60))
        await asyncio.sleep(0)
        publisher.send(0)
        assert await waiting
        assert subscriber.buffered_frames == 1


async def test_a_publisher_may_come_after_its_subscriber(
    context: ZmqContext, publish: Callable[[str], Publisher], address: str
) -> None:
    async with subscriber_of(context, address) as subscriber:
        assert not await subscriber.wait(0.3)
        assert state_of(subscriber) == (False, 0, 0)

        publisher = publish(address)
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(5)
        assert [(f.seq, f.connection) for f in await take_all(subscriber, 1)] == [(5, 1)]
        assert state_of(subscriber) == (True, 1, 1)


async def test_a_publisher_that_comes_back_is_another_connection(
    context: ZmqContext, publish: Callable[[str], Publisher], address: str
) -> None:
    publisher = publish(address)
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(9)
        assert [f.connection for f in await take_all(subscriber, 1)] == [1]
        publisher.close()
        await wait_until(lambda: not subscriber.is_connected, "disconnected")

        publisher = await bind_again(publish, publisher.endpoint)
        await wait_until(publisher.has_subscriber, "subscribed again")
        publisher.send(0)
        assert [(f.seq, f.connection) for f in await take_all(subscriber, 1)] == [(0, 2)]
        assert state_of(subscriber) == (True, 2, 3)


async def test_frames_bear_their_connection_when_the_loop_slept_through_a_restart(
    context: ZmqContext, publish: Callable[[str], Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next attempt is due long before the frames of the lost connection are read.
    monkeypatch.setattr(module, "FRAMES_PER_READ", 10)
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.001)
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(*range(3000))
        publisher.close()

        restarted: list[Publisher] = []
        bound = threading.Event()

        def restart() -> None:
            restarted.append(asyncio.run(bind_again(publish, publisher.endpoint)))
            bound.set()

        threading.Thread(target=restart, daemon=True).start()
        # Both block the loop on purpose, the second for as long as a socket that reconnects by itself would take.
        assert bound.wait(10)
        restarted[0].socket.poll(500)

        await wait_until(restarted[0].has_subscriber, "subscribed again")
        restarted[0].send(*range(10))
        frames = await take_all(subscriber, 3010)

    assert [f.seq for f in frames] == [*range(3000), *range(10)]
    assert [f.connection for f in frames] == [1] * 3000 + [2] * 10


async def test_a_peer_of_another_kind_is_no_publisher_and_does_not_end_the_attempts(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    other: ZmqContext = zmq.Context()
    router = other.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    async with subscriber_of(context, endpoint) as subscriber:
        assert not await subscriber.wait(0.3)
        router.close(0)
        other.term()
        publisher = await bind_again(publish, endpoint)
        await wait_until(publisher.has_subscriber, "subscribed")
        await wait_until(lambda: subscriber.connection == 1, "connected")


async def test_a_host_that_falls_silent_is_a_lost_connection(
    context: ZmqContext, publish: Callable[[str], Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_INTERVAL_MILLISECONDS", 50)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MILLISECONDS", 200)
    publisher = publish("tcp://127.0.0.1:*")
    port = int(publisher.endpoint.rpartition(":")[2])
    is_silent = False

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(4096):
            if not is_silent:
                writer.write(piece)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            back.close()

    async with (
        listening(relay) as relaying,
        subscriber_of(context, f"tcp://127.0.0.1:{port_of(relaying)}") as subscriber,
    ):
        await wait_until(publisher.has_subscriber, "subscribed")
        await wait_until(lambda: subscriber.is_connected, "connected")
        is_silent = True
        relaying.close()
        await wait_until(lambda: not subscriber.is_connected, "the silence was noticed")


async def test_a_burst_of_small_frames_arrives_whole(context: ZmqContext, publish: Callable[[str], Publisher]) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(*range(20_000))
        assert [f.seq for f in await take_all(subscriber, 20_000)] == list(range(20_000))
        assert (subscriber.dropped, subscriber.malformed, subscriber.buffered_bytes) == (0, 0, 0)


async def test_other_tasks_get_their_turn_during_a_burst(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(*range(5000))
        seen = {0}
        while subscriber.buffered_frames < 5000:
            await asyncio.sleep(0)
            seen.add(subscriber.buffered_frames)
    assert len(seen) > 5000 // module.FRAMES_PER_READ // 2


@pytest.mark.parametrize(
    "endpoint", ["tcp://nowhere", "tcp://two words:1", "carrier-pigeon://roof", "ipc://" + "x" * 200]
)
async def test_an_endpoint_that_cannot_be_read_is_refused(context: ZmqContext, endpoint: str) -> None:
    others = Subscribers(message_bytes_max=2**20)
    with pytest.raises(InvalidValue) as refused:
        Subscriber(context, endpoint, buffer_bytes=1, buffer_frames=1, subscribers=others).start()
    assert refused.value.field == "endpoint"
    assert endpoint in refused.value.sentence
    assert others.absent == 0, "each poll of a worker tries it again, and would delay all new publishers more"


async def test_libzmq_looks_up_no_name(
    context: ZmqContext, publish: Callable[[str], Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would do it in a thread that reads the sockets of other engines, too."""
    answers = {"engine.test": [(socket.AF_INET6, 0, 0, "", ("::1", 0)), (socket.AF_INET, 0, 0, "", ("127.0.0.1", 0))]}
    is_answered = threading.Event()

    def looked_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if not is_answered.wait(0.2 if host == "engine.test" else 600) or host not in answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return answers[host]

    monkeypatch.setattr(endpoints, "getaddrinfo", looked_up, raising=False)
    monkeypatch.setattr(endpoints, "LOOKUP_SECONDS", 0.05, raising=False)
    publisher = publish("tcp://127.0.0.1:*")
    port = publisher.endpoint.rpartition(":")[2]
    async with (
        subscriber_of(context, f"tcp://silent.test:{port}") as silent,
        subscriber_of(context, f"tcp://engine.test:{port}") as subscriber,
    ):
        for each in (silent, subscriber):
            await wait_until(partial(_is_unresolved, each), "nobody answers")
        is_answered.set()
        await wait_until(lambda: subscriber.is_connected, "it is connected")
        assert subscriber.failure is None
        await wait_until(publisher.has_subscriber, "subscribed")
        publisher.send(1)
        assert [frame.seq for frame in await take_all(subscriber, 1)] == [1]


def _is_unresolved(subscriber: Subscriber) -> bool:
    return subscriber.failure is ConnectionFailure.UNRESOLVED


async def test_a_name_that_does_not_resolve_is_only_a_peer_that_is_not_there(context: ZmqContext) -> None:
    async with subscriber_of(context, "tcp://no-such-host.invalid:5557") as subscriber:
        assert not await subscriber.wait(0.3)
        assert state_of(subscriber) == (False, 0, 0)


async def test_no_socket_left_is_an_error_at_the_start_and_a_failed_attempt_later(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    context.set(zmq.MAX_SOCKETS, 3)
    publisher = publish("tcp://127.0.0.1:*")
    async with subscriber_of(context, publisher.endpoint) as subscriber:
        await wait_until(publisher.has_subscriber, "subscribed")
        await wait_until(lambda: subscriber.is_connected, "connected")
        with pytest.raises(OSError, match=publisher.endpoint):
            subscriber_of(context, publisher.endpoint).start()

        publisher.close()
        publisher = await bind_again(publish, publisher.endpoint)
        await wait_until(lambda: subscriber.connection == 2, "connected again")


async def test_closing_wakes_who_is_waiting_and_keeps_what_was_buffered(
    context: ZmqContext, publish: Callable[[str], Publisher]
) -> None:
    publisher = publish("tcp://127.0.0.1:*")
    subscriber = subscriber_of(context, publisher.endpoint)
    subscriber.start()
    await wait_until(publisher.has_subscriber, "subscribed")
    assert await subscriber.wait(10)
    waiting = asyncio.create_task(subscriber.wait(60))
    await asyncio.sleep(0)
    subscriber.close()
    async with within(10):
        assert await waiting
    assert not subscriber.is_connected
    subscriber.close()


async def test_closing_between_two_attempts_ends_them(context: ZmqContext, tmp_path: Path) -> None:
    attempts = 0
    opened: list[zmq.Socket[Any]] = []
    make = context.socket

    def counted(kind: int) -> zmq.Socket[bytes]:
        nonlocal attempts
        attempts += 1
        opened.append(make(kind))
        return opened[-1]

    context.socket = counted  # type: ignore[method-assign,assignment]
    async with subscriber_of(context, f"ipc://{tmp_path}/nobody") as subscriber:
        await wait_until(lambda: attempts >= 4, "tried again")
        assert not subscriber.is_connected
    assert all(socket.closed for socket in opened)


def test_a_refused_connection_that_has_ended_is_dialled_once(context: ZmqContext) -> None:
    """The attempt that was due is put off; it would also come after the end of the subscriber."""
    due: list[float] = []

    def call_later(seconds: float, _: Callable[[], None]) -> Any:
        due.append(seconds)
        return SimpleNamespace(cancel=lambda: due.remove(seconds))

    subscriber = subscriber_of(context, "tcp://127.0.0.1:1")
    subscriber._loop = cast(Any, SimpleNamespace(call_later=call_later))
    subscriber._dial_later()
    subscriber._refuse()
    assert due == [module.REFUSED_SECONDS]
    subscriber.close()
    assert due == []


def test_sockets_have_the_options_of_the_contract(context: ZmqContext) -> None:
    expected = {
        zmq.RCVHWM: sockets.LIVE_MESSAGES_MAX,
        zmq.LINGER: 0,
        zmq.HEARTBEAT_IVL: 5000,
        zmq.HEARTBEAT_TIMEOUT: 15000,
        zmq.TCP_KEEPALIVE: 1,
    }
    for endpoint, ipv6 in [("tcp://[::1]:5557", 1), ("tcp://host:5557", 0), ("ipc:///run/kv", 0)]:
        with open_socket(context, zmq.SUB, endpoint) as socket:
            assert {option: socket.get(option) for option in expected} == expected
            assert socket.get(zmq.IPV6) == ipv6


async def test_frames_that_nobody_reads_stay_with_their_publisher(context: ZmqContext) -> None:
    with context.socket(zmq.XPUB) as publisher, open_socket(context, zmq.SUB, "tcp://127.0.0.1:1") as socket:
        publisher.set(zmq.SNDHWM, 1)
        publisher.set(zmq.XPUB_NODROP, 1)
        publisher.set(zmq.SNDTIMEO, 500)
        publisher.bind("tcp://127.0.0.1:*")
        socket.subscribe(b"")
        connect(socket, publisher.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), "endpoint")
        assert publisher.poll(10_000), "it has subscribed"
        publisher.recv()
        sent, most = 0, 10 * sockets.LIVE_MESSAGES_MAX
        with contextlib.suppress(zmq.Again):
            while sent < most:
                publisher.send(bytes(16_384))
                sent += 1
        assert sockets.LIVE_MESSAGES_MAX <= sent < most, "libzmq has queued all frames"


def test_replies_have_no_high_water_mark(context: ZmqContext) -> None:
    with open_socket(context, zmq.DEALER, "tcp://host:5557") as socket:
        assert socket.get(zmq.RCVHWM) == 0


@pytest.mark.parametrize("absent", [1, 100, 1000, 10_000, 100_000])
def test_many_that_cannot_be_reached_are_noted_a_hundred_times_a_second_at_most(
    context: ZmqContext, absent: int
) -> None:
    """Each stream repeats its own note after a third of the time that it counts."""
    others = Subscribers(message_bytes_max=2**20)
    others.absent = absent - 1
    subscriber = Subscriber(context, "ipc:///nowhere", buffer_bytes=1, buffer_frames=1, subscribers=others)
    subscriber._set_absent(True)
    assert absent / (subscriber.note_seconds / 3) < 101
    subscriber._set_absent(False)
    assert subscriber.note_seconds == UNREACHABLE_NOTE_SECONDS, "one that was there is tried every few seconds"


@pytest.mark.parametrize(
    ("failures", "is_unreachable"),
    [
        pytest.param([(0.0, ConnectionFailure.REFUSED)], False, id="once"),
        pytest.param([(0.0, ConnectionFailure.REFUSED), (2.0, ConnectionFailure.REFUSED)], True, id="within-2-s"),
        pytest.param([(0.0, ConnectionFailure.REFUSED), (2.1, ConnectionFailure.REFUSED)], False, id="later"),
        pytest.param([(0.0, None), (0.5, ConnectionFailure.REFUSED)], True, id="reset-and-refused"),
        pytest.param([(0.0, ConnectionFailure.UNANSWERED), (0.5, ConnectionFailure.UNANSWERED)], False, id="silent"),
    ],
)
def test_two_failures_at_once_make_a_publisher_unreachable(
    context: ZmqContext, failures: list[tuple[float, ConnectionFailure | None]], is_unreachable: bool
) -> None:
    """A publisher that was there; None is a connection that was made and is gone."""
    now = 1000.0
    subscriber = Subscriber(context, "ipc:///nowhere", buffer_bytes=1, buffer_frames=1, clock=lambda: now)
    for seconds, failure in failures:
        now = 1000.0 + seconds
        link = SimpleNamespace(is_up=failure is None, attempt=SimpleNamespace(failure=failure))
        subscriber._note_failure(cast(LiveConnection, link))
    assert subscriber.is_unreachable == is_unreachable
