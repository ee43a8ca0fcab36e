"""The facts that the events of a life show about their engine, and that determine how later events are read.

A record keeps them as ``flags`` and ``main_group``, so that a worker that takes over the stream has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from waymark.domain import chunks
from waymark.domain.chunks import CHUNK
from waymark.domain.events import (
    Event,
    PlainEvent,
    RemovalEvent,
    Removed,
    Stored,
    StoredIdentity,
    StoredObject,
    StoredReference,
    StoredWindow,
    StoreEvent,
)
from waymark.domain.media import DEVICE
from waymark.domain.names import Registration, Window
from waymark.domain.waiting import SHARD, SHARDS_MAX

EXTRA_KEYS = "extra_keys"
"""Flag: this life has reported a salt or an image."""
UNTRUSTED = "untrusted"
"""Flag: batches were lost, so counts of copies may be wrong."""
EVENTS_MISSING = "events_missing"
"""Flag: event_ids of a standard stream are missing, although no batch is."""

COPIES_LEFT = "copies:left"
"""Flag: removals of this life have said how many copies of a block are left."""
COPIES_REUSED = "copies:reused"
"""Flag: stores of this life have said whether their blocks are new or only announced again."""
COPIES_LAST = "copies:last"
"""Flag: the events of this engine show that it removes a block only once, after its last copy."""
COPIES_EACH = "copies:each"
"""Flag: this engine has removed a block twice without storing it in between, so it removes each copy."""
COPIES_LEARNED = frozenset({COPIES_LAST, COPIES_EACH})
"""Flags that a snapshot of the same engine does not change."""
COPIES_DOUBTED = "copies_doubted"
"""Flag: copies of this life were counted by a rule that its events contradict."""

UNITS = "units"
"""Flag: a physical block of this engine has several of the registered blocks."""

PUBLISHER = "publisher:"
"""The prefix of the flag with the id of the process whose life this is, in hex digits."""

WINDOW = "window:"
"""Prefix of the flags that name the windows of groups other than main attention."""
_PUBLISHER = re.compile(PUBLISHER + "((?:[0-9a-f]{2}){1,64})")
_RELEASE = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})", re.ASCII)
WINDOWS_MAX = 64
"""The most groups with windows; others are ignored."""
_OF_GROUPS = (StoredWindow, Removed)
"""The events of a group with a window. A removal does not name its kind of attention."""


def publisher_of(flags: Collection[str]) -> bytes | None:
    """Return the id of the process of this life, if its batches name it."""
    for flag in flags:
        if match := _PUBLISHER.fullmatch(flag):
            return bytes.fromhex(match[1])
    return None


class CopiesRule(NamedTuple):
    """The number of copies that a removal takes in a stream, and the reason."""

    rule: Literal["count", "set"]
    why: str


def removes_once(registration: Registration) -> bool:
    """Return whether this release of the engine removes a block only after its last copy."""
    first, release = registration.kind.traits.removes_once_from, _RELEASE.match(registration.target.release or "")
    return first is not None and release is not None and (int(release[1]), int(release[2])) >= first


def copies_rule(registration: Registration, flags: Collection[str]) -> CopiesRule:
    """Return the rule by which copies of a publisher's blocks count now. ``flags`` are those of its life."""
    if COPIES_LEFT in flags:
        return CopiesRule("set", "its removals say how many copies are left (remaining_copy_counts)")
    if UNTRUSTED in flags:
        return CopiesRule("set", "batches were lost, so that counts of this life cannot be trusted")
    if registration.copies == "set":
        return CopiesRule("set", "it is registered so, or that is the default of its type")
    if COPIES_EACH in flags:
        return CopiesRule("count", "it has removed a block twice without storing it between")
    if COPIES_LAST in flags:
        return CopiesRule("set", "its events contradict counts: it stores again what it has not removed as often")
    if removes_once(registration):
        return CopiesRule("set", f"its release, {registration.target.release}, removes a block after its last copy")
    if COPIES_REUSED in flags:
        return CopiesRule("count", "its stores say whether a block is new or only announced again (origin)")
    return CopiesRule("count", f"its type, {registration.kind}, announces and removes each copy")


class LifeFacts:
    """The facts of the present life of one stream."""

    def __init__(self, registration: Registration, *, reads_windows: bool) -> None:
        self.flags: set[str] = set()
        self.main_group: int | None = None
        """The KV-cache group of main attention."""
        self.shards: set[str] = set()
        """The shards that this life has named in the keys of a pool; ``flags`` has them, too."""
        self.windows: dict[int, Window] = {}
        """The windows of KV-cache groups other than main attention, by group; ``flags`` has them, too."""
        self.chunk_blocks = 1
        """How many blocks the largest chunk has had, in this life; ``flags`` has it, too."""
        self._block_size = registration.block_size
        self._has_one_counter = registration.sequence == "publisher"
        self._removes_once = removes_once(registration)
        self._publisher_id: bytes | None = None
        self._reads_windows = reads_windows and registration.scope == "instance"

    def restore(self, flags: frozenset[str], main_group: int | None) -> None:
        """Set the facts to those in the record of the life."""
        self.flags = set(flags)
        self._publisher_id = publisher_of(flags)
        self.main_group = main_group
        self.shards = {flag.removeprefix(SHARD) for flag in flags if flag.startswith(SHARD)}
        windows = [Window.parse(flag.removeprefix(WINDOW)) for flag in flags if flag.startswith(WINDOW)]
        self.windows = {window.group: window for window in windows} if self._reads_windows else {}
        self.chunk_blocks = max((int(flag.removeprefix(CHUNK)) for flag in flags if flag.startswith(CHUNK)), default=1)

    def forget(self) -> None:
        """Forget everything, because the life has ended."""
        self.flags.clear()
        self._publisher_id = None
        self.shards.clear()
        self.windows.clear()
        self.chunk_blocks = 1
        self.main_group = None

    def kept(self) -> tuple[frozenset[str], int | None]:
        """Return the facts for the record, as they are now."""
        return frozenset(self.flags), self.main_group

    @property
    def removes_once(self) -> bool:
        """Whether a removal of this engine removes a block with all copies, according to its release or its events."""
        return COPIES_LAST in self.flags or (self._removes_once and COPIES_EACH not in self.flags)

    @property
    def has_units(self) -> bool:
        """Whether a removal on a device may take several blocks."""
        return UNITS in self.flags

    def learn_publisher(self, publisher_id: bytes) -> None:
        """Learn which process sends the batches of this life. A stream with several counters has several processes."""
        if publisher_id != self._publisher_id and self._has_one_counter:
            self.flags -= {flag for flag in self.flags if flag.startswith(PUBLISHER)}
            self.flags.add(PUBLISHER + publisher_id.hex())
            self._publisher_id = publisher_id

    def learn_removal(self, event: RemovalEvent) -> None:
        """Learn whether removals count the remaining copies."""
        if isinstance(event, Removed) and event.copies_left is not None:
            self.flags.add(COPIES_LEFT)

    def learn(self, event: StoreEvent) -> None:
        """Learn facts from a store unless it is skipped."""
        if event.is_reused is not None:
            self.flags.add(COPIES_REUSED)
        if isinstance(event, StoredWindow):
            window = self.new_window_of(event)
            if window is not None and window.group not in self.windows:
                self.windows[window.group] = window
                self.flags.add(f"{WINDOW}{window}")
            return
        if isinstance(event, StoredObject) and len(self.shards) < SHARDS_MAX and event.shard not in self.shards:
            self.flags.add(SHARD + event.shard)
            self.shards.add(event.shard)
        if _has_extra_keys(event):
            self.flags.add(EXTRA_KEYS)
        if not isinstance(event, Stored):
            return
        if event.block_size > self._block_size:
            if event.medium in DEVICE:
                self.flags.add(UNITS)
            self._learn_chunk(chunks.blocks_of(event, self._block_size))
        if self.main_group is None:
            self.main_group = event.group

    def knows(self, event: PlainEvent) -> bool:
        """Return whether ``learn`` or ``learn_removal`` would learn nothing from the event, unless it is skipped."""
        if isinstance(event, Removed):
            return event.copies_left is None or COPIES_LEFT in self.flags
        if event.is_reused is not None and COPIES_REUSED not in self.flags:
            return False
        if isinstance(event, StoredWindow):
            window = self.new_window_of(event)
            return window is None or window.group in self.windows
        if _has_extra_keys(event) and EXTRA_KEYS not in self.flags:
            return False
        return isinstance(event, StoredReference) or (
            event.block_size <= self._block_size and self.main_group is not None
        )

    def _learn_chunk(self, blocks: int) -> None:
        if blocks > self.chunk_blocks:
            self.flags.discard(f"{CHUNK}{self.chunk_blocks}")
            self.flags.add(f"{CHUNK}{blocks}")
            self.chunk_blocks = blocks

    def window_of(self, event: Event) -> Window | None:
        """Return the window of the event's group; None for main attention and for an unknown group."""
        if not self.windows or not isinstance(event, _OF_GROUPS):
            return None
        return None if event.group in (None, self.main_group) else self.windows.get(event.group)

    def new_window_of(self, event: StoredWindow) -> Window | None:
        """Return the window that an event states for its group, if its block size fits the registered one."""
        size, span = self._block_size, event.block_size
        if not self._reads_windows or event.window is None or event.group is None:
            return None
        if event.window == 1:  # a state exists or not, whatever block names it
            span = size
        if not span or (span % size and size % span) or len(self.windows) >= WINDOWS_MAX:
            return None
        return Window(event.group, event.window, span)


def _has_extra_keys(event: Stored | StoredReference | StoredIdentity | StoredObject) -> bool:
    """Return whether a store names a salt or an image."""
    if isinstance(event, Stored):
        return bool(event.salts or event.extras)
    if isinstance(event, StoredReference):
        return event.is_salted
    return bool(event.envelope.salts)
