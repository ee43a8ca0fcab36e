"""The file of publishers that changes, and engines that were registered by their URL and restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, vllm_models
from tests.discovery.test_kubernetes import names, until_named, until_said
from waymark.api.publishers_file import read_wanted
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.discovery.describe import Describer
from waymark.discovery.drafts import Draft, WantedEngine
from waymark.discovery.engines import EngineRegistrations
from waymark.discovery.reconciler import Reconciler
from waymark.discovery.run import DiscoveryOptions, EngineDiscovery, Restarts
from waymark.domain.names import Origin
from waymark.store import keys
from waymark.store.store import Store

pytestmark = pytest.mark.outside

ENTRY: dict[str, Any] = {"type": "vLLM", "modelname": "m", "block_size": 16}


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.open(redis_url)
    yield store
    await store.close()


@asynccontextmanager
async def discovering(store: Store, file: Path | None = None, *, again_seconds: float = 3600) -> AsyncIterator[None]:
    allowed = AllowedEndpoints()
    read = None if file is None else partial(read_wanted, str(file), (), (5557, 5657, 1))
    options = DiscoveryOptions(
        "w", again_seconds, file=str(file), read_file=read, round_seconds=0.1, confirm_seconds=0.3
    )
    describer = Describer(Asker(), allowed, seconds=20)
    discovery = EngineDiscovery(store, Metrics(), options, describer)
    task = asyncio.ensure_future(discovery.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await describer.close()


async def by_url(store: Store, engine: Engine, **given: Any) -> None:
    """What ``POST /register {"url": ...}`` does."""
    describer = Describer(Asker(), AllowedEndpoints(), seconds=20)
    wanted = WantedEngine(Origin("url", engine.url), Draft(**given), engine.url)
    try:
        for each in await EngineRegistrations(describer).of(wanted):
            await store.registry.register(each)
    finally:
        await describer.close()


async def until(store: Store, what: str, *expected: tuple[Any, ...]) -> None:
    """The registrations are these: name, model, block size, endpoint."""
    found: list[tuple[Any, ...]] = []

    async def are_so() -> bool:
        found[:] = [
            (str(each.name), each.model_name, each.block_size, each.endpoint)
            for each in await store.directory.registrations()
        ]
        return sorted(found) == sorted(expected)

    await wait_until(are_so, lambda: f"{what}: {found}")


async def test_an_engine_that_comes_back_otherwise_is_registered_again(store: Store, engine: Engine) -> None:
    engine.is_vllm()
    await by_url(store, engine, instance_id="i", tenant_id="t", weight=2.0)
    await by_url(store, engine, instance_id="i", tenant_id="other")
    before = await store.directory.registrations()
    async with discovering(store):
        engine.is_vllm("no_replay", block_size=32)
        engine.answers["/v1/models"] = vllm_models("qwen", adapters=("sql",))
        now = [("qwen", 32, "tcp://127.0.0.1:5577")]
        await until(store, "one rank, another model", *((f"i|{t}|0", *each) for t in ("t", "other") for each in now))
        (first, *_) = [each for each in await store.directory.registrations() if each.tenant_id == "t"]
        assert (first.target.weight, first.target.adapters, first.origin) == (2.0, ("sql",), before[0].origin)
        engine.is_vllm()
        ranks = [("llama", 16, "tcp://127.0.0.1:5557"), ("llama", 16, "tcp://127.0.0.1:5558")]
        both = [(f"i|{t}|{r}", *each) for t in ("t", "other") for r, each in enumerate(ranks)]
        await until(store, "two ranks again", *both)


@pytest.mark.parametrize("comes_back", ["the same", "with another rank", "with another model"])
async def test_an_engine_that_is_unregistered_while_it_is_asked_stays_so(
    store: Store, engine: Engine, comes_back: str
) -> None:
    engine.is_vllm("no_replay")
    await by_url(store, engine, instance_id="i")
    await by_url(store, engine, instance_id="stays")
    if comes_back == "with another rank":
        engine.is_vllm()
    models = vllm_models("qwen" if comes_back == "with another model" else "llama")
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer_late(_: web.Request) -> web.StreamResponse:
        asked.set()
        await may_answer.wait()
        return web.json_response(models)

    engine.answers["/v1/models"] = answer_late
    async with discovering(store, again_seconds=0.0):
        await asked.wait()
        (name,) = [each.name for each in await store.directory.registrations() if each.instance_id == "i"]
        assert await store.registry.unregister([name]) == [name]
        engine.asked.clear()
        may_answer.set()
        await wait_until(lambda: engine.asked.count("/v1/models") >= 3, "two further rounds")
        assert {each.instance_id for each in await store.directory.registrations()} == {"stays"}


async def test_an_engine_that_does_not_answer_stays_registered(store: Store, engine: Engine) -> None:
    engine.is_vllm("no_replay")
    await by_url(store, engine, instance_id="i")
    async with discovering(store):
        engine.answers = {"/v1/models": 503}
        await until_said(store, "status 503")
        assert await names(store) == ["i|default|0"]


async def test_a_new_life_or_a_lost_stream_asks_the_engine_again(
    store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.is_vllm("no_replay")
    await by_url(store, engine, instance_id="i")
    (claim,) = await store.directory.claims()
    restarts = Restarts(store)

    async def found(status: str, life: str) -> bool:
        """Whether the engine counts as restarted, or as out of reach, after its stream reports this."""
        record = keys.record(claim.group_id, claim.publisher)
        await store.client.several([("HSET", record, "life", life, "status", status)])
        return await restarts.since_last("url") == {Origin("url", engine.url)}

    assert not await found("active", "a" * 16)
    assert not await found("degraded", "a" * 16)
    assert await found("active", "b" * 16)
    assert not await found("active", "b" * 16)

    def away(*_: Any) -> Any:
        raise StoreUnavailable("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(type(store.discovery), "lives", away)
        with pytest.raises(StoreUnavailable):
            await restarts.since_last("url")
    assert await found("active", "c" * 16), "it has restarted meanwhile"
    assert await found("lost", "c" * 16)
    assert await restarts.since_last("discovery") == set()


async def test_a_file_that_changes_is_followed(store: Store, engine: Engine, tmp_path: Path) -> None:
    engine.is_vllm("no_replay")
    file = tmp_path / "publishers.json"

    def write(*entries: dict[str, Any]) -> None:
        file.write_text(json.dumps(entries))

    def entry(i: int) -> dict[str, Any]:
        return ENTRY | {"instance_id": f"i{i}", "endpoint": f"tcp://127.0.0.1:{i + 1}"}

    by_hand = Draft(**ENTRY, instance_id="by-hand", endpoint="tcp://127.0.0.1:99").registration(AllowedEndpoints())
    await store.registry.register(by_hand)
    other_file = Origin("file", "/etc/other.json i9|default|0")
    await store.registry.register(replace(Draft(**entry(9)).registration(AllowedEndpoints()), origin=other_file))
    also = "i9|default|0"
    always = "by-hand|default|0"
    write(entry(0), entry(1), {"url": engine.url, "instance_id": "asked"})
    async with discovering(store, file):
        await until_named(store, always, also, "i0|default|0", "i1|default|0", "asked|default|0")
        write(entry(0), entry(2), {"url": engine.url, "instance_id": "asked"})
        await until_named(store, always, also, "i0|default|0", "i2|default|0", "asked|default|0")
        file.write_text("{")
        await until_said(store, "publishers.json")
        assert len(await names(store)) == 5, "a file that cannot be read unregisters nothing"
        file.unlink()
        await until_said(store, "No such file")
        assert len(await names(store)) == 5
        write(entry(2))
        await until_named(store, always, also, "i2|default|0")
        (mine,) = [each for each in await store.directory.registrations() if each.instance_id == "i2"]
        assert mine.origin == ("file", f"{file} i2|default|0")


async def test_a_file_may_name_an_engine_for_several_tenants(store: Store, engine: Engine, tmp_path: Path) -> None:
    engine.is_vllm("no_replay")
    file = tmp_path / "publishers.json"
    file.write_text(json.dumps([{"url": engine.url, "instance_id": "i", "tenant_id": tenant} for tenant in "abc"]))
    async with discovering(store, file):
        await until_named(store, "i|a|0", "i|b|0", "i|c|0")


async def test_llmds_list_of_endpoints_is_read(store: Store, engine: Engine, tmp_path: Path) -> None:
    engine.is_vllm("no_replay")
    file = tmp_path / "endpoints.yaml"
    host, port = engine.url.removeprefix("http://").split(":")
    file.write_text(
        f"""
endpoints:
  - name: vllm-0
    namespace: serving
    address: {host}
    port: "{port}"
    labels: {{llm-d.ai/role: decode}}
"""
    )
    async with discovering(store, file):
        await until_named(store, "serving/vllm-0|default|0")
        (found,) = await store.directory.registrations()
        assert (found.target.address, found.target.role) == (engine.url, "decode")
        assert found.target.labels == {"llm-d.ai/role": "decode"}


async def test_another_server_has_a_registration_for_each_model(store: Store, engine: Engine) -> None:
    engine.answers = {"/v1/models": vllm_models("llama3.2", "qwen3")}
    await by_url(store, engine)
    place = engine.url.removeprefix("http://")
    found = {each.instance_id: each for each in await store.directory.registrations()}
    assert {name: each.model_name for name, each in found.items()} == {
        f"{place}/llama3.2": "llama3.2",
        f"{place}/qwen3": "qwen3",
    }
    assert {(str(each.kind), each.block_size, each.target.address) for each in found.values()} == {
        ("none", 16, engine.url)
    }
    before = sorted(found)
    async with discovering(store, again_seconds=0.1):
        engine.asked.clear()
        await wait_until(lambda: engine.asked.count("/v1/models") >= 6, "it was asked again for both")
    assert sorted(each.instance_id for each in await store.directory.registrations()) == before


async def test_an_engine_without_sockets_is_followed_when_it_names_them(store: Store, engine: Engine) -> None:
    engine.is_vllm("no_replay", block_size=32)
    sources = engine.answers.pop("/kv_event_sources")
    with pytest.raises(InvalidValue, match="type") as caught:  # an engine that could have events needs a word more
        await by_url(store, engine, instance_id="i")
    assert caught.value.field == "endpoint"
    await by_url(store, engine, instance_id="i", type="none")
    (registered,) = await store.directory.registrations()
    assert (str(registered.kind), registered.block_size, registered.target.aliases) == ("none", 32, ("llama-alias",))
    async with discovering(store, again_seconds=0.1):
        engine.answers["/kv_event_sources"] = sources
        await until(store, "it is followed", ("i|default|0", "llama", 32, "tcp://127.0.0.1:5577"))


async def test_a_file_is_read_again_only_if_it_has_changed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a large one takes a worker's time. It is compared with the registrations all the same."""
    reads, rounds = 0, 0
    read, reconcile = read_wanted, Reconciler.reconcile

    def counted(*given: Any) -> list[WantedEngine]:
        nonlocal reads
        reads += 1
        return read(*given)

    async def counting(self: Reconciler, wanted: Sequence[WantedEngine], **given: Any) -> bool:
        nonlocal rounds
        rounds += bool(wanted)
        return await reconcile(self, wanted, **given)

    def write(name: str) -> None:
        entry = ENTRY | {"instance_id": name, "endpoint": "tcp://127.0.0.1:5557"}
        (tmp_path / "new").write_text(json.dumps([entry]))
        (tmp_path / "new").replace(file)

    monkeypatch.setattr(Reconciler, "reconcile", counting)
    monkeypatch.setattr("tests.discovery.test_sources.read_wanted", counted)
    file = tmp_path / "publishers.json"
    write("a")
    async with discovering(store, file):
        await wait_until(lambda: rounds >= 3, "three rounds")
        assert await names(store) == ["a|default|0"]
        assert reads == 1
        (name,) = [each.name for each in await store.directory.registrations()]
        await store.registry.unregister([name])
        await until_named(store, "a|default|0")
        write("b")
        await until_named(store, "b|default|0")
        assert reads == 2
