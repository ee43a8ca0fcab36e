"""Routing by an index of the engines' events. The index gets the events late, and may be killed during a run.

The blocks that an engine stores are visible ``lag_seconds`` later on the trace's clock and not before: its frames are
held back for that time, and no query is sent before all sent frames are visible. So a run does not depend on the speed
of the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.simulate_routers import Router, Truth
from tools.benchmarks.simulate_trace import Request
from waymark.simulator.encode import BlockRemoved, BlockStored, WireEvent


class Index(Protocol):
    def tell(self, engine: int, events: list[WireEvent]) -> None:
        """Pass the events of an engine to the index."""

    async def settle(self) -> None:
        """Wait until all these events are visible."""

    async def matches(self, request: Request, names: Sequence[int]) -> Sequence[int] | None:
        """Return the matched tokens of each engine; None if the index is not available."""

    async def kill(self) -> None:
        """Kill the index."""

    async def restart(self) -> float:
        """Restart the index. Return the seconds until it answers and has all events that can be replayed."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The time at which an index is killed, and the time until it is started again, on the trace's clock."""

    at_seconds: float
    outage_seconds: float


class ByIndex:
    """A router that prefers the engine with the longest match in the index, and uses ``fallback`` while the index is
    not available.

    The real time of a restart counts on the trace's clock: for that long no query is sent to the index.
    """

    def __init__(
        self, index: Index, fallback: Router, truth: Truth, *, lag_seconds: float = 0.0, kill: Kill | None = None
    ) -> None:
        self.answers = 0
        self.exact = 0
        """The number of answers that equalled the contents of the caches."""
        self.fallbacks = 0
        self.restart_seconds: float | None = None
        self._index = index
        self._fallback = fallback
        self._truth = truth
        self._lag_seconds = lag_seconds
        self._late: deque[tuple[float, int, list[WireEvent]]] = deque()
        self._kill = kill
        self._is_killed = False
        self._asked_from = 0.0

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        now = request.at_seconds
        self._tell(now)
        if self._kill is not None:
            await self._live_and_die(self._kill, now)
        matches = None
        if now >= self._asked_from:
            if not self._is_killed:
                await self._index.settle()
            matches = await self._index.matches(request, names)
        if matches is None:
            self.fallbacks += 1
            return await self._fallback.keys(request, names)
        self.answers += 1
        self.exact += list(matches) == self._truth.matches(names)
        return [-match for match in matches]

    def hear(self, at_seconds: float, engine: int, events: list[WireEvent]) -> None:
        self._late.append((at_seconds + self._lag_seconds, engine, events))

    async def finish(self) -> None:
        """Send all frames that are held back, and wait until they are visible."""
        self._tell(float("inf"))
        await self._index.settle()

    def _tell(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            _, engine, events = self._late.popleft()
            self._index.tell(engine, events)

    async def _live_and_die(self, kill: Kill, now: float) -> None:
        if self.restart_seconds is not None or now < kill.at_seconds:
            return
        if not self._is_killed:
            self._is_killed = True
            await self._index.kill()
        back_at = kill.at_seconds + kill.outage_seconds
        if now >= back_at:
            self.restart_seconds = await self._index.restart()
            self._is_killed = False
            self._asked_from = back_at + self.restart_seconds


class Memory:
    """A model of an indexer that keeps everything in its own memory and recovers nothing after a kill.

    It is a set of blocks per engine, fed by the same events, and more tolerant than a real indexer: it accepts a block
    whose parent is unknown. It has no replay and no peer to copy from, so it learns of blocks from before the restart
    only when the engine stores them again. It does not represent a particular product.
    """

    def __init__(self, engines: int, restart_seconds: float) -> None:
        self._restart_seconds = restart_seconds
        self._held: list[set[int]] = [set() for _ in range(engines)]
        self._is_up = True

    def tell(self, engine: int, events: list[WireEvent]) -> None:
        for event in events if self._is_up else ():
            if isinstance(event, BlockStored):
                self._held[engine].update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._held[engine].difference_update(event.block_hashes)

    async def settle(self) -> None:
        """Do nothing, because events are visible at once."""

    async def matches(self, request: Request, names: Sequence[int]) -> Sequence[int] | None:
        if not self._is_up:
            return None
        return [_prefix(names, held) * BLOCK_SIZE for held in self._held]

    async def kill(self) -> None:
        self._is_up = False
        for held in self._held:
            held.clear()

    async def restart(self) -> float:
        self._is_up = True
        return self._restart_seconds


def _prefix(names: Sequence[int], held: set[int]) -> int:
    return next((i for i, name in enumerate(names) if name not in held), len(names))
