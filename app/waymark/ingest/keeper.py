"""Registers the publishers of the file at the start, and restores registrations that Redis has lost.

When Redis has come back empty, each worker registers again the publishers of the file, and those that it knew before
Redis lost its data. Several workers may do this; a repetition changes nothing. A publisher that was registered since
then stays as it is, and one that was unregistered since then is not restored. Publishers that the file no longer names
stay registered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from waymark.base.errors import Conflict, RecordDamaged
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import PublisherName, Registration
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
        """Register what is missing. Return whether Redis has come back empty since the last call; True at the first.

        ``seen`` has the registrations of this worker's streams, and those of the last list of claims that it believed.
        If the caller has read a list of claims before this call, and this call returns False, the caller may believe
        the list: Redis did not come back empty in between, so the list lacks no publisher that Redis has lost.
        """
        incarnation = await self._store.read_incarnation()
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
            # Only at the start may the file move a publisher. Later, the address in Redis may be newer than the file.
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
        except (Conflict, RecordDamaged) as exc:  # its sentence shows which of the two it is
            if registration.name not in self._refused:
                self._refused.add(registration.name)
                log.error("publisher cannot be registered", extra=fields(error=exc.sentence))
        else:
            self._refused.discard(registration.name)
