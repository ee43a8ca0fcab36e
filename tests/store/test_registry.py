"""Registry: publishers come, move and go; a crash half way is made good by whoever comes next."""

from __future__ import annotations

from asyncio import gather
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import (
    GROUP,
    Dying,
    Meeting,
    Repeating,
    claim_of,
    hgetall,
    registration,
    snapshot,
    stored,
    stream_of,
)
from waymark.base.errors import Conflict, RecordDamaged, StoreUnavailable
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName, PublisherName
from waymark.domain.targets import Role, Target
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

POD = registration()


async def rows(store: Store) -> dict[int, str]:
    """Publisher id to instance, as readers see it."""
    table = await store.reader.table(GROUP)
    return {} if table is None else {number: row.instance_id for number, row in table.publishers.items()}


async def records(redis: Redis) -> set[bytes]:
    return {name for name in await snapshot(redis) if b":publisher:" in name}


async def is_whole(store: Store, redis: Redis) -> bool:
    """Whether claims, rows and records are of the same publishers."""
    claims = {claim.publisher: claim.registration.instance_id for claim in await store.directory.claims()}
    return (
        claims == await rows(store)
        and {keys.record(1, publisher).encode() for publisher in claims} == await records(redis)
    )  # fmt: skip


async def test_a_new_publisher_has_a_claim_a_row_and_a_record(store: Store, redis: Redis) -> None:
    assert await store.registry.register(POD)
    assert await store.directory.registrations() == [POD]
    assert await is_whole(store, redis)
    claim = await claim_of(store, POD)
    assert (claim.publisher, claim.group_id, claim.shards, claim.is_leaving) == (1, 1, 1, False)


async def test_several_are_registered_at_once_and_those_that_take_more_are_left(store: Store, redis: Redis) -> None:
    same, leaving, moved = registration("same"), registration("leaving"), registration("moved")
    for each in (same, leaving, moved):
        await store.registry.register(each)
    claim = await claim_of(store, leaving)
    assert await store.claim_writer.replace(leaving.name, claim.raw, replace(claim, is_leaving=True)) is not None
    await redis.hset(keys.PUBLISHERS, keys.publisher_field(registration("odd").name), b"{}")
    new = [registration(f"new-{i}") for i in range(300)]
    others = [leaving, replace(moved, endpoint="tcp://10.0.0.9:1"), registration("odd")]
    reserved = registration("r", tenant_id="instances")
    done = await store.registry.register_several([same, *others, reserved, *new, new[0]])
    assert done == {same.name: False} | {each.name: True for each in new}
    assert {each.name for each in await store.directory.registrations()} == {each.name for each in (same, moved, *new)}
    assert await store.registry.register_several(new) == {each.name: False for each in new}
    assert await store.registry.register_several([]) == {}
    await redis.hdel(keys.PUBLISHERS, keys.publisher_field(registration("odd").name))


async def test_a_table_that_cannot_be_used_costs_its_own_registrations_alone(store: Store, redis: Redis) -> None:
    bad = registration("bad", model_name="other")
    await store.registry.register(bad)
    claim = await claim_of(store, bad)
    await store.registry.unregister([bad.name])
    await redis.delete(keys.holders(claim.group_id))
    await redis.set(keys.holders(claim.group_id), "a text")
    with pytest.raises(RecordDamaged):
        await store.registry.register_several([bad, POD])
    await store.registry.register(POD)  # what its caller does then
    (life,) = await store.discovery.lives([await claim_of(store, POD)])
    assert life[0], "it has begun"
    await redis.delete(keys.holders(claim.group_id))


async def test_every_field_of_a_registration_comes_back(store: Store) -> None:
    every = registration(
        'p|"od',
        kind=EngineKind.MOONCAKE,
        tenant_id="ten ant",
        dp_rank=7,
        endpoint=None,
        replay_endpoint="tcp://10.0.0.1:5558",
        snapshot_endpoint="tcp://10.0.0.1:5559",
        lora_name="lora",
        additional_salt="salt",
        scope="shared",
        copies="set",
        sequence="rank",
        object_shards=8,
        target=Target("https://[::1]:8000/v1", Role.DECODE, 0.5, {"zone": "a"}, "http://pod:9/metrics"),
    )
    await store.registry.register(every)
    assert await store.directory.registrations() == [every]


async def test_the_same_again_changes_nothing(store: Store, redis: Redis) -> None:
    await store.registry.register(POD)
    before = await snapshot(redis)
    assert await store.registry.register(POD) is False
    assert await snapshot(redis) == before


TARGETS = [Target(weight=0.0), Target("http://10.0.0.7:8000", Role.PREFILL, labels={"a": "b"}), Target()]


async def test_what_it_is_as_a_target_changes_without_a_new_life(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, [1, 2]))
    for target in TARGETS:
        changed = registration(target=target)
        assert await store.registry.register(changed) is True
        assert await store.registry.register(changed) is False
        assert await store.directory.registrations() == [changed]
        table = await store.reader.table(GROUP)
        assert table is not None
        assert table.targets.get(stream.grant.publisher, Target()) == target
        assert table.holders.keys() == {gpu}
    assert await is_whole(store, redis)
    await stream.apply(stored(gpu, [3], seq=2))


async def test_of_two_that_change_a_target_the_table_says_what_the_registration_says(
    store: Store, client: RedisClient, redis: Redis
) -> None:
    await store.registry.register(POD)
    first, second = (registration(target=Target(weight=weight)) for weight in (2.0, 3.0))
    slow = Store(Meeting(client, "begin_publisher", lambda: store.registry.register(second)))
    await slow.registry.register(first)
    assert await store.directory.registrations() == [second]
    table = await store.reader.table(GROUP)
    assert table is not None
    assert table.targets == {1: second.target}
    assert await is_whole(store, redis)


async def test_a_change_that_was_left_half_way_is_finished_by_the_same_again(
    store: Store, client: RedisClient, redis: Redis
) -> None:
    await store.registry.register(POD)
    changed = registration(target=Target(weight=2.0))
    with pytest.raises(StoreUnavailable):
        await Store(Dying(client, "begin_publisher")).registry.register(changed)
    assert await store.registry.register(changed) is False
    table = await store.reader.table(GROUP)
    assert table is not None
    assert table.targets == {1: changed.target}


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint", "snapshot_endpoint"])
async def test_a_new_endpoint_is_a_new_life(store: Store, redis: Redis, field: str) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, [1, 2]))
    moved = registration(**{field: "tcp://10.0.0.2:5558"})
    assert await store.registry.register(moved)
    assert await store.directory.registrations() == [moved]
    assert await is_whole(store, redis)
    assert (await claim_of(store, moved)).publisher > stream.grant.publisher
    assert await store.records.read(stream.grant) is None, "the old lease holder has lost it"
    table = await store.reader.table(GROUP)
    assert table is not None
    assert table.holders == {}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"model_name": "other"}, "modelname"),
        ({"block_size": 32}, "block_size"),
        ({"kind": EngineKind.SGLANG}, "type"),
        ({"lora_name": "lora"}, "lora_name"),
        ({"additional_salt": "tenant's secret"}, "additionalsalt"),
        ({"scope": "shared"}, "scope"),
        ({"copies": "set"}, "copies"),
        ({"sequence": "rank"}, "sequence"),
        ({"object_shards": 8}, "shards"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_another_publisher_under_the_same_name_is_a_conflict(
    store: Store, redis: Redis, changed: dict[str, Any], field: str
) -> None:
    await store.registry.register(POD)
    before = await snapshot(redis)
    with pytest.raises(Conflict) as caught:
        await store.registry.register(registration(endpoint="tcp://10.0.0.9:1", **changed))
    assert caught.value.field == field
    assert "pod-1|default|0" in caught.value.sentence
    assert field in caught.value.sentence
    assert "secret" not in caught.value.sentence
    assert await snapshot(redis) == before


async def test_ranks_and_tenants_are_publishers_of_their_own(store: Store) -> None:
    others = [POD, registration(dp_rank=1), registration(tenant_id="other")]
    for other in others:
        assert await store.registry.register(other)
    assert await store.directory.registrations() == others
    assert await store.directory.groups() == {
        GROUP: GroupEntry(1, 1),
        GroupName("other", "m"): GroupEntry(2, 1),
    }


async def test_names_that_look_alike_when_joined_are_not_the_same(store: Store) -> None:
    await store.registry.register(registration("a|b", tenant_id="c"))
    assert await store.registry.register(registration("a", tenant_id="b|c"))
    assert len(await store.directory.registrations()) == 2


async def test_a_group_keeps_its_shards_when_the_setting_changes(store: Store, client: RedisClient) -> None:
    await store.registry.register(POD)
    later = Store(client, shards=3)
    await later.registry.register(registration("pod-2"))
    assert (await claim_of(later, registration("pod-2"))).shards == 1
    await later.registry.register(registration("pod-3", model_name="large"))
    assert await later.directory.group(GroupName("default", "large")) == GroupEntry(2, 3)


async def test_twenty_registrations_of_one_name_at_once_give_one_publisher(store: Store, redis: Redis) -> None:
    answers = await gather(*(store.registry.register(POD) for _ in range(20)))
    assert answers.count(True) == 1
    assert await store.directory.registrations() == [POD]
    assert await is_whole(store, redis)


async def test_moves_at_once_leave_one_publisher(store: Store, redis: Redis) -> None:
    pods = [registration(endpoint=f"tcp://10.0.0.{i}:5557") for i in range(4)]
    answers = await gather(*(store.registry.register(pod) for pod in pods), return_exceptions=True)
    assert all(answer is True or isinstance(answer, StoreUnavailable) for answer in answers)
    (left,) = await store.directory.registrations()
    assert left in pods
    assert await is_whole(store, redis)


@pytest.mark.parametrize("again", [False, True], ids=["new", "there-already"])
async def test_an_unregister_in_the_middle_of_a_register_leaves_no_row_behind(
    store: Store, redis: Redis, client: RedisClient, again: bool
) -> None:
    if again:
        await store.registry.register(POD)

    async def unregister() -> None:
        assert await store.registry.unregister([POD.name]) == [POD.name]

    slow = Store(Meeting(client, "begin_publisher", unregister))
    assert await slow.registry.register(POD)
    assert await store.directory.registrations() == [POD]
    assert await is_whole(store, redis)


async def test_a_worker_that_makes_an_old_claim_good_brings_nothing_back(store: Store, redis: Redis) -> None:
    await store.registry.register(POD)
    claim = await claim_of(store, POD)
    await store.registry.unregister([POD.name])
    assert not await store.claim_writer.begin(claim)
    assert await rows(store) == {}
    assert await records(redis) == set()


async def test_a_registration_whose_reply_was_lost_is_new_and_in_the_activity(
    store: Store, client: RedisClient
) -> None:
    repeating = Store(Repeating(client, "claim_publisher"))
    moved = replace(POD, endpoint="tcp://10.0.0.9:5557")
    for wanted in (POD, replace(POD, target=Target(weight=0.0)), moved):
        assert await repeating.registry.register(wanted)

    async def is_noted() -> bool:
        kinds = [entry.content["kind"] for entry in await store.activity.newest(10)]
        return kinds == ["registered", "drain", "registered"]

    await wait_until(is_noted, "the activity has each change")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("script", ["new_ids", "claim_publisher", "begin_publisher"])
async def test_a_register_that_died_is_made_good_by_the_next(
    store: Store, redis: Redis, client: RedisClient, script: str, is_done: bool
) -> None:
    with pytest.raises(StoreUnavailable):
        await Store(Dying(client, script, is_done=is_done)).registry.register(POD)
    await store.registry.register(POD)
    assert await store.directory.registrations() == [POD]
    assert await is_whole(store, redis)


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("script", ["claim_publisher", "take_lease", "raise_fence", "end_publisher", "drop_fence"])
@pytest.mark.parametrize("next_one", ["unregister", "register", "move"])
async def test_an_unregister_that_died_is_made_good_by_the_next(
    store: Store, redis: Redis, client: RedisClient, script: str, is_done: bool, next_one: str
) -> None:
    stream = await stream_of(store, redis)
    await stream.begin("0 GPU")
    with pytest.raises(StoreUnavailable):
        await Store(Dying(client, script, is_done=is_done)).registry.unregister([POD.name])
    wanted = registration(endpoint="tcp://10.0.0.2:5557") if next_one == "move" else POD
    if next_one == "unregister":
        await store.registry.unregister([POD.name])
    else:
        await store.registry.register(wanted)
    assert await store.directory.registrations() == ([] if next_one == "unregister" else [wanted])
    assert await is_whole(store, redis)
    if (script, is_done, next_one) != ("claim_publisher", False, "register"):  # there, nothing had happened
        assert await store.records.read(stream.grant) is None


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "script",
    ["claim_publisher", "take_lease", "raise_fence", "end_publisher", "drop_fence", "new_ids", "begin_publisher"],
)
async def test_a_move_that_died_keeps_the_name_and_is_finished_by_a_worker(
    store: Store, redis: Redis, client: RedisClient, script: str, is_done: bool
) -> None:
    stream = await stream_of(store, redis)
    await stream.begin("0 GPU")
    moved = registration(endpoint="tcp://10.0.0.2:5557")
    with pytest.raises(StoreUnavailable):
        await Store(Dying(client, script, is_done=is_done)).registry.register(moved)
    is_marked = (script, is_done) != ("claim_publisher", False)
    for claim in await store.directory.claims():
        if claim.is_leaving:
            await store.claim_writer.finish(claim)
        else:
            await store.claim_writer.begin(claim)
    with pytest.raises(Conflict):
        await store.registry.register(registration(model_name="other"))
    assert await store.directory.registrations() == [moved if is_marked else POD]
    assert await is_whole(store, redis)


async def test_an_unregister_in_the_middle_of_a_move_is_not_undone_by_it(
    store: Store, redis: Redis, client: RedisClient
) -> None:
    await store.registry.register(POD)

    async def unregister() -> None:
        assert await store.registry.unregister([POD.name]) == [POD.name]
        assert await store.directory.registrations() == []

    slow = Store(Meeting(client, "end_publisher", unregister))
    await slow.registry.register(registration(endpoint="tcp://10.0.0.2:5557"))
    assert await is_whole(store, redis)


async def test_nobody_takes_the_name_of_a_publisher_that_moves(store: Store, redis: Redis, client: RedisClient) -> None:
    await store.registry.register(POD)

    async def take() -> None:
        with pytest.raises(Conflict):
            await store.registry.register(registration(model_name="other"))

    moved = registration(endpoint="tcp://10.0.0.2:5557")
    assert await Store(Meeting(client, "drop_fence", take)).registry.register(moved)
    assert await store.directory.registrations() == [moved]
    assert await is_whole(store, redis)


class Counting(RedisClient):
    """Counts what lists of registrations cost."""

    lists = 0

    async def hkeys(self, key: str) -> list[bytes]:
        self.lists += 1
        return await super().hkeys(key)

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        self.lists += 1
        return await super().hgetall(key)


async def test_asking_for_tenants_reads_registrations_once_per_change(
    store: Store, redis: Redis, client: RedisClient
) -> None:
    counting = Counting(client._redis, "redis://test")
    asked = Store(counting).directory
    changes = (
        (None, None),
        ("t", store.registry.register(registration(tenant_id="t"))),
        ("t", store.registry.register(registration("pod-2", tenant_id="u"))),
        ("t", store.registry.unregister([registration("pod-2", tenant_id="u").name])),
        (None, store.registry.unregister([registration(tenant_id="t").name])),
    )
    for expected, (tenant, change) in enumerate(changes, 1):
        if change is not None:
            await change
        for _ in range(50):
            assert await asked.is_tenant_known("t") is (tenant == "t")
            assert not await asked.is_tenant_known("nobody")
        assert counting.lists == expected
    await redis.flushall()
    await store.registry.register(registration(tenant_id="v"))
    assert await asked.is_tenant_known("v")


async def test_a_list_of_registrations_decodes_only_what_has_changed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        await store.registry.register(registration(f"pod-{i}"))
    assert len(await store.directory.claims()) == 20
    decoded: list[bytes] = []
    decode = Claim.decode

    def counted(raw: bytes) -> Claim:
        decoded.append(raw)
        return decode(raw)

    monkeypatch.setattr(Claim, "decode", counted)
    assert len(await store.directory.claims()) == 20
    assert decoded == []
    await store.registry.register(registration("pod-3", endpoint="tcp://10.0.0.2:5557"))
    decoded.clear()
    assert len(await store.directory.claims()) == 20
    assert len(decoded) == 1


async def test_unregister_names_those_that_were_there(store: Store, redis: Redis) -> None:
    await store.registry.register(POD)
    unknown = PublisherName("pod-9", "default", 0)
    assert await store.registry.unregister([unknown, POD.name]) == [POD.name]
    assert await store.registry.unregister([POD.name]) == []
    assert await store.directory.registrations() == []
    assert await rows(store) == {}
    assert await records(redis) == set()


async def test_what_a_publisher_held_is_gone_for_readers_when_unregister_returns(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, [1, 2]))
    await store.registry.unregister([POD.name])
    table = await store.reader.table(GROUP)
    assert table is not None
    assert (table.publishers, table.holders) == ({}, {})
    assert not await redis.exists(stream.grant.lease)
    assert await hgetall(redis, keys.fence(1, 0)) == {b"holder": b"1"}


async def test_unregisters_at_once_do_not_take_the_lease_from_each_other_for_ever(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    await stream.begin("0 GPU")
    answers = await gather(*(store.registry.unregister([POD.name]) for _ in range(3)))
    assert [POD.name] in answers
    assert await store.directory.claims() == []
    assert await is_whole(store, redis)


async def test_the_slower_of_two_unregisters_does_not_return_before_all_is_gone(
    store: Store, redis: Redis, client: RedisClient
) -> None:
    await store.registry.register(POD)

    async def faster_but_dead() -> None:
        with pytest.raises(StoreUnavailable):
            await Store(Dying(client, "take_lease")).registry.unregister([POD.name])

    slower = Store(Meeting(client, "claim_publisher", faster_but_dead))
    assert await slower.registry.unregister([POD.name]) == [POD.name]
    assert await rows(store) == {}
    assert await store.directory.claims() == []


async def test_a_tenant_is_known_while_it_has_a_registration(store: Store) -> None:
    assert not await store.directory.is_tenant_known("default")
    await store.registry.register(POD)
    assert await store.directory.is_tenant_known("default")
    assert not await store.directory.is_tenant_known("def")
    await store.registry.unregister([POD.name])
    assert not await store.directory.is_tenant_known("default")


async def test_an_unknown_group_is_none_and_asking_creates_nothing(store: Store, redis: Redis) -> None:
    assert await store.directory.group(GROUP) is None
    assert await store.directory.groups() == {}
    assert await store.directory.claims() == []
    assert await snapshot(redis) == {}


async def test_a_group_whose_id_turns_out_to_be_anothers_gets_a_new_one(store: Store, redis: Redis) -> None:
    """As after a failover that lost the last group."""
    await store.registry.register(registration("pod-9", model_name="lost"))
    await redis.delete(keys.GROUPS)
    assert await store.registry.register(POD)
    assert await store.directory.group(GROUP) == GroupEntry(2, 1)
    table = await store.reader.table(GROUP)
    assert table is not None
    assert table.group == GROUP


def test_where_a_publisher_moves_comes_back_from_its_claim() -> None:
    address = Target(address="http://10.0.0.2:8000", labels={"zone": "a"})
    for to in (
        registration(
            endpoint="tcp://10.0.0.2:5557",
            replay_endpoint="tcp://10.0.0.2:5558",
            snapshot_endpoint="tcp://10.0.0.2:5559",
        ),
        registration(endpoint=None),
        registration(target=address),
    ):
        claim = Claim(POD, 7, 1, 3, is_leaving=True, successor=to)
        found = Claim.decode(claim.encode())
        assert (found.registration, found.successor, found.wanted) == (POD, to, to)
    assert Claim.decode(Claim(POD, 7, 1, 3, is_leaving=True).encode()).wanted is None
    assert Claim.decode(Claim(POD, 7, 1, 3).encode()).wanted == POD
