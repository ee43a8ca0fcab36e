"""One scraper for each engine, bounded; what it reads counts for decisions, and what is too old does not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tests.api.conftest import MakeClient, client, make_client, register
from tests.conftest import wait_until
from tests.ingest.conftest import QUICK
from tests.listening import listening, port_of
from tests.store.factories import registration
from waymark.base.asker import Asker, HttpReply
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.targets import Target
from waymark.ingest.options import WorkerOptions
from waymark.ingest.scraping import SPACE_SECONDS, Scraper
from waymark.ingest.worker import Worker
from waymark.store.claims import Claim
from waymark.store.store import Store

__all__ = ["client", "make_client", "register"]
pytestmark = pytest.mark.outside


class Engine:
    """Answers with gauges, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.asked_at: list[float] = []
        self.waiting = 5
        self.status = 200
        self.is_silent = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        self.asked_at.append(monotonic())
        if self.is_silent:
            await asyncio.sleep(3600)
        text = f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5\n'
        return web.Response(status=self.status, text=text + "vllm:num_requests_running 2\n" * 0)


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    found, runners = [], []
    for _ in range(2):
        engine = Engine()
        application = web.Application()
        application.router.add_get("/{path:.*}", engine.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found.append(engine)
        runners.append(runner)
    yield found
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.open(redis_url)
    yield store
    await store.close()


@pytest.fixture
async def workers(redis_url: str) -> AsyncIterator[list[Metrics]]:
    """Two workers over the same Redis; what each has counted."""
    stores = [Store.open(redis_url) for _ in range(2)]
    metrics = [Metrics() for _ in stores]
    tasks = [
        asyncio.create_task(
            Worker(each, counted, WorkerOptions(f"worker-{n}", QUICK, gauges_seconds=0.2)).run(),
        )
        for n, (each, counted) in enumerate(zip(stores, metrics, strict=True))
    ]
    yield metrics
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in stores:
        await each.close()


async def scores(replica: Any) -> dict[str, Any]:
    body = {"model": "m", "token_ids": list(range(64)), "policy": "llm-d", "explain": True}
    answer = await replica.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    return {f"{row['instance_id']}/{row['dp_rank']}": row for row in answer.json()["scores"]}


async def test_an_engine_is_scraped_once_for_all_its_ranks_and_its_gauges_decide(
    store: Store, make_client: MakeClient, register: Any, engines: list[Engine], workers: list[Metrics]
) -> None:
    replica = await make_client(store)
    busy, idle = engines
    idle.waiting = 1
    # Without events: an engine whose events nobody sends would be left out after a while.
    register = partial(register, type="none", endpoint=None)
    for rank in (0, 1):
        await register("busy", address=busy.url, dp_rank=rank)
    await register("idle", metrics_url=idle.url + "/own")
    await register("silent")

    found: dict[str, Any] = {}

    async def are_read() -> bool:
        """Whether all are read; on a busy machine they may be too old a moment later."""
        nonlocal found
        found = await scores(replica)
        return all(found[name]["gauges"] is not None for name in ("busy/0", "busy/1", "idle/0"))

    await wait_until(are_read, "gauges of all ranks are read")
    assert found["busy/1"]["gauges"] == {"waiting": 5, "running": 0, "kv_usage": 0.5}
    assert next(iter(found)) == "idle/0"
    assert (found["silent/0"]["gauges"], found["silent/0"]["parts"]["queue"]) == (None, None)
    assert set(busy.asked) == {"/metrics"}
    assert set(idle.asked) == {"/own"}
    scrapers = [counted for counted in workers if counted.gauge_scrapes.labels(outcome="ok").value]
    asked = sum(counted.gauge_scrapes.labels(outcome="ok").value for counted in scrapers)
    assert abs(asked - sum(busy.asked.values()) - sum(idle.asked.values())) <= 2, (
        "gauge_scrapes_total counts every call"
    )


@pytest.mark.parametrize("what", ["silent", "failing"])
async def test_an_engine_that_stops_answering_has_no_gauges_soon_and_holds_up_no_other(
    store: Store, make_client: MakeClient, register: Any, engines: list[Engine], workers: list[Metrics], what: str
) -> None:
    replica = await make_client(store)
    for n, engine in enumerate(engines):
        await register(f"pod-{n}", address=engine.url, type="none", endpoint=None)

    async def has(name: str, *, has_gauges: bool) -> bool:
        return ((await scores(replica))[name]["gauges"] is not None) is has_gauges

    await wait_until(lambda: has("pod-0/0", has_gauges=True), "the first has gauges")
    await wait_until(lambda: has("pod-1/0", has_gauges=True), "the second has gauges")
    engines[0].is_silent, engines[0].status = what == "silent", 500
    engines[1].waiting = 9
    await wait_until(lambda: has("pod-0/0", has_gauges=False), "what the first said is too old")

    async def has_news() -> bool:
        gauges = (await scores(replica))["pod-1/0"]["gauges"]
        return gauges is not None and gauges["waiting"] == 9

    await wait_until(has_news, "the second is still read")
    engines[0].is_silent, engines[0].status = False, 200
    await wait_until(lambda: has("pod-0/0", has_gauges=True), "the first is read again")


async def test_a_publisher_that_is_unregistered_is_scraped_no_more_and_leaves_nothing(
    store: Store, make_client: MakeClient, register: Any, engines: list[Engine], workers: list[Metrics]
) -> None:
    replica = await make_client(store)
    await register("pod-1", address=engines[0].url)
    await wait_until(lambda: engines[0].asked["/metrics"] > 1, "it is scraped")
    assert (await replica.post("/unregister", json={"instance_id": "pod-1"})).status_code == 200

    await register("pod-2", address=engines[1].url)

    async def is_quiet() -> bool:
        before, other = (engine.asked["/metrics"] for engine in engines)
        await wait_until(lambda: engines[1].asked["/metrics"] > other + 3, "the other is scraped")
        return engines[0].asked["/metrics"] == before

    await wait_until(is_quiet, "the other is scraped, and it is not")

    async def is_empty() -> bool:
        return await store.gauges.read(1, [1]) == {}

    await wait_until(is_empty, "its gauges are gone")


async def test_an_engine_that_fails_is_asked_after_pauses_that_double_until_it_answers(
    store: Store, make_client: MakeClient, register: Any, engines: list[Engine]
) -> None:
    await make_client(store)
    engine, seconds, pauses = engines[0], 0.02, 5
    engine.status = 503
    await register("a", address=engine.url)
    claims = await store.directory.claims()
    asker = Asker()
    scraper = Scraper(store, Metrics(), asker, seconds)
    scraper.see(claims, claims)
    try:
        await wait_until(lambda: len(engine.asked_at) > pauses, "it is asked again and again", 30)
        gaps = [later - earlier for earlier, later in pairwise(engine.asked_at)]
        # A request takes some of the pause behind it.
        assert [gap for number, gap in enumerate(gaps, 1) if gap < seconds * 2**number / 2] == []
        engine.status = 200
        before = len(engine.asked_at)
        await wait_until(lambda: len(engine.asked_at) > before + 10, "it is asked at its pace", 30)
        after = [later - earlier for earlier, later in pairwise(engine.asked_at[before:])]
        assert min(after) < seconds * 2**pauses / 2
    finally:
        await scraper.close()
        await asker.close()


async def test_many_engines_are_asked_one_after_the_other_and_their_readings_last_as_long() -> None:
    """Ten thousand requests a second would leave the worker no time for its streams."""
    count, rounds = 40, 3
    asked_at: list[float] = []
    lasting: list[int] = []
    loop = asyncio.get_running_loop()

    class CountingAsker:
        async def ask(self, url: str, **_: Any) -> HttpReply:
            asked_at.append(loop.time())
            return HttpReply(200, b"vllm:num_requests_waiting 1\n")

    async def note(group_id: int, publisher: int, gauges: Any, milliseconds: int) -> bool:
        lasting.append(milliseconds)
        return True

    claims = [
        Claim(registration(f"pod-{n}", target=Target(address=f"http://127.1.0.{n}:8000")), n + 1, 1, 1)
        for n in range(count)
    ]
    store: Any = SimpleNamespace(gauges=SimpleNamespace(note=note))
    asker: Any = CountingAsker()
    scraper = Scraper(store, Metrics(), asker, 0.01)
    scraper.see(claims, claims)
    try:
        await wait_until(lambda: len(lasting) >= rounds * count, "each engine is asked again and again", 30)
    finally:
        await scraper.close()
    # Timers are as exact as the clock of the loop.
    assert min(later - earlier for earlier, later in pairwise(asked_at)) > SPACE_SECONDS / 2
    # A reading counts until the engine has had its turn again, with two that fail in between.
    assert min(lasting) >= 3 * 1000 * count * SPACE_SECONDS * 0.9


async def test_only_an_answer_with_status_200_is_read(caplog: pytest.LogCaptureFixture) -> None:
    statuses = [b"000", b"099", b"101", b"204", b"206", b"500", b"600", b"999"]
    body = b"vllm:num_requests_waiting 1\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.partition(b" /")[2].partition(b"/metrics")[0]
        writer.write(
            b"HTTP/1.1 %b Odd\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    read: list[int] = []

    async def note(_: int, publisher: int, *__: Any) -> bool:
        read.append(publisher)
        return True

    store: Any = SimpleNamespace(gauges=SimpleNamespace(note=note))
    asker, metrics = Asker(), Metrics()
    scraper = Scraper(store, metrics, asker, 0.05)
    async with listening(answer) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        claims = [
            Claim(registration(f"pod-{number}", target=Target(address=f"{url}/{status.decode()}")), number, 1, 1)
            for number, status in enumerate([*statuses, b"200"])
        ]
        scraper.see(claims, claims)
        try:
            await wait_until(lambda: len(read) >= 3, "the one with an answer is read again and again", 30)

            def complaints() -> int:
                return sum(each.message == "metrics of an engine cannot be read" for each in caplog.records)

            await wait_until(lambda: complaints() == len(statuses), "each of the others was asked", 30)
        finally:
            await scraper.close()
            await asker.close()
    assert set(read) == {len(statuses)}


async def test_redis_that_is_away_is_no_fault_of_an_engine(
    store: Store, engines: list[Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would name the engine, which has answered."""
    writes = 0

    async def away(*_: object, **__: object) -> None:
        nonlocal writes
        writes += 1
        raise StoreUnavailable("Redis does not answer")

    monkeypatch.setattr(type(store.gauges), "note", away)
    settings = WorkerOptions("worker-0", QUICK, gauges_seconds=0.2)
    worker = asyncio.create_task(Worker(store, Metrics(), settings).run())
    await store.registry.register(registration("pod-1", target=Target(address=engines[0].url)))
    await wait_until(lambda: writes >= 2, "gauges are written")
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    assert [each.message for each in caplog.records if "metrics of an engine" in each.message] == []
