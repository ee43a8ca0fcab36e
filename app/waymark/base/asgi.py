"""The two ways in which the server calls an application: ASGI, and a direct call, the *straight way*.

A server may have a table of straight questions: paths whose answers need only the request's body and reads of Redis.
A *usual* request to such a path is a POST with a body of a declared length, on a connection without another waiting
request. It needs neither a task nor an ASGI message: the application gets it in the loop turn in which its last byte
arrives, and writes the answer in the turn in which Redis replies. Every other request is passed to the ASGI
application, and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias


class BrokenAnswer(Exception):
    """An answer that cannot be completed: only closing the connection shows this. It is not our failure."""


AsgiScope: TypeAlias = MutableMapping[str, Any]
"""The server's knowledge of a request before its body."""
AsgiMessage: TypeAlias = MutableMapping[str, Any]
"""A part of a request or of its answer."""
AsgiReceive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
"""Returns the next part of the request."""
AsgiSend: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
"""Sends a part of the answer."""
AsgiApplication: TypeAlias = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]
RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values, in the order in which they came."""


class Answering(Protocol):
    """The receiver of an answer on the straight way. Exactly one of the methods is called, once."""

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        """Send the whole answer; ``headers`` has neither its type nor its length."""

    def pass_on(self, pause: Any = None) -> None:
        """Have the request answered the ordinary way. The request must not have been counted or changed yet.

        The application finds ``pause`` in the scope, and need not repeat the work before it.
        """

    def fail(self, error: BaseException) -> None:
        """End as if the application had raised ``error`` on the ordinary way."""


class StraightRequest(Protocol):
    """A request on the straight way, whose head has arrived."""

    def begin(self, body: bytes, answering: Answering) -> None:
        """Answer the request, whose body is complete. Never raises; may call ``answering`` before it returns."""

    def disconnected(self) -> bool:
        """Note that the client went away. Return whether the request is forgotten; otherwise its work goes on, and the
        answer is dropped.
        """


class StraightQuestion(Protocol):
    """A path whose requests may go the straight way."""

    def open(self, headers: RawHeaders) -> StraightRequest | None:
        """Return the request with this head, or None if it takes the ordinary way.

        The server holds the body of such a request until it is whole, so its length must be declared and moderate.
        """


StraightTable: TypeAlias = Mapping[bytes, StraightQuestion]
"""The questions by their path, as it is in a request line."""
