"""A connection to Redis for those who pack their commands themselves: bytes out, a reply in, one bound.

The library opens the connection, with all that is to be said on it first. Then its transport is told to call a
``Line`` in place of the library's streams, which cost several times what the bytes do, until the connection is given
back. One question is on its way at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import hiredis
from redis._parsers import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError

T = TypeVar("T")

Take: TypeAlias = Callable[[bytes], T | None]
"""Is given a reply piece by piece and returns what it says; None: it is not whole yet. Raises RedisError."""

_NOT_YET = object()


class Line(asyncio.Protocol):
    """The connection for one after the other, each of whom waits for his reply."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.is_idle = True
        """Nothing is on its way, and nothing has gone wrong; once false without a question, it stays so."""
        self._is_lost = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Any] | None = None
        self._take: Take[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport = cast("asyncio.Transport", connection._writer.transport)  # type: ignore[union-attr]
        self._library = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def ask(self, packed: bytes, take: Take[T], until: float | None) -> asyncio.Future[T]:
        """Send a command; what ``take`` makes of the reply to it.

        TimeoutError at ``until``, by the loop's clock; RedisError where ``take`` says so or the connection is lost.
        """
        waiter: asyncio.Future[T] = self._loop.create_future()
        self.is_idle = False
        self._waiter, self._take = waiter, take
        if until is not None:
            self._timer = self._loop.call_at(until, self._fail_late)
        try:
            self._transport.write(packed)
        except RuntimeError as exc:  # what uvloop says of a connection that the other end has closed
            self._fail(RedisConnectionError(str(exc)))
        return waiter

    def leave(self) -> None:
        """Let the library have its connection again, who must close it at once if it is not idle."""
        self._end()
        if not self._is_lost:
            self._transport.set_protocol(self._library)

    def data_received(self, data: bytes) -> None:
        if self._take is None:
            self.is_idle = False  # nobody has asked
            return
        try:
            answer = self._take(data)
        except RedisError as exc:
            self._fail(exc)
            return
        if answer is not None:
            waiter = self._waiter
            self._end()
            self.is_idle = True
            if waiter is not None and not waiter.done():  # it is, where whoever asked was cancelled
                waiter.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._fail(RedisConnectionError(f"the connection was lost{f': {exc}' if exc else ''}"))
        self._library.connection_lost(exc)

    def _fail_late(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        waiter = self._waiter
        self._end()
        self.is_idle = False
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _end(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
        # An error in the future knows its frames, and they this object: all would wait for the garbage collector.
        self._timer = self._waiter = self._take = None


class Replies:
    """A ``Take`` that reads so many replies with the library's parser, whatever they are; an error is raised."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._replies: list[Any] = []
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=_NOT_YET
        )

    def __call__(self, piece: bytes) -> list[Any] | None:
        self._reader.feed(piece)
        while len(self._replies) < self._count:
            reply = self._reader.gets()
            if reply is _NOT_YET:
                return None
            if isinstance(reply, RedisError):
                raise reply
            self._replies.append(reply)
        if self._reader.has_data():
            raise InvalidResponse("more than was asked for")
        return self._replies
