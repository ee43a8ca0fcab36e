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
from typing import Any, TypeVar

from waymark.api.http.answers import Paused
from waymark.base.errors import StoreUnavailable

T = TypeVar("T")

AT_ONCE = 16
"""The requests of one queue processed at once. More would not be answered earlier, and each uses a connection to
Redis.
"""

#: The longest wait. Healthy queries never take so long, so a request that waits longer is waiting for a hanging Redis.
WAIT_SECONDS = 10.0


class AdmissionQueue:
    """Admits at most ``at_once`` requests; each ``leave`` admits the next one.

    ``run`` and ``wait`` raise ``StoreUnavailable`` after ``wait_seconds`` without admission.
    """

    def __init__(self, at_once: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._places = at_once  # the free places; 0 while a request waits
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wait_seconds = wait_seconds
        self._is_unavailable = False
        """Whether Redis did not answer the request that left last."""

    async def run(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return the result of ``work``, which begins when it is admitted."""
        if not self.try_enter():
            await self.wait()
        is_unavailable: bool | None = None
        try:
            result = await work(*arguments)
            is_unavailable = None if isinstance(result, Paused) else False
            return result
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

    async def wait(self) -> None:
        """Return when the request is admitted."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await admitted
        except BaseException as exc:
            if not admitted.cancelled():
                self._admit_next()  # the request got its place in the same moment
            if isinstance(exc, TimeoutError):
                raise StoreUnavailable(
                    f"too many requests wait for Redis; this one has waited for "
                    f"{self._wait_seconds:g} s; try again in a moment"
                ) from None
            raise
        if self._is_unavailable:
            self._admit_next()
            raise StoreUnavailable("earlier requests still wait for Redis; try again in a moment")

    def leave(self, *, is_unavailable: bool | None) -> None:
        """Give the place back. ``is_unavailable``: Redis did not answer; None if the request did not use Redis."""
        if is_unavailable is not None:
            self._is_unavailable = is_unavailable
        if self._waiting:
            self._admit_next()
        else:
            self._places += 1

    def _admit_next(self) -> None:
        while self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():  # otherwise the request was cancelled
                admitted.set_result(None)
                return
        self._places += 1
