"""A stream in one process: a resolver, driven as ingest drives it, and blocks as Redis keeps them.

The store's part is small and strict: it refuses what the scripts could not do (a part that names a block twice, a
key beyond 64 bits), skips what its marks say is counted, and knows only what was written to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.factories import SEED, batch, registration
from waymark.domain.events import Batch, Event
from waymark.domain.held import HeldBlocks
from waymark.domain.names import U64_MASK, HolderName, Registration, Unit
from waymark.domain.parts import Part
from waymark.domain.resolver import Plan, Resolver
from waymark.domain.rows import Place
from waymark.domain.slices import finish


@dataclass
class _Entry:
    place: Place
    namespace: int
    depth: int
    hashes: list[int]
    copies: int = 1


def _fill(memory: HeldBlocks, holder: int, entries: dict[int, _Entry]) -> None:
    for key, entry in entries.items():
        memory.store(holder, entry.place, entry.namespace, [key], [entry.depth], entry.hashes[:1])
        if entry.copies > 1 or len(entry.hashes) > 1:
            memory.copies(holder).restore(key, entry.copies, entry.hashes[1:])


class Index:
    def __init__(self, of: Registration | None = None, **options: Any) -> None:
        self.registration = of or registration()
        self.options: dict[str, Any] = {"blocks_max": 100_000, "waiting_blocks": 100} | options
        self.copies: dict[int, Counter[int]] = {}
        """Per live holder, the copies of each block key."""
        self.entries: dict[int, dict[int, _Entry]] = {}
        """Per live holder, what is kept of each block, by key."""
        self.parts: list[Part] = []
        """Of the last fold."""
        self.plan = Plan()
        self.waiting_lost = 0
        self.resolver = self._resolver()
        self._kept: tuple[frozenset[str], int | None] = (frozenset(), None)
        self._marks: dict[int, tuple[int, int]] = {}
        self._newest = 0
        self._seq = 0

    # ---- as ingest does ----------------------------------------------------------------------------

    def events(self, *events: Event, rank: int | None = None) -> None:
        """One batch, by itself."""
        self.fold(batch(*events, rank=rank))

    def fold(self, *batches: Batch) -> None:
        """Several batches at once."""
        resolver = self.resolver
        self.plan = plan = finish(resolver.plan(batches))
        if plan.facts_changed:
            self._kept = (frozenset(resolver.flags), resolver.main_group)
        for unit in plan.ended:
            self.end(unit)
        if plan.begun:
            ids = range(self._newest + 1, self._newest + 1 + len(plan.begun))
            self._newest += len(ids)
            resolver.begin(list(plan.begun), ids)
            for holder in ids:
                self.copies[holder], self.entries[holder] = Counter(), {}
        numbered: list[tuple[int, Batch]] = []
        for each in batches:
            numbered.append((self._seq + 1, each))
            self._seq += each.frames
        self.parts = list(finish(resolver.resolve(plan, numbered)))
        for part in self.parts:
            self._apply(part)
        for holder in resolver.holders.values():
            assert resolver.memory.blocks_of(holder) == len(self.copies[holder])

    def end(self, unit: Unit) -> None:
        """End the holders of a unit, '*' for a new life."""
        self.waiting_lost += self.resolver.end(unit)
        for holder in set(self.copies) - set(self.resolver.holders.values()):
            del self.copies[holder], self.entries[holder]
        if unit == "*":
            self._kept = (frozenset(), None)

    def take_over(self) -> None:
        """Go on with a resolver that knows what the record says, and nothing else."""
        before = self.resolver
        self.resolver = self._resolver()
        self.resolver.resume(before.holders, *self._kept, before.event_ids)
        for holder, entries in self.entries.items():
            _fill(self.resolver.memory, holder, entries)

    def _resolver(self) -> Resolver:
        return Resolver(self.registration, 1, seed=SEED, **self.options)

    # ---- as the store does -------------------------------------------------------------------------

    def _apply(self, part: Part) -> None:
        holder = part.holder
        copies, entries = self.copies[holder], self.entries[holder]
        assert 0 < len(part.keys) == len(set(part.keys)) == len(part.hashes) == len(part.depths)
        for i, (key, engine_hash) in enumerate(zip(part.keys, part.hashes, strict=True)):
            assert 0 <= key <= U64_MASK
            at = (part.seq, part.first + 2 * i)
            if at <= self._marks.get(holder, (0, 0)):
                continue
            self._marks[holder] = at
            if part.kind == "-":
                del copies[key]
                del entries[key]
                continue
            assert part.is_known == (key in copies)
            assert not part.is_identity or engine_hash == key ^ part.namespace
            copies[key] = max(1, copies[key])
            entry = entries.setdefault(key, _Entry(part.place, part.namespace, part.depths[i], []))
            text = part.copies[i] if part.copies else b""
            if text or not entry.hashes:
                number, *further = (text or b"1").split()
                copies[key] = int(number) or 1
                entry.hashes = [engine_hash, *(int(each, 16) for each in further)]
            entry.copies = copies[key]

    # ---- what is there -----------------------------------------------------------------------------

    def held(self, name: str = "0 GPU") -> Counter[int]:
        """Block keys with their copies on a rank and medium; of standard streams all dimensions together."""
        found: Counter[int] = Counter()
        unit = HolderName.parse(name)
        for other, holder in self.resolver.holders.items():
            if other.is_of(unit):
                found.update(self.copies[holder])
        return found

    @property
    def positions(self) -> list[tuple[str, int, list[int]]]:
        """Of the last fold: kind, position of the first hash in its batch, hashes of each part."""
        return [(part.kind, part.first // 2, part.hashes) for part in self.parts]

    @property
    def holders(self) -> dict[str, int]:
        """Live holder ids by the text form of their names."""
        return {str(name): holder for name, holder in self.resolver.holders.items()}

    @property
    def begun(self) -> list[str]:
        """Of the holders that the last fold began, the names."""
        return list(map(str, self.plan.begun))

    def has(self, *keys: int, on: str = "0 GPU") -> bool:
        """Whether exactly these blocks are there."""
        return set(self.held(on)) == set(keys)

    @property
    def ignored(self) -> dict[str, int]:
        return dict(self.resolver.ignored)
