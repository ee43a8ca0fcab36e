"""``model`` of a decision may be an alias of a model, or one of its adapters, over an emulated and a real Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.api.test_decisions import PROMPT, Register, post, scores
from tests.conftest import wait_until
from tests.factories import registration
from tests.tokenization.small import directory
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.domain.targets import Target
from waymark.store.store import Store


async def register(
    store: Store, instance_id: str, *, adapters: tuple[str, ...] = (), aliases: tuple[str, ...] = (), **fields: Any
) -> None:
    """As ``POST /register`` with a URL does, for an engine that has told these names."""
    target = Target(f"http://{instance_id}:8000", adapters=adapters, aliases=aliases)
    await store.registry.register(replace(registration(instance_id=instance_id, block_size=2), target=target, **fields))


async def test_an_alias_is_the_model_and_an_adapter_has_blocks_of_its_own(
    store: Store, client: httpx.AsyncClient, hold: Hold
) -> None:
    for name in ("pod-1", "pod-2"):
        await register(store, name, adapters=("sql",), aliases=("meta-llama/m",))
    await hold("pod-1", PROMPT)
    await hold("pod-2", PROMPT[:10], adapter="sql")
    of_model, by_alias, of_adapter = [await scores(client, model=name) for name in ("m", "meta-llama/m", "sql")]
    assert by_alias == of_model
    assert {name: row["device_tokens"] for name, row in of_model.items()} == {"pod-1": 40, "pod-2": 0}
    assert {name: row["device_tokens"] for name, row in of_adapter.items()} == {"pod-1": 0, "pod-2": 10}
    assert await scores(client, lora_name="sql") == of_adapter
    assert await scores(client, model="sql", lora_name="sql") == of_adapter
    assert await scores(client, model="meta-llama/m", lora_name="sql") == of_adapter
    taken = await post(client, "/select", model="sql")
    assert taken["target"]["instance_id"] == "pod-2"
    assert (await scores(client))["pod-2"]["active_requests"] == 1, "the load is that of the engine, whatever it runs"


async def test_an_unknown_name_is_asked_for_within_the_deadline_of_a_query(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make_client(memory_store, query_deadline_ms=60_000)
    table, deadlines = memory_store.reader.table, list[float | None]()

    async def noted(group: GroupName, *, deadline_seconds: float | None = None) -> HolderTable | None:
        deadlines.append(deadline_seconds)
        return await table(group, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(memory_store.reader, "table", noted)
    await post(client, "/select", 404, model="nobody")
    assert deadlines[0] == 60.0


async def test_only_engines_that_serve_the_name_are_candidates(store: Store, client: httpx.AsyncClient) -> None:
    await register(store, "pod-1", adapters=("sql",))
    await register(store, "pod-2", aliases=("other",))
    assert set(await scores(client, model="m")) == {"pod-1", "pod-2"}
    assert set(await scores(client, model="sql")) == {"pod-1"}
    assert set(await scores(client, model="other")) == {"pod-2"}
    assert {(await post(client, "/select", model="sql"))["target"]["instance_id"] for _ in range(4)} == {"pod-1"}
    for policy in ("sticky", "lmetric"):
        found = await post(client, "/select", model="other", policy=policy)
        assert found["target"]["instance_id"] == "pod-2"
    assert set(await scores(client, model="sql", candidates=[{"instance_id": "pod-2"}])) == {"pod-2"}


async def test_an_engine_that_is_registered_for_an_adapter_serves_its_name(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("pod-1", lora_name="sql")
    await hold("pod-1", PROMPT, adapter="sql")
    assert (await scores(client, model="sql"))["pod-1"]["device_tokens"] == 40


@pytest.mark.slow
async def test_names_come_and_go_with_registrations(store: Store, client: httpx.AsyncClient) -> None:
    assert await scores(client, model="sql") == {}
    await register(store, "pod-1", adapters=("sql",))
    await register(store, "pod-2")

    async def are(model: str, *names: str) -> None:
        async def is_so() -> bool:
            return set(await scores(client, model=model)) == set(names)

        await wait_until(is_so, f"{model} is served by {names}")

    await are("sql", "pod-1")
    await register(store, "pod-2", adapters=("sql",))
    await are("sql", "pod-1", "pod-2")
    await register(store, "pod-1", adapters=("summary",))
    await are("summary", "pod-1")
    await are("sql", "pod-2")
    await register(store, "pod-3", model_name="sql")
    await are("sql", "pod-3")
    assert set(await scores(client, model="m")) == {"pod-1", "pod-2"}
    assert await scores(client, model="sql", tenant_id="other") == {}


@pytest.mark.parametrize("path", ["/score", "/select"])
async def test_a_name_of_two_models_or_two_adapters_is_refused(
    store: Store, client: httpx.AsyncClient, path: str
) -> None:
    await register(store, "pod-1", adapters=("sql", "summary"), model_name="a")
    await register(store, "pod-2", adapters=("sql",), model_name="b")
    refused = await post(client, path, 400, model="sql")
    assert refused["field"] == "model"
    assert '"a", "b"' in refused["error"]
    assert set(await scores(client, model="a", lora_name="sql")) == {"pod-1"}
    refused = await post(client, path, 400, model="summary", lora_name="sql")
    assert refused["field"] == "model"
    assert '"sql"' in refused["error"]
    for model in ("a", "b"):
        assert [row["active_requests"] for row in (await scores(client, model=model)).values()] == [0]


@pytest.mark.outside
async def test_text_for_an_adapter_is_made_tokens_of_by_its_model(
    store: Store, make_client: MakeClient, tmp_path: Any
) -> None:
    directory(tmp_path / "m")
    with_text = await make_client(store, tokenizers_dir=str(tmp_path))
    await register(store, "pod-1", adapters=("sql",))
    by_model = await post(with_text, "/score", token_ids=..., prompt="hello, world", lora_name="sql")
    assert await post(with_text, "/score", token_ids=..., prompt="hello, world", model="sql") == by_model
    assert by_model["total_tokens"] > 0
