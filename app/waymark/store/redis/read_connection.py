"""A connection to Redis that sends packed commands and reads their replies, with several unanswered questions at once.

Redis answers the questions of a connection in their order, so they wait in one queue. The library's parser
reads the replies. A question whose caller has been cancelled stays in the queue until its replies have arrived.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import hiredis
from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

#: The most unanswered questions on one connection. The server handles fewer requests at once.
QUESTIONS_MAX = 1024

_NOT_YET = object()


class ReplyReader(Protocol[T_co]):
    """Reads the replies to one question."""

    @property
    def count(self) -> int:
        """How many replies there are."""

    def parsed(self, replies: list[Any]) -> T_co:
        """Make the result from replies that the library has parsed, without errors. May raise RedisError."""


class Replies:
    """A ``ReplyReader`` that returns the replies unchanged."""

    def __init__(self, count: int) -> None:
        self.count = count

    def parsed(self, replies: list[Any]) -> list[Any]:
        return replies


class ReplyReceiver(Protocol[T_contra]):
    """An object that gets one result: a future, or an object that goes on at once instead of in a task."""

    def done(self) -> bool:
        """Return whether the result is not wanted any more."""

    def set_result(self, result: T_contra, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


class _PendingRead(Generic[T]):
    __slots__ = ("_is_ended", "answer", "reader", "replies", "until")

    def __init__(self, reader: ReplyReader[T], answer: ReplyReceiver[T], deadline: float) -> None:
        self.reader = reader
        self.answer = answer
        self.until = deadline
        self.replies: list[Any] = []
        """The replies that have been parsed so far."""
        self._is_ended = False

    def done(self) -> bool:
        """Return whether no caller waits for the answer."""
        return self._is_ended or self.answer.done()

    def end(self, answer: Any, error: Exception | None) -> None:
        if self.done():
            return
        self._is_ended = True  # a late question stays in the queue, and is ended again with its connection
        if error is None:
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(error)


class ReadConnection(asyncio.Protocol):
    """A connection to Redis for reads.

    It counts as lost if a reply is missing and no data come for ``silent_seconds``.
    """

    def __init__(self, silent_seconds: float, on_lost: Callable[[ReadConnection], None]) -> None:
        self._silent_seconds = silent_seconds
        self._lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._questions: deque[_PendingRead[Any]] = deque()
        self._parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=_NOT_YET
        )
        self._unsent: list[bytes] = []
        self._heard = 0.0
        # One timer for all questions: a timer for each would cost as much as the rest of ``ask``.
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._is_retired = False

    def ask(self, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> asyncio.Future[T]:
        """Send a question, and return the result that ``reader`` makes from the replies.

        Raise TimeoutError at ``deadline``, by the loop's clock, and RedisError if a reply is one or the connection is
        lost.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        self.send(packed, reader, answer, deadline)
        return answer

    def send(self, packed: bytes, reader: ReplyReader[T], answer: ReplyReceiver[T], deadline: float | None) -> None:
        """Send a question like ``ask``, with ``answer`` in place of a future. It may get an error before this
        returns.
        """
        now = self._loop.time()
        if self._transport is None:
            answer.set_exception(RedisConnectionError("the connection was lost"))
        elif deadline is not None and deadline <= now:
            answer.set_exception(TimeoutError())
        elif len(self._questions) >= QUESTIONS_MAX:
            answer.set_exception(RedisConnectionError(f"{QUESTIONS_MAX} commands are under way"))
        else:
            if not self._questions:
                self._heard = now
            question = _PendingRead(reader, answer, math.inf if deadline is None else deadline)
            self._questions.append(question)
            due = min(question.until, self._heard + self._silent_seconds)
            if due < self._due:
                self._check_by(due)
            self._unsent.append(packed)
            if len(self._unsent) == 1:
                self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Send the questions of one turn of the loop together: a write costs more than a short question."""
        unsent, self._unsent = self._unsent, []
        if self._transport is None:
            return
        try:
            self._transport.write(b"".join(unsent))
        except RuntimeError as exc:  # uvloop's error for a connection that the other end has closed
            self.lose(RedisConnectionError(str(exc)))

    def retire(self) -> None:
        """Close the connection when all questions are answered. No new question may follow."""
        self._is_retired = True
        if not self._questions:
            self.lose(RedisConnectionError("the connection was closed"))

    def lose(self, error: Exception) -> None:
        """Close at once; every unanswered question fails with ``error``."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.abort()
        self._lost(self)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf
        while self._questions:
            self._questions.popleft().end(None, type(error)(*error.args))

    # ---- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(RedisConnectionError(f"the connection was lost{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._parse(data)
        except RedisError as exc:  # the data are not RESP, or an extra reply: no question belongs to them
            self.lose(exc)
            return
        if self._is_retired and not self._questions:
            self.retire()

    def _parse(self, data: bytes) -> None:
        self._parser.feed(data)
        while self._questions:
            question = self._questions[0]
            reply = self._parser.gets()
            if reply is _NOT_YET:
                return
            question.replies.append(reply)
            if len(question.replies) == question.reader.count:
                self._questions.popleft()
                answer, error = _parsed(question.reader, question.replies)
                question.end(answer, error)
                if isinstance(error, InvalidResponse):
                    raise InvalidResponse(*error.args)
        if self._parser.has_data():
            raise InvalidResponse("more replies than commands")

    # ---- ends --------------------------------------------------------------------------------------------

    def _check_by(self, due: float) -> None:
        """Check the deadlines at ``due``, which is earlier than they would be checked."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = self._loop.call_at(due, self._check_deadlines), due

    def _check_deadlines(self) -> None:
        """Fail the late questions; lose the connection if a reply has been due for too long."""
        self._timer, self._due = None, math.inf
        now = self._loop.time()
        if self._fail_late(now):
            self.lose(RedisConnectionError("Redis has not answered an earlier command"))
        elif self._questions and now >= self._heard + self._silent_seconds:
            self.lose(RedisConnectionError(f"Redis did not reply within {self._silent_seconds:g} s"))
        elif self._questions:
            untils = [question.until for question in self._questions if not question.done()]
            self._check_by(min([self._heard + self._silent_seconds, *untils]))

    def _fail_late(self, now: float) -> bool:
        """Fail the late questions. Return whether the oldest open question was late."""
        waiting = [question for question in self._questions if not question.done()]
        for question in waiting:
            if question.until <= now:
                question.end(None, TimeoutError())  # whoever gets this may ask at once
        return bool(waiting) and waiting[0].until <= now


def _parsed(reader: ReplyReader[T], replies: list[Any]) -> tuple[T | None, RedisError | None]:
    """Return the answer, or an error without its traceback, which would keep the question alive in a cycle."""
    for reply in replies:
        if isinstance(reply, RedisError):
            return None, reply
    try:
        return reader.parsed(replies), None
    except RedisError as exc:
        return None, exc.with_traceback(None)
