"""Registers, changes and unregisters publishers, so that a crash between two steps leaves nothing behind.

- ``register`` writes the claim into ``wm:publishers`` first, then the publisher's record and its row in the table.
- ``unregister`` marks the claim as leaving, ends the publisher, and deletes the claim last.
- A publisher with a new endpoint moves: ``register`` does what ``unregister`` does, and then writes the new claim in
  the place of the old one.

A worker, or a repeated call, finishes these steps if it finds an unfinished claim.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from waymark.domain.names import BY_CLIENT, PublisherName, Registration
from waymark.domain.rows import FORMAT
from waymark.errors import Conflict, InvalidValue, StoreUnavailable
from waymark.logs import fields
from waymark.shown import shown
from waymark.store import keys
from waymark.store.activity import Kind, about
from waymark.store.claims import Claim
from waymark.store.client import RedisClient
from waymark.store.directory import Directory
from waymark.store.leases import Leases, random_nonce
from waymark.store.scripts import Outcome, Scripts, Verdict

log = logging.getLogger(__name__)

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
    "object_shards": "shards",
    "topic": "topic",
}

#: Where a weight is kept that is not a client's to change.
_WEIGHT_IS_GIVEN = {"discovery": "the annotations of its pod", "file": "the file of publishers"}

#: Fields that stand beside the tenants in an answer of ``/query``.
RESERVED_TENANTS = frozenset({"instances", "explanation"})


class Registry:
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
        """``note`` is that of the activity."""
        self._client = client
        self._directory = directory
        self._scripts = scripts
        self._leases = leases
        self._shards = shards
        self._hash_seed = hash_seed
        self._note = note

    async def register(self, registration: Registration) -> bool:
        """Register a publisher. True: it is new or has changed; False: the same registration exists.

        Another endpoint begins a new life. A change of the target fields does not interrupt the stream.

        Raises Conflict, with the field, if the publisher is registered with another model, block size, type, adapter,
        salt or scope, or if its registration cannot be read; InvalidValue if its tenant may not be named so. Nothing
        changes then.
        """
        if registration.tenant_id in RESERVED_TENANTS:
            raise InvalidValue(
                f"tenant_id is {shown(registration.tenant_id)}, which is a field of answers; choose another name",
                field="tenant_id",
            )
        has_moved, before = False, None
        for _ in range(_ATTEMPTS):
            claim = await self._directory.claim(registration.name)
            if claim is None:
                if await self._claim_anew(registration, None):
                    return True
            elif claim.is_leaving:
                await self.finish(claim)
            else:
                _check_same(claim.registration, registration)
                if claim.registration.origin == BY_CLIENT and registration.origin.kind != "url":
                    # A client has registered it, so that only a client may unregister it.
                    registration = replace(registration, origin=BY_CLIENT)
                if claim.registration == registration and await self._is_begun(claim):
                    return has_moved
                changed = replace(claim, registration=registration)
                if claim.registration != registration and claim.has_stream_of(changed):
                    if before is None:
                        before = claim.registration.target.weight
                    kept = await self._replace(registration.name, claim.raw, changed)
                    if kept is not None and await self._is_begun(kept):
                        await self._client.publish(keys.CONTROL, "registered")
                        self._note_weight(registration, before)
                        return True
                    continue
                # A new endpoint begins a new life: the state of the old stream is invalid.
                moving = replace(claim, is_leaving=True, successor=registration)
                marked = await self._replace(registration.name, claim.raw, moving)
                if marked is not None:
                    has_moved = True
                    await self.finish(marked)
        raise _contended(registration.name)

    async def set_weight(self, name: PublisherName, weight: float) -> bool:
        """Change the weight of a target and nothing else; False if the name is not registered.

        Raises Conflict, with the field, if discovery or the file of publishers sets the weight: it would set it again.
        """
        before = None  # of the first attempt: a later one may find its change
        for _ in range(_ATTEMPTS):
            claim = await self._directory.claim(name)
            if claim is None or claim.is_leaving:
                return False
            registration = claim.registration
            if registration.origin.kind in _WEIGHT_IS_GIVEN:
                raise Conflict(
                    f"the weight of {_show(name.instance_id)} comes from {_WEIGHT_IS_GIVEN[registration.origin.kind]}, "
                    "which would undo a change; set it there",
                    field="instance_id",
                )
            if before is None:
                before = registration.target.weight
            target = replace(registration.target, weight=weight)
            changed = replace(claim, registration=replace(registration, target=target))
            kept = await self._replace(name, claim.raw, changed)
            if kept is not None and await self._is_begun(kept):
                await self._client.publish(keys.CONTROL, "registered")
                self._note_weight(changed.registration, before)
                return True
        raise _contended(name)

    def _note_weight(self, registration: Registration, before: float) -> None:
        """Note that a target has another weight, if it has."""
        weight = registration.target.weight
        if weight != before:
            kind = Kind.WEIGHT if weight and before else Kind.RESUME if weight else Kind.DRAIN
            self._note(kind, **about(registration), detail=f"weight {before:g}, now {weight:g}")

    async def check(self, registration: Registration) -> None:
        """Raise the Conflict that ``register`` would raise now."""
        claim = await self._directory.claim(registration.name)
        if claim is not None and not claim.is_leaving:
            _check_same(claim.registration, registration)

    async def restore(self, registration: Registration) -> None:
        """Register a publisher that Redis has lost, unless a client has since registered or unregistered it.

        Raises Conflict if the entry of the publisher or of its group cannot be read.
        """
        if await self._directory.claim(registration.name) is None:
            await self._claim_anew(registration, None, is_restored=True)

    async def _claim_anew(self, registration: Registration, before: Claim | None, *, is_restored: bool = False) -> bool:
        """Claim a publisher under new ids, in the place of ``before``; False if Redis has another claim there."""
        above = publisher_above = 0
        for _ in range(_ATTEMPTS):
            ids = await self._scripts.new_ids(
                keys.GROUPS,
                keys.group_field(registration.group),
                self._shards,
                above,
                publisher_above,
                self._hash_seed,
                FORMAT,
            )
            if not ids.is_applied:
                raise Conflict(
                    f"model {_show(registration.model_name)} of tenant {_show(registration.tenant_id)} has an entry in "
                    f"{keys.GROUPS} that this release cannot read; register with the release that wrote it",
                    field="modelname",
                )
            group_id, shards, publisher = ids.numbers
            claim = Claim(registration, publisher, group_id, shards)
            expected = b"" if before is None else before.raw
            claimed = await self._replace(registration.name, expected, claim, is_restored=is_restored)
            if claimed is None:
                return False
            clash = await self._clash(claimed)
            if clash is None and await self._confirm(claimed):
                await self._client.publish(keys.CONTROL, "registered")
                self._note(Kind.REGISTERED, **about(registration), detail="put back" if is_restored else "")
                return True
            # Another claim has one of its ids, or another caller has changed the claim meanwhile.
            if clash is None:
                await self._end(claimed)
            before = claimed
            above = group_id if clash == "group" else above
            publisher_above = publisher
        raise _contended(registration.name)

    async def begin(self, claim: Claim) -> bool:
        """Write the record and the row of a claim, if they are missing.

        False if the claim is not in Redis any more, or has an id that is another claim's. In the second case the claim
        gets new ids.
        """
        if await self._is_begun(claim):
            return True
        now = await self._directory.claim(claim.registration.name)
        if now is not None and now.raw == claim.raw and not now.is_leaving:
            log.warning(
                "the ids of a registration are those of another one; it gets new ids",
                extra=fields(stream=str(claim.registration.name)),
            )
            await self._end(claim)
            await self._claim_anew(claim.registration, claim)
        return False

    async def _is_begun(self, claim: Claim) -> bool:
        return await self._clash(claim) is None and await self._confirm(claim)

    async def _clash(self, claim: Claim) -> Literal["group", "publisher"] | None:
        """Begin the record. Return which id another claim has, as can happen after a failover, or None."""
        outcome = await self._begin(claim)
        if outcome.verdict is Verdict.GONE:
            await self._leases.end_without_record(claim)
            outcome = await self._begin(claim)
        if outcome.verdict is Verdict.OTHER:
            return "publisher" if outcome.numbers[0] else "group"
        return None

    async def _begin(self, claim: Claim) -> Outcome:
        return await self._scripts.begin_publisher(
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

    async def _confirm(self, claim: Claim) -> bool:
        """Whether a claim that has begun is still in Redis, under the same ids."""
        group, name = keys.group_field(claim.registration.group), keys.publisher_field(claim.registration.name)
        raw, entry = await self._client.several([("HGET", keys.PUBLISHERS, name), ("HGET", keys.GROUPS, group)])
        if raw != claim.raw:
            now = None if raw is None else self._directory.decode(name, raw)
            if now is not None and now.has_stream_of(claim):
                return await self._is_begun(now)  # its target has changed meanwhile: the table must have the newer one
            await self._end(claim)  # unregistered before it began: no other call would end it
            return False
        if entry == b"%d %d" % (claim.group_id, claim.shards):
            return True
        # After a failover Redis may not know that the ids are in use. Then queries would not find the group.
        kept = await self._scripts.keep_ids(keys.GROUPS, group, claim.group_id, claim.shards, claim.publisher, FORMAT)
        return kept.is_applied

    async def put_back(self, claim: Claim) -> bool:
        """Write a claim again if Redis has lost it; return whether Redis had lost it.

        ``unregister`` deletes the record before the claim. So if a record exists without a claim, Redis has
        lost the claim: its last writes were lost, or a primary of a Cluster came back empty. Without the claim no call
        would end the publisher, and answers would count its blocks permanently.
        """
        name = claim.registration.name
        if await self._client.hget(keys.record(claim.group_id, claim.publisher), "name") != keys.publisher_field(name):
            return False
        kept = await self._replace(name, b"", claim, is_restored=True)
        if kept is not None:
            await self._is_begun(kept)  # a worker that saw no claim may be about to end it
        else:
            other = await self._directory.claim(name)
            if other is not None and other.publisher != claim.publisher:
                await self._end(claim)  # registered again meanwhile
        return True

    async def unregister(self, names: Sequence[PublisherName]) -> list[PublisherName]:
        """Remove publishers, and return those that were registered. Answers no longer count their blocks afterwards.

        A name without a registration is noted, too, because Redis may have lost its claim: ``restore`` then does not
        register it again. Raises Conflict if a registration cannot be read; nothing changes then.
        """
        found = [(name, await self._directory.claim(name)) for name in names]
        claims = [claim for _, claim in found if claim is not None]
        for name, claim in found:
            if claim is None:
                await self._write_claim(name, b"", b"")
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
            if marked is None:  # another caller was faster, and may not have finished
                marked = await self._directory.claim(name)
                if marked is None or marked.publisher != claim.publisher:
                    return
            claim = marked
        raise _contended(claim.registration.name)

    async def clear(self, claim: Claim) -> bool:
        """End the life of a publisher: answers count none of its blocks or prefixes any more. False if it is gone.

        The worker that applies its stream loses the lease and takes it again. With a replay endpoint the stream replays
        all batches; without one it continues with the next batch.
        """
        grant = await self._leases.take(claim, "clear", 5.0, force=True)
        if grant is None:
            return False
        try:
            above = await self._leases.highest_holder(grant)
            if above is None:
                return False
            nonce = random_nonce()
            outcome = await self._scripts.new_life(
                keys.holders(grant.group_id),
                grant.record,
                keys.fence(grant.group_id, 0),
                keys.dead(grant.group_id),
                grant.publisher,
                grant.token,
                grant.calls.get(0, 0),
                "",
                nonce,
                above,
                "*",
                nonce,
                [],
            )
            return outcome.is_applied
        finally:
            await self._leases.drop(grant)

    async def finish(self, claim: Claim) -> None:
        """End a publisher whose claim is leaving. Then delete the claim, or write its successor in its place."""
        await self._end(claim)
        if claim.successor is not None:
            await self._claim_anew(claim.successor, claim)
        else:
            if await self._withdraw(claim):
                self._note(Kind.UNREGISTERED, **about(claim.registration))
            await self._client.publish(keys.CONTROL, "unregistered")

    async def _end(self, claim: Claim) -> None:
        """End a publisher, unless its id is another's, as can happen after a failover."""
        name = await self._client.hget(keys.record(claim.group_id, claim.publisher), "name")
        if name not in (None, keys.publisher_field(claim.registration.name)):
            return
        for attempt in range(_ATTEMPTS):
            grant = await self._leases.take(claim, "unregister", 5.0, force=True)
            if grant is None:
                await self._leases.end_without_record(claim)  # in most cases the table has no row of it either
                return
            if await self._leases.end(grant):
                return
            # Another caller ends it, too. Without a pause, two callers would take the lease from each other endlessly.
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
        raise _contended(claim.registration.name)

    async def _replace(
        self, name: PublisherName, expected: bytes, claim: Claim, *, is_restored: bool = False
    ) -> Claim | None:
        """Compare and set: the claim as written, or None if Redis had another value than ``expected``.

        With ``is_restored`` the claim is not written if the publisher was unregistered in this incarnation of Redis.
        """
        raw = claim.encode()
        is_set = await self._write_claim(name, expected, raw, is_restored=is_restored)
        return replace(claim, raw=raw) if is_set else None

    async def _withdraw(self, claim: Claim) -> bool:
        """Delete a claim, if it has not changed since it was read."""
        return await self._write_claim(claim.registration.name, claim.raw, b"")

    async def _write_claim(
        self, name: PublisherName, expected: bytes, raw: bytes, *, is_restored: bool = False
    ) -> bool:
        outcome = await self._scripts.claim_publisher(
            keys.PUBLISHERS, keys.UNREGISTERED, keys.publisher_field(name), expected, raw, "1" if is_restored else "0"
        )
        return outcome.is_applied


def _contended(name: PublisherName) -> StoreUnavailable:
    return StoreUnavailable(
        f"publisher {_show(name)}: other requests change its registration at the same time; try again"
    )


def _check_same(old: Registration, new: Registration) -> None:
    for attribute, field in _FIXED.items():
        before, after = getattr(old, attribute), getattr(new, attribute)
        if before != after:
            # A salt may be a secret of its tenant; it is compared, never shown.
            is_secret = field == "additionalsalt"
            difference = f"another {field}" if is_secret else f"{field} {_show(before)}, not {_show(after)}"
            raise Conflict(
                f"publisher {_show(old.name)} is registered with {difference}; "
                "unregister it first, or use another instance_id or dp_rank",
                field=field,
            )


def _show(value: object) -> str:
    return shown(str(value) if isinstance(value, PublisherName) else value)
