"""Decides, before a fold is resolved, where each event belongs, whether it counts, and which hashes must be looked up.

A **unit** is the scope of a clear: a rank, or, for standard events, one stream of the envelope, named by its holder.
The result must not depend on how batches are folded, so the plan learns facts even from events that a later clear
undoes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache

from waymark.base.record import record
from waymark.domain import chunks
from waymark.domain.events import (
    REMOVALS,
    Batch,
    Cleared,
    Envelope,
    Event,
    MixedEvents,
    PlainEvents,
    Removed,
    Stored,
    StoredIdentity,
    StoredReference,
    StoredWindow,
    StoreEvent,
)
from waymark.domain.generations import Generations
from waymark.domain.hashing import dimensions_digest, namespace
from waymark.domain.life_facts import EVENTS_MISSING, LifeFacts
from waymark.domain.media import DEVICE, UNNAMED
from waymark.domain.names import GROUP, Adapter, Holder, HolderName, Registration, Unit, Window
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slices

_EVENTS_AT_ONCE = SLICE_WORK // EVENT_WORK
MEDIA_MAX = 16
HOLDERS_MAX = 64 * MEDIA_MAX
"""The most holders at a time, over all media, because events may name any ranks and dimensions."""

# Few names are needed, but each several times for each event, so they are cached.
_name = lru_cache(HOLDERS_MAX)(HolderName)
_SIZED = (Stored, StoredReference)
"""The events of main attention that say how many tokens a hash stands for."""


@record(slots=True)
class Plan:
    """The work that must be done before a fold can be resolved."""

    ended: list[Unit] = field(default_factory=list)
    """Units to end: a rank, a rank and a medium, or the name of a standard stream's holder."""
    begun: dict[HolderName, Holder] = field(default_factory=dict)
    """Holders to begin, by name."""
    facts_changed: bool = False
    """Whether flags or the main group have changed, and must be written before anything is applied."""
    last_clear: dict[Unit, tuple[int, int]] = field(default_factory=dict)
    """(batch, event) of the last clear of a unit in the fold. Earlier events of the unit are not written at all."""
    gaps: int = 0
    """How often event_ids were missing before an event."""
    epochs: list[Mapping[HolderName, int]] = field(default_factory=list)
    """The generations for the stores of each batch, by lasting name; empty if the group has no bounds."""


class Planner:
    """Plans the folds of one stream, by the facts of the stream's life, which it also learns."""

    def __init__(
        self,
        registration: Registration,
        publisher: int,
        registered_ranks: frozenset[int],
        generations: Generations,
        facts: LifeFacts,
    ) -> None:
        self.registered_ranks = registered_ranks
        self.epochs: Mapping[HolderName, int] = {}
        """The generations for the stores of the current batch, by lasting name."""
        self.spaces = Spaces(registration)
        self._registration = registration
        self._publisher = publisher
        self._generations = generations
        self._facts = facts
        # Over HTTP, an event after missing ones was already refused.
        self._finds_gaps = registration.kind.traits.numbers_events and registration.endpoint is not None
        self._unread = 0
        """The number of events that could not be read, so that their event_ids seem to be missing."""

    def plan(
        self,
        batches: Sequence[Batch],
        holders: Mapping[HolderName, int],
        event_ids: Mapping[int, int],
        blocks_of: Callable[[int], int],
    ) -> Slices[Plan]:
        """Find the holders to end and begin, and the facts to keep. This also learns flags and the main group.

        ``blocks_of`` returns how many blocks a holder has.
        """
        plan = Plan()
        old_facts = self._facts.kept()
        last_ids = {name.lasting: event_ids[h] for name, h in holders.items() if h in event_ids} if event_ids else {}
        for i, batch in enumerate(batches):
            if batch.publisher_id is not None:
                self._facts.learn_publisher(batch.publisher_id)
            if type(batch.events) in (PlainEvents, MixedEvents):
                continue  # plain events have no clear
            self._unread += batch.rejected.total() + batch.ignored.total()
            for start in range(0, len(batch.events), _EVENTS_AT_ONCE):
                self._find_clears(plan, i, batch, start, last_ids)
                if len(batch.events) > _EVENTS_AT_ONCE:
                    yield
        staying: Collection[HolderName] = holders
        if plan.last_clear:
            plan.ended = list(plan.last_clear)
            staying = {name for name in holders if not any(name.is_of(unit) for unit in plan.ended)}
        if self._generations.are_bounded:
            self._generations.begin_fold(lambda name: blocks_of(holders[name]) if name in staying else 0)
        for i, batch in enumerate(batches):
            if type(batch.events) is PlainEvents:
                if batch.events.removal is not None:
                    self._facts.learn_removal(batch.events.removal)
                if batch.events.store is not None:
                    self._find_holder(plan, i, 0, batch, batch.events.store, batch.events.blocks, staying)
            elif not (type(batch.events) is MixedEvents and self._knows_all(plan, batch, batch.events, staying)):
                for start in range(0, len(batch.events), _EVENTS_AT_ONCE):
                    self._find_holders(plan, i, batch, start, staying)
                    if len(batch.events) > _EVENTS_AT_ONCE:
                        yield
            if self._generations.are_bounded:
                plan.epochs.append(dict(self._generations.epochs))
                self._generations.end_batch()
        plan.facts_changed = old_facts != self._facts.kept()
        return plan

    def _find_clears(self, plan: Plan, i: int, batch: Batch, start: int, last_ids: dict[HolderName, int]) -> None:
        """Find the clears of a batch.

        ``last_ids`` has the last event_id of each standard stream. A clear with an equal or older one was seen before.
        """
        for j, event in enumerate(batch.events[start : start + _EVENTS_AT_ONCE], start):
            envelope = event.envelope
            if envelope is None:
                if isinstance(event, Cleared) and not self._skip_reason_of(batch, event):
                    plan.last_clear |= dict.fromkeys(self._cleared_units(batch, event), (i, j))
            elif not self._skip_reason_of(batch, event):
                name = self._lasting_name(batch, event)
                if envelope.event_id > (last := last_ids.get(name, -1)):
                    if name in last_ids and envelope.event_id > last + 1 and self._finds_gaps:
                        self._find_gap(plan, envelope.event_id - last - 1)
                    last_ids[name] = envelope.event_id
                    if isinstance(event, Cleared):
                        plan.last_clear[name] = (i, j)

    def _find_gap(self, plan: Plan, missing: int) -> None:
        """Note ``missing`` event_ids, unless these are the ids of events that could not be read."""
        if missing <= self._unread:
            self._unread -= missing
            return
        self._unread = 0
        plan.gaps += 1
        self._facts.flags.add(EVENTS_MISSING)

    def _cleared_units(self, batch: Batch, event: Cleared) -> Sequence[Unit]:
        """Return the units that a clear without an envelope ends. In a stream that names its process, these are only
        the blocks on the device.

        In vLLM releases that name the process, offloaded blocks survive a clear. A clear of another engine ends the
        rank.
        """
        rank = self.rank(batch, event)
        return (rank,) if batch.publisher_id is None else tuple(_name(rank, medium) for medium in DEVICE)

    def _find_holders(self, plan: Plan, i: int, batch: Batch, start: int, staying: Collection[HolderName]) -> None:
        """Learn facts, and name the missing holders. Those in ``staying`` already exist."""
        for j, event in enumerate(batch.events[start : start + _EVENTS_AT_ONCE], start):
            if isinstance(event, REMOVALS):
                self._facts.learn_removal(event)
            else:
                self._find_holder(plan, i, j, batch, event, None, staying)

    def _knows_all(self, plan: Plan, batch: Batch, events: MixedEvents, staying: Collection[HolderName]) -> bool:
        """Return whether nothing is to be learned from events of several forms, and all their holders exist."""
        if plan.last_clear or self._generations.are_bounded:
            return False
        return all(
            self._facts.knows(event) and (type(event) is Removed or self.name(batch, event) in staying)
            for event in (form.pattern for form in events.forms)
            if self._skip_reason_of(batch, event) is None or type(event) is Removed
        )

    def _find_holder(
        self,
        plan: Plan,
        i: int,
        j: int,
        batch: Batch,
        event: StoreEvent | Cleared,
        hashes: int | None,
        staying: Collection[HolderName],
    ) -> None:
        """Learn the facts of one event, and name its holder if it has no name yet.

        If the event stands for several similar ones, ``hashes`` is the number of all their hashes.
        """
        if self._skip_reason_of(batch, event):
            return
        if not isinstance(event, Cleared):
            self._facts.learn(event)
        elif event.envelope is None:
            return  # a standard stream needs a holder at once, which keeps the event_id
        if plan.last_clear and self.is_cleared(plan, batch, event, i, j):
            return
        if self._generations.are_bounded:
            count = 0 if isinstance(event, Cleared) else self._blocks(event, hashes)
            self._generations.store(self._lasting_name(batch, event), count)
            self.epochs = self._generations.epochs
        name = self.name(batch, event)
        if name not in staying and name not in plan.begun and _has_room(name, [*staying, *plan.begun]):
            plan.begun[name] = self._holder(batch, event)

    def _blocks(self, event: StoreEvent, hashes: int | None) -> int:
        """Return how many blocks an event stores. If it stands for several events, ``hashes`` is the number of all
        their hashes.
        """
        size, hashes = self._registration.block_size, len(event.engine_hashes) if hashes is None else hashes
        if isinstance(event, Stored | StoredWindow) and event.block_size > size:
            return hashes * chunks.blocks_of(event, size)
        return hashes

    # ---- the owner of an event ---------------------------------------------------------------------

    def rank(self, batch: Batch, event: Event) -> int:
        if event.envelope is not None and event.envelope.dp_rank is not None:
            return event.envelope.dp_rank
        return self._registration.dp_rank if batch.dp_rank is None else batch.dp_rank

    def name(self, batch: Batch, event: Event) -> HolderName:
        """Return the name of the event's holder in this stream."""
        name = self._lasting_name(batch, event)
        epoch = self.epochs.get(name) if self.epochs else None
        return name if epoch is None else _name(name.dp_rank, name.medium, name.digest, epoch)

    def _lasting_name(self, batch: Batch, event: Event) -> HolderName:
        """Return the holder's name without an epoch, which is also the unit that a standard clear ends."""
        if event.envelope is not None:
            digest = self.spaces.dimensions(event.envelope)
        else:
            window = self._facts.window_of(event) if self._facts.windows else None
            digest = "" if window is None else f"{GROUP}{window.group}"
        return _name(self.rank(batch, event), event.medium or UNNAMED, digest)

    def _holder(self, batch: Batch, event: StoreEvent | Cleared) -> Holder:
        backend_id = event.envelope.backend_id if event.envelope else None
        return self._new_holder(
            self.rank(batch, event), event.medium or UNNAMED, self._facts.window_of(event), backend_id
        )

    def holder_of(self, name: HolderName) -> Holder:
        """Return a new holder with the given name, for a stream whose events have no envelopes."""
        window = self._facts.windows.get(int(name.digest.removeprefix(GROUP))) if name.has_window else None
        return self._new_holder(name.dp_rank, name.medium, window)

    def _new_holder(self, rank: int, medium: str, window: Window | None, backend_id: str | None = None) -> Holder:
        registration = self._registration
        return Holder(
            id=0,
            publisher=self._publisher,
            instance_id=registration.instance_id,
            dp_rank=rank,
            medium=medium,
            block_size=registration.block_size,
            backend_id=registration.instance_id if backend_id is None else backend_id,
            scope=registration.scope,
            window=window,
        )

    # ---- whether it counts -------------------------------------------------------------------------

    def skip_reason(self, plan: Plan, batch: Batch, event: Event, i: int, j: int) -> str | None:
        """Return the reason to skip event ``j`` of batch ``i`` of the fold, or None if it counts."""
        reason = self._skip_reason_of(batch, event)
        if reason is None and plan.last_clear and self.is_cleared(plan, batch, event, i, j):
            return "cleared"
        return reason

    def is_cleared(self, plan: Plan, batch: Batch, event: Event, i: int, j: int) -> bool:
        """Return whether a later event of the fold clears the event's unit."""
        rank = self.rank(batch, event)
        units: list[Unit] = [rank]
        if event.envelope is None:
            units.append(_name(rank, event.medium or UNNAMED))
        else:
            units.append(self._lasting_name(batch, event))
        return any((i, j) < plan.last_clear.get(unit, (-1, -1)) for unit in units)

    def _skip_reason_of(self, batch: Batch, event: Event) -> str | None:
        if self.registered_ranks:
            rank = self.rank(batch, event)
            if rank != self._registration.dp_rank and rank in self.registered_ranks:
                return "other_registration"
        if event.envelope is not None:
            return self._skip_reason_of_envelope(event.envelope)
        facts = self._facts
        if facts.windows and facts.window_of(event) is not None:
            return None
        if isinstance(event, StoredWindow):
            is_new = event.group != facts.main_group and facts.new_window_of(event) is not None
            return None if is_new else "other_attention"
        if isinstance(event, _SIZED):
            if event.block_size != self._registration.block_size and (isinstance(event, Stored) or event.block_size):
                reason = self._skip_reason_of_size(event)
                if reason is not None or event.group is None:
                    return reason
        elif not isinstance(event, Removed):
            return None
        if event.group is None:
            return None
        if facts.main_group is None:
            is_main = event.group == 0 or isinstance(event, Stored)
        else:
            is_main = event.group == facts.main_group
        return None if is_main else "other_group"

    def _skip_reason_of_size(self, event: Stored | StoredReference) -> str | None:
        """Return why a store of another block size is skipped; None for a chunk.

        LMCache puts all KV-cache groups into one chunk, so its chunks belong to no single group.
        """
        size = self._registration.block_size
        if isinstance(event, Stored) and chunks.blocks_of(event, size) > 1:
            return None
        is_inside = event.medium in DEVICE and 0 < event.block_size < size and size % event.block_size == 0
        return "inside_block" if is_inside else "block_size_mismatch"

    def _skip_reason_of_envelope(self, envelope: Envelope) -> str | None:
        registration = self._registration
        if envelope.tenant_id != registration.tenant_id:
            return "other_tenant"
        if envelope.model_name not in (None, registration.model_name):
            return "other_model"
        if envelope.block_size not in (None, registration.block_size):
            return "block_size_mismatch"
        return None


def hashes_known_before(event: StoreEvent) -> Sequence[int]:
    """Return the engine hashes of a store that may stand for blocks stored before it."""
    if not isinstance(event, Stored):
        return event.engine_hashes
    parents = [] if event.parent is None else [event.parent]
    # On a device the blocks of the event are identified by their tokens.
    return parents if event.medium in DEVICE else [*parents, *event.engine_hashes]


def _has_room(name: HolderName, others: Iterable[HolderName]) -> bool:
    """Return whether a holder may begin beside the others."""
    names = {other.lasting for other in others}
    if name.lasting in names:
        return True
    if len(names) >= HOLDERS_MAX:
        return False
    media = {holder_name.medium for holder_name in names}
    return name.medium in media or len(media) < MEDIA_MAX


# Computes the namespace of an event from its adapter and salts.
#
# Adapter and salts cannot be computed from a namespace, so a bounded number is remembered here. A child takes its
# parent's namespace from the parent's place, and its adapter is compared with the remembered one.


_SPACES_MAX = 10_000


class Spaces:
    """The namespaces of one stream."""

    def __init__(self, registration: Registration) -> None:
        self._lora_name = registration.lora_name
        self._salts = (registration.additional_salt,) if registration.additional_salt else ()
        self._adapters: dict[int, Adapter] = {0: None}

    def of(self, event: Stored | StoredIdentity) -> int:
        """Return the namespace of an event that cannot inherit one from a parent."""
        return namespace(*self._names(event))

    def _names(self, event: Stored | StoredIdentity) -> tuple[Adapter, tuple[str, ...]]:
        """Return the adapter and the salts of an event."""
        if event.envelope is None:
            return self._adapter(event.adapter), self._salts + event.salts
        return self._adapter(event.envelope.adapter), event.envelope.salts or self._salts

    def at_root(self, event: Stored | StoredIdentity) -> int:
        """Return the namespace of an event at the root, and remember its adapter."""
        adapter, salts = self._names(event)
        ns = namespace(adapter, salts)
        if ns not in self._adapters:
            if len(self._adapters) >= _SPACES_MAX:
                self._adapters = {0: None}
            self._adapters[ns] = adapter
        return ns

    def has(self, event: Stored, ns: int) -> bool:
        """Return whether the event's adapter belongs to the namespace. An unknown namespace is trusted."""
        return ns not in self._adapters or self._adapters[ns] == self._adapter(event.adapter)

    def dimensions(self, envelope: Envelope) -> str:
        """Return the dimensions, besides rank and medium, of the stream of a standard event."""
        adapter, salts = self._adapter(envelope.adapter), envelope.salts or self._salts
        return dimensions_digest(envelope.backend_id, adapter, salts, envelope.spelling)

    def _adapter(self, named: Adapter) -> Adapter:
        return self._lora_name if named is None else named
