"""Kubernetes discovery: which pods are registered, and that nothing is unregistered by mistake."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.conftest import wait_until
from tests.discovery.api_server import SELECTOR, ApiServerStub, pod
from tests.discovery.conftest import Engine
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.discovery import kubernetes, run
from waymark.discovery import pods as pods_module
from waymark.discovery import reconciler as reconciler_module
from waymark.discovery.describe import Describer
from waymark.discovery.drafts import Draft, WantedEngine
from waymark.discovery.engines import EngineRegistrations
from waymark.discovery.kubernetes import ApiServer
from waymark.discovery.pods import DELETION_COST, Pod, PodPorts, WantedPods, pod_of, wanted_of
from waymark.discovery.reconciler import Reconciler
from waymark.discovery.run import DiscoveryOptions, EngineDiscovery
from waymark.domain.names import BY_CLIENT, Registration
from waymark.store import keys
from waymark.store.store import Store

pytestmark = pytest.mark.outside

BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = kubernetes._BACKOFF_SECONDS, kubernetes._BACKOFF_SECONDS_MAX
SAID = {"model": "llama", "block-size": "16", "type": "vLLM"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS_MAX", 0.2)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.open(redis_url)
    yield store
    await store.close()


@pytest.fixture
async def server() -> AsyncIterator[ApiServerStub]:
    server = ApiServerStub()
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def discovering(
    store: Store,
    url: str,
    *,
    worker: str = "w",
    allowed: AllowedEndpoints | None = None,
    port: int = 8000,
    has_deletion_cost: bool = False,
    **server: Any,
) -> AsyncIterator[Metrics]:
    """Discovery runs inside."""
    metrics = Metrics()
    allowed = allowed or AllowedEndpoints()
    api = ApiServer(
        **({"url": url, "token_file": None, "ca_file": None, "namespace": "serving", "selector": SELECTOR} | server)
    )
    options = DiscoveryOptions(
        worker,
        300,
        api,
        PodPorts(port, 5557, 5657),
        has_deletion_cost=has_deletion_cost,
        costs_seconds=0.1,
        round_seconds=0.1,
        confirm_seconds=0.2,
    )
    describer = Describer(Asker(allowed), allowed, seconds=20)
    discovery = EngineDiscovery(store, metrics, options, describer)
    task = asyncio.ensure_future(discovery.run())
    try:
        yield metrics
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await describer.close()


async def names(store: Store) -> list[str]:
    return sorted(str(each.name) for each in await store.directory.registrations())


async def until_named(store: Store, *wanted: str) -> None:
    async def are_there() -> bool:
        return await names(store) == sorted(wanted)

    await wait_until(are_there, f"the registrations are {wanted}")


async def until(is_so: Callable[[], bool], what: str) -> None:
    async def check() -> bool:
        return is_so()

    await wait_until(check, what)


async def problems(store: Store) -> tuple[str, ...]:
    state = await store.discovery.state()
    return () if state is None else tuple(state.problems)


async def until_said(store: Store, text: str) -> None:
    async def is_said() -> bool:
        return any(text in problem for problem in await problems(store))

    await wait_until(is_said, f"a problem names {text}")


async def one(store: Store) -> Registration:
    (registration,) = await store.directory.registrations()
    return registration


async def test_a_pod_with_annotations_is_registered_by_its_engine(
    store: Store, server: ApiServerStub, engine: Engine, tmp_path: Path
) -> None:
    engine.is_vllm("no_replay")
    token = tmp_path / "token"
    token.write_text("first\n")
    port = int(engine.url.rpartition(":")[2])
    labels = {"llm-d.ai/role": "decode", "zone": "a", "long": "x" * 300}
    server.put(pod("vllm-0", "127.0.0.1", labels=labels, annotations={"tenant": "t"}))
    async with discovering(store, server.url, port=port, token_file=str(token)) as metrics:
        await until_named(store, "serving/vllm-0|t|0")
        found = await one(store)
        assert (found.kind, found.model_name, found.block_size) == ("vLLM", "llama", 16)
        assert (found.endpoint, found.replay_endpoint) == ("tcp://127.0.0.1:5577", None)
        assert (found.target.address, found.target.role) == (engine.url, "decode")
        assert found.target.labels == {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": "decode", "zone": "a"}
        assert found.origin == ("discovery", "serving/vllm-0")
        await until(lambda: server.watched == 1, "pods are watched")
        assert server.paths == {"/api/v1/namespaces/serving/pods"}
        assert server.lists[0]["labelSelector"] == SELECTOR
        assert server.watches[0] | {"timeoutSeconds": ""} == {
            "labelSelector": SELECTOR,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": "100",
            "timeoutSeconds": "",
        }
        # The kubelet replaces the token, and a bookmark moves the version.
        token.write_text("second")
        server.send("BOOKMARK", {"kind": "Pod"})
        server.send_line(None)
        await until(lambda: len(server.watches) == 2, "the watch goes on")
        assert server.watches[1]["resourceVersion"] == "101"
        assert {server.tokens[0], server.tokens[-1]} == {"Bearer first", "Bearer second"}
        assert len(server.lists) == 1
        assert b"waymark_discovery_leader 1.0" in metrics.render()[0]
        server.send("MODIFIED", pod("vllm-0", "127.0.0.1", ready=False))
        await until_named(store)


@pytest.mark.parametrize(
    "change",
    [
        ("DELETED", {}),
        ("MODIFIED", {"ready": False}),
        ("MODIFIED", {"deleted": True}),
        ("MODIFIED", {"address": ""}),
    ],
)
async def test_a_pod_that_goes_is_unregistered_and_may_come_back(
    store: Store, server: ApiServerStub, engine: Engine, change: tuple[str, dict[str, Any]]
) -> None:
    port = int(engine.url.rpartition(":")[2])
    here = partial(pod, "a", "127.0.0.1", annotations=SAID | {"ranks": "2"})
    async with discovering(store, server.url, port=port) as metrics:
        await until(lambda: server.watched == 1, "pods are watched")
        server.send("ADDED", here())
        await until_named(store, "serving/a|default|0", "serving/a|default|1")
        await until(lambda: b'discovery_engines{state="registered"} 1.0' in metrics.render()[0], "it is counted")
        assert [each.endpoint for each in await store.directory.registrations()] == [
            "tcp://127.0.0.1:5557",
            "tcp://127.0.0.1:5558",
        ]
        kind, fields = change
        server.send(kind, pod(**({"name": "a", "address": "127.0.0.1", "annotations": SAID} | fields)))
        await until_named(store)
        await until(lambda: b"discovery_unregistered_total 2.0" in metrics.render()[0], "both ranks are counted")
        server.send("ADDED", here())
        await until_named(store, "serving/a|default|0", "serving/a|default|1")


async def test_an_expired_version_lists_again(store: Store, server: ApiServerStub, engine: Engine) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    async with discovering(store, server.url, port=port):
        await until(lambda: server.watched == 1, "pods are watched")
        server.put(pod("a", "127.0.0.1"))
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        server.send("ERROR", gone)
        await until_named(store, "serving/a|default|0")
        lists = len(server.lists)
        server.watch_status = 410
        server.send_line(None)
        await until(lambda: len(server.lists) > lists + 1, "a status of 410 lists again, too")
        server.watch_status = 200
        assert await names(store) == ["serving/a|default|0"]


@asynccontextmanager
async def watching(server: ApiServerStub) -> AsyncIterator[kubernetes.PodWatch]:
    """Pods are read, and no engine is registered."""
    watch = kubernetes.PodWatch(ApiServer(server.url, None, None, "", SELECTOR), Metrics())
    task = asyncio.ensure_future(watch.keep())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_watch_that_breaks_off_goes_on_from_the_last_bookmark(server: ApiServerStub) -> None:
    server.put(pod("a"))
    async with watching(server) as watch:
        await until(lambda: server.watched == 1, "pods are watched")
        server.version = 554
        server.send("BOOKMARK", {"kind": "Pod"})
        server.send("ADDED", pod("b"))
        await until(lambda: len(watch.pods) == 2, "the event has come")
        server.send("BOOKMARK", {"kind": "Pod"})
        server.break_off()
        await until(lambda: len(server.watches) == 2 and server.watched == 1, "pods are watched again")
        assert server.watches[1]["resourceVersion"] == "557"
        assert len(server.lists) == 1
        server.send("DELETED", pod("a"))
        await until(lambda: set(watch.pods) == {"serving/b"}, "the new watch is followed")


async def test_a_watch_that_always_fails_lists_again(server: ApiServerStub) -> None:
    server.watch_status = 500
    async with watching(server) as watch:
        await until(lambda: watch.lists == 1, "pods are listed")
        server.put(pod("a"))
        await until(lambda: set(watch.pods) == {"serving/a"}, "pods are listed again")


@pytest.mark.parametrize("is_superseded", [False, True])
async def test_a_list_beside_the_watch_takes_back_no_newer_fact(
    server: ApiServerStub, monkeypatch: pytest.MonkeyPatch, is_superseded: bool
) -> None:
    server.put(pod("goes"), pod("starts", ready=False), pod("stays"))
    async with watching(server) as watch:
        await until(lambda: server.watched == 1, "pods are watched")
        read_page, has_read, may_go_on = watch._page, asyncio.Event(), asyncio.Event()

        async def read_late(query: Any) -> Any:
            page = await read_page(query)
            if not has_read.is_set():
                has_read.set()
                await may_go_on.wait()
            return page

        monkeypatch.setattr(watch, "_page", read_late)
        listing = asyncio.create_task(watch.list_again())
        await has_read.wait()
        if is_superseded:
            del server.pods["goes"]
            server.put(pod("starts"), pod("comes"))
            server.send("ERROR", {"kind": "Status", "code": 410})
        else:
            server.send("DELETED", pod("goes"))
            server.send("MODIFIED", pod("starts"))
            server.send("ADDED", pod("comes"))
        await until(lambda: "serving/comes" in watch.pods, "the newer facts have come")
        may_go_on.set()
        await listing
        assert {name for name, each in watch.pods.items() if each.is_ready} == {
            f"serving/{name}" for name in ("starts", "stays", "comes")
        }
        assert "serving/goes" not in watch.pods


def _expires_watches(server: ApiServerStub) -> None:
    server.watch_status = 410


def _expires_lists(server: ApiServerStub) -> None:
    server.status = 410


def _has_pages_without_end(server: ApiServerStub) -> None:
    server.is_endless = True


def _sends_one_event_a_watch(server: ApiServerStub) -> None:
    server.greeting = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}\n'


@pytest.mark.parametrize(
    "make_it_lie", [_expires_watches, _expires_lists, _has_pages_without_end, _sends_one_event_a_watch]
)
async def test_no_answer_makes_it_ask_in_a_loop(
    server: ApiServerStub, monkeypatch: pytest.MonkeyPatch, make_it_lie: Callable[[ApiServerStub], None]
) -> None:
    monkeypatch.setattr(kubernetes, "PAGES_MAX", 6)
    make_it_lie(server)
    async with watching(server) as watch:
        await until(lambda: len(server.asked_at) > 24, "it has asked again and again")
        # At most a list and a watch for each pause, and a pause is at least half of the first one.
        assert server.asked_at[24] - server.asked_at[0] > 24 / 2 * 0.025
        assert ("pages" in watch.problem) == server.is_endless
        server.is_endless, server.status, server.watch_status, server.greeting = False, 200, 200, None
        server.put(pod("a"))
        await until(lambda: server.watched == 1, "pods are watched")
        server.send("ADDED", pod("a"))
        await until(lambda: set(watch.pods) == {"serving/a"}, "it goes on when the server is right again")


async def test_pages_with_hardly_a_new_pod_are_asked_for_with_pauses(
    server: ApiServerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_THIN_SECONDS", 0.05)
    server.is_endless = True
    async with watching(server):
        await until(lambda: len(server.asked_at) > 20, "it has asked again and again")
        assert server.asked_at[20] - server.asked_at[0] >= 20 * 0.04


@pytest.mark.parametrize(("is_seen", "has_odd_item"), [(True, True), (False, True), (True, False)])
async def test_an_odd_list_is_read_again(
    store: Store,
    server: ApiServerStub,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    is_seen: bool,
    has_odd_item: bool,
) -> None:
    monkeypatch.setattr(kubernetes, "_DOUBT_SECONDS", 0.1)
    port = int(engine.url.rpartition(":")[2])
    server.put(*(pod(f"p{i}", f"127.0.0.{i + 1}", annotations=SAID) for i in range(5)))
    async with discovering(store, server.url, port=port):
        if is_seen:
            await until_named(store, *(f"serving/p{i}|default|0" for i in range(5)))
            await until(lambda: server.watched == 1, "pods are watched")
        right = dict(server.pods)
        server.pods.pop("p0")
        if has_odd_item:
            server.pods["p1"] = {"metadata": 7}
        lists = len(server.lists)
        server.send("ERROR", {"kind": "Status", "code": 410})
        await until(lambda: len(server.lists) > lists, "the odd list is read")
        # The watch says nothing of it: the server has forgotten that it left pods out.
        server.pods = right
        lists = len(server.lists)
        await until(lambda: len(server.lists) > lists, "the list is read again without an event")
        await until_named(store, *(f"serving/p{i}|default|0" for i in range(5)))


@pytest.mark.parametrize("waited", [0.0, 0.9, 1.0, 1.1, 1.9, 2.0, 2.1, 3.5], ids=str)
async def test_an_odd_list_is_right_within_five_seconds_at_the_defaults(
    store: Store, server: ApiServerStub, monkeypatch: pytest.MonkeyPatch, waited: float
) -> None:
    """By a clock that moves only when a round waits; the server is right again after so long."""
    now, right = 1000.0, {f"p{i}": pod(f"p{i}") for i in range(5)}
    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS", BACKOFF_SECONDS)
    monkeypatch.setattr(kubernetes, "monotonic", lambda: now)
    options = DiscoveryOptions("w", api_server=ApiServer(server.url, None, None, "", SELECTOR))
    assert options.api_server is not None
    watch = kubernetes.PodWatch(options.api_server, Metrics())
    server.pods = {**right, "p1": {"metadata": 7}}
    await watch._list()
    assert watch.is_doubted
    mended_at = now + waited
    seen: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def wait(event: asyncio.Event, seconds: float) -> None:
        nonlocal now
        now += run._PAUSE_SECONDS if event.is_set() else seconds
        event.clear()
        if now >= mended_at:
            server.pods = right

    class Rounds:
        wants_another_reading = False

        def ask_again(self, origins: object) -> None:
            pass

        async def reconcile(self, wanted: list[Any], **_: Any) -> bool:
            if len(wanted) == 5 and not seen.done():
                seen.set_result(now)
            return True

    monkeypatch.setattr(run, "_wait", wait)
    describer = Describer(Asker(AllowedEndpoints()), AllowedEndpoints(), seconds=20)
    discovery = EngineDiscovery(store, Metrics(), options, describer)
    task = asyncio.ensure_future(discovery._follow_pods(Rounds(), watch))  # type: ignore[arg-type]
    try:
        await until(seen.done, "all pods are there")
        assert seen.result() - mended_at <= 5.0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await describer.close()
        await watch._asker.close()


@pytest.mark.parametrize("failures", [1, 3, 4, 12])
@pytest.mark.parametrize("fault", [{"status": 403}, {"status": 410}, {"body": b"<html>"}], ids=str)
async def test_a_failed_list_is_right_within_five_seconds_at_the_defaults(
    server: ApiServerStub, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], failures: int
) -> None:
    """By a clock that moves only in pauses; the server is right after a failure, and pauses are longest."""
    now = mended_at = 1000.0

    class Clock:
        """asyncio, but it sleeps by that clock."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            nonlocal now, mended_at
            if len(server.asked_at) == failures:
                mended_at, server.status, server.body = now, 200, None
            now += seconds
            await asyncio.sleep(0)

    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS", BACKOFF_SECONDS)
    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS_MAX", BACKOFF_SECONDS_MAX)
    monkeypatch.setattr(kubernetes, "monotonic", lambda: now)
    monkeypatch.setattr(kubernetes, "asyncio", Clock())
    monkeypatch.setattr("waymark.discovery.kubernetes.random.uniform", lambda _, most: most)
    for name, value in fault.items():
        setattr(server, name, value)
    async with watching(server) as watch:
        await until(lambda: watch.lists == 1, "the list is read")
        assert 0.0 < now - mended_at <= 5.0


@pytest.mark.parametrize(
    "break_it",
    [
        lambda server: setattr(server, "status", 500),
        lambda server: setattr(server, "status", 403),
        lambda server: setattr(server, "body", b"no JSON"),
        lambda server: setattr(server, "body", b'{"items": null, "metadata": {}}'),
        lambda server: setattr(server, "body", b'{"items": []}'),
        lambda server: setattr(server, "body", b"[" * 100_000),
    ],
)
async def test_an_api_server_that_fails_unregisters_nothing(
    store: Store, server: ApiServerStub, engine: Engine, break_it: Callable[[ApiServerStub], None]
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("a", "127.0.0.1"))
    async with discovering(store, server.url, port=port) as metrics:
        await until_named(store, "serving/a|default|0")
        await until(lambda: server.watched == 1, "pods are watched")
        break_it(server)
        server.send("ERROR", {"kind": "Status", "code": 500, "message": "internal"})

        async def has_failed() -> bool:
            text = metrics.render()[0].decode()
            return any(
                line.startswith('waymark_discovery_requests_total{outcome="failed"}') and float(line.split()[-1]) >= 4
                for line in text.splitlines()
            )

        await wait_until(has_failed, "the API server has failed several times")
        await until_said(store, "the API server")
        assert await names(store) == ["serving/a|default|0"]


async def test_a_list_that_loses_most_pods_is_confirmed_by_another(
    store: Store, server: ApiServerStub, engine: Engine
) -> None:
    port = int(engine.url.rpartition(":")[2])
    pods = [pod(f"p{i}", f"127.0.0.{i + 1}", annotations=SAID) for i in range(3)]
    server.put(*pods)
    async with discovering(store, server.url, port=port):
        await until_named(store, *(f"serving/p{i}|default|0" for i in range(3)))
        server.pods.clear()
        lists = len(server.lists)
        server.send("ERROR", {"kind": "Status", "code": 410})
        await until(lambda: len(server.lists) > lists, "pods are listed again")
        assert len(await names(store)) == 3, "one list is not believed"
        await until_named(store)
        assert len(server.lists) >= lists + 2, "another list has confirmed it"


async def test_only_what_discovery_registered_is_unregistered(
    store: Store, server: ApiServerStub, engine: Engine
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("a", "127.0.0.1"))
    body: dict[str, Any] = {"type": "vLLM", "modelname": "m", "block_size": 16, "endpoint": "tcp://127.0.0.1:1"}
    by_hand = Draft(**body, instance_id="by-hand").registration(AllowedEndpoints())
    await store.registry.register(by_hand)
    async with discovering(store, server.url, port=port):
        await until_named(store, "by-hand|default|0", "serving/a|default|0")
        (discovered,) = [each for each in await store.directory.registrations() if each.origin.kind == "discovery"]
        await store.registry.register(replace(discovered, origin=BY_CLIENT))
        server.send("DELETED", pod("a", "127.0.0.1"))
        server.send("ADDED", pod("b", "127.0.0.1"))
        await until_said(store, "registered by another source")
        assert await names(store) == ["by-hand|default|0", "serving/a|default|0"]


async def test_of_two_pods_with_one_address_the_newer_has_it(
    store: Store, server: ApiServerStub, engine: Engine
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("ghost", "127.0.0.1", started="2026-01-01T00:00:01Z"))
    async with discovering(store, server.url, port=port):
        await until_named(store, "serving/ghost|default|0")
        server.send("ADDED", pod("new", "127.0.0.1", started="2026-01-02T00:00:01Z"))
        await until_named(store, "serving/new|default|0")
        await until_said(store, "ghost: serving/new has the same address")


@pytest.mark.parametrize(
    ("annotations", "named"),
    [
        ({"block-size": "sixteen"}, "waymark.dev/block-size"),
        ({"ranks": "0"}, "waymark.dev/ranks"),
        ({"ranks": "1025"}, "waymark.dev/ranks"),
        ({"ranks": "000000000199999999999999999999"}, "waymark.dev/ranks"),
        ({"api-port": "70000"}, "waymark.dev/api-port"),
        ({"type": "llama.cpp"}, "type"),
        ({"role": "king"}, "role"),
    ],
)
async def test_a_wrong_annotation_is_named_and_costs_its_pod(
    store: Store, server: ApiServerStub, engine: Engine, annotations: dict[str, str], named: str
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("bad", "127.0.0.1", annotations=annotations), pod("good", "127.0.0.3", annotations=SAID))
    async with discovering(store, server.url, port=port):
        await until_named(store, "serving/good|default|0")
        await until_said(store, named)
        await until_said(store, "serving/bad")


@pytest.mark.parametrize("address", ["[[::1", "1]:2", "pod.example", "10.0.0.7/x?", "10.0.0.999"])
async def test_an_address_that_is_none_is_named_and_costs_its_pod(
    store: Store, server: ApiServerStub, engine: Engine, address: str
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("bad", address), pod("said", address, annotations=SAID), pod("good", "127.0.0.3", annotations=SAID))
    async with discovering(store, server.url, port=port):
        await until_named(store, "serving/good|default|0")
        await until_said(store, "is no IP address")
        await until_said(store, "serving/bad")
        await until_said(store, "serving/said")


async def test_a_pod_that_is_not_allowed_is_neither_asked_nor_registered(
    store: Store, server: ApiServerStub, engine: Engine
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    allowed = AllowedEndpoints(["127.0.0.3"])
    server.put(pod("asked", "127.0.0.1"), pod("said", "127.0.0.2", annotations=SAID))
    server.put(pod("good", "127.0.0.3", annotations=SAID))
    async with discovering(store, server.url, port=port, allowed=allowed):
        await until_named(store, "serving/good|default|0")
        await until_said(store, "serving/asked")
        await until_said(store, "serving/said")
    assert all("WAYMARK_ALLOWED_ENDPOINTS" in problem for problem in await problems(store))
    assert not engine.asked


async def test_a_pod_whose_engine_says_no_block_size_is_named(
    store: Store, server: ApiServerStub, engine: Engine
) -> None:
    engine.answers = {"/v1/models": {"data": [{"id": "llama"}]}}
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("a", "127.0.0.1", annotations={"type": "vLLM"}))
    async with discovering(store, server.url, port=port):
        await until_said(store, "block_size")
        assert await names(store) == []


async def test_engines_that_do_not_answer_hold_up_no_other(
    store: Store, server: ApiServerStub, engine: Engine, free_port: int
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    dead = [pod(f"dead-{i}", "127.0.0.1", annotations={"api-port": str(free_port)}, started=str(i)) for i in range(3)]
    server.put(*dead, pod("z", "127.0.0.1"))
    async with discovering(store, server.url, port=port):
        await until_named(store, "serving/z|default|0")
        await until_said(store, "dead-2: the engine http://127.0.0.1")
        await until_said(store, "dead-1: serving/dead-2 has the same address")


async def test_one_worker_discovers_and_another_takes_over(store: Store, server: ApiServerStub) -> None:
    async with AsyncExitStack() as first:
        await first.enter_async_context(discovering(store, server.url, worker="one"))

        async def is_led_by(worker: str) -> bool:
            state = await store.discovery.state()
            return state is not None and state.worker == worker

        await wait_until(partial(is_led_by, "one"), "the first worker discovers")
        async with discovering(store, server.url, worker="two") as metrics:
            await until(lambda: server.watched == 1, "one worker watches")
            assert b"waymark_discovery_leader 0.0" in metrics.render()[0]
            await first.aclose()
            await wait_until(partial(is_led_by, "two"), "the second worker has taken over")


async def test_a_worker_without_the_lease_counts_no_engines(
    store: Store, server: ApiServerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(pod("a", "127.0.0.1", annotations=SAID))
    hold, is_lost = type(store.discovery).hold, asyncio.Event()

    async def hold_until_lost(leases: Any, state: Any, seconds: float) -> bool:
        return await hold(leases, state, seconds) and not is_lost.is_set()

    monkeypatch.setattr(type(store.discovery), "hold", hold_until_lost)
    async with discovering(store, server.url) as metrics:
        await until(lambda: b'discovery_engines{state="registered"} 1.0' in metrics.render()[0], "it is counted")
        is_lost.set()
        await until(lambda: b'discovery_engines{state="registered"} 0.0' in metrics.render()[0], "another one counts")


@pytest.mark.parametrize("line", [b"{}\n", b"no JSON\n", b'{"type": "ADDED", "object": 7}\n', b"x" * (5 * 2**20)])
async def test_an_event_that_is_none_lists_again(
    store: Store, server: ApiServerStub, engine: Engine, line: bytes
) -> None:
    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    server.put(pod("a", "127.0.0.1"))
    async with discovering(store, server.url, port=port):
        await until_named(store, "serving/a|default|0")
        await until(lambda: server.watched == 1, "pods are watched")
        lists = len(server.lists)
        server.send_line(line)
        await until(lambda: len(server.lists) > lists, "pods are listed again")
        assert await names(store) == ["serving/a|default|0"]


@pytest.mark.parametrize(
    ("item", "count", "problem"),
    [
        (b"{}", 2_001, "has 2001 items"),
        (b"{}", 140_000, "its list of pods is refused"),
        (b"1", 1_100_000, "its list of pods is refused"),
    ],
)
async def test_a_page_of_more_than_a_page_is_refused_and_pods_stay(
    server: ApiServerStub, item: bytes, count: int, problem: str
) -> None:
    server.put(pod("a"))
    async with watching(server) as watch:
        await until(lambda: server.watched == 1, "pods are watched")
        server.body = b'{"metadata": {"resourceVersion": "1"}, "items": [' + b",".join([item] * count) + b"]}"
        server.send_line(b'{"type": "ERROR", "object": {"code": 410}}\n')
        await until(lambda: problem in watch.problem, "the page is refused")
        assert set(watch.pods) == {"serving/a"}


async def test_ten_thousand_pods_are_read_in_pages(server: ApiServerStub) -> None:
    server.put(*(pod(f"p{i:05}", f"10.0.{i // 250}.{i % 250}") for i in range(10_000)))
    watch = kubernetes.PodWatch(ApiServer(server.url, None, None, "", SELECTOR), Metrics())
    task = asyncio.ensure_future(watch.keep())
    await until(lambda: watch.lists == 1, "all pods are listed")
    assert len(watch.pods) == 10_000
    assert len(server.lists) == 200
    assert server.paths == {"/api/v1/pods"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_thousands_of_pods_are_registered_in_few_round_trips(store: Store, server: ApiServerStub) -> None:
    """One round trip a registration would hold up the streams of the worker, and take minutes."""
    count = 1000
    server.put(*(pod(f"p{i:04}", f"127.1.{i // 250}.{i % 250 + 1}", annotations=SAID) for i in range(count)))

    async def reads() -> int:
        (info,) = await store.client.infos()
        return int(info["total_reads_processed"])

    before = await reads()
    async with discovering(store, server.url):

        async def are_there() -> bool:
            return len(await names(store)) == count

        await wait_until(are_there, "all pods are registered", seconds=30)
        assert await reads() - before < count
        claims = await store.directory.claims()
        assert {(claim.group_id, claim.is_leaving) for claim in claims} == {(claims[0].group_id, False)}
        assert len({claim.publisher for claim in claims}) == count
        assert all(life for life, _ in await store.discovery.lives(claims))


async def test_pods_that_need_no_question_leave_turns_to_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand registrations in one turn of the loop would hold up all streams for seconds."""
    turns = 0
    made: Counter[int] = Counter()
    """Registrations by the turn of the loop."""

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def registered(draft: Draft, allowed: AllowedEndpoints) -> Registration:
        made[turns] += 1
        return registration(draft, allowed)

    registration = Draft.registration
    monkeypatch.setattr(Draft, "registration", registered)
    engines = EngineRegistrations(Describer(Asker(), AllowedEndpoints()))  # nobody is asked
    reconciler = Reconciler("discovery", store, engines, Metrics(), again_seconds=300)
    ports = PodPorts(8000, 5557, 0)
    pods = [pod_of(pod(f"p{i:04}", f"127.1.{i // 250}.{i % 250 + 1}", annotations=SAID)) for i in range(600)]
    turning = asyncio.create_task(turn())
    try:
        await reconciler.reconcile([wanted_of(each, ports) for each in pods if each is not None], reading=1)
    finally:
        turning.cancel()
    assert len(await names(store)) == sum(made.values()) == 600
    assert max(made.values()) <= 64


async def test_a_round_reads_only_pods_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are thousands of them, and a round every few seconds; each list has new objects."""
    read: list[str] = []

    def reading(each: Pod, ports: PodPorts) -> WantedEngine:
        read.append(each.name)
        return wanted_of(each, ports)

    monkeypatch.setattr(pods_module, "wanted_of", reading)
    engines = WantedPods(PodPorts(8000, 5557, 0))

    def listed(**changed: str) -> list[Pod]:
        items = [pod(f"p{i}", f"127.1.0.{i + 1}", annotations=SAID | changed if i == 3 else SAID) for i in range(9)]
        return [each for each in map(pod_of, items) if each is not None]

    for _ in range(5):
        wanted, problems = await engines.of(listed())
        assert ([each.draft.instance_id for each in wanted], problems) == ([f"serving/p{i}" for i in range(9)], [])
    assert len(read) == 9
    wanted, _ = await engines.of(listed(model="other"))
    assert (read[9:], wanted[3].draft.modelname) == (["serving/p3"], "other")
    wanted, problems = await engines.of(listed(ranks="many"))
    assert (len(wanted), len(problems), "ranks" in problems[0]) == (8, 1, True)
    await engines.of([])
    await engines.of(listed())
    assert len(read) == 11 + 9, "those that were gone are forgotten"


async def test_a_round_asks_for_longer_than_it_looked_at_what_is_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the look takes seconds: rounds of a fixed time would ask nearly nobody."""
    now, asked = 100.0, list[float]()

    async def read() -> list[Registration]:
        nonlocal now
        now += 7.0
        return []

    async def ask(due: object, there: object, seconds: float) -> int:
        asked.append(seconds)
        return 0

    engines = EngineRegistrations(Describer(Asker(), AllowedEndpoints()))  # nobody is asked
    reconciler = Reconciler("discovery", store, engines, Metrics(), again_seconds=300)
    monkeypatch.setattr(reconciler_module, "monotonic", lambda: now)
    await reconciler.reconcile([], reading=1)
    monkeypatch.setattr(reconciler, "_ask_and_register", ask)
    await reconciler.reconcile([], reading=2)
    monkeypatch.setattr(store.directory, "registrations", read)
    await reconciler.reconcile([], reading=3)
    assert asked == [5.0, 28.0]


async def test_new_pods_come_before_those_that_are_asked_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines out of reach are asked again in each round, and may take all its time."""
    order: list[str] = []

    def registered(draft: Draft, allowed: AllowedEndpoints) -> Registration:
        order.append(str(draft.instance_id))
        return registration(draft, allowed)

    registration = Draft.registration
    monkeypatch.setattr(Draft, "registration", registered)
    engines = EngineRegistrations(Describer(Asker(), AllowedEndpoints()))  # nobody is asked
    reconciler = Reconciler("discovery", store, engines, Metrics(), again_seconds=300)
    pods = [pod_of(pod(f"p{i:02}", f"127.1.0.{i + 1}", annotations=SAID)) for i in range(40)]
    wanted = [wanted_of(each, PodPorts(8000, 5557, 0)) for each in pods if each is not None]
    await reconciler.reconcile(wanted[:35], reading=1)
    earlier = order.copy()
    order.clear()
    reconciler.ask_again(each.origin for each in wanted[:35])
    await reconciler.reconcile(wanted, reading=2)
    assert sorted(order) == sorted(str(each.draft.instance_id) for each in wanted)
    assert not set(order[:5]) & set(earlier)


async def test_more_pods_than_are_kept_are_a_failure(server: ApiServerStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PODS_MAX", 5)
    server.put(*(pod(f"p{i}") for i in range(6)))
    watch = kubernetes.PodWatch(ApiServer(server.url, None, None, "", SELECTOR), Metrics())
    task = asyncio.ensure_future(watch.keep())
    await until(lambda: "narrow the selector" in watch.problem, "the selector is named")
    assert (watch.lists, watch.pods) == (0, {})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_server_of_another_make_is_followed(store: Store, engine: Engine) -> None:
    """kmock's emulator: pods are created, patched and deleted through its own API."""
    import aiohttp
    from kmock import KubernetesEmulator, Server

    engine.is_vllm("no_replay")
    port = int(engine.url.rpartition(":")[2])
    async with KubernetesEmulator() as emulator, Server(emulator), aiohttp.ClientSession() as client:
        resources: Any = emulator.resources
        resources["v1/pods"] = {"namespaced": True, "kind": "Pod", "verbs": {"list", "watch", "create", "delete"}}
        url = str(emulator.url).rstrip("/")
        pods = f"{url}/api/v1/namespaces/serving/pods"
        async with discovering(store, url, port=port):
            await client.post(pods, json=pod("a", "127.0.0.1"))
            await until_named(store, "serving/a|default|0")
            await client.delete(f"{pods}/a")
            await until_named(store)


async def test_a_slow_api_server_unregisters_nothing_and_is_named(
    store: Store, server: ApiServerStub, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waymark.discovery.kubernetes._LIST_SECONDS", 0.5)
    engine.is_vllm("no_replay")
    server.put(pod("a", "127.0.0.1"))
    async with discovering(store, server.url, port=int(engine.url.rpartition(":")[2])):
        await until_named(store, "serving/a|default|0")
        await until(lambda: server.watched == 1, "pods are watched")
        server.delay = 3600
        server.send("ERROR", {"kind": "Status", "code": 500, "message": "internal"})
        await until_said(store, "within 0.5 s")
        assert await names(store) == ["serving/a|default|0"]


def patch_of(name: str, cost: str) -> tuple[str, str, Any]:
    return name, "application/merge-patch+json", {"metadata": {"annotations": {DELETION_COST: cost}}}


async def test_pods_are_annotated_with_the_worth_of_their_caches_if_it_changes(
    store: Store, server: ApiServerStub
) -> None:
    server.put(*(pod(f"vllm-{number}", f"10.0.0.{number}", annotations=SAID) for number in range(3)))

    async def value(**tokens: int) -> None:
        worths = {f"serving/{name.replace('_', '-')}": [each, each, each, each, each] for name, each in tokens.items()}
        found = {"format": 1, "ended": 0.0, "seconds": 0.0, "share": 1.0, "decisions": 0, "worths": worths}
        await store.scripts.run(
            "keep_worth",
            valuing=keys.valuing(1),
            worth=keys.worth(1),
            walk="7" * 16,
            milliseconds=60_000,
            keep=60_000,
            value=orjson.dumps(found | {"prefixes": []}),
        )

    async with discovering(store, server.url, has_deletion_cost=True):
        await until_named(store, *(f"serving/vllm-{number}|default|0" for number in range(3)))

        async def is_asked() -> bool:
            return await store.valuations.asked.read() == {1}

        await wait_until(is_asked, "the caches are to be valued")
        assert server.patches == [], "nothing is known yet"
        await value(vllm_0=12_345, vllm_1=0, vllm_9=5)
        await until(lambda: len(server.patches) >= 2, "two pods are annotated")
        await value(vllm_0=12_399, vllm_1=7)
        await until(lambda: len(server.patches) >= 3, "only the change is written")
        first, second, third = server.patches
        assert sorted((first, second)) == [patch_of("vllm-0", "12000"), patch_of("vllm-1", "0")]
        assert third == patch_of("vllm-1", "7")

        server.patch_status = 403
        await value(vllm_2=10**12)
        await until_said(store, "needs for pods: patch")
        server.patch_status = 200
        await until(lambda: server.patches[-1] == patch_of("vllm-2", str(2**31 - 1)), "the largest number")

        async def is_well() -> bool:
            return await problems(store) == ()

        await wait_until(is_well, "the problem is over")
        assert await names(store) == sorted(f"serving/vllm-{number}|default|0" for number in range(3))


async def test_a_pod_that_is_refused_keeps_no_cost_from_others(
    store: Store, server: ApiServerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = [f"vllm-{number}" for number in range(3)]
    server.put(*(pod(name, f"10.0.0.{number}", annotations=SAID) for number, name in enumerate(pods)))
    server.refused = {"vllm-0"}

    async def costs(_: EngineDiscovery) -> dict[str, str]:
        return {f"serving/{name}": "7" for name in pods}

    monkeypatch.setattr(EngineDiscovery, "_costs", costs)
    async with discovering(store, server.url, has_deletion_cost=True):
        await until(lambda: {name for name, *_ in server.patches} == set(pods), "each pod has its turn")


async def test_pods_are_left_alone_without_the_setting(store: Store, server: ApiServerStub) -> None:
    server.put(pod("vllm-0", "10.0.0.1", annotations=SAID))
    async with discovering(store, server.url):
        await until_named(store, "serving/vllm-0|default|0")
    assert (server.patches, await store.valuations.asked.read()) == ([], set())


def test_the_url_of_an_api_server_may_name_the_file_of_its_token() -> None:
    assert ApiServer.at("https://api:6443", "", "a=b") == ApiServer("https://api:6443", None, None, "", "a=b")
    named = ApiServer.at("https://api:6443?token_file=/run/a%20token", "serving", "a=b")
    assert named == ApiServer("https://api:6443", "/run/a token", None, "serving", "a=b")


@pytest.mark.parametrize("url", ["api:6443", "https://api:6443?token=secret", "https://api?token_file=/t&x=1"])
def test_another_url_of_an_api_server_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"WAYMARK_DISCOVERY_URL is .*\?token_file=/path"):
        ApiServer.at(url, "", "")
