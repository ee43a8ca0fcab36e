"""Who is registered: groups, publishers, and how they come and go.

A registration is claimed in ``wm:publishers`` first and given its record and row second; an unregister marks the
claim as leaving, ends the publisher, and takes the claim out last. Whoever meets a claim half way (a worker, the
same call again) finishes it, so that a crash between two steps leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import orjson

from waymark.domain.names import GroupName, PublisherName, Registration
from waymark.errors import Conflict, StoreUnavailable
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.client import Client
from waymark.store.leases import Leases, random_word
from waymark.store.scripts import Scripts, Verdict

#: How often a registration is tried against others that change the same publisher at the same time.
_ATTEMPTS = 20

#: The fields that may not change under a publisher's name, by their names on the wire.
_FIXED = {
    "model_name": "modelname",
    "block_size": "block_size",
    "kind": "type",
    "lora_name": "lora_name",
    "additional_salt": "additionalsalt",
    "scope": "scope",
    "copies": "copies",
    "sequence": "sequence",
}


@dataclass(frozen=True, slots=True)
class GroupEntry:
    group_id: int
    shards: int


class Registry:
    def __init__(self, client: Client, scripts: Scripts, leases: Leases, *, shards: int, hash_seed: int) -> None:
        self._client = client
        self._scripts = scripts
        self._leases = leases
        self._shards = shards
        self._hash_seed = hash_seed

    async def register(self, registration: Registration) -> bool:
        """Claim a publisher. True: it is new, or moved to a new address; False: it was there just so.

        Raises Conflict, naming the field, where its name is taken by another model, block size, type, adapter,
        salt or scope; nothing is changed then.
        """
        above = publisher_above = 0
        for _ in range(_ATTEMPTS):
            claim = await self._claim(registration.name)
            if claim is not None:
                if claim.is_leaving:
                    await self.finish(claim)
                    continue
                _check_same(claim.registration, registration)
                if claim.registration == registration and await self.begin(claim):
                    return False
                await self._leave(claim)  # a new address is a new life: nothing of the old one holds
                continue
            ids = await self._scripts.new_ids(
                keys.GROUPS,
                keys.group_field(registration.group),
                self._shards,
                above,
                publisher_above,
                self._hash_seed,
            )
            group_id, shards, publisher = ids.numbers
            claim = Claim(registration, publisher, group_id, shards)
            claimed = await self._replace(registration.name, b"", claim)
            if claimed is None:
                continue
            clash = await self._clash(claimed)
            if clash is not None or not await self._confirm(claimed):
                if await self._withdraw(claimed) and clash == "group":
                    above = group_id
                publisher_above = publisher
                continue
            await self._client.publish(keys.CONTROL, "registered")
            return True
        raise StoreUnavailable(
            f"publisher {registration.name}: others keep changing this registration at the same time; try again"
        )

    async def begin(self, claim: Claim) -> bool:
        """Give a claim its record and its row, where it has none yet.

        False where it has none now: one of its ids is another's, or the claim does not stand any more.
        """
        return await self._clash(claim) is None and await self._confirm(claim)

    async def _clash(self, claim: Claim) -> Literal["group", "publisher"] | None:
        """Begin the record; which of the claim's ids is another's, as it may be after a failover, or None."""
        outcome = await self._scripts.begin_publisher(
            keys.holders(claim.group_id),
            keys.record(claim.group_id, claim.publisher),
            claim.publisher,
            keys.publisher_field(claim.registration.name),
            claim.row(),
            keys.group_field(claim.registration.group),
            random_word(),
            random_word(),
        )
        if outcome.verdict is Verdict.OTHER:
            return "publisher" if outcome.numbers[0] else "group"
        return None

    async def _confirm(self, claim: Claim) -> bool:
        """Whether a claim that has begun still stands, under the ids it was given."""
        group, name = keys.group_field(claim.registration.group), keys.publisher_field(claim.registration.name)
        raw, entry = await self._client.several([("HGET", keys.PUBLISHERS, name), ("HGET", keys.GROUPS, group)])
        if raw != claim.raw:
            await self._end(claim)  # unregistered before it began: what it was given now, nobody else would take back
            return False
        if entry == b"%d %d" % (claim.group_id, claim.shards):
            return True
        # A failover has forgotten that the ids were handed out: queries would not find the group.
        kept = await self._scripts.keep_ids(keys.GROUPS, group, claim.group_id, claim.shards, claim.publisher)
        return kept.is_applied

    async def put_back(self, claim: Claim) -> bool:
        """Put back a claim that was there and is not, where Redis has lost it; whether it had.

        Who is unregistered has no record any more when the claim goes. So one whose record stands was lost, with the
        last writes or with a primary of a Cluster that came back empty; what it holds would be in answers for ever.
        """
        name = claim.registration.name
        if await self._client.hget(keys.record(claim.group_id, claim.publisher), "name") != keys.publisher_field(name):
            return False
        if await self._replace(name, b"", claim) is None:
            other = await self._claim(name)
            if other is not None and other.publisher != claim.publisher:
                await self._end(claim)  # registered anew meanwhile
        return True

    async def unregister(self, names: Sequence[PublisherName]) -> list[PublisherName]:
        """Take publishers out; what they held is gone from answers when this returns. Those that were there."""
        taken: list[PublisherName] = []
        for name in names:
            claim = await self._claim(name)
            if claim is not None:
                await self._leave(claim)
                taken.append(name)
        return taken

    async def _leave(self, claim: Claim) -> None:
        if not claim.is_leaving:
            marked = await self._replace(claim.registration.name, claim.raw, replace(claim, is_leaving=True))
            if marked is None:  # somebody else was faster, and may not be done
                marked = await self._claim(claim.registration.name)
                if marked is None or marked.publisher != claim.publisher:
                    return
            claim = marked
        await self.finish(claim)

    async def finish(self, claim: Claim) -> None:
        """End a publisher whose claim is leaving, then take the claim out."""
        await self._end(claim)
        await self._withdraw(claim)
        await self._client.publish(keys.CONTROL, "unregistered")

    async def _end(self, claim: Claim) -> None:
        for attempt in range(_ATTEMPTS):
            grant = await self._leases.take(claim, "unregister", 5.0, force=True)
            if grant is None or await self._leases.end(grant):
                return  # None: it has no record (any more), so nothing of it is in the table
            # Somebody else ends it too. Without a pause, two would take the lease from each other for ever.
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
        raise StoreUnavailable(
            f"publisher {claim.registration.name}: others keep ending it at the same time; try again"
        )

    async def _claim(self, name: PublisherName) -> Claim | None:
        raw = await self._client.hget(keys.PUBLISHERS, keys.publisher_field(name))
        return None if raw is None else Claim.decode(raw)

    async def _replace(self, name: PublisherName, expected: bytes, claim: Claim) -> Claim | None:
        """Compare and set; the claim as it stands now, or None where something else stood there."""
        raw = claim.encode()
        outcome = await self._scripts.claim_publisher(keys.PUBLISHERS, keys.publisher_field(name), expected, raw)
        return replace(claim, raw=raw) if outcome.is_applied else None

    async def _withdraw(self, claim: Claim) -> bool:
        """Take a claim out, if it still stands as it was read."""
        field = keys.publisher_field(claim.registration.name)
        return (await self._scripts.claim_publisher(keys.PUBLISHERS, field, claim.raw, b"")).is_applied

    async def claims(self) -> list[Claim]:
        """Every claim, leaving ones too, in order of registration."""
        claims = [Claim.decode(raw) for raw in (await self._client.hgetall(keys.PUBLISHERS)).values()]
        return sorted(claims, key=lambda claim: claim.publisher)

    async def registrations(self) -> list[Registration]:
        """Every registration, in order."""
        return [claim.registration for claim in await self.claims() if not claim.is_leaving]

    async def is_tenant_known(self, tenant_id: str) -> bool:
        """Whether the tenant has a registration, of any model."""
        fields = await self._client.hkeys(keys.PUBLISHERS)
        return any(orjson.loads(field)[1] == tenant_id for field in fields)

    async def group(self, group: GroupName) -> GroupEntry | None:
        """The group's id and shards; None where nothing was ever registered for it."""
        value = await self._client.hget(keys.GROUPS, keys.group_field(group))
        if value is None:
            return None
        group_id, shards = value.split()
        return GroupEntry(int(group_id), int(shards))

    async def groups(self) -> dict[GroupName, GroupEntry]:
        fields = await self._client.hgetall(keys.GROUPS)
        found: dict[GroupName, GroupEntry] = {}
        for field, value in fields.items():
            if field.startswith(b"["):
                group_id, shards = value.split()
                found[keys.parse_group_field(field)] = GroupEntry(int(group_id), int(shards))
        return found


def _check_same(old: Registration, new: Registration) -> None:
    for attribute, field in _FIXED.items():
        before, after = getattr(old, attribute), getattr(new, attribute)
        if before != after:
            # A salt may be a secret of its tenant; it is compared, never shown.
            shown = f"{field} {_show(before)}, not {_show(after)}"
            difference = f"another {field}" if field == "additionalsalt" else shown
            raise Conflict(
                f"publisher {_show(old.name)} is registered with {difference}; "
                "unregister it first, or use another instance_id or dp_rank",
                field=field,
            )


def _show(value: object) -> str:
    text = "none" if value is None else str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")
