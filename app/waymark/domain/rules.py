"""The rules of events: what a store and a removal mean, for each way in which events name their blocks.

A rule gets the events that count, one at a time, with their holders. It is chosen by the class of the event, its block
size, and whether the publisher is a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from waymark.base.record import record
from waymark.domain import chunks
from waymark.domain.chunks import CHUNK_BLOCKS_MAX
from waymark.domain.events import (
    Cleared,
    Event,
    RemovalEvent,
    Removed,
    RemovedIdentity,
    RemovedObject,
    Stored,
    StoredIdentity,
    StoredObject,
    StoredReference,
    StoredWindow,
    StoreEvent,
)
from waymark.domain.hashing import extend
from waymark.domain.known import Spot
from waymark.domain.life_facts import EXTRA_KEYS
from waymark.domain.media import DEVICE
from waymark.domain.parts import Mode, PartList
from waymark.domain.plan import Spaces
from waymark.domain.rows import Place
from waymark.domain.slices import EVENT_WORK, Slice, Slices
from waymark.domain.stream_blocks import StreamBlocks
from waymark.domain.waiting import WaitingStore

POSITION_MAX: Final = 2**62
"""No event of a batch has this position."""
_CHUNK_POSITIONS: Final = 2**28
"""From this position of a batch on, a removal removes only the last block of a chunk."""
_LATE_POSITION: Final = 2**29
_LATE_CHUNKS: Final = 2**22
"""From this position of a batch on, the same holds for chunks of a device. Their other blocks are removed at positions
from ``_LATE_POSITION`` on.
"""


@record(slots=True)
class BatchProgress:
    """How far a batch is resolved."""

    parts: PartList
    position: int
    """The position of the first hash of the next event."""
    placed: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    """Ranks and their engine hashes that were just placed; stores may wait for one of these."""
    rests: list[tuple[int, Sequence[int], tuple[int, ...]]] = field(default_factory=list)
    """Chunks of a device that the batch removes: position, holders and hashes."""
    at: int = 0
    """The index of the next event."""


StoreT = TypeVar("StoreT", bound=StoreEvent)
RemovalT = TypeVar("RemovalT", bound=RemovalEvent)


class Rule(Generic[StoreT, RemovalT]):
    """A rule for the events that name their blocks in one way."""

    def __init__(self, state: StreamBlocks, spaces: Spaces, seed: int) -> None:
        self._state = state
        self._spaces = spaces
        self._seed = seed
        self._block_size = state.registration.block_size

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: StoreT) -> None:
        """Store the blocks of an event."""
        raise NotImplementedError

    def removed(self, progress: BatchProgress, holders: Sequence[int], event: RemovalT) -> None:
        """Remove blocks from ``holders``, which are the generations of one name. Each block is in only one of them."""
        state, newest, hashes = self._state, holders[-1], event.engine_hashes
        copies_left = event.copies_left if isinstance(event, Removed) else None
        parts, position = progress.parts, progress.position
        may_take = not state.waiting.blocks and len(holders) == 1 and not state.is_shared
        if may_take and not any(copies_left or ()) and state.placer.plain.take(parts, newest, position, hashes):
            return
        mode = state.mode()
        for i, h in enumerate(hashes):
            copies = None if copies_left is None else copies_left[i]
            if state.waiting.blocks and not copies and self._leaves_waiting(holders, h, mode):
                continue
            holder = state.holder_with(holders, h)
            holder = newest if holder is None else holder
            if self._was_waiting(holder, event, h):
                continue
            is_found = state.placer.remove(parts, holder, position + i, h, mode=mode, copies_left=copies)
            state.below_zero += not is_found
            if is_found or copies:
                continue
            if state.memory.gone(holder, h):
                state.note_removed_again(event.medium)
            else:
                state.cannot_find(1)

    def _leaves_waiting(self, holders: Sequence[int], engine_hash: int, mode: Mode) -> bool:
        """Note in the waiting stores that a block has left. Return whether nothing else is to be removed: if copies are
        counted, because the removed copy was the waiting one; otherwise, because the holder does not have the block.
        """
        stores = self._state.waiting
        if mode == "count":
            return any(stores.remove(holder, engine_hash) for holder in holders)
        count = sum(1 for holder in holders for _ in iter(partial(stores.remove, holder, engine_hash), False))
        return count > 0 and self._state.holder_with(holders, engine_hash) is None

    def _was_waiting(self, holder: int, event: RemovalT, engine_hash: int) -> bool:
        """Note that the object of a hash has left. Return whether nothing else is to be removed, because its block was
        never indexed.
        """
        return False


class TokenRule(Rule[Stored, Removed]):
    """Blocks identified by their own tokens and those of the blocks before them."""

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: Stored) -> None:
        state, parent = self._state, None
        if not (event.tells_salts or event.part) and state.traits.has_saltless_releases:
            state.unsalted += 1
        if self.is_plain(event) and self._extend(progress, holder, event):
            if state.waiting.blocks:
                progress.placed.append((rank, event.engine_hashes))
            return
        if len(event.tokens) > 4 * self._block_size * len(event.engine_hashes):
            state.drop("sparse", event)
            return
        waiting = WaitingStore(event, rank, holder)
        if event.parent is not None:
            parent = state.memory.find(holder, event.parent)
        if event.parent is None or parent is not None or self._needs_no_parent(holder, event):
            self.place(progress, progress.position, waiting, parent)
        elif state.facts.has_units and len(event.engine_hashes) == 1 and event.medium in DEVICE:
            # The parent is a unit inside a physical block, which its engine never announces by itself.
            state.drop("parent_not_announced", event)
        else:
            state.waiting.add(waiting)

    def place(self, progress: BatchProgress, position: int, waiting: WaitingStore, parent: Spot | None) -> None:
        """Place the blocks of a store that continues ``parent``, or begins at the root."""
        event, state = waiting.event, self._state
        if waiting.removed and state.mode() != "count":
            # A block that the holder has now was stored again after its removal.
            waiting.removed = {h for h in waiting.removed if state.memory.held(waiting.holder, h) is None}
        ns = self._spaces.at_root(event) if parent is None else parent.namespace
        if parent is not None and not self._spaces.has(event, ns):
            state.drop("adapter_mismatch", event)
            return
        hashes = event.engine_hashes
        if self._is_unsalted(event):
            self._place_unsalted(progress, position, waiting, ns, parent)
        else:
            parent_hash = None if parent is None else parent.seq_hash
            seq_hashes = extend(parent_hash, event.tokens, self._block_size, seed=self._seed, extras=event.extras)
            hashes = hashes[: len(seq_hashes)]
            if hashes:
                keys = [seq_hash ^ ns for seq_hash in seq_hashes] if ns else seq_hashes
                state.placer.chain(
                    progress.parts,
                    waiting.holder,
                    position,
                    ns,
                    parent,
                    keys,
                    hashes,
                    mode=state.mode(),
                    is_reused=event.is_reused is True,
                )
                self._remove_waited(progress, position, waiting, len(hashes))
        if state.waiting.blocks:
            progress.placed.append((waiting.dp_rank, hashes))

    def is_plain(self, event: Stored) -> bool:
        """Return whether the event has the tokens of all its blocks, and its hashes cover only tokens."""
        dense = 4 * self._block_size * len(event.engine_hashes)
        return len(event.tokens) == dense and event.extras is None and not self._is_unsalted(event)

    def _extend(self, progress: BatchProgress, holder: int, event: Stored) -> bool:
        """Store the blocks of a plain event in one step. Return whether that was possible."""
        if self._state.placer.others.get(holder):
            return False  # the blocks, or their parent, may be in another generation
        return self._state.placer.plain.extend(
            progress.parts,
            holder,
            progress.position,
            self._spaces.at_root(event),
            event.parent,
            event.engine_hashes,
            event.tokens,
            self._block_size,
            self._seed,
        )

    def _place_unsalted(
        self, progress: BatchProgress, position: int, waiting: WaitingStore, ns: int, parent: Spot | None
    ) -> None:
        """Place a store off the device, which has tokens, but may lack a salt or image that went into its hashes.

        A known hash names the same block as before. An unknown one continues the block before it, unless this life has
        reported a salt or an image: then the block cannot be identified.
        """
        event, state, width = waiting.event, self._state, 4 * self._block_size
        may_hash = EXTRA_KEYS not in state.flags
        is_placed, parent_spot = parent is not None or event.parent is None, parent
        count = len(event.tokens) // width
        for i, h in enumerate(event.engine_hashes[:count]):
            spot = state.memory.find(waiting.holder, h)
            if spot is None and is_placed and may_hash:
                tokens = event.tokens[i * width : (i + 1) * width]
                parent_hash = None if parent_spot is None else parent_spot.seq_hash
                seq_hash = extend(parent_hash, tokens, self._block_size, seed=self._seed)[0]
                spot = state.placer.next_spot(parent_spot, ns, seq_hash ^ ns)
            parent_spot = _store_known(state, progress.parts, position + i, waiting.holder, event, h, spot, parent_spot)
            is_placed = parent_spot is not None
            ns = ns if parent_spot is None else parent_spot.namespace
        self._remove_waited(progress, position, waiting, count)

    def _remove_waited(self, progress: BatchProgress, position: int, waiting: WaitingStore, count: int) -> None:
        """Remove blocks that were removed while they waited. A child may still name them."""
        if not waiting.removed:
            return
        position += len(waiting.event.engine_hashes)
        for i, h in enumerate(waiting.event.engine_hashes[:count], position):
            if h in waiting.removed:
                mode = self._state.mode()
                self._state.placer.remove(progress.parts, waiting.holder, i, h, mode=mode)

    def _needs_no_parent(self, holder: int, event: Stored) -> bool:
        """Return whether a store with an unknown parent can be placed: at the root, or by known hashes."""
        if event.parent == 0 and event.may_begin:
            return True
        find = self._state.memory.find
        return self._is_unsalted(event) and any(find(holder, h) is not None for h in event.engine_hashes)

    def _is_unsalted(self, event: Stored) -> bool:
        """Return whether the event may omit a salt or image that went into its hashes."""
        return (
            event.medium not in DEVICE
            and event.envelope is None
            and not self._state.traits.names_salts_off_device
            and not event.salts
            and not event.extras
        )


class IdentityRule(Rule[StoredIdentity, RemovedIdentity]):
    """Blocks whose hashes are seq_hashes."""

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: StoredIdentity) -> None:
        """Store the blocks; if the parent is unknown, their depth is unknown."""
        ns = self._spaces.at_root(event)
        parent = None if event.parent is None else self._find_parent(holder, event.parent, ns)
        self._state.placer.chain(
            progress.parts,
            holder,
            progress.position,
            ns,
            parent,
            [h ^ ns for h in event.engine_hashes] if ns else event.engine_hashes,
            event.engine_hashes,
            mode=self._state.mode(),
            is_identity=True,
            is_deep=event.is_deep or (event.parent is not None and parent is None),
        )

    def _find_parent(self, holder: int, seq_hash: int, ns: int) -> Spot | None:
        """Return the spot of the block with this seq_hash in namespace ``ns``, or None if its depth is unknown.

        A seq_hash stands for the same prefix in all namespaces of a stream, so the spot may be found in another
        namespace. The prefix has the same depth and the same head in each.
        """
        spot = self._state.memory.find(holder, seq_hash)
        if spot is None or spot.seq_hash != seq_hash:
            return None
        if spot.namespace == ns:
            return spot
        if spot.place.is_single:
            return None
        return Spot(Place(spot.place.head ^ spot.namespace ^ ns), ns, spot.depth, seq_hash ^ ns)


class ReferenceRule(Rule[StoredReference | StoredObject, Removed | RemovedObject]):
    """Blocks identified by engine hashes that were reported for another medium."""

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: StoredReference | StoredObject) -> None:
        _store_by_hash(self._state, progress, holder, event)


class ObjectRule(ReferenceRule):
    """Objects of a pool. A block counts once all of its objects are stored, and an engine has reported its hash."""

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: StoredReference | StoredObject) -> None:
        state = self._state
        for i, h in enumerate(event.engine_hashes, progress.position):
            if state.memory.held(holder, h) is None:
                state.objects.put(holder, h, _shard(event))
                self.find(progress.parts, i, holder, h)
                state.objects.trim()

    def find(self, parts: PartList, position: int, holder: int, engine_hash: int) -> None:
        """Store the block of an object, if all of its object shards are stored and its hash was reported."""
        state = self._state
        spot = state.memory.find(holder, engine_hash) or state.reported.get(engine_hash)
        if spot is not None and state.objects.take(holder, engine_hash, state.facts.shards):
            state.placer.block(parts, holder, position, engine_hash, spot, mode=state.mode())

    def _was_waiting(self, holder: int, event: Removed | RemovedObject, engine_hash: int) -> bool:
        state, shard = self._state, _shard(event)
        if state.memory.held(holder, engine_hash) is None:
            return state.objects.remove(holder, engine_hash, shard)
        state.objects.keep(holder, engine_hash, state.facts.shards - {shard})
        state.objects.trim()
        return False


class WindowRule(Rule[StoredWindow, Removed]):
    """Blocks of a group with a window. Such a block has the hash of the main-attention block that ends at the same
    token.
    """

    def of_all(self, event: Removed) -> Sequence[Removed]:
        """Return the removals of each group with a window. An engine that names no group removes a whole block, in all
        groups.
        """
        return [replace(event, group=group) for group in sorted(self._state.facts.windows)]

    def stored(self, progress: BatchProgress, holder: int, rank: int, event: StoredWindow) -> None:
        if self._state.memory.blocks + len(event.engine_hashes) <= self._state.blocks_max:
            _store_by_hash(self._state, progress, holder, event)

    def removed(self, progress: BatchProgress, holders: Sequence[int], event: Removed) -> None:
        state = self._state
        for i, h in enumerate(event.engine_hashes):
            holder = state.holder_with(holders, h)
            if holder is not None:
                copies = None if event.copies_left is None else event.copies_left[i]
                mode = state.mode()
                state.placer.remove(progress.parts, holder, progress.position + i, h, mode=mode, copies_left=copies)


class ChunkRule:
    """Chunks, each of several blocks. A store is split into stores of blocks, and a removal removes the other blocks of
    each chunk.
    """

    def __init__(self, state: StreamBlocks) -> None:
        self._state = state
        self._block_size = state.registration.block_size

    def positions(self, position: int, event: Event) -> int:
        """Return how many positions an event at ``position`` takes in its batch, even if it is ignored."""
        if isinstance(event, Cleared):
            return 1
        step, position_max = self.positions_of_hash(event)
        return (step if position <= position_max else 1) * len(event.engine_hashes)

    def positions_of_hash(self, event: StoreEvent | RemovalEvent) -> tuple[int, int]:
        """Return how many positions each hash of an event takes, and up to which position of the event. At later
        positions a hash takes one.
        """
        if isinstance(event, Stored | StoredWindow) and event.block_size > self._block_size:
            return chunks.blocks_of(event, self._block_size), POSITION_MAX
        if isinstance(event, Removed) and _may_be_chunks(0, event):
            return CHUNK_BLOCKS_MAX, _CHUNK_POSITIONS - 1
        return 1, POSITION_MAX

    def stored(self, event: Stored) -> Iterator[Stored]:
        """Split a store of chunks into stores of blocks."""
        return chunks.split(event, self._block_size)

    def removed(self, progress: BatchProgress, holders: Sequence[int], event: RemovalEvent) -> None:
        """Remove all blocks of chunks but the last ones: at once if they are not on the device, otherwise in
        ``remove_rests``.
        """
        if self._state.facts.chunk_blocks == 1:
            return
        if _may_be_chunks(progress.position, event):
            position = progress.position + len(event.engine_hashes)
            for i, chunk in enumerate(event.engine_hashes):
                self._remove_rest(progress.parts, position + i * (CHUNK_BLOCKS_MAX - 1), holders, chunk)
        elif self._state.facts.has_units and event.medium in DEVICE:
            progress.rests.append((progress.position, holders, event.engine_hashes))

    def remove_rests(self, progress: BatchProgress, work: Slice) -> Slices[None]:
        """Remove the other blocks of each chunk that was removed from a device, after all positions of the batch.

        The positions of hashes on a device must not depend on whether any hash is known to be a chunk. So these blocks
        have positions of their own, which are computed from those of the hashes.
        """
        state = self._state
        for position, holders, hashes in progress.rests:
            for number, chunk in enumerate(hashes, position):
                is_there = state.mode() != "count" and any(state.memory.held(holder, chunk) for holder in holders)
                if number < _LATE_CHUNKS and not is_there:  # otherwise the batch has stored it again
                    self._remove_rest(progress.parts, _LATE_POSITION + number * CHUNK_BLOCKS_MAX, holders, chunk)
                if work.is_full(EVENT_WORK):
                    yield

    def _remove_rest(self, parts: PartList, position: int, holders: Sequence[int], chunk: int) -> None:
        state = self._state
        for i, h in enumerate(chunks.hashes_of(chunk, state.facts.chunk_blocks)[:-1], position):
            if state.waiting.blocks and any(state.waiting.remove(holder, h) for holder in holders):
                continue
            holder = state.holder_with(holders, h)
            if holder is not None:
                state.placer.remove(parts, holder, i, h, mode=state.mode())


class Rules:
    """The rules of one stream."""

    def __init__(self, state: StreamBlocks, spaces: Spaces, seed: int) -> None:
        self.tokens = TokenRule(state, spaces, seed)
        self.windows = WindowRule(state, spaces, seed)
        self.objects = ObjectRule(state, spaces, seed)
        self.chunks = ChunkRule(state)
        identities = IdentityRule(state, spaces, seed)
        hashes = self.objects if state.is_shared else ReferenceRule(state, spaces, seed)
        self._rules: dict[type[Event], Rule[Any, Any]] = {
            Stored: self.tokens,
            StoredIdentity: identities,
            StoredReference: hashes,
            StoredObject: hashes,
            StoredWindow: self.windows,
            Removed: hashes,
            RemovedIdentity: identities,
            RemovedObject: hashes,
        }

    def of(self, event: StoreEvent | RemovalEvent) -> Rule[Any, Any]:
        """Return the rule of an event; ``chunks`` is a further rule, for stores and removals of chunks."""
        return self._rules[type(event)]


def _may_be_chunks(position: int, event: RemovalEvent) -> bool:
    """Return whether an event may remove chunks. ``position`` is that of the event; a final position must fit into 32
    bits.
    """
    return event.medium not in DEVICE and event.envelope is None and position < _CHUNK_POSITIONS


def _shard(event: StoredReference | StoredObject | Removed | RemovedObject) -> str:
    """Return the object shard that an event of a pool names; empty for a whole block."""
    return event.shard if isinstance(event, StoredObject | RemovedObject) else ""


def _store_by_hash(
    state: StreamBlocks, progress: BatchProgress, holder: int, event: StoredReference | StoredObject | StoredWindow
) -> None:
    """Store blocks whose engine hashes were reported for another holder of the rank."""
    parent_spot = None
    for i, h in enumerate(event.engine_hashes, progress.position):
        spot = state.memory.find(holder, h) or state.before.get(h)
        parent_spot = _store_known(state, progress.parts, i, holder, event, h, spot, parent_spot)


def _store_known(
    state: StreamBlocks,
    parts: PartList,
    position: int,
    holder: int,
    event: Stored | StoredReference | StoredObject | StoredWindow,
    engine_hash: int,
    spot: Spot | None,
    parent: Spot | None,
) -> Spot | None:
    """Store a block that was looked up; without a spot it is ignored and counted."""
    if spot is None:
        state.unresolved += 1
        state.missing += not isinstance(event, StoredWindow)  # a block of a window counts only beside its main block
        return None
    if parent is not None and (parent.place.head != spot.place.head or parent.depth + 1 != spot.depth):
        parent = None
    mode, is_reused = state.mode(), event.is_reused is True
    return state.placer.block(parts, holder, position, engine_hash, spot, parent, mode=mode, is_reused=is_reused)
