"""The events that decoders produce: stored, removed, cleared, independent of any engine's format.

Stores and removals have a class for each way in which they name their blocks, with a rule in ``rules``.

Hashes here are **engine hashes** as u64: opaque names of blocks, unique only within one publisher. Token ids are packed
(little-endian u32), because later stages only hash them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeAlias, overload

from waymark.domain.names import Adapter


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that, with the medium, name the stream of an event; only standard events have them.

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


# A field that several kinds of events have is explained at the first kind.


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks entered a cache, ancestor first; identified by their tokens."""

    kind: ClassVar[str] = "stored"
    """The name of the counter of such events."""
    engine_hashes: tuple[int, ...]
    """The engine hashes of the blocks; at least one."""
    parent: int | None
    """Engine hash of the block before the first; None at the root."""
    tokens: bytes
    """Little-endian u32; of a pair, only its first token; never empty."""
    block_size: int
    """Tokens per hash as the event has it. If it is a multiple of the registered size, the hashes are of chunks."""
    medium: str
    adapter: Adapter = None
    """The event's own adapter; if it is None, the registration's counts."""
    salts: tuple[str, ...] = ()
    """The request's cache salt, if the event names one; standard events: ``additional_salt``."""
    extras: tuple[int | None, ...] | None = None
    """Per hash the digest of leftover extra keys (images, embeds); None if no block has any."""
    group: int | None = None
    """KV-cache group of a hybrid model."""
    tells_salts: bool = field(default=True, compare=False)
    """The event's form has a place for salts and images, so an event that names none is about blocks without them."""
    may_begin: bool = False
    """It begins at the root if its parent, 0, is not a block of its publisher: a nil was written as 0."""
    part: int = 0
    """The number of this event among those that its decoder makes of one long event, from 0."""
    is_reused: bool | None = None
    """Whether the engine only announces blocks again that it had; None if the event does not say."""
    envelope: Envelope | None = None


@dataclass(frozen=True, slots=True)
class StoredReference:
    """Blocks with known hashes entered a cache: a placeholder, which only gives the location."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    medium: str
    block_size: int = 0
    """Tokens per hash; 0 if the event does not say."""
    group: int | None = None
    is_salted: bool = False
    """The event names a salt or an image."""
    part: int = 0
    is_reused: bool | None = None
    envelope: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """Blocks entered a cache whose hashes are seq_hashes already: a standard event without tokens."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    parent: int | None
    medium: str
    envelope: Envelope
    is_deep: bool = False
    """It begins neither at the root nor after a named parent: how deep its blocks are is not known."""
    part: int = 0
    is_reused: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object entered a pool. It is a block, or a part of one, which an engine has named in its own events."""

    kind: ClassVar[str] = "stored"
    engine_hashes: tuple[int, ...]
    """The hash of the block in the events of that engine; exactly one."""
    shard: str
    """The part of the block, as 16 hex digits."""
    medium: str
    envelope: Envelope
    part: int = 0
    is_reused: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
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
    """The event has the tokens of all of its blocks, and no image."""
    part: int = 0
    is_reused: bool | None = None
    envelope: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a cache."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    medium: str
    group: int | None = None
    part: int = 0
    copies_left: tuple[int | None, ...] | None = None
    """How many copies of each block its engine still has; None if the event does not say."""
    envelope: Envelope | None = None


@dataclass(frozen=True, slots=True)
class RemovedIdentity:
    """Blocks left a cache whose hashes are seq_hashes."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    medium: str
    envelope: Envelope
    part: int = 0


@dataclass(frozen=True, slots=True)
class RemovedObject:
    """An object left a pool."""

    kind: ClassVar[str] = "removed"
    engine_hashes: tuple[int, ...]
    shard: str
    medium: str
    envelope: Envelope
    part: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks of a rank left the cache; for a standard event, all of its stream's dimensions."""

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
STORES: Final = (Stored, StoredReference, StoredIdentity, StoredObject, StoredWindow)
REMOVALS: Final = (Removed, RemovedIdentity, RemovedObject)


class PlainEvents(Sequence[Event]):
    """Events of a batch that need no rule of their own, and differ in their blocks alone.

    All are stores with the tokens of their blocks, and removals; the stores are alike, and so are the removals. The C
    module has them. An event becomes an object only when it is accessed. The events of the batches that ``following``
    has are like these; the numbers and the patterns are of all, the sequence is that of the first batch.

    Speed matters, so callers test ``type(events) is PlainEvents``: ``isinstance`` with a class of ``abc`` takes far
    longer.
    """

    __slots__ = ("_every", "blocks", "following", "loop", "removal", "removals", "removed", "store", "stores")

    def __init__(self, loop: Any) -> None:
        """``loop``: ``Events`` of the C module."""
        self.loop: Final = loop
        self.following: Sequence[Any] = ()
        """The ``Events`` of each batch that this one stands for besides its own, in order."""
        self._every: tuple[Event, ...] | None = None
        self.stores: int
        self.blocks: int
        """Blocks of all stores."""
        self.store: Stored | None
        """The first store, without its blocks; all others are alike."""
        self.removals: int
        self.removed: int
        self.removal: Removed | None
        """The same of the removals."""
        self.stores, self.blocks, self.store, self.removals, self.removed, self.removal = loop.facts()

    def with_following(
        self, following: Sequence[Any], stores: int, blocks: int, removals: int, removed: int
    ) -> PlainEvents:
        """Return these events with those of the batches behind, which have so many stores, removals, and blocks."""
        events = PlainEvents(self.loop)
        events.following = (*self.following, *following)
        events.stores, events.blocks = self.stores + stores, self.blocks + blocks
        events.removals, events.removed = self.removals + removals, self.removed + removed
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

    def __len__(self) -> int:
        return len(self.loop)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice) or index < 0:
            return self._all[index]
        event: Event = self.loop[index]
        return event

    def __eq__(self, other: object) -> bool:
        return self._all == (other._all if isinstance(other, PlainEvents) else other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return repr(self._all)

    @property
    def _all(self) -> tuple[Event, ...]:
        if self._every is None:
            self._every = tuple(self.loop)
        return self._every


@dataclass(slots=True)  # a frozen one takes three times as long to make, and each frame makes one
class Batch:
    """The events of one frame, in order. Nobody changes a finished batch.

    If its events are plain, it may stand for several consecutive frames that say the same besides their blocks.
    """

    ts: float | None
    """The publisher's clock; None if it has no clock, or sends nonsense. Of several frames, that of the last one, which
    is the highest.
    """
    events: Sequence[Event]
    dp_rank: int | None = None
    """The rank the batch names; it wins over the registered one."""
    publisher_id: bytes | None = None
    """The id of the engine's process, if the batch names it: another id is another process."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Events that could not be decoded, by kind; their siblings are in ``events``."""
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
        """Return frame ``number``, from 0, as a batch of its own. Of several, its ``ts`` is that of the last."""
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

    @property
    def clears_device(self) -> bool:
        """Whether a clear empties only the device, because its process names itself.

        In the releases that name the process, this is what a clear of vLLM means: offloaded blocks stay.
        """
        if self.publisher_id is None or type(self.events) is PlainEvents:
            return False
        return any(isinstance(event, Cleared) and event.envelope is None for event in self.events)
