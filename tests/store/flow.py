"""A life of a group through the store alone, on any kind of Redis: all that the two roles ever do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.conftest import wait_until
from tests.store.factories import (
    GROUP,
    Change,
    apply_changes,
    begins,
    claim_of,
    registration,
    removed,
    resolved_of,
    stored,
)
from waymark.domain.match import conductor_rows
from waymark.domain.names import HolderName, PublisherName
from waymark.domain.packing import pack
from waymark.domain.prefixes import Change as Heat
from waymark.domain.prefixes import PrefixChange, prefix_key
from waymark.store.directory import GroupEntry
from waymark.store.leases import Grant
from waymark.store.responses import ResponseBounds
from waymark.store.scripts import Verdict
from waymark.store.store import Store

BLOCKS = list(range(1, 601))


async def asked(store: Store, blocks: Sequence[int] = BLOCKS) -> dict[str, int]:
    """What a query answers: how many blocks of the prompt each instance has, without those that have none."""
    left = list(blocks)

    def source(count: int) -> bytes:
        piece = left[:count]
        del left[:count]
        return pack(piece)

    reading = await store.reader.read(GROUP, 16, source, deadline_seconds=30.0)
    if reading is None:
        return {}
    return {name: row.longest for name, row in conductor_rows(reading.walk).items() if row.longest}


async def granted(store: Store, instance_id: str, worker: str = "worker-1", *, force: bool = False) -> Grant:
    grant = await store.leases.take(await claim_of(store, registration(instance_id)), worker, 3600.0, force=force)
    assert grant is not None
    return grant


async def begun(store: Store, grant: Grant, *names: str) -> list[int]:
    above = await store.leases.highest_holder(grant)
    assert above is not None
    ids = await store.records.new_life(grant, unit="", is_restart=False, begin=begins(grant.claim, *names), above=above)
    assert ids is not None
    return ids


async def applied(store: Store, grant: Grant, *changes: Change) -> Verdict:
    """Apply changes; the watermark goes to the last one's seq."""
    return await apply_changes(store, grant, *changes)


async def swept(store: Store, entry: GroupEntry) -> None:
    while (holder := await store.sweeper.pick(entry)) is not None:
        async for _ in store.sweeper.steps(entry, holder):
            pass


async def searched(store: Store, entry: GroupEntry) -> None:
    """Search the fences of all shards."""
    place = await store.leftovers.look(entry)
    while place != (0, 0):
        place = await store.leftovers.look(entry, place)


async def live_and_end(store: Store, shards: int) -> None:
    """Register, store, ask, remove, clear, take over, unregister, sweep; nothing of it is left in an answer."""
    assert await store.check() == []
    assert await store.read_incarnation() == await store.read_incarnation()
    assert await store.registry.register(registration())
    assert await store.registry.register(registration("pod-2"))
    assert not await store.registry.register(registration())
    further = registration("pod-1", endpoint="tcp://10.0.0.1:6557", is_further=True)
    assert await store.registry.register(further)
    assert await store.directory.group(GROUP) == GroupEntry(1, shards)
    assert list(await store.heartbeats.report("worker-1", keep_seconds=30)) == ["worker-1"]

    one, other = await granted(store, "pod-1"), await granted(store, "pod-2")
    (gpu, cpu), (others,) = await begun(store, one, "0 GPU", "0 CPU"), await begun(store, other, "0 GPU")
    assert len({gpu, cpu, others}) == 3
    assert await applied(store, one, stored(gpu, BLOCKS), stored(cpu, BLOCKS[:10], first=601)) is Verdict.APPLIED
    assert await applied(store, other, stored(others, BLOCKS[:100])) is Verdict.APPLIED
    assert await asked(store) == {"pod-1": 600, "pod-2": 100}
    assert await applied(store, one, removed(gpu, BLOCKS[500:], seq=2)) is Verdict.APPLIED
    assert await applied(store, one, removed(gpu, BLOCKS[500:], seq=2)) is Verdict.STALE
    assert await asked(store) == {"pod-1": 500, "pod-2": 100}
    memory = (await resolved_of(store, one)).memory
    assert [memory.held(gpu, block) is not None for block in (1, 2, 599)] == [True, True, False]

    hot, warm = gpu, cpu
    for change in Heat:
        some = [PrefixChange(prefix_key(name), change) for name in ("a", "b")]
        assert await store.prefixes.apply(one, hot, warm, [some[0], *some], ttl_seconds=60) is not None
    assert await store.prefixes.apply(one, hot, warm, [PrefixChange(prefix_key("a"), Heat.HOT, 7)], ttl_seconds=60)
    assert await store.prefixes.read(1, prefix_key("a"), until=asyncio.get_running_loop().time() + 60) == {hot: 7}
    assert len(await store.prefixes.oldest(one, hot, warm, 100)) == 1

    await store.placements.place(one.group_id, range(3), "http://10.0.0.1:8000", milliseconds=60_000, blocks_max=2)
    found = await store.placements.match(one.group_id, range(1, 3), until=asyncio.get_running_loop().time() + 60)
    assert found == {"http://10.0.0.1:8000": 2}

    store.counts.add("kv_index.kv_aware", b"key")
    await wait_until(lambda: _is_counted(store), "the count has arrived", 20)

    nonce = (await store.answers.find(b"k" * 32)).nonce
    assert await store.answers.keep(b"k" * 32, b"v", nonce, milliseconds=9000, entries_max=1, bytes_max=9000)
    assert (await store.answers.find(b"k" * 32)).value == b"v"
    assert (await store.answers.room()).entries == await store.answers.clear() == 1

    bounds = ResponseBounds(60_000, entries_max=10, bytes_max=10_000, queue_max=10)
    assert (await store.responses.keep("1" * 32, b"{}", bounds)).is_done
    assert await store.responses.find(["1" * 32, "2" * 32]) == [b"{}", None]
    (entry,) = await store.responses.take("worker-1", 10, idle_ms=0)
    assert (entry.name, await store.responses.take("worker-2", 10, idle_ms=0)) == ("1" * 32, [entry])
    await store.responses.end([entry])
    assert await store.responses.take("worker-2", 10, idle_ms=0) == []

    assert await store.leases.renew(one, 60.0)
    assert await store.records.write(one, {"status": "active"}, {"frames": 2})
    assert await store.records.set_lost(one, is_lost=True)
    assert await store.records.set_lost(one, is_lost=False)
    assert await store.leases.take(one.claim, "worker-2", 60.0) is None
    heir = await granted(store, "pod-1", "worker-2", force=True)
    assert await applied(store, one, stored(gpu, [700], seq=3)) is Verdict.FENCED
    state = await store.records.read(heir)
    assert state is not None
    assert (state.watermark, state.holders) == (2, {HolderName(0, "GPU"): gpu, HolderName(0, "CPU"): cpu})

    cleared = await store.records.new_life(heir, unit="0 GPU", is_restart=False, begin=[], above=heir.above)
    assert cleared == []
    assert await asked(store) == {"pod-1": 10, "pod-2": 100}
    (again,) = await begun(store, heir, "0 GPU")
    assert again > max(gpu, cpu, others)
    await store.leases.drop(heir)

    names = [PublisherName(pod, "default", 0) for pod in ("pod-1", "pod-2")]
    names.insert(1, further.name)
    assert await store.registry.unregister(names) == names
    assert await asked(store) == {}
    await swept(store, GroupEntry(1, shards))
    assert await store.sweeper.left(GroupEntry(1, shards)) == 0
    assert await store.directory.registrations() == []


async def _is_counted(store: Store) -> bool:
    return await store.counts.read() == ({"kv_index.kv_aware": 1}, 1)
