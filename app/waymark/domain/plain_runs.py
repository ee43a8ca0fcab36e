"""Resolves plain events together: those of a batch that differ in their blocks alone, and those of further frames.

Frames that differ from earlier ones in their blocks only are read, resolved and packed in one step. Such a frame needs
no plan: its holder is there, and its facts are known. The step is ``run_frames`` of ``Parts``, for frames of any ranks.
If it stops before the end of the frames, for example at a block under a second hash, the resolver goes on where it
stopped, at once if little is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

from waymark.base import native
from waymark.domain.events import Batch, PlainEvents, Removed, Stored
from waymark.domain.known import MAY_REMOVE, MAY_REPEAT, MAY_STORE, REMOVED_EACH, EventRun
from waymark.domain.life_facts import COPIES_LAST
from waymark.domain.media import DEVICE
from waymark.domain.names import HolderName
from waymark.domain.parts import Mode, PackedCall, PackedPartList, PackedParts, Part, Parts, packed
from waymark.domain.plan import Plan, Planner
from waymark.domain.pure_known import KnownBlocks
from waymark.domain.rows import Place
from waymark.domain.rules import BatchProgress, TokenRule
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slice, Slices, finish
from waymark.domain.stream_blocks import REPORT_BLOCKS_MIN, StreamBlocks


class PlainRun(NamedTuple):
    """Plain events of a batch, and the facts shared by those that can be resolved together."""

    events: PlainEvents
    name: HolderName
    """The name of the holder in this stream."""
    holder: int
    generations: Sequence[int]
    """The other generations of the holder's name."""
    dp_rank: int
    namespace: int
    may: int
    """``MAY_STORE`` and ``MAY_REMOVE``."""
    mode: Mode
    is_unsalted: bool
    """Whether the stores come from an engine release whose events cannot carry a salt or an image."""


class PlainRuns:
    """Resolves plain events in steps of ``PlainPlacer``, and leaves events that do not fit a step to their rules."""

    def __init__(self, state: StreamBlocks, planner: Planner, tokens: TokenRule, seed: int) -> None:
        self._state = state
        self._planner = planner
        self._tokens = tokens
        self._seed = seed

    def begin(self, plan: Plan, index: int, batch: Batch) -> PlainRun | None:
        """Return the common facts of plain events, if some can be resolved together."""
        events, state, planner = batch.events, self._state, self._planner
        if type(events) is not PlainEvents or state.memory.blocks + events.blocks > state.blocks_max:
            return None
        store, removal, namespace = events.store, events.removal, 0
        may_store = store is not None and self._may_run(plan, index, batch, store)
        if may_store:
            assert store is not None
            may_store = store.block_size == state.registration.block_size and self._tokens.is_plain(store)
            may_store = may_store and not (store.is_reused and state.has_missing)
            if may_store:  # otherwise no store counts, so their adapter is not learned
                namespace = planner.spaces.at_root(store)
        may_remove = removal is not None and removal.medium in DEVICE and self._may_run(plan, index, batch, removal)
        may_remove = may_remove and not state.is_shared and not state.facts.has_units
        names = [
            planner.name(batch, event) for event, may in ((store, may_store), (removal, may_remove)) if event and may
        ]
        # Stores and removals must have holders of the same name. Removals may be of blocks of any generation.
        if not names or names[0].lasting != names[-1].lasting:
            return None
        holders = state.holders_of(names[0])
        holder = state.holders.get(names[0]) if may_store else holders[-1] if holders else None
        if holder is None:
            return None
        is_unsalted = store is not None and not store.tells_salts and state.traits.has_saltless_releases
        first = store or removal
        assert first is not None
        return PlainRun(
            events,
            names[0],
            holder,
            state.placer.others.get(holder, ()),
            planner.rank(batch, first),
            namespace,
            MAY_STORE * may_store | MAY_REMOVE * may_remove,
            state.mode(),
            is_unsalted,
        )

    def _may_run(self, plan: Plan, index: int, batch: Batch, event: Stored | Removed) -> bool:
        """Return whether the event and all similar ones are of main attention, and are not skipped by a rule."""
        facts = self._state.facts
        if facts.windows and ((type(event) is Removed and event.group is None) or facts.window_of(event) is not None):
            return False
        return self._planner.skip_reason(plan, batch, event, index, 0) is None

    def run(self, progress: BatchProgress, plain: PlainRun, at: int, work: Slice) -> Slices[int]:
        """Resolve plain events together, up to the first that needs its own rule. Return the index of that event."""
        state = self._state
        while at < len(plain.events):
            ran = self._run(progress, plain, plain.events.loop, at, MAY_REPEAT, [])
            if ran is None or ran.at == at:
                break
            if state.waiting.blocks and ran.stores:
                progress.placed.append((plain.dp_rank, plain.events.loop.hashes(at, ran.at)))
            at, progress.position = ran.at, ran.position
            if work.is_full(EVENT_WORK + ran.hashes):
                yield
        return at

    def run_frames(
        self, progress: BatchProgress, plan: Plan, index: int, seq: int, batch: Batch, work: Slice
    ) -> Slices[int]:
        """Resolve the frames of a batch together, up to the first with an event that needs its own rule.

        Return the index of that frame. ``progress`` is how far the batch is resolved; ``seq`` is that of its first
        frame.
        """
        plain = None if self.has_rules() else self.begin(plan, index, batch)
        if plain is None:
            return 0
        loops = [plain.events.loop, *plain.events.following]
        # A frame that may be a report of the whole cache is judged by itself.
        may = MAY_REPEAT if plain.events.hashes < REPORT_BLOCKS_MIN else 0
        frame, is_contradicted = 0, False
        while frame + 1 < len(loops) or progress.at < len(loops[frame]):
            following = [] if is_contradicted else [*enumerate(loops[frame + 1 :], seq + frame + 1)]
            ran = self._run(progress, plain, loops[frame], progress.at, may, following)
            if ran is None or (ran.at, ran.begun) == (progress.at, 0):
                return frame
            frame += ran.begun
            progress.parts.seq = seq + frame
            progress.at, progress.position = ran.at, ran.position
            # Copies are judged at the end of each frame, and a step ends with the one that contradicts them.
            is_contradicted = is_contradicted or ran.restored + ran.miscounted > 0
            if is_contradicted and ran.at == len(loops[frame]):
                self._state.judge_copies(progress.parts, progress.position)
                is_contradicted = False
            if work.is_full(EVENT_WORK * (1 + ran.begun) + ran.hashes):
                yield
        return len(loops)

    def _run(
        self, progress: BatchProgress, plain: PlainRun, loop: Any, at: int, may: int, following: list[tuple[int, Any]]
    ) -> EventRun | None:
        """Resolve events of the batch ``loop`` from index ``at`` on, and of the batches ``following``."""
        state = self._state
        may |= plain.may & ~MAY_REMOVE if state.waiting.blocks else plain.may
        ran = state.placer.plain.run(
            progress.parts,
            plain.holder,
            loop,
            at,
            progress.position,
            seed=self._seed,
            namespace=plain.namespace,
            may=may,
            mode=plain.mode,
            following=following,
            generations=plain.generations,
        )
        if ran is not None:
            state.unsalted += ran.stores * plain.is_unsalted
        return ran

    def has_rules(self) -> bool:
        """Return whether some rule must see each batch by itself. A clear does not count, because it concerns only
        earlier batches.
        """
        state = self._state
        has_rules = state.waiting.blocks or state.facts.windows or state.is_shared
        return bool(has_rules or COPIES_LAST in state.flags or (state.has_missing and state.may_report))


# ---- frames that are alike -------------------------------------------------------------------------

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
"""The share of each shard in a wave, or the next piece of that share; see ``waymark.domain.parts``."""


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


class AlikeWay(NamedTuple):
    """How the frames of one rank are taken. ``run_frames`` reads the first five fields."""

    loop: Any
    """``Events`` that are like those of the frames."""
    table: KnownBlocks
    running: tuple[Any, ...]
    former: tuple[KnownBlocks, ...]
    may: int
    batch: Batch
    """The batch that they are like, of which nothing was rejected or ignored."""
    plain: PlainRun


class AlikeBatch(NamedTuple):
    """Frames of one rank that follow each other, resolved up to the first event that needs its own rule."""

    seq: int
    """The seq of the first frame."""
    way: AlikeWay
    reading: tuple[Any, ...]
    """The result of ``go_on``."""
    ran: EventRun

    @property
    def frames(self) -> int:
        return len(self.reading[0])

    @property
    def batch(self) -> Batch:
        """The batch that stands for all frames."""
        loops, ts, *counts = self.reading
        like = self.way.batch
        events = like.events
        assert type(events) is PlainEvents
        return Batch(
            ts, events.alike(loops, *counts), like.dp_rank, like.publisher_id, like.rejected, like.ignored, like.samples
        )

    @property
    def work_left(self) -> int:
        """The most work that may be left, in the unit of slices."""
        _, _, stores, blocks, removals, removed = self.reading
        work: int = EVENT_WORK * (stores + removals) + blocks + removed - self.ran.hashes
        return work


class AlikeRun:
    """Frames that were read and resolved; the last ones of a rank maybe only up to an event that needs its own rule."""

    __slots__ = ("batches", "frames", "last_seq", "parts", "rest", "seq", "ts", "waves")

    def __init__(
        self, seq: int, batches: Sequence[AlikeBatch], parts: PackedParts, waves: list[PackedWave] | None
    ) -> None:
        self.seq = seq
        """The seq of the first frame."""
        self.batches = batches
        """The frames, rank by rank."""
        self.frames = 0
        for batch in batches:
            self.frames += len(batch.reading[0])
        self.last_seq = seq + self.frames - 1
        """The seq of the last frame."""
        self.ts: float = batches[-1].reading[1]
        """The ts of the last frame."""
        self.parts = parts
        self.rest: Parts | None = None
        """All parts, if a rest was left to the resolver."""
        self.waves = waves
        """All parts, packed; None if the ordinary way has to go on."""

    @property
    def last_rank(self) -> int | None:
        """The rank that the last frame names."""
        return self.batches[-1].way.batch.dp_rank

    @property
    def total(self) -> Batch:
        """A batch with the numbers of all frames, for counts."""
        first = self.batches[0]
        if len(self.batches) == 1:
            return first.batch
        readings = [batch.reading for batch in self.batches]
        numbers = [sum(of_kind) for of_kind in zip(*[reading[2:] for reading in readings], strict=True)]
        loops = [loop for reading in readings for loop in reading[0]]
        return AlikeBatch(self.seq, first.way, (loops, self.ts, *numbers), first.ran).batch

    @property
    def begun(self) -> BegunFrames:
        """How far the last batch is resolved."""
        last = self.batches[-1]
        number = last.ran.begun - 1  # the first frame has begun, too
        parts, name = PackedPartList(last.seq + number, self.parts), last.way.plain.name
        epochs = {} if name.epoch is None else {name.lasting: name.epoch}
        return BegunFrames(BatchProgress(parts, last.ran.position, at=last.ran.at), number, epochs, self.rest)


class AlikeFrames:
    """Takes the frames of one stream that differ from earlier ones in their blocks only, without a plan.

    It ends with any other event of the stream; ``may_go_on`` says whether a run of its own has ended it.
    """

    def __init__(
        self,
        state: StreamBlocks,
        runs: PlainRuns,
        patterns: Mapping[int | None, Batch],
        ts: float | None,
        reading: tuple[Any, ...],
        seed: int,
        resolve: Resolve,
    ) -> None:
        self._state, self._runs, self._resolve = state, runs, resolve
        self._reading, self._ts = reading, ts
        self._ways = _Ways(state, runs, patterns, seed)
        assert native.selected is not None
        self._new_parts: Callable[..., PackedParts] = native.selected.Parts
        self._bounded_run: PlainRun | None = None
        """The facts of the only rank, if its generations are bounded."""

    @classmethod
    def like(
        cls,
        state: StreamBlocks,
        runs: PlainRuns,
        last: Batch,
        patterns: Mapping[int | None, Batch],
        reading: tuple[Any, ...],
        seed: int,
        resolve: Resolve,
    ) -> Self | None:
        """Return the object for frames like ``patterns``; see ``Resolver.alike``. ``resolve`` is the resolver's."""
        if runs.has_rules() or state.placer.is_behind or not _has_room(state):
            return None
        is_bounded = state.generations.are_bounded
        if is_bounded:
            patterns = {last.dp_rank: patterns[last.dp_rank]}
        frames = cls(state, runs, patterns, last.ts, reading, seed, resolve)
        try:
            way = frames._ways[last.dp_rank]
        except KeyError:
            return None
        frames._bounded_run = way.plain if is_bounded else None
        return frames

    def take(self, seq: int, payloads: tuple[bytes, ...], prefixes: tuple[bytes, ...]) -> AlikeRun | None:
        """Read and resolve frames from seq ``seq`` on, up to the first that differs in more than its blocks from those
        of its rank. ``prefixes`` has the prefix of the keys of rows for each shard.

        Return None if the first one differs in more than its blocks, or if these belong to another generation; nothing
        has changed then.
        """
        if self._bounded_run is not None:
            payloads = payloads[: self._takes(self._bounded_run, len(payloads))]
            if not payloads:
                return None
        memory = self._state.memory
        if memory.is_over:
            finish(memory.trim())
            self._ways.clear()
        parts = self._new_parts(Part, Place, seq)
        result = parts.run_frames(self._ways, payloads, self._ts, self._reading, seq, prefixes)
        if result is None:
            return None
        batches: list[AlikeBatch] = []
        next_seq = seq
        for way, reading, numbers in result[0]:
            ran = EventRun(*numbers)
            memory.note_run(way.plain.holder, ran)
            if way.plain.is_unsalted:
                self._state.unsalted += ran.stores
            if ran.are_removed_each and not way.may & REMOVED_EACH:
                self._ways.look_again(way)
            batches.append(AlikeBatch(next_seq, way, reading, ran))
            next_seq += len(reading[0])
        self._ts = reading[1]
        run = AlikeRun(seq, batches, parts, result[1])
        if run.waves is None and batches[-1].work_left <= _WORK_MAX:
            self._finish(run, prefixes)
        return run

    def _finish(self, run: AlikeRun, prefixes: tuple[bytes, ...]) -> None:
        """Resolve the rest of a run by the rules of its events, and pack all parts if they can be sent at once."""
        last = run.batches[-1]
        run.rest = finish(self._resolve(Plan(), [(last.seq, last.batch)], run.begun))
        self._ways.look_again(last.way)
        parts = packed(run.rest)
        if parts is None or parts.singles or self._state.doubts:
            return
        run.parts, run.waves = parts, parts.calls(prefixes)

    def _takes(self, plain: PlainRun, frames: int) -> int:
        """Return how many of some frames belong to the same generation as the last ones. A frame is never split, and a
        full generation takes no more.
        """
        state, holder = self._state, plain.holder
        if not state.memory.has(holder):
            return 0
        if not plain.may & MAY_STORE:
            return frames
        name, blocks = plain.name, state.memory.blocks_of(holder)
        if state.generations.takes(name, blocks + ALIKE_HASHES_MAX):
            return frames
        return int(state.generations.takes(name, blocks))

    def may_go_on(self) -> bool:
        """Return whether further frames may be taken, after those that Redis has acknowledged."""
        return _has_room(self._state) and not self._runs.has_rules()


class _Ways(dict[int | None, AlikeWay]):
    """The ways of the ranks, each made when the first frame of its rank is read."""

    def __init__(self, state: StreamBlocks, runs: PlainRuns, patterns: Mapping[int | None, Batch], seed: int) -> None:
        self._state, self._runs, self._patterns, self._seed = state, runs, patterns, seed

    def __missing__(self, rank: int | None) -> AlikeWay:
        """Return the way of a rank. Raise KeyError if there is none."""
        batch, state = self._patterns[rank], self._state
        plain = None if batch.rejected or batch.ignored else self._runs.begin(Plan(), 0, batch)
        if plain is None:
            raise KeyError(rank)
        wanted = MAY_STORE * (plain.events.store is not None) | MAY_REMOVE * (plain.events.removal is not None)
        if plain.may != wanted:
            raise KeyError(rank)
        running = state.placer.plain.running(plain.holder, self._seed, plain.namespace, plain.generations)
        table, former = state.memory.tables(plain.holder)
        way = self[rank] = AlikeWay(plain.events.loop, table, running, former, self._may(plain), batch, plain)
        return way

    def look_again(self, way: AlikeWay) -> None:
        """Note that copies of the way's holder may count in another way now."""
        self[way.batch.dp_rank] = way._replace(may=self._may(way.plain))

    def _may(self, plain: PlainRun) -> int:
        return plain.may | MAY_REPEAT | self._state.memory.copies(plain.holder).bits(plain.mode)


def _has_room(state: StreamBlocks) -> bool:
    """Return whether a stream may store as many blocks as are resolved at once."""
    return state.memory.blocks + ALIKE_HASHES_MAX <= state.blocks_max
