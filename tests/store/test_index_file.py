"""An index in a file: what is exported is what is imported, also elsewhere, and a damaged file changes nothing."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, claim_of, registration, removed, resolved_of, snapshot, stored, stream_of
from waymark.base.errors import Conflict, InvalidValue
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.rows import parse
from waymark.store import keys
from waymark.store.exporting import Exported, export_index
from waymark.store.importing import Imported, import_index
from waymark.store.index_file import IndexFile
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

CHAIN = list(range(0x100, 0x100 + 70))
NAMESPACE = 0xABCDEF0123456789
HASHES = [each + 0x10_0000 for each in CHAIN]


@pytest.fixture(autouse=True)
def _prefix_as_before() -> Iterator[None]:
    yield
    keys.use_prefix("")


@pytest.fixture
async def other(redis_url: str) -> AsyncIterator[Redis]:
    """Another, empty database."""
    async with Redis.from_url(f"{redis_url}?db=1", protocol=2) as redis:
        yield redis


@pytest.fixture
async def source(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        yield redis


def store_of(redis: Redis, shards: int = 1) -> Store:
    return Store(RedisClient(redis, "redis://test"), shards=shards)


async def saved(store: Store, path: Path, **options: Any) -> Exported:
    with path.open("w+b") as file:
        return await export_index(store, file, **options)


async def loaded(store: Store, path: Path, hash_seed: int = DEFAULT_SEED, **options: Any) -> Imported:
    return await import_index(store, IndexFile.read(path), hash_seed=hash_seed, **options)


async def filled(redis: Redis, shards: int) -> dict[str, Stream]:
    """Two engines with all that an index has: branches, blocks without depth, namespaces, copies, an empty head."""
    store = store_of(redis, shards)
    one = await stream_of(store, redis, registration("pod-1"))
    two = await stream_of(store, redis, registration("pod-2", endpoint="tcp://10.0.0.2:5557"))
    gpu, cpu = await one.begin("0 GPU", "0 CPU g2 #7")
    (other_gpu,) = await two.begin("0 GPU")
    await one.apply(stored(gpu, CHAIN, hashes=HASHES))
    await one.apply(stored(gpu, CHAIN[:40], hashes=HASHES[:40], seq=2), stored(cpu, CHAIN[:3], seq=2, first=41))
    await one.apply(removed(gpu, HASHES[60:], seq=3), removed(gpu, HASHES[5:7], seq=3, first=11))
    await one.store.records.keep_singles(one.grant)
    await one.apply(stored(gpu, [0x9001, 0x9002], seq=4, ns=NAMESPACE, is_deep=True))
    # More branches of one piece than its row has slots, each with further blocks of its own.
    await two.apply(stored(other_gpu, CHAIN[:8], is_identity=True))
    for number in range(40):
        tail = [0x5000 + 0x10 * number + at for at in range(5)]
        await two.apply(stored(other_gpu, tail, seq=2 + number, after=CHAIN[number % 8]))
    await two.apply(removed(other_gpu, CHAIN[:1], seq=50))
    return {"pod-1": one, "pod-2": two}


def chains() -> list[list[int]]:
    return [CHAIN, *([*CHAIN[: n % 8 + 1], *(0x5000 + 0x10 * n + at for at in range(5))] for n in range(40))]


async def told(redis: Redis, shards: int) -> dict[str, Any]:
    """What the index says of each engine: its record, every engine hash with its block and copies, and its answers."""
    store, found = store_of(redis, shards), dict[str, Any]()
    for claim in await store.directory.claims():
        stream = Stream(store, redis, await taken(store, claim))
        state = await store.records.read(stream.grant)
        assert state is not None
        memory = (await resolved_of(store, stream.grant)).memory
        hashes = {*HASHES, *CHAIN, *(n ^ NAMESPACE for n in (0x9001, 0x9002)), 0x9001, 0x9002}
        hashes |= {block for chain in chains() for block in chain}
        names = {id_: str(name) for name, id_ in state.holders.items()}
        found[claim.registration.instance_id] = {
            "registration": claim.registration,
            "state": (state.watermark, state.ts, state.newest_ts, state.digest, state.flags, state.counters),
            "blocks": {
                (name, engine_hash): (spot.namespace, spot.depth, spot.key, memory.copies(id_).of(spot.key))
                for id_, name in names.items()
                for engine_hash in hashes
                if (spot := memory.held(id_, engine_hash)) is not None
            },
            "answers": [
                [{names[id_] for id_ in holders if id_ in names} for holders in await stream.who_has(chain)]
                for chain in chains()
            ],
        }
    return found


async def taken(store: Store, claim: Any) -> Any:
    grant = await store.leases.take(claim, "a test", 3600.0, force=True)
    assert grant is not None
    return grant


@pytest.mark.parametrize(("shards", "other_shards"), [(1, 1), (1, 5), (4, 1)])
async def test_all_that_an_index_has_comes_back(
    source: Redis, other: Redis, tmp_path: Path, shards: int, other_shards: int
) -> None:
    await filled(source, shards)
    before = await told(source, shards)
    done = await saved(store_of(source, shards), tmp_path / "a")
    assert (done.publishers, done.changed, done.unreadable) == (2, 0, 0)
    imported = await loaded(store_of(other, other_shards), tmp_path / "a")
    assert (imported.publishers, imported.blocks) == (2, done.blocks)
    assert await told(other, other_shards) == before
    assert sum(len(each["blocks"]) for each in before.values()) >= done.blocks > 250
    # Imported beside what is there, under another prefix, and a second time in its place.
    keys.use_prefix("audit:")
    await loaded(store_of(other, 2), tmp_path / "a")
    await loaded(store_of(other, 2), tmp_path / "a", replaces=True)
    assert await told(other, 2) == before
    keys.use_prefix("")
    assert await told(other, other_shards) == before


async def test_blocks_come_into_rows_that_others_have_filled(source: Redis, other: Redis, tmp_path: Path) -> None:
    """The slots of the rows there are taken, so that blocks of the file need branch rows."""
    await filled(source, 1)
    await saved(store_of(source), tmp_path / "a")
    stream = await stream_of(store_of(other), other, registration("pod-9", endpoint="tcp://10.0.0.9:5557"))
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, CHAIN[:1]))
    for number in range(60):
        await stream.apply(stored(gpu, [0x70000 + number], seq=2 + number, after=CHAIN[0]))
    before = await told(source, 1)
    await loaded(store_of(other), tmp_path / "a")
    after = await told(other, 1)
    mine = after.pop("pod-9")
    assert after == before
    assert mine["blocks"][("0 GPU", CHAIN[0])]


async def test_branch_rows_come_after_the_rows_of_their_pieces(source: Redis, other: Redis, tmp_path: Path) -> None:
    """A branch row before its row is refused block by block, and its blocks come into other rows."""
    store = store_of(source)
    stream = await stream_of(store, source, registration("pod-1"))
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, CHAIN[:32]))
    for number in range(30):
        await stream.apply(
            stored(gpu, [0x5000 + 0x10 * number + at for at in range(8)], seq=2 + number, after=CHAIN[7])
        )
    rows = sorted(await source.keys("*:b*"))
    assert len(rows) > 20
    await saved(store, tmp_path / "a")
    await loaded(store_of(other), tmp_path / "a")
    assert await told(other, 1) == await told(source, 1)
    assert sorted(await other.keys("*:b*")) == rows
    claim = await claim_of(store_of(other), registration("pod-1"))
    assert int(await other.hget(keys.fence(claim.group_id, 0), f"calls:{claim.publisher}") or 0) < 10


async def test_each_block_of_a_shared_branch_row_comes_into_a_branch_row_of_its_own(
    source: Redis, other: Redis, tmp_path: Path
) -> None:
    """The file does not say what the parent of a block is, and without that nobody may put it beside others."""
    store = store_of(source)
    stream = await stream_of(store, source, registration("pod-1"))
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, CHAIN[:32]))
    for number in range(40):
        await stream.apply(stored(gpu, [0x5000 + 2 * number, 0x5001 + 2 * number], seq=2 + number, after=CHAIN[7]))
    (shared,) = await source.keys("*:b")
    value = await source.get(shared)
    assert isinstance(value, bytes)
    blocks = parse(value).holders[gpu].bit_count()
    assert blocks > 40
    await saved(store, tmp_path / "a")
    await loaded(store_of(other), tmp_path / "a")
    assert await told(other, 1) == await told(source, 1)
    assert len(await other.keys("*:b")) == blocks
    claim = await claim_of(store_of(other), registration("pod-1"))
    assert int(await other.hget(keys.fence(claim.group_id, 0), f"calls:{claim.publisher}") or 0) < 10


class Changing(RedisClient):
    """Lets a stream change right before blocks are read, as often as ``times``."""

    def __init__(self, redis: Redis, stream: Stream, times: int) -> None:
        super().__init__(redis, "redis://test")
        self._stream, self._times, self._seq = stream, times, 100

    async def hscan(self, key: str, cursor: int, count: int, match: str = "") -> tuple[int, dict[bytes, bytes]]:
        if self._times:
            self._times -= 1
            self._seq += 1
            state = await self._stream.store.records.peek(self._stream.grant.claim)
            assert state is not None
            (gpu,) = [id_ for name, id_ in state.holders.items() if name.medium == "GPU"]
            await self._stream.apply(
                removed(gpu, HASHES[-9 - self._times : -8 - self._times], seq=self._seq),
                stored(gpu, [0xF0000 + self._seq], seq=self._seq, first=9, after=0),
            )
        return await super().hscan(key, cursor, count, match)


async def test_an_export_is_that_of_one_batch_however_often_the_stream_changes(
    source: Redis, other: Redis, tmp_path: Path
) -> None:
    streams = await filled(source, 1)
    client = Changing(source, streams["pod-1"], 4)
    done = await saved(Store(client), tmp_path / "a")
    assert (done.publishers, done.changed) == (2, 0)
    now = await told(source, 1)
    assert IndexFile.read(tmp_path / "a").publishers[0].state["watermark"] == now["pod-1"]["state"][0] == 104
    await loaded(store_of(other), tmp_path / "a")
    assert await told(other, 1) == now


async def test_a_stream_that_changes_all_the_time_is_written_as_not_exact(source: Redis, tmp_path: Path) -> None:
    streams = await filled(source, 1)
    done = await saved(Store(Changing(source, streams["pod-1"], 1000)), tmp_path / "a", attempts=3)
    assert (done.publishers, done.changed) == (2, 1)
    first, second = IndexFile.read(tmp_path / "a").publishers
    assert (first.is_exact, second.is_exact) == (False, True)
    await source.flushall()
    await loaded(store_of(source), tmp_path / "a")
    claim = await claim_of(store_of(source), registration("pod-1"))
    record = await store_of(source).records.peek(claim)
    assert record is not None
    assert "untrusted" in record.flags
    assert record.watermark == first.state["watermark"]


async def test_a_cut_or_changed_file_is_refused_and_nothing_is_written(
    source: Redis, other: Redis, tmp_path: Path
) -> None:
    await filled(source, 1)
    path = tmp_path / "a"
    await saved(store_of(source), path)
    whole = path.read_bytes()
    for size in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidValue, match=r"is not whole|is no file that 'waymark export' wrote"):
            IndexFile.read(path)
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InvalidValue, match=r"is damaged|is not whole|is no file|has version"):
            IndexFile.read(path)
    path.write_bytes(whole + b"\xc0")
    with pytest.raises(InvalidValue, match="more follows after its end"):
        IndexFile.read(path)
    first = msgpack.Unpacker(raw=False)
    first.feed(whole)
    begins = first.unpack()
    path.write_bytes(msgpack.packb([begins[0], 2, *begins[2:]]) + whole[first.tell() :])
    with pytest.raises(InvalidValue, match="has version 2 of rows"):
        IndexFile.read(path)
    with pytest.raises(InvalidValue, match="cannot be read: No such file"):
        IndexFile.read(tmp_path / "none")
    assert await other.keys("*") == []


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({}, {"pod-1", "of-b", "of-n"}),
        ({"model": "m"}, {"pod-1", "of-b"}),
        ({"tenant": "b"}, {"of-b"}),
        ({"model": "n", "tenant": "default"}, {"of-n"}),
        ({"model": "n", "tenant": "b"}, set()),
    ],
)
async def test_a_file_has_what_is_wanted_of_models_and_tenants(
    source: Redis, other: Redis, tmp_path: Path, wanted: dict[str, Any], names: set[str]
) -> None:
    """So a file of all gives a part, too."""
    store = store_of(source)
    for at, fields in enumerate(({"instance_id": "pod-1"}, {"instance_id": "of-b", "tenant_id": "b"}), 1):
        stream = await stream_of(store, source, registration(**fields, endpoint=f"tcp://10.0.0.{at}:1"))
        (holder,) = await stream.begin("0 GPU")
        await stream.apply(stored(holder, CHAIN[: 10 * at]))
    await stream_of(store, source, registration("of-n", model_name="n", endpoint="tcp://10.0.0.3:1"))
    blocks = sum({"pod-1": 10, "of-b": 20, "of-n": 0}[name] for name in names)

    part = await saved(store, tmp_path / "part", **wanted)
    await saved(store, tmp_path / "whole")
    assert (part.publishers, part.blocks) == (len(names), blocks)
    if not names:
        return
    paths: list[tuple[Path, dict[str, Any]]] = [(tmp_path / "part", {}), (tmp_path / "whole", wanted)]
    for path, options in paths:
        await other.flushdb()
        found = await loaded(store_of(other), path, **options)
        assert (found.publishers, found.blocks) == (len(names), blocks)
        claims = await store_of(other).directory.claims()
        assert {claim.registration.instance_id for claim in claims} == names


async def test_an_import_is_checked_before_it_writes(source: Redis, other: Redis, tmp_path: Path) -> None:
    await filled(source, 1)
    store = store_of(other)
    await saved(store_of(source), tmp_path / "a")
    with pytest.raises(InvalidValue, match=r"has no publisher of this model and tenant; it has default/m"):
        await loaded(store, tmp_path / "a", model="another")
    with pytest.raises(InvalidValue, match=r"WAYMARK_HASH_SEED is 5, but the blocks of .* are hashed with 1337"):
        await loaded(store, tmp_path / "a", hash_seed=5)
    assert await other.keys("*") == []
    await store.registry.register(registration("pod-2", endpoint="tcp://10.0.0.3:5557"))
    before = await snapshot(other)
    with pytest.raises(Conflict, match=r"has a registration of .*pod-2.* already, .* with --replace"):
        await loaded(store, tmp_path / "a")
    assert await snapshot(other) == before
    assert (await loaded(store, tmp_path / "a", replaces=True)).publishers == 2
    assert (await claim_of(store, registration("pod-2"))).registration.endpoint == "tcp://10.0.0.2:5557"


def test_a_pipe_is_refused_because_a_file_is_read_twice() -> None:
    """As ``waymark import <(zcat index.gz)`` gives it."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(InvalidValue, match="is a pipe; give the name of a file"):
            IndexFile.read(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
        os.close(writing)
