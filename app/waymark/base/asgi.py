"""The two ways in which the server calls an application: ASGI, and beside it the straight way.

A server may be given a table of straight questions, whose answers follow from the body of a request and from reads. A
usual request for such a question needs neither a task nor an ASGI message: the application gets it in the loop turn in
which its last byte arrives, and writes the answer in the turn in which Redis replies. A usual request is a POST to that
very path, with a body of a declared length, on a connection without another waiting request. Each other request is
passed to the ASGI application, and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias


class BrokenAnswer(Exception):
    """An answer that cannot be ended, which only the end of the connection can say. It is no failure of ours."""


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
    """The place of an answer on the straight way. Exactly one of the methods is called, once."""

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        """Send the whole answer; ``headers`` has neither its type nor its length."""

    def pass_on(self) -> None:
        """Have the request answered the ordinary way. The request must not have been counted or changed yet."""

    def fail(self, error: BaseException) -> None:
        """End as if the application had raised ``error`` on the ordinary way."""


class StraightRequest(Protocol):
    """A request on the straight way, whose head has arrived."""

    def begin(self, body: bytes, answering: Answering) -> None:
        """Answer it: the body is whole. Never raises; the answer may be given before this returns."""

    def disconnected(self) -> None:
        """Forget it: the client has gone away before the body was whole."""


class StraightQuestion(Protocol):
    """A path whose requests may go the straight way."""

    def open(self, headers: RawHeaders) -> StraightRequest | None:
        """Take a request by its head; None if it goes the ordinary way.

        The server holds the body of such a request until it is whole, so its length must be declared and moderate.
        """


StraightTable: TypeAlias = Mapping[bytes, StraightQuestion]
"""The questions by their path, as it is in a request line."""
