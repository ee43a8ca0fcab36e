"""Writes claims, and begins and ends the publishers that they name.

Every step can be repeated. So a worker, or a repeated call, finishes the steps of a claim that a crash has left
unfinished.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from waymark.base.errors import Conflict, Contended
from waymark.base.logs import fields
from waymark.base.shown import shown
from waymark.domain.names import GroupName, PublisherName, Registration
from waymark.store import keys
from waymark.store.activity import ActivityKind, about
from waymark.store.claims import Claim
from waymark.store.directory import Directory, GroupEntry
from waymark.store.holder_tables import decode_group
from waymark.store.leases import Leases, random_nonce
from waymark.store.parsing import Malformed
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Outcome, Scripts, Verdict

log = logging.getLogger(__name__)

#: The most attempts at a change while other callers change the same publisher.
ATTEMPTS = 20
#: The largest id of a group whose table is looked for.
_TABLES_MAX = 1000


class ClaimWriter:
    def __init__(
        self,
        client: RedisClient,
        scripts: Scripts,
        leases: Leases,
        directory: Directory,
        *,
        shards: int,
        hash_seed: int,
        note: Callable[..., None],
    ) -> None:
        """``note`` is the method ``Activity.note``."""
        self._client = client
        self._directory = directory
        self._scripts = scripts
        self._leases = leases
        self._shards = shards
        self._hash_seed = hash_seed
        self._note = note

    async def write_new(
        self, registration: Registration, old_claim: Claim | None, *, is_restored: bool = False
    ) -> bool:
        """Claim a publisher under new ids, in place of ``old_claim``. Return False if Redis has another claim there."""
        group_above = publisher_above = 0
        for _ in range(ATTEMPTS):
            ids = await self._new_ids(registration, group_above, publisher_above)
            if not ids.is_applied:
                complaint = await self._directory.other_format()
                if complaint is not None:
                    raise Conflict(complaint)
                raise Conflict(
                    f"model {shown(registration.model_name)} of tenant {shown(registration.tenant_id)} has an entry in "
                    f"{keys.GROUPS} that this release cannot read; register with the release that wrote it",
                    field="modelname",
                )
            claim = _claim_of(registration, ids)
            expected = b"" if old_claim is None else old_claim.raw
            claimed = await self.replace(registration.name, expected, claim, is_restored=is_restored)
            if claimed is None:
                return False
            clash = await self._clash(claimed)
            if clash is None and await self._confirm(claimed):
                await self._client.publish(keys.CONTROL, "registered")
                self._note(ActivityKind.REGISTERED, **about(registration), detail="put back" if is_restored else "")
                return True
            # Another claim has one of its ids, or another caller has changed the claim in between.
            if clash is None:
                await self._end(claimed)
            old_claim = claimed
            group_above = claim.group_id if clash == "group" else group_above
            publisher_above = claim.publisher
        raise contended(registration.name)

    async def _new_ids(self, registration: Registration, group_above: int = 0, publisher_above: int = 0) -> Outcome:
        group = keys.group_field(registration.group)
        return await self._scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=group,
            shards=self._shards,
            above=group_above,
            publisher_above=publisher_above,
            hash_seed=self._hash_seed,
            format=keys.FORMAT,
        )

    async def write_several(
        self, registrations: Sequence[Registration], known: Set[PublisherName]
    ) -> dict[PublisherName, bool]:
        """Claim and begin publishers in a few round trips for all. Return whether each one is new.

        The result lacks the publishers that are registered in another way, or that other callers change at the same
        time; their parts written so far are an unfinished claim, which ``begin`` or ``write_new`` finishes. It also
        lacks names of ``known`` without a claim by now.
        """
        claims, without_claim = await self._as_registered(registrations)
        new_claims = await self._claimed([each for each in without_claim if each.name not in known])
        claims += new_claims
        grants = await asyncio.gather(*(self._begin(claim) for claim in claims))
        claims = [claim for claim, outcome in zip(claims, grants, strict=True) if outcome.is_applied]
        if not claims:
            return {}
        raws, entries = await self._client.several(
            [
                ("HMGET", keys.PUBLISHERS, *(keys.publisher_field(claim.registration.name) for claim in claims)),
                ("HMGET", keys.GROUPS, *(keys.group_field(claim.registration.group) for claim in claims)),
            ]
        )
        are_new = {claim.publisher for claim in new_claims}
        new_names = {
            claim.registration.name: claim.publisher in are_new
            for claim, raw, entry in zip(claims, raws, entries, strict=True)
            if raw == claim.raw and entry == _entry_of(claim)
        }
        if any(new_names.values()):
            await self._client.publish(keys.CONTROL, "registered")
        for claim in new_claims:
            if claim.registration.name in new_names:
                self._note(ActivityKind.REGISTERED, **about(claim.registration), detail="")
        return new_names

    async def _claimed(self, new: Sequence[Registration]) -> list[Claim]:
        """Claim the names of new publishers under new ids. The result lacks those that another caller claims first."""
        ids = await asyncio.gather(*(self._new_ids(registration) for registration in new))
        wanted = [
            _claim_of(registration, answer) for registration, answer in zip(new, ids, strict=True) if answer.is_applied
        ]
        results = await asyncio.gather(*(self.replace(claim.registration.name, b"", claim) for claim in wanted))
        return [claim for claim in results if claim is not None]

    async def _as_registered(self, registrations: Sequence[Registration]) -> tuple[list[Claim], list[Registration]]:
        """Return the claims of publishers registered in just this way, and the registrations without a claim."""
        if not registrations:
            return [], []
        fields = [keys.publisher_field(wanted.name) for wanted in registrations]
        (raws,) = await self._client.several([("HMGET", keys.PUBLISHERS, *fields)])
        claims, new = [], []
        for registration, field, raw in zip(registrations, fields, raws, strict=True):
            if raw is None:
                new.append(registration)
            else:
                claim = self._directory.decode(field, raw)
                if claim is not None and not claim.is_leaving and claim.registration == registration:
                    claims.append(claim)
        return claims, new

    async def begin(self, claim: Claim) -> bool:
        """Write the record and the row of a claim, if they are missing.

        Return False if the claim is no longer in Redis, or if another claim has one of its ids. In the second case the
        claim gets new ids.
        """
        if await self.is_begun(claim):
            return True
        present = await self._directory.claim(claim.registration.name)
        if present is not None and present.raw == claim.raw and not present.is_leaving:
            log.warning(
                "two registrations have the same ids; this one gets new ids",
                extra=fields(stream=str(claim.registration.name)),
            )
            await self._end(claim)
            await self.write_new(claim.registration, claim)
        return False

    async def is_begun(self, claim: Claim) -> bool:
        return await self._clash(claim) is None and await self._confirm(claim)

    async def _clash(self, claim: Claim) -> Literal["group", "publisher"] | None:
        """Begin the record.

        Return which id of this claim also belongs to another claim, as can happen after a failover; otherwise None.
        """
        outcome = await self._begin(claim)
        if outcome.verdict is Verdict.GONE:
            await self._leases.end_without_record(claim)
            outcome = await self._begin(claim)
        if outcome.verdict is Verdict.OTHER:
            return "publisher" if outcome.numbers[0] else "group"
        return None

    async def _begin(self, claim: Claim) -> Outcome:
        return await self._scripts.run(
            "begin_publisher",
            holders=keys.holders(claim.group_id),
            record=keys.record(claim.group_id, claim.publisher),
            publisher=claim.publisher,
            name=keys.publisher_field(claim.registration.name),
            row=claim.row(),
            group=keys.group_field(claim.registration.group),
            version=random_nonce(),
            life=random_nonce(),
            target=claim.target(),
        )

    async def _confirm(self, claim: Claim) -> bool:
        """Return whether a begun claim is still in Redis, under the same ids."""
        group, name = keys.group_field(claim.registration.group), keys.publisher_field(claim.registration.name)
        raw, entry = await self._client.several([("HGET", keys.PUBLISHERS, name), ("HGET", keys.GROUPS, group)])
        if raw != claim.raw:
            present = None if raw is None else self._directory.decode(name, raw)
            if present is not None and present.has_stream_of(claim):
                return await self.is_begun(present)  # only its target has changed, and the table must get the new one
            await self._end(claim)  # unregistered before it began: no other call would end it
            return False
        if entry == _entry_of(claim):
            return True
        # After a failover ``wm:groups`` may lack these ids. Then queries would not find the group, and the ids would
        # be assigned again.
        return await self._keep_ids(group, GroupEntry(claim.group_id, claim.shards), claim.publisher)

    async def _keep_ids(self, group: bytes, entry: GroupEntry, publisher: int) -> bool:
        result = await self._scripts.run(
            "keep_ids",
            groups=keys.GROUPS,
            group=group,
            id=entry.group_id,
            shards=entry.shards,
            publisher=publisher,
            format=keys.FORMAT,
        )
        return result.is_applied

    async def groups_by_table(self, entries: Iterable[GroupEntry]) -> dict[GroupName, GroupEntry]:
        """Return the groups with a table, except ``entries``, if their ids are small: ids are given in order.

        How many shards such a group has is known no more. So it is taken for a new one.
        """
        known_ids = {entry.group_id for entry in entries}
        ids = [group_id for group_id in range(1, _TABLES_MAX + 1) if group_id not in known_ids]
        names = await self._client.several(
            [("HGET", keys.holders(group_id), "group") for group_id in ids], is_lenient=True
        )
        groups: dict[GroupName, GroupEntry] = {}
        for group_id, name in zip(ids, names, strict=True):
            with suppress(Malformed):
                if name is not None:
                    groups[decode_group(name)] = GroupEntry(group_id, self._shards)
        return groups

    async def keep_group(self, group: GroupName, entry: GroupEntry) -> None:
        """Write the entry of a group without publishers again that Redis has lost, if it still has the group."""
        field = keys.group_field(group)
        if await self._client.hget(keys.holders(entry.group_id), "group") == field:
            await self._keep_ids(field, entry, 0)

    async def put_back(self, claim: Claim) -> bool:
        """Write a claim again if Redis has lost it. Return whether that was the case.

        ``unregister`` deletes the record before the claim. So if a record exists without a claim, Redis has
        lost the claim: its last writes were lost, or a primary of a Cluster came back empty. Without the claim no call
        would end the publisher, and answers would count its blocks permanently.
        """
        name = claim.registration.name
        if await self._client.hget(keys.record(claim.group_id, claim.publisher), "name") != keys.publisher_field(name):
            return False
        stored = await self.replace(name, b"", claim, is_restored=True)
        if stored is not None:
            await self.is_begun(stored)  # a worker that saw no claim may be about to end the publisher
        else:
            raw = await self._client.hget(keys.PUBLISHERS, keys.publisher_field(name))
            if raw is None:
                await self._end(claim)  # unregistered while its worker began the record again, and then stopped
                return False
            other_claim = self._directory.decode(keys.publisher_field(name), raw)
            if other_claim is not None and other_claim.publisher != claim.publisher:
                await self._end(claim)  # the publisher was registered again in between
        return True

    async def finish(self, claim: Claim) -> None:
        """End a publisher whose claim is leaving. Then delete the claim, or write its successor in its place."""
        await self._end(claim)
        if claim.successor is not None:
            await self.write_new(claim.successor, claim)
        else:
            is_withdrawn = True  # even if the reply is lost, because then no other call finds the claim to note it
            try:
                is_withdrawn = await self._write(claim.registration.name, claim.raw, b"")
            finally:
                if is_withdrawn:
                    self._note(ActivityKind.UNREGISTERED, **about(claim.registration))
            await self._client.publish(keys.CONTROL, "unregistered")

    async def _end(self, claim: Claim) -> None:
        """End a publisher, unless another publisher has its id, as can happen after a failover."""
        name = await self._client.hget(keys.record(claim.group_id, claim.publisher), "name")
        if name not in (None, keys.publisher_field(claim.registration.name)):
            return
        for attempt in range(ATTEMPTS):
            grant = await self._leases.take(claim, "unregister", 5.0, force=True)
            if grant is None:
                await self._leases.end_without_record(claim)  # mostly the table has no row of the publisher either
                return
            if await self._leases.end(grant):
                return
            # Another caller ends it, too. Without a pause, two callers would take the lease from each other endlessly.
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
        raise contended(claim.registration.name)

    async def replace(
        self, name: PublisherName, expected: bytes, claim: Claim, *, is_restored: bool = False
    ) -> Claim | None:
        """Compare and set: return the claim as written, or None if Redis had another value than ``expected``.

        With ``is_restored`` the claim is not written if the publisher was unregistered in this incarnation of Redis.
        """
        raw = claim.encode()
        is_set = await self._write(name, expected, raw, is_restored=is_restored)
        return replace(claim, raw=raw) if is_set else None

    async def _write(self, name: PublisherName, expected: bytes, raw: bytes, *, is_restored: bool = False) -> bool:
        outcome = await self._scripts.run(
            "claim_publisher",
            publishers=keys.PUBLISHERS,
            unregistered=keys.UNREGISTERED,
            changes=keys.PUBLISHERS_CHANGES,
            publisher=keys.publisher_field(name),
            expected=expected,
            registration=raw,
            restores="1" if is_restored else "0",
            nonce=random_nonce(),
        )
        self._directory.writes += outcome.is_applied
        return outcome.is_applied

    async def note_unregistered(self, name: PublisherName) -> None:
        """Note that a name without a claim was unregistered: Redis may have lost its claim."""
        await self._write(name, b"", b"")


def _claim_of(registration: Registration, ids: Outcome) -> Claim:
    group_id, shards, publisher = ids.numbers
    return Claim(registration, publisher, group_id, shards)


def _entry_of(claim: Claim) -> bytes:
    """Return the entry of the claim's group."""
    return b"%d %d" % (claim.group_id, claim.shards)


def contended(name: PublisherName) -> Contended:
    return Contended(
        f"publisher {shown(str(name))}: other requests change its registration at the same time; try again"
    )
