"""Turns events into runs: finds the block of each engine hash of a batch.

One resolver follows one life of one stream. ``plan`` looks at folded batches and says what must be known or done before
they can be resolved: holders to end and begin, hashes to look up, facts to keep. ``resolve`` then turns each batch into
runs, without waiting for Redis. ``resolve`` changes what the stream remembers, so a batch is resolved once, and its
runs are applied until Redis has acknowledged them. All of this happens in slices.

The rules are those of the event contract, "From an event to blocks". A block that cannot be placed is counted by
reason, and never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from waymark.domain.events import Batch, Cleared, Event, Removed, Stored
from waymark.domain.hashing import extend
from waymark.domain.media import DEVICE
from waymark.domain.memory import HashMemory, namespace_of, place_of, seq_hash_of
from waymark.domain.names import HolderName, Registration, Unit
from waymark.domain.plan import EXTRA_KEYS, OWN_HASHES, UNTRUSTED, Plan, Planner
from waymark.domain.runs import Mode, Run, RunList
from waymark.domain.slices import EVENT_UNITS, SLICE_UNITS, Slices
from waymark.domain.waiting import Waiting, WaitingRoom

__all__ = ["EXTRA_KEYS", "OWN_HASHES", "UNTRUSTED", "Plan", "Resolver"]

_Piece: TypeAlias = tuple[int, Sequence[int], Sequence[int]]
"""Consecutive hashes of an event with their places, of one namespace: index of the first, hashes, places."""
_Placed: TypeAlias = list[tuple[int, Sequence[int]]]
"""Ranks with engine hashes that have a place now; somebody may wait for one."""


class Resolver:
    def __init__(
        self,
        registration: Registration,
        publisher: int,
        *,
        seed: int,
        memory_entries: int,
        waiting_blocks: int,
        foreign_ranks: frozenset[int] = frozenset(),
    ) -> None:
        self.registration = registration
        self._traits = registration.kind.traits
        self.memory = HashMemory(memory_entries)
        self.waiting = WaitingRoom(waiting_blocks)
        self.holders: dict[HolderName, int] = {}
        """Live holder ids by name."""
        self.event_ids: dict[int, int] = {}
        """Standard events: the last event_id per holder. It is ahead of Redis by what is resolved and not applied."""
        self._moved: dict[int, int] = {}
        self._is_part_seen = False
        """Of the standard event whose parts are being resolved."""
        self.ignored: Counter[str] = Counter()
        """Events that came to nothing, by reason; the owner reads and clears it."""
        self.unresolved = 0
        """Hashes that nobody knows: of removals and placeholders."""
        self.unsalted = 0
        """Stores of releases that cannot tell a salt or an image: they may be taken for what they are not."""
        self._planner = Planner(registration, publisher, foreign_ranks)
        self._seed = seed

    @property
    def flags(self) -> set[str]:
        return self._planner.flags

    @property
    def main_group(self) -> int | None:
        return self._planner.main_group

    @property
    def foreign_ranks(self) -> frozenset[int]:
        """Ranks of the same instance with a registration of their own; their batches are theirs to apply."""
        return self._planner.foreign_ranks

    @foreign_ranks.setter
    def foreign_ranks(self, ranks: frozenset[int]) -> None:
        self._planner.foreign_ranks = ranks

    # ---- lives -------------------------------------------------------------------------------------

    def resume(
        self,
        holders: Mapping[HolderName, int],
        flags: frozenset[str],
        main_group: int | None,
        event_ids: Mapping[int, int],
    ) -> None:
        """Take over a stream as its record has it."""
        self._planner.flags, self._planner.main_group = set(flags), main_group
        self.event_ids = dict(event_ids)
        for name, holder in holders.items():
            self._begin(name, holder, is_new=False)
        for name, holder in holders.items():
            self._inherit(name, holder)

    def begin(self, names: Sequence[HolderName], ids: Sequence[int]) -> None:
        """Holders that were begun for a plan."""
        for name, holder in zip(names, ids, strict=True):
            self._inherit(name, holder)
            if holder in self.event_ids:
                self._moved[holder] = self.event_ids[holder]
            self._begin(name, holder, is_new=True)

    def end(self, unit: Unit) -> int:
        """Forget the holders of a unit ('*': all, and the life with them); blocks that waited are counted."""
        names = [name for name in self.holders if name.is_of(unit)]
        ended = [self.holders.pop(name) for name in names]
        for holder in ended:
            self.memory.end(holder)
            self.event_ids.pop(holder, None)
            self._moved.pop(holder, None)
        if unit == "*":
            self._planner.flags.clear()
            self._planner.main_group = None
        return self.waiting.clear(ended)

    def at(self, epochs: Mapping[str, int]) -> list[HolderName]:
        """Set the present epoch of media whose blocks go by time; the names of holders whose time is over."""
        self._planner.epochs = dict(epochs)
        return self._planner.expired(self.holders)

    def _inherit(self, name: HolderName, holder: int) -> None:
        """The order of a standard stream does not end with an epoch."""
        known = [self.event_ids[other] for other in self._epochs_of(name) if other in self.event_ids]
        if known:
            self.event_ids[holder] = max(known)

    def _epochs_of(self, name: HolderName) -> list[int]:
        """The holders of all epochs of a name, oldest first."""
        return [holder for other, holder in self.holders.items() if other.lasting == name.lasting]

    def _begin(self, name: HolderName, holder: int, *, is_new: bool) -> None:
        self.holders[name] = holder
        self.memory.begin(holder, name.dp_rank, is_new=is_new)

    def mode(self, holder: int) -> Mode:
        """How copies of this holder count now."""
        if self.registration.copies == "set":
            return "set"
        return "all" if UNTRUSTED in self.flags else "count"

    # ---- before a fold -----------------------------------------------------------------------------

    def plan(self, batches: Sequence[Batch]) -> Slices[Plan]:
        """What must be ended, begun and kept first. Learns flags and the main group on the way."""
        if self.memory.is_over:
            yield from self.memory.trim()
        return (yield from self._planner.plan(batches, self.holders, self.event_ids))

    def name_of(self, batch: Batch, event: Event) -> HolderName:
        """The name of the event's holder in this stream."""
        return self._planner.name(batch, event)

    def lookups(self, plan: Plan, batches: Sequence[Batch]) -> Slices[dict[int, list[int]]]:
        """Engine hashes to ask Redis for, per holder, after the plan was carried out."""
        planner, memory = self._planner, self.memory
        asked: dict[int, dict[int, None]] = {}
        units = 0
        for i, batch in enumerate(batches):
            for j, event in enumerate(batch.events):
                units += EVENT_UNITS if isinstance(event, Cleared) else EVENT_UNITS + len(event.engine_hashes)
                if units > SLICE_UNITS:
                    units = 0
                    yield
                if isinstance(event, Cleared) or self._is_plain(event) or planner.skip_reason(plan, batch, event, i, j):
                    continue
                anywhere: list[int] = []  # on any medium of the rank
                if isinstance(event, Stored):
                    if event.tokens and event.parent is not None:
                        anywhere.append(event.parent)
                    if not event.tokens or self._is_unsalted(event):
                        anywhere += event.engine_hashes
                if anywhere:
                    for holder, missing in memory.unknown(planner.rank(batch, event), anywhere).items():
                        asked.setdefault(holder, {}).update(dict.fromkeys(missing))
                if isinstance(event, Removed) or self._may_alias(event):
                    own = self.holders.get(planner.name(batch, event))
                    if own is not None and (missing := memory.unknown_own(own, event.engine_hashes)):
                        asked.setdefault(own, {}).update(dict.fromkeys(missing))
        return {holder: list(hashes) for holder, hashes in asked.items()}

    def learn(self, entries: Mapping[int, Mapping[int, tuple[int, int]]]) -> None:
        """What Redis says of looked-up hashes: per holder, engine hash to (namespace, seq_hash)."""
        for holder, found in entries.items():
            self.memory.learn(holder, {h: place_of(ns, seq_hash) for h, (ns, seq_hash) in found.items()})

    # ---- a batch -----------------------------------------------------------------------------------

    def resolve(self, plan: Plan, index: int, seq: int, batch: Batch) -> Slices[list[Run]]:
        """The runs of one batch of the fold, ``index`` its place in it."""
        runs = RunList(seq)
        position, units = 1, 0
        placed: _Placed = []
        for j, event in enumerate(batch.events):
            units += EVENT_UNITS if isinstance(event, Cleared) else EVENT_UNITS + len(event.engine_hashes)
            if units > SLICE_UNITS:
                units = 0
                yield
            reason = self._planner.skip_reason(plan, batch, event, index, j)
            if reason is not None:
                self._ignore(reason, event)
            elif isinstance(event, Stored):
                self._stored(runs, position, batch, event, placed)
            elif isinstance(event, Removed):
                self._removed(runs, position, batch, event)
            else:
                self._cleared(plan, index, j, batch, event)
            position += self._positions(event)
        # What waited for a block of this batch comes after all of its own events: those have their positions
        # whether or not somebody waited, and a removal among them still finds what waits.
        while placed:
            for waiting in self.waiting.take_children(*placed.pop(0)):
                assert waiting.event.parent is not None
                place = self.memory.find(waiting.holder, waiting.event.parent)
                if place is None:
                    self.waiting.add(waiting)
                else:
                    self._place(runs, position, waiting, place, placed)
                position += self._positions(waiting.event)
                units += EVENT_UNITS + len(waiting.event.engine_hashes)
                if units > SLICE_UNITS:
                    units = 0
                    yield
        return runs.runs

    def _ignore(self, reason: str, event: Event) -> None:
        """Count an event that comes to nothing, once whatever its parts."""
        if not event.part:
            self.ignored[reason] += 1

    def take_event_ids(self) -> dict[int, int]:
        """Per holder the last event_id of what was resolved since the last call; to be kept once that is applied."""
        moved, self._moved = self._moved, {}
        return moved

    def _stored(self, runs: RunList, position: int, batch: Batch, event: Stored, placed: _Placed) -> None:
        holder = self.holders.get(self._planner.name(batch, event))
        if holder is None:
            self._ignore("too_many_media", event)
            return
        if self._is_seen(holder, event):
            return
        if not (event.tells_salts or event.part) and event.tokens and self._traits.has_saltless_releases:
            self.unsalted += 1
        waiting = Waiting(event, self._planner.rank(batch, event), holder)
        if event.is_identity:
            ns = self._planner.spaces.at_root(event)
            places = [place_of(ns, h) for h in event.engine_hashes]
            runs.add("+", holder, position, places, event.engine_hashes, is_identity=True)
            self.memory.mark_partial(holder)  # a child with tokens may name one as its parent
        elif not event.tokens:
            self._placeholder(runs, position, waiting)
        elif len(event.tokens) > 4 * self.registration.block_size * len(event.engine_hashes):
            self._ignore("sparse", event)
        elif event.parent is None:
            self._place(runs, position, waiting, None, placed)
        else:
            place = self.memory.find(holder, event.parent)
            if place is not None:
                self._place(runs, position, waiting, place, placed)
            elif self._is_unsalted(event) and any(self.memory.find(holder, h) is not None for h in event.engine_hashes):
                self._place(runs, position, waiting, None, placed)
            else:
                self.waiting.add(waiting)

    def _place(self, runs: RunList, position: int, waiting: Waiting, parent: int | None, placed: _Placed) -> None:
        """Blocks of a store that goes on from ``parent``, or begins at the root."""
        event = waiting.event
        if parent is None:
            ns = self._planner.spaces.at_root(event)
        else:
            ns = namespace_of(parent)
            if not self._planner.spaces.has(event, ns):
                self._ignore("adapter_mismatch", event)
                return
        hashes = event.engine_hashes
        if self._is_unsalted(event):
            self._unsalted(runs, position, waiting, ns, parent)
        else:
            seq_hashes = extend(
                None if parent is None else seq_hash_of(parent),
                event.tokens,
                self.registration.block_size,
                seed=self._seed,
                extras=event.extras,
            )
            hashes = hashes[: len(seq_hashes)]
            places = [place_of(ns, seq_hash) for seq_hash in seq_hashes] if ns else seq_hashes
            if places:
                self._add(runs, position, waiting, [(0, hashes, places)])
        if self.waiting.blocks:
            placed.append((waiting.dp_rank, hashes))

    def _unsalted(self, runs: RunList, position: int, waiting: Waiting, ns: int, parent: int | None) -> None:
        """A store off the GPU: its tokens are told, but not the salt or image that went into its hashes.

        What is known by its hash is that block. The rest goes on from the block before it, unless this life has
        reported a salt or an image: then nobody can say what it is.
        """
        event, width = waiting.event, 4 * self.registration.block_size
        may_hash = EXTRA_KEYS not in self.flags
        is_placed, before = parent is not None or event.parent is None, parent
        places: list[int | None] = []
        for i, h in enumerate(event.engine_hashes[: len(event.tokens) // width]):
            place = self.memory.find(waiting.holder, h)
            if place is None and is_placed and may_hash:
                tokens = event.tokens[i * width : (i + 1) * width]
                above = None if before is None else seq_hash_of(before)
                place = place_of(ns, extend(above, tokens, self.registration.block_size, seed=self._seed)[0])
            places.append(place)
            is_placed, before = place is not None, place
            ns = ns if place is None else namespace_of(place)
        self._add_known(runs, position, waiting, places)

    def _placeholder(self, runs: RunList, position: int, waiting: Waiting) -> None:
        """A store without tokens: says that blocks known by their hash are on its medium, too."""
        places = [self.memory.find(waiting.holder, h) for h in waiting.event.engine_hashes]
        self._add_known(runs, position, waiting, places)

    def _add_known(self, runs: RunList, position: int, waiting: Waiting, places: Sequence[int | None]) -> None:
        """Blocks of an event that were looked up one by one; those without a place are nobody's."""
        pieces: list[tuple[int, list[int], list[int]]] = []
        for i, (h, place) in enumerate(zip(waiting.event.engine_hashes, places, strict=False)):
            if place is None:
                self.unresolved += 1
                continue
            if pieces:
                start, hashes, known = pieces[-1]
                if start + len(known) == i and namespace_of(known[0]) == namespace_of(place):
                    hashes.append(h)
                    known.append(place)
                    continue
            pieces.append((i, [h], [place]))
        self._add(runs, position, waiting, pieces)

    def _add(self, runs: RunList, position: int, waiting: Waiting, pieces: Sequence[_Piece]) -> None:
        """Store pieces of an event whose first hash has ``position``."""
        holder, event, memory = waiting.holder, waiting.event, self.memory
        if self._may_alias(event):
            # All of them leave before any is stored: positions ascend, and a block that one hash leaves may be
            # the one that another comes to mean.
            for start, hashes, places in pieces:
                for i, (h, place) in enumerate(zip(hashes, places, strict=True), start):
                    old = memory.own(holder, h)
                    if old is not None and old != place:
                        self.ignored["hash_stored_as_another_block"] += 1
                        runs.add("!", holder, position + i, [old], [h])
            position += len(event.engine_hashes)
        for start, hashes, places in pieces:
            memory.store(holder, hashes, places)
            if not waiting.removed:
                runs.add("+", holder, position + start, places, hashes)
                continue
            for i, (h, place) in enumerate(zip(hashes, places, strict=True), start):
                if h in waiting.removed:
                    memory.remove(holder, h)  # gone, but a child may name it
                else:
                    runs.add("+", holder, position + i, [place], [h])

    def _removed(self, runs: RunList, position: int, batch: Batch, event: Removed) -> None:
        name = self._planner.name(batch, event)
        holders = [self.holders[name]] if name in self.holders else []
        if self._planner.epochs:
            holders = self._epochs_of(name)
        if not holders:
            self.unresolved += len(event.engine_hashes)
        elif not self._is_seen(holders[-1], event):
            for holder in holders:
                self._removed_from(runs, position, holder, event)

    def _removed_from(self, runs: RunList, position: int, holder: int, event: Removed) -> None:
        ns = self._planner.spaces.at_root(event) if event.is_identity else 0
        if self._is_plain(event):
            places = [place_of(ns, h) for h in event.engine_hashes]
            runs.add("-", holder, position, places, event.engine_hashes, is_identity=True)
            return
        for i, h in enumerate(event.engine_hashes):
            if self.waiting.blocks and self.waiting.remove(holder, h):
                continue
            place = self.memory.remove(holder, h)
            if place is not None:
                runs.add("-", holder, position + i, [place], [h])
            elif event.is_identity:
                runs.add("-", holder, position + i, [place_of(ns, h)], [h], is_identity=True)
            else:
                self.unresolved += 1

    def _cleared(self, plan: Plan, i: int, j: int, batch: Batch, event: Cleared) -> None:
        """The plan has ended what this ends. Here only the event_id is left to be kept, for what follows."""
        if event.envelope is None:
            return
        name = self._planner.name(batch, event)
        if plan.last_clear.get(name.lasting) != (i, j):
            self.ignored["seen"] += 1
        elif (holder := self.holders.get(name)) is not None:
            self._moved[holder] = self.event_ids[holder] = event.envelope.event_id

    def _is_seen(self, holder: int, event: Stored | Removed) -> bool:
        """Whether a standard event came before; its own order is its event_id."""
        if event.envelope is None:
            return False
        if not event.part:
            self._is_part_seen = event.envelope.event_id <= self.event_ids.get(holder, -1)
        if self._is_part_seen:
            self._ignore("seen", event)
            return True
        self._moved[holder] = self.event_ids[holder] = event.envelope.event_id
        return False

    # ---- kinds of events ---------------------------------------------------------------------------

    def _positions(self, event: Event) -> int:
        """How many positions an event takes in its batch, whatever comes of it."""
        if isinstance(event, Cleared):
            return 1
        if isinstance(event, Stored) and self._may_alias(event):
            return 2 * len(event.engine_hashes)
        return len(event.engine_hashes)

    def _is_unsalted(self, event: Stored) -> bool:
        """Whether the event may keep silent about a salt or image that went into its hashes."""
        return (
            event.medium not in DEVICE
            and event.envelope is None
            and not self._traits.names_salts_off_device
            and not event.salts
            and not event.extras
        )

    def _is_plain(self, event: Stored | Removed) -> bool:
        """Whether the event's hashes are seq_hashes, with nothing to look up."""
        return event.is_identity and (isinstance(event, Stored) or OWN_HASHES not in self.flags)

    def _may_alias(self, event: Stored) -> bool:
        """Whether one engine hash of this publisher can come to mean another block."""
        if event.is_identity:
            return False
        return self._traits.may_alias or event.medium not in DEVICE
