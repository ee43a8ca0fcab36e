"""``"by": "address"``: rows named by where requests go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.api.conftest import Hold
from waymark.domain.hashing import extend, token_bytes

TOKENS = [101, 15, 100, 55, 89, 63]
A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"

Register = Callable[..., Awaitable[None]]


async def ask(client: httpx.AsyncClient, path: str = "/query", **fields: Any) -> Any:
    body = {"model": "m", "block_size": 2, "by": "address", "token_ids": TOKENS} | fields
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_rows_are_named_by_the_address(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a", address=A)
    await register("b", address=B)
    await register("without")
    await register("pool", type="Mooncake", address="http://pool:1")
    await hold("a", TOKENS, blocks=[0])
    await hold("without", TOKENS)
    await hold("pool", TOKENS, medium="CPU", blocks=[1])
    by_instance = (await ask(client, by="instance"))["default"]
    by_address = (await ask(client))["default"]
    assert by_address == {A: by_instance["a"], B: by_instance["b"]}
    assert by_address[A]["longest_matched"] == 4
    by_hash = await ask(client, "/query_by_hash", token_ids=None, seq_hashes=extend(None, token_bytes(TOKENS), 2))
    assert by_hash["default"] == by_address
    assert (await ask(client, instance_id=A))["default"] == {A: by_instance["a"]}


async def test_ranks_with_addresses_of_their_own_are_told_apart(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a", address=A)
    await register("a", address=B, dp_rank=1)
    await hold("a", TOKENS)
    await hold("a", TOKENS, rank=1, blocks=[0])
    rows = (await ask(client))["default"]
    assert {name: (row["longest_matched"], row["DP"]) for name, row in rows.items()} == {
        A: (6, {"0": 6}),
        B: (2, {"1": 2}),
    }


async def test_an_engine_that_moves_is_found_at_its_new_address(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    await register("a", address=A)
    await hold("a", TOKENS)
    assert (await ask(client))["default"].keys() == {A}
    await register("a", address=B)
    await hold("a", TOKENS)
    assert (await ask(client))["default"].keys() == {B}


async def test_decisions_answer_by_address_too(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    for name, address in (("a", A), ("b", B)):
        await register(name, address=address)
    await hold("b", TOKENS)
    scores = (await ask(client, "/score"))["scores"]
    assert [row["address"] for row in scores] == [B, A]
    answer = await ask(client, "/select", reserve=False, count=2)
    assert (answer["target"]["address"], answer["others"]) == (B, [A])


async def test_a_wrong_value_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": TOKENS, "by": "port"})
    assert (answer.status_code, answer.json()["field"]) == (400, "by")
