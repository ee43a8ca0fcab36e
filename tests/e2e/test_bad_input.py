"""What a client sends wrong is refused with a sentence that names the field, and changes nothing anywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.e2e.conftest import Service, starting
from tests.store.factories import snapshot

REGISTER: dict[str, Any] = {
    "endpoint": "tcp://10.0.0.1:5557",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "b",
    "block_size": 4,
}
QUERY: dict[str, Any] = {"model": "m", "token_ids": [1, 2, 3, 4], "block_size": 4}
BY_HASH: dict[str, Any] = {"model": "m", "seq_hashes": [1, 2], "block_size": 4}


@pytest.fixture(scope="module")
async def replica(redis_socket: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """Alone on its Redis, which knows one publisher: without a worker nothing else writes there."""
    url = f"unix://{redis_socket}"
    async with Redis.from_url(url, protocol=2) as redis:
        await redis.flushall()
    async with starting(tmp_path_factory.mktemp("replica")) as start:
        replica = await start("query", url)
        await replica.post("/register", **(REGISTER | {"instance_id": "a"}))
        yield replica


@pytest.mark.parametrize(
    ("path", "good", "field", "value", "reason"),
    [
        ("/register", REGISTER, "endpoint", "tcp://10.0.0.1", "invalid_value"),
        ("/register", REGISTER, "endpoint", "http://10.0.0.1:5557", "invalid_value"),
        ("/register", REGISTER, "endpoint", "tcp://10.0.0.1:70000", "invalid_value"),
        ("/register", REGISTER, "endpoint", None, "missing"),
        ("/register", REGISTER, "replay_endpoint", "tcp://10.0.0.1:", "invalid_value"),
        ("/register", REGISTER, "block_size", 0, "out_of_range"),
        ("/register", REGISTER, "block_size", -16, "out_of_range"),
        ("/register", REGISTER, "block_size", "16", "invalid_type"),
        ("/register", REGISTER, "block_size", 65537, "out_of_range"),
        ("/register", REGISTER, "type", "llama.cpp", "invalid_value"),
        ("/register", REGISTER, "dp_rank", -1, "out_of_range"),
        ("/register", REGISTER, "dp_rank", 1.5, "invalid_type"),
        ("/register", REGISTER, "instance_id", ["b"], "invalid_type"),
        ("/register", REGISTER, "modelname", 7, "invalid_type"),
        ("/register", REGISTER, "scope", "everybody", "invalid_value"),
        ("/unregister", {"instance_id": "a"}, "instance_id", 1, "invalid_type"),
        ("/unregister", {"instance_id": "a"}, "dp_rank", "0", "invalid_type"),
        ("/query", QUERY, "token_ids", [1, -2, 3, 4], "out_of_range"),
        ("/query", QUERY, "token_ids", [1, 2**32], "out_of_range"),
        ("/query", QUERY, "token_ids", [1, "2"], "invalid_type"),
        ("/query", QUERY, "token_ids", "1 2 3 4", "invalid_type"),
        ("/query", QUERY, "block_size", 0, "out_of_range"),
        ("/query", QUERY, "model", None, "missing"),
        ("/query", QUERY | {"lora_name": "x"}, "lora_id", 1, "invalid_value"),
        ("/query_by_hash", BY_HASH, "seq_hashes", [1, 2**64], "out_of_range"),
        ("/query_by_hash", BY_HASH, "seq_hashes", {"0": 1}, "invalid_type"),
        ("/query_by_hash", BY_HASH, "block_size", 1.0, "invalid_type"),
    ],
)
async def test_a_bad_value_is_refused_by_name_and_changes_nothing(
    replica: Service, redis_socket: Any, path: str, good: dict[str, Any], field: str, value: Any, reason: str
) -> None:
    async with Redis.from_url(f"unix://{redis_socket}", protocol=2) as redis:
        before = await snapshot(redis)
        assert before
        error = await replica.post(path, status=400, **(good | {field: value}))
        assert (error["field"], error["reason"]) == (field, reason), error
        assert field in error["error"]
        assert await snapshot(redis) == before


@pytest.mark.parametrize(
    ("path", "good", "field"),
    [
        (path, good, field)
        for path, good in (("/register", REGISTER), ("/query", QUERY), ("/query_by_hash", BY_HASH))
        for field in good
        if path == "/register" or field != "block_size"  # a query without it asks for the size that is registered
    ],
)
async def test_a_missing_field_is_named_and_changes_nothing(
    replica: Service, redis_socket: Any, path: str, good: dict[str, Any], field: str
) -> None:
    async with Redis.from_url(f"unix://{redis_socket}", protocol=2) as redis:
        before = await snapshot(redis)
        error = await replica.post(path, status=400, **{name: good[name] for name in good if name != field})
        assert (error["field"], error["reason"]) == (field, "missing")
        assert await snapshot(redis) == before


@pytest.mark.parametrize("path", ["/register", "/unregister", "/query", "/query_by_hash"])
@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b'{"model": "m"', b"\xff", b"[]", b"null", b'"text"'])
async def test_what_is_no_json_object_is_refused_and_changes_nothing(
    replica: Service, redis_socket: Any, path: str, body: bytes
) -> None:
    async with Redis.from_url(f"unix://{redis_socket}", protocol=2) as redis:
        before = await snapshot(redis)
        answer = await replica.send(path, body)
        assert answer.status_code == 400
        is_json = body in (b"[]", b"null", b'"text"')
        assert answer.json()["reason"] == ("invalid_type" if is_json else "invalid_json")
        assert await snapshot(redis) == before


async def test_too_many_tokens_are_refused_before_they_are_looked_at(replica: Service) -> None:
    tokens = b",".join([b"1"] * (2**21 + 1))
    answer = await replica.send("/query", b'{"model": "m", "block_size": 4, "token_ids": [%b]}' % tokens)
    assert (answer.status_code, answer.json()["reason"], answer.json()["field"]) == (413, "too_large", "token_ids")


async def test_another_registration_under_the_same_name_is_a_conflict_and_changes_nothing(
    replica: Service, redis_socket: Any
) -> None:
    async with Redis.from_url(f"unix://{redis_socket}", protocol=2) as redis:
        before = await snapshot(redis)
        for field, value in (("block_size", 8), ("modelname", "n"), ("type", "SGLang"), ("lora_name", "x")):
            body = json.dumps(REGISTER | {"instance_id": "a", field: value}).encode()
            answer = await replica.send("/register", body)
            assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
            assert field in answer.json()["error"]
            assert await snapshot(redis) == before
