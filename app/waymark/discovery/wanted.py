"""An engine named by a source: a pod, an entry of a file, or an engine that was registered by its URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from waymark.domain.names import Origin

T = TypeVar("T")
WantedKey: TypeAlias = tuple[Origin, str | None, str | None]

#: The engines that are looked at in one turn of the loop, which takes a few milliseconds.
_TURN_ENGINES = 256


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """An engine that should be registered."""

    origin: Origin
    """The origin of its registrations. It is unique in its source."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``POST /register`` that the source knows."""
    url: str | None = None
    """The URL of the engine, which reports the other fields; None: there are no others."""
    ports: tuple[int, int, int] = (0, 0, 0)
    """Event port and replay port of rank 0, and the number of ranks, for an engine that names no sockets; 0:
    unknown."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Fields used if the engine does not report them: those of its last registration."""
    since: str = ""
    """The start of the engine, as a text that grows. Of two engines at one address the later one counts."""

    def __str__(self) -> str:
        return f"{self.origin.kind} {self.origin.source}"

    @property
    def key(self) -> WantedKey:
        """One URL may be registered several times, under other names."""
        return self.origin, self.fields.get("instance_id"), self.fields.get("tenant_id")

    @property
    def address(self) -> str | None:
        """The key that differs between any two engines of a source."""
        return self.url or (self.fields.get("address") if self.ports[0] else None)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over what may be thousands, and let the loop do other things now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _TURN_ENGINES == 0:
            await asyncio.sleep(0)
