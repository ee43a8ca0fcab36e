"""Registrations that race: two API processes, a publishers file and workers at once, against a plain model.

In each round some callers register, move and unregister the same few publishers while workers take their streams,
apply blocks and drop the leases. Afterwards the registrations must be those that some serial order of the calls gives,
nothing may be half registered, and no block may name a holder that is neither live nor still to be swept.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest

from tests.store.factories import apply_changes, begins, blocks_of, registration, stored
from tests.unit import seeds
from waymark.base.errors import Conflict, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.names import PublisherName, Registration
from waymark.domain.table import HolderTable
from waymark.ingest.polling import RegistrationKeeper
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.holder_tables import decode_table
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

ROUNDS = 15
NAMES = [registration(f"pod-{i}", dp_rank=rank).name for i in range(2) for rank in range(2)]
BLOCKS = range(1, 40)


class Shaken(RedisClient):
    """Lets others go first now and then."""

    chance: random.Random

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)
        return await super().run(name, keys, args)


@dataclass(frozen=True)
class Call:
    """Register ``wanted``, or unregister ``name``."""

    name: PublisherName
    wanted: Registration | None

    def after(self, before: Registration | None) -> Registration | None:
        """What is registered after it, by the rules of the contract."""
        if self.wanted is None or before is None:
            return self.wanted
        may_move = replace(before, endpoint=None, replay_endpoint=None) == replace(
            self.wanted, endpoint=None, replay_endpoint=None
        )
        return self.wanted if may_move else before


def outcomes(before: Registration | None, calls: Sequence[Call], unsure: Sequence[Call]) -> set[Registration | None]:
    """What may be registered after calls at once; those ``unsure`` have failed, and may have done it or not."""
    found: set[Registration | None] = set()
    for count in range(len(unsure) + 1):
        for order in permutations([*calls, *unsure[:count]]):
            state = before
            for call in order:
                state = call.after(state)
            found.add(state)
    return found


class World:
    def __init__(self, stores: Sequence[Store], client: RedisClient, chance: random.Random) -> None:
        self.stores = stores
        self.client = client
        self.chance = chance
        self.model: dict[PublisherName, Registration] = {}
        self.addresses = 0

    def _call(self) -> Call:
        name = self.chance.choice(NAMES)
        if self.chance.random() < 0.4:
            return Call(name, None)
        self.addresses += self.chance.random() < 0.7  # a move, or the same again
        fields: dict[str, Any] = {"endpoint": f"tcp://10.0.0.1:{5557 + self.addresses}", "dp_rank": name.dp_rank}
        if self.chance.random() < 0.2:
            fields["model_name"] = "other"
        return Call(name, registration(name.instance_id, **fields))

    async def play(self) -> None:
        calls = [self._call() for _ in range(self.chance.randrange(1, 6))]
        unsure: list[Call] = []
        file = [call.wanted for call in (self._call(),) if call.wanted is not None and self.chance.random() < 0.5]

        async def make(call: Call, store: Store) -> None:
            try:
                if call.wanted is None:
                    await store.registry.unregister([call.name])
                else:
                    await store.registry.register(call.wanted)
            except Conflict:
                pass  # the model says when
            except StoreUnavailable:
                unsure.append(call)

        keeper = RegistrationKeeper(self.stores[2], Metrics(), file)

        async def keep() -> bool:
            """Whether it came through; if others were always faster, a worker's next poll does it."""
            try:
                await keeper.restore(())
            except StoreUnavailable:
                return False
            return True

        _, is_kept, _ = await asyncio.gather(
            asyncio.gather(*(make(call, self.chance.choice(self.stores[:2])) for call in calls)),
            keep(),
            asyncio.gather(*(self.work(store, f"worker-{i}") for i, store in enumerate(self.stores[3:]))),
        )
        assert is_kept or await keep(), "nobody else is there now"
        for claim in await self.stores[3].directory.claims():
            if claim.is_leaving:
                await self.stores[3].claim_writer.finish(claim)
        await self.check(calls, unsure, [Call(each.name, each) for each in file])

    async def work(self, store: Store, worker: str) -> None:
        """A few streams, as workers take them: some are dropped, some left behind as by a crash."""
        for _ in range(self.chance.randrange(1, 6)):
            claims = await store.directory.claims()
            if not claims:
                await asyncio.sleep(0)
                continue
            claim = self.chance.choice(claims)
            try:
                if claim.is_leaving:
                    await store.claim_writer.finish(claim)
                else:
                    await store.claim_writer.begin(claim)
                    await self._stream(store, claim, worker)
            except StoreUnavailable:
                continue  # others keep ending it

    async def _stream(self, store: Store, claim: Claim, worker: str) -> None:
        grant = await store.leases.take(claim, worker, 30.0, force=self.chance.random() < 0.3)
        state = None if grant is None else await store.records.read(grant)
        if grant is None or state is None:
            return
        begin = begins(claim, f"{claim.registration.dp_rank} GPU")
        ids = await store.records.new_life(grant, unit="", is_restart=False, begin=begin, above=grant.above)
        if ids is not None:
            seq = (state.watermark or 0) + 1
            change = stored(ids[0], sorted(self.chance.sample(BLOCKS, 5)), seq=seq)
            await apply_changes(store, grant, change, mode="set")
        if self.chance.random() < 0.8:
            await store.leases.drop(grant)

    async def check(self, calls: Sequence[Call], unsure: Sequence[Call], file: Sequence[Call]) -> None:
        claims = await self.stores[0].directory.claims()
        assert not any(claim.is_leaving for claim in claims)
        found = {claim.registration.name: claim.registration for claim in claims}
        for name in NAMES:
            made = [call for call in (*calls, *file) if call.name == name and call not in unsure]
            may_be = outcomes(self.model.get(name), made, [call for call in unsure if call.name == name])
            assert found.get(name) in may_be, f"{name} was {self.model.get(name)}, then {made}: {found.get(name)}"
        self.model = found
        assert len({claim.publisher for claim in claims}) == len(claims)
        for group, entry in (await self.stores[0].directory.groups()).items():
            own = {claim.publisher: claim for claim in claims if claim.registration.group == group}
            assert {claim.group_id for claim in own.values()} <= {entry.group_id}
            await self._check_group(entry.group_id, own)

    async def _check_group(self, group_id: int, own: dict[int, Claim]) -> None:
        redis: Any = self.client._redis
        key = keys.holders(group_id)
        table = decode_table(await redis.hgetall(key), self.stores[0].parser, key)
        rows = {} if table is None else {number: row.instance_id for number, row in table.publishers.items()}
        assert rows == {number: claim.registration.instance_id for number, claim in own.items()}
        records = {int(name.rsplit(b":", 1)[1]) for name in await redis.keys(f"wm:{{{group_id}}}:publisher:*")}
        assert records == set(own)
        leases = {int(name.rsplit(b":", 1)[1]) for name in await redis.keys(f"wm:{{{group_id}}}:lease:*")}
        assert leases <= set(own)
        fence = {int(name) for name in await redis.hgetall(keys.fence(group_id, 0)) if name.isdigit()}
        assert fence <= set(own)
        await self._check_blocks(group_id, table, own)

    async def _check_blocks(self, group_id: int, table: HolderTable | None, own: dict[int, Claim]) -> None:
        redis: Any = self.client._redis
        live = {} if table is None else dict(table.holders)
        assert {holder.publisher for holder in live.values()} <= set(own)
        for claim in own.values():
            record = await redis.hgetall(keys.record(group_id, claim.publisher))
            of_record = {int(value) for name, value in record.items() if name.startswith(b"holder:")}
            assert of_record == {holder.id for holder in live.values() if holder.publisher == claim.publisher}
        dead = {int(member) for member in await redis.smembers(keys.dead(group_id))}
        assert not dead & live.keys()
        for block, ids in (await blocks_of(redis, group_id)).items():
            assert ids <= dead | live.keys(), f"block {block} names {ids - dead - live.keys()}"


@pytest.fixture
async def world(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    chance = random.Random(request.param)
    async with AsyncExitStack() as stack:
        stores: list[Store] = []
        for _ in range(5):
            client = Shaken(RedisClient.open(redis_url)._redis, redis_url)
            client.chance = chance
            stack.push_async_callback(client.close)
            stores.append(Store(client))
        yield World(stores, stores[0].client, chance)


@pytest.mark.parametrize("world", seeds(16), indirect=True)
async def test_whatever_races_nothing_is_half_registered(world: World) -> None:
    for _ in range(ROUNDS):
        await world.play()
    assert world.model or world.addresses
