"""How many requests work at once; the others wait their turn.

Each of them needs a connection to Redis, of which there are some more, and parsed it is several times the size of its
bytes. So it is parsed when its turn comes, and thousands that come at once cost no more than their bytes.

Behind those whom Redis does not answer nobody waits his full time: one refusal from Redis is a refusal for all who
have been waiting meanwhile, and the next to come are those who try again.
"""

from __future__ import annotations

import asyncio
from collections import deque

from waymark.errors import StoreUnavailable

#: Fewer than the store has connections: whatever else asks Redis must find one.
AT_ONCE = 64
#: Longer than any number of healthy queries takes; what waits longer, waits for a Redis that hangs.
WAIT_SECONDS = 10.0


class Turns:
    """At most ``at_once`` are inside: who has taken a turn gives it back.

    Those who wait go in in the order in which they came; ``StoreUnavailable`` after ``wait_seconds`` outside.
    """

    def __init__(self, at_once: int = AT_ONCE, wait_seconds: float = WAIT_SECONDS) -> None:
        self._left = at_once  # 0 while anybody waits
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wait_seconds = wait_seconds
        self._is_away = False
        """Redis did not answer the one who was inside last."""

    def take(self) -> bool:
        """A turn, if one is free; else it has to be waited for."""
        if self._left:
            self._left -= 1
            return True
        return False

    async def wait(self) -> None:
        """Until it is one's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as exc:
            if not turn.cancelled():
                self._pass_on()  # it came in the same moment
            if isinstance(exc, TimeoutError):
                raise StoreUnavailable(
                    f"too many requests wait for Redis, this one for {self._wait_seconds:g} s; try again in a moment"
                ) from None
            raise
        if self._is_away:
            self._pass_on()
            raise StoreUnavailable("Redis does not answer those who came before; try again in a moment")

    def give_back(self, *, is_away: bool | None) -> None:
        """``is_away``: whether Redis did not answer; None where nothing was learned of it."""
        if is_away is not None:
            self._is_away = is_away
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited has gone
                turn.set_result(None)
                return
        self._left += 1
