"""Every field of every body, as the contract names them, with values that no client should send: never a 500."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx
import msgpack
import pytest

from tests.api.test_tokens import BODIES

pytestmark = pytest.mark.slow


def nested(depth: int, *, in_objects: bool = False) -> Any:
    """A number in so many lists or objects; orjson writes 254 of them, and reads 1,024."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if in_objects else [value]
    return value


ODD = [
    nested(254), nested(255), nested(500), nested(255, in_objects=True), [{"a": nested(255)}],
    float("nan"), {"x": float("inf")}, 2**64 - 1, b"\xff" * 9, msgpack.ExtType(5, b"x"), msgpack.Timestamp(0, 0),
    "x" * 100_000, ["\x00"], None,
]  # fmt: skip


def names(contract: dict[str, Any], schema: dict[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """The fields of a body."""
    reference = schema.get("$ref", "").rpartition("/")[2]
    if reference:
        known = contract["components"]["schemas"][reference]
        return set() if reference in seen else names(contract, known, seen | {reference})
    inner = [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
    return set(schema.get("properties", {})).union(*(names(contract, each, seen) for each in inner))


def content(body: dict[str, Any], *, is_json: bool) -> tuple[str, bytes]:
    """The body, and its format: JSON if that is asked for and has such a value."""
    if is_json:
        with suppress(TypeError, ValueError):
            return "application/json", json.dumps(body, allow_nan=False).encode()
    return "application/msgpack", msgpack.packb(body)


@pytest.mark.long
async def test_no_value_of_any_field_is_a_500(api: httpx.AsyncClient) -> None:
    contract = (await api.get("/openapi.json")).json()
    asked = 0
    for path, operations in contract["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation:
                continue
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = BODIES.get((method.upper(), path), {})
            body = body if isinstance(body, dict) else {}
            url = path.replace("{worker_id}", "1").replace("{reservation_id}", "1.1.3.3.5f0c2a9e11d04b7c")
            for name in sorted(names(contract, schema) | {"unknown"}):
                for value in ODD[asked % 2 :: 2]:
                    asked += 1
                    # Each field and each value comes in both formats: names and types are those of several paths.
                    media_type, sent = content(body | {name: value}, is_json=asked // 2 % 2 == 0)
                    answer = await api.request(method, url, content=sent, headers={"content-type": media_type})
                    about = f"{method} {path} {name} {media_type} {str(value)[:40]}: {answer.text[:200]}"
                    assert answer.status_code < 500 or answer.status_code == 503, about
                    if answer.status_code >= 400:
                        assert answer.json() if media_type.endswith("json") else msgpack.unpackb(answer.content)
    assert asked > 1500
