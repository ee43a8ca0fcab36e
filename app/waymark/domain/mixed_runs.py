"""Resolves plain events of several forms together: those of the groups of a hybrid model, and of several media."""

from __future__ import annotations

from typing import Final, NamedTuple

from waymark.domain.events import STORES, Batch, MixedEvents, PlainEvent, Removed, Stored, StoredReference, StoredWindow
from waymark.domain.known import MixedProgress
from waymark.domain.media import DEVICE
from waymark.domain.parts import Mode
from waymark.domain.plan import Plan, Planner
from waymark.domain.rules import POSITION_MAX, BatchProgress, Rules
from waymark.domain.slices import EVENT_WORK, Slice, Slices
from waymark.domain.stream_blocks import StreamBlocks

# What the C module does with the events of a form.

LEFT_TO_RULE: Final = 0
PASSED_OVER: Final = 1
"""The events have no positions in this pass."""
COUNTED: Final = 2
"""The events are ignored, but their hashes have positions."""
TOKENS: Final = 3
"""Store blocks identified by their tokens."""
HASHES: Final = 4
"""Store blocks identified by hashes of other holders, and ignore unknown ones."""
KNOWN_HASHES: Final = 5
"""The same if none is unknown."""
REMOVED: Final = 6
"""Remove blocks."""
REMOVED_IF_HERE: Final = 7
"""The same if the holder has a block of the event."""


class FormWay(NamedTuple):
    """How the events of one form are resolved."""

    way: int
    holder: int = 0
    """The id of the holder; 0 if the events are ignored."""
    namespace: int = 0
    step: int = 1
    """The number of positions that a hash takes."""
    position_max: int = POSITION_MAX
    """Events at later positions are left to their rule."""
    reason: str | None = None
    """The reason under which ignored events are counted."""


_LEFT: Final = FormWay(LEFT_TO_RULE)
_PASSED_OVER: Final = FormWay(PASSED_OVER)


class MixedRun(NamedTuple):
    """Events of several forms, and how those of each form are resolved."""

    events: MixedEvents
    ways: list[tuple[FormWay, FormWay]]
    """For each form, among the events of main attention, and among those of groups with windows, which come later."""
    holders: list[tuple[int, Mode]]
    """The holders of the ways, and how their copies count."""
    dp_rank: int


class MixedRuns:
    """Resolves events of several forms in steps of ``PlainPlacer``, and leaves events that do not fit a step to their
    rules.
    """

    def __init__(self, state: StreamBlocks, planner: Planner, rules: Rules, seed: int) -> None:
        self._state = state
        self._planner = planner
        self._rules = rules
        self._seed = seed

    def begin(self, plan: Plan, index: int, batch: Batch) -> MixedRun | None:
        """Return how the events of a batch are resolved, if some can be resolved together."""
        events, state = batch.events, self._state
        if type(events) is not MixedEvents or state.is_shared or state.before or state.memory.is_pure:
            return None
        if state.placer.is_behind or state.memory.blocks + events.blocks > state.blocks_max:
            return None
        ways = [self._ways(plan, index, batch, form.pattern) for form in events.forms]
        holders = dict.fromkeys(way.holder for pair in ways for way in pair if way.way > COUNTED)
        modes = [(holder, state.mode()) for holder in holders]
        return MixedRun(events, ways, modes, self._planner.rank(batch, events.forms[0].pattern))

    # ---- the ways of a form ------------------------------------------------------------------------

    def _ways(self, plan: Plan, index: int, batch: Batch, event: PlainEvent) -> tuple[FormWay, FormWay]:
        """Return how events like this one are resolved, first and later."""
        facts = self._state.facts
        if not facts.windows:
            return self._main_way(plan, index, batch, event), _PASSED_OVER
        if facts.window_of(event) is not None:
            return _PASSED_OVER, self._late_way(plan, index, batch, event)
        main = self._main_way(plan, index, batch, event)
        if not isinstance(event, Removed) or event.group is not None:
            return main, _PASSED_OVER
        late = [self._late_way(plan, index, batch, removal) for removal in self._rules.windows.of_all(event)]
        is_here = any(way.way != COUNTED for way in late)
        return main, _LEFT if is_here else FormWay(COUNTED, step=len(late))

    def _late_way(self, plan: Plan, index: int, batch: Batch, event: PlainEvent) -> FormWay:
        """Return how events of a group with a window are resolved."""
        state, name = self._state, self._planner.name(batch, event)
        holders, way = state.holders_of(name), REMOVED_IF_HERE
        if not isinstance(event, Removed):
            holders, way = [*filter(None, [state.holders.get(name)])], HASHES
        if not holders or self._planner.skip_reason(plan, batch, event, index, 0) is not None:
            return FormWay(COUNTED)
        return _LEFT if state.placer.others.get(holders[-1]) else FormWay(way, holders[-1])

    def _main_way(self, plan: Plan, index: int, batch: Batch, event: PlainEvent) -> FormWay:
        reason = self._planner.skip_reason(plan, batch, event, index, 0)
        step, position_max = self._rules.chunks.positions_of_hash(event)
        if reason is not None:
            is_dropped = reason in ("block_size_mismatch", "inside_block") and isinstance(event, STORES)
            return _LEFT if is_dropped else FormWay(COUNTED, 0, 0, step, position_max, reason)
        if isinstance(event, Removed):
            return self._removal_way(batch, event, step, position_max)
        return self._store_way(batch, event)

    def _removal_way(self, batch: Batch, event: Removed, step: int, position_max: int) -> FormWay:
        state, facts = self._state, self._state.facts
        holders = state.holders_of(self._planner.name(batch, event))
        has_rests = facts.chunk_blocks > 1 and (facts.has_units or event.medium not in DEVICE)
        if len(holders) != 1 or has_rests:
            return _LEFT
        return FormWay(REMOVED, holders[0], 0, step, position_max)

    def _store_way(self, batch: Batch, event: Stored | StoredReference | StoredWindow) -> FormWay:
        state, rules = self._state, self._rules
        holder = state.holders.get(self._planner.name(batch, event))
        if holder is None or state.placer.others.get(holder) or isinstance(event, StoredWindow):
            return _LEFT
        if isinstance(event, StoredReference):
            return FormWay(KNOWN_HASHES, holder)
        if event.block_size != state.registration.block_size or not rules.tokens.is_plain(event):
            return _LEFT
        return FormWay(TOKENS, holder, self._planner.spaces.of(event))

    # ---- a batch -----------------------------------------------------------------------------------

    def run(self, progress: BatchProgress, mixed: MixedRun, start: int, work: Slice, *, is_late: bool) -> Slices[int]:
        """Resolve the events of one pass together, up to the first that needs its own rule. Return the index of that
        event.
        """
        events, plain = mixed.events, self._state.placer.plain
        while start < len(events):
            forms = self._forms(mixed, is_late=is_late)
            ran = plain.run_mixed(
                progress.parts, mixed.holders, forms, events.loop, start, progress.position, seed=self._seed
            )
            if ran is None or ran.end == start:
                break
            self._note(progress, mixed, start, ran, is_late=is_late)
            start, progress.position = ran.end, ran.position
            if work.is_full(EVENT_WORK + ran.hashes):
                yield
        return start

    def _forms(self, mixed: MixedRun, *, is_late: bool) -> tuple[tuple[int, int, int, int, int], ...]:
        """Return the ways of the forms in one pass, as ``Events.run`` takes them."""
        numbers = {holder: number for number, (holder, _) in enumerate(mixed.holders)}
        forms = []
        for form, pair in zip(mixed.events.forms, mixed.ways, strict=True):
            way = pair[is_late]
            if not is_late and self._is_left(form.pattern, way):
                way = _LEFT
            forms.append((way.way, numbers.get(way.holder, 0), way.namespace, way.step, way.position_max))
        return tuple(forms)

    def _is_left(self, event: PlainEvent, way: FormWay) -> bool:
        """Return whether events of main attention are left to their rule at the moment.

        A removal may take a waiting block, and a store may announce a missing one again.
        """
        state = self._state
        if way.way == PASSED_OVER:
            return False
        if state.waiting.blocks and (way.way == REMOVED or (way.way == COUNTED and isinstance(event, Stored))):
            return True
        return not isinstance(event, Removed) and event.is_reused is True and state.has_missing

    def _note(self, progress: BatchProgress, mixed: MixedRun, start: int, ran: MixedProgress, *, is_late: bool) -> None:
        """Count the results of the events from index ``start`` on."""
        state, stores = self._state, 0
        for form, pair, (events, unknown) in zip(mixed.events.forms, mixed.ways, ran.forms, strict=True):
            way = pair[is_late]
            state.unresolved += unknown
            if way.way == TOKENS:
                assert isinstance(form.pattern, Stored)
                stores += events
                if events:  # a store before them does not know their adapter
                    self._planner.spaces.at_root(form.pattern)
                state.unsalted += events * (not form.pattern.tells_salts and state.traits.has_saltless_releases)
            elif way.reason is not None and events:
                state.ignored[way.reason] += events
        if stores and state.waiting.blocks:
            progress.placed.append((mixed.dp_rank, mixed.events.loop.hashes(start, ran.end)))
