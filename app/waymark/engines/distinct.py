"""Whether a long event names a block twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_DICTS: Final = 127


class DistinctHashes:
    """Hashes of one long event, in many small dicts.

    One large one would now and then be copied as it grows, and the garbage collector would go through all of a set;
    either takes 10 ms. It leaves out a dict of integers.
    """

    __slots__ = ("_dicts", "added")

    def __init__(self) -> None:
        self.added = 0
        self._dicts: list[dict[int, None]] = [{} for _ in range(_DICTS)]

    def add(self, engine_hashes: Sequence[int]) -> bool:
        """Whether all of them are new, and none is twice among them."""
        self.added += len(engine_hashes)
        dicts = self._dicts
        for engine_hash in engine_hashes:
            dicts[engine_hash % _DICTS][engine_hash] = None
        return sum(map(len, dicts)) == self.added

    def __contains__(self, engine_hash: int | None) -> bool:
        return engine_hash is not None and engine_hash in self._dicts[engine_hash % _DICTS]
