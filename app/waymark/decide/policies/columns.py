"""The candidates of a decision as columns: one list for each number by which a policy compares all candidates.

A policy that compares all candidates costs less by columns: most of the candidates have nothing of the prompt, and
their numbers by load and by gauges do not change from one decision to the next. So the formulas below read columns, and
only the first candidates of an order become objects. Any sequence of candidates has columns.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import TypeAlias, overload

from waymark.base import native
from waymark.decide.policies.policy import Candidate, Filter, RoutingRequest, Scored
from waymark.domain.targets import Gauges

Column: TypeAlias = Sequence[float | None]
"""A number of each candidate; None if it has none."""
SumParts: TypeAlias = Mapping[str, tuple[float, Column]]
"""The parts of a sum by name: the weight of each, and its column."""


class PureColumns:
    """Sums over all candidates of a decision, and the least sums, in Python; see ``native/columns.c``."""

    @staticmethod
    def add_columns(columns: Sequence[tuple[float, Column]], is_clamped: bool, /) -> list[float]:
        """Return the sum of each candidate, from the first column to the last, each times its weight; None adds
        nothing.

        With ``is_clamped`` a number below 0 counts as 0, and one above 1 as 1.
        """
        sums = [0.0] * len(columns[0][1])
        for weight, column in columns:
            if is_clamped:
                column = [None if number is None else min(1.0, max(0.0, number)) for number in column]
            sums = [
                total if number is None else total + weight * number for total, number in zip(sums, column, strict=True)
            ]
        return sums

    @staticmethod
    def least_of(values: Sequence[float], draws: Sequence[float], most: int, sign: float, /) -> list[int]:
        """Return the places of the least ``sign * value``, at most ``most``, least first; equal ones by their draws."""
        entries = sorted(zip([sign * value for value in values], draws, range(len(values)), strict=True))
        return [place for _, _, place in entries[: max(0, most)]]


class CandidateColumns(Sequence[Candidate]):
    """Candidates with their columns. A column is read, and never changed."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self.candidates[index]

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The same as a plain sequence."""
        return self._candidates

    @property
    def instances(self) -> Sequence[str]:
        return [candidate.instance_id for candidate in self.candidates]

    @property
    def labels(self) -> Sequence[Mapping[str, str]]:
        return [candidate.labels for candidate in self.candidates]

    @property
    def active(self) -> Sequence[int]:
        return [candidate.active for candidate in self.candidates]

    @property
    def requests(self) -> Sequence[float]:
        return [candidate.requests for candidate in self.candidates]

    @property
    def queue(self) -> Sequence[float]:
        return [candidate.queue for candidate in self.candidates]

    @property
    def context(self) -> Sequence[float]:
        """``context`` of a target of weight 1."""
        return [candidate.context / candidate.weight for candidate in self.candidates]

    @property
    def health(self) -> Sequence[float]:
        return [candidate.health for candidate in self.candidates]

    @property
    def last_cold(self) -> Sequence[int]:
        return [candidate.last_cold for candidate in self.candidates]

    @cached_property
    def gauges(self) -> Sequence[Gauges | None]:
        return [candidate.gauges for candidate in self.candidates]

    def by_gauges(self, key: Hashable, make: Callable[[Sequence[Gauges | None]], Column]) -> Column:
        """Return a column that follows from the gauges alone. ``key`` names it."""
        return make(self.gauges)

    def by_match(self, number: Callable[[Candidate], float]) -> list[float]:
        """Return a column that ``number`` computes from the part of the prompt that a candidate has or will have."""
        return [number(candidate) for candidate in self.candidates]

    def home(self, request: RoutingRequest, places: Container[int] | None = None) -> int | None:
        """Return the place of the first candidate that the prefix key meets; None with tokens, or without a key.

        ``places`` are those that count; None: all.
        """
        if request.ring is None or request.prefix_key is None:
            return None
        for name in request.ring.clockwise(request.prefix_key):
            place = self._place_of(name)
            if place is not None and (places is None or place in places):
                return place
        return None

    def _place_of(self, name: tuple[str, int]) -> int | None:
        return self._places.get(name)

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], int]:
        return {(candidate.instance_id, candidate.dp_rank): place for place, candidate in enumerate(self.candidates)}

    def supposing(self, place: int, candidate: Candidate) -> CandidateColumns:
        """Return the same candidates with another match at a place."""
        supposed = list(self.candidates)
        supposed[place] = candidate
        return CandidateColumns(supposed)

    def passing(self, request: RoutingRequest, filters: tuple[Filter, ...]) -> CandidateColumns:
        """Return the candidates that pass filters by registrations."""
        if not filters:
            return self
        remaining = list(self.candidates)
        for keep in filters:
            remaining = keep(request, remaining)
        return CandidateColumns(remaining)


def columns_of(candidates: Sequence[Candidate]) -> CandidateColumns:
    return candidates if isinstance(candidates, CandidateColumns) else CandidateColumns(candidates)


class ColumnSums:
    """The sum of each candidate's parts."""

    def __init__(self, columns: CandidateColumns, parts: SumParts, *, is_clamped: bool = False) -> None:
        """With ``is_clamped`` a number below 0 counts as 0, and one above 1 as 1. A part of None adds nothing."""
        self.columns, self._parts, self._is_clamped = columns, parts, is_clamped
        self.shown: dict[int, Candidate] = {}
        """The candidates, by their places, that an answer shows in place of those of the sums."""
        self.values = [0.0] * len(columns)
        if parts:
            self.values = (native.selected or PureColumns).add_columns(list(parts.values()), is_clamped)

    def scored(self, place: int) -> Scored:
        part = _clamped if self._is_clamped else _weighted
        parts = {name: part(weight, column[place]) for name, (weight, column) in self._parts.items()}
        return Scored(self.shown.get(place) or self.columns[place], self.values[place], parts)

    def ranked(self, request: RoutingRequest, random: Random, most: int | None, *, is_cost: bool) -> RankedColumns:
        """Order the candidates by their sums, best first, equal ones by chance.

        Without tokens, of those as good as the best, the first that the prefix key meets comes first.
        """
        values, draw = self.values, random.random
        draws = [draw() for _ in values]
        if request.ring is not None and values:
            best = min(values) if is_cost else max(values)
            first = self.columns.home(request, {place for place, value in enumerate(values) if value == best})
            if first is not None:
                draws[first] = -1.0
        return RankedColumns(self, values, draws, 1.0 if is_cost else -1.0, most, is_by_key=True)


def _weighted(weight: float, number: float | None) -> float | None:
    return None if number is None else weight * number


def _clamped(weight: float, number: float | None) -> float | None:
    if number is None:
        return None
    return weight if number >= 1.0 else weight * max(0.0, number)


class RankedColumns(Sequence[Scored]):
    """Candidates in an order. The first are objects at once, the others when they are first read.

    Loads follow later decisions, so an object that is made later may show a later load.
    """

    def __init__(
        self,
        sums: ColumnSums,
        values: Sequence[float],
        draws: Sequence[float],
        sign: float,
        most: int | None,
        *,
        is_by_key: bool = False,
    ) -> None:
        """The least ``sign * value`` comes first, and of equal ones the least draw.

        ``most`` is how many places the caller looks at; None: all. ``is_by_key``: the prefix key has decided already
        which of equal candidates is first.
        """
        self.columns, self.is_by_key = sums.columns, is_by_key
        self._sums, self._keys, self._sign = sums, (values, draws), sign
        self._first: list[Scored] = []
        self._ahead: list[int] = []
        """The places of those that come before all others."""
        self._make(len(values) if most is None else most)

    @overload
    def __getitem__(self, index: int) -> Scored: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Scored]: ...

    def __getitem__(self, index: int | slice) -> Scored | Sequence[Scored]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._made_to(places)[places]
        first = self._made_to(max(places[0], places[-1])) if places else []
        return [first[place] for place in places]

    def __len__(self) -> int:
        return len(self._sums.values)

    def show(self, place: int, candidate: Candidate) -> None:
        """Replace the candidate at a place, which ``supposing`` has given another match."""
        self._sums.shown[place], publisher = candidate, candidate.publisher
        self._first = [
            scored._replace(candidate=candidate) if scored.candidate.publisher == publisher else scored
            for scored in self._first
        ]

    def put_first(self, instance_id: str) -> bool:
        """Put the candidates of an instance before all others. Return whether it has any."""
        numbers, draws = self._keys
        ahead = [place for place, name in enumerate(self.columns.instances) if name == instance_id]
        self._ahead = sorted(ahead, key=lambda place: (self._sign * numbers[place], draws[place]))
        most, self._first = len(self._first), []
        self._make(most)
        return bool(ahead)

    def _made_to(self, place: int) -> list[Scored]:
        if place >= len(self._first):
            self._make(len(self))
        return self._first

    def _make(self, most: int) -> None:
        ahead = self._ahead
        places = (native.selected or PureColumns).least_of(*self._keys, most + len(ahead), self._sign)
        if ahead:
            places = [*ahead, *(place for place in places if place not in ahead)]
        self._first += map(self._sums.scored, places[len(self._first) : most])
