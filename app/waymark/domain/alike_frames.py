"""Frames that differ from earlier ones in their blocks only: they are read, resolved and packed in one step.

Such a frame needs no plan: its holder is there, and its facts are known. The step is ``KnownBlocks.run_frames``. If it
stops before the end of the frames, for example at a block under a second hash, the resolver goes on where it stopped,
at once if little is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

from waymark.base import native
from waymark.domain.events import Batch, PlainEvents
from waymark.domain.known import MAY_REMOVE, MAY_REPEAT, MAY_STORE, EventRun
from waymark.domain.names import HolderName
from waymark.domain.parts import PackedCall, PackedPartList, PackedParts, Part, Parts, packed
from waymark.domain.plain_runs import PlainRun, PlainRuns
from waymark.domain.plan import Plan
from waymark.domain.rows import Place
from waymark.domain.rules import BatchProgress
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slices, finish
from waymark.domain.stream_blocks import StreamBlocks

ALIKE_HASHES_MAX: Final = 3584
"""The most hashes of frames to resolve at once: as many blocks as a call may have, in about a millisecond. Other
streams wait meanwhile.
"""

_WORK_MAX: Final = SLICE_WORK // 2
"""The most work of a rest to be resolved at once, less than a slice."""

Resolve: TypeAlias = "Callable[[Plan, Sequence[tuple[int, Batch]], BegunFrames], Slices[Parts]]"
PackedShare: TypeAlias = tuple[int, PackedCall]
"""How many parts a shard gets in a call, and the call."""
PackedWave: TypeAlias = dict[int, PackedShare]
"""The share of each shard in a wave, or the next piece of it; see ``waymark.domain.parts``."""


class BegunFrames(NamedTuple):
    """How far a batch of one or several frames is resolved already."""

    progress: BatchProgress
    """The progress of the frame under way."""
    number: int
    """The number of this frame, from 0."""
    epochs: Mapping[HolderName, int] = {}
    """The generation for the stores; see ``Plan``."""
    parts: Parts | None = None
    """All parts, if the rest is resolved, too."""


class AlikeRun:
    """Frames that were read and resolved, or else resolved up to the first event that needs its own rule."""

    __slots__ = ("_epochs", "_like", "_read", "parts", "ran", "rest", "seq", "waves")

    def __init__(
        self,
        like: Batch,
        seq: int,
        read: tuple[Any, ...],
        ran: EventRun,
        parts: PackedParts,
        waves: list[PackedWave] | None,
        epochs: Mapping[HolderName, int],
    ) -> None:
        self._epochs = epochs
        self._like = like
        """The batch that they are like, of which nothing was rejected or ignored."""
        self.seq = seq
        """The seq of the first frame."""
        self._read = read
        self.ran = ran
        self.parts = parts
        self.rest: Parts | None = None
        """All parts, if a rest was left to the resolver."""
        self.waves = waves
        """All parts, packed; None if the ordinary way has to go on."""

    @property
    def frames(self) -> int:
        return len(self._read[0])

    @property
    def last_seq(self) -> int:
        """The seq of the last frame."""
        return self.seq + len(self._read[0]) - 1

    @property
    def ts(self) -> float:
        """The ts of the last frame."""
        ts: float = self._read[1]
        return ts

    @property
    def batch(self) -> Batch:
        """The batch that stands for all frames."""
        loops, ts, *counts = self._read
        like = self._like
        events = like.events
        assert type(events) is PlainEvents
        return Batch(
            ts, events.alike(loops, *counts), like.dp_rank, like.publisher_id, like.rejected, like.ignored, like.samples
        )

    @property
    def work_left(self) -> int:
        """The most work that may be left, in the unit of slices."""
        _, _, stores, blocks, removals, removed = self._read
        work: int = EVENT_WORK * (stores + removals) + blocks + removed - self.ran.hashes
        return work

    @property
    def begun(self) -> BegunFrames:
        """How far the batch is resolved."""
        number = self.ran.begun - 1  # the first frame has begun, too
        parts = PackedPartList(self.seq + number, self.parts)
        return BegunFrames(BatchProgress(parts, self.ran.position, at=self.ran.at), number, self._epochs, self.rest)


class AlikeFrames:
    """Takes the frames of one stream that differ in their blocks only, without a plan.

    It ends with any other event of the stream; ``may_go_on`` says whether a run of its own has ended it.
    """

    def __init__(
        self,
        state: StreamBlocks,
        runs: PlainRuns,
        batch: Batch,
        plain: PlainRun,
        reading: tuple[Any, ...],
        seed: int,
        resolve: Resolve,
    ) -> None:
        self._state, self._runs, self._batch, self._plain, self._resolve = state, runs, batch, plain, resolve
        self._reading = reading
        self._ts = batch.ts
        self.holder = plain.holder
        self._running = state.placer.plain.running(plain.holder, seed, plain.namespace, plain.generations)
        name = plain.name
        self._epochs = {} if name.epoch is None else {name.lasting: name.epoch}
        known, self._former = state.memory.tables(plain.holder)
        self._run = known.run_frames
        assert native.selected is not None
        self._new_parts: Callable[..., PackedParts] = native.selected.Parts
        self._may = self._bits()

    @classmethod
    def like(
        cls, state: StreamBlocks, runs: PlainRuns, batch: Batch, reading: tuple[Any, ...], seed: int, resolve: Resolve
    ) -> Self | None:
        """Return the object for frames like ``batch``; see ``Resolver.alike``. ``resolve`` is the resolver's."""
        is_counted = batch.rejected or batch.ignored
        if is_counted or runs.has_rules() or state.placer.is_behind or not _has_room(state):
            return None
        plain = runs.begin(Plan(), 0, batch)
        if plain is None:
            return None
        wanted = MAY_STORE * (plain.events.store is not None) | MAY_REMOVE * (plain.events.removal is not None)
        return cls(state, runs, batch, plain, reading, seed, resolve) if plain.may == wanted else None

    def take(self, seq: int, payloads: tuple[bytes, ...], prefixes: tuple[bytes, ...]) -> AlikeRun | None:
        """Read and resolve frames from seq ``seq`` on, up to the first that differs in more than its blocks.
        ``prefixes`` has the prefix of the keys of rows for each shard.

        Return None if the first one differs in more than its blocks, or if these belong to another generation; nothing
        has changed then.
        """
        if self._state.generations.are_bounded:
            payloads = payloads[: self._takes(len(payloads))]
            if not payloads:
                return None
        memory = self._state.memory
        if memory.is_over:
            finish(memory.trim())
            _, self._former = memory.tables(self.holder)
        parts = self._new_parts(Part, Place, seq)
        result = self._run(
            self._plain.events.loop,
            payloads,
            self._ts,
            self._reading,
            parts,
            seq,
            self._running,
            self._former,
            self._may,
            prefixes,
        )
        if result is None:
            return None
        read, numbers, waves = result
        ran = EventRun(*numbers)
        self._ts = read[1]
        memory.note_run(self.holder, ran)
        if self._plain.is_unsalted:
            self._state.unsalted += ran.stores
        run = AlikeRun(self._batch, seq, read, ran, parts, waves, self._epochs)
        if waves is None and run.work_left <= _WORK_MAX:
            self._finish(run, prefixes)
        return run

    def _finish(self, run: AlikeRun, prefixes: tuple[bytes, ...]) -> None:
        """Resolve the rest of a run by the rules of its events, and pack all parts if they can be sent at once."""
        run.rest = finish(self._resolve(Plan(), [(run.seq, run.batch)], run.begun))
        parts = packed(run.rest)
        if parts is None or parts.singles or self._state.doubts:
            return
        run.parts, run.waves = parts, parts.calls(prefixes)

    def _takes(self, frames: int) -> int:
        """Return how many of some frames belong to the same generation as the last ones. A frame is never split, and a
        full generation takes no more.
        """
        state, holder = self._state, self.holder
        if not state.memory.has(holder):
            return 0
        if not self._plain.may & MAY_STORE:
            return frames
        name, blocks = self._plain.name, state.memory.blocks_of(holder)
        if state.generations.takes(name, blocks + ALIKE_HASHES_MAX):
            return frames
        return int(state.generations.takes(name, blocks))

    def may_go_on(self) -> bool:
        """Return whether further frames may be taken, after those that Redis has acknowledged."""
        self._may = self._bits()
        return _has_room(self._state) and not self._runs.has_rules()

    def _bits(self) -> int:
        copies = self._state.memory.copies(self.holder)
        return self._plain.may | MAY_REPEAT | copies.bits(self._plain.mode)


def _has_room(state: StreamBlocks) -> bool:
    """Return whether a stream may store as many blocks as are resolved at once."""
    return state.memory.blocks + ALIKE_HASHES_MAX <= state.blocks_max
