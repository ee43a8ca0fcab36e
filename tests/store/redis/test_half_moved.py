"""A slot of a Cluster that is half moved: no query of its group is refused, and no other group waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
from redis.exceptions import AskError, MovedError, ResponseError

from tests.store.factories import registration, stored
from tests.store.flow import applied, asked, begun, granted
from tests.topologies import Cluster, farm, migrate, moving, start_cluster
from waymark.base.errors import StoreUnavailable
from waymark.domain.match import conductor_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.rows import PIECE_BLOCKS, Place
from waymark.store import keys
from waymark.store.leases import Grant
from waymark.store.redis.address import HostPort
from waymark.store.redis.cluster import read_singly
from waymark.store.scripts import Verdict
from waymark.store.store import Store

STEPS = 12
QUERIES = 16
#: Of many rows, of which the last has room for two more.
BLOCKS = list(range(1, 3001))
LAST_HEAD = BLOCKS[len(BLOCKS) // PIECE_BLOCKS * PIECE_BLOCKS]
MORE = [3001, 3002]
OLD, NEW = ("old", 1), ("new", 2)


# ---- one by one --------------------------------------------------------------------------------------


async def test_each_node_is_asked_once_and_values_keep_their_places() -> None:
    asked_of: list[tuple[HostPort, int]] = []
    there = {"b": b"2", "d": None}

    async def pipeline(node: HostPort, commands: object) -> list[object]:
        assert isinstance(commands, list)
        asked_of.append((node, len(commands)))
        if node == OLD:
            return [AskError("7 new:2") if key in there else key.encode() for _, key in commands]
        assert commands[::2] == [("ASKING",)] * 2
        return [word for _, key in commands[1::2] for word in (b"OK", there[key])]

    assert await read_singly(pipeline, OLD, ["a", "b", "c", "d"]) == [b"a", b"2", b"c", None]
    assert asked_of == [(OLD, 4), (NEW, 4)]


@pytest.mark.parametrize("error", [MovedError("7 new:2"), ResponseError("no")])
async def test_an_error_is_raised(error: Exception) -> None:
    async def pipeline(node: HostPort, commands: object) -> list[object]:
        return [b"1", error]

    with pytest.raises(type(error)):
        await read_singly(pipeline, OLD, ["a", "b"])


# ---- a real Cluster ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with farm() as servers:
        yield start_cluster(servers)


@pytest.fixture
async def store(cluster: Cluster) -> AsyncIterator[Store]:
    for node in cluster.primaries:
        node.ask("FLUSHALL")
    store = Store.open(cluster.url, shards=1, timeout_seconds=5.0)
    yield store
    await store.close()


async def held(store: Store, instance_id: str, model_name: str) -> tuple[Grant, int]:
    """An instance of a group of its own, with all blocks."""
    await store.registry.register(registration(instance_id, model_name=model_name))
    grant = await granted(store, instance_id)
    (gpu,) = await begun(store, grant, "0 GPU")
    await applied(store, grant, stored(gpu, BLOCKS))
    return grant, gpu


async def asked_of(store: Store, model_name: str, blocks: list[int]) -> dict[str, int]:
    left = list(blocks)

    def source(count: int) -> bytes:
        piece, left[:] = left[:count], left[count:]
        return pack(piece)

    reading = await store.reader.read(GroupName("default", model_name), 16, source, deadline_seconds=30.0)
    assert reading is not None
    assert not reading.is_partial
    return {name: row.longest for name, row in conductor_rows(reading.walk).items()}


@pytest.mark.outside
async def test_queries_are_answered_while_a_slot_is_half_moved(cluster: Cluster, store: Store) -> None:
    """Keys go ahead a few at a time, under load; what is written to the group meanwhile arrives in the end."""
    grant, gpu = await held(store, "pod-1", "m")
    other, other_gpu = await held(store, "pod-2", "n")
    slot_key = keys.holders(grant.group_id)
    source = cluster.primaries[cluster.of(slot_key)]
    target = cluster.primaries[(cluster.of(slot_key) + 1) % 3]
    slot = cluster.slot(slot_key)
    assert slot != cluster.slot(keys.holders(other.group_id))

    async def write() -> None:
        """As a stream does: again and again, until Redis takes it."""
        while True:
            try:
                assert await applied(store, grant, stored(gpu, MORE, seq=2)) is Verdict.APPLIED
                return
            except StoreUnavailable:
                continue

    with moving(cluster, [slot_key], source, target) as arrive:
        names = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
        assert len(names) > len(BLOCKS) / PIECE_BLOCKS > 4 * STEPS
        Random(7).shuffle(names)
        # So that what is written names keys at both nodes until the end: its row goes first, its fence stays.
        first = keys.block_prefix(grant.group_id, 0) + Place(LAST_HEAD).name
        names.remove(first)
        names.sort(key=lambda name: name.endswith(b":fence"))
        names = names[: len(names) * 3 // 4]
        migrate(source, target, [first])
        writing = asyncio.ensure_future(write())
        for step in range(STEPS):
            if moved := names[step::STEPS]:
                migrate(source, target, moved)
            lengths = [Random(step * QUERIES + i).randrange(1, 4500) for i in range(QUERIES)]
            found = await asyncio.gather(
                *(asked_of(store, "m", list(range(1, length + 1))) for length in lengths),
                *(asked_of(store, "n", BLOCKS) for _ in range(4)),
            )
            at_least = [min(length, len(BLOCKS)) for length in lengths]
            assert all(each["pod-1"] >= least for each, least in zip(found, at_least, strict=False))
            assert found[QUERIES:] == [{"pod-2": len(BLOCKS)}] * 4
            assert await applied(store, other, stored(other_gpu, [9000 + step], seq=2 + step)) is Verdict.APPLIED
        assert not writing.done()
        arrive()
        await writing
        assert await asked(store, range(1, 3100)) == {"pod-1": MORE[-1]}
    assert await asked(store, range(1, 3100)) == {"pod-1": MORE[-1]}
