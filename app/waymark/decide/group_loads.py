"""The loads of one group as last read, which of them have changed, and the orders, sums and columns that follow them.

A decision looks at the first few targets of an order, so that it costs the same however many targets there are. Only a
policy that compares all targets reads columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar

from waymark.decide.policies.policy import LoadCost, LoadWeights
from waymark.domain.books import Drift
from waymark.domain.targets import Gauges
from waymark.store.reservations import DRIFT, HEALTH, Load, LoadChanges, left_out_until

T = TypeVar("T")

#: The number of changes to keep for readers; one further behind looks at all loads again.
_CHANGES_MAX = 4096
#: With more changes than this share of the targets all are looked at again.
_SHARE = 8
_NOBODY = frozenset[int]()
_IDLE = Load()
_NO_DRIFTS: Mapping[int, float] = MappingProxyType({})


class GroupLoads(Mapping[int, Load]):
    """Loads by publisher. Only changed values are parsed again, and passed to readers."""

    def __init__(self, loads: Mapping[int, Load] | None = None) -> None:
        self._loads: dict[int, Load] = dict(loads or {})
        self.get: Any = self._loads.get  # the method of ``Mapping`` takes five times as long
        self._raw: dict[bytes, bytes] = {}
        self._changes: list[int] = []
        self._dropped = 0
        self._left_out_until: dict[int, int] = {}
        self.last_change = -1
        """The number of the last change that the loads contain."""
        self._put: set[int] = set()
        self._drifts: dict[int, Drift] = {}
        self.has_marks = False
        """Whether any target may be left out, or delivers less than expected."""

    def __getitem__(self, publisher: int) -> Load:
        return self._loads[publisher]

    def __iter__(self) -> Iterator[int]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def version(self) -> int:
        """It grows with each change."""
        return self._dropped + len(self._changes)

    def changed_since(self, version: int) -> Iterable[int] | None:
        """Return the publishers whose loads have changed since ``version``, or None if those changes are not kept any
        more."""
        index = version - self._dropped
        return None if index < 0 else self._changes[index:]

    def put(self, publisher: int, load: Load) -> None:
        """Set a load changed by a decision; the next reading repeats it."""
        self._raw.pop(b"%d" % publisher, None)
        self._put.add(publisher)
        self._loads[publisher] = load
        self._note(publisher)

    def take_put(self) -> Sequence[int]:
        """Return the publishers that were put since the last call.

        A load may be put after a newer reading, so the next reading has to name its publisher.
        """
        publishers, self._put = list(self._put), set()
        return publishers

    def apply(self, changes: LoadChanges) -> None:
        """Apply the changes that Redis reports."""
        self.last_change = changes.last
        if changes.is_all:
            self.read(changes.values)
            return
        for name, value in changes.values.items():
            if name.startswith(HEALTH):
                publisher = int(name[len(HEALTH) :])
                if value:
                    self._left_out_until[publisher] = left_out_until(value)
                else:
                    self._left_out_until.pop(publisher, None)
            elif name.startswith(DRIFT):
                publisher, drift = int(name[len(DRIFT) :]), Drift.parse(value)
                if drift is None:
                    self._drifts.pop(publisher, None)
                else:
                    self._drifts[publisher] = drift
            elif value:
                if self._raw.get(name) != value:
                    self._set(int(name), Load.parse(value))
                self._raw[name] = value
            else:
                self._raw.pop(name, None)
                if self._loads.pop(int(name), None) is not None:
                    self._note(int(name))
        self.has_marks = bool(self._left_out_until or self._drifts)

    def read(self, values: Mapping[bytes, bytes]) -> None:
        """Read all loads, as Redis has them."""
        old_values, healths, drifts = self._raw, dict[bytes, bytes](), dict[int, Drift]()
        for publisher in [known_publisher for known_publisher in self._loads if b"%d" % known_publisher not in values]:
            del self._loads[publisher]
            self._note(publisher)
        for name, value in values.items():
            if name.startswith(HEALTH):
                healths[name] = value
            elif name.startswith(DRIFT):
                drift, of = Drift.parse(value), name.removeprefix(DRIFT)
                if drift is not None and of.isdigit():
                    drifts[int(of)] = drift
            elif old_values.get(name) != value and name.isdigit():
                self._set(int(name), Load.parse(value))
        self._left_out_until = {
            int(name[len(HEALTH) :]): left_out_until(value)
            for name, value in healths.items()
            if name[len(HEALTH) :].isdigit()
        }
        self._drifts = drifts
        self.has_marks = bool(self._left_out_until or drifts)
        self._raw = dict(values)

    def left_out(self, now_ms: int) -> frozenset[int]:
        """Return the publishers that decisions leave out now, because their engines cannot be reached."""
        if not self._left_out_until:
            return _NOBODY
        return frozenset(publisher for publisher, until_ms in self._left_out_until.items() if until_ms > now_ms)

    def drifts(self, now_ms: int) -> Mapping[int, float]:
        """Return the targets that deliver less than expected, and the share that is missing."""
        if not self._drifts:
            return _NO_DRIFTS
        return {publisher: drift.share for publisher, drift in self._drifts.items() if drift.until_ms > now_ms}

    def _set(self, publisher: int, load: Load) -> None:
        self._loads[publisher] = load
        self._note(publisher)

    def _note(self, publisher: int) -> None:
        if len(self._changes) >= _CHANGES_MAX:
            self._dropped += len(self._changes)
            self._changes.clear()
        self._changes.append(publisher)


class _LoadFollower(ABC):
    """A value derived from the loads of some targets, and updated while these change one by one."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        """``weights`` of the targets by publisher."""
        self._weights = weights
        self._loads: GroupLoads | None = None
        self._version = 0

    def _follow(self, loads: Mapping[int, Load]) -> None:
        if loads is not self._loads or self._loads is None:
            self._make(loads)
            self._loads = loads if isinstance(loads, GroupLoads) else None
        elif self._version != self._loads.version:
            changed = self._loads.changed_since(self._version)
            moved = None if changed is None else set(changed)
            if moved is None or len(moved) > len(self._weights) // _SHARE:
                self._make(loads)
            else:
                self._change(moved & self._weights.keys(), loads)
        if self._loads is not None:
            self._version = self._loads.version

    @abstractmethod
    def _make(self, loads: Mapping[int, Load]) -> None: ...

    @abstractmethod
    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None: ...


OrderEntry: TypeAlias = tuple[float, float, float, int]
"""The place of a target in an order: the two parts of its cost, a random number, and its publisher. The random number
puts targets of equal cost into a random order.
"""


class LoadOrder(_LoadFollower):
    """Targets by the first part of their cost, and those that are equal in it by the second."""

    def __init__(self, weights: Mapping[int, float], cost: LoadCost, random: Random) -> None:
        super().__init__(weights)
        self._first, self._second = cost.first, cost.second
        self._random = random
        self._entries: list[OrderEntry] = []
        self._entry_of: dict[int, OrderEntry] = {}
        self._least_second = 0.0
        """No target's second part is less."""

    def least(
        self,
        loads: Mapping[int, Load],
        cost: LoadCost,
        most: int,
        without: Container[int] = (),
        is_allowed: Callable[[int], bool] | None = None,
    ) -> list[tuple[float, float, int]]:
        """Return the ``most`` targets of the least cost, as costs, random numbers and publishers, least first.

        If several targets are as good as the first one, one of them is drawn at random to be the first, so that many
        callers do not all take the same target. ``cost`` has the parts of this order.
        """
        self._follow(loads)
        entries, cost_of = self._entries, cost.of
        best: list[tuple[float, float, int]] = []
        index, begin, equal, worst = 0, 0, 1, math.inf
        if len(entries) > 1 and entries[0][:2] == entries[1][:2]:
            equal = bisect_right(entries, (*entries[0][:2], math.inf, 0))
            begin = self._random.randrange(equal)
        while index < len(entries):
            first, second, draw, publisher = entries[index if index >= equal else (index + begin) % equal]
            total = cost_of(first, second)
            if total >= worst:
                # The same is true of each later target with the same first part; the others cost at least as much as
                # this.
                if worst <= cost_of(first, self._least_second):
                    break
                index = bisect_right(entries, (first, math.inf, 0.0, 0), index)
                continue
            index += 1
            if publisher not in without and (is_allowed is None or is_allowed(publisher)):
                insort(best, (total, draw, publisher))
                if len(best) >= most:
                    del best[most:]
                    worst = best[-1][0]
        return best

    def cost_of(self, publisher: int, cost: LoadCost) -> float:
        """Return the cost of a target by the loads of the last call of ``least``."""
        first, second, *_ = self._entry_of[publisher]
        return cost.of(first, second)

    def _make(self, loads: Mapping[int, Load]) -> None:
        self._entry_of = {publisher: self._entry(publisher, loads) for publisher in self._weights}
        self._entries = sorted(self._entry_of.values())
        self._least_second = min((entry[1] for entry in self._entries), default=0.0)

    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        entries, entry_of = self._entries, self._entry_of
        for publisher in publishers:
            del entries[bisect_left(entries, entry_of[publisher])]
            entry = entry_of[publisher] = self._entry(publisher, loads)
            insort(entries, entry)
            if entry[1] < self._least_second:
                self._least_second = entry[1]

    def _entry(self, publisher: int, loads: Mapping[int, Load]) -> OrderEntry:
        load, weight = loads.get(publisher, _IDLE), self._weights[publisher]
        second = 0.0 if self._second is None else _work(load, self._second) / weight
        return _work(load, self._first) / weight, second, self._random.random(), publisher


def _work(load: Load, part: LoadWeights) -> float:
    tokens, requests, context = part
    return tokens * load.tokens + requests * load.requests + context * load.context


class RequestSum(_LoadFollower):
    """The requests under way at some targets."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        super().__init__(weights)
        self._requests: dict[int, int] = {}
        self._sum = 0

    def of(self, loads: Mapping[int, Load]) -> int:
        """Return the sum over all targets."""
        self._follow(loads)
        return self._sum

    def _make(self, loads: Mapping[int, Load]) -> None:
        self._requests = {publisher: loads.get(publisher, _IDLE).requests for publisher in self._weights}
        self._sum = sum(self._requests.values())

    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        for publisher in publishers:
            requests = loads.get(publisher, _IDLE).requests
            self._sum += requests - self._requests[publisher]
            self._requests[publisher] = requests


class LoadColumns(_LoadFollower):
    """The loads of some targets as columns, one number of each target, in the order of ``weights``.

    It keeps columns that follow from gauges, too, until another reading.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        super().__init__(weights)
        self.place = {publisher: place for place, publisher in enumerate(weights)}
        """The place of each publisher in a column."""
        self.active: list[int] = []
        self.requests: list[float] = []
        """``active`` of a target of weight 1; the same for ``queue`` and ``context``."""
        self.queue: list[float] = []
        self.context: list[float] = []
        self.health: list[float] = []
        self.last_cold: list[int] = []
        self._gauges: Mapping[int, Gauges] | None = None
        self._of_gauges: dict[Hashable, Sequence[Any]] = {}

    def of(self, loads: Mapping[int, Load]) -> Self:
        """Return the columns as the loads are now."""
        self._follow(loads)
        return self

    def of_gauges(self, gauges: Mapping[int, Gauges], key: Hashable, make: Callable[[], Sequence[T]]) -> Sequence[T]:
        """Return the column that ``make`` computes once for each reading of the gauges; ``key`` names it."""
        if gauges is not self._gauges:
            self._gauges, self._of_gauges = gauges, {}
        column = self._of_gauges.get(key)
        if column is None:
            column = self._of_gauges[key] = make()
        return column

    def _make(self, loads: Mapping[int, Load]) -> None:
        rows = [self._row(publisher, loads) for publisher in self._weights]
        for field, column in enumerate(self._columns):
            column[:] = [row[field] for row in rows]

    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        for publisher in publishers:
            place = self.place[publisher]
            for column, number in zip(self._columns, self._row(publisher, loads), strict=True):
                column[place] = number

    @property
    def _columns(self) -> Sequence[list[Any]]:
        return self.active, self.requests, self.queue, self.context, self.health, self.last_cold

    def _row(self, publisher: int, loads: Mapping[int, Load]) -> tuple[float, ...]:
        load, weight = loads.get(publisher, _IDLE), self._weights[publisher]
        health = load.health if load.failed else 1.0
        requests, queue = load.requests / weight, load.tokens / weight
        return load.requests, requests, queue, load.context / weight, health, load.cold
