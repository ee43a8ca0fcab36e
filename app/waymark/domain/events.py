"""The events that decoders produce: stored, removed, cleared, independent of any engine's format.

Stores and removals have a class for each way in which they name their blocks, with a rule in ``rules``.

Hashes here are **engine hashes** as u64: opaque names of blocks, unique only within one publisher. Token ids are packed
(little-endian u32), because later stages only hash them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, overload

from waymark.base.record import record
from waymark.domain.names import Adapter


@record(frozen=True, slots=True)
class Envelope:
    """The fields that, together with the medium, identify the stream of an event. Only standard events have them.

    None stands for the value of the registration.
    """

    event_id: int
    backend_id: str
    tenant_id: str
    model_name: str | None
    block_size: int | None
    dp_rank: int | None
    spelling: str = ""
    """The name of the medium in the event, in upper case, if it differs from the medium's normal name: ``NFS`` and
    ``SSD`` are one medium in answers, and two streams."""
    adapter: Adapter = None
    salts: tuple[str, ...] = ()
    """The event's ``additional_salt``, if it has one; it replaces that of the registration."""


# A field of several kinds of events is explained at the first one.


@record(frozen=True, slots=True)
class Stored:
    """Consecutive blocks that entered a cache, ancestor first, identified by their tokens."""

    kind: ClassVar[str] = "stored"
    """The name of the counter of such events."""
    engine_hashes: tuple[int, ...]
    """The engine hashes of the blocks; at least one."""
    parent: int | None
    """The engine hash of the block before the first; None at the root."""
    tokens: bytes
    """Token ids as little-endian u32, never empty; of pairs, only the first tokens."""
    block_size: int
    """Tokens per hash, according to the event. If it is a multiple of the registered size, the hashes are those of
    chunks.
    """
    medium: str
    adapter: Adapter = None
    """The event's own adapter; if it is None, the registration's counts."""
    salts: tuple[str, ...] = ()
    """The request's cache salt, if the event names one; standard events: ``additional_salt``."""
    extras: tuple[int | None, ...] | None = None
    """For each hash, the digest of the remaining extra keys (images, embeds); None if no block has any."""
    group: int | None = None
    """The KV-cache group of a hybrid model."""
    tells_salts: bool = field(default=True, compare=False)
    """Whether the format of the event has fields for salts and images. If it has, an event without them is about blocks
    without them.
    """
    may_begin: bool = False
    """Whether the event begins at the root if its publisher has no block 0, because some publishers write 0 for no
    parent.
    """
    part: int = 0
    """The index of this event among those into which its decoder splits one long event."""
    is_reused: bool | None = None
    """Whether the engine only announces blocks again that it already had; None if the event does not say."""
    envelope: Envelope | None = None


@record(frozen=True, slots=True)
class StoredReference:
    """Blocks with known hashes that entered a cache. The event is a placeholder, which only gives the location."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    medium: str
    block_size: int = 0
    """Tokens per hash; 0 if the event does not give it."""
    group: int | None = None
    is_salted: bool = False
    """Whether the event names a salt or an image."""
    part: int = 0
    is_reused: bool | None = None
    envelope: ClassVar[None] = None


@record(frozen=True, slots=True)
class StoredIdentity:
    """Blocks that entered a cache, and whose hashes are seq_hashes: a standard event without tokens."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    parent: int | None
    medium: str
    envelope: Envelope
    is_deep: bool = False
    """Whether the event begins neither at the root nor after a named parent, so that the depth of its blocks is
    unknown.
    """
    part: int = 0
    is_reused: ClassVar[None] = None


@record(frozen=True, slots=True)
class StoredObject:
    """An object that entered a pool. It is a block, or a part of one, which an engine has named in its own events."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    """The hash of the block in the events of that engine; exactly one."""
    shard: str
    """The part of the block, as 16 hex digits."""
    medium: str
    envelope: Envelope
    part: int = 0
    is_reused: ClassVar[None] = None


@record(frozen=True, slots=True)
class StoredWindow:
    """Blocks of a KV-cache group other than main attention, named by the blocks of main attention that end there."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    medium: str
    group: int | None
    window: int | None
    """The number of tokens that the group must have before a boundary, so that a prefix can be reused up to there; None
    if it is unknown.
    """
    block_size: int = 0
    is_dense: bool = False
    """Whether the event has the tokens of all of its blocks, and no image."""
    part: int = 0
    is_reused: bool | None = None
    envelope: ClassVar[None] = None


@record(frozen=True, slots=True)
class Removed:
    """Blocks that left a cache."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    medium: str
    group: int | None = None
    part: int = 0
    copies_left: tuple[int | None, ...] | None = None
    """How many copies of each block the engine still has; None if the event does not say."""
    envelope: Envelope | None = None


@record(frozen=True, slots=True)
class RemovedIdentity:
    """Blocks that left a cache, and whose hashes are seq_hashes."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    medium: str
    envelope: Envelope
    part: int = 0


@record(frozen=True, slots=True)
class RemovedObject:
    """An object that left a pool."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    shard: str
    medium: str
    envelope: Envelope
    part: int = 0


@record(frozen=True, slots=True)
class Cleared:
    """A rank's cache was emptied; for a standard event, that of its stream."""

    kind: ClassVar[str] = "cleared"
    medium: str | None = None
    """The medium that a clear empties; None for every medium of the rank."""
    envelope: Envelope | None = None
    part: int = field(default=0, init=False)


StoreEvent: TypeAlias = Stored | StoredReference | StoredIdentity | StoredObject | StoredWindow
RemovalEvent: TypeAlias = Removed | RemovedIdentity | RemovedObject
Event: TypeAlias = StoreEvent | RemovalEvent | Cleared
EngineEvent: TypeAlias = Stored | StoredReference | StoredWindow | Removed | Cleared
"""The events that engines send themselves; the others have an envelope."""
PlainEvent: TypeAlias = Stored | StoredReference | StoredWindow | Removed
"""The events that the C module keeps, besides clears."""
STORES: Final = (Stored, StoredReference, StoredIdentity, StoredObject, StoredWindow)
REMOVALS: Final = (Removed, RemovedIdentity, RemovedObject)


class KeptEvents(Sequence[Event]):
    """Events of a batch that need no special rule. The C module keeps them, and creates an event object only on access.

    Speed matters, so callers test ``type(events) is PlainEvents``: ``isinstance`` with a class of ``abc`` takes far
    longer.
    """

    __slots__ = ("_every", "loop")

    def __init__(self, loop: Any) -> None:
        """``loop``: ``Events`` of the C module."""
        self.loop: Final = loop
        self._every: tuple[Event, ...] | None = None

    def __len__(self) -> int:
        return len(self.loop)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice) or index < 0 or self._every is not None:
            return self._all[index]
        event: Event = self.loop[index]
        return event

    def __eq__(self, other: object) -> bool:
        return self._all == (other._all if isinstance(other, KeptEvents) else other)

    __hash__ = None  # type: ignore[assignment]  # not hashable, like a list

    def __repr__(self) -> str:
        return repr(self._all)

    @property
    def _all(self) -> tuple[Event, ...]:
        if self._every is None:
            self._every = tuple(self.loop)
        return self._every


class EventForm(NamedTuple):
    """Events of a batch that differ in their blocks only."""

    pattern: PlainEvent
    """The first one without its blocks."""
    events: int
    hashes: int
    """The number of hashes of all events of the form."""


class MixedEvents(KeptEvents):
    """Plain events of several forms, such as those of the groups of a hybrid model, or of several media."""

    __slots__ = ("forms",)

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.forms: Final = [EventForm(*form) for form in loop.forms()]

    @property
    def blocks(self) -> int:
        """The number of blocks in all stores."""
        return sum(form.hashes for form in self.forms if type(form.pattern) is not Removed)


class PlainEvents(KeptEvents):
    """Plain events that differ in their blocks only.

    All are stores with the tokens of their blocks, or removals; the stores are alike, and so are the removals. The
    events of the batches in ``following`` are of the same kind. Counts and patterns cover all batches; the sequence has
    only the events of the first one.
    """

    __slots__ = ("blocks", "following", "removal", "removals", "removed", "store", "stores")

    def __init__(self, loop: Any, facts: tuple[Any, ...] | None = None) -> None:
        """``loop``: ``Events`` of the C module, and ``facts`` what their ``facts`` returns."""
        super().__init__(loop)
        self.following: Sequence[Any] = ()
        """The ``Events`` of each further batch that this one stands for, in order."""
        self.stores: int
        self.blocks: int
        """The number of blocks in all stores."""
        self.store: Stored | None
        """The first store without its blocks, as a pattern for all others."""
        self.removals: int
        self.removed: int
        self.removal: Removed | None
        """The pattern of the removals."""
        self.stores, self.blocks, self.store, self.removals, self.removed, self.removal = facts or loop.facts()

    def with_following(
        self, following: Sequence[Any], stores: int, blocks: int, removals: int, removed: int
    ) -> PlainEvents:
        """Return these events with those of the following batches, whose stores, blocks, removals and removed blocks
        are counted.
        """
        events = PlainEvents(self.loop)
        events.following = (*self.following, *following)
        events.stores, events.blocks = self.stores + stores, self.blocks + blocks
        events.removals, events.removed = self.removals + removals, self.removed + removed
        return events

    def alike(self, loops: Sequence[Any], stores: int, blocks: int, removals: int, removed: int) -> PlainEvents:
        """Return the events of other batches that differ from these in their blocks only, counted together."""
        events = PlainEvents(loops[0], (stores, blocks, self.store, removals, removed, self.removal))
        events.following = loops[1:]
        return events

    def behind(self, number: int) -> PlainEvents:
        """Return the events of the batches from this number on; the first is 0."""
        if not number:
            return self
        events = PlainEvents(self.following[number - 1])
        runs = [PlainEvents(loop) for loop in self.following[number:]]
        return events.with_following(
            self.following[number:],
            sum(run.stores for run in runs),
            sum(run.blocks for run in runs),
            sum(run.removals for run in runs),
            sum(run.removed for run in runs),
        )

    @property
    def hashes(self) -> int:
        """The number of hashes of all events."""
        return self.blocks + self.removed


@record(slots=True)
class Batch:
    """The events of one frame, in order. A finished batch is never changed.

    If its events are plain, it may stand for several consecutive frames that differ in their blocks only.
    """

    ts: float | None
    """The publisher's clock; None if it has none, or sends nonsense. If the batch stands for several frames, the
    highest, which is that of the last one.
    """
    events: Sequence[Event]
    dp_rank: int | None = None
    """The rank that the batch names, which overrides the registered one."""
    publisher_id: bytes | None = None
    """The id of the engine's process, if the batch names it. Another id means another process."""
    rejected: Counter[str] = field(default_factory=Counter)
    """The number of events that could not be decoded, by kind. The others are in ``events``."""
    ignored: Counter[str] = field(default_factory=Counter)
    """The number of events that were understood but have no meaning here, by reason."""
    samples: dict[str, str] = field(default_factory=dict)
    """One short description per kind in ``rejected``, for the log; never any token."""
    lost: str | None = None
    """The reason why the batch cannot be read. Its events are lost permanently, because a replay has the same bytes."""

    @property
    def frames(self) -> int:
        """How many frames the batch stands for."""
        return 1 + len(self.events.following) if type(self.events) is PlainEvents else 1

    def frame(self, number: int) -> Batch:
        """Return frame ``number``, from 0, as a batch. If there are several frames, its ``ts`` is that of the
        last one.
        """
        if self.frames == 1:
            return self
        assert type(self.events) is PlainEvents
        return replace(self, events=PlainEvents((self.events.loop, *self.events.following)[number]))

    def behind(self, number: int) -> Batch | None:
        """Return the frames from ``number`` on as a batch; None if there are no more."""
        if number == self.frames:
            return None
        assert type(self.events) is PlainEvents
        return replace(self, events=self.events.behind(number))

    def pattern(self, before: Batch | None = None) -> Batch:
        """Return a batch of plain events with one event of each kind, without blocks. It also has the kinds of
        ``before``, another pattern, if both are of one rank and process.
        """
        assert type(self.events) is PlainEvents
        is_same = before is not None and (before.dp_rank, before.publisher_id) == (self.dp_rank, self.publisher_id)
        others = before.events if before is not None and is_same else self.events
        assert type(others) is PlainEvents
        return replace(self, events=PlainEvents(self.events.loop.patterns(others.loop)))

    @property
    def clears_device(self) -> bool:
        """Whether a clear empties only the device, because the batch names its process.

        In vLLM releases that name the process, offloaded blocks survive a clear.
        """
        if self.publisher_id is None or type(self.events) in (PlainEvents, MixedEvents):
            return False
        return any(isinstance(event, Cleared) and event.envelope is None for event in self.events)
