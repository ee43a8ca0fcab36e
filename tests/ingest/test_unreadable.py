"""Records that cannot be read: every kind of record, every kind of junk, every endpoint, a worker's rounds.

Each place of the key table is damaged for a tenant of its own, all at once. No request may fail with 500, no worker
may end, and a neighbour must find everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import WITHOUT_PROBES, Bench, Hand, Pod
from tests.patience import patient
from tests.store.factories import Stream, registration, stored, stream_of
from waymark.api.application import create_app
from waymark.api.options import ApiOptions
from waymark.base.metrics import Metrics
from waymark.base.shape import plain
from waymark.decide.options import SelectionOptions
from waymark.decide.served import PromptOptions
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import PublisherName
from waymark.inspection import status
from waymark.inspection.inspector import Inspector
from waymark.store import keys
from waymark.store.store import Store

TOKENS = list(range(32))
BLOCKS = extend(None, token_bytes(TOKENS), 16)

JUNK = {
    "empty": b"",
    "word": b"abc",
    "fraction": b"1.5",
    "bytes": b"\xff\x00\xfe",
    "long": b"9" * 5000,
    "negative": b"-1",
    "list": b"[1, [2]]",
    "object": b"{}",
    "newer": b'{"format": 2, "kind": "TensorRT"}',
    "deep": b"[" * 5000,
    "nan": b"nan",
}
#: To make as many publishers as there are places takes seconds, so several kinds of junk come after each other.
SCENES = 2


@dataclass
class Victim:
    """A publisher in a tenant of its own, with two blocks."""

    stream: Stream
    holder: int

    @property
    def name(self) -> PublisherName:
        return self.stream.grant.claim.registration.name

    @property
    def record(self) -> str:
        return self.stream.grant.record

    @property
    def table(self) -> str:
        return keys.holders(self.stream.grant.group_id)

    @property
    def fence(self) -> str:
        return keys.fence(self.stream.grant.group_id, 0)

    @property
    def engine(self) -> str:
        return keys.engine(self.stream.grant.group_id, 0, self.holder)

    @property
    def dead(self) -> str:
        return keys.dead(self.stream.grant.group_id)


Place = Callable[[Victim], tuple[str, str | bytes | None]]
"""Where a victim is damaged: key, and field of a hash; None for a string, '' for a member of a set."""

RECORD_FIELDS = (
    *("name", "format", "life", "status", "token", "worker", "turn", "watermark", "ts", "newest_ts", "digest", "flags"),
    *("main_groups", "last_error", "holder:0 GPU", "holder:", "holder:x y", "holder:1", "event:1", "event:x"),
    "count:gaps",
)

PLACES: dict[str, Place] = {
    "claim": lambda of: (keys.PUBLISHERS, keys.publisher_field(of.name)),
    "group": lambda of: (keys.GROUPS, keys.group_field(of.stream.grant.claim.registration.group)),
    "table-group": lambda of: (of.table, "group"),
    "table-incarnation": lambda of: (of.table, "incarnation"),
    "table-version": lambda of: (of.table, "version"),
    "table-row": lambda of: (of.table, f"publisher:{of.stream.grant.publisher}"),
    "table-strange-row": lambda of: (of.table, "publisher:x"),
    "table-holder": lambda of: (of.table, str(of.holder)),
    "table-strange-holder": lambda of: (of.table, "no holder"),
    "lease": lambda of: (of.stream.grant.lease, None),
    "dead": lambda of: (of.dead, ""),
    "fence": lambda of: (of.fence, str(of.stream.grant.publisher)),
    "fence-holder": lambda of: (of.fence, "holder"),
    "block": lambda of: (of.stream.key(BLOCKS[0]).decode(), None),
    "entry": lambda of: (of.engine, f"{BLOCKS[0]:016x}"),
    "strange-entry": lambda of: (of.engine, "no hash"),
    "applied": lambda of: (of.engine, "applied"),
    "copied": lambda of: (of.engine, "*"),
    **{f"record-{name}": lambda of, name=name: (of.record, name) for name in RECORD_FIELDS},  # type: ignore[misc]
}

KEYS: dict[str, Callable[[Victim], str]] = {
    "record": lambda of: of.record,
    "table": lambda of: of.table,
    "fence": lambda of: of.fence,
    "dead": lambda of: of.dead,
    "engine": lambda of: of.engine,
    "lease": lambda of: of.stream.grant.lease,
    "block": lambda of: of.stream.key(BLOCKS[0]).decode(),
}


@dataclass
class Scene:
    bench: Bench
    hand: Hand
    neighbour: Pod
    api: httpx.AsyncClient
    inspector: Inspector

    async def victim(self, tenant: str, *, has_socket: bool) -> Victim:
        of = registration(
            "pod-v",
            tenant_id=tenant,
            endpoint=self.bench.address() if has_socket else None,
            kind=EngineKind.VLLM if has_socket else EngineKind.STANDARD,
        )
        stream = await stream_of(self.bench.store, self.bench.redis, of, "test")
        (holder,) = await stream.begin("0 GPU")
        await stream.apply(stored(holder, BLOCKS))
        await self.bench.store.leases.drop(stream.grant)
        return Victim(stream, holder)

    @asynccontextmanager
    async def without_worker(self) -> AsyncIterator[None]:
        """Meanwhile nobody takes the lease of what is registered."""
        await self.hand.stop()
        yield
        self.hand = await self.bench.worker("worker-0", WITHOUT_PROBES)

    async def rounds(self, hand: Hand, count: int = 2) -> None:
        """The worker polls so often again, and is alive after that."""

        def heartbeats() -> float:
            return hand.metric("script_replies_total", script="beat", verdict="applied")

        for _ in range(count):
            before = heartbeats()
            hand.worker.poller.hint.set()
            await wait_until(lambda before=before: heartbeats() > before or hand.task.done(), "the worker polls")  # type: ignore[misc]
        assert not hand.task.done(), hand.task

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        answer = await self.api.request(method, path, json=body)
        assert answer.status_code != 500, f"{method} {path} {body}: {answer.text}"
        return answer

    async def shows(self, path: str) -> bool:
        answer = await self.ask("GET", path)
        assert answer.status_code in (200, 503), f"{path}: {answer.text}"
        return answer.status_code == 200

    async def look_around(self) -> None:
        """Everything that shows all tenants. On a busy machine Redis may be too late for an answer once: 503."""
        for path in ("/services", "/workers", "/global_view", "/ready", "/health", "/metrics"):
            await wait_until(lambda path=path: self.shows(path), f"{path} answers")  # type: ignore[misc]
        for path in ("/dynamo/workers", "/dynamo/dump", "/dynamo/health"):
            await wait_until(lambda path=path: self.shows(path), f"{path} answers")  # type: ignore[misc]
        assert (await self.ask("POST", "/query", {"model": "m", "tenant_id": "nobody's"} | QUERY)).json() == {}
        await status.gather(self.inspector, status.PublisherFilter())

    async def ask_for(self, victim: Victim) -> None:
        """Everything that a tenant may ask; what comes out is its own affair, but for 500."""
        name = victim.name
        of = victim.stream.grant.claim.registration
        tenant = {"tenant_id": name.tenant_id}
        await self.ask("POST", "/query", {"model": "m"} | QUERY | tenant)
        await self.ask("POST", "/query_by_hash", {"model": "m", "block_size": 16, "seq_hashes": BLOCKS} | tenant)
        await self.ask("POST", "/dynamo/query", {"model_name": "m", "token_ids": TOKENS} | tenant)
        body = {"type": of.kind, "modelname": "m", "block_size": 16, "endpoint": of.endpoint} | tenant
        await self.ask("POST", "/register", body | {"instance_id": name.instance_id})
        await self.ask("POST", "/register", body | {"instance_id": "pod-w"})
        event = {"event_id": 1, "event_type": "stored", "base_block_idx": 0, "seq_hashes": BLOCKS, "token_ids": TOKENS}
        for instance_id in (name.instance_id, "pod-w"):
            await self.ask("POST", "/events", event | {"backend_id": instance_id} | tenant)
        await self.ask("POST", "/query", {"model": "m"} | QUERY | tenant)
        await self.ask("POST", "/unregister", {"instance_id": name.instance_id, "dp_rank": 0} | tenant)
        await self.ask("POST", "/unregister", {"instance_id": "pod-w"} | tenant)
        await self.ask("POST", "/dynamo/unregister", {"instance_id": 7, "model_name": "m"} | tenant)

    async def neighbour_is_well(self) -> None:
        pod = self.neighbour
        await pod.work(2)
        await pod.agrees()
        await pod.has_status("active")
        await pod.counted(restarts=0, batches_lost=0)
        body = {"model": "m", "tenant_id": "default", "block_size": 4, "token_ids": list(pod.prompts[-1].tokens)}
        (row,) = (await self.ask("POST", "/query", body)).json()["default"].values()
        assert row["longest_matched"] > 0


QUERY: dict[str, Any] = {"block_size": 16, "token_ids": TOKENS}


@asynccontextmanager
async def scene_of(bench: Bench, url: str) -> AsyncIterator[Scene]:
    neighbour = await bench.pod()
    hand = await bench.worker(options=WITHOUT_PROBES)
    await neighbour.caught_up()
    store = Store.open(url, timeout_seconds=patient(2.0))
    options = ApiOptions(prompts=PromptOptions(deadline_seconds=patient(1.0)), inspect_seconds=patient(5.0))
    transport = httpx.ASGITransport(
        app=create_app(store, options, SelectionOptions(), Metrics()), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://waymark") as api:
        inspector = Inspector(Store.open(url, timeout_seconds=patient(2.0)))
        yield Scene(bench, hand, neighbour, api, inspector)
        await inspector.client.close()
    await store.close()


@pytest.fixture
async def scene(bench: Bench, redis_url: str) -> AsyncIterator[Scene]:
    async with scene_of(bench, redis_url) as scene:
        yield scene


async def put(bench: Bench, key: str, field: str | bytes | None, value: bytes) -> None:
    if field is None:
        await bench.redis.set(key, value)
    elif field == "":
        await bench.redis.sadd(key, value)
    else:
        await bench.redis.hset(key, field, value)


@pytest.mark.parametrize("first", range(SCENES))
async def test_junk_in_one_place_is_nobody_elses_affair(scene: Scene, first: int) -> None:
    """Each place has some kinds of junk in turn. Every other one is of a publisher with a socket, each time others."""
    bench, kinds = scene.bench, list(JUNK.values())[first::SCENES]
    async with scene.without_worker():
        victims = {
            name: await scene.victim(name, has_socket=bool(number % 2)) for number, name in enumerate(PLACES, first)
        }
    await scene.rounds(scene.hand)
    await scene.look_around()
    for turn in range(len(kinds)):
        for number, (name, place) in enumerate(PLACES.items(), turn):
            await put(bench, *place(victims[name]), kinds[number % len(kinds)])
        await scene.rounds(scene.hand)
        await scene.look_around()
    await scene.neighbour_is_well()
    for victim in victims.values():
        await scene.ask_for(victim)
    await scene.rounds(scene.hand)
    fresh = await bench.worker("worker-2", WITHOUT_PROBES)
    await scene.rounds(fresh)
    await scene.look_around()
    await scene.neighbour_is_well()
    assert not scene.hand.task.done()
    assert not fresh.task.done()


async def test_a_key_of_another_type_is_nobody_elses_affair(scene: Scene) -> None:
    bench = scene.bench
    async with scene.without_worker():
        victims = {
            f"{name}-{has_socket}": await scene.victim(f"{name}-{has_socket}", has_socket=has_socket)
            for name in KEYS
            for has_socket in (False, True)
        }
    await scene.rounds(scene.hand)
    for name, victim in victims.items():
        key = KEYS[name.partition("-")[0]](victim)
        await bench.redis.delete(key)
        await bench.redis.rpush(key, "junk")
    await scene.rounds(scene.hand)
    await scene.look_around()
    for victim in victims.values():
        await scene.ask_for(victim)
    fresh = await bench.worker("worker-2", WITHOUT_PROBES)
    for hand in (fresh, scene.hand):
        await scene.rounds(hand)
    await scene.look_around()
    await scene.neighbour_is_well()


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_in_what_all_tenants_share_ends_nobody(scene: Scene, junk: str) -> None:
    redis, value = scene.bench.redis, JUNK[junk]
    victim = await scene.victim("v", has_socket=False)
    await redis.hset(keys.PUBLISHERS, value or "strange", value)
    await redis.hset(keys.GROUPS, value or "strange", value)
    await redis.hset(keys.PUBLISHERS, '["n","z",0]', value)
    for field in ("hash_seed", "last_group", "last_publisher"):
        await redis.hset(keys.GROUPS, field, value)
    await redis.zadd(keys.WORKERS, {value: 9e15, b"ghost" + value: 9e15})
    await scene.rounds(scene.hand)
    await scene.look_around()
    await scene.ask_for(victim)
    fresh = await scene.bench.worker("worker-2", WITHOUT_PROBES)
    await scene.rounds(fresh)
    await scene.neighbour_is_well()


async def test_what_cannot_be_read_is_shown_counted_and_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "waymark.store.parsing")
    await scene.bench.redis.hset(keys.PUBLISHERS, '["n","z",0]', b'{"kind": "TensorRT", "additional_salt": "secret"}')
    await scene.rounds(scene.hand, 4)
    for _ in range(2):
        (shown,) = (await scene.ask("GET", "/workers")).json()["unreadable"]
        assert shown == {
            "kind": "registration",
            "key": "wm:publishers",
            "field": '["n","z",0]',
            "reason": f"kind is none of {', '.join(EngineKind)}",
        }
    assert scene.hand.metric("records_unreadable", record="registration") == 1
    seen = await status.gather(scene.inspector, status.PublisherFilter())
    assert [record.field for record in seen.unreadable] == ['["n","z",0]']
    assert plain(seen.unreadable) == [shown]
    told = [getattr(record, "fields", {}) for record in caplog.records]
    assert [each["field"] for each in told] == ['["n","z",0]'] * 3, "once by the worker, the API and the console"
    assert "secret" not in caplog.text
    refused = await scene.ask("POST", "/unregister", {"instance_id": "n", "tenant_id": "z", "dp_rank": 0})
    assert (refused.status_code, refused.json()["reason"]) == (409, "conflict")
    body = {"type": "standard", "modelname": "m", "block_size": 16, "instance_id": "n", "tenant_id": "z"}
    assert (await scene.ask("POST", "/register", body)).status_code == 409
    # And it goes when the record does.
    await scene.bench.redis.hdel(keys.PUBLISHERS, '["n","z",0]')
    await scene.rounds(scene.hand)
    assert scene.hand.metric("records_unreadable", record="registration") == 0
    assert (await scene.ask("GET", "/workers")).json()["unreadable"] == []


async def test_a_stream_whose_record_is_damaged_begins_anew_and_is_whole_again(bench: Bench) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.caught_up()
    for field in ("watermark", "holder:0 GPU", "event:7", "main_groups"):
        await pod.work(3)
        await pod.agrees()
        state = await pod.state()
        record = keys.record(state.group_id, state.id)
        await bench.redis.hset(record, field, "abc")
        await bench.redis.delete(keys.lease(state.group_id, state.id))
        (claim,) = await bench.store.directory.claims()
        grant = await bench.store.leases.take(claim, "test", 60.0, force=True)
        assert grant is not None
        await bench.store.leases.drop(grant)
        await pod.work(1)
        await pod.agrees()
        assert b"abc" not in (await bench.redis.hgetall(record)).values()


async def test_a_record_of_a_newer_release_is_left_alone(scene: Scene) -> None:
    async with scene.without_worker():
        victim = await scene.victim("v", has_socket=True)
    held = orjson.loads(await scene.bench.redis.hget(keys.PUBLISHERS, keys.publisher_field(victim.name)) or b"")
    assert held["format"] == 1
    await scene.bench.redis.hset(victim.record, mapping={"format": 2, "watermark": "12:9"})
    await scene.rounds(scene.hand, 3)
    await asyncio.sleep(0)
    record = await scene.bench.redis.hgetall(victim.record)
    assert record[b"watermark"] == b"12:9"
    assert b"holder:0 GPU" in record
    await scene.neighbour_is_well()
