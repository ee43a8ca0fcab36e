"""Reads the claims, groups and tenants in Redis, without writing.

A query replica needs no more of the registry than this module. ``EngineAddresses`` has the addresses at which the
engines of a group take requests, for questions that any engine can answer.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
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
from waymark.store.parsing import Malformed, RecordParser, integer_of, names_of, pairs
from waymark.store.redis.client import RedisClient

T = TypeVar("T")

#: The claims decoded in one turn of the event loop; ten thousand take a third of a second.
_SLICE_CLAIMS = 256
#: A process that polls asks for this many changes, and for more if it has missed some.
_FEW_CHANGES, _CHANGES_MAX = 4, 1000
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
        self._decoded: dict[bytes, Claim | None] = {}
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
        return _in_order((await self.by_field()).values())

    async def by_field(self) -> dict[bytes, Claim | None]:
        """Return all claims by the names of their fields; None for one that cannot be read."""
        raw_claims = await self._client.hgetall(keys.PUBLISHERS)
        self._parser.forget(keys.PUBLISHERS, raw_claims.keys())
        cache, decoded = self._decoded, dict[bytes, Claim | None]()
        for number, (field, raw) in enumerate(raw_claims.items(), 1):
            claim = cache.get(field)
            if claim is None or claim.raw != raw:
                claim = self.decode(field, raw)
                if number % _SLICE_CLAIMS == 0:
                    await asyncio.sleep(0)
            decoded[field] = claim
        self._decoded = decoded
        return decoded

    async def some(self, fields: Collection[bytes]) -> dict[bytes, Claim | None]:
        """Return the claims in these fields, as ``by_field`` does."""
        (raw_claims,) = await self._client.several([("HMGET", keys.PUBLISHERS, *fields)]) if fields else ((),)
        return {
            field: self.decode(field, raw) for field, raw in zip(fields, raw_claims, strict=True) if raw is not None
        }

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

    async def other_format(self) -> str | None:
        """Return why this release cannot use the index in this Redis, as a sentence; None if it can, or if it is empty.

        The format is written with the first group. The last group has been in every index with one since the first
        release.
        """
        version, last_group = await self._client.hmget(keys.GROUPS, "format", "last_group")
        if version == keys.FORMAT.encode() or (version is None and last_group is None):
            return None
        name = "none" if version is None else shown(version.decode(errors="replace"))
        return (
            f"the index in this Redis has another format (found: {name}, wanted: {shown(keys.FORMAT)}): stop all "
            "processes of Waymark, run 'waymark reset --yes' or use another database or WAYMARK_KEY_PREFIX, and start "
            "them again; engines with a replay endpoint then send their blocks again"
        )

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
    """All claims, for callers that poll, and for requests: one is read again when it has changed, so that a poll costs
    two short replies, however many claims there are.

    Each write of a claim adds its name to ``wm:changes:{wm:publishers}``, with a nonce. If the nonce of the last poll
    is not there, Redis came back empty or without its last writes, or has changed too much; then all claims are read.
    The number of claims shows a claim that was deleted by hand. Once a minute all claims are read without a reason, in
    case one was changed by hand.
    """

    def __init__(self, client: RedisClient, directory: Directory) -> None:
        self._client = client
        self._directory = directory
        self._nonce: bytes | None = None
        """The nonce of the last change before the last reading."""
        self._by_field: dict[bytes, Claim | None] = {}
        self._claims: list[Claim] = []
        """The claims that can be read, in order of registration."""
        self._until = float("-inf")
        """When they are read again."""
        self._registrations: tuple[Sequence[Claim], Sequence[Registration]] = (), ()
        """The claims when all registrations were last asked for, and these."""
        self._of_instances: dict[tuple[str, str], dict[bytes, Claim]] | None = None
        """The claims by instance and tenant, and then by field, once they were asked for."""

    async def poll(self) -> list[Claim]:
        """Return every claim that can be read, including those of leaving publishers, in order of registration. The
        list stays the same one until a claim has changed.
        """
        changes, count = await self._last_changes(_FEW_CHANGES)
        # A Redis that came back empty has no changes.
        if not changes or monotonic() >= self._until or not await self._read_changed(changes, count):
            self._by_field = dict(await self._directory.by_field())
            claims, nonce = _in_order(self._by_field.values()), next(iter(changes), None)
            if nonce != self._nonce or claims != self._claims:
                self._claims = claims  # another list even if a Redis that came back empty has the same claims again
            self._nonce, self._of_instances = nonce, None
            # Workers see a change at the same time, and should not all read the claims again at the same time.
            self._until = monotonic() + random.uniform(_WHOLE_SECONDS / 2, _WHOLE_SECONDS)
        return self._claims

    async def _last_changes(self, most: int) -> tuple[dict[bytes, bytes], int]:
        """Return the names of the claims that were changed last, by the nonces of the changes, newest first, and the
        number of claims.
        """
        entries, count = await self._client.several(
            (("XREVRANGE", keys.PUBLISHERS_CHANGES, "+", "-", "COUNT", most), ("HLEN", keys.PUBLISHERS))
        )
        changes = (dict(pairs(entry)) for _, entry in entries)
        return {change[b"nonce"]: change[b"publisher"] for change in changes}, count

    async def _read_changed(self, changes: Mapping[bytes, bytes], count: int) -> bool:
        """Read the claims that have changed since the last reading. Return False if all must be read."""
        while True:
            last_nonce = self._nonce
            if last_nonce not in changes:
                changes, count = await self._last_changes(_CHANGES_MAX)
            if last_nonce is None or last_nonce not in changes:
                return False
            names = set(islice(changes.values(), list(changes).index(last_nonce)))
            if not names:
                return count == len(self._by_field)
            present = await self._directory.some(names)
            if self._nonce == last_nonce:
                break
            # Another call was faster. Its claims may be newer than these, and it may not know the last changes.
            changes, count = await self._last_changes(_FEW_CHANGES)
        claims = self._claims.copy()
        for name in names:
            self._change(claims, name, present)
        self._nonce = next(iter(changes))
        if claims != self._claims:
            self._claims = claims
        return count == len(self._by_field)

    def _change(self, claims: list[Claim], name: bytes, present: Mapping[bytes, Claim | None]) -> None:
        """Replace one claim, also in ``claims``, by that in ``present``, if there is one."""
        old, new = self._by_field.pop(name, None), present.get(name)
        if name in present:
            self._by_field[name] = new
        if old is not None:
            del claims[claims.index(old, bisect_left(claims, old.publisher, key=_publisher_of))]
        if new is not None:
            insort(claims, new, key=_publisher_of)
        if self._of_instances is not None:
            if old is not None:
                del self._of_instances[_instance_of(old)][name]
            if new is not None:
                self._of_instances.setdefault(_instance_of(new), {})[name] = new

    async def registrations(self) -> Sequence[Registration]:
        """Return every registration, in order, as ``Directory`` does. The list stays the same one as in ``poll``."""
        claims = await self.poll()
        if claims is not self._registrations[0]:
            self._registrations = claims, [claim.registration for claim in claims if not claim.is_leaving]
        return self._registrations[1]

    async def registrations_of(self, instance_id: str, tenant_id: str) -> Sequence[Registration]:
        """Return the registrations of an instance, in order."""
        await self.poll()
        if self._of_instances is None:
            self._of_instances = {}
            for name, claim in self._by_field.items():
                if claim is not None:
                    self._of_instances.setdefault(_instance_of(claim), {})[name] = claim
        claims = _in_order(self._of_instances.get((instance_id, tenant_id), {}).values())
        return [claim.registration for claim in claims if not claim.is_leaving]


def _in_order(claims: Iterable[Claim | None]) -> list[Claim]:
    """Return the claims that can be read, in order of registration."""
    return sorted(filter(None, claims), key=_publisher_of)


def _publisher_of(claim: Claim) -> int:
    return claim.publisher


def _instance_of(claim: Claim) -> tuple[str, str]:
    return claim.registration.instance_id, claim.registration.tenant_id


class FromClaims(Generic[T]):
    """A value computed from the claims that are not leaving, and again when one has changed."""

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
