"""``POST /weight``: an engine gets no new requests, and nothing else of its registration changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.api.conftest import MakeClient
from tests.conftest import wait_until
from waymark.domain.names import Origin, OriginKind
from waymark.domain.targets import Target
from waymark.store.activity import ActivityKind
from waymark.store.claim_writer import ClaimWriter
from waymark.store.store import Store

#: What ``GET /services`` does not list, too.
PUBLISHER: dict[str, Any] = {
    "type": "vLLM", "modelname": "m", "instance_id": "a", "block_size": 16, "copies": "set",
    "medium_endpoints": {"gpu": "tcp://127.0.0.1:9", "cpu": "tcp://127.0.0.1:19"},
    "address": "http://10.0.0.1:8000", "role": "decode", "labels": {"rack": "r1"},
}  # fmt: skip


async def weights(store: Store) -> dict[str, float]:
    return {str(each.name): each.target.weight for each in await store.directory.registrations()}


async def test_only_the_weight_of_the_sockets_that_are_a_target_changes(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store)
    for rank in (0, 1):
        body = PUBLISHER | {
            "dp_rank": rank,
            "medium_endpoints": {"gpu": f"tcp://h:{rank + 9}", "cpu": f"tcp://h:{rank + 19}"},
        }
        assert (await client.post("/register", json=body)).status_code == 200
    before = await store.directory.registrations()
    assert [each.target.weight for each in before if each.is_further] == [0.0, 0.0]
    one = await client.post("/weight", json={"instance_id": "a", "dp_rank": 1, "weight": 0})
    assert one.json() == {"status": "weight changed", "weight": 0.0, "changed_instances": ["a|default|1"]}
    both = await client.post("/weight", json={"instance_id": "a", "weight": 0})
    assert both.json()["changed_instances"] == ["a|default|0", "a|default|1"]
    drained = [replace(each, target=replace(each.target, weight=0.0)) for each in before]
    assert await store.directory.registrations() == drained
    await client.post("/weight", json={"instance_id": "a", "weight": 1})
    assert await store.directory.registrations() == before


async def test_a_change_that_needs_a_second_attempt_is_noted_once(
    make_client: MakeClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may end the publisher between the claim and the look at its record."""
    client = await make_client(store)
    assert (await client.post("/register", json=PUBLISHER)).status_code == 200
    is_begun, noted = ClaimWriter.is_begun, []
    answers = iter([False])

    async def begun(self: Any, claim: Any) -> bool:
        return await is_begun(self, claim) and next(answers, True)

    monkeypatch.setattr(ClaimWriter, "is_begun", begun)
    monkeypatch.setattr(store.registry, "_note", lambda kind, **fields: noted.append((kind, fields["detail"])))
    assert (await client.post("/weight", json={"instance_id": "a", "weight": 0})).status_code == 200
    assert noted == [(ActivityKind.DRAIN, "weight 1, now 0")]


async def test_an_engine_that_is_not_registered_is_not_found(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store)
    for body in ({"instance_id": "a"}, {"instance_id": "a", "dp_rank": 3}, {"instance_id": "a", "tenant_id": "t"}):
        answer = await client.post("/weight", json=body | {"weight": 0})
        assert answer.status_code == 404
        assert "service not found: a|" in answer.json()["error"]


@pytest.mark.parametrize("weight", [None, -1, "0", 1e9])
async def test_a_weight_that_does_not_fit_is_refused_and_changes_nothing(
    make_client: MakeClient, store: Store, weight: Any
) -> None:
    client = await make_client(store)
    await client.post("/register", json=PUBLISHER)
    before = await weights(store)
    answer = await client.post("/weight", json={"instance_id": "a", "weight": weight})
    assert (answer.status_code, answer.json()["field"]) == (400, "weight")
    assert await weights(store) == before


@pytest.mark.parametrize(("kind", "where"), [("discovery", "annotations of its pod"), ("file", "file of publishers")])
async def test_a_weight_that_another_place_gives_is_not_changed_here(
    make_client: MakeClient, store: Store, kind: OriginKind, where: str
) -> None:
    client = await make_client(store)
    await client.post("/register", json=PUBLISHER | {"instance_id": "other"})
    (first, *_) = await store.directory.registrations()
    await store.registry.register(replace(first, instance_id="a", origin=Origin(kind, "ns/pod"), target=Target()))
    answer = await client.post("/weight", json={"instance_id": "a", "weight": 0})
    assert answer.status_code == 409
    assert where in answer.json()["error"]
    assert (await weights(store))["a|default|0"] == 1.0
    # An engine that a client has registered by its URL is the client's.
    await store.registry.register(replace(first, instance_id="b", origin=Origin("url", "http://b"), target=Target()))
    assert (await client.post("/weight", json={"instance_id": "b", "weight": 0})).status_code == 200


async def test_each_change_of_a_weight_is_among_what_has_happened(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store)
    engine = {"type": "none", "modelname": "m", "instance_id": "a", "block_size": 16, "address": "http://10.0.0.1:8000"}
    await client.post("/register", json=engine)
    for weight in (0, 0, 2, 1):
        assert (await client.post("/weight", json={"instance_id": "a", "weight": weight})).status_code == 200
    await client.post("/register", json=engine | {"weight": 0})
    await client.post("/register", json=engine | {"weight": 0})
    await client.post("/unregister", json={"instance_id": "a"})

    async def noted() -> list[tuple[str, str]]:
        found = [entry.content for entry in await store.activity.newest(100)]
        assert all((each["instance_id"], each["model"], each["dp_rank"]) == ("a", "m", 0) for each in found)
        return [(each["kind"], each.get("detail", "")) for each in found]

    expected = [
        ("registered", ""),
        ("drain", "weight 1, now 0"),
        ("resume", "weight 0, now 2"),
        ("weight", "weight 2, now 1"),
        ("drain", "weight 1, now 0"),
        ("unregistered", ""),
    ]

    async def are_all_noted() -> bool:
        return len(await noted()) >= len(expected)

    await wait_until(are_all_noted, "everything is noted")
    assert await noted() == expected
