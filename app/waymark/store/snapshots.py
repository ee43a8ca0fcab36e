"""The places for snapshots of engines: all workers together ask few engines at once, and no engine often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from waymark.store import keys
from waymark.store.leases import random_nonce
from waymark.store.scripts import Scripts

#: Snapshots at the same time, of all workers. A snapshot costs its engine about a second, and its worker memory.
PLACES: Final = 2


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """A place that is held if ``wait_seconds`` is 0; else the time after which another attempt may succeed."""

    nonce: str
    wait_seconds: float = 0.0


class SnapshotPlaces:
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def take(self, place: SnapshotPlace, socket: str, seconds: float, pause_seconds: float) -> SnapshotPlace:
        """Take a place for ``seconds``, to ask a socket; it is not asked again within ``pause_seconds``.

        ``socket`` is the digest of its endpoint. A repeated call with the same ``place`` takes one place.
        """
        outcome = await self._scripts.hold_snapshot(
            snapshots=keys.SNAPSHOTS,
            asked=keys.snapshot_asked(socket),
            holder=place.nonce,
            milliseconds=max(1, int(seconds * 1000)),
            pause=max(1, int(pause_seconds * 1000)),
            most=PLACES,
        )
        return SnapshotPlace(place.nonce, 0.0 if outcome.is_applied else outcome.numbers[0] / 1000)

    async def release(self, place: SnapshotPlace, socket: str) -> None:
        await self._scripts.hold_snapshot(
            snapshots=keys.SNAPSHOTS,
            asked=keys.snapshot_asked(socket),
            holder=place.nonce,
            milliseconds=0,
            pause=0,
            most=PLACES,
        )


def new_place() -> SnapshotPlace:
    return SnapshotPlace(random_nonce())
