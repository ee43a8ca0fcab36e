"""The gate at the start: no decision before so many engines are registered that it would be a choice."""

from __future__ import annotations

from time import monotonic

from waymark.base.errors import Starting
from waymark.store.directory import Directory

#: How long a count of instances is used while the gate is closed: it bounds what refused requests ask of Redis.
_COUNT_SECONDS = 0.1


class StartupGate:
    """Closed until ``minimum`` different instances are registered; then open for as long as the process runs."""

    def __init__(self, directory: Directory, minimum: int) -> None:
        self._directory = directory
        self._minimum = minimum
        self._is_open = minimum == 0
        self._count = 0
        self._count_until = 0.0

    async def waiting(self) -> str | None:
        """What the gate waits for, as a sentence; None once it is open."""
        if self._is_open:
            return None
        if monotonic() >= self._count_until:
            registrations = await self._directory.registrations()
            self._count = len(
                {(each.tenant_id, each.instance_id) for each in registrations if each.scope == "instance"}
            )
            self._count_until = monotonic() + _COUNT_SECONDS
        if self._count >= self._minimum:
            self._is_open = True
            return None
        return f"waiting for workers: {self._count} of {self._minimum}"

    async def check(self) -> None:
        """Raise Starting while the gate is closed."""
        sentence = await self.waiting()
        if sentence is not None:
            raise Starting(f"{sentence}; register more engines, or lower WAYMARK_MIN_INITIAL_WORKERS")

    def check_latched(self) -> None:
        """As ``check``, without Redis: a gate that was never seen open is closed."""
        if not self._is_open:
            raise Starting(f"waiting for {self._minimum} workers, and Redis is unavailable")
