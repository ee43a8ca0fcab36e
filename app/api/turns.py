"""How many requests work at once; the others wait their turn.

Each of them needs a connection to Redis, of which there are as many, and parsed it is several times the size of its
bytes. So it is parsed when its turn comes, and thousands that come at once cost no more than their bytes.

Behind those whom Redis does not answer nobody waits his full time: one refusal from Redis is a refusal for all who
have been waiting meanwhile, and the next to come are those who try again.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from app.errors import StoreUnavailable

#: As many as the store has connections.
AT_ONCE = 64
#: Longer than any number of healthy queries takes; what waits longer, waits for a Redis that hangs.
WAIT_SECONDS = 10.0


class Turns:
    """``async with turns``: at most ``at_once`` are inside; ``StoreUnavailable`` after ``wait_seconds`` outside."""

    def __init__(self, at_once: int = AT_ONCE, wait_seconds: float = WAIT_SECONDS) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._wait_seconds = wait_seconds
        self._is_away = False
        """Redis did not answer the one who was inside last."""

    async def __aenter__(self) -> None:
        if not self._free.locked():
            await self._free.acquire()  # does not wait
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise StoreUnavailable(
                f"too many requests wait for Redis, this one for {self._wait_seconds:g} s; try again in a moment"
            ) from None
        if self._is_away:
            self._free.release()
            raise StoreUnavailable("Redis does not answer those who came before; try again in a moment")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StoreUnavailable):
            self._is_away = error is not None
        self._free.release()
