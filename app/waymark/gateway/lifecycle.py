"""Reservations of requests under way: kept while they run, their prefill ended at the first content, then all of them.

A reservation lasts for half a minute and is renewed every ten seconds. So a gateway that dies leaves load behind for
half a minute at most, and a request may run for hours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from waymark.errors import StoreUnavailable
from waymark.logs import fields
from waymark.selection.selector import Selector
from waymark.store.reservations import Part, Reservation

log = logging.getLogger(__name__)

RESERVED_MS = 30_000
_RENEW_SECONDS = 10.0

Begin = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Lifecycle:
    """The requests of one process. Nothing here waits for Redis: what ends, ends in the background."""

    def __init__(self, selector: Selector, begin: Begin, *, renew_seconds: float = _RENEW_SECONDS) -> None:
        self._selector = selector
        self._begin = begin
        self._renew_seconds = renew_seconds
        self._held: set[Held] = set()
        self._renewing: asyncio.Task[None] | None = None

    def hold(self, reservations: Sequence[Reservation]) -> Held:
        """Keep reservations until ``end``."""
        held = Held(self, reservations)
        if reservations:
            self._held.add(held)
            if self._renewing is None or self._renewing.done():
                self._renewing = self._begin(self._keep_renewing())
        return held

    def end(self, held: Held, part: Part) -> None:
        if part is not Part.PREFILL:
            self._held.discard(held)
        if held.reservations:
            self._begin(self._release(held.reservations, part))

    async def _keep_renewing(self) -> None:
        while self._held:
            await asyncio.sleep(self._renew_seconds)
            reservations = [each for held in self._held for each in held.reservations]
            if reservations:
                await self._release(reservations, Part.RENEW)

    async def _release(self, reservations: Sequence[Reservation], part: Part) -> None:
        try:
            await self._selector.release(reservations, part, milliseconds=RESERVED_MS)
        except StoreUnavailable as exc:
            # They run out by themselves.
            log.debug("reservations not released", extra=fields(part=part.value, error=exc.sentence))


class Held:
    """The reservations of one attempt. Each end counts once."""

    def __init__(self, lifecycle: Lifecycle, reservations: Sequence[Reservation]) -> None:
        self.reservations = tuple(reservations)
        self._lifecycle = lifecycle
        self._is_prefilled = False
        self._is_over = False

    def prefilled(self) -> None:
        """The first content has arrived."""
        if not (self._is_prefilled or self._is_over):
            self._is_prefilled = True
            self._lifecycle.end(self, Part.PREFILL)

    def end(self, *, is_ok: bool) -> None:
        """The attempt is over; ``is_ok`` is what counts for the target's health."""
        if not self._is_over:
            self._is_over = True
            self._lifecycle.end(self, Part.OK if is_ok else Part.FAILED)
