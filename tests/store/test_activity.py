"""The stream of what has happened: written in the background, bounded, and read from any place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Repeating, registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.store import activity, keys
from waymark.store.activity import ActivityKind, is_entry_id
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.store import Store


async def test_entries_are_read_in_order_and_after_one_of_them(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    for number in range(5):
        store.activity.note(ActivityKind.SWEEP, detail=str(number))

    async def are_written() -> bool:
        return len(await store.activity.newest(10)) == 5

    await wait_until(are_written, "the entries are written")
    found = await store.activity.newest(2)
    assert [entry.content for entry in found] == [{"kind": "sweep", "detail": "3"}, {"kind": "sweep", "detail": "4"}]
    assert all(is_entry_id(entry.id) for entry in found)
    every = await store.activity.after("0-0", 10)
    assert [entry.content["detail"] for entry in await store.activity.after(every[1].id, 2)] == ["2", "3"]
    assert await store.activity.after(every[-1].id, 10) == []


async def test_an_entry_of_another_form_is_left_out(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    for name, value in (
        ("entry", "no JSON"),
        ("other", "1"),
        ("entry", "[]"),
        ("entry", "{}"),
        ("entry", '{"kind":"x"}'),
    ):
        await redis.xadd(keys.ACTIVITY, {name: value})
    assert [entry.content for entry in await store.activity.newest(10)] == [{"kind": "x"}]


@pytest.mark.parametrize("unreadable", [1, 2, 5])
async def test_pages_of_unreadable_entries_hide_none_behind_them(redis: Redis, unreadable: int) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    for value in ('{"kind":"x"}', *unreadable * ["[]"], '{"kind":"y"}'):
        await redis.xadd(keys.ACTIVITY, {"entry": value})
    (first,) = await store.activity.after("0-0", 1)
    (last,) = await store.activity.after(first.id, 2)
    assert [entry.content for entry in (first, last)] == [{"kind": "x"}, {"kind": "y"}]
    assert await store.activity.after(last.id, 2) == []


async def test_what_does_not_fit_is_dropped_and_counted() -> None:
    metrics = Metrics()
    store = Store.open("redis://127.0.0.1:1", metrics=metrics)
    for _ in range(activity._WAITING_MAX + 3):
        store.activity.note(ActivityKind.SWEEP)
    assert b"waymark_activity_dropped_total 3.0" in metrics.render()[0]
    await store.close()


class Losing(RedisClient):
    """Loses the reply of one call of a script."""

    def __init__(self, client: RedisClient, script: str, call: int) -> None:
        super().__init__(client._redis, client.url, reads=client.reads)
        self._script, self._calls_left = script, call

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        reply = await super().run(name, keys, args)
        if name == self._script:
            self._calls_left -= 1
            if not self._calls_left:
                raise StoreUnavailable("the reply is lost")
        return reply


@pytest.mark.parametrize("is_repeated", [True, False], ids=["repeated", "failed"])
async def test_an_unregistered_publisher_is_noted_though_the_last_reply_was_lost(
    client: RedisClient, is_repeated: bool
) -> None:
    """The first call registers, the second marks the claim as leaving, the third deletes it."""
    store = Store(Repeating(client, "claim_publisher") if is_repeated else Losing(client, "claim_publisher", 3))
    await store.registry.register(registration())
    with nullcontext() if is_repeated else pytest.raises(StoreUnavailable):
        await store.registry.unregister([registration().name])
    assert await store.directory.claims() == []

    async def are_written() -> bool:
        return len(await store.activity.newest(10)) == 2

    await wait_until(are_written, "both are noted")
    assert [entry.content["kind"] for entry in await store.activity.newest(10)] == ["registered", "unregistered"]


async def test_the_stream_is_trimmed_to_about_its_length(redis_url: str) -> None:
    store = Store.open(redis_url)
    for _ in range(20):
        await store.scripts.run("note_activity", activity=keys.ACTIVITY, length=200, entry=[b'{"kind":"x"}'] * 100)
    kept = len(await store.activity.newest(activity.LENGTH))
    assert 200 <= kept < 500, "Redis trims whole nodes of about 100 entries"
    await store.close()
