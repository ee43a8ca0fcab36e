"""What a process remembers of Redis, bound to the filling of Redis that it was learned from.

A Redis that came back empty hands out group and publisher ids from 1 again: what was remembered by such an id stands
for something else now. So every cache of a process is made by the one ``Incarnation`` of its store, and all of them are
emptied at once when a nonce that stands in Redis for its filling has changed.
"""

from __future__ import annotations

from typing import Protocol, TypeVar


class Forgetful(Protocol):
    def clear(self) -> None: ...


C = TypeVar("C", bound=Forgetful)

#: Nonces remembered; beyond it everything is forgotten.
_NONCES_MAX = 4096


class Incarnation:
    """The incarnation that a process believes Redis to have, and its caches.

    A nonce stands at a place: ``wm:birth`` for the whole Redis, and one in each holder table, which is read anyway and
    of which one primary of a Cluster may lose its own.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often everything was forgotten. Before an answer of Redis is put into a cache, this must be what it was
        when Redis was asked."""
        self._nonces: dict[int | str, bytes] = {}
        self._caches: list[Forgetful] = []

    def cache(self, cache: C) -> C:
        """``cache``, which is emptied from now on when Redis has come back empty."""
        self._caches.append(cache)
        return cache

    def saw(self, place: int | str, nonce: bytes) -> None:
        """A nonce that Redis has answered; where it is another one than before, everything is forgotten."""
        known = self._nonces.get(place)
        if known is None:
            if len(self._nonces) >= _NONCES_MAX:
                self.forget()
        elif known != nonce:
            self.forget()
        self._nonces[place] = nonce

    def forget(self) -> None:
        """Empty every cache."""
        self.changes += 1
        self._nonces.clear()
        for cache in self._caches:
            cache.clear()
