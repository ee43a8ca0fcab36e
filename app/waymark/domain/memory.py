"""Remembers, for one stream, which block each engine hash stands for.

A **place** is a namespace and a seq_hash as one integer, ``namespace << 64 | seq_hash``. For each holder the memory has
the places that were stored. Removed hashes stay as *gone*, because a child or a placeholder may still name them. Both
are bounded, but only ``trim`` forgets: what the memory had when the lookups of a fold were chosen must stay until the
fold is resolved. Forgotten hashes are looked up in Redis, unless the memory is known to be complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from waymark.domain.names import U64_MASK
from waymark.domain.slices import Slices

_FORGOTTEN_AT_ONCE = 16_384


def place_of(namespace: int, seq_hash: int) -> int:
    return namespace << 64 | seq_hash


def seq_hash_of(place: int) -> int:
    return place & U64_MASK


def namespace_of(place: int) -> int:
    return place >> 64


def block_key(place: int) -> int:
    """The key a block is found by: seq_hash XOR namespace."""
    return (place & U64_MASK) ^ (place >> 64)


class HashMemory:
    """Engine hashes of one stream. Ranks do not share hashes; media of one rank do."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._known: dict[int, dict[int, int]] = {}
        self._gone: dict[int, dict[int, int]] = {}
        self._rank: dict[int, int] = {}
        self._holders: dict[int, list[int]] = {}
        self._whole: set[int] = set()

    def begin(self, holder: int, dp_rank: int, *, is_new: bool) -> None:
        """A holder to remember for; of a new one everything will be seen, so what is unknown does not exist."""
        if holder in self._known:
            return
        self._known[holder] = {}
        self._rank[holder] = dp_rank
        self._holders.setdefault(dp_rank, []).append(holder)
        self._gone.setdefault(dp_rank, {})
        if is_new:
            self._whole.add(holder)

    def end(self, holder: int) -> None:
        """Forget a holder; with the last one of its rank, what is gone there too."""
        if self._known.pop(holder, None) is None:
            return
        dp_rank = self._rank.pop(holder)
        self._holders[dp_rank].remove(holder)
        self._whole.discard(holder)
        if not self._holders[dp_rank]:
            del self._holders[dp_rank], self._gone[dp_rank]

    def store(self, holder: int, engine_hashes: Sequence[int], places: Sequence[int]) -> None:
        self._known[holder].update(zip(engine_hashes, places, strict=True))

    def mark_partial(self, holder: int) -> None:
        """Something was stored that is not remembered: what is unknown must be looked up from now on."""
        self._whole.discard(holder)

    def learn(self, holder: int, entries: Mapping[int, int]) -> None:
        """What Redis says, where the memory says nothing."""
        known = self._known[holder]
        for engine_hash, place in entries.items():
            known.setdefault(engine_hash, place)

    def remove(self, holder: int, engine_hash: int) -> int | None:
        """The place of a hash that its holder removes; None where it is unknown. From now on it is gone.

        A hash may be stored several times and removed as often, so one that is gone is still found here.
        """
        gone = self._gone[self._rank[holder]]
        place = self._known[holder].pop(engine_hash, None)
        if place is None:
            return gone.get(engine_hash)
        gone.pop(engine_hash, None)
        gone[engine_hash] = place
        return place

    def own(self, holder: int, engine_hash: int) -> int | None:
        """What the hash stood for on this very holder, present or gone."""
        place = self._known[holder].get(engine_hash)
        return self._gone[self._rank[holder]].get(engine_hash) if place is None else place

    def find(self, holder: int, engine_hash: int) -> int | None:
        """What the hash stands for on this holder, else on another medium of its rank, else what it stood for."""
        place = self._known[holder].get(engine_hash)
        if place is not None:
            return place
        dp_rank = self._rank[holder]
        for other in self._holders[dp_rank]:
            place = self._known[other].get(engine_hash)
            if place is not None:
                return place
        return self._gone[dp_rank].get(engine_hash)

    def unknown(self, dp_rank: int, engine_hashes: Iterable[int]) -> dict[int, list[int]]:
        """Which of the hashes must be looked up in Redis, per holder of the rank."""
        holders = self._holders.get(dp_rank, [])
        if self._whole.issuperset(holders):
            return {}
        gone = self._gone[dp_rank]
        known = [self._known[holder] for holder in holders]
        missing = [h for h in engine_hashes if h not in gone and not any(h in each for each in known)]
        return {holder: missing for holder in holders if holder not in self._whole} if missing else {}

    def unknown_own(self, holder: int, engine_hashes: Iterable[int]) -> list[int]:
        """Which of the hashes must be looked up to know what they stand for on this very holder."""
        if holder in self._whole:
            return []
        known, gone = self._known[holder], self._gone[self._rank[holder]]
        return [h for h in engine_hashes if h not in known and h not in gone]

    @property
    def is_over(self) -> bool:
        """There are too many."""
        for known in self._known.values():
            if len(known) > self._entries_max:
                return True
        return any(map(self._entries_max.__lt__, map(len, self._gone.values())))

    def trim(self) -> Slices[None]:
        """Forget the oldest, where there are too many. Between folds only."""
        for holder, known in self._known.items():
            if len(known) > self._entries_max:
                self._whole.discard(holder)
                yield from _forget_oldest(known, self._entries_max)
        for dp_rank, gone in self._gone.items():
            if len(gone) > self._entries_max:
                # What is gone may have a copy left in Redis.
                self._whole.difference_update(self._holders[dp_rank])
                yield from _forget_oldest(gone, self._entries_max)

    def __len__(self) -> int:
        return sum(map(len, self._known.values())) + sum(map(len, self._gone.values()))


def _forget_oldest(entries: dict[int, int], entries_max: int) -> Slices[None]:
    """Down to nine tenths of the ceiling, so that it is done seldom."""
    surplus = len(entries) - entries_max * 9 // 10
    while surplus > 0:
        oldest = list(islice(entries, min(surplus, _FORGOTTEN_AT_ONCE)))
        for engine_hash in oldest:
            del entries[engine_hash]
        surplus -= len(oldest)
        yield
