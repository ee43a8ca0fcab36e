"""Redis has lost some of its keys, as a Cluster has whose one primary came back empty: all of it is there again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from redis.crc import key_slot

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from waymark.domain.names import GroupName
from waymark.store import keys
from waymark.store.store import Store

SHARDS = 4


async def at_work(bench: Bench) -> Pod:
    pod = await bench.pod()
    await pod.at_work(6)
    return pod


async def forget(bench: Bench, pattern: str) -> None:
    names = await bench.redis.keys(pattern)
    assert names
    await bench.redis.delete(*names)


async def dumped(bench: Bench, pattern: str) -> dict[Any, Any]:
    """These keys as they are now."""
    return {name: await bench.redis.dump(name) for name in await bench.redis.keys(pattern)}


async def set_back(bench: Bench, pattern: str, before: dict[Any, Any]) -> None:
    """As a failover does it: what was written since is gone."""
    await forget(bench, pattern)
    for name, value in before.items():
        await bench.redis.restore(name, 0, value, replace=True)


async def test_registrations_that_redis_has_lost_are_put_back_as_they_were(bench: Bench) -> None:
    await bench.worker()
    pod = await at_work(bench)
    before = await bench.store.directory.claims()
    await bench.redis.delete(keys.PUBLISHERS)

    async def are_back() -> bool:
        return await bench.store.directory.claims() == before

    await wait_until(are_back, "the same registration stands", PATIENCE_SECONDS)
    await pod.work(2)
    await pod.agrees()


async def test_a_primary_with_the_registrations_and_a_group_comes_back_empty(bench: Bench) -> None:
    """Nothing else that Redis has says that it lost anything."""
    await bench.worker()
    pod = await at_work(bench)
    slots = {key_slot(name.encode()) for name in (keys.PUBLISHERS, keys.holders(1))}
    names: Any = await bench.redis.keys("wm:*")
    await bench.redis.delete(*[name for name in names if key_slot(name) in slots])

    async def is_back() -> bool:
        return [each.name for each in await bench.store.directory.registrations()] == [pod.name]

    await wait_until(is_back, "the publisher is registered again", PATIENCE_SECONDS)
    await pod.caught_up()
    await pod.agrees()


async def test_a_group_that_redis_has_lost_is_found_again(bench: Bench) -> None:
    await bench.worker()
    pod = await at_work(bench)
    group = GroupName("default", "m")
    before = await bench.store.directory.group(group)
    await bench.redis.delete(keys.GROUPS)

    async def is_back() -> bool:
        return await bench.store.directory.group(group) == before

    await wait_until(is_back, "queries find the group", PATIENCE_SECONDS)
    await pod.agrees()


@pytest.mark.parametrize("is_new", [False, True], ids=["known-before", "all-workers-are-new"])
async def test_a_group_without_publishers_that_redis_has_lost_is_swept(bench: Bench, is_new: bool) -> None:
    """The table of the group, which the group's own slot has, shows that the id is still its own."""
    worker = await bench.worker()
    pod = await at_work(bench)
    before = await dumped(bench, "wm:{1*")
    await bench.store.registry.unregister([pod.name])
    await wait_until(lambda: is_swept(bench), "it is swept", PATIENCE_SECONDS)
    if is_new:
        await worker.stop()
    await set_back(bench, "wm:{1*", before)
    await bench.redis.delete(keys.GROUPS)
    if is_new:
        await bench.worker()

    async def is_back() -> bool:
        return bool(await bench.store.directory.group(GroupName("default", "m")))

    await wait_until(is_back, "the group is known again", PATIENCE_SECONDS)
    await wait_until(lambda: is_swept(bench), "what came back is swept", PATIENCE_SECONDS)


async def is_swept(bench: Bench) -> bool:
    """No row is left, and no entry of a holder."""
    names: Any = await bench.redis.keys("wm:{1*")
    rows = [name for name in names if re.fullmatch(rb"wm:\{[\d.]+\}:[0-9a-f]{16}(:[bs])?", name)]
    return not (rows or await bench.redis.exists(keys.dead(1)))


async def publishers_of(bench: Bench) -> tuple[list[int], list[int]]:
    """The publishers of the group's table, and those with a claim."""
    fields = await bench._client.hkeys(keys.holders(1))
    ids = [int(field.partition(b":")[2]) for field in fields if field.startswith(b"publisher:")]
    return sorted(ids), [claim.publisher for claim in await bench.store.directory.claims()]


async def test_a_publisher_that_comes_back_without_its_registration_ends(bench: Bench) -> None:
    """The group's slot has lost the end of a publisher; the slot of the registrations has not."""
    await bench.worker()
    pod = await at_work(bench)
    before = await dumped(bench, "wm:{1}:*")
    await bench.store.registry.unregister([pod.name])
    await pod.register()
    await pod.caught_up()
    await pod.agrees()
    await set_back(bench, "wm:{1}:*", before)
    assert await publishers_of(bench) == ([1], [2])

    async def has_ended() -> bool:
        return await publishers_of(bench) == ([2], [2])

    await wait_until(has_ended, "only the publisher with a registration is left", PATIENCE_SECONDS)
    await pod.work(2)
    await pod.agrees()


async def test_two_publishers_that_were_given_one_id_are_both_applied(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one primary of a Cluster gives it again that came back empty later than the one with the registrations."""
    # What the test writes is no change that Redis lists, so a worker sees it when it reads all registrations.
    monkeypatch.setattr("waymark.store.directory._WHOLE_SECONDS", 1.0)
    await bench.worker()
    first = await at_work(bench)
    second = await bench.pod("pod-2")
    await second.at_work(6)
    claims = {claim.registration.instance_id: claim for claim in await bench.store.directory.claims()}
    same = replace(claims["pod-2"], publisher=claims["pod-1"].publisher)
    field = keys.publisher_field(same.registration.name).decode()
    await bench.redis.hset(keys.PUBLISHERS, field, same.encode())

    async def are_two() -> bool:
        return len({claim.publisher for claim in await bench.store.directory.claims()}) == 2

    await wait_until(are_two, "the second has an id of its own", PATIENCE_SECONDS)
    for pod in (first, second):
        await pod.work(2)
        await pod.agrees()


@pytest.mark.parametrize("moment", ["quiet", "at work", "between two workers"])
async def test_a_shard_that_has_come_back_empty_is_filled_again(bench: Bench, moment: str) -> None:
    bench.store = Store(bench._client, shards=SHARDS)
    hand = await bench.worker()
    pod = await at_work(bench)
    if moment == "between two workers":
        await hand.die()
        await bench.redis.delete(keys.lease(1, 1))
    await forget(bench, "wm:{1.2}:*")
    if moment == "between two workers":
        await bench.worker("worker-2")
    if moment == "at work":
        await pod.work(2)
    await pod.agrees()
    await pod.counted(batches_lost=0)


@pytest.mark.parametrize("takeovers", [0, 1])
@pytest.mark.parametrize("shard", range(1, SHARDS))
async def test_a_shard_that_loses_its_last_writes_while_nobody_has_the_stream_is_filled_again(
    bench: Bench, shard: int, takeovers: int
) -> None:
    """The worker that knew how far the shard was has died, and so did each that took over and had nothing to apply."""
    bench.store = Store(bench._client, shards=SHARDS)
    hand = await bench.worker("worker-0", WITHOUT_PROBES)
    pod = await at_work(bench)
    before = await dumped(bench, f"wm:{{1.{shard}}}:*")
    await pod.work(6)
    await pod.agrees()
    for number in range(1, takeovers + 1):
        await hand.die()
        await bench.redis.delete(keys.lease(1, 1))
        hand = await bench.worker(f"worker-{number}", WITHOUT_PROBES)
        await is_of(pod, f"worker-{number}")
    await hand.die()
    await bench.redis.delete(keys.lease(1, 1))
    await set_back(bench, f"wm:{{1.{shard}}}:*", before)
    await bench.worker("worker-9", WITHOUT_PROBES)
    await pod.agrees()
    await pod.counted(batches_lost=0)


async def is_of(pod: Pod, worker: str) -> None:
    async def is_so() -> bool:
        state = await pod.state()
        return (state.worker, state.status) == (worker, "active")

    await wait_until(is_so, f"{worker} has it", PATIENCE_SECONDS)


async def test_a_shard_that_is_emptied_after_a_takeover_is_replayed_though_nobody_publishes(bench: Bench) -> None:
    """Nothing has been applied under the new grant, so nothing but the marks of the grant tells of the shard."""
    pod = await bench.pod(is_registered=False)
    await Store(bench._client, shards=3).registry.register(pod.registration)
    first = await bench.worker("worker-1", WITHOUT_PROBES)
    await pod.at_work(5)
    await first.stop()
    await bench.worker("worker-2", WITHOUT_PROBES)
    await is_of(pod, "worker-2")
    for shard in (1, 2):
        lost = await bench.redis.keys(f"wm:{{1.{shard}}}:*")
        assert lost
        await bench.redis.delete(*lost)
        await pod.agrees()
