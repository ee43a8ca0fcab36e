"""The key table of lua/README.md against a life of two groups: neither has anything the other has not."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from xxhash import xxh3_64_intdigest

from tests.conftest import wait_until
from tests.store.factories import Stream, begins, held_by, registration, removed, stored, stream_of
from tests.store.flow import swept
from tests.store.key_table import README, Held, KeyTable, Row, facts
from waymark.domain.books import Usage
from waymark.domain.hashing import namespace
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit
from waymark.domain.prefixes import Change, PrefixChange, prefix_key
from waymark.domain.rows import Place
from waymark.domain.status import Discovery
from waymark.domain.targets import Gauges, Role, Target
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.hashes import ReportedBlock
from waymark.store.leases import Grant, new_place
from waymark.store.records import Facts
from waymark.store.redis.client import SCRIPTS, RedisClient, Reply
from waymark.store.reservations import Offer, Pulls, ReservationPart, ReservationTerms
from waymark.store.responses import ResponseBounds
from waymark.store.scripts import Verdict
from waymark.store.store import Store
from waymark.store.sweep import UnclaimedPublisher

#: Longer than the test may take: what runs out in the middle of a script would be taken for that script's doing.
HOUR_SECONDS = 3600

WORKER = b'{"endpoint":"http://10.0.0.1:8000"}'
NS = namespace("adapter", ["salt"])
BLOCKS = list(range(0xA0, 0xB0))
HEAD, DEEP, ALONE = 0x1000, 0x5000, 0x6000
TAILS = [number % 16 << 60 | 0x2000 + number for number in range(66)]
"""Of different digits, so that those beyond the slots of the row are in a branch row each."""
#: Every key, whether it runs out by itself, and all it holds as bytes.
DUMPS = """
local found = {}
for i, name in ipairs(redis.call('KEYS', '*')) do
    found[i] = {name, tostring(redis.call('PTTL', name) >= 0), redis.call('DUMP', name)}
end
return found
"""


#: The format of the index, and the digest of the keys, fields and values that processes of this format share.
SHARED = ("rows 32 64 keys 2", "767023a929fa18cf")


class Watched(RedisClient):
    """Sees, around every script, which rows of the key table it wrote and which it took out."""

    def __init__(self, redis: Redis, table: KeyTable) -> None:
        super().__init__(redis, "redis://test")
        self.table = table
        self.written: defaultdict[Row, set[str]] = defaultdict(set)
        self.removed: defaultdict[Row, set[str]] = defaultdict(set)
        self.strangers: set[str] = set()
        self.scripts: set[str] = set()
        self._one_at_a_time = asyncio.Lock()
        self._seen: Held = {}
        self._dumps: dict[bytes, tuple[bytes, bytes]] = {}
        self._held: Held = {}

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        async with self._one_at_a_time:
            assert isinstance(self._redis, Redis)
            before = await self._look(self._redis)
            reply = await super().run(name, keys, args)
            after = await self._look(self._redis)
        self.scripts.add(name)
        # What is as it was has been looked at already.
        self.strangers.update(self.table.strangers(_others(after, self._seen)))
        self._seen = after
        old, new = set(facts(_others(before, after))), set(facts(_others(after, before)))
        if name == "note_activity":  # it runs in the background, while the test itself changes other keys
            old, new = ({fact for fact in each if fact[0] == "wm:activity"} for each in (old, new))
        places_left = {fact[:4] for fact in new}
        for fact in new - old:
            self._note(self.written, fact, name)
        for fact in old - new:
            if fact[:4] not in places_left:
                self._note(self.removed, fact, name)
        return reply

    async def _look(self, redis: Redis) -> Held:
        """Everything that Redis holds, of which only what is not as it was is read again."""
        found: Any = await redis.eval(DUMPS, 0)
        dumps = {name: (runs_out, dump) for name, runs_out, dump in found}
        changed = [name for name, dump in dumps.items() if self._dumps.get(name) != dump]
        same = {name: held for name, held in self._held.items() if self._dumps[name] == dumps.get(name)}
        self._dumps, self._held = dumps, same | await held_by(redis, changed)
        return self._held

    def _note(self, where: defaultdict[Row, set[str]], fact: Any, script: str) -> None:
        row = self.table.row_of(*fact)
        if row is not None:
            where[row].add(script)


def _others(held: Held, than: Held) -> Held:
    """The keys that are not the same in ``than``."""
    return {key: value for key, value in held.items() if than.get(key) != value}


async def live(client: RedisClient, redis: Redis) -> None:
    """Everything that happens to publishers, on one shard and on three."""
    one, three = Store(client), Store(client, shards=3)
    await one.read_incarnation()
    await one.heartbeats.report("worker-1", keep_seconds=HOUR_SECONDS)
    state = Discovery(worker="worker-1", registered=2, waiting=1, problems=("pod a: it has no block_size",))
    assert await one.discovery.hold(state, HOUR_SECONDS)
    assert await one.discovery.state() == state
    assert not await one.discovery.hold(replace(state, worker="worker-10"), HOUR_SECONDS)
    assert await one.discovery.hold(state, 0)
    assert await one.discovery.state() is None
    await publish_and_unregister(await stream_of(one, redis))
    await one.registry.register(registration())
    await publish_and_unregister(await stream_of(three, redis, registration("pod-2", model_name="large")))
    await one.registry.register(registration("pod-4"))
    further = registration("pod-4", endpoint="tcp://10.0.0.1:6557", is_further=True)
    await one.registry.register(further)
    await one.registry.unregister([further.name])
    await one.registry.register(further)
    await one.registry.unregister([further.name])
    await redis.delete("wm:groups")  # as a failover may forget what was handed out last
    await one.registry.register(registration("pod-4"))
    lease_lost = await stream_of(one, redis, registration("pod-3"))
    await lease_lost.store.leases.drop(lease_lost.grant)
    lost = lease_lost.grant
    for claim_comes in (one.registry.register(lost.claim.registration), unmarked(lost, one)):
        await write(one, lost, "unclaimed", "1")
        await claim_comes
    await redis.hdel(keys.PUBLISHERS, keys.publisher_field(lost.claim.registration.name).decode())
    assert await one.unclaimed.end(UnclaimedPublisher(lost.publisher, lost.group_id, lost.shards))
    await one.heartbeats.report("worker-1", keep_seconds=HOUR_SECONDS, is_leaving=True)


async def unmarked(grant: Grant, store: Store) -> None:
    await write(store, grant, "unclaimed", "")


async def write(store: Store, grant: Grant, name: str, value: str) -> None:
    await store.scripts.run(
        "write_record",
        record=grant.record,
        fence=keys.fence(grant.group_id, 0),
        publisher=grant.publisher,
        token=grant.token,
        calls=0,
        field=[name, value],
    )


async def publish_and_unregister(stream: Stream) -> None:
    store, redis, grant = stream.store, stream.redis, stream.grant
    of = grant.claim.registration
    other = await stream_of(store, redis, registration(f"{of.instance_id}-neighbour", model_name=of.model_name))
    (shared,) = await other.begin("0 GPU")
    await other.apply(stored(shared, BLOCKS[:4]), stored(shared, [DEEP], first=9, is_deep=True))

    gpu, disk = await stream.begin("0 GPU", "0 DISK 0123456789abcdef")
    await stream.apply(stored(gpu, BLOCKS), stored(disk, BLOCKS[:4], is_identity=True), event_ids={disk: 9})
    salted = [block ^ NS for block in BLOCKS]
    await stream.apply(stored(gpu, salted, seq=2, ns=NS), stored(gpu, BLOCKS, seq=3))
    await stream.apply(removed(gpu, salted[:9], seq=4))
    await stream.apply(removed(gpu, BLOCKS[8:], seq=5), removed(disk, BLOCKS[:2], seq=5, first=9))
    await stream.apply(removed(gpu, BLOCKS[8:], seq=6))
    await select(store, redis)
    await store.gauges.note(grant.group_id, grant.publisher, Gauges(3, 1, 0.5), HOUR_SECONDS * 1000)
    blocks = [ReportedBlock(hash_, Spot(Place(HEAD), ns, 3, hash_)) for hash_ in range(1, 120) for ns in (0, NS)]
    for _ in range(12):
        await store.hashes.kept(grant, 1000).keep(blocks)
    await store.entries.note(grant, {gpu: 3, disk: 2}, 4)
    await store.entries.note(other.grant, {shared: 5}, 4)
    await stream.apply(stored(gpu, salted, seq=7, ns=NS))
    await branch(store, stream, gpu, other, shared)
    told: Facts = {"flags": "extra", "main_groups": "0", "last_error": "no replay", "last_event_id": "41"}
    told["recent"] = "352000000:1:2"
    await store.records.write(grant, {**told, "status": "degraded"}, {"gaps": 1})
    await store.records.write(grant, {"flags": "", "main_groups": "", "last_error": "", "last_event_id": ""}, {})
    await store.records.set_lost(grant, is_lost=True)
    for target in (Target(weight=2.0), Target(), Target(role=Role.PREFILL)):
        await store.registry.register(replace(of, target=target))
    await decide(store, redis, grant)
    beside = await store.reservations.reserve(grant.group_id, [Offer(other.grant.publisher, 5)], ReservationTerms(9))
    assert beside.reservation is not None
    await store.reservations.release([beside.reservation], ReservationPart.OK)
    await store.scripts.run(
        "add_counts",
        counts=keys.COUNTS,
        seen=keys.SEEN,
        writer=keys.counted("0" * 16),
        number=1,
        count=["kv_index.kv_aware", 1],
        prefix=["6b6579"],
    )
    await answers(store)
    await responses(store)
    for change in Change:
        await store.prefixes.apply(grant, gpu, disk, [PrefixChange(prefix_key("a"), change)], ttl_seconds=HOUR_SECONDS)
    await store.prefixes.apply(grant, gpu, disk, [PrefixChange(prefix_key("b"), Change.WARM)], ttl_seconds=HOUR_SECONDS)

    await place(store, redis, grant.group_id)
    await store.scripts.run(
        "keep_decisions",
        decisions=keys.decisions(grant.group_id),
        length=10,
        keep_ms=HOUR_SECONDS * 1000,
        entry=["decision", b'{"format":1}', "outcome", b'{"format":1}'],
    )
    await take_snapshot(stream)

    await redis.pexpire(grant.lease, 1)
    await wait_until(lambda: _is_gone(redis, grant.lease), "the lease has run out")
    await store.leases.renew(grant, float(HOUR_SECONDS))

    await store.records.write(grant, {"flags": "extra", "main_groups": "0"}, {})
    await stream.end(is_restart=True)
    left = await store.sweeper.pick(stream.entry)
    assert left is not None
    async for _ in store.sweeper.steps(stream.entry, left):
        pass  # the other dead holder is left

    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS, seq=2), event_ids={gpu: 1})
    await store.records.write(grant, {**told, "status": "active"}, {"gaps": 2})
    assert await store.records.stage(grant, begins(grant.claim, "0 CPU"), grant.above, "7" * 16)
    assert await store.records.ask_repair(grant.claim)
    await store.leases.forget_told(replace(grant, calls={}))
    await store.registry.unregister([grant.claim.registration.name])
    group_id = grant.group_id
    await store.scripts.run(
        "end_lost", holders=keys.holders(group_id), record=grant.record, dead=keys.dead(group_id), holder=left
    )
    while (holder := await store.sweeper.pick(stream.entry)) is not None:
        async for _ in store.sweeper.steps(stream.entry, holder):
            pass
    await other.end()
    await store.registry.unregister([other.grant.claim.registration.name])
    await swept(store, other.entry)


async def take_snapshot(stream: Stream) -> None:
    """Snapshots of an engine: one is dropped, and two take the place of the life before."""
    store, grant = stream.store, stream.grant
    socket = f"{grant.publisher:016x}"
    place = await store.snapshots.take(new_place(), socket, HOUR_SECONDS, HOUR_SECONDS)
    assert place.wait_seconds == 0.0
    await store.snapshots.release(place, socket)
    assert await store.records.ask_repair(grant.claim)
    begin = begins(grant.claim, "0 GPU")
    assert await store.records.stage(grant, begin, grant.above, "1" * 16)
    assert await store.records.drop_staged(grant, "2" * 16)
    await store.records.write(grant, {"flags": "extra", "main_groups": "0"}, {})
    flags: Facts = {"flags": "extra", "main_groups": "0"}
    for nonces, told in ((("3" * 16, "4" * 16), Facts()), (("5" * 16, "6" * 16), flags)):
        ids = await store.records.stage(grant, begin, grant.above, nonces[0])
        assert ids is not None
        resolved = await stream.remembered()
        parts = resolved.parts(stored(ids[0], BLOCKS, seq=20))
        assert await store.index.apply(grant, parts, Moves(resolved.memory), None, is_staged=True) is Verdict.APPLIED
        assert await store.records.take_staged(grant, Commit(20, 2.5, 2.5, ""), told, begin, nonces[1])
        await stream.apply(stored(ids[0], BLOCKS, seq=21), event_ids={ids[0]: 9})


async def branch(store: Store, stream: Stream, gpu: int, other: Stream, shared: int) -> None:
    """More blocks than a row has slots, and blocks of unknown depth."""
    tails = [stored(gpu, [tail], seq=8, first=2 + i, after=HEAD) for i, tail in enumerate(TAILS)]
    await stream.apply(stored(gpu, [HEAD], seq=8), *tails)
    await stream.apply(removed(gpu, TAILS[63:], seq=9))
    again = [stored(gpu, [tail], seq=10, first=1 + i, after=HEAD) for i, tail in enumerate(TAILS[63:])]
    await stream.apply(*again)
    await other.apply(stored(shared, [HEAD, TAILS[63]], seq=8))
    await store.records.keep_singles(stream.grant)
    await stream.apply(stored(gpu, [DEEP, DEEP + 1], seq=11, is_deep=True))
    await stream.apply(removed(gpu, [DEEP + 1], seq=12), stored(gpu, [ALONE], seq=13))
    await stream.apply(removed(gpu, [ALONE], seq=14))


async def place(store: Store, redis: Redis, group_id: int) -> None:
    await store.placements.place(group_id, [1, 2], "http://a:1", milliseconds=HOUR_SECONDS * 1000, blocks_max=1)
    await store.placements.match(group_id, [1, 2], until=asyncio.get_running_loop().time() + HOUR_SECONDS)
    all_of, block = keys.placements(group_id), keys.placement(group_id, "7" * 16)
    await store.scripts.run(
        "place", placements=all_of, placement=[block], holder="http://a:1", milliseconds=1, holders_max=2
    )

    async def is_gone() -> bool:
        return not await redis.exists(block)

    await wait_until(is_gone, "it has run out between two scripts")

    async def is_over() -> bool:
        await store.scripts.run(
            "place",
            placements=all_of,
            placement=[keys.placement(group_id, "8" * 16)],
            holder="http://a:1",
            milliseconds=HOUR_SECONDS * 1000,
            holders_max=2,
        )
        return await redis.zscore(all_of, "7" * 16) is None

    await wait_until(is_over, "the first one is over")


async def decide(store: Store, redis: Redis, grant: Grant) -> None:
    """Reservations that are made, given back, and forgotten."""
    group_id, offers = grant.group_id, [Offer(grant.publisher, 5, spec_milliseconds=HOUR_SECONDS * 1000)]
    terms = ReservationTerms(
        context=9, milliseconds=HOUR_SECONDS * 1000, spec_keys=[keys.spec(group_id, 0xA8)], request_id="0" * 16
    )

    async def forgotten(terms: ReservationTerms, *, is_timed: bool) -> None:
        found = await store.reservations.reserve(group_id, offers, terms)
        assert found.reservation is not None
        if is_timed:
            await store.reservations.release([found.reservation], ReservationPart.PREFILL, ttft_ms=2.5)
        member: Any
        (member,) = await redis.zrange(keys.reservations(group_id), 0, -1)
        await redis.zadd(keys.reservations(group_id), {member: 1})

    for block in (2, 1):
        await store.histories.note(group_id, grant.publisher, [block], capacity=1)
    until = asyncio.get_running_loop().time() + HOUR_SECONDS
    assert await store.histories.match(group_id, [grant.publisher], [1, 2], until=until) == {grant.publisher: 1}
    await forgotten(terms, is_timed=False)
    await forgotten(ReservationTerms(context=9), is_timed=True)
    found = await store.reservations.reserve(group_id, offers, ReservationTerms(context=9))
    assert (found.reservation is not None, found.overdue) == (True, 1)
    assert found.reservation is not None
    await store.reservations.release([found.reservation], ReservationPart.PREFILL)
    changes = await store.reservations.changes(group_id, -1)
    await store.reservations.release([found.reservation], ReservationPart.OK, ttft_ms=2.5)
    assert not (await store.reservations.changes(group_id, changes.last)).is_all
    copies = ReservationTerms(context=9, milliseconds=HOUR_SECONDS * 1000, pulls=Pulls([7], [[0]], 1))
    await redis.zadd(keys.pulls(group_id, 7), {"0" * 16: 1})
    await redis.pexpire(keys.pulls(group_id, 7), HOUR_SECONDS * 1000)
    alone = ReservationTerms(context=9, pulls=Pulls([7], [[0]], 0))
    without = await store.reservations.reserve(group_id, offers, alone)
    assert without.reservation is not None
    await store.reservations.release([without.reservation], ReservationPart.OK)
    timed = await store.reservations.reserve(group_id, offers, copies)
    assert timed.reservation is not None
    await store.reservations.release([timed.reservation], ReservationPart.RENEW, milliseconds=2 * HOUR_SECONDS * 1000)
    for part in (ReservationPart.PREFILL, ReservationPart.OK):
        await store.reservations.release([timed.reservation], part, ttft_ms=2.5)
    for is_timed in (False, True):
        await forgotten(ReservationTerms(context=9), is_timed=is_timed)
        assert await store.reservations.end_overdue(group_id) == 1
    for cached_tokens in [100] * 50 + [200] * 50 + [100] * 50:  # half of what was promised, all of it, and half again
        promised = ReservationTerms(context=9, promises=["300-200-0-0-0-200-100"])
        kept = await store.reservations.reserve(group_id, [Offer(grant.publisher, 5)], promised)
        assert kept.reservation is not None
        used = Usage(cached_tokens, 200, 7)
        await store.reservations.release([kept.reservation], ReservationPart.OK, usage=used, drift_max=0.2)
    await fail(store, redis, grant, offers)


async def fail(store: Store, redis: Redis, grant: Grant, offers: list[Offer]) -> None:
    """A target whose requests fail, which is tried again, answers, and fails again."""
    name, field = keys.load(grant.group_id), f"health:{grant.publisher}"

    async def one(part: ReservationPart) -> None:
        found = await store.reservations.reserve(grant.group_id, offers, ReservationTerms(context=9))
        assert found.reservation is not None
        await store.reservations.release([found.reservation], part)

    for _ in range(3):
        await one(ReservationPart.FAILED)
    value: Any = await redis.hget(name, field)
    first, second, _, pause, probe, away = value.split()
    await redis.hset(name, field, b" ".join([first, second, b"1", pause, probe, away]).decode())
    await one(ReservationPart.OK)
    assert await redis.hget(name, field) is None
    assert await store.records.note_health(grant, milliseconds=HOUR_SECONDS * 1000)
    assert await store.records.note_health(grant, milliseconds=0)
    await one(ReservationPart.FAILED)


async def select(store: Store, redis: Redis) -> None:
    """What clients of the Dynamo API name."""
    if await store.selections.change("one", "", "begun", HOUR_SECONDS * 1000):
        await store.selections.change("one", "begun", "", 1)
        await store.selections.change("two", "", "begun", HOUR_SECONDS * 1000)
    assert await store.selections.describe("7", None, WORKER) is Verdict.APPLIED
    assert await store.selections.describe("7", WORKER, b"") is Verdict.APPLIED
    assert await store.selections.add_peer("http://peer:8091")
    assert await store.selections.remove_peer("http://peer:8091")
    await store.scripts.run(
        "keep_catalog", catalog=keys.ASKED, worker="2", before=b"", value=b"1", workers_max=10
    )  # long ago
    await store.hashes.asked.add([1])
    await store.scripts.run("keep_catalog", catalog=keys.VALUED, worker="2", before=b"", value=b"1", workers_max=10)
    await store.valuations.asked.add([1])
    async for _ in store.valuations.walk(GroupEntry(1, 1), lease_seconds=HOUR_SECONDS):
        pass
    for name in (keys.valuing(1), keys.worth(1)):
        await redis.pexpire(name, HOUR_SECONDS * 1000)


async def answers(store: Store) -> None:
    """Answers that gateways keep; there is room for one."""
    await store.answers.clear()
    found = await store.answers.find(b"\1" * 32)
    for key in (b"\1" * 32, b"\2" * 32):
        await store.answers.keep(
            key, b"a\nb", found.nonce, milliseconds=HOUR_SECONDS * 1000, entries_max=1, bytes_max=1000
        )


async def responses(store: Store) -> None:
    """Responses that clients may go on from: some are copied and make room, one is deleted, and others go at once."""
    bounds = ResponseBounds(HOUR_SECONDS * 1000, entries_max=3, bytes_max=10_000, queue_max=100)
    for name in ("1" * 32, "2" * 32, "3" * 32):
        await store.responses.keep(name, b"{}", bounds)
    await store.responses.end(await store.responses.take("one", 100, idle_ms=HOUR_SECONDS * 1000))
    await store.responses.delete("1" * 32, bounds)
    await store.responses.keep("4" * 32, b"{}", bounds)
    await store.responses.put_back("5" * 32, b"{}", bounds)
    await store.responses.delete("4" * 32, bounds._replace(queue_max=0))
    await store.responses.find(["5" * 32])
    await store.responses.end(await store.responses.take("one", 100, idle_ms=HOUR_SECONDS * 1000))


async def _is_gone(redis: Redis, key: str) -> bool:
    return not await redis.exists(key)


async def test_a_life_of_two_groups_and_the_table_agree_in_both_directions(redis_url: str, key_table: KeyTable) -> None:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        watched = Watched(redis, key_table)
        await live(watched, redis)
    assert watched.scripts == SCRIPTS.keys()
    assert watched.strangers == set()
    assert [str(row) for row in key_table.rows if row not in watched.written] == []
    claimed = {str(row): (row.written, row.removed) for row in key_table.rows}
    seen = {str(row): (frozenset(watched.written[row]), frozenset(watched.removed[row])) for row in key_table.rows}
    assert seen == claimed


def test_keys_change_with_the_number_of_the_format(key_table: KeyTable) -> None:
    """If it fails: can a process that knows the keys of before share a Redis with one that knows these? If each does
    not see at once what the other writes, ``keys.FORMAT`` needs another number. Then ``SHARED`` is what is found here.
    """
    rows = "".join(f"{row.key} {row.type} {row.field} {row.value}\n" for row in key_table.rows)
    assert (keys.FORMAT, f"{xxh3_64_intdigest(rows.encode()):016x}") == SHARED


def test_what_the_table_does_not_have_is_named(key_table: KeyTable) -> None:
    held = {
        b"wm:{1}:dead": ("set", False, {b"7"}),
        b"wm:{1}:surprise": ("string", False, b"1"),
        b"wm:{1}:holders": ("hash", False, {b"surprise": b"1"}),
        b"wm:{1}:lease:1": ("string", False, b"1.0123456789abcdef"),
        b"wm:{1}:00000000000000aa": ("string", False, b"00000000000000aa 1:1"),
    }
    assert key_table.strangers(held) == [
        "wm:{1}:surprise string False  1",
        "wm:{1}:holders hash False surprise 1",
        "wm:{1}:lease:1 string False  1.0123456789abcdef",
        "wm:{1}:00000000000000aa string False  00000000000000aa 1:1",
    ]


async def test_scripts_touch_no_key_that_was_not_declared(redis_url: str) -> None:
    async with Redis.from_url(redis_url, protocol=2) as redis, redis.monitor() as monitor:
        async with Redis.from_url(redis_url, protocol=2) as worker:
            client = RedisClient(worker, redis_url)
            await client.load_scripts()  # so that each call is one EVALSHA, also where two run at once
            await live(client, worker)
            await worker.echo("the end")
        declared: set[str] = set()
        touched = 0
        while "ECHO" not in (seen := await monitor.next_command())["command"]:
            named = set(re.findall(r"wm:\S+", seen["command"]))
            if seen["client_type"] == "lua":
                assert named <= declared, f"{seen['command']}: not in KEYS"
                touched += len(named)
            elif seen["command"].startswith("EVALSHA"):
                declared = named
        assert touched > 100


async def test_every_command_of_the_tour_answers_something(redis_url: str) -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("    redis-cli")]
    assert len(commands) > 10
    async with Redis.from_url(redis_url, protocol=2) as redis:
        client = RedisClient(redis, redis_url)
        store = Store(client)
        await store.read_incarnation()
        await store.heartbeats.report("worker-1", keep_seconds=HOUR_SECONDS)
        stream = await stream_of(store, redis, ids_above=28114406051233)
        (gpu, cpu) = await stream.begin("0 GPU", "0 CPU")
        await stream.apply(stored(gpu, [0xCB39AC69B63E3C9C]))
        await stream.end("0 CPU")
        assert cpu == gpu + 1
        await store.reservations.reserve(1, [Offer(stream.grant.publisher, 5)], ReservationTerms(context=9))
        change = PrefixChange(prefix_key("9f2c9f2c9f2c9f2c"), Change.HOT, 2048)
        await store.prefixes.apply(stream.grant, gpu, cpu, [change], ttl_seconds=600)
        await answers(store)
        for command in commands:
            (reply,) = await client.several([command])
            assert reply, command
