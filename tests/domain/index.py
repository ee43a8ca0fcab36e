"""A stream in one process: a resolver, driven as ingest drives it, and blocks as Redis keeps them.

The store's part is small and strict: it refuses what the scripts could not do (a run that names a block twice, a
key beyond 64 bits), skips what its marks say is counted, and knows only what was written to it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.factories import SEED, batch, registration
from waymark.domain.events import Batch, Event
from waymark.domain.names import U64_MASK, HolderName, Registration, Unit
from waymark.domain.resolver import Plan, Resolver
from waymark.domain.runs import Run
from waymark.domain.slices import finish


class Index:
    def __init__(self, of: Registration | None = None, **options: Any) -> None:
        self.registration = of or registration()
        self.options: dict[str, Any] = {"memory_entries": 1000, "waiting_blocks": 100} | options
        self.copies: dict[int, Counter[int]] = {}
        """Per live holder, the copies of each block key."""
        self.entries: dict[int, dict[int, tuple[int, int]]] = {}
        """Per live holder, engine hash to (namespace, seq_hash)."""
        self.runs: list[Run] = []
        """Of the last fold."""
        self.asked: dict[int, list[int]] = {}
        """Engine hashes that the last fold looked up."""
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
        self.asked = finish(resolver.lookups(plan, batches))
        resolver.learn(
            {
                holder: {h: self.entries[holder][h] for h in hashes if h in self.entries[holder]}
                for holder, hashes in self.asked.items()
            }
        )
        self.runs = []
        for i, each in enumerate(batches):
            self._seq += 1
            self.runs += finish(resolver.resolve(plan, i, self._seq, each))
        for run in self.runs:
            self._apply(run)

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

    def _resolver(self) -> Resolver:
        return Resolver(self.registration, 1, seed=SEED, **self.options)

    # ---- as the store does -------------------------------------------------------------------------

    def _apply(self, run: Run) -> None:
        holder, mode = run.holder, self.resolver.mode(run.holder)
        copies, entries = self.copies[holder], self.entries[holder]
        assert 0 < len(run.keys) == len(set(run.keys)) == len(run.hashes)
        for i, (key, engine_hash) in enumerate(zip(run.keys, run.hashes, strict=True)):
            assert 0 <= key <= U64_MASK
            at = (run.seq, run.first + i)
            if at <= self._marks.get(holder, (0, 0)):
                continue
            self._marks[holder] = at
            if run.kind == "+":
                copies[key] = 1 if mode == "set" else copies[key] + 1
                entries[engine_hash] = (run.namespace, key ^ run.namespace)
                assert not run.is_identity or engine_hash == key ^ run.namespace
            elif run.kind == "-" and mode == "count" and copies[key] > 1:
                copies[key] -= 1
            else:
                del copies[key]
                entries.pop(engine_hash, None)

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
