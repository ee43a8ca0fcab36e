"""Limits how many requests are processed at the same time; the others wait in order of arrival.

A request in process uses a connection to Redis, and its parsed body takes several times the memory of its bytes.
Processing more would not make answers faster, because the event loop and Redis do one thing at a time. So a request is
parsed when it is admitted, and thousands that come at once cost only their bytes.

If Redis is unavailable, waiting requests do not wait for their full time: when one request fails, all waiting ones are
refused. The next ones to be admitted are those that try again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from waymark.base.errors import StoreUnavailable

T = TypeVar("T")

AT_ONCE = 16
"""The requests of one queue processed at once. More would not be answered earlier, and each uses a connection to
Redis.
"""

#: The longest wait. Healthy queries never take so long, so a request that waits longer is waiting for a hanging Redis.
WAIT_SECONDS = 10.0


class Waiter(Protocol):
    """A request that waits for its admission: a future, or the receiver of a callback."""

    def done(self) -> bool:
        """Return whether it no longer waits."""

    def set_result(self, result: None, /) -> None:
        """Note that it is admitted."""

    def set_exception(self, exception: StoreUnavailable, /) -> None:
        """Note that it is refused."""


class AdmissionQueue:
    """Admits at most ``at_once`` requests; each ``leave`` admits the next one.

    A request that waits is refused with ``StoreUnavailable`` after ``wait_seconds``.
    """

    def __init__(self, at_once: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._places = at_once  # the free places; 0 while a request waits
        self._waiting: deque[tuple[float, Waiter]] = deque()
        """The requests that wait, in order of arrival, each with the time by which it is refused."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer for the first of them; a timer for each would cost as much as the rest of the wait."""
        self._wait_seconds = wait_seconds

    async def run(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return the result of ``work``, which begins when it is admitted. A refusal raises ``StoreUnavailable``."""
        if not self.try_enter():
            await self._admission()
        is_unavailable = False
        try:
            return await work(*arguments)
        except StoreUnavailable as exc:
            is_unavailable = exc.concerns_all
            raise
        finally:
            self.leave(is_unavailable=is_unavailable)

    def try_enter(self) -> bool:
        """Return whether the request is admitted at once. If not, the caller must ``wait``."""
        if self._places:
            self._places -= 1
            return True
        return False

    def wait(self, waiter: Waiter) -> None:
        """Admit ``waiter`` after all that wait already, or refuse it."""
        loop = asyncio.get_running_loop()
        self._waiting.append((loop.time() + self._wait_seconds, waiter))
        if self._timer is None:
            self._timer = loop.call_later(self._wait_seconds, self._refuse_late)

    def leave(self, *, is_unavailable: bool) -> None:
        """Give the place back. ``is_unavailable``: Redis did not answer, so all that wait are refused."""
        if is_unavailable:
            refused, self._waiting = self._waiting, deque()
            for _, waiter in refused:
                if not waiter.done():
                    waiter.set_exception(
                        StoreUnavailable("earlier requests still wait for Redis; try again in a moment")
                    )
        if self._waiting:
            self._admit_next()
        else:
            self._places += 1

    async def _admission(self) -> None:
        """Return when the request is admitted."""
        admitted = asyncio.get_running_loop().create_future()
        self.wait(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled() and admitted.exception() is None:
                self._admit_next()  # the request got its place in the same moment
            raise

    def _admit_next(self) -> None:
        while self._waiting:
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._places += 1

    def _refuse_late(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        now = loop.time()
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= now):
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(
                    StoreUnavailable(
                        f"too many requests wait for Redis; this one has waited for "
                        f"{self._wait_seconds:g} s; try again in a moment"
                    )
                )
        if self._waiting and self._timer is None:
            self._timer = loop.call_at(self._waiting[0][0], self._refuse_late)
