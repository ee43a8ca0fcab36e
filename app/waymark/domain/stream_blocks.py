"""The state of one stream that outlasts its batches: its holders, their blocks, and the counts of unknown blocks.

The resolver owns this state, and the rules of events read and change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from waymark.domain.events import Event, StoreEvent
from waymark.domain.generations import BlockBounds, Generations, RemovalReason
from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.life_facts import COPIES_EACH, COPIES_LAST, COPIES_REUSED, UNTRUSTED, LifeFacts
from waymark.domain.media import DEVICE
from waymark.domain.names import HolderName, Registration, Unit
from waymark.domain.parts import Mode, PartList, Parts
from waymark.domain.placing import Placer
from waymark.domain.waiting import WaitingObjects, WaitingStores

_UNBOUNDED = BlockBounds()
#: The fewest blocks in a report of a whole cache. No step of an engine computes so many blocks twice.
REPORT_BLOCKS_MIN = 4096


class StreamBlocks:
    def __init__(
        self,
        registration: Registration,
        *,
        blocks_max: int,
        waiting_blocks: int,
        shards: int = 1,
        memory: HeldBlocks | None = None,
        bounds: BlockBounds = _UNBOUNDED,
        reads_windows: bool = False,
    ) -> None:
        """Create the state of a new life. With ``reads_windows``, groups of a hybrid model other than full attention
        have their own holders.
        """
        self.registration = registration
        self.traits = registration.kind.traits
        self.facts = LifeFacts(registration, reads_windows=reads_windows)
        self.memory = HeldBlocks() if memory is None else memory
        self.placer = Placer(self.memory, shards)
        self.blocks_max = blocks_max
        self.waiting = WaitingStores(waiting_blocks)
        self.objects = WaitingObjects(waiting_blocks, registration.object_shards)
        self.generations = Generations(bounds)
        self.holders: dict[HolderName, int] = {}
        """Live holder ids by name."""
        self.event_ids: dict[int, int] = {}
        """For standard events, the last event_id of each holder. It may be ahead of Redis by events that are resolved
        but not applied.
        """
        self._moved: dict[int, int] = {}
        self._is_part_seen = False
        """Whether the standard event whose parts are being resolved was seen before."""
        self.is_snapshot = False
        """Whether the events are those of a snapshot, which stores and removes each copy."""
        self.before: Mapping[int, Spot] = {}
        """The blocks that the hashes of a snapshot without tokens stood for in the previous life."""
        self.reported: Mapping[int, Spot] = {}
        """The blocks that engines of a pool's group have reported for the hashes looked up for this fold."""
        self.ignored: Counter[str] = Counter()
        """The number of ignored events, by reason; the owner reads and clears it."""
        self.unresolved = 0
        """The number of unknown hashes in removals and placeholders."""
        self.missing = 0
        """The approximate number of the publisher's unknown blocks, besides those of waiting stores."""
        self.below_zero = 0
        """The number of removals of a block without a copy; a snapshot with any is refused."""
        self.contradictions = 0
        """The number of blocks whose copies were miscounted."""
        self.doubts: set[str] = set()
        """Flags about copies that the events have justified. The owner adds them to ``flags``."""
        self.unsalted = 0
        """The number of stores from releases that cannot name a salt or an image, so they may be indexed under a wrong
        identity.
        """
        self._holders_of: dict[HolderName, list[int]] = {}
        """The live holders of each lasting name, oldest first."""

    @property
    def flags(self) -> set[str]:
        return self.facts.flags

    @property
    def main_group(self) -> int | None:
        return self.facts.main_group

    @property
    def is_shared(self) -> bool:
        """Whether the publisher is a pool, from which all instances read."""
        return self.registration.scope == "shared"

    # ---- lives -------------------------------------------------------------------------------------

    def resume(
        self,
        holders: Mapping[HolderName, int],
        flags: frozenset[str],
        main_group: int | None,
        event_ids: Mapping[int, int],
    ) -> None:
        """Restore the state of a stream from its record."""
        self.facts.restore(flags, main_group)
        self.event_ids = dict(event_ids)
        for name, holder in sorted(holders.items(), key=lambda item: item[1]):
            self._begin(name, holder)
        for name, holder in holders.items():
            self._inherit(name, holder)

    def begin(self, names: Sequence[HolderName], ids: Sequence[int]) -> None:
        """Note the holders that were begun for a plan."""
        for name, holder in zip(names, ids, strict=True):
            self._inherit(name, holder)
            if holder in self.event_ids:
                self._moved[holder] = self.event_ids[holder]
            self._begin(name, holder)

    def end(self, unit: Unit) -> int:
        """Forget the holders of a unit ('*': all, and the facts of the life). Return how many blocks waited."""
        names = [name for name in self.holders if name.is_of(unit)]
        ended = [self.holders.pop(name) for name in names]
        for name, holder in zip(names, ended, strict=True):
            self.generations.end(name)
            self.placer.others.pop(holder, None)
            self._holders_of[name.lasting].remove(holder)
            self._relate(name.lasting)
            self.memory.end(holder)
            self.event_ids.pop(holder, None)
            self._moved.pop(holder, None)
        if unit == "*":
            self.facts.forget()
        if not self.holders:
            self.missing = self.waiting.dropped_there = 0
        return self.waiting.clear(ended) + self.objects.end(ended)

    def over(self) -> list[tuple[HolderName, RemovalReason | None]]:
        """Return the generations beyond a bound, oldest first, with the reason, which is None for one without
        blocks.
        """
        return list(self.generations.over(self.holders, self.memory.blocks_of))

    def holders_of(self, name: HolderName) -> Sequence[int]:
        """Return the live generations of a name, oldest first."""
        return self._holders_of.get(name.lasting, ())

    def holders_of_epochs(self, epochs: Sequence[Mapping[HolderName, int]]) -> set[int]:
        """Return the holders to which the stores of batches may go, whose generations are ``epochs``."""
        open_names = {(lasting, epoch) for of_batch in epochs for lasting, epoch in of_batch.items()}
        return {holder for name, holder in self.holders.items() if (name.lasting, name.epoch) in open_names}

    def newest_beside(self, holder: int) -> int:
        """Return the newest generation of the holder's name."""
        return max((holder, *self.placer.others.get(holder, ())))

    def holder_with(self, holders: Sequence[int], engine_hash: int) -> int | None:
        """Return the first of the holders with a block under this hash."""
        return next((holder for holder in holders if self.memory.held(holder, engine_hash) is not None), None)

    def some_holder(self, dp_rank: int) -> int | None:
        """Return a holder of the rank, if it has any."""
        return next((holder for name, holder in self.holders.items() if name.dp_rank == dp_rank), None)

    def spots_of(self, dp_rank: int, hashes: Collection[int]) -> dict[int, Spot]:
        """Return the blocks that these hashes stand for on a rank, or stood for before."""
        holder = self.some_holder(dp_rank)
        if holder is None:
            return {}
        return {
            engine_hash: spot for engine_hash in hashes if (spot := self.memory.find(holder, engine_hash)) is not None
        }

    def _inherit(self, name: HolderName, holder: int) -> None:
        """Continue the order of a standard stream in a new generation."""
        event_ids = [self.event_ids[holder_id] for holder_id in self.holders_of(name) if holder_id in self.event_ids]
        if event_ids:
            self.event_ids[holder] = max(event_ids)

    def _begin(self, name: HolderName, holder: int) -> None:
        self.holders[name] = holder
        self.memory.begin(holder, name.dp_rank)
        self.generations.begin(name)
        self._holders_of.setdefault(name.lasting, []).append(holder)
        self._relate(name.lasting)

    def _relate(self, lasting: HolderName) -> None:
        """Let the placer know which holders are generations of one name."""
        holders = self._holders_of[lasting]
        for holder in holders:
            self.placer.others[holder] = tuple(generation for generation in holders if generation != holder)
        if not holders:
            del self._holders_of[lasting]

    # ---- the order of standard events --------------------------------------------------------------

    def is_seen(self, holder: int, event: Event) -> bool:
        """Return whether a standard event was seen before, by its event_id."""
        if event.envelope is None:
            return False
        if not event.part:
            self._is_part_seen = event.envelope.event_id <= self.event_ids.get(holder, -1)
        if self._is_part_seen:
            self.ignore("seen", event)
            return True
        self.note_event_id(holder, event.envelope.event_id)
        return False

    def note_event_id(self, holder: int, event_id: int) -> None:
        self._moved[holder] = self.event_ids[holder] = event_id

    def take_event_ids(self) -> dict[int, int]:
        """Return for each holder the last event_id resolved since the last call. The caller writes it once it is
        applied.
        """
        moved, self._moved = self._moved, {}
        return moved

    # ---- unknown blocks ---------------------------------------------------------------------------

    @property
    def unknown(self) -> int:
        """The approximate number of the publisher's blocks in this life that the index does not know."""
        waiting = self.waiting.blocks - self.waiting.removed + len(self.objects)
        return self.missing + self.waiting.dropped_there + waiting

    @property
    def has_missing(self) -> bool:
        return self.missing > 0 or self.waiting.dropped_there > 0

    def ignore(self, reason: str, event: Event) -> None:
        """Count an ignored event, only once for all its parts."""
        if not event.part:
            self.ignored[reason] += 1

    def drop(self, reason: str, event: StoreEvent) -> None:
        """Ignore a store although the publisher has its blocks."""
        self.ignore(reason, event)
        self.missing += len(event.engine_hashes)

    def cannot_find(self, count: int) -> None:
        """Count unknown hashes of removals: each is a missing block, which has now left the publisher."""
        self.unresolved += count
        self.recover(count)

    def recover(self, count: int) -> None:
        """Note that ``count`` blocks are no longer missing."""
        self.missing += self.waiting.dropped_there
        self.waiting.dropped_there = 0
        self.missing = max(0, self.missing - count)

    def count_placed(self) -> None:
        """Count the hashes to which the placer gave another block, or for which it had no room."""
        if self.placer.aliased:
            self.ignored["hash_stored_as_another_block"] += self.placer.aliased
        if self.placer.crowded:
            self.ignored["too_many_hashes_of_a_block"] += self.placer.crowded
        self.placer.aliased = self.placer.crowded = 0

    def recover_reported(self, parts: Parts, waited: int) -> None:
        """Count the new blocks of a batch as recovered if the batch reports known blocks again.

        ``waited`` blocks had waited here, and were not missing.
        """
        stored = [part for part in parts if part.kind == "+"]
        if any(part.is_known for part in stored):
            named = sum(part.count for part in stored)
            new = sum(part.count for part in stored if not part.is_known)
            # The number of missing blocks is an estimate, so some may be left after a report of the whole cache. No
            # other batch names so many; the rest of the known blocks may have been removed by the lost batches.
            names_all = 4 * named >= 3 * self.memory.blocks and named >= self.missing
            self.recover(self.missing if names_all else max(0, new - waited))

    # ---- copies ------------------------------------------------------------------------------------

    def mode(self) -> Mode:
        """Return the way in which copies count now."""
        if self.is_snapshot:
            return "count"
        if self.registration.copies == "set":
            return "set"
        return "all" if UNTRUSTED in self.flags or self.facts.removes_once else "count"

    @property
    def may_report(self) -> bool:
        """Whether a store of known blocks may be a report of the publisher's cache. Its kind announces copies in the
        same form, so this is only possible if copies are not counted, or their counts are not trusted.
        """
        return (
            self.traits.copies == "count"
            and (self.registration.copies == "set" or UNTRUSTED in self.flags)
            and COPIES_REUSED not in self.flags
        )

    @property
    def _counts_copies(self) -> bool:
        return self.registration.copies == "count" and UNTRUSTED not in self.flags and not self.is_snapshot

    def note_removed_again(self, medium: str) -> None:
        """Note that a block was removed twice without a store in between, so it would have fewer than zero copies.

        If the rule was that a removal takes all copies, the rule is wrong.
        """
        if not self._counts_copies or self.traits.may_alias or medium not in DEVICE or self.placer.is_behind:
            return
        self.contradictions += 1
        if self.facts.removes_once:
            self.doubts.add(COPIES_EACH)

    def judge_copies(self, parts: PartList, position: int) -> None:
        """Find contradictions in the counts of copies, at the end of a batch. Once a removal is known to take all
        copies, remove the leftover ones.

        A report of the whole cache contradicts the counts, too, because the blocks that it names again are not further
        copies.
        """
        if self.traits.copies != "count":
            return
        contradictions = self.memory.take_contradictions()
        self.contradictions += contradictions
        is_contradicted = contradictions and self.memory.removes_once
        reports_all = position >= REPORT_BLOCKS_MIN and self._reports_all(parts, position)
        if (is_contradicted or reports_all) and self._counts_copies:
            self.doubts.add(COPIES_LAST)
        if COPIES_LAST in self.flags:
            for holder in self.holders.values():
                for i, engine_hash in enumerate(self.memory.copies(holder).left_over()):
                    self.placer.remove(parts, holder, position + i, engine_hash, mode="all")

    def _reports_all(self, parts: PartList, position: int) -> bool:
        """Return whether a batch, resolved up to ``position``, names so many known blocks again that it is a report of
        the whole cache.
        """
        known = max(REPORT_BLOCKS_MIN, 0.75 * self.memory.blocks)
        if position < known or self.traits.may_alias or self.facts.removes_once or COPIES_REUSED in self.flags:
            return False
        again = (part for part in parts.parts if part.seq == parts.seq and part.kind == "+" and part.is_known)
        return sum(part.count for part in again) >= known
