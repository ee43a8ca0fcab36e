"""Sockets to a publisher: their common options, a live socket for one connection, and the reason why a connection
fails.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from operator import attrgetter
from socket import AF_INET
from typing import Any, TypeAlias

import zmq

from waymark.base.endpoints import addresses_of, is_address
from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.domain.names import is_endpoint

ZmqContext: TypeAlias = zmq.Context[zmq.Socket[bytes]]

CONNECT_MILLISECONDS = 10_000
"""The time limit of a TCP connect, and again of the handshake after it."""
HEARTBEAT_INTERVAL_MILLISECONDS = 5_000
HEARTBEAT_TIMEOUT_MILLISECONDS = 15_000
MESSAGE_BYTES_MAX = 64 * 2**20
"""If a publisher sends a longer part, its connection is closed before the part is in memory."""
LIVE_MESSAGES_MAX = 1000
"""The most live messages that libzmq queues before they are read. Further ones stay with the publisher, which drops
them at its own bound. Replies of a replay have no such bound, because a ROUTER drops replies that it cannot send at
once.
"""
PARTS_MAX = 4
"""No live frame, and no reply of a replay, has more parts."""

#: How many parts of a longer message one call discards, which takes as long as a few frames.
_REST_PER_CALL = 8
#: Plain integers, because pyzmq looks up and converts its own constants in each call.
_NOBLOCK, _EVENTS, _READABLE = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_bytes_of: Callable[[zmq.Frame], bytes] = attrgetter("bytes")
_NEVER_MILLISECONDS = 24 * 3600 * 1000
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
# The first of these events ends a connection, or an attempt at one.
_OVER = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CONNECT_RETRIED
)
_monitor_numbers = itertools.count(1)


def open_socket(
    context: ZmqContext, kind: int, endpoint: str, message_bytes_max: int = MESSAGE_BYTES_MAX
) -> zmq.Socket[bytes]:
    """Return a socket with the options of both transports, which is not connected yet. Raises OSError if no socket is
    available.
    """
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"no socket for {endpoint}: {error.strerror}") from error
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, LIVE_MESSAGES_MAX if kind == zmq.SUB else 0)
    socket.set(zmq.MAXMSGSIZE, message_bytes_max)
    socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    socket.set(zmq.HANDSHAKE_IVL, CONNECT_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    if endpoint.startswith("tcp://["):
        socket.set(zmq.IPV6, 1)
    return socket


def connect(socket: zmq.Socket[bytes], endpoint: str, field: str) -> None:
    """Begin to connect. Raises InvalidValue, which names ``field``, if libzmq cannot read the endpoint."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        sentence = (
            f"{field} {shown(endpoint)} cannot be connected to ({error.strerror}); give tcp://host:port or ipc://path"
        )
        raise InvalidValue(sentence, field=field) from error


def has_name(endpoint: str) -> bool:
    """Return whether an endpoint has a host name in place of an address."""
    return endpoint.startswith("tcp://") and is_endpoint(endpoint) and not is_address(_host_of(endpoint))


async def looked_up(endpoint: str) -> str | None:
    """Return an endpoint with an address of its host in place of the name; None if none is known in time.

    libzmq would look it up in a thread that reads sockets, and the streams of other engines would wait meanwhile.
    """
    found = await addresses_of(_host_of(endpoint))
    if not found:
        return None
    family, address = next((each for each in found if each[0] == AF_INET), found[0])
    return f"tcp://{address if family == AF_INET else f'[{address}]'}:{endpoint.rpartition(':')[2]}"


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


async def readable(socket: zmq.Socket[bytes], seconds: float) -> None:
    """Wait until the socket may have a message, or ``seconds`` have passed.

    The descriptor is edge-triggered, so the caller must first read the socket until it is empty.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not future.done():
            future.set_result(None)

    descriptor = socket.FD
    loop.add_reader(descriptor, tell)
    try:
        await asyncio.wait([future], timeout=seconds)
    finally:
        loop.remove_reader(descriptor)


class MessageReader:
    """Reads a socket's messages without waiting. Each call is short, whatever the input.

    A message has as many parts as its sender likes, and libzmq never skips any. Of a message with more parts than any
    frame has, a call returns the first parts, which no parser accepts; later calls discard the others.
    """

    __slots__ = ("_has_rest", "_socket", "count")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.count = 0
        """The number of calls that received anything."""
        self._socket = socket
        self._has_rest = False

    @property
    def are_there(self) -> bool:
        """Whether there is anything to receive."""
        events: Any = self._socket.get(_EVENTS)
        return bool(events & _READABLE)

    def receive(self) -> list[bytes]:
        """Receive a message; an empty list if only the rest of an earlier one was read. Raises zmq.Again."""
        if self._has_rest:
            self._drop_rest()
            return []
        return list(map(_bytes_of, self._parts()))

    def receive_within(self, has_room: Callable[[int], bool]) -> list[bytes] | None:
        """Receive as ``receive`` does, but copy nothing before ``has_room`` has returned True for the size of the
        longest part. Otherwise discard the message and return None.
        """
        if self._has_rest:
            self._drop_rest()
            return []
        parts = self._parts()
        return [part.bytes for part in parts] if has_room(max(map(len, parts))) else None

    def _drop_rest(self) -> None:
        self.count += 1
        for _ in range(_REST_PER_CALL):
            if not self._socket.recv(_NOBLOCK, copy=False).more:
                self._has_rest = False
                break

    def _parts(self) -> list[zmq.Frame]:
        # pyzmq reports with an uncopied part whether others follow. With a copied part it must be asked, which takes
        # longer than receiving the part.
        receive = self._socket.recv
        part = receive(_NOBLOCK, copy=False)
        parts = [part]
        self.count += 1
        while part.more:
            if len(parts) > PARTS_MAX:
                self._has_rest = True
                break
            part = receive(_NOBLOCK, copy=False)
            parts.append(part)
        return parts


class PublisherSocket:
    """A socket to one publisher, with its monitor."""

    __slots__ = ("attempt", "file", "is_over", "is_retried", "is_up", "messages", "monitor", "socket")

    def __init__(self, context: ZmqContext, kind: int, endpoint: str, field: str, message_bytes_max: int) -> None:
        """Begin to connect. Raises InvalidValue, which names ``field``, if libzmq cannot read the endpoint, and OSError
        if no socket is available.
        """
        self.is_up = False
        """Whether the handshake succeeded. This stays True when the connection is over, because frames may remain to be
        read.
        """
        self.is_over = False
        self.file: int | None = None
        """The descriptor of the connection, which libzmq owns."""
        self.attempt = Attempt(time.monotonic(), CONNECT_MILLISECONDS / 1000)
        self.is_retried = False
        """Whether libzmq is about to reconnect. It does so after a lost connection, but not after one that it closed
        itself.
        """
        self.socket = open_socket(context, kind, endpoint, message_bytes_max)
        self.messages = MessageReader(self.socket)
        try:
            self._prepare()
            # pyzmq would name the monitor by the socket's descriptor, which a closing socket may still have.
            address = f"inproc://waymark-monitor-{next(_monitor_numbers)}"
            self.monitor = self.socket.get_monitor_socket(_UP | _OVER | zmq.EVENT_CONNECTED, address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise OSError(error.errno, f"no monitor for {endpoint}: {error.strerror}") from error
        try:
            connect(self.socket, endpoint, field)
        except InvalidValue:
            self.close()
            raise

    def _prepare(self) -> None:
        """Set further options."""

    def close(self) -> None:
        # In another order libzmq's side of the monitor would wait for room in a pipe without a reader.
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def changes(self) -> Iterator[bool]:
        """Yield the monitor's reports since the last call: True for a handshake, False for the end of the
        connection.
        """
        while True:
            try:
                event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # The number of the event is in the first two bytes, in the machine's byte order; a value follows.
            number = int.from_bytes(event[:2], sys.byteorder)
            self.attempt.saw(number, time.monotonic())
            if number == zmq.EVENT_CONNECT_RETRIED:
                self.is_retried = True
            if number == zmq.EVENT_CONNECTED:
                self.file, self.is_over = int.from_bytes(event[2:6], sys.byteorder), False
                continue
            if number & _UP:
                self.is_up = True
                yield True
            elif not self.is_over:
                self.is_over = True
                yield False


class LiveConnection(PublisherSocket):
    """A SUB socket for one connection, or one attempt at it."""

    __slots__ = ("descriptors",)

    def __init__(self, context: ZmqContext, endpoint: str, message_bytes_max: int) -> None:
        super().__init__(context, zmq.SUB, endpoint, "endpoint", message_bytes_max)
        self.descriptors = (self.socket.FD, self.monitor.FD)

    def _prepare(self) -> None:
        self.socket.set(zmq.RECONNECT_IVL, _NEVER_MILLISECONDS)
        self.socket.subscribe(b"")


# The reason why a connection has failed, from the events of libzmq's monitor.
#
# The monitor reports no error numbers for an attempt. The order of its events distinguishes the cases:
#
# | Reported | What has happened |
# |---|---|
# | CLOSED, without CONNECTED | refused; after the time for an attempt, no answer |
# | CONNECTED, DISCONNECTED, and no retry | a ZMQ socket of another type, which libzmq has left permanently |
# | CONNECTED, HANDSHAKE_FAILED_PROTOCOL or _AUTH | a ZMQ socket with another security mechanism |
# | CONNECTED, HANDSHAKE_FAILED_NO_DETAIL | the peer has closed the connection or stayed silent: it is no ZMQ socket |


class ConnectionFailure(StrEnum):
    """The reason why a connection failed. Each value is the end of a sentence that begins with the endpoint."""

    UNRESOLVED = (
        "its host has no address, or no name server answers; register a name that the ingest workers can resolve, or a "
        "numeric address"
    )
    REFUSED = (
        "it is refused, as nothing listens there; start the engine with its KV events enabled, or register the port "
        "that it publishes on"
    )
    UNANSWERED = (
        "there is no answer; check the address, and that no firewall or network policy is between the ingest workers "
        "and the engine"
    )
    OTHER_SOCKET = (
        "a ZMQ socket of another type listens there, such as a replay port; register the port that the engine "
        "publishes on"
    )
    OTHER_SECURITY = (
        "the ZMQ socket there uses a security mechanism such as CURVE, and Waymark connects without; configure the "
        "engine without it"
    )
    NO_ZMQ = (
        "what listens there has not finished a ZMQ handshake, as an HTTP port, or a proxy without its engine; register "
        "the port that the engine publishes on"
    )


_NO_HANDSHAKE: dict[int, ConnectionFailure] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionFailure.NO_ZMQ,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionFailure.OTHER_SECURITY,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionFailure.OTHER_SECURITY,
    zmq.EVENT_DISCONNECTED: ConnectionFailure.OTHER_SOCKET,
}


class Attempt:
    """One attempt at a connection, as the monitor reports it."""

    __slots__ = ("_is_connected", "_is_handshaken", "_seconds_max", "_started", "failure")

    def __init__(self, started: float, seconds_max: float) -> None:
        """``started`` is the reading of a clock; a TCP connect may take ``seconds_max``."""
        self.failure: ConnectionFailure | None = None
        """The first failure. Later events only show how libzmq cleans up."""
        self._started = started
        self._seconds_max = seconds_max
        self._is_connected = False
        self._is_handshaken = False

    def saw(self, event: int, now: float) -> None:
        """Note one event of the monitor."""
        if event == zmq.EVENT_CONNECTED:
            self._is_connected = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_handshaken = True
        elif not self._is_handshaken and self.failure is None:
            self.failure = self._of(event, now)

    def _of(self, event: int, now: float) -> ConnectionFailure | None:
        if self._is_connected:
            return _NO_HANDSHAKE.get(event)
        if event == zmq.EVENT_CLOSED:
            is_late = now - self._started > 0.9 * self._seconds_max
            return ConnectionFailure.UNANSWERED if is_late else ConnectionFailure.REFUSED
        return None
