"""The addresses at which the engines of a group take requests, for questions that any engine can answer."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from waymark.domain.names import GroupName
from waymark.store.store import Store

#: How long the registrations that were read are used, in seconds.
_SECONDS = 1.0


class EngineAddresses:
    """The addresses of registered instances: at most a second old, and after each write of this process."""

    def __init__(self, store: Store) -> None:
        self._directory = store.directory
        self._until = float("-inf")
        self._writes = 0
        self._known: dict[GroupName, list[str]] = store.incarnation.cache({})

    async def __call__(self, group: GroupName) -> Sequence[str]:
        """Return the addresses of the group's engines, in order of registration. Raise StoreUnavailable if Redis is
        unavailable.
        """
        writes = self._directory.writes
        if monotonic() >= self._until or writes != self._writes:
            addresses: dict[GroupName, list[str]] = {}
            for registration in await self._directory.registrations():
                if registration.target.address is not None and registration.scope == "instance":
                    addresses.setdefault(registration.group, []).append(registration.target.address)
            self._known.clear()
            self._known.update(addresses)
            self._until, self._writes = monotonic() + _SECONDS, writes
        return self._known.get(group, ())
