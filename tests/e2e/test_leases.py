"""Leases and fences, shown by stopping, cutting off and killing the processes that have them.

``python -m tools.endurance.takeover`` kills many workers, with the default lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import Engines
from tests.e2e.fleet import Fleet, Member, fleet_of, owners
from tests.e2e.takeover import take_over
from tests.proxy import Proxy, proxy_to
from waymark.domain.names import PublisherName
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys
from waymark.store.claims import Claim

LEASE_SECONDS = 2
TAKEOVER_SECONDS = 20.0
CHAT = tuple(range(100, 124))
OTHER = CHAT[:8] + tuple(range(300, 312))
MORE = CHAT[:12] + tuple(range(400, 412))
MEANWHILE = ("taken over", "taken over in silence", "unregistered", "registered again")


class Pair(NamedTuple):
    """Two workers and a replica; the first worker reaches Redis by a proxy."""

    fleet: Fleet
    proxy: Proxy
    first: Member
    second: Member
    replica: Member
    redis: Redis


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    settings = {"lease_seconds": LEASE_SECONDS}
    async with (
        fleet_of(tmp_path_factory.mktemp("pair"), workers=0, replicas=1, settings=settings) as fleet,
        proxy_to(fleet.redis.port, keeps_calls=True) as proxy,
        Redis(port=fleet.redis.port, protocol=2) as redis,
    ):
        first = await fleet.add("first", "ingest", redis_url=proxy.url, redis_timeout_seconds=1)
        second = await fleet.add("second", "ingest", redis_timeout_seconds=1)
        await first.ready()
        await second.ready()
        yield Pair(fleet, proxy, first, second, fleet.replicas[0], redis)


async def claim_of(pair: Pair, engines: Engines, instance_id: str) -> Claim | None:
    name = PublisherName(instance_id, engines.tenant_id, 0)
    raw = await cast("Awaitable[bytes | None]", pair.redis.hget(keys.PUBLISHERS, keys.publisher_field(name)))
    return None if raw is None else Claim.decode(raw)


async def token_of(pair: Pair, claim: Claim) -> bytes:
    record = keys.record(claim.group_id, claim.publisher)
    token = await cast("Awaitable[bytes | None]", pair.redis.hget(record, "token"))
    assert token is not None
    return token


async def worker_of(pair: Pair, engines: Engines, instance_id: str) -> str | None:
    publisher = await pair.replica.publisher(instance_id, tenant_id=engines.tenant_id)
    return cast("str | None", publisher["worker"])


async def stream_of_the_first(pair: Pair, engines: Engines) -> tuple[str, SimulatedEngine]:
    """An engine whose stream the first worker has, the only one of its group."""
    for i in range(20):
        name = f"i{i}"
        engine = await engines.open(pair.replica, name)
        await engine.prefill(SimulatedPrompt(CHAT))
        await engines.agree([pair.replica], CHAT)
        # Both have long been there: whoever has it first keeps it.
        if await worker_of(pair, engines, name) == pair.first.name:
            return name, engine
        await pair.replica.post("/unregister", tenant_id=engines.tenant_id, instance_id=name)
        del engines.engines[name], engines.model.ranks[name]
    pytest.fail("of twenty streams the first worker got none")


async def has_looked_twice(pair: Pair, since: float) -> bool:
    """Whether the first worker has asked twice since then whether the publishers have changed."""
    asked = (b"XREVRANGE", b"wm:changes:{wm:publishers}")
    return sum(call.at > since and call.words[:2] == asked for call in pair.proxy.calls) > 1


@dataclass
class Absence:
    """A stream whose worker is away for longer than its lease, and what happens to it meanwhile."""

    pair: Pair
    engines: Engines
    meanwhile: str
    name: str
    engine: SimulatedEngine
    claim: Claim
    token: bytes
    since: float = 0.0
    """Only before that may the token have written something."""

    @classmethod
    async def of(cls, pair: Pair, engines: Engines, meanwhile: str) -> Absence:
        name, engine = await stream_of_the_first(pair, engines)
        claim = await claim_of(pair, engines, name)
        assert claim is not None
        return cls(pair, engines, meanwhile, name, engine, claim, await token_of(pair, claim))

    async def happens(self) -> None:
        """While the worker is away."""
        pair, engines, name, engine = self.pair, self.engines, self.name, self.engine
        # Frames are the first thing that the worker tries to write, its lease the first where there are none.
        is_silent = self.meanwhile == "taken over in silence"
        if not is_silent:
            await engine.prefill(SimulatedPrompt(OTHER))
        if self.meanwhile in ("unregistered", "registered again"):
            gone = await pair.replica.post("/unregister", tenant_id=engines.tenant_id, instance_id=name)
            assert gone["removed_instances"] == [f"{name}|{engines.tenant_id}|0"]
            assert await pair.replica.query(CHAT, **engines.group) == {}
        if self.meanwhile == "registered again":
            await pair.replica.post("/register", **engines.registrations[name])
        if self.meanwhile != "unregistered":

            async def is_taken_over() -> bool:
                return await worker_of(pair, engines, name) == pair.second.name

            await wait_until(is_taken_over, "the other worker has the stream", TAKEOVER_SECONDS)
        self.since = time.monotonic()
        if not is_silent:
            await engine.prefill(SimulatedPrompt(MORE))
        if self.meanwhile != "unregistered":
            await engines.agree([pair.replica], CHAT, OTHER, MORE)

    async def is_over(self) -> None:
        """Since then the worker is back."""
        pair, engines = self.pair, self.engines

        async def is_back() -> bool:
            return bool(pair.proxy.with_token(self.token, self.since)) and await has_looked_twice(pair, self.since)

        await wait_until(is_back, "the first worker has tried to go on, and has seen who has what", TAKEOVER_SECONDS)
        await self.engine.prefill(SimulatedPrompt(CHAT + MORE))
        verdicts = Counter(call.verdict for call in pair.proxy.with_token(self.token, self.since))
        assert set(verdicts) <= {b"fenced", b"gone"}, (self.meanwhile, verdicts)
        if self.meanwhile != "unregistered":
            await engines.agree([pair.replica], CHAT, OTHER, MORE, CHAT + MORE)
            return

        async def is_out_of_answers() -> bool:
            # A worker that had read the claim before it was paused begins it, sees that it is gone, and ends it.
            return await pair.replica.query(CHAT, **engines.group) == {}

        await wait_until(is_out_of_answers, "answers do not name it", TAKEOVER_SECONDS)
        assert await claim_of(pair, engines, self.name) is None
        await self.leaves_nothing()

    async def leaves_nothing(self) -> None:
        redis, group_id = self.pair.redis, self.claim.group_id
        base = {f"wm:{{{group_id}}}:{each}".encode() for each in ("holders", "fence")}

        async def is_kept(key: bytes) -> bool:
            # A hash that a late call of the dead holder finds has an hour to live.
            if b":engine:" not in key:
                return True
            return await redis.hkeys(key) != [b"applied"] or await redis.pttl(key) <= 0

        async def is_swept() -> bool:
            keys = {key async for key in redis.scan_iter(b"wm:{%d}:*" % group_id)}
            return not [key for key in keys - base if await is_kept(key)]

        await wait_until(is_swept, "nothing stays of the group but its two tables")
        fence = await cast("Awaitable[list[bytes]]", redis.hkeys(keys.fence(group_id, 0)))
        assert set(fence) <= {b"holder"}


@pytest.mark.parametrize("fault", ["paused", "cut off"])
async def test_a_worker_that_was_away_past_its_lease_writes_nothing_more(pair: Pair, fault: str) -> None:
    """What happens meanwhile differs by stream; the worker has one of each, and is away from all of them at once."""
    async with AsyncExitStack() as stack:
        streams = {what: Engines(stack, f"{what}, {fault}") for what in MEANWHILE}
        absences = await asyncio.gather(*(Absence.of(pair, engines, what) for what, engines in streams.items()))
        if fault == "paused":
            pair.first.pause()
        else:
            pair.proxy.hold()
        await asyncio.gather(*(absence.happens() for absence in absences))
        pair.first.resume()
        pair.proxy.heal()
        await asyncio.gather(*(absence.is_over() for absence in absences))


async def test_streams_are_shared_and_move_when_workers_come_and_go(tmp_path: Path, engines: Engines) -> None:
    async with fleet_of(tmp_path, workers=1, replicas=1, settings={"lease_seconds": LEASE_SECONDS}) as fleet:
        (replica,) = fleet.replicas
        for i in range(24):
            engine = await engines.open(replica, f"i{i}")
            await engine.prefill(SimulatedPrompt(CHAT))
        await engines.agree([replica], CHAT)

        async def shares() -> dict[str, str | None]:
            return owners((await replica.get("/workers"))["publishers"])

        assert set((await shares()).values()) == {"worker-0"}
        for name in ("worker-1", "worker-2"):
            await fleet.add(name, "ingest")
        names = {"worker-0", "worker-1", "worker-2"}

        async def are_shared() -> bool:
            counts = Counter((await shares()).values())
            return set(counts) == names and all(4 <= count <= 12 for count in counts.values())

        await wait_until(are_shared, "each of three workers has about eight of 24 streams", TAKEOVER_SECONDS)
        for engine in engines.engines.values():
            await engine.prefill(SimulatedPrompt(OTHER))
        await engines.agree([replica], CHAT, OTHER)

        before = await shares()
        await fleet.workers[1].kill()
        kept = {name: worker for name, worker in before.items() if worker != "worker-1"}

        async def are_moved() -> bool:
            after = await shares()
            return set(after.values()) == names - {"worker-1"} and kept.items() <= after.items()

        await wait_until(are_moved, "the killed worker's streams have moved, and no others", TAKEOVER_SECONDS)
        for engine in engines.engines.values():
            await engine.prefill(SimulatedPrompt(MORE))
        await engines.agree([replica], CHAT, OTHER, MORE)

        fleet.workers[1].start()

        async def are_back() -> bool:
            return await shares() == before

        await wait_until(are_back, "every worker has the streams it had", TAKEOVER_SECONDS)
        for engine in engines.engines.values():
            await engine.prefill(SimulatedPrompt(CHAT + MORE))
        await engines.agree([replica], CHAT, OTHER, MORE, CHAT + MORE)


async def test_twenty_thousand_blocks_a_second_survive_the_kill_of_their_worker(pair: Pair, engines: Engines) -> None:
    figures = await take_over(
        pair.fleet.workers, pair.replica, pair.redis, tenant_id=engines.tenant_id, blocks_per_second=20_000,
        seconds_before=1.0, seconds_after=1.0,
    )  # fmt: skip
    assert figures.wrong == []
    assert figures.counters == {"batches_lost": 0, "restarts": 0, "waiting_lost": 0}
