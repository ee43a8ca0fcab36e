"""Binds every cache of a process to the incarnation of Redis that it was filled from.

A Redis that came back empty may give an id that a process remembers to another group or publisher. Therefore the one
``Incarnation`` of a store registers every cache of the process, and clears them all when a nonce in Redis that
identifies the incarnation has changed.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from waymark.store import keys
from waymark.store.leases import random_nonce
from waymark.store.parsing import lenient_text
from waymark.store.scripts import Scripts


class Clearable(Protocol):
    def clear(self) -> None: ...


C = TypeVar("C", bound=Clearable)

#: The most nonces remembered. One more clears everything.
_NONCES_MAX = 4096


class Incarnation:
    """The nonces that the process has read, and its caches.

    A key in the slot of the registrations has the nonce of the whole Redis. Each holder table has its own, because
    a single primary of a Cluster can come back empty.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How many times all caches were cleared.

        A reply of Redis may enter a cache only if this number is the same as when the command was sent.
        """
        self._nonces: dict[int | str, bytes] = {}
        self._caches: list[Clearable] = []

    def cache(self, cache: C) -> C:
        """Register ``cache``, so that it is cleared when Redis has come back empty; returns it."""
        self._caches.append(cache)
        return cache

    def saw(self, owner: int | str, nonce: bytes) -> None:
        """Note a nonce that Redis has returned. All caches are cleared if ``owner`` had another nonce before.

        ``owner`` is the id of a group, for the nonce of its holder table, or ``keys.INCARNATION``.
        """
        last_nonce = self._nonces.get(owner)
        if last_nonce is None:
            if len(self._nonces) >= _NONCES_MAX:
                self.forget()
        elif last_nonce != nonce:
            self.forget()
        self._nonces[owner] = nonce

    async def read(self, scripts: Scripts) -> str:
        """Return the nonce of the whole Redis; another nonce later means that Redis came back empty."""
        _, nonce = await scripts.reply("name_birth", incarnation=keys.INCARNATION, nonce=random_nonce())
        self.saw(keys.INCARNATION, nonce)
        return lenient_text(nonce)

    def forget(self) -> None:
        """Clear every cache."""
        self.changes += 1
        self._nonces.clear()
        for cache in self._caches:
            cache.clear()
