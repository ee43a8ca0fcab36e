"""Connections of a pool for those who speak the protocol themselves, a few of them kept at hand.

The library's pool takes locks, waits and looks at the socket each time, which costs as much as a query's commands.
What is kept here was given back after its last reply had been read whole, and tells when it is lost. After any failure
all that are kept go back to the pool, and that connection, closed, as the next to be opened: behind Sentinels the pool
then closes those to a primary that is none any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from waymark.errors import StoreUnavailable
from waymark.store.line import Line, Take

T = TypeVar("T")

#: Of each pool. They count as taken there, so it must be well below the size of a pool.
KEPT_MAX = 16

#: By pool, which may have several lenders.
_kept: WeakKeyDictionary[ConnectionPool, list[Line]] = WeakKeyDictionary()


class Lender:
    """Asks over connections of one pool.

    ``errors`` is what the driver's errors go through; it is entered only where something is not as usual.
    """

    def __init__(self, pool: ConnectionPool, errors: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._pool = pool
        self._errors = errors
        self._kept = _kept.setdefault(pool, [])

    async def ask(self, packed: bytes, take: Take[T], until: float | None) -> T:
        """What ``take`` makes of the reply to a packed command. TimeoutError at ``until``, by the loop's clock."""
        line = self._kept.pop() if self._kept else None
        if line is None or not line.is_idle:
            line = await self._open(line, until)
        try:
            return await line.ask(packed, take, until)
        except RedisError:
            with self._errors():
                raise
        finally:
            # Where the pool has no more, others may be waiting for what goes back to it.
            is_to_keep = line.is_idle and len(self._kept) < KEPT_MAX and self._pool.can_get_connection()
            # The library marks connections to a node that has left the Cluster.
            if is_to_keep and not line.connection.should_reconnect():  # type: ignore[no-untyped-call]
                self._kept.append(line)
            else:
                await self._give_back(line)

    async def put_back(self) -> None:
        """Give the pool all that are at hand."""
        with self._errors():
            while self._kept:
                await self._release(self._kept.pop())

    async def _open(self, lost: Line | None, until: float | None) -> Line:
        if lost is not None:
            await self._give_back(lost)
        async with asyncio.timeout_at(until):
            with self._errors():
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                if not isinstance(connection._writer, asyncio.StreamWriter):
                    await self._pool.release(connection)
                    raise StoreUnavailable("the embedded Redis has no connections")
                # Kept first: a cancellation that the driver has swallowed is raised at the end of this block.
                self._kept.append(Line(connection))
            return self._kept.pop()

    async def _give_back(self, line: Line) -> None:
        with self._errors():
            try:
                if not line.is_idle:
                    await self.put_back()
            finally:
                # Last, so it is the next to be opened: behind Sentinels that tells the pool of a new primary.
                await self._release(line)

    async def _release(self, line: Line) -> None:
        line.leave()
        try:
            if not line.is_idle:
                # Replies that nobody has read would be the next one's.
                await line.connection.disconnect(nowait=True)
        finally:
            await self._pool.release(line.connection)
