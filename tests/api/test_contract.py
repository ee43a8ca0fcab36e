"""The published contract is generated, whole, and says what the code does."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from app.api.schemas import QueryRequest, RegisterRequest

PATHS = {
    *("/query", "/query_by_hash", "/register", "/unregister", "/events", "/services", "/workers", "/global_view"),
    *("/health", "/ready", "/metrics", "/openapi.json", "/docs"),
    *("/dynamo/query", "/dynamo/query_by_hash", "/dynamo/register", "/dynamo/unregister", "/dynamo/workers"),
    *("/dynamo/dump", "/dynamo/health", "/dynamo/metrics"),
    *("/dynamo/register_peer", "/dynamo/deregister_peer", "/dynamo/peers"),
}


@pytest.fixture
async def document(api: httpx.AsyncClient) -> dict[str, Any]:
    answer = await api.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document: dict[str, Any] = answer.json()
    return document


async def test_every_path_is_there_once(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == PATHS
    assert all(len(methods) == 1 for methods in document["paths"].values())


async def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document["paths"]) + str(document["components"])))
    assert references == set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/query", "200 400 401 405 413 415 500 503"),
        ("/register", "200 400 401 405 409 413 415 500 503"),
        ("/unregister", "200 400 401 404 405 413 415 500 503"),
        ("/services", "200 401 405 500 503"),
        ("/health", "200 405 500"),
        ("/ready", "200 405 500 503"),
        ("/dynamo/query", "200 400 401 404 405 413 415 422 500 503"),
        ("/dynamo/register", "201 400 401 405 409 413 415 422 500 503"),
        ("/dynamo/register_peer", "201 400 401 405 413 415 422 500"),
    ],
)
async def test_statuses_are_complete(document: dict[str, Any], path: str, statuses: str) -> None:
    (operation,) = document["paths"][path].values()
    assert sorted(operation["responses"]) == statuses.split()


async def test_bodies_say_what_is_required_and_how_else_it_may_be_called(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for model in (QueryRequest, RegisterRequest):
        schema = schemas[model.__name__]
        required = {name for name, field in model.model_fields.items() if field.is_required()}
        assert set(schema["required"]) == required
        assert all("description" in field for field in schema["properties"].values())
    assert schemas["QueryRequest"]["properties"]["model"]["description"].endswith(
        "also accepted as model_name, modelname"
    )
    assert schemas["QueryRequest"]["properties"]["token_ids"]["items"]["maximum"] == 2**32 - 1
    assert schemas["RegisterRequest"]["properties"]["type"]["enum"] == ["vLLM", "SGLang", "Mooncake", "standard"]
    assert schemas["RegisterRequest"]["properties"]["block_size"]["maximum"] == 65536


async def test_page_reads_without_a_network(api: httpx.AsyncClient) -> None:
    answer = await api.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(f" {path}<" in answer.text for path in PATHS)
    assert not re.search(r"<script|https?://", answer.text)
