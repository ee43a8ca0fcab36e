"""Connections of a pool for those who speak the protocol themselves, a few of them kept at hand.

The library's pool takes locks, waits and looks at the socket each time, which costs as much as a query's commands.
What is kept here was given back after its last reply had been read whole, so nothing can be waiting in it. A
connection on which anything went wrong is closed, and all that are kept go back to the pool, which looks at each of
them before it gives it out again: after a failure of Redis they are broken, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from weakref import WeakKeyDictionary

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

#: Of each pool. They count as taken there, so it must be well below the size of a pool.
KEPT_MAX = 16

_kept: WeakKeyDictionary[ConnectionPool, list[AbstractConnection]] = WeakKeyDictionary()


class Loan:
    """``async with``: one connection. Whoever has it reads every reply that he has asked for.

    ``errors`` is what the driver's errors go through; it is entered only where something is not as usual.
    """

    __slots__ = ("_connection", "_errors", "_kept", "_pool")

    def __init__(self, pool: ConnectionPool, errors: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._pool = pool
        self._errors = errors
        self._kept = _kept.setdefault(pool, [])

    async def __aenter__(self) -> AbstractConnection:
        if self._kept:
            self._connection = self._kept.pop()
        else:
            with self._errors():
                self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._connection
        is_sound = error is None and not connection.should_reconnect()  # type: ignore[no-untyped-call]
        if is_sound and len(self._kept) < KEPT_MAX:
            self._kept.append(connection)
            return
        with self._errors():
            back = [connection]
            try:
                if error is not None:
                    back += self._kept
                    self._kept.clear()
                    # Replies that nobody has read would be the next one's.
                    await connection.disconnect(nowait=True)
            finally:
                for each in back:
                    await self._pool.release(each)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # it refers to this frame now; both would wait for the garbage collector
