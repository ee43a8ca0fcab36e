"""What a process remembers of Redis, bound to the filling of Redis that it was learned from.

A Redis that came back empty hands out group and publisher ids from 1 again: what was remembered by such an id stands
for something else now. So every cache of a process is made by the one ``Incarnation`` of its store, and all of them are
emptied at once when a word that stands in Redis for its filling has changed.
"""

from __future__ import annotations

from typing import Protocol, TypeVar


class Forgetful(Protocol):
    def clear(self) -> None: ...


C = TypeVar("C", bound=Forgetful)

#: Words remembered; beyond it everything is forgotten.
_WORDS_MAX = 4096


class Incarnation:
    """The incarnation that a process believes Redis to have, and its caches.

    A word stands at a place: ``wm:birth`` for the whole Redis, and one in each holder table, which is read anyway and
    of which one primary of a Cluster may lose its own.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often everything was forgotten. Before an answer of Redis is put into a cache, this must be what it was
        when Redis was asked."""
        self._words: dict[int | str, bytes] = {}
        self._caches: list[Forgetful] = []

    def cache(self, cache: C) -> C:
        """``cache``, which is emptied from now on when Redis has come back empty."""
        self._caches.append(cache)
        return cache

    def saw(self, place: int | str, word: bytes) -> None:
        """A word that Redis has answered; where it is another one than before, everything is forgotten."""
        known = self._words.get(place)
        if known is None:
            if len(self._words) >= _WORDS_MAX:
                self.forget()
        elif known != word:
            self.forget()
        self._words[place] = word

    def forget(self) -> None:
        """Empty every cache."""
        self.changes += 1
        self._words.clear()
        for cache in self._caches:
            cache.clear()
