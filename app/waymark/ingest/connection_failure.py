"""The reason why a connection has failed, from the events of libzmq's monitor.

The monitor reports no error numbers of an attempt. The order of its events distinguishes the cases:

| Reported | What has happened |
|---|---|
| CONNECT_RETRIED alone | the name has no address |
| CLOSED, without CONNECTED | refused; after the time for an attempt, no answer |
| CONNECTED, DISCONNECTED, and no retry | a ZMQ socket of another type, which libzmq has left permanently |
| CONNECTED, HANDSHAKE_FAILED_PROTOCOL or _AUTH | a ZMQ socket with another security mechanism |
| CONNECTED, HANDSHAKE_FAILED_NO_DETAIL | the peer has closed the connection or stayed silent: it is no ZMQ socket |
"""

from __future__ import annotations

from enum import StrEnum

import zmq


class ConnectionFailure(StrEnum):
    """Why a connection is lost. Each value is the end of a sentence that begins with the endpoint."""

    UNRESOLVED = "its host has no address; register a name that the ingest workers can resolve, or a numeric address"
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
        return ConnectionFailure.UNRESOLVED if event == zmq.EVENT_CONNECT_RETRIED else None
