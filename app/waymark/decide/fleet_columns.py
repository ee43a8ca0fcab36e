"""The targets of a set as columns, for a policy that compares all targets.

The set keeps the columns of loads, which follow the changes, and those of gauges, until the next reading. Few targets
have a part of a prompt, so a column of matches has the same number for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar, overload

from waymark.decide.fleet import Allowed, Fleet, FleetMember, PromptState, Shortlist, TargetSet
from waymark.decide.policies.columns import CandidateColumns, Column
from waymark.decide.policies.policy import Candidate, Filter, RoutingRequest
from waymark.domain.targets import Gauges

T = TypeVar("T")

_WITHOUT_MATCH = Candidate(0, "")
#: With at least this many targets, columns cost less than a candidate for each.
_MANY = 32


def candidates_of(
    fleet: Fleet, targets: TargetSet, allowed: Allowed, short: Shortlist, state: PromptState, block_size: int
) -> Sequence[Candidate]:
    """Return the candidates of a shortlist of the allowed targets."""
    if short.are_all and len(short.members) >= _MANY:
        return FleetColumns(fleet, targets, allowed, state, block_size)
    return fleet.candidates(state, block_size, members=short.members)


class FleetColumns(CandidateColumns):
    """The allowed targets of a set, as one request sees them."""

    def __init__(self, fleet: Fleet, targets: TargetSet, allowed: Allowed, state: PromptState, block_size: int) -> None:
        self._fleet, self._targets, self._allowed = fleet, targets, allowed
        self._state, self._block_size = state, block_size
        self._members = targets.all(allowed)
        loads = targets.columns.of(state.loads)
        self._loads, self._place = loads, loads.place
        self._at: list[int] | None = None
        """The places of the members in the columns of the set; None if they are the same."""
        if len(self._members) < len(targets.members):
            self._at = [self._place[member.publisher] for member in self._members]
            self._place = {member.publisher: place for place, member in enumerate(self._members)}
        self._made: dict[int, Candidate] = {}
        self._supposed: frozenset[int] = frozenset()

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return self.candidates[index]
        candidate = self._made.get(index)
        if candidate is None:
            (candidate,) = self._candidates_of((self._members[index],))
            self._made[index] = candidate
        return candidate

    def __len__(self) -> int:
        return len(self._members)

    @cached_property
    def candidates(self) -> Sequence[Candidate]:
        self._made = dict(enumerate(self._candidates_of(self._members))) | self._made
        return list(self._made.values())

    @property
    def instances(self) -> Sequence[str]:
        return [member.name[0] for member in self._members]

    @property
    def labels(self) -> Sequence[Mapping[str, str]]:
        return [member.target.labels for member in self._members]

    @property
    def active(self) -> Sequence[int]:
        return self._own(self._loads.active)

    @property
    def requests(self) -> Sequence[float]:
        return self._own(self._loads.requests)

    @property
    def queue(self) -> Sequence[float]:
        return self._own(self._loads.queue)

    @property
    def context(self) -> Sequence[float]:
        return self._own(self._loads.context)

    @property
    def health(self) -> Sequence[float]:
        return self._own(self._loads.health)

    @property
    def last_cold(self) -> Sequence[int]:
        return self._own(self._loads.last_cold)

    @cached_property
    def gauges(self) -> Sequence[Gauges | None]:
        gauges = self._state.gauges
        return self._own(
            self._loads.of_gauges(gauges, "", lambda: [gauges.get(publisher) for publisher in self._loads.place])
        )

    def by_gauges(self, key: Hashable, make: Callable[[Sequence[Gauges | None]], Column]) -> Column:
        if self._at is not None:
            return make(self.gauges)
        return self._loads.of_gauges(self._state.gauges, key, lambda: make(self.gauges))

    def by_match(self, number: Callable[[Candidate], float]) -> list[float]:
        if 2 * len(self._having) > len(self):
            return list(map(number, self.candidates))
        column = [number(_WITHOUT_MATCH)] * len(self)
        for place in self._having:
            column[place] = number(self[place])
        return column

    def supposing(self, place: int, candidate: Candidate) -> FleetColumns:
        supposed = FleetColumns(self._fleet, self._targets, self._allowed, self._state, self._block_size)
        supposed._made, supposed._supposed = {place: candidate}, frozenset({place})
        return supposed

    def passing(self, request: RoutingRequest, filters: tuple[Filter, ...]) -> FleetColumns:
        targets = self._targets.passing(request, filters)
        if targets is self._targets:
            return self
        return FleetColumns(self._fleet, targets, self._allowed, self._state, self._block_size)

    def _place_of(self, name: tuple[str, int]) -> int | None:
        publisher = self._targets.by_name.get(name)
        return None if publisher is None else self._place.get(publisher)

    @cached_property
    def _having(self) -> Sequence[int]:
        """The places of those that have a part of the prompt, or to which it went before."""
        publishers = set(self._targets.having(self._state, self._allowed))
        history = self._state.history or {}
        publishers.update(publisher for publisher, blocks in history.items() if blocks)
        return [*self._supposed.union(self._place[publisher] for publisher in publishers & self._place.keys())]

    def _own(self, column: Sequence[T]) -> Sequence[T]:
        return column if self._at is None else [column[place] for place in self._at]

    def _candidates_of(self, members: Sequence[FleetMember]) -> Sequence[Candidate]:
        return self._fleet.candidates(self._state, self._block_size, members=members)
