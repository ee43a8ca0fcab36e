"""Resolves plain events, many in one step: those of a batch that differ in their blocks alone."""

from __future__ import annotations

from typing import NamedTuple

from waymark.domain.events import Batch, PlainEvents, Removed, Stored
from waymark.domain.media import DEVICE
from waymark.domain.plan import Plan, Planner
from waymark.domain.rules import BatchProgress, TokenRule
from waymark.domain.slices import EVENT_WORK, Slice, Slices
from waymark.domain.stream_blocks import StreamBlocks


class PlainRun(NamedTuple):
    """Plain events of a batch, and the facts shared by those that can be resolved together."""

    events: PlainEvents
    holder: int
    dp_rank: int
    namespace: int
    may_store: bool
    may_remove: bool
    is_unsalted: bool
    """The stores are of a release whose events have no place for a salt or an image."""


class PlainRuns:
    """The steps are those of ``PlainPlacer``; an event that does not fit one has its rule."""

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
        holders: list[int] = []
        may_store = store is not None and self._may_run(plan, index, batch, store)
        if may_store:
            assert store is not None
            may_store = store.block_size == state.registration.block_size and self._tokens.is_plain(store)
            may_store = may_store and not (store.is_reused and state.has_missing)
            namespace = planner.spaces.at_root(store)
            holders += filter(None, [state.holders.get(planner.name(batch, store))])
        may_remove = removal is not None and removal.medium in DEVICE and self._may_run(plan, index, batch, removal)
        if may_remove and not state.is_shared and not state.facts.has_units:
            assert removal is not None
            holders += state.holders_of(planner.name(batch, removal))
        else:
            may_remove = False
        # Each kind has one holder without another generation, which might already have a block of it.
        if not (may_store or may_remove) or len(holders) != may_store + may_remove or len(set(holders)) > 1:
            return None
        holder = holders[0]
        if state.placer.others.get(holder):
            return None
        is_unsalted = store is not None and not store.tells_salts and state.traits.has_saltless_releases
        first = store or removal
        assert first is not None
        return PlainRun(events, holder, planner.rank(batch, first), namespace, may_store, may_remove, is_unsalted)

    def _may_run(self, plan: Plan, index: int, batch: Batch, event: Stored | Removed) -> bool:
        """Return whether the event and all similar ones are of main attention, and no rule says that they do not
        count.
        """
        facts = self._state.facts
        is_of_all = isinstance(event, Removed) and event.group is None
        if facts.windows and (is_of_all or facts.window_of(event) is not None):
            return False
        return self._planner.skip_reason(plan, batch, event, index, 0) is None

    def run(self, progress: BatchProgress, plain: PlainRun, at: int, work: Slice) -> Slices[int]:
        """Resolve plain events together, up to the first that needs a rule of its own. Return its number."""
        state = self._state
        while at < len(plain.events):
            ran = state.placer.plain.run(
                progress.parts,
                plain.holder,
                plain.events,
                at,
                progress.position,
                seed=self._seed,
                namespace=plain.namespace,
                may_store=plain.may_store,
                may_remove=plain.may_remove and not state.waiting.blocks,
            )
            if ran is None or ran.at == at:
                break
            state.unsalted += ran.stores * plain.is_unsalted
            if state.waiting.blocks and ran.stores:
                progress.placed.append((plain.dp_rank, plain.events.loop.hashes(at, ran.at)))
            at, progress.position = ran.at, ran.position
            if work.is_full(EVENT_WORK + ran.stored + ran.removed):
                yield
        return at
