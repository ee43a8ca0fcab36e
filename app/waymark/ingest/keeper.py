"""Registers the publishers of the file at the start, and restores registrations that Redis has lost.

When a Redis has come back empty, each worker registers the publishers of the file again, and those whose registrations
it has seen in the Redis before. Several workers may do the same; the second time changes nothing. A publisher that has
registered under such a name in the new Redis stays as it is, and one that was unregistered there is not restored.
Publishers that the file no longer names are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from waymark.domain.names import PublisherName, Registration
from waymark.errors import Conflict, RecordDamaged
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.store.store import Store

log = logging.getLogger(__name__)


class RegistrationKeeper:
    def __init__(self, store: Store, metrics: Metrics, publishers: Sequence[Registration]) -> None:
        self._store = store
        self._metrics = metrics
        self._publishers = publishers
        self._incarnation = ""
        self._refused: set[PublisherName] = set()

    async def restore(self, seen: Iterable[Registration]) -> bool:
        """Register what is missing; whether this Redis is another one than before.

        ``seen`` is what this worker has streams of, or found in the last list that it believed. A list of claims may be
        believed where this call comes after it and returns False: Redis has not come back empty since, so a list that
        is empty is not one of publishers that Redis has forgotten.
        """
        incarnation = await self._store.records.incarnation()
        if incarnation == self._incarnation:
            return False
        is_start = not self._incarnation
        there = {registration.name: registration for registration in await self._store.directory.registrations()}
        wanted = {each.name: each for each in self._publishers}
        if not is_start:
            wanted = {each.name: each for each in seen} | wanted
            log.warning(
                "redis has lost its data; registering its publishers again", extra=fields(publishers=len(wanted))
            )
        for name, registration in wanted.items():
            # At the start the file may move a publisher to another address; later, that is old news.
            if there.get(name) != registration and (is_start or name not in there):
                await self._register(registration, is_restored=not is_start)
        self._metrics.publishers_refused.set(len(self._refused))
        self._incarnation = incarnation
        return True

    async def _register(self, registration: Registration, *, is_restored: bool) -> None:
        try:
            if is_restored:
                await self._store.registry.restore(registration)
            else:
                await self._store.registry.register(registration)
        except (Conflict, RecordDamaged) as exc:  # it says which of the two it is
            if registration.name not in self._refused:
                self._refused.add(registration.name)
                log.error("publisher cannot be registered", extra=fields(error=exc.sentence))
        else:
            self._refused.discard(registration.name)
