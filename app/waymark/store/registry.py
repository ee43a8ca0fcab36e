"""Registers, changes and unregisters publishers in steps, which a crash may interrupt at any point.

- ``register`` writes the claim into ``wm:publishers`` first, then the publisher's record and its row in the table.
- ``unregister`` marks the claim as leaving, ends the publisher, and deletes the claim last.
- A publisher with a new endpoint moves: ``register`` takes the steps of ``unregister``, and then writes the new claim
  in the place of the old one.

A worker, or a repeated call, finishes these steps if it finds an unfinished claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from waymark.base.errors import Conflict, InvalidValue
from waymark.base.shown import shown
from waymark.domain.names import BY_CLIENT, PublisherName, Registration
from waymark.store import keys
from waymark.store.activity import ActivityKind, about
from waymark.store.claim_writer import ATTEMPTS, ClaimWriter, contended
from waymark.store.claims import Claim
from waymark.store.directory import Directory
from waymark.store.leases import Leases
from waymark.store.records import Records
from waymark.store.redis.client import RedisClient

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

#: The sources of weights that a client cannot change.
_WEIGHT_IS_GIVEN = {"discovery": "the annotations of its pod", "file": "the file of publishers"}

#: Fields that appear next to the tenants in an answer of ``/query``.
RESERVED_TENANTS = frozenset({"instances", "explanation"})


class Registry:
    def __init__(
        self,
        client: RedisClient,
        records: Records,
        leases: Leases,
        directory: Directory,
        claims: ClaimWriter,
        *,
        note: Callable[..., None],
    ) -> None:
        """``note`` is the method ``Activity.note``."""
        self._client = client
        self._directory = directory
        self._records = records
        self._leases = leases
        self._claims = claims
        self._note = note

    async def register(self, registration: Registration, *, is_known: bool = False) -> bool:
        """Register a publisher. Return True if it is new or has changed, and False if the same registration exists.

        Another endpoint begins a new life. A change of the target fields does not interrupt the stream. With
        ``is_known`` a publisher that has been unregistered stays unregistered, and the result is False.

        Raises Conflict, with the field, if the publisher is registered with another model, block size, type, adapter,
        salt or scope, or if its registration cannot be read; InvalidValue if its tenant may not have this name. Nothing
        changes then.
        """
        if registration.tenant_id in RESERVED_TENANTS:
            raise InvalidValue(
                f"tenant_id is {shown(registration.tenant_id)}, which is a field of answers; choose another name",
                field="tenant_id",
            )
        has_moved, old_weight = False, None
        for _ in range(ATTEMPTS):
            claim = await self._directory.claim(registration.name)
            if claim is None:
                if is_known:
                    return has_moved
                if await self._claims.write_new(registration, None):
                    return True
            elif claim.is_leaving:
                await self._claims.finish(claim)
            else:
                _check_same(claim.registration, registration)
                if claim.registration.origin == BY_CLIENT and registration.origin.kind != "url":
                    # A client has registered the publisher, so only a client may unregister it.
                    registration = replace(registration, origin=BY_CLIENT)
                if claim.registration == registration and await self._claims.is_begun(claim):
                    return has_moved
                changed = replace(claim, registration=registration)
                if claim.registration != registration and claim.has_stream_of(changed):
                    if old_weight is None:
                        old_weight = claim.registration.target.weight
                    if await self._change_target(claim, changed, old_weight):
                        return True
                    continue
                # A new endpoint begins a new life: the state of the old stream is invalid.
                moving = replace(claim, is_leaving=True, successor=registration)
                marked = await self._claims.replace(registration.name, claim.raw, moving)
                if marked is not None:
                    has_moved = True
                    await self._claims.finish(marked)
        raise contended(registration.name)

    async def register_several(
        self, registrations: Sequence[Registration], *, known: Set[PublisherName] = frozenset()
    ) -> dict[PublisherName, bool]:
        """Register many publishers in a few round trips. Return whether each one is new.

        The result lacks those that need more steps, for example because a registration changes or a name is refused:
        ``register`` registers them, or says why not. It also lacks a name of ``known`` that was unregistered meanwhile.
        """
        return await self._claims.write_several(
            [registration for registration in registrations if registration.tenant_id not in RESERVED_TENANTS], known
        )

    async def set_weight(self, name: PublisherName, weight: float) -> bool:
        """Change only the weight of a target. Return False if the name is not registered.

        Raise Conflict, with the field, if discovery or the publishers file sets the weight and would undo the change.
        """
        old_weight = None  # the weight before the first attempt: a later attempt may read the weight that it has set
        for _ in range(ATTEMPTS):
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
            if old_weight is None:
                old_weight = registration.target.weight
            target = replace(registration.target, weight=weight)
            changed = replace(claim, registration=replace(registration, target=target))
            if await self._change_target(claim, changed, old_weight):
                return True
        raise contended(name)

    async def _change_target(self, claim: Claim, changed: Claim, old_weight: float) -> bool:
        """Write a claim with another target; False if another call changes the publisher at the same time.

        ``old_weight`` is the weight that the target had.
        """
        stored = await self._claims.replace(claim.registration.name, claim.raw, changed)
        if stored is None or not await self._claims.is_begun(stored):
            return False
        await self._client.publish(keys.CONTROL, "registered")
        registration, weight = changed.registration, changed.registration.target.weight
        if weight != old_weight:
            kind = (
                ActivityKind.WEIGHT if weight and old_weight else ActivityKind.RESUME if weight else ActivityKind.DRAIN
            )
            self._note(kind, **about(registration), detail=f"weight {old_weight:g}, now {weight:g}")
        return True

    async def check(self, registration: Registration) -> None:
        """Raise the Conflict that ``register`` would raise now."""
        claim = await self._directory.claim(registration.name)
        if claim is not None and not claim.is_leaving:
            _check_same(claim.registration, registration)

    async def register_all(self, registrations: Sequence[Registration]) -> None:
        """Register publishers, or none of them if one contradicts an earlier registration, as far as is known before.
        Raise Conflict.
        """
        for registration in registrations:
            await self.check(registration)
        for registration in registrations:
            await self.register(registration)

    async def restore(self, registration: Registration) -> None:
        """Register a publisher that Redis has lost, unless a client has since registered or unregistered it.

        Raises Conflict if the entry of the publisher or of its group cannot be read.
        """
        if await self._directory.claim(registration.name) is None:
            await self._claims.write_new(registration, None, is_restored=True)

    async def unregister(self, names: Sequence[PublisherName]) -> list[PublisherName]:
        """Remove publishers, and return those that were registered. Answers no longer count their blocks afterwards.

        A name without a registration is noted, too, because Redis may have lost its claim: ``restore`` then does not
        register it again. Raise Conflict, before any change, if a registration cannot be read.
        """
        pairs = [(name, await self._directory.claim(name)) for name in names]
        claims = [claim for _, claim in pairs if claim is not None]
        for name, claim in pairs:
            if claim is None:
                await self._claims.note_unregistered(name)
        for claim in claims:
            await self._leave(claim)
        return [claim.registration.name for claim in claims]

    async def _leave(self, claim: Claim) -> None:
        for _ in range(ATTEMPTS):
            if claim.is_leaving and claim.successor is None:
                await self._claims.finish(claim)
                return
            name = claim.registration.name
            marked = await self._claims.replace(name, claim.raw, replace(claim, is_leaving=True, successor=None))
            if marked is None:  # another caller was faster, but may not have finished
                marked = await self._directory.claim(name)
                if marked is None or marked.publisher != claim.publisher:
                    return
            claim = marked
        raise contended(claim.registration.name)

    async def clear(self, claim: Claim) -> bool:
        """End the life of a publisher, so that answers no longer count its blocks and prefixes. Return False if it is
        gone.

        The worker that applies its stream loses the lease and takes it again. With a replay endpoint the stream replays
        all batches; without one it continues with the next batch.
        """
        grant = await self._leases.take(claim, "clear", 5.0, force=True)
        if grant is None:
            return False
        try:
            highest = await self._leases.highest_holder(grant)
            if highest is None:
                return False
            holders = await self._records.new_life(grant, unit="*", is_restart=True, begin=[], above=highest)
            return holders is not None
        finally:
            await self._leases.drop(grant)


def _check_same(old: Registration, new: Registration) -> None:
    for attribute, field in _FIXED.items():
        old_value, new_value = getattr(old, attribute), getattr(new, attribute)
        if old_value != new_value:
            # A salt may be a secret of its tenant; it is compared, never shown.
            is_secret = field == "additionalsalt"
            difference = f"another {field}" if is_secret else f"{field} {_show(old_value)}, not {_show(new_value)}"
            raise Conflict(
                f"publisher {_show(old.name)} is registered with {difference}; "
                "unregister it first, or use another instance_id or dp_rank",
                field=field,
            )


def _show(value: object) -> str:
    return shown(str(value) if isinstance(value, PublisherName) else value)
