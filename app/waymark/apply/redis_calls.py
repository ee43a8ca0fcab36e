"""Repeats an applier's calls while Redis is unavailable. The calls end when another worker has the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from waymark.base.errors import RecordDamaged, StoreFull, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS_MIN = 0.05
_PAUSE_SECONDS_MAX = 1.0


class Fenced(Exception):
    """Another worker has the stream, or Redis has lost writes to it. In both cases the applier's memory is invalid."""


class RedisCalls:
    """Calls of the applier. With ``is_patient`` a call waits for Redis; else it raises StoreUnavailable."""

    def __init__(self, metrics: Metrics, begin: Callable[[], None], *, is_patient: bool) -> None:
        """``begin`` is called after each reply: the wait has let other callbacks run, so a new slice begins."""
        self.is_patient = is_patient
        self.last_error: str | None = None
        """Why Redis does not answer; None while it answers."""
        self.on_silence: Callable[[bool], None] | None = None
        """Called with True if Redis does not answer, and with False if it answers again."""
        self.while_full: Callable[[], Awaitable[None]] | None = None
        """Called before each pause while Redis has no memory left."""
        self._metrics = metrics
        self._begin = begin

    async def answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call``. With ``is_patient`` the call is repeated until Redis answers.

        Raises the errors of ``call``; with ``is_patient``, RecordDamaged is the only StoreUnavailable.
        """
        pause = _PAUSE_SECONDS_MIN
        while True:
            try:
                reply = await call()
            except RecordDamaged:
                raise  # a repetition fails in the same way; the next worker that takes the stream may mend the record
            except StoreUnavailable as exc:
                if not self.is_patient:
                    raise
                if self.last_error is None:
                    log.warning("redis does not answer", extra=fields(error=exc.sentence))
                    if self.on_silence is not None:
                        self.on_silence(True)
                self.last_error = exc.sentence
                self._metrics.redis_up.set(0)
                if self.while_full is not None and isinstance(exc, StoreFull):
                    await self.while_full()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_SECONDS_MAX)
            else:
                self._begin()
                if self.last_error is not None:
                    self.last_error = None
                    self._metrics.redis_up.set(1)
                    if self.on_silence is not None:
                        self.on_silence(False)
                return reply

    async def accepted(self, call: Callable[[], Awaitable[bool]]) -> None:
        """Make a call like ``answered``, for a call that returns False if another worker has the stream. Raises Fenced
        then.
        """
        if not await self.answered(call):
            raise Fenced
