"""Leases and fences: one worker at a time applies a stream.

The lease decides which worker may start. Each lease has a token. The fence, on every shard, rejects every token but the
highest. A worker has a grant once it has raised the fence on all shards. Only then does it read the state of the
stream, because from then on no other worker can change that state unnoticed.

Places for snapshots are leases, too. They bound how many engines all workers together ask at once, and how often they
ask the same engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Protocol

from waymark.base.errors import RecordDamaged, StoreUnavailable
from waymark.base.record import record
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.holder_tables import holders_of
from waymark.store.parsing import lenient_text
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Outcome, Scripts, Verdict

#: The leases in one call, which takes Redis less than a millisecond.
_RENEWED_AT_ONCE = 256


def random_nonce() -> str:
    """Return 64 random bits as 16 hex digits, so that no two lives, tokens or versions are equal."""
    return os.urandom(8).hex()


@record(slots=True)
class HolderChange:
    """The last change of holders that Redis has acknowledged under a grant."""

    nonce: str = ""
    wants_repair: bool = False
    """Whether a repair of the stream was requested, and no snapshot has come since."""


@record(slots=True)
class Renewal:
    """The findings of the last renewal of a lease."""

    is_fenced: bool = False
    """Whether another worker has the stream, or the publisher is gone."""
    lost_shards: set[int] = field(default_factory=set)
    """The shards that lost writes which they had acknowledged under the grant."""
    error: StoreUnavailable | None = None
    """Why this lease could not be renewed, if the reason is the publisher's record."""


class PublisherIds(Protocol):
    """The ids that find a publisher in Redis.

    A claim has them; ``UnclaimedPublisher`` has them for a publisher without a claim.
    """

    @property
    def publisher(self) -> int: ...

    @property
    def group_id(self) -> int: ...

    @property
    def shards(self) -> int: ...


@record(frozen=True, slots=True)
class TakenLease:
    """A lease that was taken, with the fence raised on every shard."""

    token: str
    above: int
    calls: dict[int, int]
    first_told: int
    """The highest number of calls of shard 0 that another shard was told of."""


@record(frozen=True, slots=True)
class Grant:
    """The right to apply one stream. It ends as soon as another worker has a higher token."""

    claim: Claim
    token: str
    above: int
    """The highest holder id seen on any shard when the fence was raised."""
    calls: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """The number of acknowledged calls of the stream, by shard. A shard with a smaller count has lost writes."""
    moved_shards: set[int] = field(default_factory=set, compare=False, repr=False)
    """The shards other than 0 whose number of calls is not in the record yet. It is written with the next watermark."""
    change: HolderChange = field(default_factory=HolderChange, compare=False, repr=False)
    renewal: Renewal = field(default_factory=Renewal, compare=False, repr=False)
    is_forgotten: bool = False
    """Whether a shard had no token of the publisher: then the publisher is new, or the shard has come back empty."""
    first_told: int = 0
    """The highest number of calls of shard 0 that another shard was told of. If shard 0 has counted fewer, it has lost
    writes.
    """

    def acknowledged(self, shard: int, calls: int) -> None:
        """Note that a shard has answered a call. Answers to calls that ran at the same time come in any order."""
        self.calls[shard] = max(calls, self.calls.get(shard, 0))

    def committed(self, calls: int) -> None:
        """Note that shard 0 has moved the watermark, or has it already, and has noted the calls of the other shards."""
        self.acknowledged(0, calls)
        self.moved_shards.clear()

    @property
    def moved_calls(self) -> list[str | bytes | int | float]:
        """Each of ``moved_shards``, with the number of its calls."""
        return [number for shard in sorted(self.moved_shards) for number in (shard, self.calls[shard])]

    def counted(self, outcome: Outcome) -> bool:
        """Note the number of calls at the end of a reply of shard 0. Return False if the call was fenced."""
        if outcome.is_applied:
            self.acknowledged(0, outcome.numbers[-1])
        return outcome.is_applied

    @property
    def has_lost_first(self) -> bool:
        """Whether shard 0 has lost writes, maybe with the holders that they began."""
        return self.first_calls < self.first_told

    def has_lost(self, shard_calls: Mapping[int, int]) -> bool:
        """Return whether a shard lost writes: when its fence was raised, it had counted fewer calls than the record
        says, or shard 0 fewer than another shard was told.
        """
        has_lost_other = any(self.calls.get(shard, 0) < calls for shard, calls in shard_calls.items())
        return self.is_forgotten or self.has_lost_first or has_lost_other

    @property
    def has_news(self) -> bool:
        """Whether a renewal has found anything other than a lease that continues."""
        renewal = self.renewal
        return renewal.is_fenced or bool(renewal.lost_shards or renewal.error) or self.change.wants_repair

    @property
    def counter(self) -> int:
        """The counter in the token; it grows by one with each lease of the publisher."""
        return int(self.token.partition(".")[0])

    @property
    def publisher(self) -> int:
        return self.claim.publisher

    @property
    def group_id(self) -> int:
        return self.claim.group_id

    @property
    def shards(self) -> int:
        return self.claim.shards

    @property
    def record(self) -> str:
        return keys.record(self.claim.group_id, self.claim.publisher)

    @property
    def fenced_call(self) -> dict[str, Any]:
        """The arguments of a script that writes only while the worker has the stream; shard 0 also has the record."""
        return {
            "record": self.record,
            "fence": keys.fence(self.claim.group_id, 0),
            "publisher": self.publisher,
            "token": self.token,
            "calls": self.first_calls,
        }

    @property
    def first_calls(self) -> int:
        """How many calls shard 0 has acknowledged."""
        return self.calls.get(0, 0)

    @property
    def lease(self) -> str:
        return keys.lease(self.claim.group_id, self.claim.publisher)


class Leases:
    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def take(self, claim: Claim, worker: str, seconds: float, *, force: bool = False) -> Grant | None:
        """Take the lease and raise the fence on every shard; None if another worker has it or the publisher is gone.

        ``force`` takes the lease even if another worker has it.
        """
        is_forgotten = await self._is_forgotten(claim)
        lease = await self.take_for(claim, worker, seconds, force=force)
        if lease is None:
            return None
        return Grant(
            claim, lease.token, lease.above, lease.calls, is_forgotten=is_forgotten, first_told=lease.first_told
        )

    async def take_for(
        self, ids: PublisherIds, worker: str, seconds: float, *, force: bool = False
    ) -> TakenLease | None:
        """Take a lease as ``take`` does, for any publisher."""
        own, counter_above, milliseconds = "", 0, max(1, int(seconds * 1000))
        record, lease = keys.record(ids.group_id, ids.publisher), keys.lease(ids.group_id, ids.publisher)
        while True:
            random = random_nonce()
            outcome = await self._scripts.run(
                "take_lease",
                lease=lease,
                record=record,
                own=own,
                random=random,
                worker=worker,
                milliseconds=milliseconds,
                above=counter_above,
                force="1" if force else "",
            )
            if outcome.verdict is Verdict.GONE:
                await self.forget(ids)
            if not outcome.is_applied:
                return None
            own = f"{outcome.numbers[0]}.{random}"
            counter, holder, calls, first_told = await self._raise_fences(ids, own)
            if counter is None:
                return TakenLease(own, holder, calls, first_told)
            # A failover has restored an old record, and a shard has a higher token. Take one that is higher still.
            counter_above = counter

    async def last_worker(self, claim: Claim) -> str | None:
        """Return the worker with the stream, or the one that stopped without releasing it."""
        worker = await self._client.hget(keys.record(claim.group_id, claim.publisher), "worker")
        return lenient_text(worker) if worker else None

    async def _is_forgotten(self, claim: Claim) -> bool:
        """Return whether a shard other than the first has no token. Called before fences are raised."""
        fences = [keys.fence(claim.group_id, shard) for shard in range(1, claim.shards)]
        tokens = await self._client.several(("HGET", fence, claim.publisher) for fence in fences) if fences else ()
        return any(token is None for token in tokens)

    async def _raise_fences(
        self, ids: PublisherIds, token: str, first: int | str = ""
    ) -> tuple[int | None, int, dict[int, int], int]:
        """Return the counter of a higher token or None, the highest holder id of all shards, the calls by shard, and
        the highest number of calls of shard 0 that another shard was told of. With ``first`` it is at most that.
        """
        outcomes = await asyncio.gather(
            *(
                self._scripts.run("raise_fence", fence=fence, publisher=ids.publisher, token=token, first=first)
                for fence in [keys.fence(ids.group_id, shard) for shard in range(ids.shards)]
            )
        )
        holder = max(outcome.numbers[1] for outcome in outcomes)
        refused = [outcome.numbers[0] for outcome in outcomes if not outcome.is_applied]
        return (
            (max(refused) if refused else None),
            holder,
            {i: outcome.numbers[2] for i, outcome in enumerate(outcomes)},
            max(outcome.numbers[3] for outcome in outcomes),
        )

    async def forget_told(self, grant: Grant) -> None:
        """Let the other shards forget calls of shard 0 that it has lost. Their life must have ended: no worker would
        notice this loss again.
        """
        await self._raise_fences(grant.claim, grant.token, grant.first_calls)

    async def highest_holder(self, grant: Grant) -> int | None:
        """Return the highest holder id on any shard at this moment, or None if another worker has the stream."""
        counter, holder, _, _ = await self._raise_fences(grant.claim, grant.token)
        return holder if counter is None else None

    async def renew(self, grant: Grant, seconds: float) -> bool:
        """Renew one lease for ``seconds``; False if another worker has the stream."""
        await self._renew([grant], seconds)
        return not grant.renewal.is_fenced

    async def renew_all(self, grants: Iterable[Grant], seconds: float) -> None:
        """Renew leases for ``seconds``, those of a group in few calls.

        Afterwards ``grant.renewal`` and ``grant.change`` have the findings for each. Raises StoreUnavailable.
        """
        by_group: dict[int, list[Grant]] = {}
        for grant in grants:
            by_group.setdefault(grant.group_id, []).append(grant)
        await asyncio.gather(
            *(
                self._renew_some(of_group[start : start + _RENEWED_AT_ONCE], seconds)
                for of_group in by_group.values()
                for start in range(0, len(of_group), _RENEWED_AT_ONCE)
            )
        )

    async def _renew_some(self, grants: Sequence[Grant], seconds: float) -> None:
        try:
            await self._renew(grants, seconds)
        except StoreUnavailable as exc:
            if len(grants) > 1:
                # A damaged record, or a moving slot, must not cost the other streams their leases.
                await asyncio.gather(*(self._renew_some([grant], seconds) for grant in grants))
            elif isinstance(exc, RecordDamaged):
                grants[0].renewal.error = exc
            else:
                raise

    async def _renew(self, grants: Sequence[Grant], seconds: float) -> None:
        outcome = await self._scripts.run(
            "renew_leases",
            lease=[grant.lease for grant in grants],
            record=[grant.record for grant in grants],
            milliseconds=max(1, int(seconds * 1000)),
            token=[grant.token for grant in grants],
        )
        for grant, state in zip(grants, outcome.numbers, strict=True):
            grant.renewal.is_fenced = not state
            if state:
                grant.change.wants_repair = state == 2

    async def drop(self, grant: Grant) -> None:
        """Release the lease, so that another worker can take it at once."""
        outcome = await self._scripts.run("drop_lease", lease=grant.lease, record=grant.record, token=grant.token)
        if outcome.verdict is Verdict.GONE:
            await self.forget(grant.claim)

    async def forget(self, ids: PublisherIds) -> None:
        """Delete the fences of a publisher without a record. No worker has a valid token for that publisher.

        There are such fences if the publisher ended, or a worker stopped, between taking the lease and raising the
        fence.
        """
        await asyncio.gather(*(self._drop_fence(ids, shard, "") for shard in range(ids.shards)))

    async def _drop_fence(self, ids: PublisherIds, shard: int, token: str) -> None:
        fence = keys.fence(ids.group_id, shard)
        await self._scripts.run("drop_fence", fence=fence, publisher=ids.publisher, token=token)

    async def end(self, grant: Grant) -> bool:
        """End the publisher: delete its row and its holders. False if fenced."""
        return await self.end_for(grant.claim, grant.token)

    async def end_for(self, ids: PublisherIds, token: str, *, only_unclaimed: bool = False) -> bool:
        """End the publisher under a token.

        False if fenced. If ``only_unclaimed`` is set, also False if the record is not marked ``unclaimed``.
        """
        outcome = await self._end(ids, token, "unclaimed" if only_unclaimed else "")
        if not outcome.is_applied:
            return False
        for shard in range(ids.shards):
            await self._drop_fence(ids, shard, token)
        return True

    async def end_without_record(self, ids: PublisherIds) -> bool:
        """End a publisher with a row in the table but without a record. Return False if it has a record, or no row.

        Such a row remains if Redis evicts keys, or if the move of its slot was interrupted. Only the table knows the
        holders of the publisher. This call needs no token, because the token was lost with the record.
        """
        fields = await self._client.hgetall(keys.holders(ids.group_id))
        if b"publisher:%d" % ids.publisher not in fields:
            return False
        if not (await self._end(ids, "", "gone", holders_of(fields, ids.publisher))).is_applied:
            return False
        await self.forget(ids)
        return True

    async def _end(self, ids: PublisherIds, token: str, only: str, holders: Sequence[int] = ()) -> Outcome:
        group_id, publisher = ids.group_id, ids.publisher
        return await self._scripts.run(
            "end_publisher",
            holders=keys.holders(group_id),
            record=keys.record(group_id, publisher),
            lease=keys.lease(group_id, publisher),
            dead=keys.dead(group_id),
            load=keys.load(group_id),
            changes=keys.load_changes(group_id),
            entries=keys.entries(group_id),
            history=keys.history(group_id, publisher),
            publisher=publisher,
            token=token,
            version=random_nonce(),
            only=only,
            holder=holders,
        )


#: The snapshots that all workers together request at the same time. A snapshot costs its engine about a second, and its
#: worker memory.
PLACES: Final = 2


@record(frozen=True, slots=True)
class SnapshotPlace:
    """A held place if ``wait_seconds`` is 0; otherwise the time after which another attempt may succeed."""

    nonce: str
    wait_seconds: float = 0.0


class SnapshotPlaces:
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def take(self, place: SnapshotPlace, socket: str, seconds: float, pause_seconds: float) -> SnapshotPlace:
        """Take a place for ``seconds``, to ask a socket; it is not asked again within ``pause_seconds``.

        ``socket`` is the digest of its endpoint. A repeated call with the same ``place`` takes one place.
        """
        milliseconds, pause = max(1, int(seconds * 1000)), max(1, int(pause_seconds * 1000))
        outcome = await self._hold(place, socket, milliseconds, pause)
        return SnapshotPlace(place.nonce, 0.0 if outcome.is_applied else outcome.numbers[0] / 1000)

    async def release(self, place: SnapshotPlace, socket: str) -> None:
        await self._hold(place, socket, 0, 0)

    async def _hold(self, place: SnapshotPlace, socket: str, milliseconds: int, pause: int) -> Outcome:
        return await self._scripts.run(
            "hold_snapshot",
            snapshots=keys.SNAPSHOTS,
            asked=keys.snapshot_asked(socket),
            holder=place.nonce,
            milliseconds=milliseconds,
            pause=pause,
            most=PLACES,
        )


def new_place() -> SnapshotPlace:
    return SnapshotPlace(random_nonce())
