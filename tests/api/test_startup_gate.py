"""The startup gate: not ready and no decision before so many engines are registered; everything else answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.conftest import wait_until
from waymark.base.settings import Settings
from waymark.store.store import Store

SELECT = {"model": "m", "token_ids": [1, 2], "reserve": False}


async def register(client: httpx.AsyncClient, instance_id: str, **fields: Any) -> None:
    body = {"instance_id": instance_id, "type": "none", "modelname": "m", "block_size": 2} | fields
    assert (await client.post("/register", json=body)).status_code == 200


@pytest.mark.slow
async def test_the_gate_opens_once_and_stays_open(make_client: MakeClient, store: Store) -> None:
    client = await make_client(store, min_initial_workers=2)
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()) == (
        503,
        {"error": "not ready: waiting for workers: 0 of 2", "reason": "starting"},
    )
    await register(client, "a")
    await register(client, "a", dp_rank=1)  # another rank is no other instance
    await register(client, "pool", type="standard", scope="shared")

    async def says(text: str) -> bool:
        return text in (await client.get("/ready")).text

    await wait_until(lambda: says("1 of 2"), "the gate counts one instance")
    refused = await client.post("/select", json=SELECT)
    assert (refused.status_code, refused.json()["reason"]) == (503, "starting")
    assert "WAYMARK_MIN_INITIAL_WORKERS" in refused.json()["error"]
    assert refused.headers["Retry-After"] == "1"
    for path, body in (("/query", SELECT | {"block_size": 2}), ("/score", SELECT)):
        assert (await client.post(path, json=body)).status_code == 200
    assert (await client.get("/health")).status_code == 200

    await register(client, "b")

    async def is_ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await wait_until(is_ready, "the gate is open")
    assert (await client.post("/select", json=SELECT)).status_code == 200
    await client.post("/unregister", json={"instance_id": "a"})
    assert (await client.get("/ready")).status_code == 200
    assert (await client.post("/select", json=SELECT)).status_code == 200
    # Another process counts for itself.
    assert (await (await make_client(store, min_initial_workers=2)).get("/ready")).status_code == 503


async def test_a_body_that_does_not_fit_is_told_first(make_client: MakeClient, memory_store: Store) -> None:
    client = await make_client(memory_store, min_initial_workers=1)
    assert (await client.post("/select", json={})).status_code == 400


async def test_a_gate_that_was_never_open_stays_closed_without_redis(make_client: MakeClient, away: Store) -> None:
    client = await make_client(away, min_initial_workers=1)
    refused = await client.post("/select", json=SELECT)
    assert (refused.status_code, refused.json()["reason"]) == (503, "starting")


@pytest.mark.parametrize(
    ("environ", "minimum"),
    [
        ({}, 0),
        ({"DYN_ROUTER_MIN_INITIAL_WORKERS": "3"}, 3),
        ({"DYN_ROUTER_MIN_INITIAL_WORKERS": "3", "WAYMARK_MIN_INITIAL_WORKERS": "1"}, 1),
        ({"DYN_ROUTER_MIN_INITIAL_WORKERS": "3", "WAYMARK_MIN_INITIAL_WORKERS": ""}, 3),
    ],
)
def test_the_name_that_dynamo_uses_counts_where_ours_is_unset(environ: dict[str, str], minimum: int) -> None:
    assert Settings.from_env(environ).min_initial_workers == minimum
