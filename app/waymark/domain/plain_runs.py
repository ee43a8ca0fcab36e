"""Resolves plain events together: those of a batch that differ in their blocks alone, and those of further frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from waymark.domain.events import Batch, PlainEvents, Removed, Stored
from waymark.domain.known import MAY_REMOVE, MAY_REPEAT, MAY_STORE, EventRun
from waymark.domain.life_facts import COPIES_LAST
from waymark.domain.media import DEVICE
from waymark.domain.names import HolderName
from waymark.domain.parts import Mode
from waymark.domain.plan import Plan, Planner
from waymark.domain.rules import BatchProgress, TokenRule
from waymark.domain.slices import EVENT_WORK, Slice, Slices
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
