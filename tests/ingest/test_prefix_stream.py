"""A source of opaque prefixes over a real HTTP connection: order, losses, bounds, takeover, and what it may not do."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, Bench, Hand
from tests.patience import patient
from waymark.base.asker import Asker, EngineKey
from waymark.decide.group_loads import GroupLoads
from waymark.domain.engines import EngineKind
from waymark.domain.names import PublisherName, Registration
from waymark.domain.prefixes import PrefixSource, prefix_key
from waymark.ingest import prefix_stream
from waymark.store import keys
from waymark.store.holder_tables import decode_table

HASHES = [f"{number:016x}" for number in range(400)]


class Source:
    """An engine's event stream: what it is told to say, and what its readers asked for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        self.status = 200
        self.content_type = "text/event-stream"
        self._connections: list[tuple[web.Request, web.StreamResponse]] = []
        self._runner: web.AppRunner | None = None
        self._over = asyncio.Event()
        self.port = 0

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        application = web.Application()
        application.router.add_get("/v1/kv_events", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self.hang_up()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/kv_events"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.headers))
        response = web.StreamResponse(status=self.status, headers={"Content-Type": self.content_type})
        await response.prepare(request)
        if self.status == 200:
            connection = request, response
            self._connections.append(connection)
            try:
                await self._over.wait()
            finally:  # its reader may have left
                self._connections = [each for each in self._connections if each is not connection]
        return response

    async def hang_up(self) -> None:
        for request, _ in self._connections:
            if request.transport is not None:
                request.transport.abort()
        self._over.set()
        self._over = asyncio.Event()
        self._connections.clear()

    async def is_read(self) -> None:
        await wait_until(lambda: bool(self._connections), "the source has a reader", PATIENCE_SECONDS)

    async def send(self, raw: bytes) -> None:
        await self.is_read()
        await self._connections[-1][1].write(raw)

    async def send_endlessly(self) -> None:
        """100 MB without the end of a line, to the present reader."""
        await self.is_read()
        _, response = self._connections[-1]
        for _ in range(1600):
            await response.write(b"x" * 65_536)

    async def tell(self, kind: str, prefix_hash: str, tokens: int | None = None, **fields: Any) -> None:
        data = (
            fields.pop("data", {}) | {"prefix_hash": prefix_hash} | ({} if tokens is None else {"token_count": tokens})
        )
        lines = [f"{name}: {value}" for name, value in fields.items()]
        await self.send(("\n".join([f"event: {kind}", *lines, f"data: {json.dumps(data)}", "", ""])).encode())


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    await source.start()
    yield source
    await source.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_stream, "PAUSE_SECONDS_MAX", 0.2)


def registration(source: Source, instance_id: str = "vllm-1", **options: Any) -> Registration:
    return Registration(
        kind=EngineKind.CONTINUUM,
        instance_id=instance_id,
        tenant_id="default",
        dp_rank=0,
        model_name="m",
        block_size=16,
        endpoint=source.url,
        replay_endpoint=None,
        lora_name=None,
        additional_salt=None,
        scope="instance",
        copies="set",
        sequence="publisher",
        prefixes=PrefixSource(**({"storage_offloading": True, "reconnect_interval_ms": 50} | options)),
    )


async def tokens(bench: Bench, prefix_hash: str) -> dict[tuple[str, str], int]:
    """By instance and medium, of live holders."""
    table = decode_table(await bench._client.hgetall(keys.holders(1)), bench.store.parser, keys.holders(1))
    if table is None:
        return {}
    until = asyncio.get_running_loop().time() + patient(5)
    found = await bench.store.prefixes.read(1, prefix_key(prefix_hash), until=until)
    return {
        (table.holders[holder].instance_id, table.holders[holder].medium): count
        for holder, count in found.items()
        if holder in table.holders
    }


async def holds(bench: Bench, prefix_hash: str, **media: int) -> None:
    expected = {("vllm-1", medium): count for medium, count in media.items()}

    async def does() -> bool:
        return await tokens(bench, prefix_hash) == expected

    try:
        await wait_until(does, f"{prefix_hash} is at {media}", PATIENCE_SECONDS)
    except BaseException:
        assert await tokens(bench, prefix_hash) == expected
        raise


NAME = PublisherName("vllm-1", "default", 0)


async def counted(bench: Bench, name: str, least: int = 1) -> None:
    async def is_so() -> bool:
        return (await bench.state(NAME)).counters.get(name, 0) >= least

    await wait_until(is_so, f"{name} is counted", PATIENCE_SECONDS)


async def has_status(bench: Bench, status: str, reason: str = "") -> None:
    async def has() -> bool:
        state = await bench.state(NAME)
        return state.status == status and reason in (state.last_error or "")

    try:
        await wait_until(has, f"the stream is {status}", PATIENCE_SECONDS)
    except BaseException:
        state = await bench.state(NAME)
        assert (state.status, state.last_error) == (status, reason)
        raise


async def test_events_move_prefixes_between_device_and_storage(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    worker = await bench.worker()
    await source.tell("cache_created", HASHES[0], 2048)
    await holds(bench, HASHES[0], GPU=2048)
    await has_status(bench, "active")
    await source.tell("cache_evicted", HASHES[0].upper())
    await holds(bench, HASHES[0], DISK=2048)
    await source.tell("cache_reloaded", HASHES[0], 1024)
    await holds(bench, HASHES[0], GPU=1024)
    await source.tell("cache_offloaded", HASHES[0])
    await holds(bench, HASHES[0], DISK=1024)
    await source.tell("message", HASHES[0], data={"event": "cache_purged"})
    await holds(bench, HASHES[0])
    assert worker.metric("events_total", type="cache_created") == 1
    await source.tell("cache_created", HASHES[1], 16)
    await holds(bench, HASHES[1], GPU=16)
    state = await bench.state(NAME)
    assert (state.worker, state.prefixes, state.blocks) == ("worker-1", {"GPU": 1, "DISK": 0}, {"GPU": 0, "DISK": 0})
    await bench.store.registry.unregister([NAME])
    assert await tokens(bench, HASHES[1]) == {}


async def test_one_bad_event_costs_that_event(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    await bench.worker()
    await source.tell("cache_created", "no hex", 1)
    await source.send(b"event: cache_created\ndata: {\n\n")
    await source.tell("cache_created", HASHES[0], -1)
    await source.tell("heartbeat", HASHES[0], 1)
    await source.tell("cache_created", HASHES[0], 5, data={"tenant_id": "other"})
    await source.tell("cache_created", HASHES[1], 7, data={"tenant_id": "default"})
    await holds(bench, HASHES[1], GPU=7)
    await holds(bench, HASHES[0])
    for name in ("prefix_hash", "prefix_json", "prefix_tokens"):
        await counted(bench, f"decode_errors.{name}")
    await counted(bench, "events_ignored.unknown_type")
    await counted(bench, "events_ignored.other_tenant")
    await has_status(bench, "active")


async def test_a_lost_connection_is_resumed_and_said_until_entries_of_before_have_ended(
    bench: Bench, source: Source
) -> None:
    await bench.store.registry.register(registration(source, entry_ttl_seconds=2))
    await bench.worker()
    await source.tell("cache_created", HASHES[0], 5, id="41")
    await holds(bench, HASHES[0], GPU=5)
    await source.hang_up()
    await has_status(bench, "degraded", "reconnected")
    await source.is_read()
    assert "Last-Event-ID" not in source.requests[0]
    assert source.requests[-1]["Last-Event-ID"] == "41"
    await counted(bench, "reconnects")
    await has_status(bench, "active")
    assert await tokens(bench, HASHES[0]) == {}


async def test_a_source_is_counted_with_the_names_of_continuum_router(
    bench: Bench, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_stream, "EventSource", partial(prefix_stream.EventSource, queue_events=4))
    await bench.store.registry.register(registration(source))
    hand = await bench.worker()
    of = {"backend": "vllm-1"}

    async def has(name: str, value: float) -> None:
        await wait_until(lambda: hand.metric(name, **of) == value, f"{name} is {value:g}", PATIENCE_SECONDS)

    await source.tell("cache_created", "no hex", 1)
    await source.tell("cache_created", HASHES[0], 5)
    await has("kv_event_received_total", 2)
    await has("kv_event_processed_total", 1)
    await has("kv_consumer_connected", 1)
    assert hand.metric("kv_consumer_reconnects_total", **of) == hand.metric("kv_event_dropped_total", **of) == 0
    event = f'event: cache_created\ndata: {{"prefix_hash": "{HASHES[1]}", "token_count": 1}}\n\n'

    async def has_dropped() -> bool:
        await source.send(event.encode() * 10)
        return hand.metric("kv_event_dropped_total", **of) >= 6

    await wait_until(has_dropped, "what finds no room is dropped", PATIENCE_SECONDS)
    await source.hang_up()
    await has("kv_consumer_reconnects_total", 1)
    await source.is_read()
    source.status = 503
    await source.hang_up()
    await has("kv_consumer_connected", 0)
    await hand.stop()
    assert hand.metrics.registry.get_sample_value("waymark_kv_consumer_connected", of) is None


async def test_another_worker_goes_on_after_the_last_event(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    first = await bench.worker()
    await source.tell("cache_created", HASHES[0], 5, id="41")
    await holds(bench, HASHES[0], GPU=5)
    await first.stop()
    await source.hang_up()
    await bench.worker("worker-2")
    await source.tell("cache_created", HASHES[1], 6, id="42")
    await holds(bench, HASHES[1], GPU=6)
    await holds(bench, HASHES[0], GPU=5)
    assert source.requests[-1]["Last-Event-ID"] == "41"
    await has_status(bench, "degraded", "reconnected")
    assert (await bench.state(NAME)).worker == "worker-2"


async def test_a_dead_worker_is_replaced_and_writes_nothing_more(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    first = await bench.worker()
    await source.tell("cache_created", HASHES[0], 5)
    await holds(bench, HASHES[0], GPU=5)
    await first.die()
    await source.hang_up()
    await bench.worker("worker-2")
    await source.tell("cache_created", HASHES[1], 6)
    await holds(bench, HASHES[1], GPU=6)


async def test_the_number_of_entries_is_bounded_and_the_oldest_go_first(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source, max_entries=100))
    worker: Hand = await bench.worker()
    for name in HASHES[:90]:
        await source.tell("cache_created", name, 1)
    await holds(bench, HASHES[89], GPU=1)
    for name in HASHES[90:150]:
        await source.tell("cache_created", name, 2)
    await holds(bench, HASHES[149], GPU=2)
    await counted(bench, "evictions", 50)
    held: list[int] = []

    async def all_are_counted() -> bool:
        nonlocal held
        held = [number for number, name in enumerate(HASHES[:150]) if await tokens(bench, name)]
        return worker.metric("index_evictions_total", reason="max_entries") == 150 - len(held)

    await wait_until(all_are_counted, "no eviction is under way", PATIENCE_SECONDS)
    assert 80 <= len(held) <= 100
    assert set(held) >= set(range(90, 150)), "what came later stays"


async def test_a_line_of_100_mb_costs_its_connection_and_no_memory(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    worker = await bench.worker()
    await source.tell("cache_created", HASHES[0], 5)
    await holds(bench, HASHES[0], GPU=5)
    # The reader leaves long before the end.
    with pytest.raises(ConnectionError):
        await source.send_endlessly()
    await counted(bench, "frames_malformed")
    await source.tell("cache_created", HASHES[1], 6)
    await holds(bench, HASHES[1], GPU=6)
    assert worker.metric("frames_malformed_total") == 1
    await has_status(bench, "degraded", "reconnected")


@pytest.mark.parametrize(
    ("status", "content_type", "says"),
    [
        (404, "text/event-stream", "status 404"),
        (302, "text/event-stream", "status 302"),
        (200, "application/json", '"application/json", not text/event-stream'),
    ],
)
async def test_a_url_that_is_no_source_is_named(
    bench: Bench, source: Source, status: int, content_type: str, says: str
) -> None:
    source.status, source.content_type = status, content_type
    await bench.store.registry.register(registration(source))
    await bench.worker()
    await has_status(bench, "starting", says)
    source.status, source.content_type = 200, "text/event-stream; charset=utf-8"
    await source.tell("cache_created", HASHES[0], 5)
    await holds(bench, HASHES[0], GPU=5)


async def test_a_source_that_is_gone_does_not_count_until_it_is_back(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    await bench.worker()
    await source.tell("cache_created", HASHES[0], 5)
    await holds(bench, HASHES[0], GPU=5)
    await source.stop()
    await has_status(bench, "lost")
    await source.start()
    await has_status(bench, "degraded", "reconnected")
    await holds(bench, HASHES[0], GPU=5)


async def happened(bench: Bench) -> list[tuple[str, str]]:
    """What the activity says of the source: the kind, and its detail."""
    entries = [entry.content for entry in await bench.store.activity.newest(100)]
    return [(each["kind"], each["detail"]) for each in entries if each["kind"] not in ("registered", "takeover")]


async def test_a_source_that_was_never_there_is_unreachable_and_left_out(bench: Bench, source: Source) -> None:
    await source.stop()
    await bench.store.registry.register(registration(source))
    await bench.worker(publisher_timeout=60)
    await has_status(bench, "unreachable")
    (claim,) = await bench.store.directory.claims()

    async def is_left_out() -> bool:
        loads = GroupLoads()
        loads.read(await bench.store.reservations.values(claim.group_id))
        return bool(loads.left_out(bench.store.reservations.now_ms()))

    async def is_told() -> bool:
        return [kind for kind, _ in await happened(bench)] == ["unreachable"]

    await wait_until(is_left_out, "decisions leave it out")
    await wait_until(is_told, "the activity says so")
    ((_, detail),) = await happened(bench)
    assert "refused" in detail, detail
    await source.start()
    await has_status(bench, "active")

    async def is_back() -> bool:
        return [kind for kind, _ in await happened(bench)] == ["unreachable", "reachable"]

    await wait_until(is_back, "the activity says that it is there")


async def test_decisions_leave_an_engine_out_whose_source_is_gone(bench: Bench, source: Source) -> None:
    await bench.store.registry.register(registration(source))
    await bench.worker(publisher_timeout=60)
    await source.tell("cache_created", HASHES[0], 5)
    await holds(bench, HASHES[0], GPU=5)
    (claim,) = await bench.store.directory.claims()

    async def is_left_out() -> bool:
        loads = GroupLoads()
        loads.read(await bench.store.reservations.values(claim.group_id))
        return bool(loads.left_out(bench.store.reservations.now_ms()))

    async def is_back() -> bool:
        return not await is_left_out()

    assert await is_back()
    await source.stop()
    await has_status(bench, "unreachable")
    await wait_until(is_left_out, "decisions leave it out")
    await source.start()
    await wait_until(is_back, "decisions name it again")


async def test_the_engines_key_is_sent(source: Source) -> None:
    asker = Asker(key=EngineKey("secret"))
    reader = prefix_stream.EventSource(asker, source.url)
    reading = asyncio.create_task(reader.run())
    await source.is_read()
    assert source.requests[0]["Authorization"] == "Bearer secret"
    assert source.requests[0]["Accept"] == "text/event-stream"
    reading.cancel()
    await asyncio.wait([reading])
    await asker.close()


async def test_a_source_behind_tls_is_read_where_its_ca_is_trusted(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    source = Source()
    await source.start(context)
    url = source.url.replace("http:", "https:")
    askers = [Asker(), Asker(ca_file=str(tmp_path / "ca.pem"))]
    stranger, trusting = (prefix_stream.EventSource(asker, url) for asker in askers)
    reading = [asyncio.create_task(each.run()) for each in (stranger, trusting)]
    await source.tell("cache_created", HASHES[0], 5)
    await wait_until(lambda: trusting.received == 1, "the event has arrived", PATIENCE_SECONDS)
    await wait_until(lambda: stranger.error is not None, "the certificate is refused", PATIENCE_SECONDS)
    assert "certificate" in (stranger.error or "").lower()
    assert (stranger.connection, trusting.connection) == (0, 1)
    for task in reading:
        task.cancel()
    await asyncio.wait(reading)
    for asker in askers:
        await asker.close()
    await source.stop()


async def test_events_that_find_no_room_are_dropped_and_counted(source: Source) -> None:
    asker = Asker()
    reader = prefix_stream.EventSource(asker, source.url, queue_events=10)
    reading = asyncio.create_task(reader.run())
    for name in HASHES[:25]:
        await source.tell("cache_created", name, 1)
    await wait_until(lambda: reader.received == 25, "all have arrived", PATIENCE_SECONDS)
    assert (reader.waiting, reader.dropped) == (10, 15)
    assert [HASHES[0] in event.data for event in reader.take(1)] == [True]
    reading.cancel()
    await asyncio.wait([reading])
    await asker.close()


async def test_the_bytes_of_events_that_wait_are_bounded(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_stream, "QUEUE_BYTES", 10_000)
    asker = Asker()
    reader = prefix_stream.EventSource(asker, source.url)
    reading = asyncio.create_task(reader.run())
    for name in HASHES[:25]:
        await source.tell("cache_created", name, data={"more": "x" * 1900})
    await wait_until(lambda: reader.received == 25, "all have arrived", PATIENCE_SECONDS)
    assert (reader.waiting, reader.dropped) == (5, 20)
    assert len(reader.take(2)) == 2
    await source.tell("cache_created", HASHES[0])
    await wait_until(lambda: reader.received == 26, "there is room again", PATIENCE_SECONDS)
    assert (reader.waiting, reader.dropped) == (4, 20)
    reader.take(10)
    assert reader.waiting_bytes == 0
    reading.cancel()
    await asyncio.wait([reading])
    await asker.close()


async def test_a_source_that_sends_without_a_pause_leaves_the_loop_to_others() -> None:
    reader, turns, size = prefix_stream.EventSource(Asker(), "http://127.0.0.1:1"), 0, 2**17

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"\n" * size

    counting = asyncio.create_task(others())
    await reader._keep(pieces())
    counting.cancel()
    assert turns >= size // 4096, "some 3 ms each; all at once they take a tenth of a second"


async def test_an_id_that_cannot_be_sent_is_not_kept(bench: Bench, source: Source) -> None:
    """The next worker would be refused by its source for ever."""
    await bench.store.registry.register(registration(source))
    first = await bench.worker()
    await source.tell("cache_created", HASHES[0], 5, id="41")
    await holds(bench, HASHES[0], GPU=5)
    await source.tell("cache_created", HASHES[1], 6, id="x" * 2000)
    await holds(bench, HASHES[1], GPU=6)
    await first.stop()
    await source.hang_up()
    await bench.worker("worker-2")
    await source.tell("cache_created", HASHES[2], 7)
    await holds(bench, HASHES[2], GPU=7)
    assert source.requests[-1]["Last-Event-ID"] == "41"
