"""note_entries.lua and what chooses a cut: how many blocks a group has, and which of its holders end."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from tests.store.factories import Stream, hgetall, registration, snapshot, stream_of
from waymark.store import keys
from waymark.store.entries import GroupEntries
from waymark.store.store import Store


async def neighbour(stream: Stream, name: str = "pod-2") -> Stream:
    of = stream.grant.claim.registration
    return await stream_of(stream.store, stream.redis, registration(name, model_name=of.model_name))


async def test_the_numbers_of_all_publishers_of_a_group_are_added(store: Store, stream: Stream) -> None:
    other = await neighbour(stream)
    assert await store.entries.note(stream.grant, {11: 30, 12: 20}, 1000) == GroupEntries(50, 1, 0)
    assert await store.entries.note(other.grant, {13: 7}, 1000) == GroupEntries(57, 2, 0)
    assert await store.entries.note(stream.grant, {12: 25}, 1000) == GroupEntries(32, 2, 0)
    assert await store.entries.note(stream.grant, {12: 25}, 1000) == GroupEntries(32, 2, 0), "again is the same"


async def test_as_many_of_the_oldest_end_as_are_too_many(store: Store, stream: Stream) -> None:
    other = await neighbour(stream)
    await store.entries.note(other.grant, {11: 40, 14: 40}, 100)
    found = await store.entries.note(stream.grant, {12: 30, 13: 20}, 100)
    assert found == GroupEntries(130, 2, 11), "without the 40 blocks of 11 there are 90"
    assert await store.entries.cuts([stream.grant.claim, other.grant.claim]) == {stream.grant.group_id: 11}


async def test_what_ends_already_is_not_counted_when_more_is_chosen(redis: Redis, store: Store, stream: Stream) -> None:
    other = await neighbour(stream)
    await store.entries.note(other.grant, {11: 40, 14: 40}, 100)
    await store.entries.note(stream.grant, {12: 30, 13: 20}, 100)
    await redis.hset(keys.entries(stream.grant.group_id), "turn", "1")
    # The other worker has not ended 11 yet.
    assert await store.entries.note(stream.grant, {12: 30, 13: 20}, 100) == GroupEntries(130, 2, 11)
    await redis.hset(keys.entries(stream.grant.group_id), "turn", "1")
    assert await store.entries.note(stream.grant, {12: 30, 13: 20, 15: 11}, 100) == GroupEntries(141, 2, 12)


async def test_one_caller_at_a_time_chooses(store: Store, stream: Stream) -> None:
    found = await store.client.run("note_entries", *_call(stream, 200))
    assert found[1:] == [200, 1, 0, 1]
    found = await store.client.run("note_entries", *_call(stream, 201))
    assert found[1:] == [201, 1, 0, 0]


async def test_a_turn_that_nobody_used_ends(redis: Redis, store: Store, stream: Stream) -> None:
    await store.client.run("note_entries", *_call(stream, 200))
    for turn in ("1", "99999999999999"):  # it is over; a clock was set back
        await redis.hset(keys.entries(stream.grant.group_id), "turn", turn)
        assert (await store.client.run("note_entries", *_call(stream, 200)))[4] == 1


async def test_values_that_nobody_wrote_count_as_nothing(redis: Redis, store: Store, stream: Stream) -> None:
    entries = keys.entries(stream.grant.group_id)
    junk: dict[Any, Any] = {"7": "x 1:y 2", "9": "9" * 40, "total": "-", "cut": "no", "turn": "soon"}
    await redis.hset(entries, mapping=junk)
    found = await store.entries.note(stream.grant, {12: 300}, 100)
    assert found is not None
    assert (found.blocks, found.cut) == (300, 12)
    await redis.delete(entries)


async def test_another_token_notes_nothing(redis: Redis, store: Store, stream: Stream) -> None:
    await store.registry.unregister([stream.grant.claim.registration.name])
    before = await snapshot(redis)
    assert await store.entries.note(stream.grant, {12: 300}, 100) is None
    assert await snapshot(redis) == before


async def test_with_the_last_publisher_the_key_goes(redis: Redis, store: Store, stream: Stream) -> None:
    other = await neighbour(stream)
    await store.entries.note(other.grant, {11: 40}, 10)
    await store.entries.note(stream.grant, {12: 30}, 10)
    await store.registry.unregister([other.grant.claim.registration.name])
    entries = keys.entries(stream.grant.group_id)
    assert (await hgetall(redis, entries))[b"total"] == b"30"
    await store.registry.unregister([stream.grant.claim.registration.name])
    assert not await redis.exists(entries)


def _call(stream: Stream, blocks: int) -> tuple[list[str | bytes], list[str | bytes | int]]:
    grant = stream.grant
    words: list[str | bytes | int] = [grant.publisher, grant.token, 100, 60_000, "", f"{blocks} 12:{blocks}"]
    return [keys.entries(grant.group_id), grant.record], words
