"""``POST /register`` again, with another address, role, label, weight or metrics URL: the same life goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold
from tests.conftest import wait_until
from waymark.domain.names import GroupName
from waymark.store.store import Store

TOKENS = list(range(1, 9))
ENGINE: dict[str, Any] = {
    "type": "vLLM", "modelname": "m", "instance_id": "a", "block_size": 2, "endpoint": "tcp://10.0.0.1:5557",
    "address": "http://10.0.0.1:8000", "role": "both", "labels": {"zone": "a"}, "weight": 1,
    "metrics_url": "http://10.0.0.1:9000/metrics",
}  # fmt: skip
SILENT = {name: value for name, value in ENGINE.items() if name != "endpoint"} | {"type": "none"}
CHANGES: list[tuple[str, Any]] = [
    ("address", "http://10.0.0.9:8000"),
    ("role", "decode"),
    ("labels", {"zone": "b"}),
    ("weight", 2.0),
    ("weight", 0.0),
    ("metrics_url", "http://10.0.0.1:9001/metrics"),
]


async def life(store: Store) -> tuple[Any, ...]:
    """What a new life would change: the ids of the publisher and of its holders, and where its stream is."""
    (claim,) = await store.directory.claims()
    table = await store.reader.table(GroupName("default", "m"))
    assert table is not None
    return claim.publisher, claim.group_id, claim.registration.endpoint, table.incarnation, dict(table.holders)


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("engine", [ENGINE, SILENT], ids=["vllm", "none"])
async def test_a_target_changes_in_place(
    client: httpx.AsyncClient, store: Store, hold: Hold, engine: dict[str, Any], field: str, value: Any
) -> None:
    async def register(**changed: Any) -> httpx.Response:
        return await client.post("/register", json=engine | changed)

    async def held() -> Any:
        return (await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": TOKENS})).json()

    assert (await register()).status_code == 200
    if engine is ENGINE:
        await hold("a", TOKENS)
    (before,), was, had = await store.directory.registrations(), await life(store), await held()
    assert had["default"]["a"]["longest_matched"] == (8 if engine is ENGINE else 0)
    assert (await register(**{field: value})).status_code == 200
    (after,) = await store.directory.registrations()
    assert getattr(after.target, field) == value
    others = [name for name, _ in CHANGES if name != field]
    assert [getattr(after.target, name) for name in others] == [getattr(before.target, name) for name in others]
    assert (await life(store), await held()) == (was, had)

    async def decides_by_it() -> bool:
        rows = (await client.post("/score", json={"model": "m", "token_ids": TOKENS})).json()["scores"]
        if (field, value) == ("weight", 0.0):
            return rows == []
        return [row["address"] for row in rows] == [after.target.address]

    await wait_until(decides_by_it, f"decisions go by {field} {value}")
