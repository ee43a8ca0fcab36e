"""Who is registered: groups, publishers, and how they come and go.

A registration is claimed in ``wm:publishers`` first and given its record and row second; an unregister marks the
claim as leaving, ends the publisher, and takes the claim out last; a move does the same, and puts the new claim in its
place. Whoever meets a claim half way (a worker, the
same call again) finishes it, so that a crash between two steps leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from waymark.domain.names import GroupName, PublisherName, Registration
from waymark.errors import Conflict, StoreUnavailable
from waymark.store import keys
from waymark.store.claims import SHARDS_MAX, Claim, decode_group
from waymark.store.client import Client
from waymark.store.leases import Leases, random_nonce
from waymark.store.parsing import Malformed, RecordKind, RecordParser, integer_of, names_of
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
    def __init__(
        self, client: Client, scripts: Scripts, leases: Leases, parser: RecordParser, *, shards: int, hash_seed: int
    ) -> None:
        self._client = client
        self._parser = parser
        self._scripts = scripts
        self._leases = leases
        self._shards = shards
        self._hash_seed = hash_seed
        self._decoded: dict[bytes, Claim] = {}
        """The claims of the last list, each good for as long as Redis has the same bytes."""
        self._tenants = _Tenants()

    async def register(self, registration: Registration) -> bool:
        """Claim a publisher. True: it is new, or something of it has changed; False: it was there just so.

        Another endpoint is a new life. What it is as a target changes in place.

        Raises Conflict, naming the field, where its name is taken by another model, block size, type, adapter,
        salt or scope, or by a registration that cannot be read; nothing is changed then.
        """
        has_moved = False
        for _ in range(_ATTEMPTS):
            claim = await self._claim(registration.name)
            if claim is None:
                if await self._claim_anew(registration, None):
                    return True
            elif claim.is_leaving:
                await self.finish(claim)
            else:
                _check_same(claim.registration, registration)
                if claim.registration == registration and await self.begin(claim):
                    return has_moved
                changed = replace(claim, registration=registration)
                if claim.registration != registration and claim.has_stream_of(changed):
                    kept = await self._replace(registration.name, claim.raw, changed)
                    if kept is not None and await self.begin(kept):
                        await self._client.publish(keys.CONTROL, "registered")
                        return True
                    continue
                # A new endpoint is a new life: nothing of the old one holds.
                moving = replace(claim, is_leaving=True, successor=registration)
                marked = await self._replace(registration.name, claim.raw, moving)
                if marked is not None:
                    has_moved = True
                    await self.finish(marked)
        raise _contended(registration.name)

    async def _claim_anew(self, registration: Registration, before: Claim | None) -> bool:
        """Claim a publisher under new ids, in the place of ``before``; False where something else stands there."""
        above = publisher_above = 0
        for _ in range(_ATTEMPTS):
            ids = await self._scripts.new_ids(
                keys.GROUPS,
                keys.group_field(registration.group),
                self._shards,
                above,
                publisher_above,
                self._hash_seed,
            )
            if not ids.is_applied:
                raise Conflict(
                    f"model {_show(registration.model_name)} of tenant {_show(registration.tenant_id)} has an entry in "
                    f"{keys.GROUPS} that this release cannot read; register with the release that wrote it",
                    field="modelname",
                )
            group_id, shards, publisher = ids.numbers
            claim = Claim(registration, publisher, group_id, shards)
            claimed = await self._replace(registration.name, b"" if before is None else before.raw, claim)
            if claimed is None:
                return False
            clash = await self._clash(claimed)
            if clash is None and await self._confirm(claimed):
                await self._client.publish(keys.CONTROL, "registered")
                return True
            # Its ids are another's, or it has been changed meanwhile, and then it is not in its place any more.
            if clash is None:
                await self._end(claimed)
            before = claimed
            above = group_id if clash == "group" else above
            publisher_above = publisher
        raise _contended(registration.name)

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
            random_nonce(),
            random_nonce(),
            claim.target(),
        )
        if outcome.verdict is Verdict.OTHER:
            return "publisher" if outcome.numbers[0] else "group"
        return None

    async def _confirm(self, claim: Claim) -> bool:
        """Whether a claim that has begun still stands, under the ids it was given."""
        group, name = keys.group_field(claim.registration.group), keys.publisher_field(claim.registration.name)
        raw, entry = await self._client.several([("HGET", keys.PUBLISHERS, name), ("HGET", keys.GROUPS, group)])
        if raw != claim.raw:
            now = None if raw is None else self._decode(name, raw)
            if now is not None and now.has_stream_of(claim):
                return await self.begin(now)  # it changed meanwhile as a target: the table must say the newer one
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
        """Take publishers out; what they held is gone from answers when this returns. Those that were there.

        Raises Conflict where a registration cannot be read; nothing is changed then.
        """
        claims = [claim for name in names if (claim := await self._claim(name)) is not None]
        for claim in claims:
            await self._leave(claim)
        return [claim.registration.name for claim in claims]

    async def _leave(self, claim: Claim) -> None:
        for _ in range(_ATTEMPTS):
            if claim.is_leaving and claim.successor is None:
                await self.finish(claim)
                return
            name = claim.registration.name
            marked = await self._replace(name, claim.raw, replace(claim, is_leaving=True, successor=None))
            if marked is None:  # somebody else was faster, and may not be done
                marked = await self._claim(name)
                if marked is None or marked.publisher != claim.publisher:
                    return
            claim = marked
        raise _contended(claim.registration.name)

    async def finish(self, claim: Claim) -> None:
        """End a publisher whose claim is leaving, then take the claim out, or put its successor in its place."""
        await self._end(claim)
        if claim.successor is not None:
            await self._claim_anew(claim.successor, claim)
        else:
            await self._withdraw(claim)
            await self._client.publish(keys.CONTROL, "unregistered")

    async def _end(self, claim: Claim) -> None:
        for attempt in range(_ATTEMPTS):
            grant = await self._leases.take(claim, "unregister", 5.0, force=True)
            if grant is None or await self._leases.end(grant):
                return  # None: it has no record (any more), so nothing of it is in the table
            # Somebody else ends it too. Without a pause, two would take the lease from each other for ever.
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
        raise _contended(claim.registration.name)

    async def _claim(self, name: PublisherName) -> Claim | None:
        """The publisher's claim, None where it has none; Conflict where it has one that cannot be read."""
        field = keys.publisher_field(name)
        raw = await self._client.hget(keys.PUBLISHERS, field)
        if raw is None:
            return None
        claim = self._decode(field, raw)
        if claim is None:
            raise Conflict(
                f"publisher {_show(name)} has a registration that this release cannot read; change it with the release "
                f"that wrote it, or delete its field of {keys.PUBLISHERS}",
                field="instance_id",
            )
        return claim

    def _decode(self, field: bytes, raw: bytes) -> Claim | None:
        return self._parser.parse(RecordKind.REGISTRATION, keys.PUBLISHERS, field, Claim.decode_field, field, raw)

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
        """Every claim that can be read, leaving ones too, in order of registration."""
        held = await self._client.hgetall(keys.PUBLISHERS)
        self._parser.forget(keys.PUBLISHERS, held.keys())
        known, self._decoded = self._decoded, {}
        for field, raw in held.items():
            claim = known.get(field)
            if claim is None or claim.raw != raw:
                claim = self._decode(field, raw)
            if claim is not None:
                self._decoded[field] = claim
        return sorted(self._decoded.values(), key=lambda claim: claim.publisher)

    async def registrations(self) -> list[Registration]:
        """Every registration, in order."""
        return [claim.registration for claim in await self.claims() if not claim.is_leaving]

    async def is_tenant_known(self, tenant_id: str) -> bool:
        """Whether the tenant has a registration, of any model.

        The list of tenants is read only where registrations have changed since it was read: a query for an unknown
        tenant, which anybody may send, does not grow with others' registrations.
        """
        state = await self._client.several(
            (("GET", keys.INCARNATION), ("HGET", keys.GROUPS, "last_publisher"), ("HLEN", keys.PUBLISHERS))
        )
        if self._tenants.state != state:
            fields = await self._client.hkeys(keys.PUBLISHERS)
            self._tenants = _Tenants(state, frozenset(filter(None, map(_tenant_of, fields))))
        return tenant_id in self._tenants.ids

    async def group(self, group: GroupName) -> GroupEntry | None:
        """The group's id and shards; None where nothing was ever registered for it, or its entry cannot be read."""
        field = keys.group_field(group)
        value = await self._client.hget(keys.GROUPS, field)
        return None if value is None else self._parser.parse(RecordKind.GROUP, keys.GROUPS, field, _entry, value)

    async def groups(self) -> dict[GroupName, GroupEntry]:
        """Every group whose entry can be read."""
        held = await self._client.hgetall(keys.GROUPS)
        self._parser.forget(keys.GROUPS, held.keys())
        found: dict[GroupName, GroupEntry] = {}
        for field, value in held.items():
            if field not in _COUNTERS:
                named = self._parser.parse(RecordKind.GROUP, keys.GROUPS, field, _named_entry, field, value)
                if named is not None:
                    found[named[0]] = named[1]
        return found


@dataclass(frozen=True, slots=True)
class _Tenants:
    """Who had a registration while Redis was in a state: its incarnation, the last id given out, how many there are."""

    state: list[bytes | int | None] | None = None
    ids: frozenset[str] = frozenset()


#: Fields of ``wm:groups`` that are no groups.
_COUNTERS = frozenset({b"last_group", b"last_publisher", b"hash_seed"})


def _entry(value: bytes) -> GroupEntry:
    group_id, _, shards = value.partition(b" ")
    entry = GroupEntry(integer_of(group_id, "the group's id"), integer_of(shards, "the number of shards"))
    if not (entry.group_id and 1 <= entry.shards <= SHARDS_MAX):
        raise Malformed(f"the group's id is 0, or it has not 1..{SHARDS_MAX} shards")
    return entry


def _tenant_of(field: bytes) -> str | None:
    """The tenant in a publisher's field; None where it is no such field, which counts where its value is read."""
    try:
        tenant_id = names_of(field, 3, "it")[1]
    except Malformed:
        return None
    return tenant_id if isinstance(tenant_id, str) else None


def _named_entry(field: bytes, value: bytes) -> tuple[GroupName, GroupEntry]:
    return decode_group(field), _entry(value)


def _contended(name: PublisherName) -> StoreUnavailable:
    return StoreUnavailable(
        f"publisher {_show(name)}: others keep changing its registration at the same time; try again"
    )


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
