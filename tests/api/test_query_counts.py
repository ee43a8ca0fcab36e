"""Queries are counted by what they found, under names of registered models only."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from waymark.base.metrics import Metrics
from waymark.store.store import Store

TOKENS = [1, 2, 3, 4]


async def register(client: httpx.AsyncClient, instance_id: str, model: str) -> None:
    body = {"type": "standard", "instance_id": instance_id, "modelname": model, "block_size": 2}
    answer = await client.post("/register", json=body)
    assert answer.status_code == 200, answer.text


async def hold_tokens(client: httpx.AsyncClient, instance_id: str) -> None:
    """Let an instance have the blocks of ``TOKENS``."""
    event = {"event_id": 1, "event_type": "stored", "backend_id": instance_id, "base_block_idx": 0}
    answer = await client.post("/events", json=event | {"seq_hashes": [1, 2], "token_ids": TOKENS})
    assert answer.json() == {"applied": 1, "stale": 0}


def counted(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Queries by model and result."""
    return {(model, result): series.value for (model, result), series in metrics.queries.series.items()}


@pytest.mark.parametrize(
    ("path", "body", "model", "result"),
    [
        ("/query", {"token_ids": TOKENS}, "m", "hit"),
        ("/query", {"token_ids": [*TOKENS[:2], 9, 9]}, "m", "hit"),
        ("/query", {"token_ids": [9, 9, *TOKENS]}, "m", "zero"),
        ("/query", {"token_ids": TOKENS, "block_size": 4}, "m", "zero"),
        ("/query", {"token_ids": TOKENS, "cache_salt": "s"}, "m", "zero"),
        ("/query", {"token_ids": TOKENS[:1]}, "m", "short"),
        ("/query", {"token_ids": TOKENS, "model": "invented"}, "none", "unknown_model"),
        ("/query", {"token_ids": TOKENS, "tenant_id": "invented"}, "none", "unknown_model"),
        ("/query_by_hash", {"seq_hashes": [7]}, "m", "zero"),
        ("/query_by_hash", {"seq_hashes": []}, "m", "short"),
    ],
)
async def test_a_query_is_counted_by_what_it_found(
    memory_store: Store, make_client: MakeClient, path: str, body: dict[str, Any], model: str, result: str
) -> None:
    metrics = Metrics()
    client = await make_client(memory_store, metrics=metrics)
    await register(client, "pod-1", "m")
    await hold_tokens(client, "pod-1")
    answer = await client.post(path, json={"model": "m", "block_size": 2} | body)
    assert answer.status_code == 200
    assert counted(metrics) == {(model, result): 1}
    assert "invented" not in metrics.render()[0].decode()


async def test_the_dynamo_api_is_counted_just_so(memory_store: Store, make_client: MakeClient) -> None:
    metrics = Metrics()
    client = await make_client(memory_store, metrics=metrics)
    await register(client, "1", "m")
    await hold_tokens(client, "1")
    for tokens in (TOKENS, [9, 9]):
        answer = await client.post("/dynamo/query", json={"model_name": "m", "token_ids": tokens})
        assert answer.status_code == 200
    assert counted(metrics) == {("m", "hit"): 1, ("m", "zero"): 1}


async def test_models_beyond_the_ceiling_are_counted_together(memory_store: Store, make_client: MakeClient) -> None:
    metrics = Metrics(models_max=1)
    client = await make_client(memory_store, metrics=metrics)
    for model in ("a", "b", "c"):
        await register(client, f"pod-{model}", model)
        await client.post("/query", json={"model": model, "block_size": 2, "token_ids": TOKENS})
    assert counted(metrics) == {("a", "zero"): 1, ("other", "zero"): 2}
