"""How many inspections work at the same time, and for how long.

An inspection reads far more than a query does. So inspections have few places of their own, and a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from waymark.api.http.admission import AdmissionQueue
from waymark.base.errors import StoreUnavailable
from waymark.base.settings import Settings

T = TypeVar("T")

AT_ONCE = 2
"""Inspections that run at once. Each reads as much of Redis as many queries do, and people ask for few."""


class InspectionQueue:
    def __init__(self, settings: Settings) -> None:
        self._admission = AdmissionQueue(AT_ONCE)
        self._seconds = settings.inspect_seconds

    async def take(self, work: Callable[[], Awaitable[T]], *, name: str, remedy: str) -> T:
        """Return the result of ``work``. After its deadline raise ``StoreUnavailable``, in words that name it and the
        remedy.
        """
        if not self._admission.try_enter():
            await self._admission.wait()
        is_unavailable: bool | None = None
        try:
            async with asyncio.timeout(self._seconds):
                result = await work()
            is_unavailable = False
            return result
        except StoreUnavailable:
            is_unavailable = True
            raise
        except TimeoutError:
            raise StoreUnavailable(
                f"the {name} was not done within WAYMARK_INSPECT_SECONDS, {self._seconds:g} s; try again, or {remedy}"
            ) from None
        finally:
            self._admission.leave(is_unavailable=is_unavailable)
