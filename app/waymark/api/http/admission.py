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

from waymark.base.errors import StoreUnavailable

AT_ONCE = 16
"""The requests of one queue processed at once. More would not be answered earlier, and each uses a connection to
Redis.
"""

#: The longest wait. Healthy queries never take so long, so a request that waits longer is waiting for a hanging Redis.
WAIT_SECONDS = 10.0


class AdmissionQueue:
    """Admits at most ``at_once`` requests; each ``leave`` admits the next one.

    ``wait`` raises ``StoreUnavailable`` after ``wait_seconds``.
    """

    def __init__(self, at_once: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._places = at_once  # the free places; 0 while a request waits
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wait_seconds = wait_seconds
        self._is_unavailable = False
        """Whether Redis did not answer the request that left last."""

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
