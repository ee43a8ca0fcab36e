"""An index of another format is refused, and a reset empties a Redis of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import httpx
import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.patience import patient, within
from tests.store.factories import GROUP, registration, snapshot
from tests.store.key_table import Held, KeyTable
from waymark.base.errors import Conflict, SettingsError, StoreUnavailable
from waymark.base.settings import Settings
from waymark.cli import main
from waymark.domain.names import GroupName
from waymark.runtime import picker, replica
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.store import Store

pytestmark = pytest.mark.parametrize("redis", ["real"], indirect=True)


class AnyTable(KeyTable):
    """A table that knows every key: these tests leave another format, and keys of others."""

    def strangers(self, held: Held) -> list[str]:
        return []


@pytest.fixture
def key_table() -> KeyTable:
    return AnyTable(())


async def test_the_first_group_writes_the_format(redis: Redis, redis_url: str) -> None:
    store = Store.open(redis_url)
    assert await store.other_format() is None, "an empty Redis has none"
    await store.registry.register(registration())
    assert await redis.hget(keys.GROUPS, "format") == keys.FORMAT.encode()
    assert await store.other_format() is None
    assert await store.check() == []
    await store.close()


async def test_a_failover_that_has_forgotten_it_gets_it_back(redis: Redis, redis_url: str) -> None:
    store = Store.open(redis_url)
    of = registration()
    await store.registry.register(of)
    claim = await store.directory.claim(of.name)
    assert claim is not None
    await redis.delete(keys.GROUPS)
    await store.scripts.run(
        "keep_ids",
        groups=keys.GROUPS,
        group=keys.group_field(of.group),
        id=claim.group_id,
        shards=claim.shards,
        publisher=claim.publisher,
        format=keys.FORMAT,
    )
    assert await redis.hget(keys.GROUPS, "format") == keys.FORMAT.encode()
    await store.close()


@pytest.mark.parametrize(("found", "name"), [(None, "none"), ("blocks 7", '"blocks 7"')])
@pytest.mark.parametrize("roles", [(True, False), (False, True), (True, True)], ids=["query", "ingest", "serve"])
async def test_no_role_runs_on_another_format(
    redis: Redis,
    redis_url: str,
    found: str | None,
    name: str,
    roles: tuple[bool, bool],
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def must_not_serve(*_: object) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr(replica, "_serve", must_not_serve)
    fields = {"last_group": "1", "last_publisher": "1"} | ({} if found is None else {"format": found})
    for field, value in fields.items():
        await redis.hset(keys.GROUPS, field, value)
    settings = Settings(redis_url=redis_url, port=free_port, probe_port=0, host="127.0.0.1")
    sockets = replica.open_port(settings, has_api=roles[0])
    async with within(30):
        with pytest.raises(SettingsError, match="waymark reset --yes") as refused:
            await replica.run(settings, has_api=roles[0], has_worker=roles[1], sockets=sockets)
    for bound in sockets:
        bound.close()
    assert f'found: {name}, wanted: "{keys.FORMAT}"' in str(refused.value)
    assert await redis.exists(keys.WORKERS) == 0, "no worker has begun"


async def test_no_endpoint_picker_begins_on_another_format(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_serve(*_: object) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr(picker, "EppServer", must_not_serve)
    await redis.hset(keys.GROUPS, mapping={"last_group": "1", "format": "blocks 7"})
    async with within(30):
        with pytest.raises(SettingsError, match="waymark reset --yes"):
            await picker.run(Settings(redis_url=redis_url), sockets=[])


@pytest.mark.parametrize("refusal", [None, "it has another format"])
async def test_a_replica_answers_from_no_index_whose_format_it_does_not_know(
    redis: Redis, redis_url: str, refusal: str | None, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis answers as the replica has begun to listen."""
    is_awake = False

    async def other_format(_: Store) -> str | None:
        if not is_awake:
            raise StoreUnavailable("Redis sleeps")
        return refusal

    store = Store.open(redis_url)
    await store.registry.register(registration())
    await store.close()
    monkeypatch.setattr(Store, "other_format", other_format)
    monkeypatch.setattr(replica, "freeze_heap", lambda: None)
    settings = Settings(redis_url=redis_url, port=free_port, host="127.0.0.1")
    sockets = replica.open_port(settings, has_api=True)
    role = asyncio.create_task(replica.run(settings, has_api=True, has_worker=False, sockets=sockets))
    url, prompt = f"http://127.0.0.1:{free_port}", {"model": "m", "token_ids": [1] * 16}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=patient(10)) as client, within(60):
        for _ in range(2):  # before the application is there, and after
            refused = await client.post("/query", json=prompt)
            assert (refused.status_code, refused.json()["error"]) == (503, "Redis sleeps")
            assert (await client.get("/ready")).status_code == 503
        is_awake = True
        if refusal is None:

            async def is_answered() -> bool:
                return (await client.post("/query", json=prompt)).status_code == 200

            await wait_until(is_answered, "it answers from the index")
            os.kill(os.getpid(), signal.SIGTERM)
            await role
        else:
            with pytest.raises(SettingsError, match=refusal):
                await role
    for bound in sockets:
        bound.close()


@pytest.mark.parametrize("has_read_url", [False, True])
async def test_nothing_but_the_format_is_read_while_other_commands_are_barred(
    redis: Redis, redis_url: str, has_read_url: bool
) -> None:
    store = Store.open(redis_url, redis_url if has_read_url else None)
    await store.registry.register(registration())
    ways: list[Callable[[], Awaitable[object]]] = [
        lambda: store.registry.register(registration("pod-2")),
        lambda: store.directory.registrations(),
        lambda: store.read_incarnation(),
        lambda: store.reader.read(GROUP, 16, lambda n: b"\0" * 16 * n, deadline_seconds=patient(5.0)),
        lambda: store.reservations.changes(1, -1),
    ]
    for _ in range(2):  # without connections, and with open ones
        store.bar("the index is another one")
        for way in ways:
            with pytest.raises(StoreUnavailable, match="the index is another one"):
                await way()
        assert await store.other_format() is None
        store.bar(None)
        for way in ways:
            await way()
    await store.close()


async def test_a_replica_is_not_ready_over_another_format(redis: Redis, redis_url: str) -> None:
    store = Store.open(redis_url)
    await redis.hset(keys.GROUPS, mapping={"last_group": "1", "format": "blocks 7"})
    (sentence,) = await store.check()
    assert "another format" in sentence
    await store.close()


async def test_a_process_that_already_runs_writes_no_registration_into_another_format(
    redis: Redis, redis_url: str
) -> None:
    store = Store.open(redis_url)
    await store.registry.register(registration("pod-1"))
    for restored in (registration("pod-1"), registration("pod-2", model_name="large")):
        await redis.flushall()
        await redis.hset(keys.GROUPS, mapping={"last_group": "1", "format": "rows 32 64", '["default","m"]': "1 1"})
        before = await snapshot(redis)
        for register in (store.registry.register, store.registry.restore):
            with pytest.raises(Conflict, match=r"another format .* 'waymark reset --yes"):
                await register(restored)
        assert await snapshot(redis) == before
    await store.close()


async def test_a_reset_deletes_what_is_ours_and_nothing_else(
    redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await redis.mset({f"wm:{{1}}:{number:016x}": "x" for number in range(2500)} | {"others": "kept"})
    refused = await asyncio.to_thread(main, ["reset", "--redis-url", redis_url])
    assert refused == 2
    assert await redis.dbsize() == 2501
    assert await asyncio.to_thread(main, ["reset", "--yes", "--redis-url", redis_url]) == 0
    assert "deleted 2500 keys" in capsys.readouterr().out
    assert await redis.keys("*") == [b"others"]


async def test_a_group_is_kept_only_if_redis_still_has_its_table(store: Store, redis: Redis) -> None:
    """In a Redis that came back empty its id may become that of another group."""
    entry = GroupEntry(7, 1)
    await store.claim_writer.keep_group(GROUP, entry)
    assert await redis.exists(keys.GROUPS) == 0
    await redis.hset(keys.holders(7), "group", keys.group_field(GROUP))
    await store.claim_writer.keep_group(GROUP, entry)
    assert await store.directory.group(GROUP) == entry


async def test_groups_are_found_by_their_tables(store: Store, redis: Redis) -> None:
    await redis.hset(keys.holders(2), "group", keys.group_field(GROUP))
    await redis.hset(keys.holders(3), "group", keys.group_field(GroupName("default", "known")))
    await redis.hset(keys.holders(4), "group", "no name")
    await redis.set(keys.holders(5), "no table")
    assert await store.claim_writer.groups_by_table([GroupEntry(3, 1)]) == {GROUP: GroupEntry(2, 1)}
    await redis.delete(keys.holders(4), keys.holders(5))  # the key table has no such values
