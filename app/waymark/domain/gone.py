"""Engine hashes whose blocks have left, of one rank: a child or a placeholder may still name them."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof

from waymark.domain.known import KnownBlocks, Places, Spot
from waymark.domain.new_known import new_known

GONE_MAX = 16_384
"""Hashes that are gone, of one rank. At least half as many are remembered: the last ones."""


class GoneHashes:
    """Hashes in two sets, of which ``trim`` empties the older one."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._new = new_known(places, has_keys=False)
        self._old = new_known(places, has_keys=False)

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    @property
    def bytes(self) -> int:
        return getsizeof(self._new) + getsizeof(self._old)

    def get(self, engine_hash: int) -> Spot | None:
        return self._new.get(engine_hash) or self._old.get(engine_hash)

    def add(self, engine_hash: int, spot: Spot) -> None:
        self._old.discard((engine_hash,))
        self._new.store(spot.place, spot.namespace, (spot.key,), (spot.depth,), (engine_hash,))

    @property
    def sets(self) -> tuple[KnownBlocks, ...]:
        """The two sets; a hash that goes enters the first."""
        return self._new, self._old

    def discard(self, engine_hashes: Sequence[int]) -> None:
        """They are there again."""
        self._new.discard(engine_hashes)
        self._old.discard(engine_hashes)

    def is_over(self, entries_max: int) -> bool:
        return len(self._new) > entries_max // 2

    def trim(self) -> None:
        """Forget those that were gone before the last call."""
        self._old, self._new = self._new, new_known(self._places, has_keys=False)
