"""A Redis Cluster: blocks of one model on every primary, and what happens when slots or primaries go elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from tests.conftest import wait_until
from tests.patience import patient, within
from tests.store.factories import registration, resolved_of, stored
from tests.store.flow import BLOCKS, applied, asked, begun, granted, live_and_end
from tests.topologies import Cluster, Server, farm, is_cluster_ok, moving, start_cluster
from waymark.base.errors import StoreUnavailable
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import HolderName
from waymark.store import keys
from waymark.store.exporting import export_index
from waymark.store.importing import import_index
from waymark.store.index_file import IndexFile
from waymark.store.store import Store

SHARDS = 16


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three primaries without replicas, which every test leaves whole."""
    with farm() as servers:
        yield start_cluster(servers)


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """Empty."""
    for node in nodes.primaries:
        node.ask("FLUSHALL")
        node.ask("SCRIPT", "FLUSH")
    return nodes


@pytest.fixture
async def store(cluster: Cluster) -> AsyncIterator[Store]:
    store = Store.open(cluster.url, shards=SHARDS, timeout_seconds=5.0)
    yield store
    await store.close()


async def held(store: Store) -> int:
    """pod-1 has all blocks; its holder."""
    await store.registry.register(registration())
    grant = await granted(store, "pod-1")
    (gpu,) = await begun(store, grant, "0 GPU")
    await applied(store, grant, stored(gpu, BLOCKS))
    return gpu


def answers(store: Store, answer: dict[str, int]) -> Callable[[], Awaitable[bool]]:
    """For ``wait_until``; a Redis that is away has not answered yet."""

    async def check() -> bool:
        try:
            return await asked(store) == answer
        except StoreUnavailable:
            return False

    return check


async def test_all_that_the_roles_do_works_on_a_cluster(cluster: Cluster, store: Store) -> None:
    await live_and_end(store, SHARDS)


async def test_an_index_moves_to_a_cluster_and_back_also_under_a_prefix(
    cluster: Cluster, store: Store, redis_url: str, tmp_path: Path
) -> None:
    """The one Redis has one shard, and the Cluster sixteen."""
    one = Store.open(redis_url, timeout_seconds=5.0)
    try:
        await held(one)
        await moved(one, store, tmp_path / "there")
        assert await asked(store) == {"pod-1": 600}
        counts = [node.ask("DBSIZE") for node in cluster.primaries]
        assert min(counts) > len(BLOCKS) / 32 / 10, counts
        keys.use_prefix("back:")
        assert await asked(one) == {}
        keys.use_prefix("")
        with (tmp_path / "back").open("w+b") as file:
            await export_index(store, file)
        keys.use_prefix("back:")
        await import_index(one, IndexFile.read(tmp_path / "back"), hash_seed=DEFAULT_SEED)
        assert await asked(one) == {"pod-1": 600}
        # A whole life under a prefix: each script finds its keys in one slot.
        keys.use_prefix("life:")
        await live_and_end(store, SHARDS)
    finally:
        keys.use_prefix("")
        await one.close()


async def moved(source: Store, target: Store, path: Path) -> None:
    with path.open("w+b") as file:
        await export_index(source, file)
    await import_index(target, IndexFile.read(path), hash_seed=DEFAULT_SEED)


async def test_the_worth_of_caches_is_that_of_the_blocks_on_every_primary(cluster: Cluster, store: Store) -> None:
    await held(store)
    await store.registry.register(registration("pod-2"))
    second = await granted(store, "pod-2")
    (others,) = await begun(store, second, "0 GPU")
    await applied(store, second, stored(others, BLOCKS[:400]))
    (entry,) = (await store.directory.groups()).values()

    assert sum([blocks async for blocks in store.valuations.walk(entry)]) == len(BLOCKS)

    valuation = (await store.valuations.read([entry.group_id]))[entry.group_id]
    tokens = {name: (worth.tokens, worth.only) for name, worth in valuation.worths.items()}
    assert (tokens, valuation.share) == ({"pod-1": (600 * 16, 200 * 16), "pod-2": (400 * 16, 0)}, 1.0)


async def test_blocks_of_one_model_are_on_every_primary(cluster: Cluster, store: Store) -> None:
    await held(store)
    counts = [node.ask("DBSIZE") for node in cluster.primaries]
    assert min(counts) > len(BLOCKS) / 32 / 10, counts
    assert await asked(store) == {"pod-1": 600}


async def test_scripts_are_on_every_primary_and_come_back_where_they_were_forgotten(
    cluster: Cluster, store: Store
) -> None:
    await held(store)
    for node in cluster.primaries:
        node.ask("SCRIPT", "FLUSH")
    grant = await granted(store, "pod-1", "worker-2", force=True)
    (gpu,) = await begun(store, grant, "0 GPU")
    await applied(store, grant, stored(gpu, [601, 602], seq=2))
    assert await asked(store, range(1, 603)) == {"pod-1": 602}
    assert await store.check() == []


async def test_scripts_that_may_repeat_share_one_connection_to_each_primary(cluster: Cluster, store: Store) -> None:
    await store.client.load_scripts()
    words = ["1", "no such token", *[""] * 6, "64", "65536", "0", "0", "0"]
    tags = [f"{{1.{shard}}}" for shard in range(SHARDS)]

    async def fenced(tag: str) -> bool:
        reply = await store.client.run("apply_rows", [f"wm:{tag}:fence", f"wm:{tag}:branches"], words)
        return bool(reply[0] == b"fenced")

    def connections(node: Server) -> list[str]:
        with node.client() as client:
            return [each["id"] for each in client.client_list() if each["cmd"] == "evalsha"]

    before = [set(connections(node)) for node in cluster.primaries]
    assert all(await asyncio.gather(*(fenced(tag) for tag in tags * 20)))
    after = [set(connections(node)) for node in cluster.primaries]
    assert max(len(now - then) for now, then in zip(after, before, strict=True)) <= 1
    for node in cluster.primaries:
        with node.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
    assert all(await asyncio.gather(*(fenced(tag) for tag in tags)))


async def test_every_primary_tells_of_itself(cluster: Cluster, store: Store) -> None:
    infos = await store.client.infos()
    assert sorted(info["tcp_port"] for info in infos) == sorted(node.port for node in cluster.primaries)


async def test_a_cluster_that_is_down_is_not_ready_though_its_nodes_answer(cluster: Cluster, store: Store) -> None:
    """A slot that no node has, and so no key is answered."""
    assert await store.check() == []
    owner, slot = cluster.primaries[2], 16383

    def is_down() -> bool:
        whole = [node for node in cluster.primaries if is_cluster_ok(node)]
        for node in whole:
            # A message of the owner that was still on its way makes a node believe again that the slot is served.
            with suppress(ResponseError):
                node.ask("CLUSTER", "DELSLOTS", slot)
        return not whole

    async def is_ready() -> bool:
        return await store.check() == []

    try:
        await wait_until(is_down, "the Cluster is down")
        (sentence,) = await store.check()
        assert "CLUSTERDOWN" in sentence
    finally:
        owner.ask("CLUSTER", "ADDSLOTS", slot)
        await wait_until(lambda: all(map(is_cluster_ok, cluster.primaries)), "the Cluster is whole")
    await wait_until(is_ready, "the store is ready again")


async def test_a_word_said_anywhere_is_heard(cluster: Cluster, store: Store) -> None:
    async with store.client.subscription(keys.CONTROL) as subscription, within(20):
        await subscription.get_message(seconds=5)  # the subscription itself
        for node in cluster.primaries:
            node.ask("PUBLISH", keys.CONTROL, f"from {node.port}")
            while (heard := await subscription.get_message(seconds=1)) is None:
                continue
            assert heard["data"] == f"from {node.port}".encode()


async def test_a_slot_that_moves_is_followed(cluster: Cluster, store: Store) -> None:
    """MOVED to a node that the map does not show, as seen by queries, single commands, scripts and batches."""
    gpu = await held(store)
    source, target = cluster.primaries[0], cluster.primaries[1]
    moved = [shard for shard in range(SHARDS) if cluster.of(keys.fence(1, shard)) == 0]
    assert moved
    with moving(cluster, [keys.fence(1, shard) for shard in moved], source, target) as arrive:
        arrive()
        assert await asked(store) == {"pod-1": 600}
        grant = await granted(store, "pod-1", "worker-2", force=True)
        memory = (await resolved_of(store, grant)).memory
        assert memory.blocks == len(BLOCKS)
        await applied(store, grant, stored(gpu, [601], seq=2))


async def test_a_key_that_has_gone_ahead_of_its_slot_is_found_there(cluster: Cluster, store: Store) -> None:
    """ASK: while a slot moves, a key is at the one node or at the other."""
    await held(store)
    client = store.client
    key = keys.holders(1)
    source = cluster.primaries[cluster.of(key)]
    target = cluster.primaries[(cluster.of(key) + 1) % 3]
    before = await client.hgetall(key)
    assert before
    with moving(cluster, [key], source, target) as arrive:
        source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        # Many at once: ASKING must not come to stand before another one's command.
        found = await asyncio.gather(*(client.hgetall(key) for _ in range(50)))
        assert all(each == before for each in found)
        assert await client.several([("HGET", key, "group"), ("HGET", keys.GROUPS, "last_group")]) == [
            before[b"group"], b"1",
        ]  # fmt: skip
        arrive()
        assert await client.hgetall(key) == before


async def test_a_primary_that_says_nothing_costs_a_bounded_time_and_no_other_shard(cluster: Cluster) -> None:
    store = Store.open(cluster.url, shards=SHARDS, timeout_seconds=patient(2.0))
    await held(store)
    # Soon after, the other nodes take the frozen one for failed, and the whole Cluster is down.
    hasty = Store.open(cluster.url, shards=SHARDS, timeout_seconds=0.3)
    frozen = cluster.primaries[2]
    theirs = next(f"wm:{{{i}}}:x" for i in range(99) if cluster.of(f"wm:{{{i}}}:x") == 2)
    others = next(f"wm:{{{i}}}:x" for i in range(99) if cluster.of(f"wm:{{{i}}}:x") == 0)
    assert await store.client.hget(others, "f") is None
    frozen.pause()
    try:
        async with within(10):
            with pytest.raises(StoreUnavailable):
                await hasty.client.hget(theirs, "f")
            with pytest.raises(StoreUnavailable):
                await hasty.client.several([("HGET", theirs, "f"), ("HGET", others, "f")])
            assert await store.client.hget(others, "f") is None
            assert len(await hasty.check()) == 1
    finally:
        frozen.resume()
    await wait_until(answers(store, {"pod-1": 600}), "the query is answered again", 20.0)
    await hasty.close()
    await store.close()


@pytest.mark.long
async def test_a_replica_takes_over_and_everything_goes_on() -> None:
    with farm() as servers:
        cluster = start_cluster(servers, has_replicas=True)
        store = Store.open(cluster.url, cluster.url + "?role=replica", shards=SHARDS, timeout_seconds=patient(1.0))
        await held(store)
        await wait_until(answers(store, {"pod-1": 600}), "the replicas answer", 20.0)
        assert store._read_client is not None
        assert await served_by(cluster.replicas) > 0, "queries go to the replicas"

        cluster.primaries[0].kill()

        async def is_written() -> bool:
            try:
                grant = await granted(store, "pod-1", "worker-2", force=True)
                state = await store.records.read(grant)
                assert state is not None
                seq = (state.watermark or 0) + 1
                await applied(store, grant, stored(state.holders[HolderName(0, "GPU")], range(600 + seq, 700), seq=seq))
            except StoreUnavailable:
                return False
            return True

        await wait_until(is_written, "the replica has taken over", 40.0)
        await wait_until(answers(store, {"pod-1": 600}), "its blocks are answered", 20.0)
        assert await store.check() == []

        # The second half of a rolling restart: now the one that has just taken over is the only one, and a
        # replica of another primary goes away. Queries go on to who is left.
        cluster.replicas[1].kill()
        await wait_until(answers(store, {"pod-1": 600}), "the primary answers for its replica", 20.0)
        await store.close()


async def served_by(servers: list[Server]) -> int:
    """How many MGET these have served."""
    stats = [server.info("commandstats").get("cmdstat_mget", {"calls": 0}) for server in servers]
    return sum(int(each["calls"]) for each in stats)
