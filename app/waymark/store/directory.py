"""Reads the claims, groups and tenants in Redis, without writing.

A query replica needs no more of the registry than this module. ``EngineAddresses`` has the addresses at which the
engines of a group take requests, for questions that any engine can answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, NamedTuple, TypeVar

from waymark.base.errors import Conflict
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.domain.names import GroupName, PublisherName, Registration
from waymark.domain.status import RecordKind
from waymark.store import keys
from waymark.store.claims import SHARDS_MAX, Claim
from waymark.store.holder_tables import decode_group
from waymark.store.parsing import Malformed, RecordParser, integer_of, names_of
from waymark.store.redis.client import RedisClient

T = TypeVar("T")

#: The claims decoded in one turn of the event loop; ten thousand take a third of a second.
_SLICE_CLAIMS = 256
#: A process that polls reads all claims again after half to all of this time, even without a change.
_WHOLE_SECONDS = 60.0
#: How long ``EngineAddresses`` uses the registrations that it has read.
_ADDRESSES_SECONDS = 1.0


class GroupEntry(NamedTuple):
    group_id: int
    shards: int


class Directory:
    """Claims, groups and tenants of one Redis. An entry that cannot be read is skipped, counted and logged once."""

    def __init__(self, client: RedisClient, parser: RecordParser) -> None:
        self._client = client
        self._parser = parser
        self._decoded: dict[bytes, Claim] = {}
        """The claims of the last list, by their bytes in Redis."""
        self._tenants = _Tenants()
        self.writes = 0
        """How many claims this process has written. A cache of registrations reads them again after a write, so that an
        acknowledged registration is known at once.
        """

    async def claim(self, name: PublisherName) -> Claim | None:
        """Return the publisher's claim, or None. Raise Conflict if the claim cannot be read."""
        field = keys.publisher_field(name)
        raw = await self._client.hget(keys.PUBLISHERS, field)
        if raw is None:
            return None
        claim = self.decode(field, raw)
        if claim is None:
            raise Conflict(
                f"publisher {shown(str(name))} has a registration that this release cannot read; change it with the "
                f"release that wrote it, or delete its field of {keys.PUBLISHERS}",
                field="instance_id",
            )
        return claim

    def decode(self, field: bytes, raw: bytes) -> Claim | None:
        return self._parser.parse(RecordKind.REGISTRATION, keys.PUBLISHERS, field, Claim.decode_field, field, raw)

    async def claims(self) -> list[Claim]:
        """Return every claim that can be read, including those of leaving publishers, in order of registration."""
        raw_claims = await self._client.hgetall(keys.PUBLISHERS)
        self._parser.forget(keys.PUBLISHERS, raw_claims.keys())
        cache, decoded = self._decoded, dict[bytes, Claim]()
        for number, (field, raw) in enumerate(raw_claims.items(), 1):
            claim = cache.get(field)
            if claim is None or claim.raw != raw:
                claim = self.decode(field, raw)
                if number % _SLICE_CLAIMS == 0:
                    await asyncio.sleep(0)
            if claim is not None:
                decoded[field] = claim
        self._decoded = decoded
        return sorted(decoded.values(), key=lambda claim: claim.publisher)

    async def registrations(self) -> list[Registration]:
        """Return every registration, in order."""
        return [claim.registration for claim in await self.claims() if not claim.is_leaving]

    async def is_tenant_known(self, tenant_id: str) -> bool:
        """Return whether the tenant has a registration, of any model.

        This method reads the list of tenants again only if registrations have changed. So the cost of a query for an
        unknown tenant does not grow with the number of registrations.
        """
        state = await self._client.several(
            (("GET", keys.INCARNATION), ("HGET", keys.GROUPS, "last_publisher"), ("HLEN", keys.PUBLISHERS))
        )
        if self._tenants.state != state:
            fields = await self._client.hkeys(keys.PUBLISHERS)
            self._tenants = _Tenants(state, frozenset(filter(None, map(_tenant_of, fields))))
        return tenant_id in self._tenants.ids

    async def group(self, group: GroupName) -> GroupEntry | None:
        """Return the group's id and shards, or None if the group never had a registration, or its entry cannot be
        read.
        """
        field = keys.group_field(group)
        value = await self._client.hget(keys.GROUPS, field)
        return None if value is None else self._parser.parse(RecordKind.GROUP, keys.GROUPS, field, _entry, value)

    async def groups(self) -> dict[GroupName, GroupEntry]:
        """Return every group whose entry can be read."""
        raw_groups = await self._client.hgetall(keys.GROUPS)
        self._parser.forget(keys.GROUPS, raw_groups.keys())
        groups: dict[GroupName, GroupEntry] = {}
        for field, value in raw_groups.items():
            if field not in _COUNTERS:
                named = self._parser.parse(RecordKind.GROUP, keys.GROUPS, field, _named_entry, field, value)
                if named is not None:
                    groups[named[0]] = named[1]
        return groups


@record(frozen=True, slots=True)
class _Tenants:
    """The tenants with a registration, valid for one state of Redis: incarnation, last id and number of claims."""

    state: list[bytes | int | None] | None = None
    ids: frozenset[str] = frozenset()


class PolledClaims:
    """All claims, for callers that poll, and for requests: they are read again when one has changed, so that a poll
    costs two short replies, however many claims there are.

    Each write of a claim replaces the nonce in ``wm:version:{wm:publishers}``. The number of claims shows a claim that
    was deleted by hand. Once a minute all claims are read without a reason, in case one was changed by hand or by an
    earlier release.
    """

    def __init__(self, client: RedisClient, directory: Directory) -> None:
        self._client = client
        self._directory = directory
        self._state: list[bytes | int | None] = [None, 0]
        """The version and the number of claims before the last reading."""
        self._claims: list[Claim] = []
        self._until = float("-inf")
        """When they are read again."""
        self._registrations: Sequence[Registration] = ()
        self._of_instances: dict[tuple[str, str], list[Registration]] | None = None
        """The registrations by instance and tenant, once they were asked for."""

    async def poll(self) -> list[Claim]:
        """Return every claim that can be read, including those of leaving publishers, in order of registration. The
        list stays the same one until a claim has changed.
        """
        state = await self._client.several((("GET", keys.PUBLISHERS_VERSION), ("HLEN", keys.PUBLISHERS)))
        # A Redis that came back empty has no version, and neither has one that only an earlier release has written to.
        if state != self._state or state[0] is None or monotonic() >= self._until:
            claims = await self._directory.claims()
            if state != self._state or claims != self._claims:
                self._claims = claims
                self._registrations = [claim.registration for claim in claims if not claim.is_leaving]
                self._of_instances = None
            self._state = state
            # Workers see a change at the same time, and should not all read the claims again at the same time.
            self._until = monotonic() + random.uniform(_WHOLE_SECONDS / 2, _WHOLE_SECONDS)
        return self._claims

    async def registrations(self) -> Sequence[Registration]:
        """Return every registration, in order, as ``Directory`` does. The list stays the same one as in ``poll``."""
        await self.poll()
        return self._registrations

    async def registrations_of(self, instance_id: str, tenant_id: str) -> Sequence[Registration]:
        """Return the registrations of an instance, in order."""
        await self.poll()
        if self._of_instances is None:
            self._of_instances = {}
            for registration in self._registrations:
                of_instance = self._of_instances.setdefault((registration.instance_id, registration.tenant_id), [])
                of_instance.append(registration)
        return self._of_instances.get((instance_id, tenant_id), ())


class FromClaims(Generic[T]):
    """A value that is computed from the claims that are not leaving, and again when one has changed."""

    def __init__(self, polled_claims: PolledClaims, compute: Callable[[Sequence[Claim]], T]) -> None:
        self._polled_claims = polled_claims
        self._compute = compute
        self._claims: Sequence[Claim] = ()
        self.value = compute(())
        """The value of the last call."""

    async def __call__(self) -> T:
        """Return the value. Raise StoreUnavailable if Redis is unavailable."""
        claims = await self._polled_claims.poll()
        if claims is not self._claims:
            self.value = self._compute([claim for claim in claims if not claim.is_leaving])
            self._claims = claims
        return self.value


#: Fields of ``wm:groups`` without a group.
_COUNTERS = frozenset({b"last_group", b"last_publisher", b"hash_seed", b"format"})


def _entry(value: bytes) -> GroupEntry:
    group_id, _, shards = value.partition(b" ")
    entry = GroupEntry(integer_of(group_id, "the group's id"), integer_of(shards, "the number of shards"))
    if not (entry.group_id and 1 <= entry.shards <= SHARDS_MAX):
        raise Malformed(f"the group's id is 0, or it has not 1..{SHARDS_MAX} shards")
    return entry


def _tenant_of(field: bytes) -> str | None:
    """Return the tenant in a field that names a publisher, or None for any other field, which the parser reports."""
    try:
        tenant_id = names_of(field, (3, 4), "it")[1]
    except Malformed:
        return None
    return tenant_id if isinstance(tenant_id, str) else None


def _named_entry(field: bytes, value: bytes) -> tuple[GroupName, GroupEntry]:
    return decode_group(field), _entry(value)


class EngineAddresses:
    """The addresses of registered instances. They are read again after a second, and after a write of this process."""

    def __init__(self, directory: Directory, polled_claims: PolledClaims) -> None:
        self._directory = directory
        self._addresses = FromClaims(polled_claims, _addresses_of)
        self._until = float("-inf")
        self._writes = 0

    async def __call__(self, group: GroupName) -> Sequence[str]:
        """Return the addresses of the group's engines, in order of registration. Raise StoreUnavailable if Redis is
        unavailable.
        """
        writes = self._directory.writes
        if monotonic() >= self._until or writes != self._writes:
            await self._addresses()
            self._until, self._writes = monotonic() + _ADDRESSES_SECONDS, writes
        return self._addresses.value.get(group, ())


def _addresses_of(claims: Sequence[Claim]) -> dict[GroupName, list[str]]:
    addresses: dict[GroupName, list[str]] = {}
    for claim in claims:
        registration = claim.registration
        if registration.target.address is not None and registration.scope == "instance":
            addresses.setdefault(registration.group, []).append(registration.target.address)
    return addresses
