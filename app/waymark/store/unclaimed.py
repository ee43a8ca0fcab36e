"""Ends publishers of a holder table without a claim.

A claim and the publisher's row are in two slots. A Redis that loses the last writes of one slot can bring back a
publisher that was unregistered, or lose the claim of one that no worker has seen. Such a publisher could not be
unregistered, and answers would count its blocks permanently.
"""

from __future__ import annotations

from dataclasses import dataclass

from waymark.store import keys
from waymark.store.directory import Directory
from waymark.store.leases import Leases
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

_ROW = b"publisher:"


@dataclass(frozen=True, slots=True)
class UnclaimedPublisher:
    """A publisher of a holder table without a claim."""

    publisher: int
    group_id: int
    shards: int


class UnclaimedPublishers:
    def __init__(self, client: RedisClient, scripts: Scripts, leases: Leases, directory: Directory) -> None:
        self._client = client
        self._scripts = scripts
        self._leases = leases
        self._directory = directory

    async def publishers(self, group_id: int) -> set[int]:
        """Return the publishers that have a row in the group's table. Raise StoreUnavailable if Redis is
        unavailable.
        """
        names = await self._client.hkeys(keys.holders(group_id))
        ids = (name.removeprefix(_ROW) for name in names if name.startswith(_ROW))
        return {int(publisher_id) for publisher_id in ids if publisher_id.isdigit() and len(publisher_id) < 17}

    async def end(self, ids: UnclaimedPublisher) -> bool:
        """End a publisher if it has no claim; return whether it has ended. Raises StoreUnavailable.

        A registration at the same time wins. This method marks the record as ``unclaimed``, and looks for a claim
        again. A registration writes its claim first, and then removes the mark. So either this method finds the claim,
        or the script finds no mark.
        """
        record = keys.record(ids.group_id, ids.publisher)
        name = await self._client.hget(record, "name")
        if await self._has_claim(ids, name):
            return False
        lease = await self._leases.take_for(ids, "unregister", 5.0, force=True)
        if lease is None:
            return await self._leases.end_without_record(ids)
        fence, calls = keys.fence(ids.group_id, 0), lease.calls[0]
        marked = await self._scripts.write_record(
            record=record,
            fence=fence,
            publisher=ids.publisher,
            token=lease.token,
            calls=calls,
            field=["unclaimed", "1"],
        )
        if (
            marked.is_applied
            and not await self._has_claim(ids, name)
            and await self._leases.end_for(ids, lease.token, only_unclaimed=True)
        ):
            return True
        await self._scripts.write_record(
            record=record, fence=fence, publisher=ids.publisher, token=lease.token, calls=calls, field=["unclaimed", ""]
        )
        await self._scripts.drop_lease(lease=keys.lease(ids.group_id, ids.publisher), record=record, token=lease.token)
        return False

    async def _has_claim(self, ids: UnclaimedPublisher, name: bytes | None) -> bool:
        """Return whether the publisher has a claim. A claim that cannot be read counts, because it may be the
        publisher's.
        """
        if name is None:
            fields = await self._client.hgetall(keys.PUBLISHERS)
            return any(self._is_of(ids, field, raw) for field, raw in fields.items())
        raw = await self._client.hget(keys.PUBLISHERS, name)
        return raw is not None and self._is_of(ids, name, raw)

    def _is_of(self, ids: UnclaimedPublisher, name: bytes, raw: bytes) -> bool:
        claim = self._directory.decode(name, raw)
        return claim is None or claim.publisher == ids.publisher
