"""The loads of one group, as they were read last, and which of them have changed since a reader looked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from waymark.store.reservations import HEALTH, Load, left_out_until

#: Changes that are kept for readers; one that is further behind looks at all loads again.
_CHANGES_MAX = 4096
_NOBODY = frozenset[int]()


class GroupLoads(Mapping[int, Load]):
    """Loads by publisher. Only what has changed is parsed again, and passed to readers."""

    def __init__(self, loads: Mapping[int, Load] | None = None) -> None:
        self._loads: dict[int, Load] = dict(loads or {})
        self._raw: dict[bytes, bytes] = {}
        self._changes: list[int] = []
        self._dropped = 0
        self._left_out_until: dict[int, int] = {}

    def __getitem__(self, publisher: int) -> Load:
        return self._loads[publisher]

    def get(self, publisher: int, default: Any = None) -> Any:
        """As ``dict.get``; that of ``Mapping`` takes three times as long."""
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
        """The publishers whose loads have changed since; None where it is too long ago to know."""
        at = version - self._dropped
        return None if at < 0 else self._changes[at:]

    def put(self, publisher: int, load: Load) -> None:
        """What a decision has made of a load; the next reading says it again."""
        self._raw.pop(b"%d" % publisher, None)
        self._set(publisher, load)

    def read(self, values: Mapping[bytes, bytes]) -> None:
        """All loads, as Redis has them."""
        before, healths = self._raw, dict[bytes, bytes]()
        for publisher in [each for each in self._loads if b"%d" % each not in values]:
            del self._loads[publisher]
            self._note(publisher)
        for name, value in values.items():
            if name.startswith(HEALTH):
                healths[name] = value
            elif before.get(name) != value and name.isdigit():
                self._set(int(name), Load.parse(value))
        self._left_out_until = {
            int(name[len(HEALTH) :]): left_out_until(value)
            for name, value in healths.items()
            if name[len(HEALTH) :].isdigit()
        }
        self._raw = dict(values)

    def left_out(self, now_ms: int) -> frozenset[int]:
        """The publishers that decisions leave out now, because their engines cannot be reached."""
        if not self._left_out_until:
            return _NOBODY
        return frozenset(publisher for publisher, until in self._left_out_until.items() if until > now_ms)

    def _set(self, publisher: int, load: Load) -> None:
        self._loads[publisher] = load
        self._note(publisher)

    def _note(self, publisher: int) -> None:
        if len(self._changes) >= _CHANGES_MAX:
            self._dropped += len(self._changes)
            self._changes.clear()
        self._changes.append(publisher)
