"""The loads of one group, as they were read last, which have changed, and orders and sums that follow them.

A decision looks at the first few targets of an order, so that it costs the same however many targets there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from waymark.decide.policies.policy import LoadWeights
from waymark.domain.books import Drift
from waymark.store.reservations import DRIFT, HEALTH, Load, LoadChanges, left_out_until

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

    def get(self, publisher: int, default: Any = None) -> Any:
        """Get a load like ``dict.get``; the method of ``Mapping`` takes three times as long."""
        return self._loads.get(publisher, default)

    def __iter__(self) -> Iterator[int]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def version(self) -> int:
        """It grows with each change."""
        return self._dropped + len(self._changes)

    def changed_since(self, version: int) -> Iterable[int] | None:
        """Return the publishers whose loads have changed since, or None if that is too long ago to know."""
        index = version - self._dropped
        return None if index < 0 else self._changes[index:]

    def put(self, publisher: int, load: Load) -> None:
        """Set a load changed by a decision; the next reading repeats it."""
        self._raw.pop(b"%d" % publisher, None)
        self._put.add(publisher)
        self._set(publisher, load)

    def take_put(self) -> Sequence[int]:
        """Return the publishers that were put since the last call.

        A decision may be put after a reading that was newer, so that the next reading has to name them.
        """
        publishers, self._put = list(self._put), set()
        return publishers

    def apply(self, changes: LoadChanges) -> None:
        """What Redis says has changed."""
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
        """The targets that deliver less than expected, and the share that is missing."""
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
    """What is made of the loads of some targets, and kept right while these change one by one."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        """``weights`` of the targets by publisher."""
        self._weights = weights
        self._loads: GroupLoads | None = None
        self._version = 0

    def _follow(self, loads: Mapping[int, Load]) -> None:
        if not isinstance(loads, GroupLoads):
            self._loads = None
            self._make(loads)
            return
        changed = loads.changed_since(self._version) if loads is self._loads else None
        moved = None if changed is None else set(changed)
        if moved is None or len(moved) > len(self._weights) // _SHARE:
            self._make(loads)
        else:
            self._change((each for each in moved if each in self._weights), loads)
        self._loads, self._version = loads, loads.version

    @abstractmethod
    def _make(self, loads: Mapping[int, Load]) -> None: ...

    @abstractmethod
    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None: ...


class OrderEntry(NamedTuple):
    """The place of a target in an order."""

    value: float
    draw: float
    """A random number, by which equal targets are in an order by chance."""
    publisher: int


class LoadOrder(_LoadFollower):
    """Targets by a part of their cost, least first."""

    def __init__(self, weights: Mapping[int, float], part: LoadWeights, random: Random) -> None:
        super().__init__(weights)
        self._part = part
        self._random = random
        self._entries: list[OrderEntry] = []
        self._entry_of: dict[int, OrderEntry] = {}
        self.value_of: dict[int, float] = {}
        """The part of each target's cost by the loads of the last call of ``least``, by publisher."""

    def least(self, loads: Mapping[int, Load]) -> Iterator[OrderEntry]:
        """Return all targets, least first; of those that are equal to the least, the first is one by chance.

        So many callers do not all take the same one. Nothing may change while it is gone through.
        """
        self._follow(loads)
        entries = self._entries
        if len(entries) > 1 and entries[0].value == entries[1].value:
            return self._by_chance(entries)
        return iter(entries)

    def _by_chance(self, entries: Sequence[OrderEntry]) -> Iterator[OrderEntry]:
        equal = bisect_right(entries, (entries[0].value, 2.0, 0))
        begin = self._random.randrange(equal)
        for index in range(begin, equal):
            yield entries[index]
        for index in range(begin):
            yield entries[index]
        for index in range(equal, len(entries)):
            yield entries[index]

    def _make(self, loads: Mapping[int, Load]) -> None:
        self._entry_of = {publisher: self._entry(publisher, loads) for publisher in self._weights}
        self.value_of = {publisher: entry.value for publisher, entry in self._entry_of.items()}
        self._entries = sorted(self._entry_of.values())

    def _change(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        for publisher in publishers:
            del self._entries[bisect_left(self._entries, self._entry_of[publisher])]
            entry = self._entry_of[publisher] = self._entry(publisher, loads)
            self.value_of[publisher] = entry.value
            insort(self._entries, entry)

    def _entry(self, publisher: int, loads: Mapping[int, Load]) -> OrderEntry:
        load, (tokens, requests, context) = loads.get(publisher, _IDLE), self._part
        work = tokens * load.tokens + requests * load.requests + context * load.context
        return OrderEntry(work / self._weights[publisher], self._random.random(), publisher)


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
