"""The targets of a fleet by what they have to do, least first, kept while loads change one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from random import Random

from waymark.decide.group_loads import GroupLoads
from waymark.store.reservations import Load

_IDLE = Load()
#: With more changes than this share of the targets all are sorted again.
_SHARE = 8


class LoadOrder:
    """Targets by ``(tokens + active * requests) / weight``."""

    def __init__(self, weights: Mapping[int, float], active: float, random: Random) -> None:
        """``weights`` of the targets by publisher."""
        self._weights = weights
        self._active = active
        self._random = random
        self._loads: GroupLoads | None = None
        self._version = 0
        self._entries: list[tuple[float, float, int]] = []
        """The load of each target, a random number, and the publisher."""
        self._entry_of: dict[int, tuple[float, float, int]] = {}

    def least(self, loads: Mapping[int, Load]) -> Iterator[int]:
        """The publishers, least first; of those that have equally much to do, the first is one by chance.

        So many callers do not all take the same one. Nothing may change while it is gone through.
        """
        self._follow(loads)
        entries = self._entries
        if not entries:
            return
        equal = bisect_right(entries, (entries[0][0], 2.0, 0))
        begin = self._random.randrange(equal)
        for at in range(begin, equal):
            yield entries[at][2]
        for at in range(begin):
            yield entries[at][2]
        for at in range(equal, len(entries)):
            yield entries[at][2]

    def _follow(self, loads: Mapping[int, Load]) -> None:
        if not isinstance(loads, GroupLoads):
            self._loads = None
            self._sort(loads)
            return
        changed = loads.changed_since(self._version) if loads is self._loads else None
        moved = None if changed is None else set(changed)
        if moved is None or len(moved) > len(self._weights) // _SHARE:
            self._sort(loads)
        else:
            self._move(moved, loads)
        self._loads, self._version = loads, loads.version

    def _sort(self, loads: Mapping[int, Load]) -> None:
        self._entry_of = {publisher: self._entry(publisher, loads) for publisher in self._weights}
        self._entries = sorted(self._entry_of.values())

    def _move(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        for publisher in publishers:
            before = self._entry_of.get(publisher)
            if before is None:
                continue  # no target of this order
            del self._entries[bisect_left(self._entries, before)]
            after = self._entry_of[publisher] = self._entry(publisher, loads)
            insort(self._entries, after)

    def _entry(self, publisher: int, loads: Mapping[int, Load]) -> tuple[float, float, int]:
        load = loads.get(publisher, _IDLE)
        work = (load.tokens + self._active * load.requests) / self._weights[publisher]
        return work, self._random.random(), publisher
