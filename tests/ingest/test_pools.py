"""Pools whose events name blocks by the hashes of the engines in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import msgpack

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.apply.options import ApplyOptions
from waymark.domain.engines import EngineKind
from waymark.simulator.encode import BlockRemoved, BlockStored
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys

LARGE: dict[str, Any] = {"gpu_blocks": 10_000, "cpu_blocks": 1}
HEAD = "0" * 48


def of_engine(engine_hash: int, rank: int = 0) -> str:
    """A key of vLLM for a block."""
    return f"m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{HEAD}{engine_hash & (2**64 - 1):016x}"


class Master:
    """A master of Mooncake, which names objects only."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._ids = count(1)

    def say(self, kind: str, *object_keys: str, **fields: Any) -> None:
        events = [
            {
                "event_type": kind,
                "event_id": next(self._ids),
                "backend_id": "segment-1",
                "tenant_id": "default",
                "medium": "cpu",
                "seq_hashes": [],
                "token_ids": None,
                "parent_hash": None,
                "base_block_idx": None,
                "object_key": key,
            }
            | fields
            for key in object_keys
        ]
        self.pod.publisher.publish_payload(msgpack.packb([self.pod.clock(), events, None]))


async def compute(pod: Pod, number: int, *, base: int = 100, blocks: int = 4) -> SimulatedPrompt:
    """The engine computes a prompt; its hashes of the blocks begin at ``base * number``."""
    tokens = tuple(1000 * number + i for i in range(4 * blocks))
    hashes = tuple(range(base * number, base * number + blocks))
    pod.publisher.publish([BlockStored(hashes, None, tokens, 4)], ts=pod.clock())
    await pod.at_watermark(pod.last_seq)
    return SimulatedPrompt(tokens)


def objects(number: int, *, rank: int = 0, blocks: int = 4) -> list[str]:
    return [of_engine(100 * number + i, rank) for i in range(blocks)]


async def in_pool(pod: Pod, prompt: SimulatedPrompt) -> int:
    """How many leading blocks of a prompt an engine finds that has nothing of its own."""
    longest, media, ranks = await pod.bench.row(pod, prompt)
    assert (media, ranks) == (({"CPU": longest} if longest else {}), {})
    return longest


async def comes_to(pod: Pod, prompt: SimulatedPrompt, blocks: int) -> None:
    async def does() -> bool:
        return await in_pool(pod, prompt) == blocks

    await wait_until(does, f"the pool has {blocks} blocks", PATIENCE_SECONDS)


@dataclass
class Fleet:
    """An engine, a pool behind it, and another engine that has nothing."""

    bench: Bench
    hand: Hand
    engine: Pod
    master: Master
    empty: Pod

    @classmethod
    async def on(cls, bench: Bench, **options: Any) -> Fleet:
        hand = await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(**options))
        pool = await bench.pod("pool", kind=EngineKind.MOONCAKE, has_replay=False, fields={"scope": "shared"})
        pods = [await bench.pod(f"pod-{i}", **LARGE) for i in (1, 2)]
        for pod in (pool, *pods):
            await pod.caught_up()
        await wait_until(lambda: _knows_pool(hand), "the engines' streams know of the pool", PATIENCE_SECONDS)
        return cls(bench, hand, pods[0], Master(pool), pods[1])


def _knows_pool(hand: Hand) -> bool:
    running = hand.worker.poller.running.values()
    return sum(each.applier is not None and each.applier.pool_hashes.is_wanted for each in running) == 2


async def test_an_object_is_the_block_that_an_engine_has_reported(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    prompt = await compute(fleet.engine, 1)
    fleet.master.say("stored", *objects(1))
    await comes_to(fleet.empty, prompt, 4)
    # The engine forgets it; the pool has it still.
    fleet.engine.publisher.publish([BlockRemoved(tuple(range(100, 104)))], ts=fleet.engine.clock())
    await fleet.engine.at_watermark(fleet.engine.last_seq)
    assert await in_pool(fleet.empty, prompt) == 4
    fleet.master.say("removed", objects(1)[2])
    await comes_to(fleet.empty, prompt, 2)
    fleet.master.say("cleared", "")
    await comes_to(fleet.empty, prompt, 0)


async def test_a_block_is_there_when_all_of_its_shards_are(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    first, second = [await compute(fleet.engine, i) for i in (1, 2)]
    fleet.master.say("stored", *objects(1, rank=0), *objects(1, rank=1))
    await comes_to(fleet.empty, first, 4)
    fleet.master.say("stored", *objects(2, rank=0), *objects(2, rank=1, blocks=3))
    await comes_to(fleet.empty, second, 3)
    fleet.master.say("stored", objects(2, rank=1)[3])
    await comes_to(fleet.empty, second, 4)
    fleet.master.say("removed", objects(2, rank=0)[1])
    await comes_to(fleet.empty, second, 1)
    fleet.master.say("stored", objects(2, rank=0)[1])
    await comes_to(fleet.empty, second, 4)


async def test_a_hash_that_comes_before_its_report_waits(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    fleet.master.say("stored", *objects(1))
    await fleet.master.pod.at_watermark(fleet.master.pod.last_seq)
    await fleet.master.pod.counted(waiting=4)
    prompt = await compute(fleet.engine, 1)
    # The pool says nothing more.
    await comes_to(fleet.empty, prompt, 4)
    await fleet.master.pod.counted(waiting=0, blocks_stored=4)
    fleet.master.say("removed", objects(1)[3])
    await comes_to(fleet.empty, prompt, 3)
    fleet.master.say("stored", objects(1)[3])
    await comes_to(fleet.empty, prompt, 4)


async def test_what_was_found_late_is_applied_once_whoever_has_the_stream(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    fleet.master.say("stored", *objects(1), *objects(2)[:2])
    await fleet.master.pod.counted(waiting=6)
    first = await compute(fleet.engine, 1)
    await comes_to(fleet.empty, first, 4)
    # The next worker goes on behind what was stored before the batch that comes now.
    await fleet.hand.die()
    await fleet.master.pod.is_left()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await fleet.master.pod.caught_up()
    assert await in_pool(fleet.empty, first) == 4
    fleet.master.say("stored", *objects(2))
    await fleet.master.pod.counted(waiting=4)
    second = await compute(fleet.engine, 2)
    await comes_to(fleet.empty, second, 4)
    fleet.master.say("removed", objects(1)[3], objects(2)[3])
    await comes_to(fleet.empty, first, 3)
    await comes_to(fleet.empty, second, 3)


async def test_a_pool_that_comes_after_its_engines_finds_what_they_had(bench: Bench) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    pods = [await bench.pod(f"pod-{i}", **LARGE) for i in (1, 2)]
    for pod in pods:
        await pod.caught_up()
    prompt = await compute(pods[0], 1, base=100_000, blocks=600)
    pool = await bench.pod("pool", kind=EngineKind.MOONCAKE, has_replay=False, fields={"scope": "shared"})
    await pool.caught_up()
    Master(pool).say("stored", *[of_engine(100_000 + i) for i in range(600)])
    await comes_to(pods[1], prompt, 600)

    async def is_noted() -> bool:
        return b"hashes_kept" in (await bench.redis.hget(keys.record(1, 1), "flags") or b"")

    await wait_until(is_noted, "the record says that all hashes are kept", PATIENCE_SECONDS)
    await bench.store.registry.unregister([pool.name])
    await wait_until(lambda: not _knows_pool(hand), "the engines' streams know of no pool", PATIENCE_SECONDS)

    async def is_forgotten() -> bool:
        return not await is_noted()

    await wait_until(is_forgotten, "hashes are not kept any more", PATIENCE_SECONDS)


async def test_a_block_has_as_many_shards_as_the_registration_says(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pool = await bench.pod(
        "pool", kind=EngineKind.MOONCAKE, has_replay=False, fields={"scope": "shared", "object_shards": 2}
    )
    pods = [await bench.pod(f"pod-{i}", **LARGE) for i in (1, 2)]
    for pod in (pool, *pods):
        await pod.caught_up()
    prompt = await compute(pods[0], 1)
    master = Master(pool)
    # Of a pool that has named one rank only, it is known that a second one is missing.
    master.say("stored", *objects(1, rank=0))
    await pool.counted(waiting=4)
    assert await in_pool(pods[1], prompt) == 0
    master.say("stored", *objects(1, rank=1, blocks=3))
    await comes_to(pods[1], prompt, 3)
    master.say("removed", objects(1, rank=0)[0])
    await comes_to(pods[1], prompt, 0)


async def test_what_waits_is_bounded_and_counted(bench: Bench) -> None:
    fleet = await Fleet.on(bench, waiting_blocks=10)
    fleet.master.say("stored", *objects(1, blocks=25))
    await fleet.master.pod.counted(waiting=10, waiting_dropped=15)
    assert fleet.hand.metric("waiting_dropped_total") == 15
    prompt = await compute(fleet.engine, 1, blocks=25)
    fleet.master.say("stored", *objects(1, blocks=15))
    await comes_to(fleet.empty, prompt, 25)


async def test_another_worker_goes_on_with_hashes_and_shards(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    first, second = [await compute(fleet.engine, i) for i in (1, 2)]
    fleet.master.say("stored", *objects(1, rank=0), *objects(1, rank=1))
    await comes_to(fleet.empty, first, 4)
    await fleet.hand.die()
    await fleet.master.pod.is_left()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await fleet.master.pod.caught_up()
    fleet.master.say("stored", *objects(2, rank=0))
    await fleet.master.pod.at_watermark(fleet.master.pod.last_seq)
    assert await in_pool(fleet.empty, second) == 0, "the record knows of two shards"
    fleet.master.say("stored", *objects(2, rank=1))
    await comes_to(fleet.empty, second, 4)
    assert await in_pool(fleet.empty, first) == 4


async def test_keys_of_no_known_form_and_of_other_groups_are_counted(bench: Bench) -> None:
    fleet = await Fleet.on(bench)
    prompt = await compute(fleet.engine, 1)
    other = objects(1)[1].replace("group:0", "group:1")
    fleet.master.say("stored", "weights/shard-1", objects(1)[0], other)
    await comes_to(fleet.empty, prompt, 1)
    await fleet.master.pod.counted(ignored__unknown_object_key=1, ignored__other_group=1)
    fleet.master.say("stored", *objects(1), tenant_id="other")
    await fleet.master.pod.counted(ignored__other_tenant=4)
    assert await in_pool(fleet.empty, prompt) == 1


async def test_a_storage_back_end_names_blocks_by_placeholders(bench: Bench) -> None:
    """One publisher for the files of many engines: vLLM's events without tokens."""
    await bench.worker(options=WITHOUT_PROBES)
    files = await bench.pod("files", has_replay=False, fields={"scope": "shared", "copies": "set"})
    pods = [await bench.pod(f"pod-{i}", **LARGE) for i in (1, 2)]
    for pod in (files, *pods):
        await pod.caught_up()

    async def is_kept() -> bool:
        return bool(await bench.redis.exists(keys.hashes(1)))

    prompt = await compute(pods[0], 1)
    while not await is_kept():  # until the stream of the engine knows of the pool
        prompt = await compute(pods[0], len(pods[0].prompts) + 2)
        pods[0].prompts.append(prompt)
    number = len(pods[0].prompts) + 1
    hashes = tuple(range(100 * number, 100 * number + 4))
    files.publisher.publish([BlockStored(hashes, None, (), 0, medium="SHARED_STORAGE")], ts=files.clock())

    async def is_found() -> bool:
        return await bench.row(pods[1], prompt) == (4, {"DISK": 4}, {})

    await wait_until(is_found, "the files are found", PATIENCE_SECONDS)


async def test_without_a_pool_no_hash_is_kept(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod("pod-1", **LARGE)
    await pod.caught_up()
    await compute(pod, 1)
    assert await bench.redis.keys("wm:{1}:hash*") == []


async def test_hashes_are_kept_where_a_router_asks_by_them(bench: Bench) -> None:
    """Those of blocks that were there before, too; and only of engines whose router asks so."""
    await bench.worker(options=WITHOUT_PROBES)
    asked = await bench.pod("pod-1", kind=EngineKind.SGLANG, **LARGE)
    other = await bench.pod("pod-2", **LARGE)
    for pod in (asked, other):
        await pod.caught_up()
    await compute(asked, 1)
    store = bench.store
    (group,) = (await store.directory.groups()).values()
    assert await store.hashes.find(group.group_id, range(100, 104)) == {}
    await store.hashes.asked.add([group.group_id])

    async def are_kept(number: int) -> bool:
        hashes = range(100 * number, 100 * number + 4)
        return (await store.hashes.find(group.group_id, hashes)).keys() == set(hashes)

    await wait_until(lambda: are_kept(1), "older blocks are kept", PATIENCE_SECONDS)
    await compute(asked, 2)
    assert await are_kept(2)
    await compute(other, 3)
    assert await store.hashes.find(group.group_id, range(300, 304)) == {}
